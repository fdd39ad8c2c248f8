"""What training needs of checkpoints: when to save, saving without holding up the training, and the wait at the end."""

import dataclasses
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sunspot.background import Timer
from sunspot.checkpoint.commit import CheckpointCommitter, CommitOrder
from sunspot.checkpoint.files import SnapshotWriter, WholeState, refuse_other_than_tensors, refuse_unloadable
from sunspot.checkpoint.ledger import Ledger
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.parts import ShardWriter
from sunspot.checkpoint.replicas import PartExchange
from sunspot.checkpoint.snapshot import OptimizerOnlyParameters, SavedObjects, Snapshots
from sunspot.checkpoint.tensors import parameter_names
from sunspot.data.order import share
from sunspot.data.source import ModelData
from sunspot.parallel.collectives import ALONE, WorkerPlace, run_on_all_ranks, sync_buffers
from sunspot.parallel.decisions import MAX_STEPS_BETWEEN, StepActions
from sunspot.plan import Plan
from sunspot.run import Run
from sunspot.run.attempts import IN_PLACE, Attempt, checkpoint_name
from sunspot.run.checkpoints import Checkpoint, is_out_of_patience
from sunspot.run.history import Journals

AHEAD_OF_STORAGE = ("memory", IN_PLACE)
"""Tiers of the attempts that start from a state which is newer than storage's newest checkpoint."""

COPIES_MEASURED = 3
"""Copies in memory after which their cost is reported."""

