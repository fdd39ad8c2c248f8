"""`python -m scripts.structure`, a part of `make lint`: check the length of parameter lists and the names of modules.

A function takes at most MAX_ARGUMENTS besides `self`. A constructor takes at most MAX_FIELDS, and a mutable dataclass
has at most MAX_FIELDS. A longer list means that an object is missing. A frozen dataclass may have any number of fields.

Each package has a budget of lines. A decision record in docs/decisions/ gives the reason for each increase.

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
    ".": 1830,
    "adapters": 1190,
    "baseline": 140,
    "checkpoint": 3630,
    "data": 5010,
    "elastic": 3740,
    "machine": 360,
    "observe": 715,
    "parallel": 1250,
    "predict": 1190,
    "ray_internals": 780,
    "ray_session": 280,
    "report": 1890,
    "run": 4860,
    "settings": 1000,
    "storage": 2420,
    "submitter": 1420,
    "submitter/cluster": 3940,
    "submitter/commands": 2000,
    "submitter/doctor": 2090,
    "submitter/manifest": 2420,
    "tasks": 1690,
    "templates": 140,
    "tracking": 1020,
    "train": 5620,
    "tune": 790,
    "ui": 1260,
}
"""The most lines that each package of `sunspot` may have. The modules directly in `sunspot` count as `.`."""

SAME_SUBJECT = ("run/", "report/", "submitter/commands/", "submitter/commands/checkpoints/")

REPEATED = {
    *("failures", "images", "metrics", "mnist", "nodes"),
    *("render", "search", "train"),
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
        f"{name}: takes {number}, of at most {ALLOWED.get(name, most)}"
        for name, (number, most) in long.items()
        if number > ALLOWED.get(name, most)
    ]
    faults += [f"{name}.py: {', '.join(places)}" for name, places in repeated.items() if name not in REPEATED]
    sizes = count_lines(root / "app/sunspot")
    faults += [
        f"{name}: has {size} lines, and its budget is {BUDGETS.get(name, 0)}"
        for name, size in sizes.items()
        if size > BUDGETS.get(name, 0)
    ]
    done = [name for name, number in ALLOWED.items() if long.get(name, (0, 0))[0] < number]
    done += [name for name in REPEATED if name not in repeated]
    for text in faults:
        print(text)
    if done:
        print(f"no longer needed as exceptions in {Path(__file__).name}: {', '.join(sorted(done))}")
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
    """Return the number of lines of each package directly in `package`, and of each package of the submitter."""
    sizes = defaultdict[str, int](int)
    for file in package.rglob("*.py"):
        folder = file.relative_to(package).parent
        sizes["/".join(folder.parts[: 2 if folder.parts[:1] == ("submitter",) else 1]) or "."] += len(
            file.read_text().splitlines()
        )
    return dict(sorted(sizes.items()))


def find_repeated(package: Path) -> dict[str, list[str]]:
    """Return the names that several modules with different subjects have, each with the modules' folders."""
    places = defaultdict[str, list[str]](list)
    for file in sorted(package.rglob("[!_]*.py")):
        places[file.stem].append(file.parent.relative_to(package).as_posix() + "/")
    return {name: found for name, found in places.items() if len(found) > 1 and not set(found) <= set(SAME_SUBJECT)}


if __name__ == "__main__":
    sys.exit(main())
