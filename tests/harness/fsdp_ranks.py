"""Trains worker groups without Ray: `python -m tests.harness.fsdp_ranks FOLDER`.

A tiny GPT trains for STEPS steps, under ddp or fsdp, on changing numbers of ranks, as defined in `RUNS`. Each rank is a
forked process.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import sunspot.checkpoint.files
import sunspot.checkpoint.memory_files
from sunspot.checkpoint import CheckpointManager, NodeMemory, SavedObjects
from sunspot.checkpoint.memory_files import Sidecar, as_bytes, find_parts, find_snapshot
from sunspot.checkpoint.node_state import NodeParts, NodeState
from sunspot.data.order import Steps
from sunspot.data.source import read_rows
from sunspot.elastic.copies import NodeInventory, choose_copy, exclude_damaged_parts
from sunspot.parallel.collectives import WorkerPlace, any_rank, gather_objects
from sunspot.parallel.gradients import prepare
from sunspot.parallel.sharding import shard_model
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, checkpoint_name
from sunspot.run.checkpoints import Checkpoint
from sunspot.settings import Settings
from sunspot.tasks import gpt
from sunspot.train.learner import row_losses
from sunspot.train.run import passes
from tests.harness.loop import plan_without_evaluation, train_group
from tests.harness.process_group import fork_ranks

STEPS, SAVED_EVERY = 6, 2
BATCH = 25
"""Number of rows in a step. The ranks' shares and numbers of passes differ."""

ARGUMENTS = {"layers": 2, "width": 50, "heads": 2, "context": 16}
"""Arguments of the GPT. The width is not a multiple of three, and a block has more than `MIN_BLOCK_PARAMETERS`."""


SHARD_BYTES = 100_000
"""Maximum size of a safetensors file, chosen to split the model into several files."""


DDP, FSDP = {"parallel": "ddp"}, {"parallel": "fsdp"}
REPLICATED = {"parallel": "hsdp", "shard_degree": 2}
ONE_REPLICA = {"parallel": "hsdp", "shard_degree": 3}

RUNS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "ddp": [(2, DDP), (2, DDP)],
    "fsdp": [(2, FSDP), (1, FSDP), (3, FSDP)],
    "to-ddp": [(2, FSDP), (2, {**DDP, "weights": "safetensors"})],
    "to-fsdp": [(2, DDP), (2, {**FSDP, "weights": "safetensors"})],
    "hsdp": [(4, REPLICATED), (3, ONE_REPLICA), (2, FSDP)],
    "to-hsdp": [(2, DDP), (2, FSDP), (4, {**REPLICATED, "weights": "safetensors"})],
}
"""Ranks and settings of each run's groups. All groups except the last are killed one step after their checkpoint."""


def settings_of(**more: Any) -> Settings:
    return Settings(
        task="sunspot.tasks.gpt",
        task_args=ARGUMENTS,
        max_steps=STEPS,
        checkpoint_every_steps=SAVED_EVERY,
        checkpoint_every_s=0,
        global_batch_size=BATCH,
        micro_batch_size=5,
        learning_rate=0.01,
        checkpoints_to_keep=9,
        **more,
    )


def find_gradients(plan: Plan, prepared: torch.nn.Module, step: int, ranks: int, rank: int) -> None:
    """Run the forward and backward passes for a rank's share of a step."""
    rows = {column: torch.from_numpy(values) for column, values in read_rows(plan.source, 0, STEPS * BATCH).items()}
    learner: Any = SimpleNamespace(
        plan=plan,
        task=gpt,
        compute_loss=gpt.loss,
        place=SimpleNamespace(world_size=ranks, device=torch.device("cpu")),
    )
    begin, end = plan.steps.share(step, ranks, rank)
    batch = {column: values[begin:end] for column, values in rows.items()}
    for part, weight in passes(prepared, end - begin, BATCH, ranks, plan.settings.micro_batch_size):
        losses, _ = row_losses(learner, prepared, {name: column[part] for name, column in batch.items()})
        (losses.sum() * weight).backward()


