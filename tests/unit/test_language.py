"""Tests of the check of English and Python style in `make lint`."""

import pytest

from scripts.language import find_faults


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('def f():\n    """Of the newest run."""\n', (2, "begins with")),
        ('X = 1\n"""Whether it is set."""\n', (2, "begins with")),
        ("a, b, c = 1, 2, 3\n", (1, "sets 3 names at once")),
        ("if x := f():\n    pass\n", (1, "assign on a line of its own")),
        ("# It starts anew.\n", (1, "write again")),
    ],
)
def test_a_style_fault_is_reported_with_its_line(code: str, fault: tuple[int, str]) -> None:
    [(line, text)] = find_faults(code, is_python=True)
    assert line == fault[0]
    assert fault[1] in text


@pytest.mark.parametrize(
    "code",
    [
        'def f():\n    """Return the newest run."""\n',
        "a, b = 1, 2\n",
        "a, b, c = f()\n",
        "while x := f():\n    pass\n",
        "found = [y for x in z if (y := f(x))]\n",
    ],
)
def test_code_in_good_style_is_not_reported(code: str) -> None:
    assert list(find_faults(code, is_python=True)) == []


def test_a_style_fault_in_markdown_is_reported() -> None:
    assert list(find_faults("# Title\n\nServed by HTTP.\n", is_python=False)) == [(3, '"by HTTP": write over HTTP')]
