"""Worker groups without Ray: `python -m tests.harness.fsdp_ranks FOLDER`.

Trains a tiny GPT for STEPS steps, some of them under ddp and some under fsdp, on changing numbers of ranks, as `RUNS`
says. Each rank is a forked process, and commits as in a run.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch imports it on first use: not in each child
import torch.distributed as dist

import app.checkpoint.memory
import app.checkpoint.weights
from app.checkpoint import CheckpointManager, NodeMemory
from app.checkpoint.memory import as_bytes, find_snapshot
from app.checkpoint.node_state import NodeState
from app.checkpoint.sharded import is_sharded, load_parts, load_whole
from app.data.order import MIN_ROWS, Steps
from app.data.source import read_rows
from app.observe.metrics import Stopwatch
from app.parallel import build_without_values, gather_objects, prepare, shard_model, shard_optimizer_state
from app.plan import Plan
from app.run import Run, open_run
from app.run.attempts import Attempt, checkpoint_name, claim, read_attempts
from app.run.checkpoints import Checkpoint, read_manifest
from app.run.history import Journal
from app.settings import Settings
from app.storage.retry import retry_storage
from app.tasks import gpt
from app.train.loop import accumulate_gradients

STEPS = 6
BATCH = 25
"""Rows of a step: shares, and the number of passes that they take, differ among the ranks."""

ARGUMENTS = {"layers": 2, "width": 50, "heads": 2, "context": 16}
"""50 is no multiple of three, and a block has more parameters than `LEAST_BLOCK`."""


SHARD_BYTES = 100_000
"""Largest file of safetensors: the model takes several."""


class Group(NamedTuple):
    """One worker group: where it goes on from, and the step at which it saves."""

    parallel: str
    ranks: int
    upto: int
    origin: tuple[str, int, int] | None = None
    "Run, step, attempt."
    weights: str = "pt"

    @property
    def first(self) -> int:
        """Steps taken where it starts."""
        return self.origin[1] if self.origin else 0


RUNS = {
    "ddp": [Group("ddp", 2, 2), Group("ddp", 2, STEPS, ("ddp", 2, 1))],
    "fsdp": [
        Group("fsdp", 2, 2),
        Group("fsdp", 1, 4, ("fsdp", 2, 1)),
        Group("fsdp", 3, STEPS, ("fsdp", 4, 2)),
    ],
    "to-ddp": [Group("ddp", 2, STEPS, ("fsdp", 2, 1), weights="safetensors")],
    "to-fsdp": [Group("fsdp", 2, STEPS, ("ddp", 2, 1), weights="safetensors")],
}


def settings_of(parallel: str, **more: Any) -> Settings:
    return Settings(
        task="app.tasks.gpt",
        task_args=ARGUMENTS,
        parallel=parallel,
        global_batch_size=BATCH,
        micro_batch_size=5,
        learning_rate=0.01,
        checkpoints_to_keep=9,
        **more,
    )


def train(root: str, name: str, attempt: Attempt, group: Group, rank: int) -> None:
    """What one rank does in a group."""
    meeting = Path(root, f"{name}-{attempt.number}")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=group.ranks)
    settings, device = settings_of(group.parallel, weights=group.weights), torch.device("cpu")
    source, _ = gpt.find_sources(settings)
    origin: tuple[Run, Any] | None = None
    whole: dict[str, Any] = {}
    if group.origin:
        run = open_run(root, group.origin[0])
        checkpoint = read_manifest(run, checkpoint_name(*group.origin[1:]))
        assert checkpoint
        world = dist.group.WORLD
        assert world
        node = NodeState(run, world, ["node"] * group.ranks)
        assert node.read(checkpoint) == []
        assert (not is_sharded(checkpoint) and rank == 0) == bool(node._files), "one of the node's reads for all"
        if not is_sharded(checkpoint):
            whole = node.load(checkpoint)
        elif group.parallel == "ddp":
            whole = load_whole(run, checkpoint)
        else:
            origin = (run, checkpoint)

    model = build_without_values(lambda: gpt.build_model(settings, source)) if origin else None
    assert (model is not None) == bool(origin)
    if model is None:
        torch.manual_seed(0)
        model = gpt.build_model(settings, source)
    if whole:
        model.load_state_dict(whole["model"])
    model = shard_model(model, settings, device)
    optimizer = gpt.build_optimizer(model, settings)
    if whole:
        optimizer.load_state_dict(shard_optimizer_state(optimizer, whole["optimizer"]))
    if origin:
        retry_storage(lambda: load_parts(*origin, model, optimizer), 60, "reading a checkpoint", print)

    rows = {column: torch.from_numpy(values) for column, values in read_rows(source, 0, STEPS * BATCH).items()}
    steps, prepared = Steps(STEPS * BATCH, BATCH), prepare_alone(model, group)
    plan = Plan(settings, source, None, steps, STEPS)
    worker: Any = SimpleNamespace(plan=plan, task=gpt, world_size=group.ranks, device=device)
    worker.padding_batch = {column: values[:MIN_ROWS] for column, values in rows.items()}
    for step in range(group.first, group.upto):
        begin, end = steps.share(step, group.ranks, rank)
        batch = {column: values[begin:end] for column, values in rows.items()}
        accumulate_gradients(worker, prepared, batch, BATCH, Stopwatch(device))
        optimizer.step()
        optimizer.zero_grad()
    journals = {"events": Journal(open_run(root, name), "events", attempt.number)} if rank == 0 else {}
    checkpoints = CheckpointManager(
        open_run(root, name),
        attempt,
        plan,
        model,
        optimizer,
        group=dist.group.WORLD,
        rank=rank,
        world_size=group.ranks,
        journals=journals,
    )
    checkpoints.save(group.upto, {"loss": 1.0})
    checkpoints.close(finished=True)
    dist.destroy_process_group()


def share_copy(root: str, rank: int) -> None:
    """A copy in the memory of one node reaches three ranks on two nodes; what each changes is its own."""
    dist.init_process_group("gloo", init_method=f"file://{root}/share", rank=rank, world_size=3)
    world, places = dist.group.WORLD, ["a", "a", "b"]
    assert world
    app.checkpoint.memory.SHARED_MEMORY = Path(root, places[rank])
    app.checkpoint.memory.SHARED_MEMORY.mkdir(exist_ok=True)
    content = bytes(range(256)) * 16
    if rank == 0:
        memory = NodeMemory("run")
        slot = memory.free_slot(len(content), needed=True)
        assert slot
        slot.map[:] = content
        rest = io.BytesIO()
        torch.save({"ledger": [(1, 2)]}, rest)
        memory.complete(slot, Checkpoint(checkpoint_name(7, 1), 7, 1, 10, 10, 1), rest.getvalue())
    node = NodeState(open_run(root, "run"), world, places)
    found = find_snapshot("run") if node.reads else None
    held = gather_objects(found.held if found else None, world)
    assert [each is not None for each in held] == [True, False, False]
    loaded = node.share(held[0], 0, found)
    assert loaded.rest == {"ledger": [(1, 2)]}
    assert bytes(as_bytes(loaded.data)) == content
    loaded.data.fill_(rank)
    gather_objects(None, world)
    assert loaded.data.tolist() == [rank] * len(content)
    dist.destroy_process_group()


def prepare_alone(model: torch.nn.Module, group: Group) -> torch.nn.Module:
    """What `prepare` does, which asks Ray for the device under ddp."""
    if group.parallel == "fsdp":
        return prepare(model)
    return torch.nn.parallel.DistributedDataParallel(model)


def main(root: str) -> None:
    torch.set_num_threads(1)
    app.checkpoint.weights.SHARD_BYTES = SHARD_BYTES
    for name, groups in RUNS.items():
        for group in groups:
            run = open_run(root, name)
            attempts = read_attempts(run)
            start = checkpoint_name(*group.origin[1:]) if group.origin and group.origin[0] == name else None
            step = group.first if start else 0  # another run's step is none of this run's
            attempt = Attempt(len(attempts) + 1, "me", start, step, metadata={"world_size": group.ranks})
            assert claim(run, attempts, attempt)
            fork(group.ranks, functools.partial(train, root, name, attempt, group))
    fork(3, functools.partial(share_copy, root))


def fork(ranks: int, act: Callable[[int], None]) -> None:
    """Let each rank act in a process of its own."""
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        act(rank)
        os._exit(0)
    assert all([os.waitpid(child, 0)[1] == 0 for child in children]), act


if __name__ == "__main__":
    main(sys.argv[1])
