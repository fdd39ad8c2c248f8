"""Tests of each step by which a process becomes a worker of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from sunspot.elastic.claim import StartPoint
from sunspot.elastic.membership_channel import RegroupError
from sunspot.errors import DataError, SunspotError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run import Claimant, Run, open_run
from sunspot.run.attempts import Attempt
from sunspot.settings import Settings
from sunspot.train import joining, loop
from sunspot.train.joining import Joining, WorkerConfig
from tests.harness.control import LocalControl

PLACE = WorkerPlace(None, 1, 2, torch.device("cpu"), ["node-1", "node-2"])


@pytest.fixture
def run(tmp_path: Any) -> Run:
    return open_run(str(tmp_path), "run")


@pytest.fixture
def config(run: Run, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    """Return the configuration of a worker that joins the run without Ray and without a group."""
    for name in ("set_up_process", "Watchdog", "open_memory"):
        monkeypatch.setattr(joining, name, MagicMock())
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    monkeypatch.setattr(WorkerConfig, "claimant", lambda _: Claimant(run, "me"))
    plan: Any = SimpleNamespace(settings=Settings(), total_steps=10)
    return WorkerConfig(plan, "me", "", LocalControl(), threads=1, collective_timeout_s=300)


def survivor_that(**behavior: Any) -> Any:
    """Return a fake survivor that has trained before and keeps no state."""
    return MagicMock(**{"others_train": False, "replaces": False, "kept": None, **behavior})


def test_a_process_exits_without_waiting_for_output_if_no_further_group_forms(config: WorkerConfig) -> None:
    survivor = survivor_that(form=lambda: None)
    with Joining(config, survivor) as joined:
        assert joined.form() is None
    assert not survivor.await_outputs.called


def test_a_process_in_the_next_group_waits_for_the_output_of_the_previous_group(config: WorkerConfig) -> None:
    survivor = survivor_that(form=lambda: PLACE)
    with Joining(config, survivor) as joined:
        assert joined.form() is PLACE
    assert survivor.await_outputs.called


def test_no_attempt_is_claimed_after_an_error_has_ended_the_run(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree = Mock()
    monkeypatch.setattr(joining, "agree_on_start", agree)
    config.control.channel.set_fatal_error(DataError("no rows"))  # type: ignore[attr-defined]
    with Joining(config) as joined:
        assert joined.claim(PLACE) is None
    assert not agree.called


def test_a_group_that_has_not_agreed_on_a_start_does_not_train(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "agree_on_start", lambda *_: (None, None))
    with Joining(config) as joined:
        assert joined.claim(PLACE) is None


def test_claiming_an_attempt_returns_its_start_point_and_the_nodes_of_all_ranks(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = StartPoint(Attempt(3, "me", None, 7), nodes={0: "node-a", 1: "node-b"})
    monkeypatch.setattr(joining, "agree_on_start", lambda *_: (start, None))
    with Joining(config) as joined:
        setup = joined.claim(PLACE)
        assert setup
        assert setup.start is start
        assert setup.place.nodes == ["node-a", "node-b"]


def test_the_memory_of_a_loaded_state_is_freed_once_the_worker_is_built(
    config: WorkerConfig, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, state = object(), SimpleNamespace(tier="storage")
    loaded, built = list[Any](), list[Any]()
    worker = MagicMock(reporter=None)
    monkeypatch.setattr(joining, "load_start", lambda run, settings, start, found, group: loaded.append(found) or state)
    monkeypatch.setattr(joining, "build_worker", lambda setup, state, phases: built.append(state) or worker)
    setup: Any = SimpleNamespace(
        survivor=None, start=StartPoint(Attempt(3, "me", None, 7)), place=PLACE, run=run, plan=config.plan
    )
    with Joining(config) as joined:
        joined._found = found  # type: ignore[assignment]
        assert joined.build(setup) is worker
        assert joined._found is None
    assert (loaded, built) == ([found], [state])
    assert "rank 1 of 2 on cpu" in capsys.readouterr().out


def test_a_process_whose_group_loads_a_saved_state_frees_its_model_first(
    config: WorkerConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers build new models together, because a process without a model would wait for the others there."""
    survivor = survivor_that()
    freed = list[bool]()
    monkeypatch.setattr(joining, "load_start", lambda *_: freed.append(survivor.forget.called) or MagicMock())
    monkeypatch.setattr(joining, "build_worker", lambda *_: MagicMock(reporter=None))
    setup = MagicMock(survivor=survivor, start=StartPoint(Attempt(3, "me", None, 7)), place=PLACE, run=run)
    with Joining(config, survivor) as joined:
        joined._found = MagicMock()
        joined.build(setup)
    assert freed == [True]
    assert not survivor.continue_from.called


@pytest.mark.parametrize(
    ("error", "outlived", "raised", "recorded"),
    [
        (RuntimeError("connection closed by peer"), True, RegroupError, False),
        (DataError("no rows"), False, DataError, True),
        (GroupRestartError(), True, GroupRestartError, False),
    ],
)
def test_a_process_joins_a_new_group_after_an_error_that_ended_only_its_group(
    error: Exception,
    outlived: bool,
    raised: type[Exception],
    recorded: bool,
    config: WorkerConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_end = Mock()
    monkeypatch.setattr(loop, "record_end", record_end)
    survivor = survivor_that(outlives=lambda _: outlived)
    joined = MagicMock(build=Mock(side_effect=error))
    joined.__enter__.return_value = joined
    joined.__exit__.return_value = False
    monkeypatch.setattr(loop, "Joining", lambda *_: joined)
    with pytest.raises(raised):
        loop.train_in_group(config, survivor)
    assert record_end.called is recorded
    assert survivor.write_outputs.called is (raised is RegroupError)


def test_an_error_in_a_replacement_that_has_not_trained_is_not_recorded(run: Run) -> None:
    control = LocalControl()
    setup: Any = SimpleNamespace(survivor=survivor_that(replaces=True), place=PLACE, run=run, control=control)
    joining.record_end(SunspotError("the rows take 40 GB, and 12 GB are left there"), setup)
    end = control.channel.group_end()
    assert not end.errors
    assert not end.fatal
