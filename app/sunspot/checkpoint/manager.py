"""What training needs of checkpoints: when to save, saving without holding up the training, and the wait at the end.

training thread   `save` lists the state's tensors and goes on; `wait_for_copy` comes before parameters change
copy thread       copies the tensors to the node's shared memory (snapshot.py, memory.py)
seal thread       marks the copy there as complete, with its checksum; under FSDP another node gets it (neighbours.py)
commit thread     uploads the copy, verifies it and writes the manifest (commit.py; files.py for a whole state,
                  sharded.py for one worker's part of it)
"""

import dataclasses
import logging
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sunspot.background import Timer
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.commit import CheckpointCommitter, CommitOrder
from sunspot.checkpoint.files import Files, refuse_unloadable, write_whole
from sunspot.checkpoint.ledger import Ledger
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.names import parameter_names
from sunspot.checkpoint.neighbours import PartExchange
from sunspot.checkpoint.sharded import PartWriter
from sunspot.checkpoint.snapshot import Snapshot, Snapshots, SteppedParameters
from sunspot.checkpoint.weights import MoreFiles, refuse_other_than_tensors, write_with_more, write_with_weights
from sunspot.parallel.collectives import any_rank, run_on_all_ranks, sync_buffers
from sunspot.parallel.decisions import MAX_STEPS_BETWEEN, StepActions
from sunspot.plan import Plan
from sunspot.run import Run
from sunspot.run.attempts import Attempt, checkpoint_name
from sunspot.run.checkpoints import Checkpoint
from sunspot.run.history import Journal
from sunspot.run.incidents import TIER

log = logging.getLogger(__name__)

NOTICE_MARGIN_S = 4.0
"""Between a notice and the save: the driver polls twice a second, rank 0 polls it as often, and a step has to end."""

COPIES_MEASURED = 3
"""Copies in memory after which their cost is reported."""


