"""Delivery to an MLflow server; address and credentials come from MLflow's usual environment."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sunspot.errors import TrackingError
from sunspot.run.status import RunState
from sunspot.tracking.service import Point, RefusedError, RunIdentity, service_errors

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


class MlflowService:
    """A run on the MLflow server at MLFLOW_TRACKING_URI, by its id; leaves MLflow's global state alone."""

    acknowledges = True

    def __init__(self, project: str, identity: RunIdentity) -> None:
        """`project` is the experiment."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # takes seconds, and reads the environment

        self._project, self._identity, self._client = project, identity, MlflowClient()
        self._run = ""

    def find_or_create(self) -> str:
        identity, name, location = self._identity
        with _mlflow_errors():
            experiment = self._find_experiment()
            found = self._client.search_runs([experiment], f"tags.`sunspot.id` = '{identity}'", max_results=1)
            if found:  # created by a process that ended before it could record the id
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
                if found is None:  # no other process has just created it
                    raise
        return str(found.experiment_id)

    def discard(self, tracking_run: str) -> None:
        with _mlflow_errors():
            self._client.delete_run(tracking_run)

    def open(self, tracking_run: str) -> str:
        self._run = tracking_run
        with _mlflow_errors():
            info = self._active()
            self._client.update_run(tracking_run, status="RUNNING")
            server = _without_password(self._client.tracking_uri)
            return f"{server}/#/experiments/{info.experiment_id}/runs/{tracking_run}"

    def _active(self) -> Any:
        """Return the server's `mlflow.entities.RunInfo`; raises `TrackingError` if the run is missing or deleted."""
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
        """Set parameters and tags: a parameter keeps its first value, and one that has changed since becomes a tag."""
        from mlflow.entities import Param, RunTag

        with _mlflow_errors():
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
            Metric(_allowed(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        self._log("metrics", metrics, METRICS_AT_ONCE)

    def _log(self, kind: str, entries: list[Any], at_once: int) -> None:
        try:
            with _mlflow_errors():
                for begin in range(0, len(entries), at_once):
                    self._client.log_batch(self._run, **{kind: entries[begin : begin + at_once]})
        except TrackingError as error:
            with _mlflow_errors():
                self._active()  # raises if the run, not the request, is at fault
            if getattr(error.__cause__, "error_code", "") in REFUSALS:
                raise RefusedError(str(error)) from error.__cause__
            raise

    def attach(self, file: Path, folder: str) -> None:
        usual = os.environ[TIMEOUT]  # MLflow reads it for every request
        os.environ[TIMEOUT] = str(max(int(usual), ATTACH_TIMEOUT_S))
        try:
            with _mlflow_errors():
                self._client.log_artifact(self._run, str(file), folder or None)
        finally:
            os.environ[TIMEOUT] = usual

    def close(self, state: RunState | None) -> None:
        if state is None:
            return
        with _mlflow_errors(), contextlib.redirect_stdout(io.StringIO()):  # it prints the run's address each time
            self._client.set_terminated(self._run, ENDS.get(state, "KILLED"))


def _allowed(name: str) -> str:
    """Return a metric's name in the characters that every version of MLflow takes."""
    return re.sub(r"[^\w .\-/]", "_", name, flags=re.ASCII)


def _without_password(text: str) -> str:
    """Return text without the credentials that may be in a server's address."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def _mlflow_errors() -> contextlib.AbstractContextManager[None]:
    """Turn the errors of MLflow, of requests and of the artifact store into `TrackingError`."""
    from mlflow.exceptions import MlflowException

    return service_errors("MLflow", MlflowException)
