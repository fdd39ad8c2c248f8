"""Worker groups without Ray: `python -m tests.harness.fsdp_ranks FOLDER`.

Trains a tiny GPT for STEPS steps, some of them under ddp and some under fsdp, on changing numbers of ranks, as `RUNS`
says. Each rank is a forked process, and commits as in a run.
"""

from __future__ import annotations

import functools
import io
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import sunspot.checkpoint.shared_memory
import sunspot.checkpoint.weights
from sunspot.checkpoint import CheckpointManager, NodeMemory
from sunspot.checkpoint.node_parts import NodeParts
from sunspot.checkpoint.node_state import NodeState
from sunspot.checkpoint.sharded import Contents, is_sharded, load_parts, load_whole, read_contents
from sunspot.checkpoint.shared_memory import find_parts, find_snapshot
from sunspot.checkpoint.slots import as_bytes
from sunspot.data.order import Steps
from sunspot.data.source import read_rows
from sunspot.elastic.copies import Machine, choose_copy, without_copies
from sunspot.parallel.collectives import any_rank, gather_objects
from sunspot.parallel.gradients import prepare
from sunspot.parallel.sharding import build_without_values, shard_model, shard_optimizer_state
from sunspot.plan import Plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, checkpoint_name, claim, read_attempts
from sunspot.run.checkpoints import Checkpoint, read_manifest
from sunspot.run.history import Journal
from sunspot.settings import Settings
from sunspot.storage.limits import retry_storage
from sunspot.tasks import gpt
from sunspot.train.forward import row_losses
from sunspot.train.run import passes
from tests.harness.process_group import fork_ranks

STEPS = 6
BATCH = 25
"""Rows of a step: shares, and the number of passes that they take, differ among the ranks."""

ARGUMENTS = {"layers": 2, "width": 50, "heads": 2, "context": 16}
"""50 is no multiple of three, and a block has more parameters than `MIN_BLOCK_PARAMETERS`."""


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
        task="sunspot.tasks.gpt",
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
    origin: tuple[Run, Any, Contents] | None = None
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
            whole = load_whole(run, checkpoint, read_contents(run, checkpoint))
        else:
            origin = (run, checkpoint, read_contents(run, checkpoint))

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
        retry_storage(lambda: load_parts(*origin, model, optimizer), 60, "reading a checkpoint")

    plan, prepared = Plan(settings, source, None, Steps(STEPS * BATCH, BATCH), STEPS), prepare(model, settings)
    for step in range(group.first, group.upto):
        find_gradients(plan, prepared, step, group.ranks, rank)
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


def find_gradients(plan: Plan, prepared: torch.nn.Module, step: int, ranks: int, rank: int) -> None:
    """Forward and backward of a rank's share of a step."""
    rows = {column: torch.from_numpy(values) for column, values in read_rows(plan.source, 0, STEPS * BATCH).items()}
    learner: Any = SimpleNamespace(
        plan=plan, task=gpt, place=SimpleNamespace(world_size=ranks, device=torch.device("cpu"))
    )
    begin, end = plan.steps.share(step, ranks, rank)
    batch = {column: values[begin:end] for column, values in rows.items()}
    for part, weight in passes(prepared, end - begin, BATCH, ranks, plan.settings.micro_batch_size):
        losses, _ = row_losses(learner, prepared, {name: column[part] for name, column in batch.items()})
        (losses.sum() * weight).backward()


def share_copy(root: str, rank: int) -> None:
    """A copy in the memory of one node reaches three ranks on two nodes; what each changes is its own."""
    dist.init_process_group("gloo", init_method=f"file://{root}/share", rank=rank, world_size=3)
    world, places = dist.group.WORLD, ["a", "a", "b"]
    assert world
    sunspot.checkpoint.shared_memory.SHARED_MEMORY = Path(root, places[rank])
    sunspot.checkpoint.shared_memory.SHARED_MEMORY.mkdir(exist_ok=True)
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


