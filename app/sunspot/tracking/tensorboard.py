"""Event files for TensorBoard, in the folder of a run on disk: `tensorboard --logdir RUNS` shows all runs there."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sunspot.run.status import RunState
from sunspot.tracking.service import Point, RunIdentity, service_errors

FOLDER = "tensorboard"
"""In the folder of the run."""

_file_errors = functools.partial(service_errors, "TensorBoard")


class TensorBoardFiles:
    """One run's event files: another for each delivery that goes on with it. Their folder says which run it is."""

    acknowledges = True

    def __init__(self, project: str, identity: RunIdentity) -> None:
        self._identity, self._folder = identity, Path(identity.location, FOLDER)
        self._writer: Any = None

    def find_or_create(self) -> str:
        return self._identity.id

    def discard(self, tracking_run: str) -> None:
        """Do nothing: the folder is the run's."""

    def open(self, tracking_run: str) -> str:
        from tensorboardX import SummaryWriter  # takes a second; Ray Tune brings it

        with _file_errors():
            self._writer = SummaryWriter(str(self._folder))
        return f"`tensorboard --logdir {self._folder.parent.parent}` shows them"

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        rows = [f"| {name} | {value} |" for name, value in {**parameters, **tags}.items()]
        with _file_errors():
            self._writer.add_text("settings", "\n".join(["| name | value |", "|---|---|", *rows]))
            self._writer.flush()

    def send(self, points: Sequence[Point]) -> None:
        with _file_errors():
            for point in points:
                for name, value in point.values.items():
                    self._writer.add_scalar(name, value, point.step, point.time)
            self._writer.flush()

    def attach(self, file: Path, folder: str) -> None:
        """Do nothing: report and model lie beside the files."""

    def close(self, state: RunState | None) -> None:
        with _file_errors():
            self._writer.close()
