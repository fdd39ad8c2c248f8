"""Decides when to save the training state, and saves it while training continues."""

import dataclasses
import math
import platform
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sunspot.background import Timer
from sunspot.checkpoint.commit import CheckpointCommitter, CommitCoordinator
from sunspot.checkpoint.files import SnapshotWriter, WholeStateWriter, refuse_other_than_tensors, refuse_unloadable
from sunspot.checkpoint.ledger import Ledger
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.part_exchange import PartExchange
from sunspot.checkpoint.parts import ShardWriter
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
"""Values of `Metadata.tier` for attempts that start from a newer state than the newest checkpoint in storage."""

COPIES_MEASURED = 3
"""Number of copies in memory before their cost is reported."""

NOTICE_MARGIN_S = 4.0
"""Seconds between a notice and the save. They include half a second until the driver polls, half a second until rank 0
polls, and the duration of a step."""


class CheckpointManager:
    """Saves a worker group's state. Every worker has a manager.

    Under DDP, one worker on each node copies the state to memory, and rank 0 commits its copy. Under FSDP, each worker
    copies and commits its part of the state. All workers must call `save` and `close` together.
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
        """Create the manager of an attempt. `saved` contains the objects to save.

        Copies outlive this process only if `memory` is given. `windows` are the consumed rows that were restored with
        the state (`LedgerWindow`). `journals` are flushed before each commit.
        """
        self._run = run
        self._attempt = attempt
        self._plan = plan
        self._settings = plan.settings
        self._saved = saved
        self._place = place
        self._sharded = self._settings.sharded
        self._memory = memory or NodeMemory(None)
        exchange: PartExchange | None = None
        if self._sharded and place.group and place.nodes and self._settings.snapshot_cost:
            exchange = PartExchange(self._memory, place.nodes, place.group, place.parts)
        self._exchanges = exchange is not None
        self._optimizer_only = saved.optimizer_only or OptimizerOnlyParameters(saved.optimizer)
        self._snapshots = Snapshots(self._memory, saved, self._optimizer_only, exchange, place.sums)
        self._loadable = False
        "True once it is known that a restart can load the state."
        self._ledger = Ledger(place.group, attempt.label, attempt.step, windows, self._settings.audit)
        self._interval = SnapshotInterval(self._settings.snapshot_cost, attempt.step)
        self._timer = Timer(-math.inf if attempt.metadata.tier in AHEAD_OF_STORAGE else None)
        self._committer: CheckpointCommitter | None = None
        self._previous: CheckpointCommitter | None = None
        "This process's committer in an earlier group."
        if self._settings.weights == "safetensors":
            refuse_other_than_tensors(saved.model)
        if place.rank == 0 or self._sharded:
            coordinator = CommitCoordinator(place.group if self._sharded else None)
            ledger = self._ledger if place.rank == 0 else None
            self._committer = CheckpointCommitter(
                run, attempt, self._settings, self._writer(coordinator), coordinator, journals, ledger
            )

    def continue_commits(
        self, previous: CheckpointCommitter | None, attempts: list[Attempt], committed: float | None
    ) -> None:
        """Continue the commits that this process began in an earlier group. Call this before the first `save`.

        `previous` is the committer of this process's newest commit, or None if there was no commit. `attempts` are all
        attempts of the run, including the current one. `committed` is the Unix time of the newest checkpoint in
        storage, or None if it is unknown.
        """
        self._previous = previous
        if previous and self._committer:
            self._committer.follow(previous)
        commits = list[float]()
        if previous and not previous.stop_if_overtaken(attempts):
            commits.append(previous.begun_at)
        if committed is not None:  # possibly committed by another process that has been rank 0 since
            commits.append(time.monotonic() - max(0.0, time.time() - committed))
        if commits and self._attempt.metadata.tier in AHEAD_OF_STORAGE:
            self._timer = Timer(max(commits))

    def name_at(self, step: int) -> str:
        """Return the name of a checkpoint after `step`."""
        return checkpoint_name(step, self._attempt.number, self._attempt.nonce)

    def begin_step(self, step: int, rows: torch.Tensor | None, step_rows: int) -> None:
        """Start exchanging row IDs with the other workers, without waiting for them.

        `rows` are this worker's row IDs, int64 [B], and `step_rows` is the total number of rows in the step.
        """
        if self._settings.audit:
            first, last = share(step_rows, self._place.world_size, 0)
            self._ledger.begin_exchange(step, rows, last - first)

    def count_step(self, step: int) -> None:
        """Record in shared memory that `step` was taken. Call this once the GPU can no longer cancel the step."""
        self._memory.heartbeat(self._attempt.number, step, self._place.shard, self._place.shards)

    def took_step(self, step: int, rows: torch.Tensor | None) -> None:
        """Record that `step` was taken, and that this worker consumed the `rows`, which are IDs, int64 [B].

        Raises `SettingsError` after the first step if a restart could not load the state. Also raises the error that
        stopped all commits, if there was one, because some loops never call `wait_for_copy`.
        """
        if self._committer:
            self._committer.raise_if_failed()
        if not self._loadable:  # the optimizer has a state after the first step
            refuse_unloadable(self._saved.state(), self._settings.task)
            self._loadable = True
            self._snapshots.reserve()
        self._optimizer_only.after_step()
        self._ledger.add_step(step, rows)

    def due(self, step: int, step_s: float) -> StepActions:
        """Return the actions due after `step`, except reports and commands. The step took `step_s` seconds."""
        busy = self._sharded and self._committer is not None and self._committer.busy
        return StepActions(
            save=not busy and self._timer.due(self.save_every_s),
            # Before the second step, all tensors would have to be copied immediately.
            copy=self.in_memory
            and self._optimizer_only.ids is not None
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
        """Start copying the state at `step` to memory. If `to_storage` is set, the copy becomes a checkpoint.

        `evaluated` is False if `step` ends an epoch that has not been evaluated yet. If `to_storage` or `needed` is
        set, the copy waits until the previous copy is complete. Otherwise, it is skipped while the previous copy is in
        progress. Call `wait_for_copy` before parameters change.
        """
        # CPU time excludes the wait for slower workers. The next gradients would wait for them anyway.
        began = time.thread_time()
        if self._place.group and self._settings.snapshot_cost:
            sync_buffers(self._saved.model, self._place.sums)
        windows = self._ledger.gather(step)
        spent_s = time.thread_time() - began
        committer = self._committer if to_storage else None
        if not (self.in_memory or self._exchanges or committer):
            return
        manifest = self._describe(step, metrics, evaluated)
        extra_state = self._extra_state(manifest) if committer else None  # copies in memory are only read by this run
        snapshot = self._snapshots.take(manifest, windows, extra_state, needed=to_storage or needed)
        self._snapshots.charge(spent_s)
        if committer and snapshot:
            committer.commit(snapshot)

    def wait_for_copy(self) -> None:
        """Block until it is safe to change parameters. Raises the error that stopped all commits, if there was one.

        Call this once the gradients of the next optimizer step are known.
        """
        self._ledger.wait_for_exchange()
        self._snapshots.wait_for_copy()
        self._optimizer_only.before_step()
        if self._committer:
            self._committer.raise_if_failed()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest snapshot is committed. Return False after `timeout_s`, or if the snapshot was dropped.

        Raises the error that stopped all commits, if there was one.
        """
        return self._committer.drain(timeout_s) if self._committer else True

    def close(self, *, finished: bool) -> None:
        """Wait until the newest copy in memory is complete on all workers.

        If the run has `finished`, also wait until all commits have ended, and remove the copies, because no group will
        need them.
        """
        group = self._place.group
        if finished:  # other ranks can wait long, because rank 0 writes the whole model as one file
            run_on_all_ranks(group, self._committer.close if self._committer else lambda: None)
        self._snapshots.wait_until_complete()
        if group:
            dist.barrier(group=group)
        if finished:
            self._memory.remove()

    def leave_group(self, step: int) -> list[tuple[Any, ...]]:
        """Abandon the commits that have not begun, and return the windows of rows up to `step` for the next group.

        This method waits for the copy in progress, but not for other workers or storage, because the group has ended.
        """
        self._snapshots.wait_until_complete()
        if self._committer:
            self._committer.abandon()
        return self._ledger.unwritten_windows(step)

    @property
    def committer(self) -> CheckpointCommitter | None:
        """The committer that began this process's newest commit, in this group or an earlier group."""
        own = self._committer
        return own if own and own.begun_at > -math.inf else self._previous

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that this worker committed, or None."""
        newest = self._committer.newest if self._committer else None
        return newest.checkpoint if newest else None

    @property
    def commit_s(self) -> float | None:
        """The duration of the newest commit in seconds, or None."""
        newest = self._committer.newest if self._committer else None
        return newest.seconds if newest else None

    @property
    def save_every_s(self) -> float:
        """Seconds between checkpoints: CHECKPOINT_EVERY_S, or less if a preemption notice is too short for a commit."""
        every_s = self._settings.checkpoint_every_s
        late = exceeds_notice(self.commit_s, self._settings.job.notice_s)
        return min(every_s, self.commit_s or every_s) if late else every_s

    @property
    def stall_s(self) -> float:
        """Seconds for which copying has delayed training so far."""
        return self._snapshots.spent_s

    @property
    def in_memory(self) -> bool:
        """True if copies outlive this process."""
        return self._memory.shared

    @property
    def interval_steps(self) -> int:
        """Steps between copies in memory, or 0 if there are no copies or their cost is not known yet."""
        return self._interval.every if self.in_memory and self._interval.cost else 0

    @property
    def memory_summary(self) -> str:
        """A description of how often the state is copied to memory, and how much time that costs.

        It is empty until the cost has been measured.
        """
        if not self.in_memory or len(self._snapshots.costs) < COPIES_MEASURED:
            return ""
        size = self._snapshots.size
        interval = self._interval
        every = "step" if interval.every == 1 else f"{interval.every} steps"
        return f"every {every}, {size / 1e6:.3g} MB each, {interval.cost:.1%} of the time"

    def _writer(self, coordinator: CommitCoordinator) -> SnapshotWriter:
        saved = self._saved
        safetensors = self._settings.weights == "safetensors"
        if not self._sharded:
            return WholeStateWriter(self._run, safetensors, saved.more_files)
        names = parameter_names(saved.model, saved.optimizer)
        return ShardWriter(self._run, self._place, names, self._settings, coordinator, saved.more_files)

    def _describe(self, step: int, metrics: dict[str, Any], evaluated: bool) -> Checkpoint:
        """Return the manifest of a checkpoint without its files, which are not known yet."""
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
        """Return the content of `extra_state.pt`, which describes the checkpoint's origin."""
        return {
            "step": manifest.step,
            "epoch": manifest.epoch,
            # These values and the step determine the loader's position and the states of the random generators.
            "loader": {"name": self._settings.loader, **dataclasses.asdict(self._plan.steps)},
            "rng": {"seed": self._settings.seed, "step": manifest.step},
            "settings": self._settings.environment(),
            # Other programs need the names of the parameters in optimizer.pt.
            "parameters": parameter_names(self._saved.model, self._saved.optimizer),
            # With this record, the task can build its model (EmptySource), so prediction only needs the checkpoint.
            "data": ModelData.of(self._plan.source).record(),
            "versions": versions(),
        }


