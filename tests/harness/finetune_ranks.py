"""LoRA's worker groups without Ray: `python -m tests.harness.finetune_ranks FOLDER`.

Fine-tunes a tiny model for STEPS steps on changing numbers of ranks, as `RUNS` says, and leaves each run's losses in
the file `RUN.json`. A group commits at the step that its successor goes on from; the first of `killed` is then killed.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sunspot.checkpoint import CheckpointManager
from sunspot.checkpoint.files import load_state, load_weights
from sunspot.checkpoint.sharded import is_sharded, load_parts, read_contents
from sunspot.data.order import Steps
from sunspot.data.source import read_rows
from sunspot.parallel.collectives import gather_objects
from sunspot.parallel.gradients import prepare
from sunspot.parallel.sharding import build_without_values, shard_model, shard_optimizer_state
from sunspot.plan import Plan
from sunspot.run import open_run
from sunspot.run.attempts import Attempt, checkpoint_name, claim, read_attempts
from sunspot.run.checkpoints import read_manifest
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.train.forward import row_losses
from sunspot.train.run import passes
from tests.harness.language_models import write_base, write_texts
from tests.harness.process_group import fork_ranks

STEPS, BATCH = 6, 10

ARGUMENTS = {"context": 32, "rank": 4}


class Group(NamedTuple):
    """One worker group."""

    ranks: int
    first: int = 0
    upto: int = STEPS
    parallel: str = "ddp"
    precision: str = "fp32"
    killed: bool = False


RUNS = {
    "one": [Group(1)],
    "two": [Group(2)],
    "three": [Group(3)],
    "killed": [Group(2, upto=3, killed=True), Group(3, first=3)],
    "fsdp": [Group(2, upto=3, parallel="fsdp"), Group(1, first=3, parallel="fsdp")],
    "bf16": [Group(2, parallel="fsdp", precision="bf16")],
}


def train(root: str, name: str, attempt: Attempt, group: Group, rank: int) -> None:
    """What one rank does in a group."""
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/{name}-{attempt.number}", rank=rank, world_size=group.ranks
    )
    settings = Settings(
        task="sunspot.tasks.finetune",
        task_args={"base": f"{root}/base", **ARGUMENTS},
        dataset=f"{root}/texts",
        parallel=group.parallel,
        precision=group.precision,
        global_batch_size=BATCH,
        learning_rate=0.01,
        checkpoints_to_keep=9,
    )
    task: Any = load_task(settings)
    source, _ = task.find_sources(settings)
    run, checkpoint = open_run(root, name), None
    if group.first:
        checkpoint = read_manifest(run, checkpoint_name(group.first, attempt.number - 1))
        assert checkpoint
    assert build_without_values(lambda: task.build_model(settings, source)) is None, "the base would have no values"
    torch.manual_seed(rank if checkpoint else 0)
    model = task.build_model(settings, source)
    whole = checkpoint and not is_sharded(checkpoint)
    if whole:
        load_weights(model, load_state(run, checkpoint, "model.pt"), checkpoint.name)
    model = shard_model(model, settings, torch.device("cpu"))
    optimizer = task.build_optimizer(model, settings)
    if whole:
        state = load_state(run, checkpoint, "optimizer.pt")
        optimizer.load_state_dict(shard_optimizer_state(optimizer, state))
    elif checkpoint:
        load_parts(run, checkpoint, read_contents(run, checkpoint), model, optimizer)

    plan, prepared = Plan(settings, source, None, Steps(STEPS * BATCH, BATCH), STEPS), prepare(model, settings)
    worker: Any = SimpleNamespace(plan=plan, task=task, world_size=group.ranks, device=torch.device("cpu"))
    rows = {column: torch.from_numpy(values) for column, values in read_rows(source, 0, STEPS * BATCH).items()}
    losses = []
    for step in range(group.first, group.upto):
        begin, end = plan.steps.share(step, group.ranks, rank)
        batch = {column: values[begin:end] for column, values in rows.items()}
        own = 0.0
        for part, weight in passes(prepared, batch, BATCH, group.ranks, 4, empty=False):
            each, _ = row_losses(worker, prepared, part)
            (each.sum() * weight).backward()
            own += each.sum().item()
        losses.append(sum(gather_objects(own, dist.group.WORLD)) / BATCH)
        optimizer.step()
        optimizer.zero_grad()
    checkpoints = CheckpointManager(
        run,
        attempt,
        plan,
        model,
        optimizer,
        group=dist.group.WORLD,
        rank=rank,
        world_size=group.ranks,
        more_files=functools.partial(task.checkpoint_files, model),
    )
    checkpoints.save(group.upto, {"loss": losses[-1]})
    checkpoints.close(finished=True)
    if rank == 0:
        file = Path(root, f"{name}.json")
        file.write_text(json.dumps([*(json.loads(file.read_text()) if checkpoint else []), *losses]))
    dist.barrier()
    if group.killed:
        optimizer.step()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def main(root: str) -> None:
    for library in ("peft", "transformers"):
        importlib.import_module(library)  # once, not in each child
    torch.set_num_threads(1)
    write_base(Path(root, "base"))
    write_texts(Path(root, "texts"))
    for name, groups in RUNS.items():
        for group in groups:
            run = open_run(root, name)
            attempts = read_attempts(run)
            start = checkpoint_name(group.first, len(attempts)) if group.first else None
            attempt = Attempt(len(attempts) + 1, "me", start, group.first, metadata={"world_size": group.ranks})
            assert claim(run, attempts, attempt)
            act = functools.partial(train, root, name, attempt, group)
            fork_ranks(group.ranks, act, exit_code=-signal.SIGKILL if group.killed else 0)


if __name__ == "__main__":
    main(sys.argv[1])
