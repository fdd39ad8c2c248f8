"""Tests that each worker reads only its parts of the weights in INIT_FROM."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import sunspot.checkpoint.weight_files
from sunspot.checkpoint.dcp import write_dcp
from sunspot.checkpoint.tensors import parameter_names
from sunspot.elastic.restore import find_init_files, load_init_files, load_initial
from sunspot.errors import ConflictError, SettingsError
from sunspot.run.attempts import Attempt
from sunspot.settings import Settings
from sunspot.train.build import build_model
from tests.harness.constants import SetConstants
from tests.harness.process_group import in_processes

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A language model with tied weights, an odd number of rows and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def save_index(model: nn.Module, folder: Path) -> Path:
    names = sorted(model.state_dict().keys() - {"head.weight"})
    for number in range(2):
        tensors = {name: model.state_dict()[name] for name in names[number::2]}
        save_file(tensors, folder / f"{number}.safetensors")
    index = {"weight_map": {name: f"{at % 2}.safetensors" for at, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def save_one_file(model: nn.Module, folder: Path) -> Path:
    save_model(model, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def save_with_torch(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def save_not_in_order(model: nn.Module, folder: Path) -> Path:
    turned = {
        name: value.t().contiguous().t() if value.ndim > 1 else value for name, value in model.state_dict().items()
    }
    torch.save(turned, folder / "model.pt")
    return folder / "model.pt"


def save_dcp(model: nn.Module, folder: Path) -> Path:
    return save_in_folder({"model": model.state_dict(), "optimizer": {"state": torch.ones(2)}, "step": 3}, folder)


def save_only_weights_with_dcp(model: nn.Module, folder: Path) -> Path:
    return save_in_folder(model.state_dict(), folder)


def save_in_folder(state: dict[str, Any], folder: Path) -> Path:
    import torch.distributed.checkpoint  # imported lazily, because it takes seconds

    torch.distributed.checkpoint.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


FORMS = [save_index, save_one_file, save_with_torch, save_not_in_order, save_dcp, save_only_weights_with_dcp]


def begin(file: Path, group: Any, parallel: str = "fsdp", build: Callable[[], nn.Module] = Tied) -> nn.Module:
    """Return the model of a new run with these weights."""
    settings = Settings(init_from=str(file), parallel=parallel)
    state = load_initial(settings, group)
    task: Any = SimpleNamespace(build_model=lambda *_: build())
    place: Any = SimpleNamespace(device=CPU, world_size=1, replicas=None)
    model = build_model(SimpleNamespace(settings=settings, source=None), task, state, Attempt(1, "own", None, 0), place)
    if state.load_parts:
        state.load_parts(model, torch.optim.SGD(model.parameters()))
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("save", FORMS, ids=lambda save: save.__name__)
def test_a_sharded_model_begins_with_the_weights_of_a_file(
    save: Callable[[nn.Module, Path], Path], tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(sunspot.checkpoint.weight_files, PIECE_BYTES=24)  # a matrix then has several pieces
    torch.manual_seed(1)
    saved = Tied()
    saved.norm.running_mean.fill_(4)
    file = save(saved, tmp_path)

    def compare(group: object) -> bool:
        model = begin(file, group)
        found = whole(model)
        assert found.keys() == saved.state_dict().keys()
        assert model.head.weight is model.embedding.weight
        return all(torch.equal(value, found[name]) for name, value in saved.state_dict().items())

    assert in_processes(tmp_path, 2, compare) == [True, True]


def test_a_worker_needs_memory_only_for_its_shard_and_a_buffer(tmp_path: Path, set_constants: SetConstants) -> None:
    set_constants(sunspot.checkpoint.weight_files, PIECE_BYTES=1 << 20)
    build = lambda: nn.Sequential(*(nn.Linear(1024, 4096) for _ in range(8)))  # noqa: E731
    file, small = save_one_file(build(), tmp_path), save_with_torch(Tied(), tmp_path)

    def find_peak(group: object) -> float:
        """Return the MiB by which the peak of this process's memory grows."""
        begin(small, group)  # imports modules
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = read_mib("VmRSS")
        model = begin(file, group, build=build)
        assert sum(parameter.numel() for parameter in model.parameters()) > 32 << 20
        return read_mib("VmHWM") - before

    assert max(in_processes(tmp_path, 4, find_peak)) < 128 / 4 + 32


