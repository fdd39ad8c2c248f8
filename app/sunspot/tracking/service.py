"""Tracking services to which a run can be delivered: MLflow, Weights & Biases, and TensorBoard's files.

Addresses and credentials come from the environment variables of each service. The services' libraries are imported when
they are used, because importing them is slow and they may not be installed.
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
    """The service rejects the request, and would reject it again."""


class RunIdentity(NamedTuple):
    """Identity of the run that is delivered."""

    id: str
    "Unique id. A run that replaces a deleted run has a different id."
    name: str
    location: str


class Point(NamedTuple):
    """Numbers of one record in the metric history."""

    step: int
    time: float
    "Seconds since the epoch."
    values: Mapping[str, float]


class Service(ABC):
    """One run in a tracking service.

    Methods raise `TrackingError`, after which they may be retried, or `RefusedError`. They return within seconds even
    if the server hangs, except `attach` and `close`, which wait for uploads.
    """

    acknowledges = True
    "True if data has arrived when `send` returns, and False if it has arrived only when `close` returns."

    def __init__(self, project: str, identity: RunIdentity) -> None:
        """Prepare the delivery of a run to a project, which is an experiment in MLflow."""
        self._project, self._identity = project, identity

    def find_or_create(self) -> str:
        """Return the id of this run's tracking run, and create the tracking run if it does not exist."""
        return self._identity.id

    def discard(self, tracking_run: str) -> None:  # noqa: B027  # only needed if the service makes the ids
        """Remove a tracking run that was just created, because another process was faster."""

    @abstractmethod
    def open(self, tracking_run: str) -> str:
        """Continue a tracking run and return its address for people."""

    @abstractmethod
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set the run's parameters and tags. New values replace old ones."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Deliver metrics. Services that recognize repeated metrics count them once."""

    @abstractmethod
    def attach(self, file: Path, folder: str) -> None:
        """Deliver a file into a folder, or to the top level if `folder` is empty, and replace a file of the same name.

        The file must exist until `close` returns.
        """

    @abstractmethod
    def close(self, state: RunState | None) -> None:
        """End the delivery, and record the final state of the run unless `state` is None."""


@contextlib.contextmanager
def tracking_errors(service: str) -> Iterator[None]:
    """Turn the errors of a service's library into `TrackingError`, whose message names the original class.

    Only MLflow's own errors are not named.
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
    # The delivery retries by itself. MLflow's own 7 tries of 120 s would hide an outage.
    TIMEOUT: "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Nothing may be sent anywhere except to the server.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

METRICS_AT_ONCE, OTHERS_AT_ONCE = 1000, 100
"""Largest numbers of metrics, and of parameters or tags, that MLflow takes in a request."""

REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Error codes of MLflow for requests that it would reject again."""

ATTACH_TIMEOUT_S = 60
"""Seconds for which the server may be silent during an upload. It may forward the file to another store."""

ENDS = {RunState.SUCCEEDED: "FINISHED", RunState.FAILED: "FAILED"}
"""MLflow's status for the final state of a run. Any other state becomes KILLED."""

mlflow_errors = tracking_errors("MLflow")


