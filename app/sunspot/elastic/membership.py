"""Decides which worker processes form the group. One membership server, in the driver, runs this code for all members.

A generation is one group with a fixed list of members, ordered by rank. The loss of a member closes the generation. All
survivors then abort their collectives and ask to join the next generation, which forms once all living members have
asked. New processes and preempted nodes also change the group, but only between two steps: the server announces the
change, and the members ask to join the next generation when their step is done.

At most one generation is open, and only members of the newest generation are told to form a group. A process that
cannot reach the server is therefore in no group, and exits.

The newest state is never left behind. If only members on draining nodes have it, they stay in the group, hand the state
over, and leave at the next change.

The size of the group can be limited. Members beyond the limit leave the group between two steps, but their processes
keep running, and are the first to join if the limit rises again.

Under PARALLEL=hsdp, a group consists of whole replicas (`replicas.arrange`). If one of a replica's workers is lost, the
replica's other processes keep running, and wait until a new process completes a replica.
"""

import math
import sys
from collections.abc import Collection, Set
from dataclasses import dataclass
from functools import cached_property

from sunspot.elastic.replicas import arrange, newest_whole

SETTLE_S = 0.05
"""Seconds that the server waits for more losses before a generation forms, because nodes are often lost together."""

FIRST_WAIT_S = 60.0
"""Seconds that the first group waits for all processes that were started."""

NEXT_WAIT_S = 15.0
"""Seconds that a later group without any previous member waits for missing processes, which may bring a newer copy of
the state. A process that comes later joins at the next change of the group."""

ONLY_COPIES = -1
"""Placeholder for the step of a member without a usable state. Its node can still have an in-memory copy."""

NO_STATE = -2
"""Placeholder for the step of a newcomer without a usable state."""


@dataclass(frozen=True)
class Member:
    """A process that can be a member of a group."""

    uid: str
    node: str
    "Ray's id of the process's node."
    process: str = ""
    "The process name, which stays the same after a reconnect, or an empty string if the process never reconnects."
    host: str = ""
    "The node's host name (on Kubernetes, the pod name), or an empty string if it is unknown."

    @property
    def lasting_name(self) -> str:
        """Name of the process, which stays the same if the process reconnects."""
        return self.process or self.uid

    @property
    def display_name(self) -> str:
        """Name of the process's host, or of its node if the host name is unknown."""
        return self.host or f"node {self.node[:12]}"


