"""A worker process that outlives its groups: it takes model, optimizer and rows from one to the next.

Where Ray Train would end all workers for the loss of one, the others break off the step that they cannot end, form a
group without it, and take the step again (elastic/membership.py says who is in). Only the process that is gone is
replaced, and the new one prepares itself while the others train.
"""

import gc
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Self

import ray
import ray.train.torch
import torch
import torch.distributed as dist

from sunspot.background import Background
from sunspot.checkpoint import CheckpointCommitter, NodeMemory
from sunspot.elastic.claim import process_name
from sunspot.elastic.copies import Holders, LiveState
from sunspot.elastic.member_connections import MACHINE_LIMIT_S
from sunspot.elastic.membership import Generation, Member
from sunspot.elastic.membership_channel import (
    PROCESS_LIMIT_S,
    DeciderLostError,
    MembershipAddress,
    MembershipClient,
)
from sunspot.elastic.restore import Position, TrainingState, hand_over
from sunspot.elastic.watchdog import FIRST_STEP_S, ended_after
from sunspot.errors import SupersededError, find_in, shorten
from sunspot.formatting import plural
from sunspot.observe.metrics import MetricWindow
from sunspot.parallel.collectives import WorkerPlace
from sunspot.parallel.process_group import FORM_LIMIT_S, NCCL_LIMIT_S, ProcessGroups, await_device
from sunspot.parallel.sharding import is_fsdp
from sunspot.ray_internals.controller import GroupRestartError
from sunspot.run.attempts import Attempt, checkpoint_name, step_of
from sunspot.run.failures import LOST_PEER
from sunspot.train.learner import Learner
from sunspot.train.worker import RegroupError, Worker, close_outputs

CLOSED_WITHIN_S = 3.0
"""How soon after an error in a collective a member hears that the group is closed, if a loss was the reason."""

OUTPUTS_S = 1.0
"""How long a group waits, once it has formed, for storage to take what its members printed and measured before."""

CUT_EVERY_S = 0.1
"""Between two looks whether the group that forms has lost a member."""

GROUP_TRIES = 3
"""Largest number of groups in a row that take no step because they do not form or this process is taken for lost."""

STUCK_AFTER_S = 20.0
"""Seconds from the end of a time limit until a process ends itself, because the limited operation still hangs."""


class NoGroupError(RuntimeError):
    """Ends a process that took no step in GROUP_TRIES groups in a row, or a replacement that cannot form a group."""


