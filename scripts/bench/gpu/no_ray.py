"""Replaces Ray in this process by empty modules, so that modules that import Ray can be imported without it.

Sunspot's loop, worker and loader call nothing of Ray's in a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def install() -> None:
    """Make every later import of Ray return an empty module, whether Ray is installed or not."""
    sys.meta_path.insert(0, RayFinder())


def invent(_: object, name: str) -> Any:
    """Return a class that can also serve as a function, a decorator, a base class or an exception."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Invented(name, (Exception,), {"__init__": lambda *_, **__: None, "__getattr__": invent})


class Invented(type):
    """A metaclass whose classes have every attribute."""

    __getattr__ = invent


class EmptyModule(ModuleType):
    """A module that has every attribute."""

    __getattr__ = invent
    __version__ = "replaced"


class RayFinder(MetaPathFinder, Loader):
    """An importer of empty modules in place of Ray's."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "ray" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module stays empty."""
