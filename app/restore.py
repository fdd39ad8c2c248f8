"""Where a worker group starts: the next attempt, the newest good checkpoint, and the weights in it."""

from __future__ import annotations

import io
import platform
import socket
from typing import Any

import numpy as np
import ray
import torch

from app.checkpoint import load_state
from app.errors import ConflictError, NotFoundError, SettingsError, shorten
from app.layout import Run, open_run
from app.layout.attempts import CLAIM_TRIES, Attempt, claim, read_attempts, read_error, refuse_if_superseded
from app.layout.checkpoints import Checkpoint, find_newest_good
from app.layout.storage import open_storage
from app.settings import Settings


def begin_attempt(
    run: Run, owner: str, settings: Settings, world_size: int
) -> tuple[Attempt | None, Checkpoint | None]:
    """Claim the next attempt, from the newest good checkpoint; (None, None) when this job may not train on."""
    for _ in range(CLAIM_TRIES):
        attempts = read_attempts(run)
        try:
            refuse_if_superseded(attempts, owner)
        except ConflictError:
            return None, None
        if attempts and attempts[-1].owner == owner and read_error(run, attempts[-1].number):
            return None, None
        checkpoint, skipped = find_newest_good(run, attempts)
        attempt = Attempt(
            number=attempts[-1].number + 1 if attempts else 1,
            owner=owner,
            starts_from=checkpoint.name if checkpoint else None,
            step=checkpoint.step if checkpoint else 0,
            skipped=skipped,
            about={
                "host": socket.gethostname(),
                "world_size": world_size,
                "settings": settings.environment(),
                "versions": versions(),
            },
        )
        if claim(run, attempts, attempt):
            return attempt, checkpoint
    raise ConflictError(f"{run.location}: {CLAIM_TRIES} claims lost in a row to other processes that train this run")


def read_init(settings: Settings) -> Any:
    """The state_dict that INIT_FROM names: another run's newest good checkpoint, or a file."""
    wanted = settings.init_from
    if wanted.startswith("run:"):
        other = open_run(settings.storage_path, wanted.removeprefix("run:"))
        checkpoint, _ = find_newest_good(other, read_attempts(other))
        if not checkpoint:
            raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: {other.location} has no good checkpoint")
        return load_state(other, checkpoint, "model.pt")
    folder, _, file = wanted.rpartition("/")
    try:
        content = open_storage(folder or ".").read(file)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except NotFoundError as error:
        raise SettingsError(f"SUNSPOT_INIT_FROM={wanted}: no such file") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingsError(
            f"SUNSPOT_INIT_FROM={wanted}: not a state_dict saved by torch.save: {shorten(error)}"
        ) from error


def load_weights(model: torch.nn.Module, state: Any, origin: str) -> None:
    """Put a state_dict into the model; raises `ConflictError` naming its `origin` when it does not fit."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"{origin}: its weights do not fit the model that the task builds: {shorten(error)}"
        ) from error


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "numpy": np.__version__,
    }
