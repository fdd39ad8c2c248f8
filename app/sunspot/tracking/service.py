"""The supported tracking services: MLflow, Weights & Biases, and TensorBoard files.

Addresses and credentials come from each service's own environment variables. Libraries are imported on first use,
because importing them is slow and they might not be installed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sunspot.errors import TrackingError, shorten
from sunspot.run.status import RunState


class RefusedError(TrackingError):
    """Raised if the service rejects a request and would reject it again."""


class RunIdentity(NamedTuple):
    """The ID, name and location of the run whose records are delivered."""

    id: str
    "A unique ID. A run that replaces a deleted run has a different ID."
    name: str
    location: str


class Point(NamedTuple):
    """The metrics of one record in the metric history."""

    step: int
    time: float
    "Seconds since the epoch."
    values: Mapping[str, float]


class Service(ABC):
    """A run in a tracking service.

    A method that raises `TrackingError` can be retried, unless the error is a `RefusedError`. Methods return within
    seconds even if the server hangs, except `attach` and `close`, which wait for uploads.
    """

    acknowledges = True
    """True if the service has received the data when `send` returns. Otherwise, it has received the data when `close`
    returns."""

    def __init__(self, project: str, identity: RunIdentity) -> None:
        """Prepare to deliver a run's records to a project (an experiment, in MLflow's terms)."""
        self._project, self._identity = project, identity

    def find_or_create(self) -> str:
        """Return the ID of the tracking run. Create the tracking run if it does not exist."""
        return self._identity.id

    def discard(self, tracking_run: str) -> None:  # noqa: B027  # only needed if the service chooses the IDs
        """Delete a tracking run that was just created. Call this if another process created one first."""

    @abstractmethod
    def open(self, tracking_run: str) -> str:
        """Open an existing tracking run, and return the address to show to the user."""

    @abstractmethod
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set parameters and tags. New values replace old ones."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send metrics. Some services ignore repeated metrics."""

    @abstractmethod
    def attach(self, file: Path, folder: str) -> None:
        """Upload a file to a folder, or to the top level if `folder` is empty, replacing a file of the same name.

        The file must exist until `close` returns.
        """

    @abstractmethod
    def close(self, state: RunState | None) -> None:
        """End the delivery, and record the run's final state unless `state` is None."""


@contextlib.contextmanager
def tracking_errors(service: str) -> Iterator[None]:
    """Turn a library's errors into `TrackingError`.

    The message includes the original class name, except for MLflow's own errors.
    """
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        kind = "" if type(error).__module__.startswith("mlflow.") else f"{type(error).__name__}: "
        raise TrackingError(f"{service}: {kind}{shorten(error)}") from error


# --------------------------------------------------------------------------------------------------------------- MLflow

TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"

