"""Tests of log records: entry points print them, and a program that imports Sunspot decides for itself."""

import logging
import subprocess
import sys

import pytest

from sunspot.log import print_logs, sent_warnings, warn_once
from tests.harness import REPOSITORY

log = logging.getLogger("sunspot.some.module")


def test_warnings_are_marked_and_printed_to_the_selected_stream(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("model: 3 modules")
    log.warning("50%% of %s", "it is\x1b[31m lost\x07")
    assert capsys.readouterr() == ("model: 3 modules\nwarning: 50% of it is lost\\x07\n", "")
    print_logs("stderr")
    log.warning("no copies")
    assert capsys.readouterr() == ("", "warning: no copies\n"), "printed twice, or beside a verb's JSON"


def test_an_error_while_sending_a_warning_is_not_raised(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[str] = []

    def send(text: str) -> None:
        sent.append(text)
        raise ConnectionError("the driver is gone")

    with sent_warnings(send):
        log.info("model: 3 modules")
        log.warning("no copies")
    log.warning("after the run")
    assert sent == ["warning: no copies"]


def test_repeated_warnings_are_logged_once(warned: list[str]) -> None:
    for _ in range(3):
        warn_once(log, "status.json cannot be used")
    assert warned == ["status.json cannot be used"]


def test_importing_the_library_installs_no_handler() -> None:
    program = "import logging, sunspot.client; print(logging.getLogger('sunspot').handlers, logging.root.handlers)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[] []\n", ended.stderr


def test_modules_that_run_as_main_log_under_the_sunspot_logger() -> None:
    """Check modules that run as `__main__`, which is not below the logger `sunspot`."""
    texts = [path.read_text() for path in (REPOSITORY / "app/sunspot").rglob("*.py")]
    run = [text for text in texts if 'if __name__ == "__main__"' in text]
    assert run
    assert not [text for text in run if "getLogger(__name__)" in text]
