"""A model of a group's members and its starting state while processes die, join, freeze or are late.

Hypothesis drives the real `Membership` and the real choice of a start with processes that have states. A group is
always followed by another, two groups never train at the same time, and the newest live state is never left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sunspot.checkpoint.memory_files import MemorySnapshot
from sunspot.elastic import claim
from sunspot.elastic.claim import CheckpointLoaders, begin_attempt
from sunspot.elastic.copies import LiveState, NodeInventory
from sunspot.elastic.membership import NEXT_WAIT_S, SETTLE_S, Change, Generation, Member, Membership
from sunspot.run import Claimant, Run
from sunspot.run.attempts import IN_PLACE, Attempt, checkpoint_name
from sunspot.run.identity import Rows, record_identity
from sunspot.settings import IDENTITY, Settings
from tests.harness.interleaving import MemoryStorage

SIZE = 3

NODES = [f"node-{number}" for number in range(4)]

SETTINGS = Settings()

IDENTITY_OF_ROWS = Rows("data", 100, 10, "order", "NumPy")


@dataclass(eq=False)
class Process:
    """A worker process as the membership server sees it. It follows requests, possibly late or never."""

    name: str
    node: str
    connected: int = 0
    "Number of its connections so far, each with another uid."
    inbox: list[Any] = field(default_factory=list)
    trains_in: int = 0
    "Number of the generation to which the process believes it belongs, or 0."
    waits_to_join: bool = False
    changes: bool = False
    "True once it was asked to change its generation after a step."
    steps: tuple[int, ...] | None = None
    "Numbers of the steps in its state; None if it has no usable state."
    attempt: Attempt | None = None
    "Attempt in which the process trained last."
    frozen: bool = False
    cut: bool = False
    "True if the server presumes that the process is lost, but the process has not noticed this."
    breaks_off: bool = False
    "True if the process has reconnected, and has not yet left its step in the previous group."

    @property
    def uid(self) -> str:
        return f"{self.name}-{self.connected}"

    @property
    def live(self) -> LiveState | None:
        if self.steps is None or self.attempt is None:
            return None
        return LiveState(checkpoint_name(len(self.steps), self.attempt.number, self.attempt.nonce), True)


class Decisions(RuleBasedStateMachine):
    """Makes deaths, new processes, notices, freezes and late messages happen in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.membership = Membership(SIZE)
        self.processes: dict[str, Process] = {}
        "Living processes by name."
        self.started = 0
        self.draining: set[str] = set()
        self.most = 2 * SIZE
        "Largest number of members that a group should have."
        self.stopped = False
        "True while the driver is stopped."
        self.unheard: list[Callable[[], None]] = []
        "Messages that the server receives once the driver continues."
        self.groups: dict[int, list[Process]] = {}
        "Members of each generation, by rank."
        self.waiting_then: list[Process] = []
        "Processes that waited to join when the newest generation formed."
        self.claimed = 0
        "Generation that has claimed the newest attempt."
        self.attempt: Attempt | None = None
        "Newest attempt."
        self.steps: tuple[int, ...] = ()
        "Newest state. Each step has its own number, even if another step later replaces it."
        self.taken = 0
        self.copies: dict[str, tuple[MemorySnapshot, tuple[int, ...]]] = {}
        "Copy in each node's memory, with its state."
        self.run = Run(MemoryStorage(), "run")
        record_identity(self.run, SETTINGS.environment(), IDENTITY, IDENTITY_OF_ROWS)

    # ------------------------------------------------------------------------------------------------------- rules

    @initialize()
    def begin(self) -> None:
        """Let the first group start training."""
        for node in NODES[:SIZE]:
            self.come(node)
        self.settle(1, SETTLE_S)

    @rule(node=st.sampled_from(NODES))
    def come(self, node: str) -> None:
        if len(self.processes) < 2 * SIZE:
            self.started += 1
            process = Process(f"process-{self.started}", node)
            self.processes[process.name] = process
            self.connect(process)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.end(self.draw(data))

    @precondition(lambda self: self.can_step())
    @rule(data=st.data())
    def die_in_step(self, data: st.DataObject) -> None:
        """Let a member die during a step that the others have completed, partly completed, or not begun."""
        group = self.can_step()
        died = data.draw(st.sampled_from(range(len(group))))
        others = [process for rank, process in enumerate(group) if rank != died]
        self.take_step([(process, data.draw(st.sampled_from(["before", "after", "half"]))) for process in others])
        self.end(group[died])

    @rule(node=st.sampled_from(NODES))
    def lose_node(self, node: str) -> None:
        self.copies.pop(node, None)
        for process in [each for each in self.processes.values() if each.node == node]:
            self.end(process)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.draw(data).frozen = True

    @precondition(lambda self: self.processes and not self.stopped)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """Let the server presume that a process is lost, although it might be alive."""
        process = self.draw(data)
        if not process.cut:
            process.cut = True
            self.membership.lose(process.uid, self.now)

    @precondition(lambda self: any(process.cut and not process.frozen for process in self.processes.values()))
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """Let a process that was presumed lost reconnect in the middle of its step."""
        cut = [name for name, process in self.processes.items() if process.cut and not process.frozen]
        process = self.processes[data.draw(st.sampled_from(sorted(cut)))]
        self.connect(process, waits_to_join=False)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        process = self.draw(data)
        process.frozen = False
        self.read_all(process)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.read_message(self.draw(data))

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=1))
    def drain(self, nodes: set[str]) -> None:
        self.draining |= nodes
        self.membership.drain(nodes)

    @rule()
    def claim(self) -> None:
        """Let the newest group claim the next attempt once all of its members have formed it."""
        number = self.membership.generation.number
        group = self.groups.get(number, [])
        if number > self.claimed and group and all(self.forms(process, number) for process in group):
            self.claim_next(number, group)

    @precondition(lambda self: self.can_step())
    @rule(late=st.booleans(), copied=st.booleans())
    def step(self, late: bool, copied: bool) -> None:
        """Let the group take a step. With `late`, rank 0 completes the step and leaves before the others do."""
        group = self.can_step()
        leaves = group[0].changes
        first = group[:1] if late and leaves else group
        self.take_step([(process, "after" if process in first else "before") for process in group])
        if copied:
            self.copy(first)
        for process in first:
            if leaves:
                self.ask_to_join(process)

    @precondition(lambda self: self.can_step())
    @rule(spared=st.booleans())
    def lose_group(self, spared: bool) -> None:
        """Kill all processes that train, or all except rank 0. Their nodes stay."""
        first, *others = self.can_step()
        for process in others if spared else [first, *others]:
            self.end(process)

    @rule()
    def stop_driver(self) -> None:
        self.stopped = True

    @rule(seconds=st.sampled_from([0.0, SETTLE_S / 2, SETTLE_S, NEXT_WAIT_S]))
    def decide(self, seconds: float) -> None:
        """Let time pass, and let the driver continue."""
        self.now += seconds
        self.stopped = False
        while self.unheard:
            self.unheard.pop(0)()
        last = self.membership.generation
        waiting_now = [process for process in self.processes.values() if process.waits_to_join and not process.cut]
        for uid, message in self.membership.decide(self.now):
            for process in self.processes.values():
                if process.uid == uid and not process.cut:
                    process.inbox.append(message)
        formed = self.membership.generation
        if formed is not last:
            self.waiting_then = waiting_now
            self.formed(last, formed)

    @rule(rounds=st.integers(1, 4), seconds=st.sampled_from([SETTLE_S, NEXT_WAIT_S]))
    def settle(self, rounds: int, seconds: float) -> None:
        """Let time pass without any other event."""
        for _ in range(rounds):
            self.decide(seconds)
            for process in list(self.processes.values()):
                self.read_all(process)
            self.claim()
            group = self.can_step()
            if group and group[0].changes:
                self.step(False, False)

    # --------------------------------------------------------------------------------------------------- processes

    def draw(self, data: st.DataObject) -> Process:
        return self.processes[data.draw(st.sampled_from(sorted(self.processes)))]

    def send(self, act: Callable[[], None]) -> None:
        """Send the server a message, which it receives once the driver is not stopped."""
        self.unheard.append(act)
        while self.unheard and not self.stopped:
            self.unheard.pop(0)()

    def connect(self, process: Process, waits_to_join: bool = True) -> None:
        process.connected += 1
        process.cut, process.inbox = False, []
        member = Member(process.uid, process.node, process.name)
        self.send(lambda: self.membership.enter(member))
        if waits_to_join:
            self.ask_to_join(process)
        else:
            process.trains_in = 0
            process.waits_to_join = False
            process.breaks_off = True

    def ask_to_join(self, process: Process) -> None:
        process.trains_in = 0
        process.waits_to_join = True
        process.changes = False
        process.breaks_off = False
        uid, step = process.uid, None if process.steps is None or not process.attempt else len(process.steps)
        self.send(lambda: self.membership.request_to_join(uid, self.now, step))

    def end(self, process: Process) -> None:
        del self.processes[process.name]
        uid = process.uid
        if not process.cut:
            self.send(lambda: self.membership.lose(uid, self.now))

    def read_all(self, process: Process) -> None:
        while not process.frozen and (process.inbox or process.cut or process.breaks_off):
            self.read_message(process)

    def read_message(self, process: Process) -> None:
        """Let a process read its oldest message, and act on it."""
        if process.frozen:
            return
        if process.cut:
            self.connect(process)
            return
        if process.breaks_off:
            self.ask_to_join(process)
            return
        if not process.inbox:
            return
        message = process.inbox.pop(0)
        if isinstance(message, Generation) and process.uid not in message.ranks:
            process.steps = process.attempt = None
        elif isinstance(message, Generation):
            process.trains_in, process.waits_to_join = message.number, False
        elif message.number == process.trains_in:
            if isinstance(message, Change):
                process.changes = True
            else:
                self.ask_to_join(process)

    def forms(self, process: Process, number: int) -> bool:
        """Return True if a process takes part in a generation's collectives."""
        return process.name in self.processes and process.trains_in == number and not process.frozen

    def can_step(self) -> list[Process]:
        """Return the members of the newest group with a claim, by rank, or nothing if the group cannot take a step."""
        group = self.groups.get(self.claimed, [])
        return group if all(self.forms(process, self.claimed) for process in group) else []

    def take_step(self, ends: list[tuple[Process, str]]) -> None:
        """Let each process take the group's next step completely, partly, or not at all."""
        self.taken += 1
        after = (*self.steps, self.taken)
        for process, end in ends:
            if end != "before":
                process.steps = after if end == "after" else None
        if any(end == "after" for _, end in ends):
            self.steps = after

    def copy(self, group: list[Process]) -> None:
        """Copy the state to the memory of each node."""
        for process in group:
            if process.attempt and process.steps:
                number, nonce = process.attempt.number, process.attempt.nonce
                held = MemorySnapshot(number, len(process.steps), True, 0.0, 100, 1, "file", nonce)
                self.copies[process.node] = held, process.steps

    def has_newest(self, process: Process) -> bool:
        """Return True if a process has the newest state, and no group has since claimed an attempt without it."""
        return process.attempt == self.attempt and process.steps == self.steps

    # -------------------------------------------------------------------------------------------------- invariants

    def formed(self, last: Generation, formed: Generation) -> None:
        assert formed.number == last.number + 1
        members = [member.uid for member in formed.members]
        by_uid = {process.uid: process for process in self.processes.values()}
        group = self.groups[formed.number] = [by_uid[uid] for uid in members]
        assert all(process.waits_to_join for process in group)
        left_out = {member.uid for member in last.members} & {p.uid for p in by_uid.values() if not p.cut} - set(
            members
        )
        given_back = {by_uid[uid].node for uid in left_out} - self.draining
        assert not given_back or len(last.members) > self.most, "the group waits for a living member"
        assert len(given_back) <= 1, "only one node is given back at a time"
        assert not given_back or len(group) >= self.most, "no more members leave than asked"
        back = [process for process in self.processes.values() if process.breaks_off and not process.cut]
        known = {name for name in (process.name for process in back) if any(m.process == name for m in last.members)}
        assert self.unheard or not known, "the group waits for a reconnected member"
        stay_in = [process for process in group if process.uid in last.ranks]
        leaving = [process for process in stay_in if process.node in self.draining]
        if any(self.has_newest(process) for process in stay_in if process not in leaving):
            assert not leaving, "a member leaves once others have the state"

    def claim_next(self, number: int, group: list[Process]) -> None:
        """Claim an attempt for a group, and check its start."""
        inventories = [
            NodeInventory(process.node, process.node, None, [], live=process.live, process=process.name)
            for process in group
        ]
        start = begin_attempt(
            Claimant(self.run, "job"), SETTINGS, inventories, CheckpointLoaders(add_copies=self.find_copies)
        )
        assert start
        attempt = start.attempt
        holders = [
            process for process in self.waiting_then if process.name in self.processes and self.has_newest(process)
        ]
        if holders:
            lost = f"{holders[0].name} has step {len(self.steps)}, and the next group starts from {attempt.step}"
            assert (attempt.step, attempt.metadata.tier) == (len(self.steps), IN_PLACE), lost
        held = [self.copies[process.node][1] for process in group if process.node in self.copies]
        counted = [len(steps) for steps in held if steps == self.steps[: len(steps)]]
        assert attempt.skipped or attempt.step >= max(counted, default=0), "a newer in-memory copy is skipped"
        source = (
            [group[start.live.ranks[0]].steps] if start.live else [each for each in held if len(each) == attempt.step]
        )
        assert not attempt.step or self.steps[: attempt.step] in source, "the start is not in the lineage"
        self.attempt = attempt
        self.claimed, self.steps = number, self.steps[: attempt.step]
        for process in group:
            process.steps, process.attempt = self.steps, attempt

    def find_copies(self, inventories: list[NodeInventory]) -> list[NodeInventory]:
        held = {node: snapshot for node, (snapshot, _) in self.copies.items()}
        return [inventory._replace(snapshot=held.get(inventory.node)) for inventory in inventories]

    @invariant()
    def one_group_trains(self) -> None:
        """Check that at most one group still has all of its members, because only such a group can complete a step."""
        can_step = [
            number
            for number, group in self.groups.items()
            if all(
                process.name in self.processes and process.trains_in == number and not process.cut for process in group
            )
        ]
        assert len(can_step) <= 1

    def teardown(self) -> None:
        """Check that all live processes that can be in a group end up in the same group."""
        for process in self.processes.values():
            process.frozen = False
        for _ in range(20):
            self.now += 61.0
            self.settle(1, SETTLE_S)
        staying = [process for process in self.processes.values() if process.node not in self.draining]
        may = staying or list(self.processes.values())
        newest = self.membership.generation.number
        size = min(len(may), self.most)
        assert sum(process.trains_in == newest for process in may) == size
        assert not staying or set(self.groups[newest]) <= set(staying), "members on draining nodes have left"
        assert not may or len(self.groups[newest]) == size


