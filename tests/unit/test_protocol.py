"""A model of processes that share a run. No order of operations, fault or death loses or mixes their results.

Up to three processes at a time run the real code for claims, commits, retention, copies in memory, restoring, deletion
and `checkpoints gc`, and take turns at every storage operation (tests/harness/interleaving.py). Hypothesis chooses the
order and the faults. A state lists which process took each of its steps, so that restored states and audits can be
checked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, seed, settings
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

import sunspot.background
import sunspot.checkpoint.commit
import sunspot.checkpoint.memory_files
import sunspot.elastic.claim
import sunspot.run
from sunspot.checkpoint.commit import CheckpointCommitter, CommitCoordinator
from sunspot.checkpoint.files import read_file, upload
from sunspot.checkpoint.ledger import Ledger
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.memory_files import LoadedSnapshot, Sidecar, find_snapshot
from sunspot.checkpoint.snapshot import ChangeWatch, Snapshot
from sunspot.elastic.claim import StartPoint, begin_attempt
from sunspot.elastic.copies import LiveState, NodeInventory
from sunspot.errors import ConflictError, DamageError, NotFoundError, StorageError, SupersededError
from sunspot.run import Claimant, Run
from sunspot.run.attempts import (
    Attempt,
    checkpoint_name,
    claim,
    label_of,
    lineage,
    read_attempts,
)
from sunspot.run.checkpoints import (
    MANIFEST,
    Checkpoint,
    classify,
    find_faults,
    list_directories,
    read_manifest,
)
from sunspot.run.identity import Rows, record_identity
from sunspot.run.owner import Owner
from sunspot.run.requests import DELETION, deletion_begun, refuse_if_deleted
from sunspot.settings import IDENTITY, Settings
from sunspot.storage.base import Storage
from sunspot.storage.limits import retry_storage
from sunspot.storage.local import LocalStorage
from sunspot.submitter.cluster.deletion import delete_run
from sunspot.submitter.garbage import find_removals
from sunspot.submitter.proof import Epoch, prove
from tests.harness.constants import SetConstants
from tests.harness.interleaving import (
    FAULTS,
    Answer,
    Effect,
    Fate,
    MemoryStorage,
    Operation,
    Process,
    World,
    run_inline,
)
from tests.harness.runs import BATCH, ROWS, STEPS_PER_EPOCH

SETTINGS = Settings(checkpoints_to_keep=1, audit=True, global_batch_size=BATCH, storage_timeout_s=3600)

IDENTITY_OF_ROWS = Rows("data", ROWS, STEPS_PER_EPOCH, "order", "NumPy")

NODES = 2

SAVE_EVERY = 2
"""Steps between checkpoints. Every step is copied to memory."""

GROUP_STEPS = 5
"""Steps after which a process continues in another group, with its current state."""

STATE_BYTES = 4096

LANDMARKS = [
    ("create", "attempts/"),
    ("create", "-start-"),
    ("write", "audit/"),
    ("upload", "model.pt"),
    ("complete", "model.pt"),
    ("open", "model.pt"),
    ("write", MANIFEST),
    ("delete", MANIFEST),
    ("delete", "model.pt"),
    ("delete", "delete.json"),
]
"""Operations around which the order of processes matters most: the verb, and a part of the key."""

FAR = 80
"""Number of operations after which a process has reached any landmark: more than between two checkpoints."""

TRUTH = ("attempts/", "checkpoints/", "audit/", "run.json")

RUN = "run"


def rows_of(taker: int, step: int) -> list[int]:
    """Return the rows that a step consumes.

    Each process has its own row order, which reveals mixed steps of two processes.
    """
    epoch, place = divmod(step - 1, STEPS_PER_EPOCH)
    order = random.Random(1000 * taker + epoch).sample(range(ROWS), ROWS)
    return order[place * BATCH : (place + 1) * BATCH]


def consumed(state: list[int]) -> list[Epoch]:
    """Return the epochs that an audit must report for a state."""
    epochs = []
    for first in range(0, len(state), STEPS_PER_EPOCH):
        taken = state[first : first + STEPS_PER_EPOCH]
        rows = Counter(row for n, taker in enumerate(taken) for row in rows_of(taker, first + n + 1))
        missing = ROWS - len(rows) if len(taken) == STEPS_PER_EPOCH else 0
        finished = len(taken) == STEPS_PER_EPOCH
        epochs.append(Epoch(first // STEPS_PER_EPOCH + 1, rows.total(), missing, rows.total() - len(rows), finished))
    return epochs


class Protocol(RuleBasedStateMachine):
    """Jobs that start, train and die on two nodes while their run is cleaned up, deleted and restarted."""

    schedules: ClassVar[int] = 0
    operations: ClassVar[int] = 0
    most_deletions: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        type(self).schedules += 1
        memory = sunspot.run.SHARED_MEMORY
        self.folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        for node in range(NODES):
            (self.folder / str(node)).mkdir()
        self.world = World(self.make_storage())
        self.world.changed = self.changed
        self.run = Run(self.world.storage, RUN)
        self.owners: list[str] = []
        self.deletions = 0
        self.begun = 0
        "Number of times that the run has been deleted, and so can begin again."
        self.marked = False
        "True while the run is being deleted."
        self.claims: dict[Process, int] = {}
        "Value of `begun` when each process claimed its attempt."
        self.takers: list[tuple[int, Attempt]] = []
        "Value of `begun` and the attempt of each start, by the start's number in states."
        self.committed: dict[str, list[int]] = {}
        "States of all checkpoints whose manifests were ever written, by name."
        self.claimed: list[tuple[int, str]] = []
        "Value of `begun` and the key of each claim."
        self.jobs: dict[str, str] = {}
        "Job whose process made each claim, by the claim's key."
        self.landed: set[str] = set()
        "Keys of claims that were carried out late, after their run was deleted. No process trains in them."
        self.retired: set[str] = set()
        "Keys of the manifests that retention or `gc` has deleted."
        self.violations: list[str] = []

    def make_storage(self) -> Storage:
        return MemoryStorage()

    def teardown(self) -> None:
        self.world.end()
        type(self).operations += len(self.world.trace)
        try:
            self.check_audit()
        finally:
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------------------------------------------- rules

    @initialize(operations=st.sampled_from([0, 60, 120]))
    def begin(self, operations: int) -> None:
        """Start the first job, which may commit."""
        self.start(node=0, operations=operations)

    @precondition(lambda self: len(self.world.living) < 3)
    @rule(node=st.integers(0, NODES - 1), operations=st.sampled_from([0, 20, 60]))
    def start(self, node: int, operations: int) -> None:
        """Let another job take over the run."""
        self.owners.append(f"job-{len(self.owners) + 1}")
        self.restart(-1, node, operations)

    @precondition(lambda self: len(self.world.living) < 3)
    @rule(owner=st.integers(0, 2), node=st.integers(0, NODES - 1), operations=st.sampled_from([0, 20, 60]))
    def restart(self, owner: int, node: int, operations: int) -> None:
        """Let a job start another worker group, even if its last one is alive."""
        name = self.owners[owner if owner < 0 else owner % len(self.owners)]
        self.world.start(f"{name}.{len(self.world.processes)}", lambda process: self.train(process, name, node))
        self.advance(-1, operations)

    @precondition(lambda self: self.world.living)
    @rule(process=st.integers(0, 2), operations=st.sampled_from([1, 2, 3, 5, 10, 20, 40]))
    def advance(self, process: int, operations: int) -> None:
        """Let a process perform some operations."""
        chosen = self.living(process)
        for _ in range(operations):
            if chosen.next:
                chosen.go()

    @precondition(lambda self: self.world.living)
    @rule(
        process=st.integers(0, 2),
        landmark=st.sampled_from(LANDMARKS),
        other=st.integers(0, 2),
        operations=st.sampled_from([0, 10, 40, 80]),
    )
    def pause(self, process: int, landmark: tuple[str, str], other: int, operations: int) -> None:
        """Let a process continue up to an operation of a kind, and let another one overtake it there."""
        self.go_to(self.living(process), landmark)
        if self.world.living:
            self.advance(other, operations)

    @precondition(lambda self: self.world.living)
    @rule(process=st.integers(0, 2), landmark=st.sampled_from([*LANDMARKS, ("", "")]), fate=st.sampled_from(FAULTS))
    def fail(self, process: int, landmark: tuple[str, str], fate: Fate) -> None:
        """Let an operation of a kind, or the next operation, fail."""
        chosen = self.living(process)
        self.go_to(chosen, landmark)
        if chosen.next:
            chosen.go(fate)

    @precondition(lambda self: self.world.late)
    @rule(number=st.integers(0, 3))
    def land(self, number: int) -> None:
        """Perform a delayed operation. Drop a write whose manifest was deleted since: no real write is that late."""
        self.world.land(number % len(self.world.late), but=self.retired)

    @precondition(lambda self: self.committed and self.deletions < self.most_deletions)
    @rule()
    def delete(self) -> None:
        self.deletions += 1
        self.world.start(f"delete.{len(self.world.processes)}", self.remove)

    @precondition(lambda self: self.committed)
    @rule()
    def tidy(self) -> None:
        self.world.start(f"gc.{len(self.world.processes)}", self.collect)

    @precondition(lambda self: self.committed)
    @rule()
    def audit(self) -> None:
        self.world.start(f"audit.{len(self.world.processes)}", self.prove)

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.violations:
            for line in self.world.trace:
                (note if currently_in_test_context() else print)(line)
            raise AssertionError("\n".join(self.violations))

    def living(self, number: int) -> Process:
        living = self.world.living
        return living[number % len(living)]

    def go_to(self, process: Process, landmark: tuple[str, str]) -> None:
        verb, part = landmark
        for _ in range(FAR):
            if process.next and not (process.next.verb.startswith(verb) and part in process.next.key):
                process.go()

    # --------------------------------------------------------------------------------------------------- processes

    def owner_of(self, job: str) -> str:
        """Return the owner as which a job's driver claims the run."""
        return job

    def train(self, process: Process, owner: str, node: int) -> None:
        """Run one start of a worker group with one worker, as train/joining.py and train/loop.py do."""
        run = Run(process.storage, RUN)
        sunspot.checkpoint.memory_files.SHARED_MEMORY = self.folder / str(node)
        memory = NodeMemory(run.location)
        process.at_end.append(memory._lock.close)
        found = find_snapshot(run.location)
        limit_s = SETTINGS.storage_timeout_s
        live: LiveState | None = None
        state: list[int] = []
        windows: Any = ()
        try:
            refuse_if_deleted(run)
            record_identity(run, SETTINGS.environment(), IDENTITY, IDENTITY_OF_ROWS)
        except (ConflictError, StorageError, NotFoundError):
            return
        while True:
            held = found and found.snapshot
            machines = [NodeInventory(f"host-{node}", f"node-{node}", held, [], live=live, process=process.name)]
            claimant = Claimant(run, self.owner_of(owner))
            try:
                start = retry_storage(limit_s, "beginning", begin_attempt, claimant, SETTINGS, machines)
            except (
                ConflictError,
                StorageError,
                NotFoundError,
            ):  # the run was taken over or deleted
                return
            if not start:
                return
            try:
                if not start.live:
                    state, windows = self.restore(run, start, found)
            except (NotFoundError, DamageError) as error:
                self.lost_base(start, error)
                return
            except StorageError:
                return
            self.restored(process, start, state)
            taker = len(self.takers)
            self.takers.append((self.claims[process], start.attempt))
            try:
                live, windows = self.take_steps(run, start.attempt, taker, state, memory, windows)
            except SupersededError:
                process.superseded = True
                return
            found = None  # a group with a live state looks for no copy

    def restore(self, run: Run, start: StartPoint, found: LoadedSnapshot | None) -> tuple[list[int], Any]:
        """Return the state to resume from, and its rows that are not in storage."""
        if start.copy:
            return json.loads(bytes(found.data.numpy())), found.sidecar.ledger
        if not start.checkpoint:
            return [], ()
        limit_s = SETTINGS.storage_timeout_s
        return json.loads(retry_storage(limit_s, "reading", read_file, run, start.checkpoint, "model.pt")), ()

    def take_steps(
        self, run: Run, attempt: Attempt, taker: int, state: list[int], memory: NodeMemory, windows: Any
    ) -> tuple[LiveState, Any]:
        """Train until the group loses another process, and return the state from which this one continues."""
        ledger = Ledger(None, attempt.label, attempt.step, windows, on=True)
        committer = CheckpointCommitter(run, attempt, SETTINGS, OneFile(run), CommitCoordinator(), {}, ledger)
        for step in range(attempt.step + 1, attempt.step + 1 + GROUP_STEPS):
            ledger.add_step(step, torch.tensor(rows_of(taker, step)))
            state.append(taker)
            content = json.dumps(state).encode().ljust(STATE_BYTES)
            manifest = Checkpoint(
                checkpoint_name(step, attempt.number, attempt.nonce),
                step,
                (step - 1) // STEPS_PER_EPOCH + 1,
                STEPS_PER_EPOCH,
                10**6,
                attempt.number,
                {"loss": 1 / step},
            )
            windows = ledger.gather(step)
            slot = memory.free_slot(STATE_BYTES, needed=True)
            slot.map[:STATE_BYTES] = content
            memory.complete(slot, manifest, Sidecar(None, {}, [], windows, []).to_bytes())
            if step % SAVE_EVERY == 0:
                copied: Future[bool] = Future()
                copied.set_result(True)
                committer._commit_with_retries(
                    Snapshot(manifest, {}, {"model": content}, slot, copied, ChangeWatch(()), [])
                )
        return LiveState(manifest.name, evaluated=True), windows

    def remove(self, process: Process) -> None:
        """Run `sunspot delete` until it succeeds or stops retrying."""
        run = Run(process.storage, RUN)
        for _ in range(3):
            try:
                return delete_run(run)
            except StorageError:
                continue
            except ConflictError:
                return None

    def collect(self, process: Process) -> None:
        """Run `sunspot checkpoints gc`."""
        with contextlib.suppress(ConflictError, StorageError, NotFoundError):
            for removal in list(find_removals(Run(process.storage, RUN), None, time.time())):
                removal.remove()

    def prove(self, process: Process) -> None:
        """Run `sunspot audit`, which can find faults in changing files but must not accept wrong rows."""
        try:
            proof = prove(Run(process.storage, RUN))
        except (StorageError, NotFoundError, DamageError):
            return
        clean = proof.epochs and not proof.wrong_rows and not any(e.missing or e.repeated for e in proof.epochs)
        if clean and not any(proof.epochs == consumed(state) for state in self.committed.values()):
            self.violations.append(f"{process.name} found the rows up to step {proof.step} clean, which no run took")

    # -------------------------------------------------------------------------------------------------- invariants

    def changed(self, process: Process, operation: Operation, late: bool) -> None:
        """Check the invariants after a change."""
        part = operation.key.removeprefix(f"{RUN}/")
        if process.superseded and not late and part.startswith(TRUTH):
            self.violations.append(f"{process.name} has noticed that it was superseded, and still: {operation}")
        claims = operation.verb == "create" and part.startswith("attempts/") and "-start-" not in part
        if claims and late:
            self.landed.add(operation.key)
        elif claims:
            self.claims[process] = self.begun
            self.claimed.append((self.begun, operation.key))
            self.jobs[operation.key] = process.name.rpartition(".")[0]
            self.landed.discard(operation.key)
            keys = [self.run.key("attempts", f"{attempt.number:04d}.json") for attempt in read_attempts(self.run)]
            jobs = [job for job, _ in itertools.groupby(self.jobs[key] for key in keys if key not in self.landed)]
            if len(jobs) > len(set(jobs)):
                self.violations.append(f"{process.name} claimed a run that its job had lost: {jobs}")
        if part == DELETION:
            self.begun += self.marked and operation.verb == "delete"
            self.marked = operation.verb == "write"
        if part.startswith("checkpoints/"):
            _, name, file = part.split("/")
            if file == MANIFEST and operation.verb == "delete" and not process.name.startswith("delete"):
                self.retired.add(operation.key)
            if file == MANIFEST and operation.verb == "write":
                with contextlib.suppress(NotFoundError):  # the commit came late
                    self.committed[name] = self.state_of(name)
        if not deletion_begun(self.run) and part.startswith(("checkpoints/", "attempts/")):
            self.check_claims_exist()
            self.check_commits_are_intact()
            self.check_base_exists()

    def state_of(self, name: str) -> list[int]:
        """Return the state in a checkpoint."""
        state: list[int] = json.loads(self.run.storage.read(self.run.key("checkpoints", name, "model.pt")))
        return state

    def check_claims_exist(self) -> None:
        """Check that no claim was deleted from a run that is not being deleted, because its steps would no longer
        count."""
        for begun, key in self.claimed:
            if begun == self.begun and not self.run.storage.exists(key):
                self.violations.append(f"{key} is gone of a run that is not being deleted")

    def check_commits_are_intact(self) -> None:
        """Check all checkpoints that count, except one whose manifest arrived after its files were removed."""
        counted = self.counted()
        for name in counted:
            checkpoint = read_manifest(self.run, name)
            if name != counted[-1] and list_directories(self.run)[name].keys() == {MANIFEST}:
                continue
            faults = find_faults(self.run, checkpoint) if checkpoint else []
            if faults:
                self.violations.append(f"{name} was committed and is damaged: {'; '.join(faults)}")

    def counted(self) -> list[str]:
        """Return the names of the checkpoints that count, by step."""
        counted, _, _ = classify(list_directories(self.run), lineage(read_attempts(self.run)))
        return counted

    def check_base_exists(self) -> None:
        """Check that the start of the newest attempt can be loaded until the attempt has committed."""
        newest = next((attempt for attempt in reversed(read_attempts(self.run)) if attempt.chosen), None)
        if not newest or newest.metadata.tier != "storage":
            return
        if any(label_of(name) == newest.label for name in self.committed):
            return
        base = read_manifest(self.run, newest.starts_from)
        if not base or find_faults(self.run, base):
            self.violations.append(f"attempt {newest.number} starts from {newest.starts_from}, which is gone")

    def lost_base(self, start: StartPoint, error: Exception) -> None:
        newest = read_attempts(self.run)[-1:]
        if newest == [start.attempt] and not deletion_begun(self.run):
            self.violations.append(f"attempt {start.attempt.number} lost its base: {error}")

    def restored(self, process: Process, start: StartPoint, state: list[int]) -> None:
        """Check that the restored state is the one from which the attempt claims to start, and that each step
        counts."""
        attempt = start.attempt
        if len(state) != attempt.step:
            self.violations.append(f"attempt {attempt.number} starts from step {attempt.step} with {len(state)} steps")
        spans = lineage([*start.before, attempt])
        for step, taker in enumerate(state, 1):
            begun, by = self.takers[taker]
            if begun != self.claims[process]:
                self.violations.append(f"attempt {attempt.number} restored step {step} of a run that was deleted")
            elif not any(span.nonce == by.nonce and span.holds(by.number, step) for span in spans):
                self.violations.append(
                    f"attempt {attempt.number} restored step {step} of attempt {by.number}, which does not count"
                )

    def check_audit(self) -> None:
        """Check that the newest checkpoint's audit reports the rows that its steps consumed."""
        self.nothing_is_wrong()
        if not read_attempts(self.run) or deletion_begun(self.run):
            return
        try:
            proof = prove(self.run)
        except (NotFoundError, DamageError):
            return
        files = list_directories(self.run)
        states = [self.state_of(name) for name in self.counted() if files[name].keys() != {MANIFEST}]
        state = states[-1]
        if any(other != state[: len(other)] for other in states):
            self.violations.append(f"two lineages: {states}")
        if proof.epochs != consumed(state) or proof.wrong_rows:
            self.violations.append(f"{proof.epochs} {proof.wrong_rows} instead of {consumed(state)}")
        self.nothing_is_wrong()


