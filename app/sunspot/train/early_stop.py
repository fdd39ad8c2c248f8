"""Early stopping: the run ends after evaluations in a row that were no better than the best before them."""

import math
from collections.abc import Mapping
from typing import Any

from sunspot.errors import SettingsError
from sunspot.run.checkpoints import SINCE_BEST, is_out_of_patience
from sunspot.run.history import HELD_OUT
from sunspot.settings import PREFIX, Settings

BEST = "best_evaluation"
"""In the metrics of a checkpoint: the best result so far, beside SINCE_BEST."""


class Patience:
    """Counts the evaluations without improvement; all workers know the same results, and so count alike."""

    def __init__(self, settings: Settings, before: Mapping[str, Any]) -> None:
        """`before` are the metrics of the state that training goes on from."""
        self._limit, self._order = settings.early_stop_evaluations, settings.checkpoint_order
        self._metric = HELD_OUT + settings.checkpoint_metric.removeprefix(HELD_OUT)
        self.state = {name: before[name] for name in (BEST, SINCE_BEST) if self._limit and name in before}
        "For the metrics of each checkpoint, so that a restart goes on counting."

    def ends(self, results: Mapping[str, float]) -> bool:
        """Count the results of an evaluation, and return whether the run ends by them."""
        if not self._limit:
            return False
        if self._metric not in results:
            raise SettingsError(
                f"{PREFIX}EARLY_STOP_EVALUATIONS={self._limit}: no {self._metric} among {', '.join(sorted(results))}; "
                f"set {PREFIX}CHECKPOINT_METRIC to one of them, or this to 0"
            )
        sign, result = 1 if self._order == "min" else -1, results[self._metric]
        best = self.state.get(BEST, sign * math.inf)
        if sign * result < sign * best:
            self.state = {BEST: result, SINCE_BEST: 0}
        else:
            self.state = {BEST: best, SINCE_BEST: self.state.get(SINCE_BEST, 0) + 1}
        return is_out_of_patience(self.state, self._limit)