class Survivor:
    """This process, between its groups."""

    def __init__(self, address: MembershipAddress, limit_s: float) -> None:
        """No collective of its groups waits for longer than `limit_s`."""
        self._address, self._device = address, ray.train.torch.get_device()
        self._groups = ProcessGroups(self._device, limit_s, (address.host, address.port))
        context = ray.get_runtime_context()
        name = f"{context.get_actor_id()}-{process_name()}"  # see `replace_lost_alone`
        member = Member(name, context.get_node_id(), host=socket.gethostname())
        self._client = MembershipClient(address, member, self._groups.cut)
        self._worker: Worker | None = None
        self._trained = False
        "True once this process has been in a group that trained."
        self._failed_groups: list[str] = []
        "Reasons why groups took no step, since this process's newest step."
        self._connections = 0
        "Number of the client's connections when the newest group formed."
        self._outputs: Future[None] | None = None
        "Those of the group before, as they come to storage."
        self.others_train = True
        "True if others trained when this process started, as far as is known."
        self.learner: Learner | None = None
        self._memory: NodeMemory | None = None
        self.window: MetricWindow | None = None
        self.committer: CheckpointCommitter | None = None
        "The committer that began this process's newest commit, which may be under way."
        self.kept: tuple[LiveState, Position] | None = None
        "The state that it has, if that is whole, and where that stands."

    def __enter__(self) -> Self:
        self.others_train = self._client.connect()
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    @property
    def replaces(self) -> bool:
        """True if others trained when this process started and it has not trained yet, so they can do without it."""
        return self.others_train and not self._trained

    def building(self, limit_s: float) -> AbstractContextManager[None]:
        """Make the decider wait up to `limit_s` (0: without a limit) for a heartbeat while this process builds."""
        return self._client.patience(limit_s)

    def prepare(self, build: Callable[[], Learner]) -> None:
        """Build what this process will train with once it has the others' state, alone, if it has nothing yet."""
        self.learner = self.learner or build()

    def prepare_alone(self, build: Callable[[], Learner], hang_timeout_s: float) -> None:
        """Prepare this process while the others train, and end it if that hangs.

        The others do not wait for this process, so none of them would notice. The limit is that of a first step: it is
        FIRST_STEP_S longer than `hang_timeout_s`. A `hang_timeout_s` of 0 sets no limit.
        """
        until = "the model and the optimizer were built"
        limit = ended_after(hang_timeout_s + FIRST_STEP_S, until) if hang_timeout_s else nullcontext()
        with self.building(hang_timeout_s), limit:
            self.prepare(build)

    def open_memory(self, location: str, first: bool) -> NodeMemory:
        """Return the shared memory for this process's copies, which all of its groups use.

        `first` is True on the first worker of each node, and counts only in this process's first group.
        """
        self._memory = self._memory or NodeMemory(location, told=first)
        return self._memory

    def align(self, live: bool, build: Callable[[], Learner]) -> None:
        """Have all members of a group build what they train with together, or none: only a `live` state fits what any
        of them has, and who lacks it builds it alone, as `prepare` says.
        """
        if live:
            self.prepare(build)
        elif self.learner:
            self.forget()

    def forget(self) -> None:
        """Let go of what it trains with."""
        self.learner = self.window = self.kept = None
        gc.unfreeze()
        self._free_memory()

    def _free_memory(self) -> None:
        gc.collect()
        if not self.learner:
            torch.cuda.empty_cache()  # or what is built next would wait for it

    def form(self) -> WorkerPlace | None:
        """Ask to be in the next group, and form it with the others. Returns None if there is no next group.

        Raises `DeciderLostError`, and `NoGroupError` once GROUP_TRIES groups in a row have taken no step. A replacement
        has one try, because the others would wait for it in each.
        """
        step = step_of(self.kept[0].checkpoint) if self.kept else None
        while True:
            with ended_after(FORM_LIMIT_S + STUCK_AFTER_S, "it left its group"):
                self._groups.leave()
            if len(self._failed_groups) >= GROUP_TRIES:
                count = plural(len(self._failed_groups), "group")
                raise NoGroupError(f"{count} in a row took no step: {self._failed_groups[-1]}")
            stood = self._client.stand(step)
            if not stood:
                return None
            generation, rank = stood
            self._connections = self._client.connections
            began = time.monotonic()
            try:
                group = self._form(generation, rank)
            except RuntimeError as error:
                took_s = time.monotonic() - began
                # The first member that gives up closes the group, after FORM_LIMIT_S. A loss closes it sooner.
                if took_s > FORM_LIMIT_S / 2 or not self._client.closed(CLOSED_WITHIN_S):
                    self._note_unformed(generation, took_s, error)
                continue
            nodes = [member.node for member in generation.members]
            return WorkerPlace(group, rank, len(nodes), self._device, nodes)

    def _form(self, generation: Generation, rank: int) -> dist.ProcessGroup:
        size = len(generation.members)
        limit_s = FORM_LIMIT_S + (NCCL_LIMIT_S if self._device.type == "cuda" else 0)
        with ended_after(limit_s + STUCK_AFTER_S, f"a group of {size} formed"), self.forming():
            return self._groups.form(partial(self._open_store, generation.number), rank, size, FORM_LIMIT_S)

    def _note_unformed(self, generation: Generation, after_s: float, error: RuntimeError) -> None:
        """Note that a group did not form although none of its members is known to be lost."""
        nodes = ", ".join(sorted({member.node[:12] for member in generation.members}))
        why = (
            f"{plural(len(generation.members), 'worker')} did not form a group within {after_s:.0f} s; check that the "
            f"nodes {nodes} may connect to each other ({shorten(error)})"
        )
        print(why, file=sys.stderr, flush=True)
        self._failed_groups.append(why)
        if self.replaces:
            raise NoGroupError(why) from error

    @contextmanager
    def forming(self) -> Iterator[None]:
        """Have the groups that form in this context be cut once this generation is closed, in the context and later."""
        # A loss may be told before there is a socket to cut.
        with self._groups.forming(), Background(CUT_EVERY_S, self._cut_if_closed):
            yield

    def _open_store(self, generation: int) -> Any:
        """Open the part of the decider's store in which the members of a generation meet."""
        host, port = self._address.host, self._address.store_port
        limit = timedelta(seconds=FORM_LIMIT_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        return dist.PrefixStore(str(generation), store)  # type: ignore[attr-defined]

    def _cut_if_closed(self) -> None:
        if self._client.closed(0.0) or self._groups.overdue:
            self._groups.cut()

    def is_closed(self) -> bool:
        """Return True if the group has ended. In a group of one, no collective fails because of that."""
        return self._client.closed(0.0)

    def regroups(self) -> bool:
        """Whether the group is to change once a step is done."""
        return self._client.changing

    def await_sums(self) -> None:
        """Return once the GPU has summed a step's gradients; raises `RegroupError` if the group was broken off."""
        if self._device.type == "cuda" and dist.get_world_size() > 1:
            await_device(self._device)
            if self._client.closed(0.0):
                raise RegroupError

    def hand_over(self, place: WorkerPlace, holders: Holders, total_steps: int) -> TrainingState:
        """Return the state to go on from, from those who have it; all workers of the group call this together."""
        saved = self.learner.saved() if self.learner and self.kept else None
        state = hand_over(place, holders, saved, self.kept[1] if self.kept else None, total_steps)
        if place.rank not in holders.ranks:  # that state takes the place of its own, which has another name
            self.kept = None
        return state

    def keep(self, attempt: Attempt, state: TrainingState) -> None:
        """Note that this process has the state that it was handed, even if its group ends before the first step."""
        assert state.taken is not None
        name = checkpoint_name(attempt.step, attempt.number, attempt.nonce)
        self.kept = LiveState(name, state.evaluated), Position(state.metrics, state.taken, state.ledger)

    def begin(self, worker: Worker) -> None:
        """Note what this process trains with."""
        if not gc.get_freeze_count():
            gc.freeze()  # all that was imported, and the model: to look through it takes half a second, at each loss
        self._trained = True
        self._worker, self.learner = worker, worker.learner

    def outlives(self, error: Exception) -> bool:
        """Tell whether the group has ended, by this error, and not this process."""
        if isinstance(error, RegroupError):
            return True
        if isinstance(error, GroupRestartError | NoGroupError | DeciderLostError):
            return False
        known = find_in(error)
        if known and not isinstance(known, SupersededError):  # its driver's next group may supersede it
            return False
        lost_peer = known or LOST_PEER.search(f"{type(error).__name__}: {error}")
        return self._client.closed(CLOSED_WITHIN_S if lost_peer else 0.0)

    def leave(self, error: Exception) -> None:
        """Keep the state for the next group, and let go of the last one."""
        if self._worker and self._worker.step > self._worker.group_start.step:
            self._failed_groups.clear()
        elif self._client.connections > self._connections:
            limit = f"it sent no heartbeat for {PROCESS_LIMIT_S:.0f} s, or no packet for {MACHINE_LIMIT_S:.0f} s"
            self._failed_groups.append(f"the driver took this process for lost: {limit}")
        for each in (error, error.__cause__):
            if each:
                traceback.clear_frames(each.__traceback__)  # which hold the last step's batch and graph
        if self._worker:
            self.kept = self._worker.leave()
            self.window = self._worker.window
            self.committer = self._worker.checkpoints.committer
            self._worker = None
        if self.learner and is_fsdp(self.learner.model):  # the next group has other parts, from the copies in memory
            self.forget()
        else:
            self._free_memory()

    def close(self, outputs: ExitStack) -> None:
        """Begin to bring a group's outputs to storage, while the next group forms."""
        self._outputs = close_outputs(outputs)

    def await_outputs(self) -> None:
        """Wait for the outputs of the group before, for OUTPUTS_S at most."""
        if self._outputs:
            wait([self._outputs], OUTPUTS_S)

    def end(self) -> None:
        """Tell the others' decider that the group ends as a whole."""
        self._client.end()