def read_mib(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("save", [save_dcp, save_only_weights_with_dcp], ids=lambda save: save.__name__)
def test_a_ddp_run_can_begin_with_the_weights_in_a_dcp_folder(
    save: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    saved = Tied()
    model = begin(save(saved, tmp_path), None, "ddp")
    found = model.state_dict()
    assert model.head.weight is model.embedding.weight
    assert all(torch.equal(value, found[name]) for name, value in saved.state_dict().items())


def test_torch_and_a_new_run_can_load_a_checkpoint_in_dcp_format(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved = Tied()
    optimizer = torch.optim.Adam([*saved.parameters()][::-1])
    sum(parameter.sum() for parameter in saved.parameters()).backward()
    optimizer.step()
    names = {"parameters": parameter_names(saved, optimizer)}
    for name, state in [("model", saved.state_dict()), ("optimizer", optimizer.state_dict()), ("extra_state", names)]:
        torch.save(state, tmp_path / f"{name}.pt")
    for _ in range(2):  # the second time, the files are there
        write_dcp(tmp_path)

    averages = {"layers.0.weight": {"exp_avg": torch.zeros(3, 3)}, "norm.bias": {"exp_avg": torch.zeros(3)}}
    weights = {name: torch.zeros_like(value) for name, value in saved.state_dict().items()}
    dcp.load({"model": weights, "optimizer": {"state": averages}}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(value, weights[name]) for name, value in saved.state_dict().items())
    assert all(torch.allclose(each["exp_avg"], torch.tensor(0.1)) for each in averages.values())

    begun = begin(tmp_path, None, "ddp").state_dict()
    assert all(torch.equal(value, begun[name]) for name, value in saved.state_dict().items())


def test_weights_that_do_not_fit_the_model_are_rejected(tmp_path: Path) -> None:
    saved = Tied()
    saved.layers[1] = nn.Linear(3, 5)
    file = save_dcp(saved, tmp_path)
    with pytest.raises(ConflictError, match=r"/dcp: the weights do not fit .*size mismatch for layers\.1\.weight"):
        begin(file, None, "ddp")


def test_tied_weights_with_different_values_are_rejected(tmp_path: Path) -> None:
    file = save_in_folder({**Tied().state_dict(), "head.weight": torch.zeros(7, 3)}, tmp_path)
    with pytest.raises(
        SettingsError, match=r"/dcp: embedding\.weight and head\.weight differ, but the model ties them"
    ):
        begin(file, None, "ddp")


def test_files_that_change_while_workers_read_them_are_rejected(tmp_path: Path) -> None:
    settings = Settings(init_from=str(save_one_file(Tied(), tmp_path)), parallel="fsdp")
    found = find_init_files(settings)
    assert found
    save_one_file(Tied(), tmp_path)
    with pytest.raises(ConflictError, match=r"model\.safetensors was replaced while it was being read"):
        load_init_files(settings, found, Tied())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConflictError, match=r"model\.safetensors was replaced while it was being read"):
        load_init_files(settings, found, Tied())


class Harmful:
    """An object with a pickle that creates a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def test_dcp_metadata_with_foreign_objects_is_rejected_and_runs_no_code(tmp_path: Path) -> None:
    proof, file = tmp_path / "proof", save_dcp(Tied(), tmp_path)
    (file / ".metadata").write_bytes(pickle.dumps(Harmful(proof)))
    with pytest.raises(SettingsError, match=r"INIT_FROM=.*/dcp: \.metadata cannot be used: .*contains pathlib\.Path\."):
        load_initial(Settings(init_from=str(file)), None)
    assert not proof.exists()


def test_an_incomplete_dcp_folder_is_rejected(tmp_path: Path) -> None:
    file = save_dcp(Tied(), tmp_path)
    (file / "__0_0.distcp").unlink()
    with pytest.raises(SettingsError, match=r"/dcp: \.metadata cannot be used: .*__0_0\.distcp is missing"):
        load_initial(Settings(init_from=str(file)), None)


def test_a_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(SettingsError, match=r"it is a folder without \.metadata; use"):
        load_initial(Settings(init_from=str(tmp_path)), None)
