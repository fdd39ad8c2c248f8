"""Commands with closed, full or non-UTF-8 standard streams, which print one line and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from sunspot.errors import run_and_exit
from sunspot.submitter.printing import print_text, warn

def main():
    warn(f"a terminal to ask at: {sys.stdin.isatty()}")
    for _ in range(LINES):
        print_text("a pod \u2192 \u6c49 \u202e a name")
    return 0

run_and_exit(main)
"""

FULL = "error: standard output cannot be written: No space left on device; free some space, or redirect it\n"


def run_with(redirections: str, lines: int = 1, **environment: str) -> tuple[int, str, str]:
    """Run a small command in a shell, and return its exit code, its stdout and its stderr."""
    program = PROGRAM.replace("LINES", str(lines))
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {redirections}', sys.executable, program],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_full_disk_is_reported(lines: int) -> None:
    code, _, said = run_with("< /dev/null > /dev/full", lines)
    assert (code, said) == (4, f"a terminal to ask at: False\n{FULL}")


def test_a_closed_stream_acts_like_an_empty_one() -> None:
    assert run_with("<&- >&-") == (0, "", "a terminal to ask at: False\n")
    code, shown, _ = run_with("2>&-")
    assert (code, shown) == (0, "a pod \u2192 \u6c49 \\u202e a name\n")


def test_a_full_stderr_does_not_end_the_command() -> None:
    code, shown, _ = run_with("< /dev/null 2> /dev/full")
    assert shown == "a pod \u2192 \u6c49 \\u202e a name\n"
    assert code in (0, 120), "Python's own, when it cannot flush at its end"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_of_another_encoding_gets_escapes(encoding: str) -> None:
    code, shown, said = run_with("< /dev/null", PYTHONIOENCODING=encoding)
    assert (code, shown) == (0, "a pod \\u2192 \\u6c49 \\u202e a name\n")
    assert said == "a terminal to ask at: False\n"