def main(root: str) -> None:
    torch.set_num_threads(1)
    sunspot.checkpoint.weights.SHARD_BYTES = SHARD_BYTES
    for name, groups in RUNS.items():
        for group in groups:
            run = open_run(root, name)
            attempts = read_attempts(run)
            start = checkpoint_name(*group.origin[1:]) if group.origin and group.origin[0] == name else None
            step = group.first if start else 0  # another run's step is none of this run's
            attempt = Attempt(len(attempts) + 1, "me", start, step, metadata={"world_size": group.ranks})
            assert claim(run, attempts, attempt)
            fork_ranks(group.ranks, functools.partial(train, root, name, attempt, group))
    fork_ranks(3, functools.partial(share_copy, root))
    lose_nodes(root)


LOSSES = {"replaced": "adc", "smaller": "ac", "damaged": "adc", "adjacent": "ade"}
"""The nodes of the groups that come after the one on a, b and c, which kept copies of steps 2 and 4."""


def lose_nodes(root: str) -> None:
    """A group keeps copies of its parts, and is gone; others go on from what is left in the memory of their nodes."""
    memory = Path(root, "memory")
    fork_ranks(3, functools.partial(train_in_memory, root, "uninterrupted", "abc"))
    shutil.rmtree(memory / "b")
    kept = shutil.copytree(memory, Path(root, "kept"))
    for name, nodes in LOSSES.items():
        shutil.rmtree(memory)
        shutil.copytree(kept, memory)
        if name == "damaged":
            [marker] = [path for path in memory.glob("a/**/slot-*.json") if json.loads(path.read_text())["step"] == 4]
            with marker.with_suffix(".data").open("r+b") as file:
                file.write(b"damaged")
        fork_ranks(len(nodes), functools.partial(train_in_memory, root, name, nodes))


def train_in_memory(root: str, name: str, nodes: str, rank: int) -> None:
    """What one rank does in a group on these nodes, without storage; its model is in the file `name`.pt in the end."""
    ranks, memory, device = len(nodes), Path(root, "memory", nodes[rank]), torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{root}/{name}", rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world
    memory.mkdir(parents=True, exist_ok=True)
    sunspot.checkpoint.shared_memory.SHARED_MEMORY = memory
    first = Attempt(1, "me", None, 0)
    node_memory, node_parts = NodeMemory("run"), NodeParts(world, list(nodes))
    dist.barrier()
    machines = gather_objects(Machine(nodes[rank], nodes[rank], None, [], find_parts("run")), world)
    _, held, chosen = choose_copy([first], machines)
    if faulty := [copy for copies in gather_objects(node_parts.read(chosen), world) for copy in copies]:
        _, held, chosen = choose_copy([first], without_copies(machines, faulty))
        assert not node_parts.read(chosen)
    step = held.step if held else 0
    node_memory.keep(held and held.checkpoint)
    assert {part.step for part in find_parts("run")} <= {step}

    settings = settings_of("fsdp")
    source, _ = gpt.find_sources(settings)
    torch.manual_seed(0)
    model = shard_model(gpt.build_model(settings, source), settings, device)
    optimizer = gpt.build_optimizer(model, settings)
    if held:
        assert node_parts.describe()["about"]["metrics"] == {"loss": held.step}
        node_parts.load(model, optimizer)
    plan = Plan(settings, source, None, Steps(STEPS * BATCH, BATCH), STEPS)
    checkpoints = CheckpointManager(
        open_run(root, "run"),
        first,
        plan,
        model,
        optimizer,
        group=world,
        rank=rank,
        world_size=ranks,
        memory=node_memory,
        nodes=list(nodes),
    )

    def copy() -> None:
        before, tries = node_memory._newest, 0
        while any_rank(world, node_memory._newest is before)[0]:
            checkpoints.save(step, {"loss": step}, to_storage=False)
            checkpoints._snapshots.wait_until_complete()
            tries += 1
            assert tries < 1000
            time.sleep(0.01)

    while step < STEPS:
        find_gradients(plan, prepare(model, settings), step, ranks, rank)
        step += 1
        checkpoints.wait_for_copy()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.took_step(step, None)
        if step in (2, 4):
            copy()
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save({"from": held.step if held else 0, "model": state}, Path(root, f"{name}.pt"))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
