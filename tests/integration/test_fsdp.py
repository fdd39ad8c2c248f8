"""Tests that PARALLEL=fsdp trains the same weights as ddp and writes checkpoints that load at any world size."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import sunspot.checkpoint.parts
import sunspot.checkpoint.pieces
import sunspot.checkpoint.snapshot
from sunspot.checkpoint import CheckpointManager, SavedObjects
from sunspot.checkpoint.files import load_state, refuse_other_than_tensors
from sunspot.checkpoint.memory_files import find_parts
from sunspot.checkpoint.node_state import NodeState
from sunspot.checkpoint.parts import ShardWriter, load_model, load_parts, load_whole, read_contents
from sunspot.checkpoint.pieces import Piece, group_adjacent, make_metadata, read_index, read_into
from sunspot.data.order import Steps
from sunspot.data.source import EmptySource, read_rows, rows_in
from sunspot.data.text import REFERENCE, open_text, read_text
from sunspot.elastic.restore import find_init_files, load_init_files, read_init
from sunspot.errors import ConflictError, DamageError, DataError, SettingsError
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.gradients import gradient_sync
from sunspot.parallel.sharding import TensorSlice, find_blocks, is_fsdp, part_of, shard_model
from sunspot.plan import Plan, make_plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, claim, lineage, read_attempts
from sunspot.run.checkpoints import (
    ABANDONED_S,
    MANIFEST,
    Checkpoint,
    find_faults,
    find_newest_good,
    list_checkpoints,
    write_manifest,
)
from sunspot.run.history import Journals, read_journal
from sunspot.run.incidents import Cause
from sunspot.run.shards import find_gaps
from sunspot.settings import Settings
from sunspot.tasks import gpt, load_task
from tests.harness import REPOSITORY
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.fsdp_ranks import DDP, FSDP, SHARD_BYTES, STEPS, settings_of
from tests.harness.nodes import start_node
from tests.harness.program import WORKER_NODE, Program
from tests.harness.runs import age
from tests.harness.training import (
    assert_audit_clean,
    assert_complete,
    kill_all,
    newest,
    the_run,
    wait_for_receipts,
    wait_for_step,
    weights,
    worker_processes,
)
from tests.harness.waiting import wait_until

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
"""Tolerance of weights after the same steps on another number of ranks. Sums of gradients are rounded in another order,
and Adam amplifies differences in tiny gradients. On the same number of ranks, weights are equal to 1e-7.
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the finished runs of tests/harness/fsdp_ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.harness.fsdp_ranks", str(folder)]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return folder


def of(groups: Path, name: str, step: int = STEPS) -> tuple[Run, Checkpoint]:
    run = open_run(str(groups), name)
    return run, at_step(run, step)


def at_step(run: Run, step: int) -> Checkpoint:
    return next(checkpoint for checkpoint in list_checkpoints(run) if checkpoint.step == step)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_fsdp_trains_the_same_weights_as_ddp(groups: Path) -> None:
    """The ranks have different numbers of rows, add up gradients over several passes, and load a checkpoint of the
    other kind.
    """
    ddp = load_model(*of(groups, "ddp"))
    assert_close(load_model(*of(groups, "to-fsdp")), ddp, rtol=0, atol=1e-7)
    assert_close(load_model(*of(groups, "to-ddp")), ddp, rtol=0, atol=1e-7)
    assert_close(load_model(*of(groups, "to-hsdp")), ddp, **TOLERANCE)
    before, after = load_model(*of(groups, "ddp", 2)), ddp
    assert not torch.allclose(before["head.weight"], after["head.weight"], atol=1e-3), "the weights have changed"


def test_sharded_checkpoints_can_be_loaded_at_any_world_size(groups: Path) -> None:
    run, final = of(groups, "fsdp")
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [2, 1, 3]
    assert_close(load_model(run, final), load_model(*of(groups, "ddp")), **TOLERANCE)
    ours = load_whole(run, final, read_contents(run, final))["optimizer"]
    theirs = load_state(*of(groups, "ddp"), "optimizer.pt")
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert ours["state"][number]["step"] == values["step"] == STEPS
        torch.testing.assert_close(ours["state"][number]["exp_avg"], values["exp_avg"], **TOLERANCE)