@dataclass(frozen=True)
class Generation:
    """A group that the membership server has formed."""

    number: int
    members: tuple[Member, ...]
    "Members by rank."

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Ranks of the members, keyed by uid."""
        return {member.uid: rank for rank, member in enumerate(self.members)}


@dataclass(frozen=True)
class Close:
    """Message that tells members that their generation has ended, so its collectives will never complete."""

    number: int


@dataclass(frozen=True)
class Change:
    """Message that tells members to request the next generation after their current step."""

    number: int


@dataclass(frozen=True)
class PassBarriers:
    """Message that tells members of a closed generation how many barriers they may pass (`StepBarrier`)."""

    number: int
    barriers: int


Message = Generation | Close | Change | PassBarriers | None
"""Message to a member. None means that no next generation will form."""


@dataclass(frozen=True)
class MembershipSnapshot:
    """The state of a `Membership` at a given time."""

    size: int
    "Number of processes that were started."
    generation: Generation
    "Newest generation. Its number is 0 until the first group has formed."
    trains: bool
    "True if a member of the newest generation is alive."
    ended: bool
    "True if the group has ended as a whole, so that no other group follows."
    has_no_members: bool
    "True if there was a group, but no process is left that is or could become a member."


class Membership:
    """State of the membership server. All times are in seconds, on one monotonic clock."""

    def __init__(self, size: int, degree: int = 1) -> None:
        """Create the state for a run that has started `size` processes, `degree` of them for each replica."""
        self._size = size
        self._degree = degree
        self._shards: dict[str, int] = {}
        "Shard that each process holds or prepares, by process name or uid."
        self._members: dict[str, Member] = {}
        "All live processes keyed by uid, in order of arrival."
        self._requests: dict[str, int | None] = {}
        """Step of each process that has requested the next generation, keyed by uid, or None if the process has no
        usable state."""
        self._draining: frozenset[str] = frozenset()
        self._most = sys.maxsize
        "Largest number of members that a group should have."
        self.generation = Generation(0, ())
        "Newest generation."
        self._open = False
        "True if the newest generation is believed to be training."
        self._announced: Message | None = None
        "Message last sent to the members of the newest generation."
        self._barriers: dict[str, int] = {}
        """Number of barriers that members of the closed generation have passed, keyed by uid. Empty after the answer
        (`_answer`)."""
        self._settled_at = 0.0
        self._first_request = math.inf
        "Time of the first request to join a group that has no previous member."
        self.ended = False
        "True once a member has reported that the whole group is ending. No other group follows, and members can leave."
        self._changed = True
        "True if anything has changed since `decide` was last called."

    def snapshot(self) -> MembershipSnapshot:
        """Return the current state, which later calls do not change."""
        return MembershipSnapshot(
            size=self._size,
            generation=self.generation,
            trains=self.trains,
            ended=self.ended,
            has_no_members=bool(self.generation.members) and not self._members,
        )

    def enter(self, member: Member) -> None:
        """Add a new process, which is in no group yet.

        Under hsdp, the process should prepare the shard `shard_of(member)`.
        """
        waiting = [self.shard_of(each) for uid, each in self._members.items() if not self._is_member(uid)]
        self._shards.setdefault(member.lasting_name, min(range(self._degree), key=waiting.count))
        self._members[member.uid] = member
        self._changed = True

    def shard_of(self, member: Member) -> int:
        """Return the shard that a process holds, or that a new process should prepare.

        A new process gets the shard that the fewest waiting processes have, so that they can form replicas together.
        """
        return self._shards[member.lasting_name]

    def request_to_join(self, uid: str, now: float, step: int | None = None) -> None:
        """Record a process's request to be in the next generation. A member's request closes the current generation.

        `step` is the step of the process's state, or None if it has no usable state.
        """
        if uid not in self._members:
            return
        self._requests[uid] = step
        self._changed = True
        if self._first_request == math.inf:
            self._first_request = now
        if self._is_member(uid):
            self._close(now)

    def report_barriers(self, uid: str, number: int, passed: int) -> None:
        """Record how many barriers a member has passed in the closed generation `number`."""
        if number == self.generation.number and self._is_member(uid):
            self._barriers[uid] = passed
            self._changed = True

    def end(self, uid: str) -> None:
        """Record that the whole group is ending, because training is done or restarts."""
        self.ended = self.ended or self._is_member(uid)
        self._changed = True

    def lose(self, uid: str, now: float) -> None:
        """Remove a process that is gone. The loss of a member closes the generation."""
        self._members.pop(uid, None)
        self._requests.pop(uid, None)
        self._changed = True
        if self._is_member(uid) and not self.ended:
            self._close(now)
            if self._requests and not self._living():  # processes left out of that group asked before it formed
                self._first_request = now

    def drain(self, nodes: Collection[str]) -> None:
        """Record that nodes are draining.

        Later generations exclude the members on these nodes once members on other nodes have the newest state. A node
        stays recorded after it is gone, because its connections may still be open for a moment.
        """
        self._changed = self._changed or not self._draining.issuperset(nodes)
        self._draining |= frozenset(nodes)

    def limit(self, most: int) -> None:
        """Limit the number of members. If the group has more, some of them leave between two steps."""
        most -= most % self._degree
        self._changed = self._changed or most != self._most
        self._most = most

    def size_without(self, node: str) -> int:
        """Return how many members the next generation would have without a node."""
        wanted = self._choose(self._requests.keys() | self.generation.ranks.keys())
        return len(self._arrange([member for member in wanted if member.node != node]))

    def decide(self, now: float) -> list[tuple[str, Message]]:
        """Return the messages to send now, each with its recipient's uid.

        While a group trains, the messages do not depend on `now`, so a call returns an empty list unless
        something has changed since the previous call.
        """
        if not self._changed and (self._open or self.ended):
            return []
        if self.ended:
            messages: list[tuple[str, Message]] = [*self._answer(), *((uid, None) for uid in self._requests)]
            self._requests = {}
        else:
            messages = (
                self._ask_for_change() if self._open else [*self._announce(Close), *self._answer(), *self._form(now)]
            )
        self._changed = bool(messages)  # a group that has just formed may have to change at once
        return messages

    @property
    def newcomers(self) -> int:
        """Number of processes that will join the group at its next change."""
        return len(self._wanted() - self.generation.ranks.keys()) if self._open else 0

    @property
    def leavers(self) -> list[Member]:
        """Members that will leave the group at its next change. The members that stay have the newest state."""
        if not self._open:
            return []
        wanted = self._wanted()
        return [member for member in self.generation.members if member.uid not in wanted]

    def drains(self, member: Member) -> bool:
        """Return True if a process's node is draining."""
        return member.node in self._draining

    @property
    def trains(self) -> bool:
        """True if a member of the newest generation is alive."""
        return any(uid in self._members for uid in self.generation.ranks)

    def _living(self) -> set[str]:
        return self.generation.ranks.keys() & self._members.keys()

    def _returned(self) -> set[str]:
        """Return the uids under which lost members of the newest generation have reconnected."""
        processes = {member.process for member in self.generation.members if member.process}
        return {uid for uid, member in self._members.items() if member.process in processes}

    def _is_member(self, uid: str) -> bool:
        return uid in self.generation.ranks

    def _close(self, now: float) -> None:
        self._open = False
        self._settled_at = now + SETTLE_S

    def _wanted(self) -> set[str]:
        """Return the uids of the members that the next generation would have if it formed now.

        This assumes that the states of all candidates are equally new.
        """
        return {member.uid for member in self._choose(self._requests.keys() | self.generation.ranks.keys())}

    def _ask_for_change(self) -> list[tuple[str, Message]]:
        return [] if self._wanted() == self.generation.ranks.keys() else self._announce(Change)

    def _announce(self, kind: type[Close] | type[Change]) -> list[tuple[str, Message]]:
        """Return a message to each live member of the newest generation, unless this message was already sent."""
        message = kind(self.generation.number)
        if self._announced == message:
            return []
        self._announced = message
        return [(uid, message) for uid in self._living()]

    def _answer(self) -> list[tuple[str, Message]]:
        """Return messages that tell the live members how many barriers they may pass.

        Returns no messages until all live members have reported.
        """
        living = self._living()
        if not self._barriers or living - self._barriers.keys():
            return []
        message = PassBarriers(self.generation.number, max(self._barriers.values()))
        self._barriers = {}
        return [(uid, message) for uid in living]

    def _form(self, now: float) -> list[tuple[str, Message]]:
        """Form the next generation once all live members of the previous generation have requested it.

        The live members include those that have reconnected under another uid.
        """
        living = self._living()
        chosen = self._choose(self._requests.keys())
        if now < self._settled_at or (living | self._returned()) - self._requests.keys() or not chosen:
            return []
        wait_s = NEXT_WAIT_S if self.generation.members else FIRST_WAIT_S
        whole = min(self._size, self._most)
        if not living and len(chosen) < whole - whole % self._degree and now < self._first_request + wait_s:
            return []
        before = self.generation
        self.generation = Generation(before.number + 1, chosen)
        self._open, self._first_request = True, math.inf
        self._barriers = {}
        for rank, member in enumerate(chosen):
            del self._requests[member.uid]
            self._shards[member.lasting_name] = rank % self._degree
        over = before.members if len(self._members) > self._most else ()
        left_out = [one for one in over if one.uid in self._requests and not self.drains(one)]
        return [(member.uid, self.generation) for member in (*chosen, *left_out)]

    def _choose(self, candidates: Set[str]) -> tuple[Member, ...]:
        """Choose the next members, in whole replicas. Members of the newest generation come first, in rank order.

        Candidates beyond the limit are excluded. A candidate on a draining node is excluded if members on nodes that
        are not draining hold all shards of a state that is at least as new. A newcomer without a state on a draining
        node is also excluded if the candidates on nodes that are not draining form a replica. States that newcomers on
        these nodes have from earlier groups are ignored, because the members may have trained since then.
        """
        order = {member.lasting_name: rank for rank, member in enumerate(self.generation.members)}
        living = [member for uid, member in self._members.items() if uid in candidates]
        living.sort(key=lambda member: order.get(member.lasting_name, len(order)))
        staying = [member for member in living if not self.drains(member)]
        surplus = self._over_limit(staying or living)
        newest = self._newest_held([member for member in staying if member not in surplus])
        chosen = [member for member in living if member not in surplus]
        kept = [member for member in chosen if not self.drains(member) or self._step_of(member) > newest]
        return tuple(self._arrange(kept))

    def _arrange(self, members: list[Member]) -> list[Member]:
        """Return members that form as many whole replicas as possible, in the order of their ranks."""
        shards = {member: self.shard_of(member) for member in members}
        last = {member.lasting_name for member in self.generation.members}
        bound = {member: self._step_of(member) for member in members if member.lasting_name in last}
        return arrange(members, shards, bound, self._degree)

    def _newest_held(self, members: list[Member]) -> float:
        """Return the newest step for which these members hold all shards, or -inf if they form no replica."""
        arranged = self._arrange(members)
        shards = {member: rank % self._degree for rank, member in enumerate(arranged)}
        held = {member: self._step_of(member) for member in arranged if self._is_member(member.uid)}
        return max(newest_whole(held, shards, self._degree), NO_STATE if arranged else -math.inf)

    def _over_limit(self, candidates: list[Member]) -> list[Member]:
        """Return the candidates beyond the limit.

        Newcomers are dropped first. Members of the newest generation are dropped only if they alone exceed the limit,
        and only from one node at a time. Otherwise, the node that holds a shard and the node that holds its copy could
        leave together. No member is dropped if another member of the newest generation was lost, or if the remaining
        members would lack the newest state.
        """
        members = [member for member in candidates if self._is_member(member.uid)]
        newcomers = [member for member in candidates if not self._is_member(member.uid)]
        excess = len(members) - self._most
        if excess <= 0:
            return newcomers[-excess:]
        leaving = [member for member in members if member.node == members[-1].node][-excess:]
        held = [self._step_of(member) for member in members if member not in leaving]
        after_loss = self.generation.ranks.keys() - self._members.keys()
        lacks_state = max(held, default=-math.inf) < max(map(self._step_of, leaving))
        return newcomers if after_loss or lacks_state else [*newcomers, *leaving]

    def _step_of(self, member: Member) -> float:
        """Return the step of a process's state, or a placeholder if the process has no usable state.

        For a member that is still training, returns infinity, because its state is at least as new as any other.
        """
        is_member = self._is_member(member.uid)
        if self._open and is_member:
            return math.inf
        step = self._requests.get(member.uid)
        if step is None:
            return ONLY_COPIES if is_member else NO_STATE
        return step
