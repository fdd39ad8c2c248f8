"""Who is in the group, whatever dies, comes, or is late: never two groups at once, and always another one."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sunspot.elastic.membership import SETTLE_S, Change, Close, Generation, Member, Membership

SIZE = 3


class Process:
    """A worker process as the decider meets it: it does what it is told, late or not at all."""

    def __init__(self, uid: str, node: str) -> None:
        self.member = Member(uid, node)
        self.inbox: list[Generation | Close | Change] = []
        self.trains_in = 0
        "The generation that it believes to be in; 0: none."
        self.stands = False


NODES = [f"node-{number}" for number in range(8)]


class Decisions(RuleBasedStateMachine):
    """Deaths, newcomers, notices and late words in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.membership = Membership(SIZE)
        self.processes: dict[str, Process] = {}
        self.started = 0
        self.draining: set[str] = set()
        self.committed: dict[int, frozenset[str]] = {}
        for _ in range(SIZE):
            self.come("node-0")

    @rule(node=st.sampled_from(NODES))
    def come(self, node: str) -> None:
        if len(self.processes) < 2 * SIZE:
            self.started += 1
            process = Process(f"process-{self.started}", node)
            self.processes[process.member.uid] = process
            self.membership.enter(process.member)
            self.stand(process)

    def stand(self, process: Process) -> None:
        process.trains_in, process.stands = 0, True
        self.membership.stand(process.member.uid, self.now)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.processes)))
        del self.processes[uid]
        self.membership.lose(uid, self.now)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A process reads its oldest word, and acts on it."""
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        if not process.inbox:
            return
        word = process.inbox.pop(0)
        if isinstance(word, Generation):
            process.trains_in, process.stands = word.number, False
        elif word.number == process.trains_in:  # at once when closed; between two steps when it changes
            self.stand(process)

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=1))
    def drain(self, nodes: set[str]) -> None:
        self.draining |= nodes
        self.membership.drain(nodes)

    @rule(seconds=st.sampled_from([0.0, SETTLE_S / 2, SETTLE_S]))
    def decide(self, seconds: float) -> None:
        self.now += seconds
        last = self.membership.generation
        before = last.number
        words = self.membership.decide(self.now)
        for uid, word in words:
            self.processes[uid].inbox.append(word)
        formed = self.membership.generation
        if formed.number > before:
            assert formed.number == before + 1
            members = {member.uid for member in formed.members}
            assert members <= set(self.processes)
            left_out = {member.uid for member in last.members} & set(self.processes) - members
            nodes = {self.processes[uid].member.node for uid in left_out}
            assert nodes <= self.draining, "a member that lives is waited for"
            homes = {member.node for member in formed.members}
            assert not homes & self.draining or homes <= self.draining, "a node that is to go stays that for good"
            assert all(self.processes[uid].stands for uid in members)
            self.committed[formed.number] = frozenset(members)

    @invariant()
    def one_group_trains(self) -> None:
        """Of two groups that could both end a step, one has lost a member: it never can."""
        whole = [
            number
            for number, members in self.committed.items()
            if members <= set(self.processes) and all(self.processes[uid].trains_in == number for uid in members)
        ]
        assert len(whole) <= 1

    def teardown(self) -> None:
        """Once nothing happens any more, all who live and may be in a group are in the same."""
        self.membership.drain(())  # as when the nodes that were to go are gone
        for _ in range(20 * (len(self.processes) + 1)):
            self.decide(61.0)
            for process in list(self.processes.values()):
                while process.inbox:
                    word = process.inbox.pop(0)
                    if isinstance(word, Generation):
                        process.trains_in, process.stands = word.number, False
                    elif word.number == process.trains_in:
                        self.stand(process)
        newest = self.membership.generation
        staying = {uid for uid, process in self.processes.items() if process.member.node not in self.draining}
        may = staying or set(self.processes)
        assert {member.uid for member in newest.members} >= may or not may
        assert all(self.processes[uid].trains_in == newest.number for uid in may)


TestDecisions = Decisions.TestCase
TestDecisions.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
