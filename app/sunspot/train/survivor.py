"""A worker process that outlives its group, and keeps its model, optimizer and rows for the next group.

Ray Train would end all workers when one is lost. Instead, the other workers form a group without the lost worker, and
repeat the current step unless it was already complete. elastic/membership.py decides which workers are members. Only
the lost process is replaced, and its replacement warms up while the others train.
"""

import gc
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any, Self

import numpy as np
import ray
import ray.train.torch
import torch
import torch.distributed as dist

from sunspot.checkpoint import CheckpointCommitter, NodeMemory
from sunspot.checkpoint.files import load_weights
from sunspot.checkpoint.snapshot import SavedObjects
from sunspot.checkpoint.tensors import in_buffer, map_tensors, size_of, tensors_in
from sunspot.elastic.claim import StartPoint, process_name
from sunspot.elastic.control import ControlChannel, ControlClient
from sunspot.elastic.copies import LiveState, SurvivingState
from sunspot.elastic.member_connections import MACHINE_LIMIT_S
from sunspot.elastic.membership import Generation, Member
from sunspot.elastic.membership_channel import (
    PROCESS_LIMIT_S,
    DriverUnreachableError,
    MembershipAddress,
    MembershipClient,
    RegroupError,
)
from sunspot.elastic.restore import TrainingState
from sunspot.elastic.watchdog import FIRST_STEP_S, Watchdog, ended_after
from sunspot.errors import SupersededError, find_in, shorten
from sunspot.formatting import plural
from sunspot.observe.metrics import MetricWindow
from sunspot.parallel.collectives import WorkerPlace, gather_objects, same_parameters
from sunspot.parallel.process_group import FORM_LIMIT_S, NCCL_LIMIT_S, ProcessGroups
from sunspot.parallel.replica_groups import ReplicaGroups
from sunspot.parallel.sharding import part_of, shard_model_state
from sunspot.parallel.step_barrier import CLOSED_WITHIN_S
from sunspot.parallel.transfers import transfer
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run.attempts import IN_PLACE, Attempt, checkpoint_name, step_of
from sunspot.run.failures import LOST_PEER
from sunspot.train.learner import Learner, load_rest
from sunspot.train.worker import Worker, close_outputs

OUTPUTS_S = 1.0
"""Maximum number of seconds that a new group waits for storage to take the logs and metrics of the previous group."""

GROUP_TRIES = 3
"""Number of failed groups after which a process stops trying (`Survivor._failed_groups`)."""

STUCK_AFTER_S = 20.0
"""Seconds by which an operation may exceed its time limit before the process ends itself."""


SEND_LIMIT_S = 120
"""Maximum number of seconds that a transfer may take per tensor, on average. If either side is lost, the transfer ends
sooner."""


class NoGroupError(RuntimeError):
    """Raised after GROUP_TRIES failed groups, or if a replacement's first group does not form."""


@dataclass(frozen=True)
class StateMetadata:
    """Everything that belongs to a live state besides its tensors."""

    metrics: dict[str, Any]
    "Metrics that a checkpoint of the state would contain."
    taken: float
    "Time at which its last step was taken, in seconds since the epoch."
    ledger: Sequence[Any]
    "Windows of consumed rows that might not be in storage yet."