class NeverDeleted(Protocol):
    """The protocol without deletions of the run."""

    most_deletions = 0


class TwoClusters(NeverDeleted):
    """RayJobs with the same name in two clusters. The first two come from a repository, the others are submitted."""

    def owner_of(self, job: str) -> str:
        number = int(job.rpartition("-")[2])
        return str(Owner("job", str(number) if number > 2 else "", "sunspot", f"cluster-{number % 2}"))


class OverDirectory(Protocol):
    """The protocol with storage in a directory."""

    def make_storage(self) -> Storage:
        return LocalStorage(str(self.folder / "storage"))


class OverGrowingFiles(Protocol):
    """The protocol with uploads that write directly into the object's file."""

    def make_storage(self) -> Storage:
        return MemoryStorage(grows=True)


class OneFile:
    """Writes a state that is a single file."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def files(self, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
        name, content = snapshot.manifest.name, snapshot.state["model"]
        return {"model.pt": upload(self._run, name, "model.pt", lambda writer: writer.write(content))}


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> None:
    """Let nothing wait, and let nothing run in a thread that the model does not control."""
    set_constants(sunspot.storage.limits, BACKOFF_S=(0,))
    for module in (sunspot.background, sunspot.elastic.claim):
        monkeypatch.setattr(module, "start_thread", run_inline)
    monkeypatch.setattr(sunspot.storage.limits, "start_thread", run_inline)
    monkeypatch.setattr(CheckpointCommitter, "_commit_all", lambda self: None)
    # Each start changes this attribute, so restore it.
    set_constants(sunspot.checkpoint.memory_files, SHARED_MEMORY=sunspot.run.SHARED_MEMORY)


def explore(machine: type[Protocol], examples: int, **options: Any) -> None:
    """Run schedules of a machine until one breaks an invariant, and print their number."""
    machine.schedules = machine.operations = 0
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples, stateful_step_count=30, suppress_health_check=list(HealthCheck), **options
            ),
        )
    finally:
        print(f"{machine.__name__}: {machine.schedules} interleavings, {machine.operations} operations")


def examples(quick: int, thorough: int) -> int:
    """Return the number of examples for the profile of Hypothesis (tests/conftest.py)."""
    return thorough if settings().max_examples > 100 else quick


@pytest.mark.timeout(1800)  # thousands of examples take ten minutes or more on a busy machine
def test_no_interleaving_breaks_the_protocol() -> None:
    explore(Protocol, examples(80, 4000))


def test_no_interleaving_breaks_the_protocol_on_directory_storage() -> None:
    explore(OverDirectory, examples(15, 500))


def test_no_interleaving_of_two_clusters_breaks_the_protocol() -> None:
    explore(TwoClusters, examples(6, 500))


@contextlib.contextmanager
def replay() -> Iterator[Protocol]:
    """Return a model that the test controls, and check it for violations at the end."""
    protocol = Protocol()
    try:
        yield protocol
    finally:
        protocol.teardown()


def start_until_third_claim(protocol: Protocol) -> Process:
    """Return the first job right before its third claim, which continues with the state that it has."""
    protocol.begin(operations=0)
    job = protocol.living(0)
    for _ in range(4):
        protocol.go_to(job, ("create", "attempts/0003.json"))
    return job


def test_no_group_continues_in_a_run_whose_deletion_has_begun() -> None:
    """The record of the first attempt's start was gone, so its steps no longer counted (`make test-all`)."""
    with replay() as protocol:
        job = start_until_third_claim(protocol)
        protocol.delete()
        protocol.advance(1, 4)
        assert protocol.world.trace[-1].endswith("-start-" + protocol.takers[0][1].nonce + ".json")
        protocol.advance(0, 20)
        assert not job.next


