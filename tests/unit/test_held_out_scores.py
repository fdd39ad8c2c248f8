"""Tests of metrics over all held-out rows: the arguments and results of a task's `compute_metrics`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sunspot.train.held_out_scores
from sunspot.data.source import Batch, read_rows, rows_in
from sunspot.elastic.messages import Command
from sunspot.errors import SettingsError
from sunspot.plan import Plan, make_plan
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.train.evaluate import evaluate
from sunspot.train.held_out_scores import HeldOutScores
from tests.harness.constants import SetConstants
from tests.harness.loop import make_worker
from tests.harness.process_group import in_processes

TASK = """
import torch
from torch import nn

def build_dataset(settings):
    rows = [{"x": torch.tensor([n / 10, 1.0]), "weight": n, "label": n % 2} for n in range(141)]
    return rows[:40], rows[40:]

def build_model(settings, source):
    return nn.Linear(2, 2)

def predict(model, batch):
    return model(batch["x"])

def loss(model, batch):
    return predict(model, batch).sum(1), {"hits": batch["label"] == 1}
"""

ALL_ROWS = """
def compute_metrics(scores, rows):
    assert rows["row"].tolist() == list(range(101))
    assert rows["weight"].tolist() == list(range(40, 141))
    assert "x" not in rows and scores.dtype == torch.float32 and scores.shape == (101, 2)
    return {"median": scores[:, 0].median(), "of_label": scores[rows["label"] == 1].mean().item(), "count": len(scores)}
"""


class HeldOutRows:
    """The held-out rows of one rank, in batches."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        assert plan.test
        rows = read_rows(plan.test, 0, rows_in(plan.test))
        mine = slice(dist.get_rank(group), None, dist.get_world_size(group))
        self._rows = {name: torch.from_numpy(column[mine]) for name, column in rows.items()}

    def test(self, batch_size: int) -> Iterator[Batch]:
        for first in range(0, len(self._rows["row"]), batch_size):
            yield {name: column[first : first + batch_size] for name, column in self._rows.items()}


@pytest.fixture
def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Plan]:
    """Write the task with one more function, and return the plan of its run."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> Plan:
        name = f"scored_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(TASK + text)
        settings = Settings(task=name, global_batch_size=16)
        return make_plan(settings, load_task(settings))

    return write


def evaluate_rank(plan: Plan, group: dist.ProcessGroup) -> Any:
    learner = make_worker(plan, group).learner
    rows: Any = HeldOutRows(plan, group)
    return evaluate(dataclasses.replace(learner, loader=rows), Command, lambda _: None).results


def test_all_rows_are_scored_once_on_any_number_of_workers(plan_of: Callable[[str], Plan], tmp_path: Path) -> None:
    plan, results = plan_of(ALL_ROWS), []
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        ranks = in_processes(folder, workers, lambda group: evaluate_rank(plan, group))
        assert all(rank == ranks[0] for rank in ranks)
        results.append(ranks[0])
    assert results[0].keys() == {"test_loss", "test_hits", "test_median", "test_of_label", "test_count"}
    assert results[0]["test_count"] == 101
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("scores.mean()", "returned a Tensor; return a dict of numbers"),
        ("{'f1': scores}", "returned f1 of type Tensor; return one number"),
        ("{'f1': None}", "returned f1 of type NoneType"),
        ("{'step': 1}", "its compute_metrics returns a metric with the name 'step'"),
        ("{'test_f1': 1}", "is reserved for metrics of held-out rows"),
        ("{'hits': 1}", "returned hits, but loss also returns hits; rename one of them"),
    ],
)
def test_an_invalid_result_of_compute_metrics_is_rejected(
    returned: str, says: str, plan_of: Callable[[str], Plan], group: dist.ProcessGroup
) -> None:
    plan = plan_of(f"def compute_metrics(scores, rows): return {returned}")
    with pytest.raises(SettingsError, match=f"SUNSPOT_TASK={plan.settings.task}: .*{says}"):
        evaluate_rank(plan, group)


def test_scores_that_need_too_much_memory_are_rejected(
    plan_of: Callable[[str], Plan], group: dist.ProcessGroup, set_constants: SetConstants
) -> None:
    set_constants(sunspot.train.held_out_scores, MAX_BYTES=3000)
    with pytest.raises(SettingsError, match=r"of 101 held-out rows take 3\.23 KB, but the limit is 3 KB"):
        evaluate_rank(plan_of(ALL_ROWS), group)


def test_padding_rows_are_not_scored(plan_of: Callable[[str], Plan], group: dist.ProcessGroup) -> None:
    plan = plan_of(ALL_ROWS)
    learner = make_worker(plan, group).learner
    compiled = plan.settings.model_copy(update={"compile": "default"})
    learner = dataclasses.replace(learner, plan=dataclasses.replace(plan, settings=compiled))
    scores, seen = HeldOutScores(learner), []
    scores._predict = lambda _, batch: seen.append(len(batch["x"])) or batch["x"]  # type: ignore[func-returns-value]
    assert plan.test
    batch = {name: torch.from_numpy(column) for name, column in read_rows(plan.test, 0, 3).items()}
    scores.predict(batch, counts=True)
    scores.predict(batch, counts=False)
    assert seen == [learner.plan.pass_rows] * 2 == [8, 8]
    [kept] = scores._parts
    assert kept["row"].tolist() == [0, 1, 2]
    assert {len(column) for column in kept.values()} == {3}
