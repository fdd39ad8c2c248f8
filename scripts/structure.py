"""`python -m scripts.structure`, a part of `make lint`: parameter lists are short, and no two modules have one name.

A function takes at most MAX_ARGUMENTS besides `self`, a constructor MAX_FIELDS, and so many fields has a dataclass that
changes: more means that an object is missing. A record that never changes may have as many as what it describes.

A module's name may come again where its subject does: in `run` as a record, in `report` as a part of the page, in
`submitter/commands` as a verb.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_ARGUMENTS, MAX_FIELDS = 5, 8

ALLOWED = {
    "sunspot/client.py:submit": 9,  # what a notebook's user gives, by name
    "scripts/failures/result.py:Result": 9,
}
"""Longer lists than the rest of the code may have: shorten them, and take them out of here."""

SAME_SUBJECT = ("run/", "report/", "submitter/commands/", "submitter/commands/checkpoints/")

REPEATED = {
    *("failures", "images", "metrics", "mnist", "nodes"),
    *("render", "search", "settings", "train"),
}
"""Names that two modules still have."""


def main() -> int:
    """Print what is too long or repeats; 1 if there is any."""
    root = Path(__file__).parents[1]
    files = [*sorted((root / "app/sunspot").rglob("*.py")), *sorted((root / "scripts").rglob("*.py"))]
    found = [each for file in files for each in find_long(file, file.relative_to(root).as_posix().removeprefix("app/"))]
    long = {name: (number, most) for name, number, most in found}
    repeated = find_repeated(root / "app/sunspot")
    faults = [
        f"{name}: takes {number}, of at most {ALLOWED.get(name, most)}"
        for name, (number, most) in long.items()
        if number > ALLOWED.get(name, most)
    ]
    faults += [f"{name}.py: {', '.join(places)}" for name, places in repeated.items() if name not in REPEATED]
    done = [name for name, number in ALLOWED.items() if long.get(name, (0, 0))[0] < number]
    done += [name for name in REPEATED if name not in repeated]
    for text in faults:
        print(text)
    if done:
        print(f"shorter than {Path(__file__).name} allows, or alone by now: {', '.join(sorted(done))}")
    return 1 if faults else 0


def find_long(file: Path, where: str) -> Iterator[tuple[str, int, int]]:
    """Functions and classes with too many parameters or fields: the name, how many, and how many there may be."""

    def look(node: ast.AST, inside: str, is_class: bool) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            name, number, most = inside, 0, MAX_FIELDS
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
    """The fields that the constructor of a dataclass takes; 0 for other classes, and for one that never changes."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if not any(each.startswith("dataclass") and "frozen=True" not in each for each in decorators):
        return 0
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    return sum("ClassVar[" not in each and "init=False" not in each for each in fields)


def find_repeated(package: Path) -> dict[str, list[str]]:
    """Names of several modules that do not have one subject, with where they are."""
    places = defaultdict[str, list[str]](list)
    for file in sorted(package.rglob("[!_]*.py")):
        places[file.stem].append(file.parent.relative_to(package).as_posix() + "/")
    return {name: found for name, found in places.items() if len(found) > 1 and not set(found) <= set(SAME_SUBJECT)}


if __name__ == "__main__":
    sys.exit(main())
