"""Delivery to Weights & Biases; mode, address and credentials come from its usual environment (WANDB_MODE, ...)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sunspot.run.status import RunState
from sunspot.tracking.service import Point, RunIdentity, service_errors

INIT_TIMEOUT_S = 15
"""Time for one attempt to reach the server; the delivery retries."""

STEP = "step"
"""The x axis of all curves. W&B's own step only grows, and would drop data that is sent again."""

_wandb_errors = functools.partial(service_errors, "Weights & Biases")


class WandbService:
    """A run of Weights & Biases, whose library writes to a file and sends it from a process of its own.

    It sends to the server of WANDB_BASE_URL; with WANDB_MODE=offline, the file stays below WANDB_DIR.
    """

    acknowledges = False

    def __init__(self, project: str, identity: RunIdentity) -> None:
        import wandb  # takes a second

        self._wandb, self._project, self._identity = wandb, project, identity
        self._run: Any = None
        self._arrived = -1

    def find_or_create(self) -> str:
        return self._identity.id  # W&B accepts ids from outside

    def discard(self, tracking_run: str) -> None:
        """Do nothing: ids are unique."""

    def open(self, tracking_run: str) -> str:
        settings = self._wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=INIT_TIMEOUT_S,
        )
        with _wandb_errors():
            try:
                self._run = self._wandb.init(
                    id=tracking_run, resume="allow", project=self._project, name=self._identity.name, settings=settings
                )
            except Exception:
                self._wandb.teardown()  # or its process would keep the id of a run that was never opened
                raise
            self._run.define_metric("*", step_metric=STEP)
            if self._run.resumed:  # a process may have ended before it recorded what has arrived
                self._arrived = int(self._run.summary.get(STEP, -1))
            return str(self._run.url or f"`wandb sync {self._run.settings.sync_dir}` sends them")

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        with _wandb_errors():
            self._run.config.update(dict(parameters), allow_val_change=True)
            self._run.config.update({"sunspot.run": self._identity.location, **tags}, allow_val_change=True)

    def send(self, points: Sequence[Point]) -> None:
        with _wandb_errors():
            for point in points:
                if point.step >= self._arrived:
                    self._run.log({**point.values, STEP: point.step, "time": point.time})

    def attach(self, file: Path, folder: str) -> None:
        with _wandb_errors():
            if folder:
                self._run.log_artifact(str(file), name=f"{self._run.id}-{folder}", type=folder)
            else:
                self._run.save(str(file), base_path=str(file.parent), policy="now")

    def close(self, state: RunState | None) -> None:
        """Wait until everything has arrived: W&B retries for as long as its server is away."""
        with _wandb_errors():
            self._run.finish(exit_code=0 if state in (RunState.SUCCEEDED, RunState.STOPPED) else 1)
