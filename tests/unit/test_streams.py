"""Tests of commands with closed, full or non-UTF-8 standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.run import open_run
from sunspot.run.logs import list_streams, rank_stream, read_stream

PROGRAM = """
import sys
from sunspot.errors import run_and_exit
from sunspot.submitter.printing import print_text, warn

def main():
    warn(f"stdin is a terminal: {sys.stdin.isatty()}")
    for _ in range(LINES):
        print_text("a pod \u2192 \u6c49 \u202e a name")
    return 0

run_and_exit(main)
"""

DRIVER = """
import sys
from sunspot.errors import run_and_exit
from sunspot.run import open_run
from sunspot.run.logs import shipped_driver_output

def main():
    with shipped_driver_output(open_run(sys.argv[1], "run")):
        for step in range(3):
            print(f"gr\u00f6\u00dfe \\udcff of \u732b in step {step}", flush=True)
    return 0

run_and_exit(main)
"""

WORKER = """
import sys
from sunspot.run import open_run
from sunspot.run.logs import shipped_worker_output

with shipped_worker_output(open_run(sys.argv[1], "run"), 1, 0):
    print("read picture-\\udcff.png")
"""

DOCUMENT = "from sunspot.submitter.printing import print_document; print_document('path: gr\\u00f6\\u00dfe\\n')"

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
    assert (code, said) == (4, f"stdin is a terminal: False\n{FULL}")


def test_a_command_works_even_if_its_standard_streams_are_closed() -> None:
    assert run_with("<&- >&-") == (0, "", "stdin is a terminal: False\n")
    code, shown, _ = run_with("2>&-")
    assert (code, shown) == (0, "a pod \u2192 \u6c49 \\u202e a name\n")


def test_a_command_continues_if_stderr_cannot_be_written() -> None:
    code, shown, _ = run_with("< /dev/null 2> /dev/full")
    assert shown == "a pod \u2192 \u6c49 \\u202e a name\n"
    assert code in (0, 120), "Python exits with 120 if it cannot flush at its end"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_characters_outside_the_encoding_of_the_terminal_are_escaped(encoding: str) -> None:
    code, shown, said = run_with("< /dev/null", PYTHONIOENCODING=encoding)
    assert (code, shown) == (0, "a pod \\u2192 \\u6c49 \\u202e a name\n")
    assert said == "stdin is a terminal: False\n"


def test_a_subcommand_does_not_exit_with_0_if_its_pipe_is_closed() -> None:
    code, shown, said = run_with("< /dev/null | true; exit ${PIPESTATUS[0]}", 100_000)
    assert (code, shown) == (128 + 13, "")
    assert said == "stdin is a terminal: False\n"


@pytest.mark.parametrize("kind", ["ascii", "gone", "full"])
def test_a_run_continues_if_stdout_is_ascii_only_or_closed_or_full(kind: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = {"ascii": subprocess.PIPE, "gone": writer, "full": os.open("/dev/full", os.O_WRONLY)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path), **({"PYTHONIOENCODING": "ascii"} if kind == "ascii" else {})},
        stdout=output[kind],
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    os.close(output["full"])
    run = open_run(str(tmp_path), "run")
    [stream] = list_streams(run)
    logged = read_stream(run, stream).decode()
    assert done.returncode == 0
    assert [line for line in logged.splitlines() if "warning" not in line] == [
        f"gr\u00f6\u00dfe \\udcff of \u732b in step {step}" for step in range(3)
    ]
    if kind == "ascii":
        assert (done.stdout, done.stderr) == (logged.encode("ascii", "backslashreplace").decode(), "")
    else:
        why = "Broken pipe" if kind == "gone" else "No space left on device"
        hint = "the run continues, and `sunspot logs` shows its output"
        assert done.stderr == f"warning: the output can no longer be written here ({why}); {hint}\n"
        assert done.stderr in logged


def test_a_worker_can_print_any_file_name(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(tmp_path)],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "utf-8"},  # as Ray opens it
            stdout=output,
            stderr=subprocess.PIPE,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out").read_text() == "read picture-\\udcff.png\n"
    assert read_stream(open_run(str(tmp_path), "run"), rank_stream(1, 0)) == b"read picture-\\udcff.png\n"


def test_a_printed_document_is_identical_in_every_locale() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DOCUMENT],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (done.stdout.decode(), done.stderr) == ("path: gr\u00f6\u00dfe\n", b"")