class SnapshotInterval:
    """The shortest interval at which snapshots take at most a given fraction of the training time."""

    def __init__(self, fraction: float, start: int) -> None:
        """Begin the first interval at step `start`. A `fraction` of 0 disables snapshots."""
        self._fraction = fraction
        self._last = start
        self._times: deque[float] = deque(maxlen=20)
        self.every = 1
        "Steps between snapshots."
        self.cost = 0.0
        "The fraction of the time that snapshots cost."

    def due(self, step: int, step_s: float, costs: deque[float]) -> bool:
        """Return True and begin the next interval if a snapshot is due after `step`.

        `step_s` is the step's duration, and `costs` contains the delays that the last snapshots caused, in seconds.
        """
        if not self._fraction:
            return False
        self._times.append(step_s)
        if costs:
            cost = median(costs)
            usual = median(self._times)
            self.every = max(1, math.ceil(cost / (self._fraction * usual)))
            self.cost = cost / (self.every * usual)
        if self.left(step) > 0:
            return False
        self._last = step
        return True

    def left(self, step: int) -> int:
        """Return the number of steps until the next snapshot, which is 0 or negative if the snapshot is due."""
        return self._last + self.every - step


def exceeds_notice(commit_s: float | None, notice_s: float) -> bool:
    """Return True if a commit of `commit_s` seconds is too slow for a preemption notice of `notice_s` seconds.

    Returns False if either value is unknown.
    """
    return bool(commit_s and notice_s and commit_s + NOTICE_MARGIN_S > notice_s)


def versions() -> dict[str, str]:
    """Return the versions of packages that can affect a run's results."""
    import ray  # imported lazily, because reading a checkpoint does not need Ray

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which weights_only rejects
        "ray": ray.__version__,
        "numpy": np.__version__,
    }
