"""Tests of the check of parameter lists and module names in `make lint`."""

from pathlib import Path

from scripts.structure import count_code, find_long, find_repeated

CODE = """
from dataclasses import dataclass

def five(a, b, c, *, d, e): ...

def six(a, b, c, *, d, e, f): ...

@dataclass
class Worker:
    a: int; b: int; c: int; d: int; e: int; f: int; g: int; h: int; i: int

@dataclass(frozen=True)
class Record:
    a: int; b: int; c: int; d: int; e: int; f: int; g: int; h: int; i: int

class Manager:
    def __init__(self, a, b, c, d, e, f, g, h): ...
    def take(self, a, b, c, d, e): ...
    @staticmethod
    def make(a, b, c, d, e, f): ...
"""


def test_long_parameter_lists_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(CODE)
    assert list(find_long(file, "a.py")) == [("a.py:six", 6, 5), ("a.py:Worker", 9, 8), ("a.py:Manager.make", 6, 5)]


def test_only_modules_with_the_same_subject_can_share_a_name(tmp_path: Path) -> None:
    for place in ("run/status", "report/status", "run/__init__", "data/images", "tasks/images", "tasks/__init__"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / f"{place}.py").touch()
    assert find_repeated(tmp_path) == {"images": ["data/", "tasks/"]}


def test_only_lines_of_code_are_counted() -> None:
    source = '''"""A module."""

# A comment.
LIMIT = 3  # a comment after code counts with its line
"""A description,
in two lines."""


def act() -> str:
    """Act."""
    return """a text
    that is code"""
'''
    assert count_code(source) == 4
