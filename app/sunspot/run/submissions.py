"""The manifests of a run as they were applied to a cluster: each below a line with the SHA-256 of the rest."""

import hashlib
import re

from sunspot.errors import DamageError
from sunspot.run import Run
from sunspot.run.objects import read_content

SUBMISSION = re.compile(r"[0-9]{4,9}-[a-z0-9]([-a-z0-9]*[a-z0-9])?\.yaml")
"""A file of `submissions/`; others are not ours."""

HEAD = "# sha256: "
"""The beginning of the first line."""


def record_submission(run: Run, job: str, manifest: str) -> str:
    """Keep the manifest (YAML) to be applied as `job`; returns the storage key. Raises `StorageError`."""
    content = f"{HEAD}{_digest(manifest)}\n{manifest}".encode()
    number = len(list_submissions(run)) + 1
    while not run.storage.create(key := run.key("submissions", f"{number:04d}-{job}.yaml"), content):
        number += 1
    return key


def newest_submission(run: Run) -> tuple[str, str] | None:
    """Return job name and manifest (YAML) of the last submission, if any; raises `DamageError`."""
    keys = list_submissions(run)
    if not keys:
        return None
    place = run.storage.locate(keys[-1])
    try:
        manifest = read_content(run.storage, keys[-1]).decode()
    except UnicodeDecodeError as error:
        raise DamageError(f"{place} cannot be used: it is no text") from error
    first, _, manifest = manifest.partition("\n")
    if first != HEAD + _digest(manifest):
        raise DamageError(f"{place} cannot be used: it was changed after it was written")
    return _job(keys[-1]), manifest


def owner_of(run: Run, job: str) -> str:
    """Return the owner of a process of `job` that starts now: the job, and how often it has been submitted."""
    times = sum(_job(key) == job for key in list_submissions(run))
    return f"{job}#{times}" if times else job


def list_submissions(run: Run) -> list[str]:
    """Return the storage keys of the manifests, oldest first."""
    ours = [file for file, _ in run.entries("submissions") if SUBMISSION.fullmatch(file)]
    return [run.key("submissions", file) for file in sorted(ours, key=lambda file: int(file.partition("-")[0]))]


def _job(key: str) -> str:
    return key.rpartition("/")[2].partition("-")[2].removesuffix(".yaml")


def _digest(manifest: str) -> str:
    return hashlib.sha256(manifest.encode()).hexdigest()