def test_checkpoints_can_be_loaded_with_any_number_of_replicas(groups: Path) -> None:
    """Four ranks in two replicas write a checkpoint. Then three ranks in one replica continue, and then two."""
    run, final = of(groups, "hsdp")
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [4, 3, 2]
    assert_close(load_model(run, final), load_model(*of(groups, "ddp")), **TOLERANCE)


def test_replicas_share_the_work_of_writing_each_shard(groups: Path) -> None:
    run, early = of(groups, "hsdp", 2)
    pieces = read_index(run, early)
    by_rank = [{piece.name for piece in pieces if piece.file.startswith(f"__{rank}_")} for rank in range(4)]
    assert all(by_rank)
    assert not by_rank[0] & by_rank[2]
    assert not by_rank[1] & by_rank[3]


def test_the_last_checkpoint_of_a_sharded_run_also_has_the_model_in_one_file(groups: Path) -> None:
    run, final = of(groups, "fsdp")
    _, early = of(groups, "fsdp", 2)
    assert "model.pt" in final.files
    assert not {"model.pt", "optimizer.pt"} & early.files.keys()
    whole = torch.load(run.storage.locate(run.key("checkpoints", final.name, "model.pt")), weights_only=True)
    assert_close(whole, load_whole(run, final, read_contents(run, final))["model"], rtol=0, atol=0)
    gpt.build_model(settings_of(**DDP), gpt.find_sources(settings_of(**DDP))[0]).load_state_dict(whole)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param("replaced", 4, id="another node replaces it"),
        pytest.param("smaller", 4, id="one rank fewer"),
        pytest.param("damaged", 2, id="one copy is damaged, so an older one is used"),
        pytest.param("adjacent", 0, id="the neighboring node is lost, too, so no copy exists"),
    ],
)
def test_a_group_that_loses_a_node_continues_from_a_copy_in_memory(name: str, step: int, groups: Path) -> None:
    """Node b of three is lost. Two steps later, the weights equal those of an undisturbed group."""
    lost, uninterrupted = (torch.load(groups / f"{each}.pt") for each in (name, "uninterrupted"))
    assert lost["from"] == step
    assert_close(lost["model"], uninterrupted["model"], **(TOLERANCE if name == "smaller" else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("name", ["to-fsdp", "to-ddp"])
def test_the_last_checkpoint_can_include_safetensors(name: str, groups: Path) -> None:
    run, final = of(groups, name)
    files = sorted(file for file in final.files if file.endswith(".safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    assert ("model.pt" in final.files) == (name == "to-ddp")
    assert not find_faults(run, final)
    folder, expected = run.storage.locate(run.key("checkpoints", final.name)), load_model(run, final)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        found = safetensors.torch.load_file(f"{folder}/{file}")
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= SHARD_BYTES
        state |= found
    index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert_close({key: state[key] for key in expected}, expected, rtol=0, atol=0)

    begun = read_init(Settings(init_from=f"{folder}/model.safetensors.index.json"), None)
    assert_close({key: begun[key] for key in expected}, expected, rtol=0, atol=0)
    one = read_init(Settings(init_from=f"{folder}/{files[0]}"), None)
    assert one.keys() == safetensors.torch.load_file(f"{folder}/{files[0]}").keys()


def test_an_invalid_safetensors_file_is_rejected(tmp_path: Path) -> None:
    for name, content in [("a.safetensors", b"?"), ("b.safetensors.index.json", b"[]")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SettingsError, match="use a state_dict"):
            read_init(Settings(init_from=str(tmp_path / name)), None)
    (tmp_path / "c.safetensors.index.json").write_text('{"weight_map": {"weight": "../a.safetensors"}}')
    with pytest.raises(SettingsError, match=r"lists \.\./a\.safetensors"):
        read_init(Settings(init_from=str(tmp_path / "c.safetensors.index.json")), None)

    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

    with pytest.raises(SettingsError, match=r"only supports tensors, but .* _extra_state"):
        refuse_other_than_tensors(Counting(2, 2))
    refuse_other_than_tensors(nn.Linear(2, 2))


def test_torch_can_read_a_sharded_checkpoint(groups: Path) -> None:
    import torch.distributed.checkpoint as dcp  # importing it takes seconds

    run, checkpoint = of(groups, "fsdp", 2)
    expected = load_model(run, checkpoint)
    state = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    folder = run.storage.locate(run.key("checkpoints", checkpoint.name))
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert_close({name.removeprefix("model."): tensor for name, tensor in state.items()}, expected, rtol=0, atol=0)


@pytest.fixture
def copied(groups: Path, run: Run) -> Run:
    """Copy the fsdp run, and return it as this test's run."""
    shutil.copytree(groups / "fsdp", run.location)
    return run


def test_a_new_run_can_start_from_a_sharded_checkpoint(copied: Run) -> None:
    copied.storage.delete(copied.key("checkpoints", list_checkpoints(copied)[-1].name, MANIFEST))
    early = list_checkpoints(copied)[-1]
    assert early.step == 4
    settings = Settings(storage_path=copied.storage.locate(""), init_from="run:run", parallel="fsdp")
    given = read_init(settings, None)
    assert_close(given, load_model(copied, early), rtol=0, atol=0)
    files, begun = find_init_files(settings), gpt.build_model(settings_of(), SimpleNamespace(classes=256))
    assert files
    load_init_files(settings, files, begun)
    assert_close(begun.state_dict(), given, rtol=0, atol=0)
    model = nn.Linear(2, 2)
    with pytest.raises(ConflictError, match="do not fit"):
        load_parts(copied, early, read_contents(copied, early), model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("file", ["__1_1.distcp", "part-00001.json", ".metadata", "model.pt"])
def test_a_checkpoint_with_a_damaged_shard_is_skipped(file: str, copied: Run, sunspot: Command) -> None:
    assert sunspot("checkpoints", "verify", "run") == 0
    final = list_checkpoints(copied)[-1]
    path = Path(copied.storage.locate(copied.key("checkpoints", final.name, file)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert sunspot("checkpoints", "verify", "run") == 7
    assert file in sunspot.out + sunspot.err
    chosen, passed_over = find_newest_good(copied, read_attempts(copied))
    assert chosen.step == 4
    assert str(passed_over[0]).startswith(f"{final.name}: damaged, {file}")
    if file != ".metadata":  # only other programs read it
        with pytest.raises(DamageError, match=file):
            load_model(copied, final) if file == "model.pt" else load_whole(copied, final, read_contents(copied, final))


def test_only_the_bytes_of_requested_tensors_are_read(copied: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    early = list_checkpoints(copied)[0]
    pieces, expected = read_index(copied, early), load_model(copied, early)
    wanted = [piece for piece in pieces if piece.name == "model.blocks.1.feed_in.weight"]
    assert len(wanted) == 2
    into = {wanted[0].name: torch.zeros(wanted[0].shape)}
    read: list[int] = []
    original = io.BufferedReader.read
    opened, storage = copied.storage.open, copied.storage

    @contextmanager
    def counted(key: str, offset: int = 0) -> Iterator[Any]:
        with opened(key, offset) as stream:
            yield SimpleNamespace(read=lambda size: read.append(size) or original(stream, size))

    monkeypatch.setattr(storage, "open", counted)
    read_into(copied, early, wanted, into)
    assert torch.equal(into[wanted[0].name], expected["blocks.1.feed_in.weight"])
    assert sum(read) == sum(piece.size for piece in wanted)
    monkeypatch.undo()

    path = Path(storage.locate(copied.key("checkpoints", early.name, wanted[1].file)))
    content = bytearray(path.read_bytes())
    content[wanted[1].begin + wanted[1].size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamageError, match=r"blocks\.1\.feed_in\.weight does not match the index"):
        read_into(copied, early, wanted, into)
    others = [piece for piece in pieces if piece.name == "model.blocks.1.feed_in.bias"]
    read_into(copied, early, others, {others[0].name: torch.zeros(others[0].shape)})


def piece_at(shape: list[int], offset: list[int], lengths: list[int]) -> Piece:
    return Piece("model.weight", "float32", shape, offset, lengths, "file", 0, 1, 0)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        pytest.param(3, [(0, 2), (0, 1)], id="the second part is at the first position, and row 2 is missing"),
        pytest.param(3, [(0, 2)], id="a part is missing"),
        pytest.param(3, [(0, 2), (0, 2)], id="both parts are at the first position"),
        pytest.param(3, [(0, 2), (1, 1)], id="the parts overlap"),
        pytest.param(3, [(0, 2), (3, 1)], id="a part is outside of the tensor"),
        pytest.param(3, [(-1, 1), (0, 2)], id="a part begins before the tensor"),
        pytest.param(3, [(0, 2), (2, 1), (2, 1)], id="two ranks wrote the same part, perhaps with different values"),
        pytest.param(6, [(0, 3), (2, 1), (4, 2)], id="an overlap is as large as a gap"),
    ],
)
def test_the_parts_of_a_checkpoint_must_contain_each_value_exactly_once(
    rows: int, parts: list[tuple[int, int]]
) -> None:
    pieces = [piece_at([rows, 4], [begin, 0], [length, 4]) for begin, length in parts]
    with pytest.raises(
        DamageError, match=rf"do not contain each of the {4 * rows} values of model\.weight exactly once"
    ):
        make_metadata(pieces)


def test_checkpoint_parts_that_contain_each_value_once_are_accepted() -> None:
    make_metadata([piece_at([3, 4], [2, 0], [1, 4]), piece_at([3, 4], [0, 0], [2, 4])])
    make_metadata(
        [piece_at([2, 3], [0, 0], [1, 2]), piece_at([2, 3], [1, 0], [1, 2]), piece_at([2, 3], [0, 2], [2, 1])]
    )
    for shape in ([], [0], [3, 0], [2, 2, 2]):
        make_metadata([piece_at(shape, [0] * len(shape), shape)])
    with pytest.raises(DamageError):  # each row is right, but the two shapes differ
        make_metadata([piece_at([3, 4], [0, 0], [2, 4]), piece_at([4, 4], [2, 0], [1, 4])])


def test_a_committed_checkpoint_whose_parts_lack_values_is_skipped(copied: Run) -> None:
    """Its files match the manifest, and it also contains the whole model in one file."""
    *_, earlier, final = list_checkpoints(copied)
    path = Path(copied.storage.locate(copied.key("checkpoints", final.name, "part-00001.json")))
    index = json.loads(path.read_bytes())
    piece = next(piece for piece in index["tensors"] if piece["name"] == "model.head.weight")
    piece["offset"] = [0, 0]
    path.write_text(json.dumps(index))
    entry = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    write_manifest(copied, replace(final, files={**final.files, path.name: entry}))
    final = at_step(copied, final.step)

    fault = "the parts do not contain each of the .* values of model.head.weight exactly once"
    chosen, [passed_over] = find_newest_good(copied, read_attempts(copied))
    assert chosen == earlier
    assert re.fullmatch(f"{final.name}: damaged, {fault}", str(passed_over))
    assert not NodeState(copied, None, ["node"]).read(earlier)
    [found] = NodeState(copied, None, ["node"]).read(final)
    assert re.fullmatch(fault, found)
    for read in (read_index, load_model):
        with pytest.raises(DamageError, match=fault):
            read(copied, final)
    given = read_init(Settings(storage_path=copied.storage.locate(""), init_from="run:run", parallel="fsdp"), None)
    assert_close(given, load_model(copied, earlier), rtol=0, atol=0)

    path.write_text("{}")
    assert find_gaps(copied, final) == ["the indexes of the parts cannot be read: KeyError"]
    path.unlink()
    assert find_gaps(copied, final) == ["the indexes of the parts cannot be read: NotFoundError"]


def test_small_adjacent_pieces_of_a_checkpoint_are_read_together(set_constants: SetConstants) -> None:
    set_constants(sunspot.checkpoint.pieces, REQUEST_BYTES=100, CHUNK=10)

    def at(file: str, begin: int, size: int) -> Piece:
        return Piece("tensor", "float32", [1], [0], [1], file, begin, size, 0)

    pieces = [at("a", 0, 40), at("a", 50, 50), at("a", 100, 10), at("a", 121, 9), at("a", 130, 200), at("b", 330, 1)]
    groups = group_adjacent(pieces)
    assert [[piece.begin for piece in group] for group in groups] == [[0, 50], [100], [121], [130], [330]]


class LlamaRMSNorm(nn.Module):
    """A normalization layer like in Hugging Face models, which is not a torch class."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm, LlamaRMSNorm])
def test_gathering_parameters_in_bf16_does_not_change_training_results(norm: type[nn.Module], group: object) -> None:
    def train(parallel: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(norm(120), nn.Linear(120, 120), nn.ReLU()) for _ in range(2)]
        model = shard_model(
            nn.Sequential(*blocks, nn.LayerNorm(120)),
            Settings(parallel=parallel, precision="bf16"),
            torch.device("cpu"),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for passes in (1, 2):
            for number in range(passes):
                with gradient_sync(model, number == passes - 1), torch.autocast("cpu", torch.bfloat16):
                    total = model(torch.randn(8, 120)).square().sum()
                total.backward()
            optimizer.step()
            optimizer.zero_grad()
        if parallel == "fsdp":
            assert model[0][1].weight.to_local().dtype == torch.float32
            assert not is_fsdp(model[0][0])  # a norm has no collectives of its own
            model[0].unshard()
            dtypes = {name: parameter.dtype for name, parameter in model[0].named_parameters()}
            assert (dtypes["0.weight"], dtypes["1.weight"]) == (torch.float32, torch.bfloat16)
            model[0].reshard()
        return [part_of(parameter.detach()).clone() for parameter in model.parameters()]

    for ours, theirs in zip(train("fsdp"), train("ddp"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_checkpoint_commands_accept_sharded_checkpoints(copied: Run, sunspot: Command, tmp_path: Path) -> None:
    early = list_checkpoints(copied)[0]
    assert sunspot("checkpoints", "get", "run", early.name, "--output", str(tmp_path / "out")) == 0
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {*early.files, MANIFEST}
    assert ".metadata" in there
    assert sunspot("checkpoints", "ls", "run", "--json") == 0
    assert {one["verified"] for one in sunspot.json} == {True}
    (Path(copied.location) / "checkpoints" / early.name / MANIFEST).unlink()
    age(copied, ABANDONED_S + 60, "checkpoints", early.name)
    assert sunspot("checkpoints", "gc", "run", "--yes") == 0
    assert early.name not in os.listdir(Path(copied.location) / "checkpoints")


class Halves:
    """A model with half of its rows on each of two ranks, saved without a process group."""

    def __init__(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, wait_s: float = 2, **more: Any
    ) -> None:
        """Create the model. A rank waits for the other part for `wait_s` in addition to the time that its own part
        takes.
        """
        set_constants(sunspot.checkpoint.parts, PEER_TIMEOUT_S=wait_s - 30)
        self._patch = monkeypatch
        attempt = Attempt(1, "me", None, 0)
        assert claim(run, [], attempt)
        self.weight = torch.arange(12.0).view(6, 2)
        settings = Settings(parallel="fsdp", checkpoints_to_keep=9, storage_timeout_s=30, **more)
        plan = Plan(settings, EmptySource((2,), 3), None, Steps(1000, 10), 100)
        journals = Journals(run, 1)
        self.models = [nn.Linear(2, 3, bias=False) for _ in range(2)]
        self.checkpoints = [
            CheckpointManager(
                run,
                attempt,
                plan,
                SavedObjects(model, torch.optim.SGD(model.parameters())),
                place=WorkerPlace(None, rank, 2),
                journals=None if rank else journals,
            )
            for rank, model in enumerate(self.models)
        ]

    def save(self, rank: int, step: int, position: int | None = None) -> None:
        place = TensorSlice((6, 2), (3 * (rank if position is None else position), 0))
        self.models[rank].weight.data = self.weight[3 * rank : 3 * rank + 3] + step
        self._patch.setattr(sunspot.checkpoint.snapshot, "find_slices", lambda _: [place])
        self.checkpoints[rank].save(step, {"loss": 1.0})


def test_a_checkpoint_with_a_missing_shard_is_not_committed(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    halves = Halves(run, monkeypatch, set_constants)
    for rank in (1, 0):
        halves.save(rank, 1)
    halves.checkpoints[0].drain()
    halves.save(0, 2)  # rank 1 is killed before its part is complete
    with pytest.raises(RuntimeError, match="missing parts of ranks 1"):
        halves.checkpoints[0].drain()
    [checkpoint] = list_checkpoints(run)
    assert checkpoint.step == 1
    assert torch.equal(load_model(run, checkpoint)["weight"], halves.weight + 1)
    [passed_over] = find_newest_good(run, read_attempts(run))[1]
    assert str(passed_over) == "step-00000002-attempt-0001: incomplete, it has no manifest"


@pytest.mark.parametrize("weights", ["pt", "safetensors"])
def test_the_commit_of_a_checkpoint_with_a_misplaced_shard_fails_and_is_not_retried(
    weights: str, run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    halves = Halves(run, monkeypatch, set_constants, weights=weights)
    halves.save(1, 1000, position=0)
    halves.save(0, 1000)  # the last step, because only the last checkpoint has safetensors files
    fault = r"cannot be committed: the parts do not contain each of the 12 values of model\.weight exactly once"
    with pytest.raises(RuntimeError, match=fault):
        halves.checkpoints[0].drain()
    assert not any(each.files for each in list_checkpoints(run)), "without a group, rank 1 commits an empty checkpoint"


def test_other_ranks_can_take_longer_than_rank_0_to_write_their_shards(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    halves, write_part = Halves(run, monkeypatch, set_constants, wait_s=0.1), ShardWriter.write_part
    slowly = lambda writer, snapshot: (time.sleep(2 - writer._rank), write_part(writer, snapshot))[1]  # noqa: E731
    monkeypatch.setattr(ShardWriter, "write_part", slowly)
    halves.save(0, 1)
    threading.Timer(2, halves.save, (1, 1)).start()  # it takes one second after rank 0's part, which takes two
    halves.checkpoints[0].drain()
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == [1]


def test_the_commit_waits_for_a_late_shard_and_each_shard_is_written_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    written, write_part = list[int](), ShardWriter.write_part
    note = lambda writer, snapshot: (written.append(writer._rank), write_part(writer, snapshot))[1]  # noqa: E731
    monkeypatch.setattr(ShardWriter, "write_part", note)
    common, failed = ShardWriter.write_common, []

    def fail_once(*given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise DamageError("storage had a bad moment")
        return common(*given)

    monkeypatch.setattr(ShardWriter, "write_common", fail_once)
    halves = Halves(run, monkeypatch, set_constants)
    halves.save(0, 1)
    threading.Timer(0.7, halves.save, (1, 1)).start()
    halves.checkpoints[0].drain()
    [checkpoint] = list_checkpoints(run)
    assert not find_faults(run, checkpoint)
    assert sorted(written) == [0, 1]


def test_the_large_submodules_of_containers_are_found_as_blocks() -> None:
    model = gpt.build_model(settings_of(**FSDP), SimpleNamespace(classes=256))
    assert list(find_blocks(model)) == list(model.blocks)
    small = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(200, 200), nn.Linear(10, 10)))
    assert list(find_blocks(small)) == [small[1]]


# ------------------------------------------------------------------------------------------------------------- text


def test_a_text_is_split_into_consecutive_rows() -> None:
    train, test = open_text("sample", 100)
    assert test
    text = read_text(REFERENCE)
    assert len(text) > 300_000
    rows = read_rows(train, 0, rows_in(train))["text"]
    assert rows.shape == (rows_in(train), 101)
    assert bytes(rows[:, :-1].reshape(-1)) == text[: 100 * len(rows)]
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    held_out = read_rows(test, 0, rows_in(test))["text"]
    assert bytes(held_out[0, :50]) == text[round(len(text) * 0.9) :][:50]
    assert 0.08 < len(held_out) / (len(held_out) + len(rows)) < 0.12
    group = train.read(1, np.array([3, 0]))["text"]
    assert (group == rows[[256 + 3, 256]]).all()
    assert open_text("sample", 50)[0].fingerprint != train.fingerprint != test.fingerprint


def test_any_file_can_be_used_as_training_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    train, test = open_text(str(file), 10)
    assert test
    assert (rows_in(train), rows_in(test)) == (17, 1)
    settings = Settings(task="sunspot.tasks.gpt", dataset=str(file), task_args={"context": 10}, parallel="fsdp")
    plan = make_plan(settings, load_task(settings))
    assert plan.reasons[0] == "data: 17 training rows of 11, 256 classes; 1 held-out rows"
    assert any("CHECKPOINT_EVERY_S=60" in reason for reason in plan.reasons)
    with pytest.raises(DataError, match="too few"):
        open_text(str(file), 500)
    with pytest.raises(DataError, match="set it to a file"):
        open_text(str(tmp_path / "nothing"), 10)


def test_the_loss_of_a_text_is_the_mean_over_its_bytes() -> None:
    model = gpt.GPT(256, 1, 16, 2, 10, tied=True)
    text = torch.randint(256, (3, 11))
    losses, metrics = gpt.loss(model, {"text": text.byte()})
    each = nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
    torch.testing.assert_close(losses, each.mean(dim=1), rtol=0, atol=1e-6)
    assert (losses.shape, metrics["accuracy"].shape) == ((3,), (3,))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"depth": 3}, "depth=3"), ({"width": 30, "heads": 4}, "heads=4"), ({"tied": 1}, "tied=1"), ({"layers": 0}, "=0")],
)
def test_model_sizes_that_do_not_fit_together_are_rejected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        gpt.read_sizes(Settings(task_args=arguments))


# -------------------------------------------------------------------------------------------------------- real runs

GPT = {
    "TASK": "sunspot.tasks.gpt",
    "TASK_ARGS": '{"layers": 2, "width": 32, "heads": 2, "context": 32}',
    "GLOBAL_BATCH_SIZE": 64,
    "MICRO_BATCH_SIZE": 24,
    "LEARNING_RATE": 0.01,
    "EPOCHS": 1,
    "CHECKPOINT_EVERY_STEPS": 10,
    "CHECKPOINTS_TO_KEEP": 99,
}


@pytest.mark.slow
def test_a_killed_fsdp_run_continues_at_a_different_world_size_and_matches_a_ddp_run(
    program: Program, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(read_text(REFERENCE)[:150_000])
    # The run continues from storage, as if its nodes were gone, too. From memory, unwritten records would be missing.
    settings = {**GPT, "DATASET": text, "SNAPSHOT_COST": 0}
    run = the_run(program)
    process = program.start(**settings, PARALLEL="fsdp")
    wait_for_step(run, 10, process)
    kill_all(process)  # with all processes, in the middle of the epoch
    program.run(**settings, PARALLEL="fsdp", NUM_WORKERS=3)
    assert [attempt.metadata.world_size for attempt in read_attempts(run)] == [2, 3]
    resumed = read_attempts(run)[-1]
    assert 10 <= resumed.step < newest(run).step == 66
    assert_audit_clean(program)
    history = read_journal(run, "metrics", lineage(read_attempts(run)))
    assert sum(record["steps"] for record in history) == 66
    assert sum(record["rows"] for record in history) == rows_in(open_text(str(text), 32)[0])
    assert history[-1]["test_bits_per_byte"] < history[0]["bits_per_byte"]

    program.run(**settings, RUN_NAME="ddp")
    ddp = the_run(program, "ddp")
    ours, theirs = at_step(run, 10), at_step(ddp, 10)
    assert "model.pt" not in ours.files
    assert_close(load_model(run, ours), load_model(ddp, theirs), rtol=0, atol=1e-6)
    # From there on, there were three ranks, and Adam amplifies every rounding difference.
    assert newest(run).metrics["test_loss"] == pytest.approx(newest(ddp).metrics["test_loss"], rel=1e-3)
    assert_close(weights(run), load_whole(run, newest(run), read_contents(run, newest(run)))["model"], rtol=0, atol=0)


@pytest.mark.slow
def test_a_lost_node_costs_only_the_steps_since_the_last_copies_in_memory(
    program: Program, ray_address: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(read_text(REFERENCE)[:300_000])
    elastic = {"NUM_WORKERS": "1..2", "RESOURCES_PER_WORKER": '{"CPU": 1, "training-worker": 1}'}
    settings = {**GPT, **elastic, "DATASET": text, "PARALLEL": "fsdp", "EPOCHS": 4, "CHECKPOINT_EVERY_STEPS": 0}
    run = the_run(program)
    with start_node(ray_address, **WORKER_NODE) as going:
        process = program.start(**settings)

        def kept() -> bool:
            """Return True if both nodes have both parts of the state."""
            copies = Counter(held.step for held in find_parts(run.location))
            return any(step > 20 and count == 4 for step, count in copies.items())

        wait_until(kept, process)
        locks = {
            worker: file.path
            for worker in worker_processes()
            for file in worker.open_files()
            if file.path.endswith("/lock") and "sunspot" in file.path
        }
        going.lose()
        wait_until(lambda: not all(worker.is_running() for worker in locks), process)
        [lock] = [lock for worker, lock in locks.items() if not worker.is_running()]
        shutil.rmtree(Path(lock).parent)  # both nodes of this test share one memory
        lost = wait_for_receipts(run, 2, process)[-1]
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert lost.cause in (Cause.NODE_LOST, Cause.WORKER_LOST)  # the cause depends on what Ray reports first
    assert (lost.tier, lost.world_before, lost.world_after) == ("memory", 2, 1)
    assert lost.last_step > 20
    assert lost.replayed <= lost.last_step - 20, "the steps before the copies are kept without a checkpoint in storage"
    assert newest(run).step == 528
    assert_complete(run)
    assert_audit_clean(program)
