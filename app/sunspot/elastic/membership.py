"""Decides which worker processes form the group: one decider, in the driver, whom all members ask.

A generation is one group: its members in the order of their ranks. The loss of a member closes it: every survivor
breaks its collectives and stands for the next one, which forms once all living members stand. Newcomers, and members
whose nodes are to go, change it too, but between two steps: the members are told, and stand when their step is done.

No two open generations exist, and only members of the newest one are told to form a group: whoever is cut off from the
decider is in none, and ends.

The newest state is never left behind. While only members on draining nodes have it, they stay in the group, hand the
state over, and leave at the next change.
"""

import math
from collections.abc import Collection, Set
from dataclasses import dataclass
from functools import cached_property

SETTLE_S = 0.05
"""Seconds for which the decider waits for more losses before a generation forms: nodes often go together."""

FIRST_WAIT_S, NEXT_WAIT_S = 60.0, 15.0
"""How long the first group waits for all processes that were started, and one that none of the last is left for: who
comes then may have the newer copy of the state, but nodes come when they come, and join."""

ONLY_COPIES, NO_STATE = -1, -2
"""Placeholders for the step of a process without a usable state: a member, whose node may have a copy in memory, and a
newcomer."""


@dataclass(frozen=True)
class Member:
    """A process that may be in a group."""

    uid: str
    node: str
    "Ray's id of its node."
    process: str = ""
    "Its name, which stays the same if it connects again; empty: it never does."
    host: str = ""
    "Host name of the worker's node, which in Kubernetes is its pod's name; empty if it is not known."

    @property
    def place(self) -> str:
        """Return the name of the worker's host, or of its node if no host name is known."""
        return self.host or f"node {self.node[:12]}"