NOTICE_MARGIN_S = 4.0
"""Between a notice and the save: the driver polls twice a second, rank 0 polls it as often, and a step has to end."""


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
        saved: SavedObjects,
        *,
        place: WorkerPlace = ALONE,
        memory: NodeMemory | None = None,
        windows: Sequence[Any] = (),
        journals: Journals | None = None,
    ) -> None:
        """`memory` outlives this process (None: nothing does); `windows` are those of consumed rows that came with the
        state; `journals` are flushed before each commit.
        """
        self._run = run
        self._attempt = attempt
        self._plan = plan
        self._settings = plan.settings
        self._saved = saved
        self._place = place
        self._sharded = self._settings.parallel == "fsdp"
        self._memory = memory or NodeMemory(None)
        exchange: PartExchange | None = None
        if self._sharded and place.group and place.nodes and self._settings.snapshot_cost:
            exchange = PartExchange(self._memory, place.nodes, place.group)
        self._exchanges = exchange is not None
        self._stepped = saved.stepped or OptimizerOnlyParameters(saved.optimizer)
        self._snapshots = Snapshots(self._memory, saved, self._stepped, exchange)
        self._loadable = False
        "Whether the state has been found to be what a restart can load."
        self._ledger = Ledger(place.group, attempt.label, attempt.step, windows, self._settings.audit)
        self._interval = SnapshotInterval(self._settings.snapshot_cost, attempt.step)
        self._timer = Timer(-math.inf if attempt.metadata.tier in AHEAD_OF_STORAGE else None)
        self._committer: CheckpointCommitter | None = None
        self._previous: CheckpointCommitter | None = None
        "This process's committer of an earlier group."
        self._await_sums: Callable[[], None] | None = None
        "Waits until the collectives on the device have ended (`outlive`)."
        if self._settings.weights == "safetensors":
            refuse_other_than_tensors(saved.model)
        if place.rank == 0 or self._sharded:
            order = CommitOrder(place.group if self._sharded else None)
            ledger = self._ledger if place.rank == 0 else None
            self._committer = CheckpointCommitter(
                run, attempt, self._settings, self._writer(order), order, journals, ledger
            )

    def outlive(
        self,
        previous: CheckpointCommitter | None,
        attempts: list[Attempt],
        committed: float | None,
        await_sums: Callable[[], None],
    ) -> None:
        """Continue the commits of a process that outlives its groups; call this before the first `save`.

        `previous` is the committer that began this process's newest commit, or None if there was no commit. `attempts`
        are all of the run so far, with the current one as the last. `committed` is the time at which storage got its
        newest checkpoint, in seconds since the epoch, or None if that is not known. `await_sums` returns when the
        collectives on the device have ended, and raises if they were broken off.
        """
        self._await_sums = await_sums
        self._previous = previous
        if previous and self._committer:
            self._committer.follow(previous)
        commits = list[float]()
        if previous and not previous.stop_if_overtaken(attempts):
            commits.append(previous.begun_at)
        if committed is not None:  # by another process, if that was rank 0 in between
            commits.append(time.monotonic() - max(0.0, time.time() - committed))
        if commits and self._attempt.metadata.tier in AHEAD_OF_STORAGE:
            self._timer = Timer(max(commits))

    def name_at(self, step: int) -> str:
        """Return the name of a checkpoint of the state after `step`."""
        return checkpoint_name(step, self._attempt.number, self._attempt.nonce)

    def begin_step(self, step: int, rows: torch.Tensor | None, step_rows: int) -> None:
        """Tell the others which `rows`, int64 [B], this worker takes in the step to take, of all its `step_rows`."""
        first, last = share(step_rows, self._place.world_size, 0)
        self._ledger.begin_exchange(step, rows, last - first)

    def took_step(self, step: int, rows: torch.Tensor | None) -> None:
        """Record in memory that `step` was taken; `rows`, int64 [B], are the ids that this worker consumed in it.

        Raises `SettingsError`, after the first step, for a state that could not be loaded again. If commits have failed
        for good, raises their error here too, because some loops never call `wait_for_copy`.
        """
        if self._committer:
            self._committer.raise_if_failed()
        if not self._loadable:  # the optimizer's state is there from the first step on
            refuse_unloadable(self._saved.state(), self._settings.task)
            self._loadable = True
            self._snapshots.reserve()
        self._stepped.after_step()
        self._ledger.add_step(step, rows)
        self._memory.heartbeat(self._attempt.number, step)

    def due(self, step: int, step_s: float) -> StepActions:
        """Return what is to be saved after `step`, which took `step_s` seconds, reports and commands left aside."""
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

    def save(
        self,
        step: int,
        metrics: dict[str, Any],
        *,
        evaluated: bool = True,
        to_storage: bool = True,
        needed: bool = False,
    ) -> None:
        """Begin to copy the state at `step` to memory; with `to_storage` it becomes a checkpoint.

        `evaluated` is False if an epoch ends here without an evaluation. A copy for storage, or one that is `needed`,
        waits for the previous copy; any other copy is skipped while the previous one is under way. Call `wait_for_copy`
        before parameters change.
        """
        began = time.thread_time()  # waiting for slower workers is no cost: the next gradients would
        if self._place.group and self._settings.snapshot_cost:
            sync_buffers(self._saved.model)
            # An aborted NCCL collective leaves arbitrary values in buffers, but their copy would be marked as complete.
            if self._await_sums and next(self._saved.model.buffers(), None) is not None:
                self._await_sums()
        windows = self._ledger.gather(step)
        spent_s = time.thread_time() - began
        committer = self._committer if to_storage else None
        if not (self.in_memory or self._exchanges or committer):
            return
        manifest = self._describe(step, metrics, evaluated)
        extra_state = self._extra_state(manifest) if committer else None  # only this run reads a copy in memory
        snapshot = self._snapshots.take(manifest, windows, extra_state, needed=to_storage or needed)
        self._snapshots.charge(spent_s)
        if committer and snapshot:
            committer.commit(snapshot)

    def wait_for_copy(self) -> None:
        """Return when parameters may change; raises the error that ended commits for good, if there was one.

        Call it with the gradients of the next optimizer step.
        """
        self._ledger.wait_for_exchange()
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
        group = self._place.group
        if finished:  # other ranks may wait long for rank 0, which writes the model as one file in the end
            run_on_all_ranks(group, self._committer.close if self._committer else lambda: None)
        self._snapshots.wait_until_complete()
        if group:
            dist.barrier(group=group)
        if finished:
            self._memory.remove()

    def hand_on(self, step: int) -> list[tuple[Any, ...]]:
        """Return the windows of consumed rows up to `step` that the next group is to write, once no copy is under way.

        The group has ended, and this process has not: nothing here waits for the others, nor for storage.
        """
        self._snapshots.wait_until_complete()
        if self._committer:
            self._committer.abandon()
        return self._ledger.hand_on(step)

    @property
    def committer(self) -> CheckpointCommitter | None:
        """The committer that began this process's newest commit, in this group or in an earlier one."""
        own = self._committer
        return own if own and own.begun_at > -math.inf else self._previous

    @property
    def newest(self) -> Checkpoint | None:
        """The last checkpoint committed by this worker."""
        newest = self._committer.newest if self._committer else None
        return newest.checkpoint if newest else None

    @property
    def commit_s(self) -> float | None:
        """Seconds that its commit took."""
        newest = self._committer.newest if self._committer else None
        return newest.seconds if newest else None

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
        every = "step" if interval.every == 1 else f"{interval.every} steps"
        return f"every {every}, {size / 1e6:.3g} MB each, {interval.cost:.1%} of the time"

    def _writer(self, order: CommitOrder) -> SnapshotWriter:
        """Make the writer of a checkpoint's files."""
        saved, safetensors = self._saved, self._settings.weights == "safetensors"
        if not self._sharded:
            return WholeState(self._run, safetensors, saved.more_files)
        names = parameter_names(saved.model, saved.optimizer)
        return ShardWriter(self._run, self._place, names, self._settings, order, saved.more_files)

    def _describe(self, step: int, metrics: dict[str, Any], evaluated: bool) -> Checkpoint:
        """Make the manifest of a checkpoint, its files not known yet."""
        per_epoch = self._plan.steps.per_epoch
        return Checkpoint(
            name=checkpoint_name(step, self._attempt.number, self._attempt.nonce),
            step=step,
            epoch=(step - 1) // per_epoch + 1,
            steps_per_epoch=per_epoch,
            total_steps=self._plan.total_steps,
            attempt=self._attempt.number,
            metrics=metrics,
            evaluated=evaluated,
            stopped_early=is_out_of_patience(metrics, self._settings.early_stop_evaluations),
        )

    def _extra_state(self, manifest: Checkpoint) -> dict[str, Any]:
        """Tell where a checkpoint comes from, beside what its manifest has."""
        return {
            "step": manifest.step,
            "epoch": manifest.epoch,
            # The loader's position and the generators' states are functions of these and the step.
            "loader": {"name": self._settings.loader, **dataclasses.asdict(self._plan.steps)},
            "rng": {"seed": self._settings.seed, "step": manifest.step},
            "settings": self._settings.environment(),
            # What the task builds its model for (EmptySource): with it, prediction needs nothing but the checkpoint.
            "data": ModelData.of(self._plan.source).record(),
            "versions": versions(),
        }