class Limited(Decisions):
    """A model in which the number of members is limited, and the limit changes."""

    @rule(most=st.integers(1, 2 * SIZE))
    def limit(self, most: int) -> None:
        self.most = most
        self.membership.limit(most)


class CopiesHidden(Decisions):
    """A model in which a live state hides the in-memory copies, even if that state cannot be used."""

    def find_copies(self, inventories: list[NodeInventory]) -> list[NodeInventory]:
        return inventories if any(inventory.live for inventory in inventories) else super().find_copies(inventories)


def choose_staying_members(self: Membership, candidates: Collection[str]) -> tuple[Member, ...]:
    """Leave out all draining nodes if there are others. The server must not do this."""
    living = [member for uid, member in self._members.items() if uid in set(candidates)]
    return tuple([member for member in living if member.node not in self._draining] or living)


TestDecisions = Decisions.TestCase
TestDecisions.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

TestLimited = Limited.TestCase
TestLimited.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def expect_counterexample(machine: type[Decisions], text: str) -> None:
    """Expect that some order of events breaks a faulty model. This seed finds it quickly."""
    chosen = settings(
        max_examples=1000,
        stateful_step_count=40,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    # Hypothesis would also draw numbers from the source of whatever modules are loaded.
    without_constants = patch.object(HypothesisProvider, "_maybe_draw_constant", return_value=None)
    with without_constants, pytest.raises(AssertionError, match=text):
        run_state_machine_as_test(seed(0)(machine), settings=chosen)


def test_the_model_checker_detects_a_group_that_loses_the_newest_state_by_preferring_stable_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "_choose", choose_staying_members)
    expect_counterexample(Decisions, "has step .*, and the next group starts from")


