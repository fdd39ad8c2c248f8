"""A Ray actor with the model of a verified checkpoint, and how it is started, asked and ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from app.errors import GaveUpError, SettingsError, SunspotError, find_in, shorten
from app.predict.classifier import Classifier
from app.ray_session import ray_session
from app.settings import PREFIX

START_S = 600
"""The most that a worker may take to be there: a free core, a process, torch, and the checkpoint read twice."""


@ray.remote
class ModelWorker(Classifier):
    """A Ray actor with the model of a verified checkpoint: `ModelWorker.remote(run, checkpoint, storage, use_gpu)`.

    `storage`, and files to predict, are paths as the actor's node sees them. See `Classifier` for what it takes and
    answers, and `model_worker` for one that is cleaned up.
    """


@contextmanager
def model_worker(
    run: str,
    checkpoint: str = "newest",
    storage: str = "runs",
    use_gpu: str = "auto",
    resources: Mapping[str, float] | None = None,
    limit_s: float = START_S,
) -> Iterator[Any]:
    """A `ModelWorker` that has its model; gone when the context ends, whatever ends it, and Ray too if it began here.

    It gets one core, and a GPU if Ray has one and `use_gpu` allows it, or just the `resources` given. Raises what
    `Classifier` raises, and `GaveUpError` when it is not ready after `limit_s`.
    """
    with ray_session():
        wanted = dict(resources) if resources else {"CPU": 1.0, "GPU": float(use_a_gpu(use_gpu))}
        cpus, gpus = wanted.pop("CPU", 0.0), wanted.pop("GPU", 0.0)
        worker = ModelWorker.options(num_cpus=cpus, num_gpus=gpus, resources=wanted).remote(  # type: ignore[attr-defined]
            absolute(run), absolute(checkpoint), absolute(storage, always=True), "true" if gpus else "false"
        )
        try:
            for text in answer(worker.about.remote(), limit_s, "a worker with the model")["warnings"]:
                warn(text)
            yield worker
        finally:
            ray.kill(worker)


def use_a_gpu(use_gpu: str) -> bool:
    """Whether to ask Ray for a GPU: one that it does not have would be waited for without end."""
    there = ray.cluster_resources().get("GPU", 0) >= 1
    if use_gpu == "true" and not there:
        raise SettingsError(f"{PREFIX}USE_GPU=true: Ray has no GPU here; set it to auto")
    return there and use_gpu != "false"


def answer(reference: Any, limit_s: float | None, what: str) -> Any:
    """What a worker answers; raises its own `SunspotError`, or one that says what became of it."""
    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        raise GaveUpError(f"{what}: not there after {limit_s:.0f} s; is a core of Ray's free for it?") from error
    except ray.exceptions.RayError as error:
        raise find_in(error) or SunspotError(f"{what}: {shorten(error)}") from error


def absolute(place: str, always: bool = False) -> str:
    """A local path made absolute, as workers may run in another directory; what has no '/' is a name."""
    is_path = "://" not in place and ("/" in place or always)
    return str(Path(place).expanduser().absolute()) if is_path else place


def warn(text: str) -> None:
    """What a user should know, apart from what was asked for."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