class CheckpointManager:
    """Saves the state of a worker group; every worker has one.

    Under DDP each worker has the whole state: one on each node copies it to memory, and rank 0 commits its copy. Under
    FSDP each copies and commits its part. Workers call `save` and `close` together.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        plan: Plan,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        world_size: int = 1,
        memory: NodeMemory | None = None,
        nodes: Sequence[str] = (),
        windows: Sequence[Any] = (),
        journals: Mapping[str, Journal] | None = None,
        average: WeightAverage | None = None,
        more_files: MoreFiles | None = None,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`group` carries what workers agree on (None: a worker alone); `memory` outlives this process (None: nothing
        does); `nodes` identify the machine of each rank, to keep parts in the memory of two; `windows` of consumed rows
        come with the state; `journals` are flushed before each commit; `average` is saved for the weights; `more_files`
        are a task's own; `paused` suspends the watchdog during waits for storage.
        """
        self._run, self._attempt, self._plan, self._settings = run, attempt, plan, plan.settings
        self._model, self._optimizer, self._average, self._group = model, optimizer, average, group
        self._journals, self._paused = journals or {}, paused
        self._sharded = self._settings.parallel == "fsdp"
        self._memory = memory or NodeMemory(None)
        self._exchange: PartExchange | None = None
        self._beside: dict[str, Any] = {}
        "In memory beside each copy, and the consumed rows."
        if self._sharded and nodes and self._settings.snapshot_cost:
            self._exchange = PartExchange(nodes, self._memory.make_ward_slot)
            self._memory.copies = self._exchange.copies
            self._beside = {"names": parameter_names(model, optimizer)}
        self._snapshots = Snapshots(self._memory, self._exchange, self._all_copy if self._exchange else bool)
        self._stepped = SteppedParameters(optimizer)
        self._loadable = False
        "Whether the state has been found to be what a restart can load."
        self._ledger = Ledger(group, attempt.label, attempt.step, windows, self._settings.audit)
        self._interval = SnapshotInterval(self._settings.snapshot_cost, attempt.step)
        self._timer = Timer(overdue=attempt.metadata.get(TIER) == "memory")  # storage is behind what was recovered
        self._committer: CheckpointCommitter | None = None
        write: Callable[[Run, Snapshot], Files | None] = write_whole
        if self._settings.weights == "safetensors":
            refuse_other_than_tensors(model)
            write = partial(write_with_weights, write_whole)
        if more_files:
            write = partial(write_with_more, write, more_files)
        order = CommitOrder(group if self._sharded else None)
        if self._sharded:
            names = parameter_names(model, optimizer)
            write = PartWriter(rank, world_size, names, self._settings, more_files, order)
        if rank == 0 or self._sharded:
            before_commit = self._write_history if rank == 0 else lambda: None
            events = self._journals.get("events")
            self._committer = CheckpointCommitter(run, attempt, self._settings, write, before_commit, events, order)

    def took_step(self, step: int, rows: torch.Tensor | None) -> None:
        """Record in memory that `step` was taken; `rows`, int64 [B], are the ids that this worker consumed in it.

        Raises `SettingsError`, after the first step, for a state that could not be loaded again.
        """
        if not self._loadable:  # the optimizer's state is there from the first step on
            states = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            refuse_unloadable(states, self._settings.task)
            self._loadable = True
            self._snapshots.reserve(self._model, self._optimizer, self._average)
        self._stepped.after_step()
        self._ledger.add_step(step, rows)
        self._memory.heartbeat(self._attempt.number, step)

    def due(self, step: int, step_s: float) -> StepActions:
        """What rank 0 wants saved after `step`, which took `step_s` seconds; neither reports nor commands are in it."""
        busy = self._sharded and self._committer is not None and self._committer.busy
        return StepActions(
            save=not busy and self._timer.due(self.save_every_s),
            # What must be copied at once is known from the second step on: until then, that would be everything.
            copy=self.in_memory
            and self._stepped.ids is not None
            and self._interval.due(step, step_s, self._snapshots.costs),
            busy=busy,
            next_in=self._interval.left(step) if self.in_memory else MAX_STEPS_BETWEEN,
        )

    def save(self, step: int, metrics: dict[str, Any], *, evaluated: bool = True, to_storage: bool = True) -> None:
        """Begin to copy the state at `step` to memory; with `to_storage` it becomes a checkpoint.

        `evaluated` is false when an epoch ends here unevaluated. Call `wait_for_copy` before parameters change.
        """
        began = time.thread_time()  # waiting for slower workers is no cost: the next gradients would
        if self._group and self._settings.snapshot_cost:
            sync_buffers(self._model)
        windows = self._ledger.gather(step)
        spent_s = time.thread_time() - began
        committer = self._committer if to_storage else None
        if not (self.in_memory or self._exchange or committer):
            return
        manifest = self._describe(step, metrics, evaluated)
        snapshot = self._snapshots.take(
            manifest,
            self._model,
            self._optimizer,
            self._extra_state(manifest) if committer else {},  # only this run reads a copy in memory
            self._beside | {"ledger": windows},
            stepped=self._stepped.ids or (),
            needed=to_storage,
            for_storage=committer is not None,
            average=self._average,
        )
        self._snapshots.charge(spent_s)
        if committer and snapshot:
            committer.commit(snapshot)

    def wait_for_copy(self) -> None:
        """Return when parameters may change; raises the error that ended commits for good, if there was one.

        Call it with the gradients of the next optimizer step.
        """
        self._snapshots.wait_for_copy()
        self._stepped.before_step()
        if self._committer:
            self._committer.raise_if_failed()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest snapshot is committed and return whether it is; raises like `wait_for_copy`."""
        return self._committer.drain(timeout_s) if self._committer else True

    def close(self, *, finished: bool) -> None:
        """Wait, on all workers, until the newest copy in memory is complete.

        When the run has `finished`, wait for its commit too and remove the copies; the next group needs them otherwise.
        """
        with self._paused():
            if finished:  # other ranks may wait long for rank 0, which writes the model as one file in the end
                run_on_all_ranks(self._group, self._committer.close if self._committer else lambda: None)
            self._snapshots.wait_until_complete()
            self._barrier()
            if finished:
                self._memory.remove()

    @property
    def newest(self) -> Checkpoint | None:
        """The last checkpoint committed by this worker."""
        return self._committer.newest if self._committer else None

    @property
    def commit_s(self) -> float | None:
        """Seconds that its commit took."""
        return self._committer.commit_s if self._committer else None

    @property
    def save_every_s(self) -> float:
        """Seconds between checkpoints: fewer than CHECKPOINT_EVERY_S once a commit no longer fits into the notice."""
        every_s = self._settings.checkpoint_every_s
        late = exceeds_notice(self.commit_s, self._settings.notice_s)
        return min(every_s, self.commit_s or every_s) if late else every_s

    @property
    def stall_s(self) -> float:
        """Seconds of training that copying has cost so far."""
        return self._snapshots.spent_s

    @property
    def in_memory(self) -> bool:
        """Whether copies outlive this process."""
        return self._memory.shared

    @property
    def interval_steps(self) -> int:
        """Steps between two copies in memory; 0 without copies, or before their cost is known."""
        return self._interval.every if self.in_memory and self._interval.cost else 0

    @property
    def memory_summary(self) -> str:
        """How often the state is copied to memory, and what it costs; empty until that has been measured."""
        if not self.in_memory or len(self._snapshots.costs) < COPIES_MEASURED:
            return ""
        size, interval = self._snapshots.size, self._interval
        return f"every {interval.every} steps, {size / 1e6:.3g} MB each, {interval.cost:.1%} of the time"

    def _all_copy(self, has_slot: bool) -> bool:
        """Whether all workers copy their parts now, as a state with some parts of another step is none."""
        assert self._group
        lacking, stopped = any_rank(self._group, not has_slot, not self.in_memory)
        if stopped:
            self._memory.pause("a worker has none")
        return not lacking

    def _barrier(self) -> None:
        if self._group:
            dist.barrier(group=self._group)

    def _write_history(self) -> None:
        """Make durable what a checkpoint relies on: journals, and the rows consumed up to it."""
        for journal in self._journals.values():
            journal.flush()
        self._ledger.write(self._run)

    def _describe(self, step: int, metrics: dict[str, Any], evaluated: bool) -> Checkpoint:
        """The manifest of a checkpoint, its files not known yet."""
        number, per_epoch, total = self._attempt.number, self._plan.steps.per_epoch, self._plan.total_steps
        name, epoch = checkpoint_name(step, number, self._attempt.nonce), (step - 1) // per_epoch + 1
        return Checkpoint(name, step, epoch, per_epoch, total, number, metrics, evaluated=evaluated)

    def _extra_state(self, manifest: Checkpoint) -> dict[str, Any]:
        """Where a checkpoint comes from, beside what its manifest has."""
        source = self._plan.source
        return {
            "step": manifest.step,
            "epoch": manifest.epoch,
            # The loader's position and the generators' states are functions of these and the step.
            "loader": {"name": self._settings.loader, **dataclasses.asdict(self._plan.steps)},
            "rng": {"seed": self._settings.seed, "step": manifest.step},
            "settings": self._settings.environment(),
            # What the task builds its model for (EmptySource): with it, prediction needs nothing but the checkpoint.
            "data": {"shape": list(source.shape), "classes": source.classes},
            "versions": versions(),
        }


class SnapshotInterval:
    """The shortest interval, in steps, at which snapshots cost at most a given share of the steps' time."""

    def __init__(self, share: float, start: int) -> None:
        self._share = share
        self._last = start
        self._times: deque[float] = deque(maxlen=20)
        self.every = 1
        "Steps between two snapshots."
        self.cost = 0.0
        "Share of the time that they cost."

    def due(self, step: int, step_s: float, costs: deque[float]) -> bool:
        """Whether a snapshot is due at `step`, which took `step_s` seconds; True begins the next interval."""
        if not self._share:
            return False
        self._times.append(step_s)
        if costs:
            cost, usual = median(costs), median(self._times)
            self.every = max(1, math.ceil(cost / (self._share * usual)))
            self.cost = cost / (self.every * usual)
        if self.left(step) > 0:
            return False
        self._last = step
        return True

    def left(self, step: int) -> int:
        """Steps after `step` until a snapshot is due; at most 0: it is."""
        return self._last + self.every - step


def exceeds_notice(commit_s: float | None, notice_s: float) -> bool:
    """Whether a commit of `commit_s` seconds takes longer than a notice leaves; False while either is unknown."""
    return bool(commit_s and notice_s and commit_s + NOTICE_MARGIN_S > notice_s)


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    import ray  # here, as reading a checkpoint needs no Ray

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which weights_only refuses to load
        "ray": ray.__version__,
        "numpy": np.__version__,
    }