def test_a_process_does_not_restart_a_run_that_was_deleted_during_training() -> None:
    """Its next group's claim got no response and was retried after everything was deleted."""
    with replay() as protocol:
        job = start_until_third_claim(protocol)
        job.go(Fate(Effect.NEVER, Answer.ERROR))
        protocol.delete()
        protocol.advance(1, 80)
        protocol.advance(0, 40)
        assert not job.next
        assert not read_attempts(protocol.run)


@pytest.mark.parametrize("starts", [1, 2, 3])
def test_a_delayed_delete_request_spares_the_restarted_run(starts: int) -> None:
    """The deletion reaches the claim of the newest attempt, of its base, or of the base's base (`make test-all`)."""
    with replay() as protocol:
        protocol.begin(operations=60)
        protocol.world.end()
        protocol.delete()
        protocol.fail(0, ("delete", "attempts/0001.json"), Fate(Effect.AGAIN, Answer.ERROR))
        protocol.advance(0, 40)
        for number in range(starts):
            if number == 2:
                protocol.land(0)
            protocol.start(node=0, operations=22)
        protocol.advance(-1, 40)
        if starts < 3:
            protocol.land(0)


def test_a_deletion_that_was_frozen_spares_the_restarted_run() -> None:
    """The deletion was frozen after it had listed the claim, while another process completed it."""
    with replay() as protocol:
        protocol.begin(operations=60)
        protocol.world.end()
        protocol.delete()
        protocol.go_to(protocol.living(0), ("delete", "attempts/"))
        protocol.delete()
        protocol.advance(1, 40)
        protocol.start(node=0, operations=20)
        protocol.advance(0, 40)


