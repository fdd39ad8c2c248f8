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
    """Ray's, and beside it that of a library; runs in Ray Train's controller."""

    def on_start(self, worker_group: Any, backend_config: "BackendConfig") -> None:
        """Form the process group, now that all processes answer."""
        worker_group.execute_single_async(0, note_processes_up)
        super().on_start(worker_group, backend_config)
        if library := backend_config.library:
            self._library = library.backend_cls()
            self._library.on_start(worker_group, library)

    def on_training_start(self, worker_group: Any, backend_config: "BackendConfig") -> None:
        super().on_training_start(worker_group, backend_config)
        if library := backend_config.library:
            self._library.on_training_start(worker_group, library)

    def on_shutdown(self, worker_group: Any, backend_config: "BackendConfig") -> None:
        """Do nothing, as Ray is about to kill the processes.

        Its own backend has each destroy its process group first, which takes seconds, or for ever, when a peer is gone.
        """


@dataclass
class BackendConfig(TorchConfig):
    """Ray's `TorchConfig` for this backend: workers agree through torch's process group."""

    library: Any = None
    "Ray's configuration of what a library trains through, beside that group; None: it trains through it, too."

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend

    @property
    def train_func_context(self) -> Any:
        return self.library.train_func_context if self.library else super().train_func_context


class SurvivorBackend(PublicBackend):
    """Lets each worker be lost and replaced by itself; they form their process groups without Ray."""

    has_replica_groups = True


class SurvivorConfig(TorchConfig):
    """The configuration of that backend."""

    @property
    def backend_cls(self) -> type[SurvivorBackend]:
        return SurvivorBackend


def note_processes_up() -> None:
    """Remember that all processes of the group answer; runs on rank 0."""
    global _up
    _up = time.time()


def processes_up() -> float | None:
    """When all processes of the group answered, in seconds since the epoch; known to rank 0."""
    return _up