class SnapshotInterval:
    """The shortest interval, in steps, at which snapshots cost at most a given share of the steps' time."""

    def __init__(self, share: float, start: int) -> None:
        """A `share` of 0 turns snapshots off; the first interval begins at step `start`."""
        self._share = share
        self._last = start
        self._times: deque[float] = deque(maxlen=20)
        self.every = 1
        "Steps between two snapshots."
        self.cost = 0.0
        "Share of the time that they cost."

    def due(self, step: int, step_s: float, costs: deque[float]) -> bool:
        """Return whether a snapshot is due at `step`, which took `step_s` seconds; True begins the next interval.

        `costs` are the seconds that the last snapshots cost.
        """
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
        """Count the steps after `step` until a snapshot is due; at most 0 when it is."""
        return self._last + self.every - step


def exceeds_notice(commit_s: float | None, notice_s: float) -> bool:
    """Return whether a commit of `commit_s` seconds takes longer than a notice leaves; False if either is unknown."""
    return bool(commit_s and notice_s and commit_s + NOTICE_MARGIN_S > notice_s)


def versions() -> dict[str, str]:
    """Return the versions that the numbers of a run may depend on."""
    import ray  # here, as reading a checkpoint needs no Ray

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which weights_only refuses to load
        "ray": ray.__version__,
        "numpy": np.__version__,
    }
