"""What was submitted to a cluster for a run: each manifest as it was applied, numbered.

The numbers also tell a job that somebody submitted again, which may take the run back, from a retry of the same
submission, which may not (`attempts.refuse_if_superseded`).
"""

from __future__ import annotations

from app.layout import Run


def record_submission(run: Run, job: str, manifest: str) -> str:
    """Keep the manifest (YAML) that is about to be applied as `job`; returns the storage key. Raises `StorageError`."""
    number = len(_submissions(run)) + 1
    while not run.storage.create(key := run.key("submissions", f"{number:04d}-{job}.yaml"), manifest.encode()):
        number += 1
    return key


def newest_submission(run: Run) -> tuple[str, str] | None:
    """Job name and manifest (YAML) of the last submission, or None when there was none."""
    keys = _submissions(run)
    return (_job(keys[-1]), run.storage.read(keys[-1]).decode()) if keys else None


def owner_of(run: Run, job: str) -> str:
    """Who a process of `job` that begins now trains for: the job, and how often it has been submitted."""
    times = sum(_job(key) == job for key in _submissions(run))
    return f"{job}#{times}" if times else job


def _submissions(run: Run) -> list[str]:
    return [entry.key for entry in run.storage.list(run.key("submissions")) if entry.key.endswith(".yaml")]


def _job(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[2].removesuffix(".yaml")