def bring_back_a_stale_process(machine: Decisions) -> None:
    """Let a process freeze while the others take a step and copy it to memory, and return once they are gone."""
    machine.begin()
    machine.step(late=False, copied=False)
    stale = machine.processes["process-1"]
    stale.frozen = stale.cut = True
    machine.membership.lose(stale.uid, machine.now)
    machine.settle(2, SETTLE_S)
    machine.step(late=False, copied=True)
    machine.lose_group(spared=False)
    stale.frozen = False
    machine.read_all(stale)
    machine.come(NODES[1])
    machine.settle(3, NEXT_WAIT_S)
    assert len(machine.steps) >= 2
    machine.teardown()


def test_a_group_finds_the_copies_in_memory_even_if_a_member_has_an_older_state() -> None:
    bring_back_a_stale_process(Decisions())


def test_the_model_checker_detects_an_older_state_that_hides_newer_copies_in_memory() -> None:
    with pytest.raises(AssertionError, match="a newer in-memory copy is skipped"):
        bring_back_a_stale_process(CopiesHidden())


def test_the_model_checker_detects_a_stale_state_that_is_treated_as_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claim, "was_in_every_group", lambda *_: True)
    with pytest.raises(AssertionError, match="a newer in-memory copy is skipped"):
        bring_back_a_stale_process(Decisions())


