"""Delivery to an MLflow server; address and credentials come from MLflow's usual environment."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import TrackingError, shorten
from app.run.status import RunState
from app.tracking.service import About, Point, RefusedError

TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"

ENVIRONMENT = {
    # How often and how patiently is decided by the delivery; MLflow's own 7 tries of 120 s would hide an outage.
    TIMEOUT: "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Nothing goes anywhere else than to the server.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

METRICS_AT_ONCE, OTHERS_AT_ONCE = 1000, 100
"""What MLflow takes in one request: metrics, and parameters or tags."""

REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""MLflow's codes for what it would not take the next time either."""

ATTACH_TIMEOUT_S = 60
"""How long the server may be silent while it takes a file: it may have to carry it on to a store of its own."""

ENDS = {RunState.SUCCEEDED: "FINISHED", RunState.FAILED: "FAILED"}
"""MLflow's word for how a run ended; it calls every other end KILLED."""


def open_service(project: str, about: About) -> MlflowService:
    """MLflow's server of MLFLOW_TRACKING_URI; `project` is the experiment."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return MlflowService(project, about)


class MlflowService:
    """A run of an MLflow server, by its id: nothing global of MLflow's is touched."""

    acknowledges = True

    def __init__(self, project: str, about: About) -> None:
        from mlflow import MlflowClient  # takes seconds

        self._project, self._about, self._client = project, about, MlflowClient()
        self._run = ""

    def find_or_create(self) -> str:
        identity, name, location = self._about
        with _told():
            experiment = self._find_experiment()
            found = self._client.search_runs([experiment], f"tags.`sunspot.id` = '{identity}'", max_results=1)
            if found:  # by a process that ended before it could note which it had made
                return str(found[0].info.run_id)
            tags = {"sunspot.id": identity, "sunspot.run": location}
            return str(self._client.create_run(experiment, run_name=name, tags=tags).info.run_id)

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._project)
        if found is None:
            try:
                return str(self._client.create_experiment(self._project))
            except MlflowException:
                found = self._client.get_experiment_by_name(self._project)
                if found is None:  # nobody else was just creating it
                    raise
        return str(found.experiment_id)

    def discard(self, tracking_run: str) -> None:
        with _told():
            self._client.delete_run(tracking_run)

    def open(self, tracking_run: str) -> str:
        self._run = tracking_run
        with _told():
            info = self._active()
            self._client.update_run(tracking_run, status="RUNNING")
            server = _without_password(self._client.tracking_uri)
            return f"{server}/#/experiments/{info.experiment_id}/runs/{tracking_run}"

    def _active(self) -> Any:
        """What the server says of the run (`mlflow.entities.RunInfo`), which is there and not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            info = self._client.get_run(self._run).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            server = _without_password(self._client.tracking_uri)
            raise TrackingError(
                f"{server} does not know the run {self._run}; set MLFLOW_TRACKING_URI to the server it was begun on"
            ) from error
        if info.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the run {self._run} was deleted in MLflow; `mlflow runs restore --run-id {self._run}` brings it back"
            )
        return info

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """A parameter of MLflow keeps its first value; one that has changed since is told as a tag."""
        from mlflow.entities import Param, RunTag

        with _told():
            data = self._client.get_run(self._run).data
        first = [Param(key, value) for key, value in parameters.items() if key not in data.params]
        changed = {key: value for key, value in parameters.items() if data.params.get(key, value) != value}
        told = {**tags, **{f"sunspot.now.{key}": value for key, value in changed.items()}}
        others = [RunTag(key, value) for key, value in told.items() if data.tags.get(key) != value]
        for begin in range(0, len(first), OTHERS_AT_ONCE):
            self._log(params=first[begin : begin + OTHERS_AT_ONCE])
        for begin in range(0, len(others), OTHERS_AT_ONCE):
            self._log(tags=others[begin : begin + OTHERS_AT_ONCE])

    def send(self, points: Sequence[Point]) -> None:
        """MLflow's database keeps one of two metrics that are the same in name, step, time and value."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), METRICS_AT_ONCE):
            self._log(metrics=metrics[begin : begin + METRICS_AT_ONCE])

    def _log(self, **batch: Any) -> None:
        try:
            with _told():
                self._client.log_batch(self._run, **batch)
        except TrackingError as error:
            with _told():
                self._active()  # else nothing need be wrong with what was sent
            if getattr(error.__cause__, "error_code", "") in REFUSALS:
                raise RefusedError(str(error)) from error.__cause__
            raise

    def attach(self, file: Path, folder: str) -> None:
        usual = os.environ[TIMEOUT]  # MLflow reads it for every request
        os.environ[TIMEOUT] = str(max(int(usual), ATTACH_TIMEOUT_S))
        try:
            with _told():
                self._client.log_artifact(self._run, str(file), folder or None)
        finally:
            os.environ[TIMEOUT] = usual

    def close(self, state: RunState | None) -> None:
        if state is None:
            return
        with _told(), contextlib.redirect_stdout(io.StringIO()):  # it prints where the run is, each time
            self._client.set_terminated(self._run, ENDS.get(state, "KILLED"))


def _allowed(name: str) -> str:
    """A metric's name with only those characters that every version of MLflow takes."""
    return re.sub(r"[^\w .\-/]", "_", name, flags=re.ASCII)


def _without_password(text: str) -> str:
    """Text that may name the server, without the credentials that some write into its address."""
    return re.sub(r"//[^/@\s]+@", "//", text)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turns what MLflow, or a library below it, raises into a `TrackingError`."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except TrackingError:
        raise
    except MlflowException as error:
        raise TrackingError(f"MLflow: {_without_password(shorten(error))}") from error
    except Exception as error:  # of requests, or of whatever artifacts are kept in
        raise TrackingError(f"MLflow: {type(error).__name__}: {_without_password(shorten(error))}") from error