class MlflowService(Service):
    """Run on the MLflow server at MLFLOW_TRACKING_URI. It does not touch MLflow's global state."""

    def __init__(self, project: str, identity: RunIdentity) -> None:
        super().__init__(project, identity)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # takes seconds, and reads the environment

        self._client = MlflowClient()
        self._run = ""

    @mlflow_errors
    def find_or_create(self) -> str:
        identity, name, location = self._identity
        known = self._client.get_experiment_by_name(self._project)
        experiment = known.experiment_id if known else self._client.create_experiment(self._project)
        found = self._client.search_runs([experiment], f"tags.`sunspot.id` = '{identity}'", max_results=1)
        if found:  # the process that created the run ended before it could store the id
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
        """Address of the server, without any credentials."""
        return re.sub(r"//[^/@\s]+@", "//", self._client.tracking_uri)

    @mlflow_errors
    def _active(self) -> Any:
        """Return the server's `mlflow.entities.RunInfo`. Raises `TrackingError` if the run is missing or deleted."""
        from mlflow.exceptions import MlflowException

        try:
            info = self._client.get_run(self._run).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise TrackingError(
                f"{self._server} does not have the run {self._run}; set MLFLOW_TRACKING_URI to the server on which it "
                "was created"
            ) from error
        if info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the run {self._run} was deleted in MLflow; `mlflow runs restore --run-id {self._run}` restores it"
            )
        return info

    @mlflow_errors
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set parameters and tags. A parameter keeps its first value, and a changed value is added as a tag."""
        from mlflow.entities import Param, RunTag

        data = self._client.get_run(self._run).data
        first = [Param(key, value) for key, value in parameters.items() if key not in data.params]
        changed = {key: value for key, value in parameters.items() if data.params.get(key, value) != value}
        tags = {**tags, **{f"sunspot.now.{key}": value for key, value in changed.items()}}
        others = [RunTag(key, value) for key, value in tags.items() if data.tags.get(key) != value]
        self._log("params", first, OTHERS_AT_ONCE)
        self._log("tags", others, OTHERS_AT_ONCE)

    def send(self, points: Sequence[Point]) -> None:
        """Send metrics. MLflow drops a metric if it already has the same name, step, time and value."""
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
            self._active()  # raises if the problem is the run and not the request
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
            with contextlib.redirect_stdout(io.StringIO()):  # MLflow prints the run's address each time
                self._client.set_terminated(self._run, ENDS.get(state, "KILLED"))


# ----------------------------------------------------------------------------------------------------- Weights & Biases

INIT_TIMEOUT_S = 15
"""Seconds for one attempt to reach the server. The delivery retries."""

STEP = "step"
"""Name of the x axis of all curves. W&B's own step may only grow, so it would drop repeated data."""

wandb_errors = tracking_errors("Weights & Biases")


class WandbService(Service):
    """Run in Weights & Biases, whose library writes to a file and sends it from its own process.

    The run has an id of our choice. The library sends to the server at WANDB_BASE_URL. With WANDB_MODE=offline, the
    file stays below WANDB_DIR.
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
            self._wandb.teardown()  # otherwise, its process would keep the id of a run that was never opened
            raise
        self._run.define_metric("*", step_metric=STEP)
        if self._run.resumed:  # an earlier process may have ended before it stored its progress
            self._arrived = int(self._run.summary.get(STEP, -1))
        return str(self._run.url or f"`wandb sync {self._run.settings.sync_dir}` sends them")

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
        """Wait until everything has arrived. W&B retries until its server is reachable."""
        self._run.finish(exit_code=0 if state in (RunState.SUCCEEDED, RunState.STOPPED) else 1)


# ---------------------------------------------------------------------------------------------------------- TensorBoard

FOLDER = "tensorboard"
"""Name of the folder for event files in the folder of the run."""

tensorboard_errors = tracking_errors("TensorBoard")


class TensorBoardFiles(Service):
    """Event files of a run, one for each delivery. TensorBoard names the run after their folder."""

    def __init__(self, project: str, identity: RunIdentity) -> None:
        super().__init__(project, identity)
        self._folder = Path(identity.location, FOLDER)
        self._writer: Any = None

    @tensorboard_errors
    def open(self, tracking_run: str) -> str:
        from tensorboardX import SummaryWriter  # takes a second to import; a dependency of Ray Tune

        self._writer = SummaryWriter(str(self._folder))
        return f"`tensorboard --logdir {self._folder.parent.parent}` shows them"

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
        """Do nothing, because the report and the model are in the same folder already."""

    @tensorboard_errors
    def close(self, state: RunState | None) -> None:
        self._writer.close()


SERVICES: dict[str, type[Service]] = {"mlflow": MlflowService, "wandb": WandbService, "tensorboard": TensorBoardFiles}
"""Class of each service, by its name in SUNSPOT_TRACKING."""