def test_a_new_group_is_asked_to_change_again_if_it_contains_a_member_on_a_draining_node() -> None:
    """The request follows from how the group was formed, and not from a later event."""
    membership = Membership(1)
    membership.enter(Member("first-1", "old", "first"))
    membership.request_to_join("first-1", 0.0)
    membership.decide(1.0)
    membership.enter(Member("second-1", "new", "second"))
    membership.request_to_join("second-1", 2.0)
    membership.drain(["old"])
    assert membership.decide(2.0) == [("first-1", Change(1))]
    membership.request_to_join("first-1", 3.0, 5)
    assert dict(membership.decide(4.0)).keys() == {"first-1", "second-1"}
    assert dict(membership.decide(5.0)) == {"first-1": Change(2), "second-1": Change(2)}


def test_the_group_waits_for_a_member_that_reconnects_during_a_step() -> None:
    """The member has the newest state, and a group of the two newcomers would go back to a copy."""
    membership = Membership(2)
    for name in ("first", "second"):
        membership.enter(Member(f"{name}-1", "node", name))
        membership.request_to_join(f"{name}-1", 0.0)
    assert membership.decide(1.0)
    membership.lose("second-1", 2.0)
    membership.request_to_join("first-1", 2.0, 5)
    assert membership.decide(3.0)
    for name in ("third", "fourth"):
        membership.enter(Member(f"{name}-1", "another node", name))
        membership.request_to_join(f"{name}-1", 4.0)
    membership.lose("first-1", 5.0)
    membership.enter(Member("first-2", "node", "first"))
    membership.decide(5.0 + NEXT_WAIT_S)
    assert membership.generation.number == 2
    membership.request_to_join("first-2", 30.0, 6)
    membership.decide(31.0)
    processes = [member.process for member in membership.generation.members]
    assert processes == ["first", "third", "fourth"], "the member stays rank 0, and completes its commits"