@dataclass(frozen=True)
class Generation:
    """A group as the decider formed it."""

    number: int
    members: tuple[Member, ...]
    "By rank."

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each member, by uid."""
        return {member.uid: rank for rank, member in enumerate(self.members)}


@dataclass(frozen=True)
class Close:
    """Tells members that their generation has ended: a collective of it would wait for ever."""

    number: int


@dataclass(frozen=True)
class Change:
    """Tells members to stand for the next generation once their step is done."""

    number: int


Message = Generation | Close | Change | None
"""None tells who stands for the next generation that there is none."""


@dataclass(frozen=True)
class MembershipSnapshot:
    """State of a `Membership` at one moment."""

    size: int
    "Number of processes that were started."
    generation: Generation
    "The newest generation; its number is 0 until the first group has formed."
    trains: bool
    "True if a member of the newest generation is alive."
    ended: bool
    "True if the group has ended as a whole, so that no other group follows."
    has_no_members: bool
    "True if there was a group, but no process is left that is or could become a member."


class Membership:
    """The decider's state. Times are those of one monotonic clock, in seconds."""

    def __init__(self, size: int) -> None:
        """`size` processes were started."""
        self._size = size
        self._members: dict[str, Member] = {}
        "All that live, by uid, in the order in which they came."
        self._standing: dict[str, int | None] = {}
        "Step of the state of each process that asks to be in the next generation, by uid; None without a usable state."
        self._draining: frozenset[str] = frozenset()
        self.generation = Generation(0, ())
        "The newest one."
        self._open = False
        "Whether the newest generation trains, as far as is known."
        self._told: Message | None = None
        "What its members were told last."
        self._settled_at = 0.0
        self._first_stood = math.inf
        "When the first one stood of those who form a group without any member of the last one."
        self.ended = False
        "Whether a member has said that its group ends as a whole: no other follows, and members may go."

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
        """Note a new process; it is in no group yet."""
        self._members[member.uid] = member

    def request_to_join(self, uid: str, now: float, step: int | None = None) -> None:
        """Note that a process asks to be in the next generation. If it is a member, this closes the present one.

        `step` is the step of the process's state, or None if it has no usable state.
        """
        if uid not in self._members:
            return
        self._standing[uid] = step
        if self._first_stood == math.inf:
            self._first_stood = now
        if self._is_member(uid):
            self._close(now)

    def end(self, uid: str) -> None:
        """Note that the group ends as a whole: the training is done, or is to start again."""
        self.ended = self.ended or self._is_member(uid)

    def lose(self, uid: str, now: float) -> None:
        """Note that a process is gone; the loss of a member closes the generation."""
        self._members.pop(uid, None)
        self._standing.pop(uid, None)
        if self._is_member(uid) and not self.ended:
            self._close(now)
            if self._standing and not self._living():  # who was left out of that group stood before it formed
                self._first_stood = now

    def drain(self, nodes: Collection[str]) -> None:
        """Note which nodes will go away: generations leave them out once others have the state.

        None is ever to stay again: one that has just gone may not have closed its members' connections yet.
        """
        self._draining |= frozenset(nodes)

    def decide(self, now: float) -> list[tuple[str, Message]]:
        """Return what is to be told now, and to whom."""
        if self.ended:
            told, self._standing = self._standing, {}
            return [(uid, None) for uid in told]
        return self._ask_for_change() if self._open else [*self._tell(Close), *self._form(now)]

    @property
    def newcomers(self) -> int:
        """How many processes stand that are to join the newest generation."""
        return len(self._wanted() - self.generation.ranks.keys()) if self._open else 0

    @property
    def leavers(self) -> list[Member]:
        """The members that the next generation will leave out, because others have the state."""
        if not self._open:
            return []
        wanted = self._wanted()
        return [member for member in self.generation.members if member.uid not in wanted]

    @property
    def trains(self) -> bool:
        """Whether a member of the newest generation lives."""
        return bool(self._living())

    def _living(self) -> set[str]:
        return self.generation.ranks.keys() & self._members.keys()

    def _returned(self) -> set[str]:
        """Return the uids of processes of the newest generation that were taken for lost, and have connected again."""
        processes = {member.process for member in self.generation.members if member.process}
        return {uid for uid, member in self._members.items() if member.process in processes}

    def _is_member(self, uid: str) -> bool:
        return uid in self.generation.ranks

    def _close(self, now: float) -> None:
        self._open = False
        self._settled_at = now + SETTLE_S

    def _wanted(self) -> set[str]:
        """Return the uids of the next generation if it formed now and all members had equally new states."""
        return {member.uid for member in self._choose(self._standing.keys() | self.generation.ranks.keys())}

    def _ask_for_change(self) -> list[tuple[str, Message]]:
        return [] if self._wanted() == self.generation.ranks.keys() else self._tell(Change)

    def _tell(self, kind: type[Close] | type[Change]) -> list[tuple[str, Message]]:
        """Tell the members of the newest generation that live, once."""
        word = kind(self.generation.number)
        if self._told == word:
            return []
        self._told = word
        return [(uid, word) for uid in self._living()]

    def _form(self, now: float) -> list[tuple[str, Message]]:
        """Form the next generation, once all who live of the last one stand for it, also under another uid."""
        living = self._living()
        chosen = self._choose(self._standing.keys())
        if now < self._settled_at or (living | self._returned()) - self._standing.keys() or not chosen:
            return []
        wait_s = NEXT_WAIT_S if self.generation.members else FIRST_WAIT_S
        if not living and len(chosen) < self._size and now < self._first_stood + wait_s:
            return []
        self.generation = Generation(self.generation.number + 1, chosen)
        self._open, self._first_stood = True, math.inf
        for member in chosen:
            del self._standing[member.uid]
        return [(member.uid, self.generation) for member in chosen]

    def _choose(self, candidates: Set[str]) -> tuple[Member, ...]:
        """Choose the next members: those of the last generation keep their order, and newcomers follow.

        A candidate on a draining node is left out if a member on a staying node has a state at least as new. A newcomer
        without a state is left out there, too, if others stay. The state of a newcomer on a staying node does not
        count, because the members may have trained since it left.
        """
        order = {member.process or member.uid: place for place, member in enumerate(self.generation.members)}
        living = [member for uid, member in self._members.items() if uid in candidates]
        living.sort(key=lambda member: order.get(member.process or member.uid, len(order)))
        staying = [member for member in living if member.node not in self._draining]
        held = [self._step_of(member) if self._is_member(member.uid) else NO_STATE for member in staying]
        newest = max(held, default=-math.inf)
        return tuple(member for member in living if member.node not in self._draining or self._step_of(member) > newest)

    def _step_of(self, member: Member) -> float:
        """Return the step of a process's state; a member that trains has the newest state."""
        is_member = self._is_member(member.uid)
        if self._open and is_member:
            return math.inf
        step = self._standing.get(member.uid)
        if step is None:
            return ONLY_COPIES if is_member else NO_STATE
        return step
