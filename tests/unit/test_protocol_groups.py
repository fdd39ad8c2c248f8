"""A model of process groups that share a run, and that change or continue while commits are running.

It extends tests/unit/test_protocol.py, whose processes are groups of one that commit before they continue. Here, a
group saves at its end, and the commit runs while the next groups train, in a thread of the process that was rank 0.
That process can continue, be cut off while its commit still runs, or be gone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import sunspot.checkpoint.commit
import sunspot.checkpoint.memory_files
import sunspot.run.checkpoints
from sunspot.checkpoint.commit import CheckpointCommitter, CommitCoordinator
from sunspot.checkpoint.ledger import Ledger
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.memory_files import LoadedSnapshot, Sidecar, find_snapshot
from sunspot.checkpoint.snapshot import ChangeWatch, Snapshot
from sunspot.elastic.claim import StartPoint, begin_attempt
from sunspot.elastic.copies import LiveState, NodeInventory
from sunspot.errors import ConflictError, DamageError, NotFoundError, StorageError, SupersededError
from sunspot.run import Claimant, Run
from sunspot.run.attempts import Attempt, checkpoint_name, ensure_owner, lineage, read_attempts
from sunspot.run.checkpoints import MANIFEST, Checkpoint, leads_to_newest
from sunspot.run.identity import record_identity
from sunspot.run.requests import deletion_begun, refuse_if_deleted
from sunspot.settings import IDENTITY
from sunspot.storage.limits import retry_storage
from tests.harness.interleaving import Operation, Process
from tests.harness.runs import STEPS_PER_EPOCH
from tests.unit.test_protocol import (
    IDENTITY_OF_ROWS,
    NODES,
    RUN,
    SETTINGS,
    STATE_BYTES,
    OneFile,
    Protocol,
    examples,
    expect_counterexample,
    explore,
    inline,
    rows_of,
)

__all__ = ["inline"]

STEPS = 2
"""Number of steps of a group. The group saves after its last step, unless the previous commit is still running."""


@dataclass
class Member:
    """A process of a group."""

    name: str
    node: int
    memory: NodeMemory
    state: list[int] = field(default_factory=list)
    live: LiveState | None = None
    windows: Any = ()


@dataclass
class CommitThread:
    """A commit thread with the state that it commits, and the attempts that it saw at its last check."""

    attempt: Attempt
    name: str
    seen: list[Attempt] = field(default_factory=list)


class Groups(Protocol):
    """A model of jobs with groups that change in place while they commit."""

    changes: ClassVar[list[str]] = [
        *("lose first", "cut off first", "lose last", "join", "fall behind", "forget", "freeze", "thaw")
    ]

    def __init__(self) -> None:
        super().__init__()
        self.commits: dict[Process, CommitThread] = {}
        carry_out = self.world.carry_out

        def look_and_carry_out(process: Process, operation: Operation, *how: Any, **more: Any) -> Any:
            commit = self.commits.get(process)
            if commit and operation.verb == "exists" and "/attempts/" in operation.key:
                commit.seen = read_attempts(self.run)
            return carry_out(process, operation, *how, **more)

        self.world.carry_out = look_and_carry_out  # type: ignore[method-assign]

    def living(self, number: int) -> Process:
        """Choose a live process by a number and the length of the trace."""
        living = self.world.living
        return living[(number + len(self.world.trace)) % len(living)]

    # --------------------------------------------------------------------------------------------------- processes

    def train(self, process: Process, owner: str, node: int) -> None:
        """Run the groups of one driver, one after the other."""
        run, choices = Run(process.storage, RUN), random.Random(process.name)
        members = [self.make_member(process, f"{process.name}/{number}", node + number) for number in range(2)]
        frozen: list[Member] = []
        commit: Process | None = None
        try:
            refuse_if_deleted(run)
            record_identity(run, SETTINGS.environment(), IDENTITY, IDENTITY_OF_ROWS)
        except (ConflictError, StorageError, NotFoundError):
            return
        for group in range(100):
            found = [self.find_copy(run, member) for member in members]
            try:
                start = self.begin_group(run, owner, members, found)
                if not start:
                    return
                state, windows = self.take_up(run, start, members, found)
            except (ConflictError, StorageError, NotFoundError):
                return
            self.restored(process, start, state)
            taker = len(self.takers)
            self.takers.append((self.claims[process], start.attempt))
            saves = not (commit and commit.next)
            snapshot, ledger = self.take_group_steps(start.attempt, taker, members, (state, windows), saves)
            if snapshot:
                commit = self.begin_commit(f"{process.name} commit {group}", start.attempt, snapshot, ledger)
            change = choices.choice(self.changes)
            if change == "lose first" and commit:
                commit.kill()
            self.change(change, process, members, frozen)

    def make_member(self, process: Process, name: str, node: int) -> Member:
        sunspot.checkpoint.memory_files.SHARED_MEMORY = self.folder / str(node % NODES)
        member = Member(name, node % NODES, NodeMemory(f"memory/{RUN}"))
        process.at_end.append(member.memory._lock.close)
        return member

    def find_copy(self, run: Run, member: Member) -> LoadedSnapshot | None:
        sunspot.checkpoint.memory_files.SHARED_MEMORY = self.folder / str(member.node)
        return find_snapshot(f"memory/{RUN}")

    def begin_group(
        self, run: Run, owner: str, members: list[Member], found: list[LoadedSnapshot | None]
    ) -> StartPoint | None:
        machines = [
            NodeInventory(
                f"host-{member.node}",
                f"node-{member.node}",
                copy and copy.snapshot,
                [],
                live=member.live,
                process=member.name,
            )
            for member, copy in zip(members, found, strict=True)
        ]
        begin = partial(begin_attempt, Claimant(run, owner), SETTINGS, machines)
        return retry_storage(SETTINGS.storage_timeout_s, "beginning", begin)

    def take_up(
        self, run: Run, start: StartPoint, members: list[Member], found: list[LoadedSnapshot | None]
    ) -> tuple[list[int], Any]:
        if start.live:
            holder = members[start.live.ranks[0]]
            return holder.state, holder.windows
        try:
            return self.restore(run, start, found[start.copy.rank] if start.copy else None)
        except (NotFoundError, DamageError) as error:
            self.lost_base(start, error)
            raise NotFoundError(str(error)) from error

    def take_group_steps(
        self, attempt: Attempt, taker: int, members: list[Member], position: tuple[list[int], Any], saves: bool
    ) -> tuple[Snapshot | None, Ledger]:
        """Take STEPS steps, and return the snapshot to be committed after the last one."""
        state, windows = list(position[0]), position[1]
        ledger = Ledger(None, attempt.label, attempt.step, windows, on=True)
        snapshot = None
        for step in range(attempt.step + 1, attempt.step + 1 + STEPS):
            ledger.add_step(step, torch.tensor(rows_of(taker, step)))
            state.append(taker)
            content = json.dumps(state).encode().ljust(STATE_BYTES)
            name = checkpoint_name(step, attempt.number, attempt.nonce)
            epoch = (step - 1) // STEPS_PER_EPOCH + 1
            manifest = Checkpoint(name, step, epoch, STEPS_PER_EPOCH, 10**6, attempt.number, {"loss": 1 / step})
            windows = ledger.gather(step)
            for member in members:
                slot = member.memory.free_slot(STATE_BYTES, needed=True)
                slot.map[:STATE_BYTES] = content
                member.memory.complete(slot, manifest, Sidecar(None, {}, [], windows, []).to_bytes())
                member.state = list(state)
                member.live = LiveState(name, True)
                member.windows = windows
            if saves and step == attempt.step + STEPS:
                copied: Future[bool] = Future()
                copied.set_result(True)
                slot = SimpleNamespace(uses=set())
                snapshot = Snapshot(manifest, {}, {"model": content}, slot, copied, ChangeWatch(()), [])
        return snapshot, ledger

    def begin_commit(self, name: str, attempt: Attempt, snapshot: Snapshot, ledger: Ledger) -> Process:
        """Begin a commit in a thread of the process that is rank 0."""
        commit = CommitThread(attempt, snapshot.manifest.name)

        def body(process: Process) -> None:
            self.commits[process] = commit
            run = Run(process.storage, RUN)
            committer = CheckpointCommitter(run, attempt, SETTINGS, OneFile(run), CommitCoordinator(), None, ledger)
            try:
                committer._commit_with_retries(snapshot)
            except SupersededError:
                process.superseded = True
                self.refused(commit)

        return self.world.start(name, body)

    def change(self, change: str, process: Process, members: list[Member], frozen: list[Member]) -> None:
        """Change the group after its last step."""
        if change in ("lose first", "cut off first") and len(members) > 1:
            members.pop(0).memory._lock.close()
        elif change == "lose last" and len(members) > 1:
            members.pop().memory._lock.close()
        elif change == "join" and len(members) < 3:
            members.append(self.make_member(process, f"{process.name}/{len(self.world.trace)}", len(members)))
        elif change == "freeze" and len(members) > 1:
            frozen.append(members.pop())
        elif change == "thaw" and frozen:  # the frozen member returns alone, perhaps with an old state
            members[:] = [frozen.pop()]
        elif change == "forget":  # sharded states and broken steps go back to a copy
            for member in members:
                member.live = None
        elif change == "fall behind" and len(members) > 1:  # the first member has started changing parameters again
            members[0].live = None
            for member in members[1:]:
                assert member.live
                first, step, *rest = member.live.checkpoint.split("-")
                member.live = LiveState("-".join([first, f"{int(step) - 1:08d}", *rest]), True)
                member.state = member.state[:-1]

    # -------------------------------------------------------------------------------------------------- invariants

    def changed(self, process: Process, operation: Operation, late: bool) -> None:
        """Check that a commit thread only makes changes that are allowed by the attempts it has seen."""
        commit = self.commits.get(process)
        folder, _, file = operation.key.removeprefix(f"{RUN}/").rpartition("/")
        if commit and not late and file == MANIFEST and folder.startswith("checkpoints/"):
            since = [attempt for attempt in commit.seen if attempt.number > commit.attempt.number]
            others = [each for each in since if each.metadata.processes[:1] != commit.attempt.metadata.processes[:1]]
            own = folder.endswith(commit.name)
            if others and (operation.verb == "write" or not own):
                self.violations.append(f"{process.name}: {operation}, and attempt {others[0].number} is of another")
            if operation.verb == "write" and not leads_to_newest(commit.name, lineage(commit.seen)):
                self.violations.append(f"{process.name}: {operation}, which does not lead to the newest attempt")
            if operation.verb == "delete" and not own and since and not since[-1].chosen:
                self.violations.append(f"{process.name}: {operation}, while attempt {since[-1].number} chooses")
        super().changed(process, operation, late)

    def refused(self, commit: CommitThread) -> None:
        """Check that the rejected commit does not lead to the newest attempt, or that another process has been rank 0
        since.
        """
        attempts = read_attempts(self.run)
        since = [attempt for attempt in attempts if attempt.number > commit.attempt.number]
        same = all(each.metadata.processes[:1] == commit.attempt.metadata.processes[:1] for each in since)
        if same and leads_to_newest(commit.name, lineage(attempts)) and not deletion_begun(self.run):
            self.violations.append(f"{commit.name} was refused, and leads to attempt {attempts[-1].number}")


class Behind(Groups):
    """Groups in which only the first member has started changing parameters again."""

    changes: ClassVar[list[str]] = ["fall behind"]


class Forgetful(Groups):
    """Groups that go back to an in-memory copy each time."""

    changes: ClassVar[list[str]] = ["forget"]
    most_deletions = 0


@pytest.mark.timeout(1800)  # its thousand thorough examples take six minutes on a quiet machine
def test_no_interleaving_of_groups_breaks_the_protocol() -> None:
    explore(Groups, examples(6, 1000))


def test_valid_commits_would_be_rejected_if_only_the_newest_attempt_could_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sunspot.checkpoint.commit, "ensure_committer", by_attempt)
    expect_counterexample(Groups, "was refused, and leads to attempt")


def by_attempt(run: Run, attempt: Attempt, name: str) -> Attempt:
    """Let only the newest attempt commit."""
    ensure_owner(run, attempt)
    return attempt


def let_commit(monkeypatch: pytest.MonkeyPatch, rule: Callable[[str, Attempt, list[Attempt]], bool]) -> None:
    monkeypatch.setattr(sunspot.run.checkpoints, "may_commit", rule)


def test_the_protocol_breaks_if_a_former_rank_0_can_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    let_commit(monkeypatch, lambda name, attempt, attempts: leads_to_newest(name, lineage(attempts)))
    expect_counterexample(Groups, "is of another")


def test_the_protocol_breaks_if_a_group_can_commit_steps_beyond_the_start_of_the_next_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def same_process(name: str, attempt: Attempt, attempts: list[Attempt]) -> bool:
        return all(each.metadata.processes[:1] == attempt.metadata.processes[:1] for each in attempts[attempt.number :])

    let_commit(monkeypatch, same_process)
    expect_counterexample(Behind, "does not lead to the newest attempt")


def test_the_protocol_breaks_if_checkpoints_are_deleted_while_a_group_chooses_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ensure = sunspot.run.checkpoints.ensure_committer

    def as_chosen(run: Run, attempt: Attempt, name: str) -> Attempt:
        return replace(ensure(run, attempt, name), chosen=True)

    monkeypatch.setattr(sunspot.checkpoint.commit, "ensure_committer", as_chosen)
    expect_counterexample(Forgetful, "while attempt [0-9]+ chooses")
