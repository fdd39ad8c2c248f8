"""Tests of a run's identity: the settings, rows and row order that it began with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sunspot.data.order import WINDOW_ROWS, Order, run_order
from sunspot.errors import ConflictError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.plan import make_plan
from sunspot.run import Run
from sunspot.run.identity import Rows, record_identity
from sunspot.settings import IDENTITY, load_settings
from sunspot.tasks import load_task
from sunspot.train.build import make_loader
from sunspot.train.driver import identify_rows

ROWS = Rows("layout-content", 100, 10, "1a2b", "NumPy 2.4.6")
NAMES = ("seed", "dataset")


def start(run: Run, rows: Rows = ROWS, **settings: str) -> None:
    record_identity(run, load_settings(settings).environment(), NAMES, rows)


def test_a_restart_with_the_same_settings_and_rows_is_accepted(run: Run) -> None:
    for _ in range(3):
        start(run)
    with pytest.raises(ConflictError, match="SUNSPOT_SEED: 0 -> 1"):
        start(run, SEED="1")


@pytest.mark.parametrize("name", ["task", "task_args", "dataset", "seed", "global_batch_size", "loader"])
def test_the_identity_contains_the_settings_that_must_not_change(name: str) -> None:
    assert name in IDENTITY


def test_different_rows_with_the_same_layout_are_rejected(run: Run) -> None:
    start(run)
    with pytest.raises(ConflictError, match="the data behind sample: 100 rows -> 100 rows, or other content"):
        start(run, replace(ROWS, data="layout-other"))
    start(run)


def test_a_different_row_order_is_rejected_unless_the_user_accepts_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    start(run)
    other = replace(ROWS, order="3c4d", shuffled_by="NumPy 3.0.0")
    for accept in ("", "order-1a2b", "order-3c4"):
        with pytest.raises(ConflictError, match=r"(?s)NumPy 2\.4\.6 -> NumPy 3\.0\.0.*with SUNSPOT_ACCEPT=order-3c4d"):
            start(run, other, ACCEPT=accept)
    start(run, other, ACCEPT="something,order-3c4d")
    assert "NumPy 2.4.6 -> NumPy 3.0.0" in capsys.readouterr().out
    start(run, other)
    with pytest.raises(ConflictError, match="order-1a2b"):
        start(run)


def test_a_run_continues_with_a_version_that_has_another_identity_setting(run: Run) -> None:
    record_identity(run, load_settings().environment(), ["dataset"], ROWS)
    start(run)
    with pytest.raises(ConflictError, match="SUNSPOT_SEED: 0 -> 1"):
        start(run, SEED="1")


def test_the_recorded_identity_of_a_search_contains_no_rows(run: Run) -> None:
    for _ in range(2):
        record_identity(run, load_settings().environment(), NAMES)
    assert [entry.key for entry in run.storage.list("run")] == ["run/run.json"]


@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_the_row_order_of_a_plan_depends_on_the_shuffling_library(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({"LOADER": loader})
    plan = make_plan(settings, load_task(settings))
    found = identify_rows(plan)
    assert found == identify_rows(plan)
    assert found.shuffled_by == f"NumPy {np.__version__}"
    monkeypatch.setattr(Order, "permutation", lambda self, epoch, window: np.arange(window.last - window.first))
    with pytest.raises(ConflictError, match="shuffles rows differently than the driver's NumPy"):
        make_loader(plan, load_task(settings), WorkerPlace(None, 0, 2))
    other = identify_rows(make_plan(settings, load_task(settings)))
    assert (other.data, other.rows) == (found.data, found.rows)
    assert other.order != found.order


def test_the_row_order_checksum_depends_on_the_seed_and_the_row_groups_and_the_shuffle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = (WINDOW_ROWS // 2,) * 8
    base = run_order("ray", groups, 0)
    others = [run_order("ray", groups, 1), run_order("ray", groups[:-1], 0), run_order("torch", groups, 0)]
    assert len({order.checksum() for order in (base, *others)}) == 4
    found = base.checksum()
    monkeypatch.setattr(np.random, "default_rng", lambda seed: np.random.Generator(np.random.MT19937(seed)))
    assert base.checksum() != found


def test_the_row_order_checksum_matches_stored_values() -> None:
    assert [run_order(loader, (5000, 6000, 700), 7).checksum() for loader in ("torch", "ray")] == PINNED


PINNED = ["15d10bc796b66c04", "a984fe2631e42aa8"]
