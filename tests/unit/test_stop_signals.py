"""Tests that SIGTERM and SIGHUP end a process like Ctrl-C, at any time, but do not end Ray's processes."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sunspot.elastic.supervisor import supervised
from sunspot.errors import TerminatedError, run_and_exit
from sunspot.machine.stop_signals import raise_end_signals
from sunspot.observe import progress
from sunspot.ray_internals.processes import ray_apart_from_signals
from sunspot.run.requests import StopRequest
from tests.harness.control import LocalControl


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_program_that_gets_a_signal_before_training_exits_with_the_code_for_that_signal(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def program() -> int:
        raise_end_signals()
        try:
            signal.raise_signal(number)
        except TerminatedError:
            signal.raise_signal(signal.SIGTERM)  # `timeout` sends it to the process and to its group
            cleaned.append("recorded")
            raise
        return 0

    with pytest.raises(SystemExit) as ended:
        run_and_exit(program)
    assert (ended.value.code, cleaned) == (code, ["recorded"])
    assert capsys.readouterr().err == f"ended by {number.name}; run the same command to continue\n"


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_end_signals()
    request = StopRequest()
    with supervised(LocalControl(), request):
        signal.raise_signal(signal.SIGHUP)
    assert not request.asked


def test_ray_handles_sigterm_only_if_no_handler_exists() -> None:
    utils = pytest.importorskip("ray._private.utils")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    usual = utils.set_sigterm_handler
    with ray_apart_from_signals():
        assert utils.set_sigterm_handler is usual
    raise_end_signals()
    own = signal.getsignal(signal.SIGTERM)
    with ray_apart_from_signals():
        utils.set_sigterm_handler(lambda number, frame: None)  # like `ray.init`
    assert signal.getsignal(signal.SIGTERM) is own
    assert utils.set_sigterm_handler is usual


def test_ray_processes_start_in_their_own_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    services = pytest.importorskip("ray._private.services")
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(services, "ConsolePopen", lambda *words, **options: started.append(options))
    monkeypatch.setattr("sys.platform", "linux")
    with ray_apart_from_signals():
        services.ConsolePopen(["gcs_server"], cwd="/")
    services.ConsolePopen(["gcs_server"], cwd="/")
    assert started == [{"cwd": "/", "start_new_session": True}, {"cwd": "/"}]


def test_a_closed_terminal_does_not_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(screen: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(progress.Lines, "close", fail)
    with progress.shown_progress(lambda: progress.News(progress.Progress(), [], []), 1, 1):
        pass