ENVIRONMENT = {
    # The delivery retries by itself. MLflow's own 7 attempts of 120 s would hide an outage.
    TIMEOUT: "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Nothing must be sent to anyone but the server.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

METRICS_AT_ONCE, OTHERS_AT_ONCE = 1000, 100
"""Largest number of metrics, and of parameters or tags, that MLflow accepts in one request."""

REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""MLflow's error codes for requests that it would reject again."""

ATTACH_TIMEOUT_S = 60
"""Timeout for uploads in seconds. The server might forward the file to another store before it responds."""

ENDS = {RunState.SUCCEEDED: "FINISHED", RunState.FAILED: "FAILED"}
"""A mapping from a run's final state to MLflow's status. Any other state becomes KILLED."""

mlflow_errors = tracking_errors("MLflow")


class MlflowService(Service):
    """A run on the MLflow server at MLFLOW_TRACKING_URI. The class does not change MLflow's global state."""

    def __init__(self, project: str, identity: RunIdentity) -> None:
        super().__init__(project, identity)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # importing it takes seconds and reads the environment

        self._client = MlflowClient()
        self._run = ""

    @mlflow_errors
    def find_or_create(self) -> str:
        identity, name, location = self._identity
        known = self._client.get_experiment_by_name(self._project)
        experiment = known.experiment_id if known else self._client.create_experiment(self._project)
        found = self._client.search_runs([experiment], f"tags.`sunspot.id` = '{identity}'", max_results=1)
        if found:  # the process that created it ended before it could store the ID
            return str(found[0].info.run_id)
        tags = {"sunspot.id": identity, "sunspot.run": location}
        return str(self._client.create_run(experiment, run_name=name, tags=tags).info.run_id)

    @mlflow_errors
    def discard(self, tracking_run: str) -> None:
        self._client.delete_run(tracking_run)

    @mlflow_errors
    def open(self, tracking_run: str) -> str:
        self._run = tracking_run
        info = self._active()
        self._client.update_run(tracking_run, status="RUNNING")
        return f"{self._server}/#/experiments/{info.experiment_id}/runs/{tracking_run}"

    @property
    def _server(self) -> str:
        """The server's address without credentials."""
        return re.sub(r"//[^/@\s]+@", "//", self._client.tracking_uri)

    @mlflow_errors
    def _active(self) -> Any:
        """Return the run's `mlflow.entities.RunInfo`. Raises `TrackingError` if the run is missing or deleted."""
        from mlflow.exceptions import MlflowException

        try:
            info = self._client.get_run(self._run).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise TrackingError(
                f"{self._server} does not have the run {self._run}; set MLFLOW_TRACKING_URI to the server on which the "
                "run was created"
            ) from error
        if info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the run {self._run} was deleted in MLflow; `mlflow runs restore --run-id {self._run}` restores it"
            )
        return info

    @mlflow_errors
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set parameters and tags. MLflow's parameters cannot change, so changed values are added as tags."""
        from mlflow.entities import Param, RunTag

        data = self._client.get_run(self._run).data
        first = [Param(key, value) for key, value in parameters.items() if key not in data.params]
        changed = {key: value for key, value in parameters.items() if data.params.get(key, value) != value}
        tags = {**tags, **{f"sunspot.now.{key}": value for key, value in changed.items()}}
        others = [RunTag(key, value) for key, value in tags.items() if data.tags.get(key) != value]
        self._log("params", first, OTHERS_AT_ONCE)
        self._log("tags", others, OTHERS_AT_ONCE)

    def send(self, points: Sequence[Point]) -> None:
        """Send metrics. MLflow drops a metric if it already has one with the same name, step, time and value."""
        from mlflow.entities import Metric

        metrics = [
            # Only these characters are allowed in all versions of MLflow.
            Metric(re.sub(r"[^\w .\-/]", "_", name, flags=re.ASCII), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        self._log("metrics", metrics, METRICS_AT_ONCE)

    @mlflow_errors
    def _log(self, kind: str, entries: list[Any], at_once: int) -> None:
        from mlflow.exceptions import MlflowException

        try:
            for begin in range(0, len(entries), at_once):
                self._client.log_batch(self._run, **{kind: entries[begin : begin + at_once]})
        except MlflowException as error:
            self._active()  # raises if the run is at fault rather than the request
            if error.error_code in REFUSALS:
                raise RefusedError(f"MLflow: {shorten(error)}") from error
            raise

    @mlflow_errors
    def attach(self, file: Path, folder: str) -> None:
        usual = os.environ[TIMEOUT]  # MLflow reads it for every request
        os.environ[TIMEOUT] = str(max(int(usual), ATTACH_TIMEOUT_S))
        try:
            self._client.log_artifact(self._run, str(file), folder or None)
        finally:
            os.environ[TIMEOUT] = usual

    @mlflow_errors
    def close(self, state: RunState | None) -> None:
        if state:
            with contextlib.redirect_stdout(io.StringIO()):  # MLflow always prints the run's address
                self._client.set_terminated(self._run, ENDS.get(state, "KILLED"))


# ----------------------------------------------------------------------------------------------------- Weights & Biases

INIT_TIMEOUT_S = 15
"""Seconds before an attempt to reach the server fails. The delivery retries."""

STEP = "step"
"""Name of the x axis of all curves. W&B's own step must not decrease, so W&B would drop repeated data."""

wandb_errors = tracking_errors("Weights & Biases")


class WandbService(Service):
    """A run in Weights & Biases.

    The library writes to a file below WANDB_DIR, and its own process sends the file to the server at WANDB_BASE_URL.
    With WANDB_MODE=offline, the file is not sent.
    """

    acknowledges = False

    def __init__(self, project: str, identity: RunIdentity) -> None:
        import wandb  # takes a second

        super().__init__(project, identity)
        self._wandb = wandb
        self._run: Any = None
        self._arrived = -1

    @wandb_errors
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
        try:
            self._run = self._wandb.init(
                id=tracking_run, resume="allow", project=self._project, name=self._identity.name, settings=settings
            )
        except Exception:
            self._wandb.teardown()  # otherwise, its process would keep the ID of a run that was never opened
            raise
        self._run.define_metric("*", step_metric=STEP)
        if self._run.resumed:  # an earlier process might have ended before it stored its progress
            self._arrived = int(self._run.summary.get(STEP, -1))
        return str(self._run.url or f"send them with `wandb sync {self._run.settings.sync_dir}`")

    @wandb_errors
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        self._run.config.update(dict(parameters), allow_val_change=True)
        self._run.config.update({"sunspot.run": self._identity.location, **tags}, allow_val_change=True)

    @wandb_errors
    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.step >= self._arrived:
                self._run.log({**point.values, STEP: point.step, "time": point.time})

    @wandb_errors
    def attach(self, file: Path, folder: str) -> None:
        if folder:
            self._run.log_artifact(str(file), name=f"{self._run.id}-{folder}", type=folder)
        else:
            self._run.save(str(file), base_path=str(file.parent), policy="now")

    @wandb_errors
    def close(self, state: RunState | None) -> None:
        """Report the final state, and wait for all uploads. W&B retries until its server is reachable."""
        self._run.finish(exit_code=0 if state in (RunState.SUCCEEDED, RunState.STOPPED) else 1)


# ---------------------------------------------------------------------------------------------------------- TensorBoard

FOLDER = "tensorboard"
"""Name of the folder for event files in the run's folder."""

tensorboard_errors = tracking_errors("TensorBoard")


class TensorBoardFiles(Service):
    """A run in TensorBoard's event files. Each delivery writes its own file."""

    def __init__(self, project: str, identity: RunIdentity) -> None:
        super().__init__(project, identity)
        self._folder = Path(identity.location, FOLDER)
        self._writer: Any = None

    @tensorboard_errors
    def open(self, tracking_run: str) -> str:
        from tensorboardX import SummaryWriter  # takes a second to import, and is installed with Ray Tune

        self._writer = SummaryWriter(str(self._folder))
        return f"view them with `tensorboard --logdir {self._folder.parent.parent}`"

    @tensorboard_errors
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        rows = [f"| {name} | {value} |" for name, value in {**parameters, **tags}.items()]
        self._writer.add_text("settings", "\n".join(["| name | value |", "|---|---|", *rows]))
        self._writer.flush()

    @tensorboard_errors
    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, point.time)
        self._writer.flush()

    def attach(self, file: Path, folder: str) -> None:
        """Do nothing, because the report and the model are already in the run's folder."""

    @tensorboard_errors
    def close(self, state: RunState | None) -> None:
        self._writer.close()


SERVICES: dict[str, type[Service]] = {"mlflow": MlflowService, "wandb": WandbService, "tensorboard": TensorBoardFiles}
"""A mapping from the values of SUNSPOT_TRACKING to service classes."""
