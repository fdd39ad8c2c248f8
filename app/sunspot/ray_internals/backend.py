"""Sets up torch's process group as Ray Train does, alone or beside what another library trains through.

ray.train.torch.config._TorchBackend   Ray's backend for torch: its configuration is public, the backend is not
a group's execute_single_async         to run something on one worker before the training function begins: of a
                                       backend, the hooks are public, but not the group that they are given
"""

import time
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend as PublicBackend
from ray.train.torch import TorchConfig

_TorchBackend: Any = TorchConfig().backend_cls  # Ray has no public name for it

_up: float | None = None


class Backend(_TorchBackend):
    """Ray's; runs in Ray Train's controller."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Form the process group, now that all processes answer."""
        worker_group.execute_single_async(0, note_processes_up)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Do nothing, as Ray is about to kill the processes.

        Its own backend has each destroy its process group first, which takes seconds, or for ever, when a peer is gone.
        """


class BackendConfig(TorchConfig):
    """Ray's `TorchConfig` for this backend."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend


class SurvivorBackend(PublicBackend):
    """Lets each worker be lost and replaced by itself; they form their process groups without Ray."""

    has_replica_groups = True


class SurvivorConfig(BackendConfig):
    """The configuration of that backend."""

    @property
    def backend_cls(self) -> Any:
        return SurvivorBackend


@dataclass
class LibraryConfig(BackendConfig):
    """torch's process group, through which workers agree, and beside it what the library trains through."""

    library: Any = None
    "Ray's configuration of the library."

    @property
    def backend_cls(self) -> type[Backend]:
        return LibraryBackend

    @property
    def train_func_context(self) -> Any:
        return self.library.train_func_context


class LibraryBackend(Backend):
    """Sets up both; runs in Ray Train's controller."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_start(worker_group, backend_config)
        self._library = backend_config.library.backend_cls()
        self._library.on_start(worker_group, backend_config.library)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_training_start(worker_group, backend_config)
        self._library.on_training_start(worker_group, backend_config.library)


def note_processes_up() -> None:
    """Remember that all processes of the group answer; runs on rank 0."""
    global _up
    _up = time.time()


def processes_up() -> float | None:
    """When all processes of the group answered, in seconds since the epoch; known to rank 0."""
    return _up
