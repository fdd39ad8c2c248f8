"""Sets up torch's process group as Ray Train does, and the communication of another library if the task needs it.

ray.train.torch.config._TorchBackend   Ray's backend for torch. Its configuration is public, but the backend is not.
a group's execute_single_async         runs a function on one worker before the training function begins. A backend's
                                       hooks are public, but the group that they receive is not.
"""

import time
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend as PublicBackend
from ray.train.torch import TorchConfig

_TorchBackend: Any = TorchConfig().backend_cls  # Ray has no public name for it

_processes_up: float | None = None
"""The time at which all of the group's processes were up, in seconds since the epoch.

It is a module variable because Ray runs `note_processes_up` in the worker before the training function, and the two
share no object.
"""


class Backend(_TorchBackend):
    """Ray's torch backend, combined with a library's backend if one is configured. Runs in Ray Train's controller."""

    def on_start(self, worker_group: Any, backend_config: "BackendConfig") -> None:
        """Form the process group once all processes are up."""
        worker_group.execute_single_async(0, note_processes_up)
        super().on_start(worker_group, backend_config)
        library = backend_config.library
        if library:
            self._library = library.backend_cls()
            self._library.on_start(worker_group, library)

    def on_training_start(self, worker_group: Any, backend_config: "BackendConfig") -> None:
        super().on_training_start(worker_group, backend_config)
        library = backend_config.library
        if library:
            self._library.on_training_start(worker_group, library)

    def on_shutdown(self, worker_group: Any, backend_config: "BackendConfig") -> None:
        """Do nothing, because Ray is about to kill the processes.

        Ray's own backend first makes each process destroy its process group. This takes seconds, or forever if a peer
        is gone.
        """


@dataclass
class BackendConfig(TorchConfig):
    """Ray's `TorchConfig` with our backend. The workers communicate through torch's process group."""

    library: Any = None
    "Ray's configuration of a library with its own communication, or None if it uses torch's process group."

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend

    @property
    def train_func_context(self) -> Any:
        return self.library.train_func_context if self.library else super().train_func_context


class SurvivorBackend(PublicBackend):
    """A backend that lets Ray replace each worker individually. The workers form their process groups without Ray."""

    has_replica_groups = True


class SurvivorConfig(TorchConfig):
    """Configuration of `SurvivorBackend`."""

    @property
    def backend_cls(self) -> type[SurvivorBackend]:
        return SurvivorBackend


def note_processes_up() -> None:
    """Record that all of the group's processes are up. Runs on rank 0."""
    global _processes_up
    _processes_up = time.time()


def processes_up() -> float | None:
    """Return the time at which all of the group's processes were up, in seconds since the epoch.

    Returns None on ranks other than 0.
    """
    return _processes_up
