"""Copies the best trial's checkpoint into the search's run, verifying each file and writing the manifest last."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sunspot.checkpoint import versions
from sunspot.checkpoint.files import upload
from sunspot.errors import DamageError, NotFoundError
from sunspot.run import Run
from sunspot.run.attempts import (
    Attempt,
    Metadata,
    attempt_of,
    checkpoint_name,
    claim_next,
    ensure_owner,
    new_nonce,
    next_number,
    read_attempts,
)
from sunspot.run.checkpoints import (
    Checkpoint,
    delete_checkpoint,
    find_newest_good,
    list_directories,
    read_manifest,
    write_manifest,
)


def begin_attempt(run: Run, owner: str, environment: Mapping[str, str], origin: Checkpoint | None) -> Attempt:
    """Claim a new attempt of the search. It starts from checkpoint `origin`, or from scratch if `origin` is None.

    Raises `SupersededError` if another process has taken over the search.
    """

    def make(attempts: list[Attempt]) -> Attempt:
        return Attempt(
            number=next_number(attempts),
            owner=owner,
            starts_from=origin.name if origin else None,
            step=origin.step if origin else 0,
            metadata=Metadata(
                settings=dict(environment),
                versions=versions(),
                host=socket.gethostname(),
                tier="storage" if origin else "beginning",
            ),
            nonce=new_nonce(),
        )

    return claim_next(run, make)[-1]  # `make` always returns an attempt


def promote(run: Run, owner: str, environment: Mapping[str, str], trial: Run, name: str) -> Checkpoint:
    """Replace the checkpoints of the search `run` with a copy of the trial's checkpoint `name`, and return the copy.

    `environment` holds the trial's settings. An interrupted call can be repeated. Raises `DamageError` if the
    checkpoint does not match its manifest, `NotFoundError` if it was deleted, `StorageError` if storage fails, and
    `SupersededError` if another process has taken over the search.
    """
    wanted = read_manifest(trial, name)
    if wanted is None:
        raise NotFoundError(f"{trial.storage.locate(trial.key('checkpoints', name))} was deleted")
    if wanted.damage:
        raise DamageError(f"{name}: {wanted.damage}")
    current, _ = find_newest_good(run, read_attempts(run))
    if current and _content(current) == _content(wanted):
        return current
    attempt = begin_attempt(
        run, owner, environment, None
    )  # from step 0, because a better checkpoint can have fewer steps
    name = checkpoint_name(wanted.step, attempt.number, attempt.nonce)
    promoted = replace(wanted, name=name, attempt=attempt.number)
    files = {file: _copy(trial, wanted, run, promoted.name, file) for file in wanted.files}
    ensure_owner(run, attempt)
    promoted = replace(promoted, files=files)
    write_manifest(run, promoted)
    for directory in list_directories(run):
        if attempt_of(directory) < attempt.number:
            delete_checkpoint(run, directory)
    return promoted


def _content(checkpoint: Checkpoint) -> Any:
    return checkpoint.step, {file: entry["sha256"] for file, entry in checkpoint.files.items()}


def _copy(trial: Run, wanted: Checkpoint, run: Run, name: str, file: str) -> dict[str, Any]:
    """Copy a file, and return its entry for the manifest."""
    key = trial.key("checkpoints", wanted.name, file)
    expected = wanted.files[file]
    copied = upload(run, name, file, lambda writer: trial.storage.digest(key, writer.write))
    if (copied["size"], copied["sha256"]) != (expected["size"], expected["sha256"]):
        raise DamageError(f"{trial.storage.locate(key)} does not match its manifest")
    return copied
