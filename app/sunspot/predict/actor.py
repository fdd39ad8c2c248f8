"""A Ray actor with the model of a verified checkpoint: starting it, getting its results, ending it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from sunspot.errors import GaveUpError, SettingsError, SunspotError, find_in, shorten
from sunspot.predict.classifier import Classifier, print_warnings
from sunspot.ray_session import enter_folder, ray_session
from sunspot.settings import PREFIX
from sunspot.storage.local import local_path

START_S = 600
"""Time for a worker to start: a free core, a process, importing torch, reading the checkpoint twice."""


@ray.remote
class ModelWorker(Classifier):
    """A Ray actor with the model of a verified checkpoint: `ModelWorker.remote(run, checkpoint, storage, use_gpu)`.

    `storage`, and files to predict, are paths on the actor's node. `Classifier` documents its methods; `model_worker`
    gives one that is cleaned up.
    """

    def __init__(self, run: str, checkpoint: str, storage: str, use_gpu: str = "auto", folder: str = "") -> None:
        enter_folder(folder)
        super().__init__(run, checkpoint, storage, use_gpu)


@contextmanager
def model_worker(
    run: str,
    checkpoint: str = "newest",
    storage: str = "runs",
    use_gpu: str = "auto",
    resources: Mapping[str, float] | None = None,
    limit_s: float = START_S,
) -> Iterator[Any]:
    """Start a `ModelWorker` with its model; it ends with the context, and so does Ray if it was started here.

    It gets `resources`, by default one core, and a GPU if Ray has one and `use_gpu` allows it. Raises what `Classifier`
    raises, and `GaveUpError` if it is not ready after `limit_s`.
    """
    with ray_session():
        wanted = dict(resources) if resources else {"CPU": 1.0, "GPU": float(wants_gpu(use_gpu))}
        cpus, gpus = wanted.pop("CPU", 0.0), wanted.pop("GPU", 0.0)
        worker = ModelWorker.options(num_cpus=cpus, num_gpus=gpus, resources=wanted).remote(  # type: ignore[attr-defined]
            absolute_path(run),
            absolute_path(checkpoint),
            absolute_path(storage, name=False),
            "true" if gpus else "false",
            os.getcwd(),
        )
        try:
            print_warnings(get_result(worker.describe.remote(), limit_s, "a worker with the model")["warnings"])
            yield worker
        finally:
            ray.kill(worker)


def wants_gpu(use_gpu: str) -> bool:
    """Tell whether to request a GPU from Ray, which would wait for ever for one that it does not have."""
    available = ray.cluster_resources().get("GPU", 0) >= 1
    if use_gpu == "true" and not available:
        raise SettingsError(f"{PREFIX}USE_GPU=true: Ray has no GPU here; set it to auto")
    return available and use_gpu != "false"


def get_result(reference: Any, limit_s: float | None, what: str) -> Any:
    """Wait for a worker's result; raises the worker's `SunspotError`, or one that says what happened to it."""
    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        raise GaveUpError(f"{what}: not there after {limit_s:.0f} s; does Ray have a free core for it?") from error
    except ray.exceptions.RayError as error:
        raise find_in(error) or SunspotError(f"{what}: {shorten(error)}") from error


def absolute_path(location: str, name: bool = True) -> str:
    """Make a local path absolute, as workers may run in another directory; with `name`, only if it has a '/'."""
    is_path = "://" not in location and ("/" in location or not name)
    return str(local_path(location)) if is_path else location