def test_the_model_checker_detects_a_group_that_ignores_a_reconnected_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "_returned", lambda self: set())
    expect_counterexample(Decisions, "the group waits for a reconnected member")


def test_a_member_with_the_newest_state_leaves_only_after_the_other_members_have_received_the_state() -> None:
    """Rank 0 has completed its step, and shares its node with the last rank, which is to leave."""
    membership = Membership(3)
    for name, node in (("first", "a"), ("second", "b"), ("third", "a")):
        membership.enter(Member(name, node, name))
        membership.request_to_join(name, 0.0)
    assert membership.decide(1.0)
    membership.limit(1)
    assert dict(membership.decide(2.0)) == dict.fromkeys(["first", "second", "third"], Change(1))
    for name, step in (("first", 6), ("second", 5), ("third", 5)):
        membership.request_to_join(name, 3.0, step)
    membership.decide(4.0)
    assert list(membership.generation.ranks) == ["first", "second", "third"], "rank 0 hands its state over first"
    assert dict(membership.decide(5.0)) == dict.fromkeys(["first", "second", "third"], Change(2))
    for name in ("first", "second", "third"):
        membership.request_to_join(name, 6.0, 6)
    formed = dict(membership.decide(7.0))
    assert list(membership.generation.ranks) == ["second"]
    assert formed == dict.fromkeys(["first", "second", "third"], membership.generation), "those outside are told, too"
    membership.limit(2)
    assert dict(membership.decide(8.0)) == {"second": Change(3)}
    assert [member.uid for member in membership.leavers] == []
    assert membership.newcomers == 1