class Survivor:
    """A worker process, with the state that it keeps from one group to the next."""

    def __init__(self, address: MembershipAddress, limit_s: float, replicas: ReplicaGroups | None = None) -> None:
        """Prepare to join groups. Each wait in a collective is limited to `limit_s` seconds.

        `replicas` are formed together with each group (PARALLEL=hsdp).
        """
        self._address = address
        self._device = ray.train.torch.get_device()
        self.replicas = replicas
        self.groups = ProcessGroups(self._device, limit_s, (address.host, address.port), replicas)
        context = ray.get_runtime_context()
        name = f"{context.get_actor_id()}-{process_name()}"  # `replace_lost_alone` looks for the actor id
        member = Member(name, context.get_node_id(), host=socket.gethostname())
        barrier = replicas.step_barrier if replicas else None
        self._client = MembershipClient(address, member, self.groups.abort_collectives, barrier)
        self._worker: Worker | None = None
        self._trained = False
        "True once this process has trained in a group."
        self._failed_groups: list[str] = []
        """Reasons for the failed groups since a group in which this process took a step.

        A group has failed if it did not form although no member was known to be lost, or if it took no step because the
        driver considered this process lost. A group does not count as failed if it ended for another reason, such as
        the loss of another worker.
        """
        self._connections = 0
        "Number of connections that the client had made when the newest group formed."
        self._outputs: Future[None] | None = None
        "Future that is done once the previous group's outputs are in storage."
        self.others_train = True
        "False if it is known that no other worker was training when this process started."
        self.learner: Learner | None = None
        self._memory: NodeMemory | None = None
        self.window: MetricWindow | None = None
        self.committer: CheckpointCommitter | None = None
        "The committer that began this process's newest commit, which may still be running."
        self.kept: tuple[LiveState, StateMetadata] | None = None
        "Name of the complete state that this process has, and everything else but its tensors. None without a state."

    def __enter__(self) -> Self:
        self.others_train = self._client.connect()
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    @property
    def replaces(self) -> bool:
        """True if this process replaces a lost worker and has not trained yet. The others can train without it."""
        return self.others_train and not self._trained

    def building(self, limit_s: float) -> AbstractContextManager[None]:
        """Return a context in which the driver waits up to `limit_s` seconds for a heartbeat (0 for no limit)."""
        return self._client.heartbeat_limit(limit_s)

    @property
    def shard(self) -> int:
        """The shard that this process should prepare under hsdp."""
        return self._client.shard

    def outlives(self, error: Exception) -> bool:
        """Return True if an error has ended only the group, and this process can join another group."""
        if isinstance(error, RegroupError):
            return True
        if isinstance(error, GroupRestartError | NoGroupError | DriverUnreachableError):
            return False
        known = find_in(error)
        if known and not isinstance(known, SupersededError):  # the next group of the same driver may supersede this one
            return False
        lost_peer = known or LOST_PEER.search(f"{type(error).__name__}: {error}")
        return self._client.closed(CLOSED_WITHIN_S if lost_peer else 0.0)

    def abandon_group(self, error: Exception) -> None:
        """Abandon the group, which `error` has ended, and keep the state for the next group."""
        if self._worker and self._worker.step > self._worker.group_start.step:
            self._failed_groups.clear()
        elif self._client.connections > self._connections:
            limit = f"it sent no heartbeat for {PROCESS_LIMIT_S:.0f} s, or no packet for {MACHINE_LIMIT_S:.0f} s"
            self._failed_groups.append(f"the driver considered this process lost: {limit}")
        for each in filter(None, (error, error.__cause__)):
            traceback.clear_frames(each.__traceback__)  # frames hold the last step's batch and graph
        if self._worker:
            self.kept = abandon_step(self._worker)
            self.window = self._worker.window
            self.committer = self._worker.checkpoints.committer
            self._worker = None
        if self.learner and self.learner.plan.settings.parallel == "fsdp":
            self.forget()  # the next group loads other parts, from the copies in memory
        else:
            self._free_memory()

    def write_outputs(self, outputs: ExitStack) -> None:
        """Start writing a group's outputs to storage. The outputs are written while the next group forms."""
        self._outputs = close_outputs(outputs)

    def prepare(self, build: Callable[[], Learner]) -> None:
        """Build this process's learner without the other workers, unless it already has a learner."""
        self.learner = self.learner or build()

    def prepare_alone(self, build: Callable[[], Learner], hang_timeout_s: float) -> None:
        """Build this process's learner while the other workers train. If that hangs, end the process.

        The other workers do not wait for this process, so none of them would notice a hang. The limit is
        `hang_timeout_s` plus FIRST_STEP_S seconds, as for a first step. There is no limit if `hang_timeout_s` is 0.
        """
        until = "the model and the optimizer were built"
        limit = ended_after(hang_timeout_s + FIRST_STEP_S, until) if hang_timeout_s else nullcontext()
        with self.building(hang_timeout_s), limit:
            self.prepare(build)

    def open_memory(self, location: str, first: bool) -> NodeMemory:
        """Return the shared memory for this process's copies. It is opened once for all groups of the process.

        `first` is True for the first worker on each node. This worker prints warnings for the whole node.
        """
        self._memory = self._memory or NodeMemory(location, warns=first)
        return self._memory

    def forget(self) -> None:
        """Free this process's learner, metrics and state."""
        self.learner = self.window = self.kept = None
        gc.unfreeze()
        self._free_memory()

    def _free_memory(self) -> None:
        gc.collect()
        if not self.learner:
            torch.cuda.empty_cache()  # otherwise the next learner would wait for this memory

    def form(self) -> WorkerPlace | None:
        """Join the next group, form it with the other members, and return this worker's place in it.

        Returns None if no further group will form. Raises `DriverUnreachableError` if the driver does not answer, and
        `NoGroupError` after GROUP_TRIES failed groups. A replacement gives up after its first failed group, because the
        other workers wait for it.
        """
        while True:
            step = step_of(self.kept[0].checkpoint) if self.kept else None
            with ended_after(FORM_LIMIT_S + STUCK_AFTER_S, "it left its group"):
                self.groups.discard()
            if len(self._failed_groups) >= GROUP_TRIES:
                groups = plural(len(self._failed_groups), "group")
                raise NoGroupError(f"{groups} in a row took no step: {self._failed_groups[-1]}")
            joined = self._client.join_next(step, self._wait_outside)
            if not joined:
                return None
            generation, rank = joined
            self._connections = self._client.connections
            began = time.monotonic()
            try:
                group = self._form(generation, rank)
            except RuntimeError as error:
                took_s = time.monotonic() - began
                # If no member is lost, the first member to give up closes the group, after FORM_LIMIT_S.
                if took_s > FORM_LIMIT_S / 2 or not self._client.closed(CLOSED_WITHIN_S):
                    self._note_unformed(generation, took_s, error)
                continue
            nodes = [member.node for member in generation.members]
            return WorkerPlace(group, rank, len(nodes), self._device, nodes, self.groups.sums, self.replicas)

    def _wait_outside(self) -> None:
        """Free this process's learner and state, because it does not train again until more workers are wanted."""
        print("this worker left because of `sunspot scale`, and waits until more workers are wanted", flush=True)
        self.forget()

    def _form(self, generation: Generation, rank: int) -> dist.ProcessGroup:
        size = len(generation.members)
        limit_s = FORM_LIMIT_S + (NCCL_LIMIT_S if self._device.type == "cuda" else 0)
        until = f"a group of {size} formed"
        with ended_after(limit_s + STUCK_AFTER_S, until), self.groups.forming(self.is_closed):
            return self.groups.form(partial(self._open_store, generation.number), rank, size, FORM_LIMIT_S)

    def _note_unformed(self, generation: Generation, after_s: float, error: RuntimeError) -> None:
        """Record that a group did not form, although no member is known to be lost."""
        nodes = ", ".join(sorted({member.node[:12] for member in generation.members}))
        why = (
            f"{plural(len(generation.members), 'worker')} did not form a group within {after_s:.0f} s; check that the "
            f"nodes {nodes} can connect to each other ({shorten(error)})"
        )
        print(why, file=sys.stderr, flush=True)
        self._failed_groups.append(why)
        if self.replaces:
            raise NoGroupError(why) from error

    def _open_store(self, generation: int) -> Any:
        """Open the store in which the members of a generation find each other."""
        host, port = self._address.host, self._address.store_port
        limit = timedelta(seconds=FORM_LIMIT_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        return dist.PrefixStore(str(generation), store)  # type: ignore[attr-defined]

    def is_closed(self) -> bool:
        """Return True if the group has ended.

        A worker that is alone in its group must ask, because it has no peers whose loss would make a collective fail.
        """
        return self._client.closed(0.0)

    def regroups(self) -> bool:
        """Return True if the members should form another group after the current step."""
        return self._client.changing

    def continue_from(
        self,
        place: WorkerPlace,
        start: StartPoint,
        build: Callable[[], Learner],
        watchdog: Watchdog,
        control: ControlClient,
    ) -> TrainingState:
        """Bring this process to the live state of `start`, and return this state. All workers call this together.

        A process without a learner builds one with `build`, and so does a process whose shard has changed (hsdp). A
        process that lacks the newest state receives it from another process. The result contains tensors only on a
        process that has received the state.

        Raises `RegroupError` on all workers if their parameters still differ once every worker has the state. In this
        case, no worker keeps its state, so the next group returns to the newest copy or checkpoint.
        """
        assert start.live
        with watchdog.paused():
            if self.learner and self.learner.place.shard != place.shard:
                self.forget()
            self.prepare(build)
        learner = self.learner
        assert learner
        saved, metadata = (learner.saved(), self.kept[1]) if self.kept else (None, None)
        state = hand_over(place, start.live, saved, metadata, learner.plan.total_steps)
        with watchdog.paused():
            learner.move(place)
            if state.model is not None:
                self._load(learner, start.attempt, state)
        if not same_parameters(learner.model, place):
            if place.rank == 0:
                text = (
                    "the workers' parameters differ, which happens with processors of different kinds; "
                    "all workers return to the newest copy"
                )
                control.send(ControlChannel.log, f"step {start.attempt.step}: {text}")
            self.forget()
            raise RegroupError
        return state

    def _load(self, learner: Learner, attempt: Attempt, state: TrainingState) -> None:
        """Load a state that was received from another process. Until it is loaded, this process has no usable state.

        Afterwards, the state is kept, in case the group ends before its first step.
        """
        assert state.taken is not None
        self.kept = None
        weights = shard_model_state(learner.model, state.model)
        load_weights(learner.model, weights, str(attempt.starts_from))
        load_rest(state, learner.model, learner.optimizer)
        name = checkpoint_name(attempt.step, attempt.number, attempt.nonce)
        live = LiveState(name, state.evaluated, learner.place.shard, learner.place.shards)
        self.kept = live, StateMetadata(state.metrics, state.taken, state.ledger)

    def begin(self, worker: Worker) -> None:
        """Record that this process starts training with `worker`."""
        if not gc.get_freeze_count():
            gc.freeze()  # imported modules and the model, which would take half a second to traverse at each loss
        self._trained = True
        self._worker = worker
        self.learner = worker.learner

    def await_outputs(self) -> None:
        """Wait up to OUTPUTS_S seconds until the previous group's outputs are in storage."""
        if self._outputs:
            wait([self._outputs], OUTPUTS_S)

    def end(self) -> None:
        """Announce to the driver that the group is ending, and that no other group follows."""
        self._client.end()


def abandon_step(worker: Worker) -> tuple[LiveState, StateMetadata] | None:
    """Abandon the step that the end of the group has interrupted, and return the state to continue from.

    This is the state as of the newest step that was counted. It is returned without its tensors, which this process
    keeps. Returns None if the interrupted step cannot be undone, or if this process has only a part of the state
    (fsdp).
    """
    worker.step_guard.settle()
    worker.profiler.drop()
    windows = worker.checkpoints.leave_group(worker.step)  # waits for a copy that still reads the parameters
    if not worker.step_guard.undo():
        return None
    place = worker.learner.place
    live = LiveState(worker.checkpoints.name_at(worker.step), worker.evaluated, place.shard, place.shards)
    return live, StateMetadata(worker.state_metrics(worker.record), worker.step_ended, windows)


def hand_over(
    place: WorkerPlace,
    surviving: SurvivingState,
    saved: SavedObjects | None,
    metadata: StateMetadata | None,
    total_steps: int,
) -> TrainingState:
    """Return the state from which the group continues. All workers of the group call this together.

    Each rank without the state is assigned to a rank that has it. If the state is sharded, both ranks have the same
    shard. Each rank that has the state sends the tensors in `saved` to the ranks assigned to it, and its own result
    contains no tensors. All ranks use the `metadata` of the first rank that has the state, because other ranks'
    metadata can differ after a loss.

    If the state has several shards, no rank returns before every rank has received its shard. Until then, each rank
    keeps the shard of its previous state, which it would need if a sender were lost.
    """
    assert place.group
    rank = place.rank
    senders = assign_senders(surviving, place.world_size)
    first = {holder % surviving.shards: holder for holder in reversed(surviving.ranks)}
    sends = rank in {*first.values(), *senders.values()}
    state = saved.with_average(saved.state()) if saved and sends else None
    structure = map_tensors(state, lambda tensor: torch.empty_like(part_of(tensor), device="meta"))
    # One rank for each shard describes the tensors, because all ranks with the same shard have the same tensors.
    described = gather_objects((structure, metadata) if rank in first.values() else None, place.group)
    structure = described[first[rank % surviving.shards]][0]
    metadata = described[surviving.ranks[0]][1]
    known = TrainingState(
        evaluated=surviving.evaluated,
        metrics=metadata.metrics,
        taken=metadata.taken,
        tier=IN_PLACE,
        total_steps=total_steps,
        ledger=tuple(metadata.ledger),
    )
    if rank in senders.values():
        own = [part_of(tensor.detach()).cpu().contiguous() for tensor in tensors_in(state)]
        receivers = [other for other, sender in senders.items() if sender == rank]
        transfer(place.group, dict.fromkeys(receivers, own), {}, SEND_LIMIT_S)
    elif rank in senders:
        # Each part has its own memory, because the optimizer keeps the tensors. Other ranks are waiting, so no time is
        # spent on setting the memory to zero first.
        parts = structure.items()
        received = {name: in_buffer(part, np.empty(max(1, size_of(part)), np.uint8)) for name, part in parts}
        transfer(place.group, {}, {senders[rank]: tensors_in(received)}, SEND_LIMIT_S)
        known = TrainingState(**{**vars(known), **received})
    if senders and surviving.shards > 1:
        dist.barrier(place.group)
    return known


def assign_senders(surviving: SurvivingState, world_size: int) -> dict[int, int]:
    """Return the sender for each rank that lacks the state. The sender and the receiver have the same shard."""
    lacking = [rank for rank in range(world_size) if rank not in surviving.ranks]
    shards = surviving.shards
    holders = [cycle([rank for rank in surviving.ranks if rank % shards == shard]) for shard in range(shards)]
    return {rank: next(holders[rank % shards]) for rank in lacking}