def share_copy(root: str, rank: int) -> None:
    """Check that a copy in one node's memory reaches three ranks on two nodes, and that changes stay private."""
    dist.init_process_group("gloo", init_method=f"file://{root}/share", rank=rank, world_size=3)
    world, places = dist.group.WORLD, ["a", "a", "b"]
    assert world
    sunspot.checkpoint.memory_files.SHARED_MEMORY = Path(root, places[rank])
    sunspot.checkpoint.memory_files.SHARED_MEMORY.mkdir(exist_ok=True)
    content = bytes(range(256)) * 16
    if rank == 0:
        memory = NodeMemory("run")
        slot = memory.free_slot(len(content), needed=True)
        slot.map[:] = content
        sidecar = Sidecar(None, {}, [], [(1, 2)], [])
        memory.complete(slot, Checkpoint(checkpoint_name(7, 1), 7, 1, 10, 10, 1), sidecar.to_bytes())
    node = NodeState(open_run(root, "run"), world, places)
    found = find_snapshot("run") if node.reads else None
    held = gather_objects(found.snapshot if found else None, world)
    assert [each is not None for each in held] == [True, False, False]
    data, sidecar = node.share(held[0], 0, found)
    assert sidecar.ledger == [(1, 2)]
    assert bytes(as_bytes(data)) == content
    data.fill_(rank)
    gather_objects(None, world)
    assert data.tolist() == [rank] * len(content)
    dist.destroy_process_group()


def main(root: str) -> None:
    torch.set_num_threads(1)
    sunspot.checkpoint.files.SHARD_BYTES = SHARD_BYTES
    for name, groups in RUNS.items():
        for number, (ranks, settings) in enumerate(groups, start=1):
            plan = plan_without_evaluation(settings_of(storage_path=root, run_name=name, **settings))
            train_group(plan, ranks, killed_at=SAVED_EVERY * number + 1 if number < len(groups) else 0)
    fork_ranks(3, functools.partial(share_copy, root))
    lose_nodes(root)


LOSSES = {"replaced": "adc", "smaller": "ac", "damaged": "adc", "adjacent": "ade"}
"""Nodes of the later groups. The first group, on nodes a, b and c, kept copies of steps 2 and 4."""


def lose_nodes(root: str) -> None:
    """Train a group that keeps copies and is lost, then groups that continue from their nodes' memory."""
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
    """Train one rank of a group on these nodes without storage, and write its model to the file `name`.pt."""
    ranks = len(nodes)
    memory = Path(root, "memory", nodes[rank])
    device = torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{root}/{name}", rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world
    memory.mkdir(parents=True, exist_ok=True)
    sunspot.checkpoint.memory_files.SHARED_MEMORY = memory
    first = Attempt(1, "me", None, 0)
    node_memory, node_parts = NodeMemory("run"), NodeParts(world, list(nodes))
    dist.barrier()
    machines = gather_objects(NodeInventory(nodes[rank], nodes[rank], None, [], find_parts("run")), world)
    chosen = choose_copy([first], machines)
    mine = node_parts.read(chosen.parts if chosen else ())
    faulty = [copy for copies in gather_objects(mine, world) for copy in copies]
    if faulty:
        chosen = choose_copy([first], exclude_damaged_parts(machines, faulty))
        assert not node_parts.read(chosen.parts if chosen else ())
    held = chosen and chosen.snapshot
    step = held.step if held else 0
    node_memory.keep_parts_of(held and held.checkpoint)
    assert {part.step for part in find_parts("run")} <= {step}

    settings = settings_of(**FSDP)
    source, _ = gpt.find_sources(settings)
    torch.manual_seed(0)
    model = shard_model(gpt.build_model(settings, source), settings, device)
    optimizer = gpt.build_optimizer(model, settings)
    if held:
        assert node_parts.describe().manifest_fields["metrics"] == {"loss": held.step}
        node_parts.load(model, optimizer)
    plan = Plan(settings, source, None, Steps(STEPS * BATCH, BATCH), STEPS)
    checkpoints = CheckpointManager(
        open_run(root, "run"),
        first,
        plan,
        SavedObjects(model, optimizer),
        place=WorkerPlace(world, rank, ranks, nodes=list(nodes)),
        memory=node_memory,
    )

    def copy() -> None:
        before, tries = node_memory.newest, 0
        while any_rank(world, node_memory.newest is before)[0]:
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
