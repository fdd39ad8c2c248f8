"""The tracking services that a run can be delivered to. Addresses and credentials come from the services' environment.

Their libraries are imported by what uses them, as they are slow, and need not be installed.
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
    """The service rejects what was sent, and would again: no retry helps."""


class RunIdentity(NamedTuple):
    """The run that is delivered."""

    id: str
    "Unique: a run that replaces a deleted one has another."
    name: str
    location: str


class Point(NamedTuple):
    """The numbers of one record of the metric history."""

    step: int
    time: float
    "Seconds since the epoch."
    values: Mapping[str, float]


class Service(ABC):
    """One run in a tracking service. Methods raise `TrackingError`, after which they may be retried, or `RefusedError`.

    They return within seconds, whatever the server does, except `attach` and `close`, which wait for uploads.
    """

    acknowledges = True
    "Whether data has arrived when `send` returns, or only when `close` does."

    def __init__(self, project: str, identity: RunIdentity) -> None:
        """`project` is MLflow's experiment, say."""
        self._project, self._identity = project, identity

    def find_or_create(self) -> str:
        """Return the id of this run's tracking run, created if there is none."""
        return self._identity.id

    def discard(self, tracking_run: str) -> None:  # noqa: B027  # nothing to do, unless the service makes the ids
        """Remove a tracking run that was just created: another process was first."""

    @abstractmethod
    def open(self, tracking_run: str) -> str:
        """Continue a tracking run; returns where people find it."""

    @abstractmethod
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set the run's parameters and tags; later values replace earlier ones."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Deliver metrics; sent twice, they count once wherever the service can tell."""

    @abstractmethod
    def attach(self, file: Path, folder: str) -> None:
        """Deliver a file into a folder ('': none), replacing one of that name. The file must stay until `close`."""

    @abstractmethod
    def close(self, state: RunState | None) -> None:
        """Record how the run ended; None: only this delivery ends."""


@contextlib.contextmanager
def tracking_errors(service: str) -> Iterator[None]:
    """Turn the errors of a service's library into `TrackingError`; MLflow's own need not be named."""
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
    # The delivery does the retrying; MLflow's own 7 tries of 120 s would hide an outage.
    TIMEOUT: "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Nothing is sent anywhere but to the server.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

METRICS_AT_ONCE, OTHERS_AT_ONCE = 1000, 100
"""MLflow's limits for a request: metrics, and parameters or tags."""

REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""MLflow's codes for requests that it would reject again."""

ATTACH_TIMEOUT_S = 60
"""How long the server may be silent during an upload, which it may have to forward to a store of its own."""

ENDS = {RunState.SUCCEEDED: "FINISHED", RunState.FAILED: "FAILED"}
"""MLflow's names for how a run ended; every other end is KILLED."""

mlflow_errors = tracking_errors("MLflow")


class MlflowService(Service):
    """A run on the MLflow server at MLFLOW_TRACKING_URI, by its id; leaves MLflow's global state alone."""

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
        if found:  # created by a process that ended before it could record the id
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
        """Its address, without the credentials that may be in it."""
        return re.sub(r"//[^/@\s]+@", "//", self._client.tracking_uri)

    @mlflow_errors
    def _active(self) -> Any:
        """Return the server's `mlflow.entities.RunInfo`; raises `TrackingError` if the run is missing or deleted."""
        from mlflow.exceptions import MlflowException

        try:
            info = self._client.get_run(self._run).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise TrackingError(
                f"{self._server} does not know the run {self._run}; set MLFLOW_TRACKING_URI to the server it was begun "
                "on"
            ) from error
        if info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the run {self._run} was deleted in MLflow; `mlflow runs restore --run-id {self._run}` brings it back"
            )
        return info

    @mlflow_errors
    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set parameters and tags: a parameter keeps its first value, and one that has changed since becomes a tag."""
        from mlflow.entities import Param, RunTag

        data = self._client.get_run(self._run).data
        first = [Param(key, value) for key, value in parameters.items() if key not in data.params]
        changed = {key: value for key, value in parameters.items() if data.params.get(key, value) != value}
        tags = {**tags, **{f"sunspot.now.{key}": value for key, value in changed.items()}}
        others = [RunTag(key, value) for key, value in tags.items() if data.tags.get(key) != value]
        self._log("params", first, OTHERS_AT_ONCE)
        self._log("tags", others, OTHERS_AT_ONCE)

    def send(self, points: Sequence[Point]) -> None:
        """Send metrics, of which MLflow drops those of equal name, step, time and value."""
        from mlflow.entities import Metric

        metrics = [
            # In the characters that every version of MLflow takes.
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
            self._active()  # raises if the run, not the request, is at fault
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
"""Time for one attempt to reach the server; the delivery retries."""

STEP = "step"
"""The x axis of all curves. W&B's own step only grows, and would drop data that is sent again."""

wandb_errors = tracking_errors("Weights & Biases")


class WandbService(Service):
    """A run of Weights & Biases, whose library writes to a file and sends it from a process of its own.

    It takes ids from outside. It sends to the server of WANDB_BASE_URL; with WANDB_MODE=offline, the file stays below
    WANDB_DIR.
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
            self._wandb.teardown()  # or its process would keep the id of a run that was never opened
            raise
        self._run.define_metric("*", step_metric=STEP)
        if self._run.resumed:  # a process may have ended before it recorded what has arrived
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
        """Wait until everything has arrived: W&B retries for as long as its server is away."""
        self._run.finish(exit_code=0 if state in (RunState.SUCCEEDED, RunState.STOPPED) else 1)


# ---------------------------------------------------------------------------------------------------------- TensorBoard

FOLDER = "tensorboard"
"""In the folder of the run."""

tensorboard_errors = tracking_errors("TensorBoard")


class TensorBoardFiles(Service):
    """One run's event files: another for each delivery that goes on with it. Their folder says which run it is."""

    def __init__(self, project: str, identity: RunIdentity) -> None:
        super().__init__(project, identity)
        self._folder = Path(identity.location, FOLDER)
        self._writer: Any = None

    @tensorboard_errors
    def open(self, tracking_run: str) -> str:
        from tensorboardX import SummaryWriter  # takes a second; Ray Tune brings it

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
        """Do nothing: report and model lie beside the files."""

    @tensorboard_errors
    def close(self, state: RunState | None) -> None:
        self._writer.close()


SERVICES: dict[str, type[Service]] = {"mlflow": MlflowService, "wandb": WandbService, "tensorboard": TensorBoardFiles}
"""By the name in SUNSPOT_TRACKING."""
