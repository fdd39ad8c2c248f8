"""Runs a checkpoint's model in other Ray processes, as an actor or in a single task."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from sunspot.errors import GaveUpError, SettingsError, SunspotError, find_in, shorten
from sunspot.plan import Plan, choose_resources
from sunspot.predict.classifier import Classifier, print_warnings
from sunspot.ray_session import enter_folder, ray_session
from sunspot.settings import PREFIX
from sunspot.settings.file import find_task
from sunspot.storage.local import local_path

START_S = 600
"""Seconds within which a worker must start. It waits for a core, imports torch and reads the checkpoint twice."""


ModelWorker = ray.remote(Classifier)
"""A Ray actor class with the methods of `Classifier`: `ModelWorker.remote(run, checkpoint, storage, use_gpu)`.

`storage` and the files to predict are paths on the actor's node. `model_worker` starts an actor and stops it.
"""


@contextmanager
def model_worker(
    run: str, checkpoint: str = "newest", storage: str = "runs", use_gpu: str = "auto", task: str = ""
) -> Iterator[Any]:
    """Context manager that starts a `ModelWorker` and stops it on exit. Starts and stops Ray if needed.

    If the run trained your own task, pass the task's module as `task`. It can be omitted if SUNSPOT_TASK or
    sunspot.toml names the module (`open_checkpoint`).

    The worker gets one core, and a GPU if Ray has one and `use_gpu` allows it. Raises the errors of `Classifier`, and
    `GaveUpError` if the worker is not ready after START_S seconds.
    """
    with ray_session():
        gpu = wants_gpu(use_gpu)
        worker = ModelWorker.options(num_cpus=1, num_gpus=int(gpu)).remote(  # type: ignore[attr-defined]
            absolute_path(run),
            absolute_path(checkpoint),
            absolute_path(storage, name=False),
            "true" if gpu else "false",
            os.getcwd(),
            find_task(task),
        )
        try:
            print_warnings(get_result(worker.describe.remote(), START_S, "a worker with the model")["warnings"])
            yield worker
        finally:
            ray.kill(worker)


def call_in_task(
    act: Callable[[Plan, str, str, str], Any], plan: Plan, run: str, checkpoint: str, limit_s: float
) -> Any:
    """Call `act(plan, run, checkpoint, use_gpu)` in a Ray task with a training worker's resources.

    A node that can run a training worker can also run this task. Raises whatever `act` raises, and `GaveUpError` if
    `act` has not returned after `limit_s` seconds.
    """
    with ray_session():
        nodes = sum(node["Alive"] for node in ray.nodes())
        wanted = dict(choose_resources(plan.settings, ray.cluster_resources(), nodes).per_worker)
        cpus = wanted.pop("CPU", 0.0)
        gpus = wanted.pop("GPU", 0.0)
        task = ray.remote(_call).options(num_cpus=cpus, num_gpus=gpus, resources=wanted)
        reference = task.remote(os.getcwd(), act, plan, run, checkpoint, "true" if gpus else "false")
        try:
            return get_result(reference, limit_s, "a task with the model")
        except GaveUpError:
            # Other tasks are not cancelled, because cancelling a task that is ending can abort this process.
            ray.cancel(reference, force=True)
            raise


def _call(folder: str, act: Callable[..., Any], *arguments: Any) -> Any:
    enter_folder(folder)
    return act(*arguments)


def wants_gpu(use_gpu: str) -> bool:
    """Return True if a worker should request a GPU, because Ray has one and `use_gpu` is not 'false'.

    Raises `SettingsError` if `use_gpu` is 'true' but Ray has no GPU, because the worker would wait forever.
    """
    available = ray.cluster_resources().get("GPU", 0) >= 1
    if use_gpu == "true" and not available:
        raise SettingsError(f"{PREFIX}USE_GPU=true, but Ray has no GPU here; set it to auto")
    return available and use_gpu != "false"


def get_result(reference: Any, limit_s: float | None, what: str) -> Any:
    """Return a worker's result. `what` describes the worker in messages.

    Raises the worker's `SunspotError`, or a `SunspotError` that explains how the worker failed. Raises `GaveUpError` if
    there is no result after `limit_s` seconds.
    """
    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        raise GaveUpError(
            f"{what} was not ready after {limit_s:.0f} s; check that Ray has a free core for it"
        ) from error
    except ray.exceptions.RayError as error:
        raise find_in(error) or SunspotError(f"{what} failed: {shorten(error)}") from error


def absolute_path(location: str, name: bool = True) -> str:
    """Return an absolute path, because workers can have a different working directory. URLs are returned unchanged.

    If `name` is True, a `location` without a '/' is a run's name and is returned unchanged.
    """
    is_path = "://" not in location and ("/" in location or not name)
    return str(local_path(location)) if is_path else location
