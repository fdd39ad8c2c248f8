"""Sets constants of the program to values that a test can reach, such as short intervals and small sizes."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Protocol

import pytest


class SetConstants(Protocol):
    """The type of the fixture `set_constants`."""

    def __call__(self, module: ModuleType | str, **values: Any) -> None: ...


@pytest.fixture
def set_constants(monkeypatch: pytest.MonkeyPatch) -> SetConstants:
    """Return a function that sets constants of a module until the test ends: `set_constants(site, EVERY_S=0.0)`.

    This is the only way in which tests set constants. A fake part is an argument of a constructor or function instead.
    """

    def set_values(module: ModuleType | str, **values: Any) -> None:
        place = importlib.import_module(module) if isinstance(module, str) else module
        for name, value in values.items():
            before = getattr(place, name)
            assert name.isupper(), f"{name} is not a constant"
            assert isinstance(value, (int, float) if isinstance(before, (int, float)) else type(before)), name
            monkeypatch.setattr(place, name, value)

    return set_values