def test_a_group_keeps_all_its_steps_while_its_run_is_deleted() -> None:
    """The group might also not continue at all. The deletion had removed its first claim but not its last one."""
    with replay() as protocol:
        protocol.begin(operations=0)
        for number in range(1, 4):
            protocol.advance(0, 1)
            protocol.go_to(protocol.living(0), ("create", f"attempts/{number:04d}.json"))
        protocol.delete()
        protocol.go_to(protocol.living(1), ("delete", "attempts/0002"))
        protocol.advance(0, 40)


def test_no_two_groups_continue_from_the_same_state() -> None:
    """One group's claim succeeded but its response was lost. The other group deletes older checkpoints."""
    with replay() as protocol:
        protocol.begin(operations=120)
        protocol.fail(0, ("create", "attempts/0003"), Fate(Effect.NOW, Answer.ERROR))
        protocol.restart(owner=0, node=1, operations=60)
        protocol.fail(0, ("create", "-start-"), Fate(Effect.NOW, Answer.DEATH))
        protocol.world.end()
        protocol.restart(owner=0, node=1, operations=60)
        assert read_attempts(Run(protocol.world.storage, RUN))[-1].step == 12


def expect_counterexample(machine: type[Protocol], text: str, start: int = 0) -> None:
    """Expect a broken invariant without one of the protocol's measures. The seed `start` finds it quickly."""
    # Hypothesis would also draw constants from the source of all loaded modules, so that the schedules would depend on
    # which tests run.
    without_constants = patch.object(HypothesisProvider, "_maybe_draw_constant", return_value=None)
    with without_constants, pytest.raises((AssertionError, DamageError), match=text):
        explore(seed(start)(machine), 1000, phases=[Phase.generate], database=None, report_multiple_bugs=False)


