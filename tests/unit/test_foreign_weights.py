"""Tests for weights saved by other programs: tied weights, wrapped models and nested state_dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from sunspot.checkpoint.files import load_weights
from sunspot.checkpoint.foreign_weights import fit_names
from sunspot.elastic.restore import read_init
from sunspot.errors import ConflictError, SettingsError
from sunspot.settings import Settings


class Tied(nn.Module):
    """A small language model with the same weights in its head and its embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def load(model: nn.Module, state: Any) -> None:
    load_weights(model, fit_names(model, state, "file"), "file")


def test_a_tied_tensor_stored_once_is_loaded_under_both_names(tmp_path: Path) -> None:
    saved, model = Tied(), Tied()
    save_model(saved, str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors").keys() & {"embedding.weight", "head.weight"}) == 1
    load(model, read_init(Settings(init_from=str(tmp_path / "model.safetensors")), None))
    assert torch.equal(model.head.weight, saved.embedding.weight)
    assert model.head.weight is model.embedding.weight


def test_a_missing_tensor_that_is_not_tied_is_rejected() -> None:
    state = Tied().state_dict()
    del state["head.weight"]
    with pytest.raises(ConflictError, match=r"file: the weights do not fit .*head\.weight"):
        load(Tied(tied=False), state)


def test_different_values_for_tied_tensors_are_rejected() -> None:
    with pytest.raises(SettingsError, match=r"INIT_FROM=file: .* differ, but the model ties them"):
        load(Tied(), Tied(tied=False).state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_the_parameter_names_of_a_wrapped_model_are_recognized(prefix: str) -> None:
    saved, model = Tied(tied=False), Tied(tied=False)
    load(model, {prefix + name: value for name, value in saved.state_dict().items()})
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_parameter_names_of_a_compiled_module_are_recognized() -> None:
    saved, model = Tied(tied=False), Tied(tied=False)
    names = {"head.weight": "head._orig_mod.weight"}
    load(model, {names.get(name, name): value for name, value in saved.state_dict().items()})
    assert torch.equal(model.head.weight, saved.head.weight)


def test_a_model_with_a_submodule_named_module_keeps_its_parameter_names() -> None:
    saved, model = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    load(model, saved.state_dict())
    assert torch.equal(model["module"].weight, saved["module"].weight)
    load(model, {f"module.{name}": value for name, value in saved.state_dict().items()})


def test_the_error_for_a_nested_state_dict_says_what_to_save() -> None:
    state = {"epoch": 3, "state_dict": Tied().state_dict(), "optimizer_states": []}
    with pytest.raises(SettingsError, match=r"contains epoch, state_dict, .*only the state_dict, .*\(FILE\)"):
        load(Tied(), state)
