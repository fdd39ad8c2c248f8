"""`python -m scripts.structure`, a part of `make lint`: check the length of parameter lists and the names of modules.

A function takes at most MAX_ARGUMENTS besides `self`. A constructor takes at most MAX_FIELDS, and a mutable dataclass
has at most MAX_FIELDS. A longer list means that an object is missing. A frozen dataclass may have any number of fields.

Each package has a budget of lines of code. Blank lines, comments and docstrings do not count, so that nobody shortens
them to stay within the budget. A decision record in docs/decisions/ gives the reason for each increase.

Two modules may only have the same name if they have the same subject: as a record in `run`, as a part of the page in
`report`, or as a subcommand in `submitter/commands`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_ARGUMENTS, MAX_FIELDS = 5, 8

ALLOWED = {
    "sunspot/client.py:submit": 9,  # notebook users pass these by name
    "scripts/failures/result.py:Result": 9,
}
"""Lists that are longer than allowed. Shorten them, and remove them here."""

BUDGETS = {
    ".": 1200,
    "adapters": 790,
    "baseline": 90,
    "checkpoint": 2610,
    "data": 4070,
    "elastic": 2970,
    "machine": 250,
    "observe": 480,
    "parallel": 1060,
    "places": 140,
    "predict": 840,
    "ray_internals": 440,
    "ray_session": 180,
    "report": 1340,
    "run": 3370,
    "settings": 820,
    "storage": 1630,
    "submitter": 980,
    "submitter/cluster": 3491,
    "submitter/commands": 1830,
    "submitter/doctor": 1600,
    "submitter/manifest": 1790,
    "tasks": 1150,
    "templates": 90,
    "tracking": 740,
    "train": 4490,
    "tune": 560,
    "ui": 850,
}
"""The most lines of code that each package of `sunspot` may have. The modules directly in `sunspot` count as `.`."""

SAME_SUBJECT = ("run/", "report/", "submitter/commands/", "submitter/commands/checkpoints/")

REPEATED = {
    *("failures", "images", "metrics", "mnist", "nodes"),
    *("profile", "render", "search", "train"),
}
"""Names that two modules still share."""


def main() -> int:
    """Print the faults, and return 1 if there are any."""
    root = Path(__file__).parents[1]
    files = [*sorted((root / "app/sunspot").rglob("*.py")), *sorted((root / "scripts").rglob("*.py"))]
    found = [each for file in files for each in find_long(file, file.relative_to(root).as_posix().removeprefix("app/"))]
    long = {name: (number, most) for name, number, most in found}
    repeated = find_repeated(root / "app/sunspot")
    faults = [
        f"{name}: has {number} parameters or fields, and at most {ALLOWED.get(name, most)} are allowed"
        for name, (number, most) in long.items()
        if number > ALLOWED.get(name, most)
    ]
    faults += [
        f"{name}.py: several modules have this name: {', '.join(places)}"
        for name, places in repeated.items()
        if name not in REPEATED
    ]
    sizes = count_lines(root / "app/sunspot")
    faults += [
        f"{name}: has {size} lines of code, and its budget is {BUDGETS.get(name, 0)}"
        for name, size in sizes.items()
        if size > BUDGETS.get(name, 0)
    ]
    done = [name for name, number in ALLOWED.items() if long.get(name, (0, 0))[0] < number]
    done += [name for name in REPEATED if name not in repeated]
    for text in faults:
        print(text)
    if done:
        print(f"{Path(__file__).name}: remove these exceptions, which are no longer needed: {', '.join(sorted(done))}")
    return 1 if faults else 0


def find_long(file: Path, where: str) -> Iterator[tuple[str, int, int]]:
    """Yield the functions and classes with too many parameters or fields: the name, the number, and the limit."""

    def look(node: ast.AST, inside: str, is_class: bool) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            name = inside
            number = 0
            most = MAX_FIELDS
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}" if inside else child.name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                bound = is_class and "staticmethod" not in map(ast.unparse, child.decorator_list)
                number = len([*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]) - bound
                most = MAX_FIELDS if child.name == "__init__" else MAX_ARGUMENTS
            elif isinstance(child, ast.ClassDef):
                number = count_fields(child)
            if number > most:
                yield f"{where}:{name}", number, most
            yield from look(child, name, isinstance(child, ast.ClassDef))

    return look(ast.parse(file.read_text()), "", False)


def count_fields(node: ast.ClassDef) -> int:
    """Return the number of fields that a mutable dataclass's constructor takes, or 0 for other classes."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if not any(each.startswith("dataclass") and "frozen=True" not in each for each in decorators):
        return 0
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    return sum("ClassVar[" not in each and "init=False" not in each for each in fields)


def count_lines(package: Path) -> dict[str, int]:
    """Return the lines of code in each package directly in `package`, and in each package of the submitter."""
    sizes = defaultdict[str, int](int)
    for file in package.rglob("*.py"):
        folder = file.relative_to(package).parent
        sizes["/".join(folder.parts[: 2 if folder.parts[:1] == ("submitter",) else 1]) or "."] += count_code(
            file.read_text()
        )
    return dict(sorted(sizes.items()))


def count_code(source: str) -> int:
    """Return the number of lines that are not blank, not only a comment, and not part of a docstring.

    A string that stands alone, such as the description of a field, counts as a docstring.
    """
    prose = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(
        number not in prose and not line.lstrip().startswith("#") and line.strip() != "" for number, line in lines
    )


def find_repeated(package: Path) -> dict[str, list[str]]:
    """Return the names that several modules with different subjects have, each with the modules' folders."""
    places = defaultdict[str, list[str]](list)
    for file in sorted(package.rglob("[!_]*.py")):
        places[file.stem].append(file.parent.relative_to(package).as_posix() + "/")
    return {name: found for name, found in places.items() if len(found) > 1 and not set(found) <= set(SAME_SUBJECT)}


if __name__ == "__main__":
    sys.exit(main())
