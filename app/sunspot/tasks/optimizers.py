"""Several optimizers of one task, which are saved and restored as one."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch


class Optimizers(torch.optim.Optimizer):
    """Optimizers by name, each of its own parameters; together they have one state, and one list of groups.

    So a checkpoint is like that of a single one. Raises `ValueError` for a parameter that two of them have.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._named = dict(optimizers)
        super().__init__([group for each in self._named.values() for group in each.param_groups], {})
        for each in self._named.values():
            self.state.update(each.state)
        self._share()
        self.register_load_state_dict_post_hook(lambda _: self._share())

    def __getitem__(self, name: str) -> torch.optim.Optimizer:
        return self._named[name]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each."""
        for each in self._named.values():
            each.step()

    def _share(self) -> None:
        """Have each work on the common state, and on its own of the groups."""
        groups = iter(self.param_groups)
        for each in self._named.values():
            each.__setstate__({"state": self.state, "param_groups": [*islice(groups, len(each.param_groups))]})


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that take the steps of this one: itself, or those that it consists of."""
    return list(optimizer._named.values()) if isinstance(optimizer, Optimizers) else [optimizer]
