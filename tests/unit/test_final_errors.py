"""Tests that errors that would occur on any cluster end a RayJob at once, and that other errors can be retried."""

from __future__ import annotations

import json

import pytest

from sunspot.errors import (
    ConflictError,
    DamageError,
    DataError,
    NotFoundError,
    RefusedStorageError,
    SettingsError,
    StorageError,
    SunspotError,
    SupersededError,
)
from sunspot.ray_internals import job


def config(submission: str) -> str:
    return json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": submission}})


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ({"RAY_CLUSTER_NAME": "run-1a2b-x7k2p", "RAY_JOB_CONFIG_JSON_ENV_VAR": config("run-1a2b-9fwqz")}, True),
        ({"RAY_CLUSTER_NAME": "shared", "RAY_JOB_CONFIG_JSON_ENV_VAR": config("run-1a2b-9fwqz")}, False),
        ({"RAY_CLUSTER_NAME": "run-1a2b-x7k2p", "RAY_JOB_CONFIG_JSON_ENV_VAR": config("raysubmit_x")}, False),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": config("run-1a2b-9fwqz")}, False),
        ({}, False),
    ],
    ids=["own cluster", "shared cluster", "own name of the job", "no KubeRay", "no job"],
)
def test_a_kuberay_job_in_its_own_cluster_is_recognized(
    environment: dict[str, str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_CLUSTER_NAME", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bool(job.find_own_job()) is own


@pytest.mark.parametrize(
    ("kind", "final"),
    [
        (SettingsError, True),
        (NotFoundError, True),
        (ConflictError, True),
        (SupersededError, True),
        (RefusedStorageError, True),
        (StorageError, False),
        (DamageError, False),
        (DataError, True),
        (SunspotError, False),
    ],
)
def test_only_errors_that_would_occur_on_any_cluster_are_final(
    kind: type[SunspotError], final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setenv("RAY_CLUSTER_NAME", "run-1-y")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "run-1-x"}}')

    def fail() -> int:
        raise kind("why")

    with pytest.raises(kind):
        job.end_for_good(fail, lambda name, error: ended.append(name))()
    assert ended == (["run-1-x"] if final else [])


@pytest.mark.parametrize("given", [config("run-1a2b-9fwqz"), '{"metadata": null}'])
def test_an_error_is_still_raised_if_ray_cannot_record_the_status_of_the_job(
    given: str, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_NAME", "run-1a2b-x7k2p")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", given)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def fail() -> int:
        raise SettingsError("why")

    with pytest.raises(SettingsError):
        job.end_for_good(fail)()
    assert "might start this job again" in warned[0]
