"""Computes metrics of all held-out rows at once, such as F1 or AUC, with the task's `compute_metrics(scores, rows)`."""

from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist

from sunspot.data.labels import LABEL
from sunspot.data.source import Batch, rows_in
from sunspot.errors import SettingsError
from sunspot.formatting import as_bytes, kind_of
from sunspot.metric_names import refuse_names
from sunspot.parallel.collectives import broadcast_from_rank0
from sunspot.predict.forward import forward_rows
from sunspot.tasks import find_predict
from sunspot.train.learner import Learner, fill_up

MAX_BYTES = 1 << 30
"""Maximum size in bytes of all held-out rows' scores and columns. Rank 0 briefly holds two copies of them."""

SCORES = "scores of predict"
"""Key of the scores."""


class HeldOutScores:
    """The scores of this worker's held-out rows. Metrics are computed from the scores of all workers."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._task: Any = learner.task
        self._who = f"SUNSPOT_TASK={learner.plan.settings.task}: its compute_metrics"
        self._predict = find_predict(learner.task)
        self._parts: list[Batch] = []

    def predict(self, batch: Batch, counts: bool) -> None:
        """Compute the scores of a batch's rows, and keep the scores if `counts` is True.

        Under FSDP, all workers call this together. Raises `SettingsError` if `predict` does not return one score for
        each row.
        """
        filled = fill_up(self._learner, batch)
        scores = forward_rows(self._predict, self._learner.model, filled, self._learner.plan.settings)
        if not counts:
            return
        rows = len(batch["row"])
        scores = scores[:rows].float() if scores.is_floating_point() else scores[:rows]
        columns = {name: column for name, column in batch.items() if column.ndim == 1 or name == LABEL}
        self._parts.append({name: column.cpu() for name, column in {**columns, SCORES: scores}.items()})
        self._refuse_size(rows)

    def compute_metrics(self, names: Set[str]) -> dict[str, float]:
        """Return the metrics that the task computes from all held-out rows. All workers call this together.

        The metrics are computed on rank 0. `names` are the metrics that `loss` returns for each row. Raises
        `SettingsError` if the task does not return a dict of numbers, or returns one of these names.
        """
        mine = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]} if self._parts else {}
        group = self._learner.place.group
        everyone: list[Batch] = [{} for _ in range(dist.get_world_size(group))]
        dist.gather_object(mine, everyone if dist.get_rank(group) == 0 else None, group=group, group_dst=0)
        return broadcast_from_rank0(group, lambda: self._compute(list(filter(None, everyone)), names))

    def _compute(self, parts: list[Batch], names: Set[str]) -> dict[str, float]:
        order = torch.cat([part["row"] for part in parts]).argsort()
        rows = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        returned = self._task.compute_metrics(rows.pop(SCORES), rows)
        if not isinstance(returned, Mapping):
            raise SettingsError(f"{self._who} returned {kind_of(returned)}; return a dict of numbers")
        refuse_names(returned, f"{self._who} returns")
        known = sorted(names & returned.keys())
        if known:
            raise SettingsError(
                f"{self._who} returned {known[0]}, but loss also returns {known[0]}; rename one of them"
            )
        return {name: self._to_number(name, value) for name, value in returned.items()}

    def _to_number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise SettingsError(f"{self._who} returned {name} of type {kind}; return one number per name") from error

    def _refuse_size(self, rows: int) -> None:
        """Raise `SettingsError` if all held-out rows would need too much memory, estimated from the newest batch."""
        test = self._learner.plan.test
        assert test
        newest = sum(column.nbytes for column in self._parts[-1].values())
        size = newest // rows * rows_in(test)
        if size > MAX_BYTES:
            raise SettingsError(
                f"{self._who}: the scores and labels of {rows_in(test)} held-out rows take {as_bytes(size)}, but the "
                f"limit is {as_bytes(MAX_BYTES)}; return less from predict, such as the predicted class instead of a "
                "score for each class, or hold out fewer rows"
            )