def test_the_protocol_breaks_if_a_process_chooses_its_start_before_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim_with_start(run: Run, attempt: Attempt) -> None:
        if not claim(run, read_attempts(run), attempt):
            raise SupersededError("another process was faster")

    def make_next(run: Run, make: Callable[[list[Attempt]], Attempt | None]) -> list[Attempt]:
        before = read_attempts(run)
        attempt = make(before)
        return [*before, attempt] if attempt else []

    monkeypatch.setattr(sunspot.elastic.claim, "claim_next", make_next)
    monkeypatch.setattr(sunspot.elastic.claim, "ensure_owner", lambda *_: None)  # before the claim it is not the owner
    monkeypatch.setattr(sunspot.elastic.claim, "record_start", claim_with_start)
    expect_counterexample(
        NeverDeleted, "starts from .* which is gone|lost its base|no (whole|intact) checkpoint", start=15
    )


def test_owners_that_consist_only_of_a_job_name_break_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoClusters, "owner_of", lambda self, job: "job")
    expect_counterexample(TwoClusters, "claimed a run that its job had lost")


def test_claims_without_a_nonce_break_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are mixed in a copy in memory, a checkpoint's file, or the audit, whichever comes first."""
    monkeypatch.setattr(sunspot.elastic.claim, "new_nonce", str)
    expect_counterexample(Protocol, "restored step .* of a run that was deleted|is damaged|instead of", start=28)


def test_uploading_to_the_same_file_twice_breaks_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sunspot.checkpoint.commit, "read_manifest", lambda *_: None)
    expect_counterexample(OverGrowingFiles, "was committed and is damaged", start=1)
