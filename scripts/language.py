"""`python -m scripts.language`, a part of `make lint`: reject patterns of English and Python that are hard to read.

CONTRIBUTING.md explains the rules. A pattern is in this module only if it is easy to find and never good style.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

OPENINGS = {
    *("And", "As", "At", "Because", "By", "For", "From", "How", "If", "In", "None", "Of", "On", "Say", "So", "Tell"),
    *("That", "Those", "To", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "With"),
}
"""First words of docstrings that lack a subject or a verb."""

PHRASES = {
    r"\banew\b": "again",
    r"\blest\b": "so that … not",
    r"\blikewise\b": "also",
    r"\bany more\b": "no longer",
    r"Python's lock": "the GIL",
    r"; None[:,]": "a sentence: Return None if …",
    r"\bhowever long\b": "until",
    r"\bwhoever\b": "the noun",
    r"\bby HTTP\b": "over HTTP",
    r"\bthere is none\b": "the noun",
}
"""Phrases that read as translated, and the words to use instead."""

MAX_TARGETS = 2
"""Largest number of names that an assignment may set from a tuple of values."""

EXEMPT = ("scripts/language.py", "tests/unit/test_language.py")
"""Files that quote the rejected patterns."""

Fault = tuple[int, str]
"""A line number and the fault in that line."""


def main() -> int:
    """Print the faults in the given files or folders, by default in the repository. Return 1 if there are any."""
    places = [Path(name) for name in sys.argv[1:]] or [ROOT / name for name in ("app", "scripts", "tests", "docs")]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    found = False
    for file in files:
        if file.suffix in (".py", ".md") and not file.resolve().as_posix().endswith(EXEMPT):
            for line, text in sorted(find_faults(file.read_text(encoding="utf-8"), file.suffix == ".py")):
                print(f"{file}:{line}: {text}")
                found = True
    return int(found)


def find_faults(text: str, is_python: bool) -> Iterator[Fault]:
    """Yield the faults in a Python or Markdown file."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in PHRASES.items():
            match = re.search(pattern, line)
            if match:
                yield number, f'"{match[0]}": write {better}'
    if is_python:
        tree = ast.parse(text)
        yield from find_openings(tree)
        yield from find_packed_assignments(tree)
        yield from find_assignment_expressions(tree)


def find_openings(tree: ast.Module) -> Iterator[Fault]:
    """Yield docstrings that begin with a word in OPENINGS, including those of constants and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                    word = text.split()[0].strip(",:;")
                    if word in OPENINGS:
                        yield (
                            statement.lineno,
                            f'docstring begins with "{word}": name its subject, or begin with a verb',
                        )


def find_packed_assignments(tree: ast.Module) -> Iterator[Fault]:
    """Yield assignments such as `a, b, c = x, y, z`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) > MAX_TARGETS:
                    yield node.lineno, f"sets {len(target.elts)} names at once: write a line for each"


def find_assignment_expressions(tree: ast.Module) -> Iterator[Fault]:
    """Yield assignment expressions outside comprehensions and the conditions of `while`."""
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            allowed.update(ast.walk(node))
        elif isinstance(node, ast.While):
            allowed.update(ast.walk(node.test))
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr) and node not in allowed:
            yield node.lineno, f"`{ast.unparse(node)}`: assign on a line of its own"


if __name__ == "__main__":
    sys.exit(main())
