"""A model of a run that moves between two clusters, which fail and recover in any order. It never has two owners.

Hypothesis chooses when pods start, drivers act and die, clusters and the bucket stop answering, and the mover acts. The
drivers and the mover use the real code for handovers, claims, records of submissions, sightings and the choice of a
place. A state lists the steps that led to it, so that lost and repeated steps can be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sunspot.errors import SupersededError
from sunspot.places.choice import Offer, Situation, choose_place
from sunspot.places.experience import learn
from sunspot.run import Run
from sunspot.run import attempts as attempts_module
from sunspot.run.attempts import Attempt, ensure_owner, read_attempts, refuse_if_left, refuse_if_superseded
from sunspot.run.checkpoints import find_newest_good
from sunspot.run.handover import clear_handover, has_handed_over, is_moving, left_for_move, read_handover
from sunspot.run.owner import Owner
from sunspot.run.requests import SubmissionRecord, read_submissions, record_submission, withdraw_submission
from sunspot.run.sightings import find_sightings
from sunspot.run.status import RunState, Status, StatusKind, is_alive, read_status, write_status_as_is
from sunspot.storage.base import Entry
from tests.harness.interleaving import MemoryStorage
from tests.harness.runs import commit, start

PLACES = ("east", "west")

OFFERS = [Offer("east", 4.0), Offer("west", 6.0)]

LAST_STEP = 1000


class ClockedStorage(MemoryStorage):
    """A storage that records when each object was written, on a clock that the test controls."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self._written: dict[str, float] = {}

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._written[key] = self.now

    def list(self, prefix: str) -> list[Entry]:
        return [entry._replace(modified=self._written[entry.key]) for entry in super().list(prefix)]


@dataclass
class Job:
    """A RayJob with its driver and workers."""

    owner: Owner
    moves_from: str
    number: int
    "The number of the submission, counted from 1."
    phase: str = "pending"
    """One of pending, waiting (its workers are ready, but have not claimed the run), training, saving (for a move) and
    ended."""
    attempt: Attempt | None = None
    state: list[int] = field(default_factory=list)
    "The steps that led to its workers' state."
    driver: str = ""

    @property
    def place(self) -> str:
        return self.owner.place


class Moves(RuleBasedStateMachine):
    """A run, its RayJobs in two clusters, and a mover."""

    histories: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).histories += 1
        attempts_module._read_version.cache_clear()  # all models have the same run location
        self.storage = ClockedStorage()
        self.clock = patch("time.time", lambda: self.storage.now)
        self.clock.start()
        self.run = Run(self.storage, "run")
        self.jobs: list[Job] = []
        self.deaf: set[str] = set()
        "Places whose API server does not answer the mover."
        self.cut_off: set[str] = set()
        "Places that cannot reach the bucket."
        self.short: set[str] = set()
        "Places in which a run has lost its workers, but not its driver."
        self.saved: dict[str, list[int]] = {}
        "The state in each checkpoint, by name."
        self.handed_over: tuple[str, int] | None = None
        "The checkpoint and the step that a driver saved for a move, until another attempt begins."
        self.moving: Job | None = None
        self.withdrawn: set[str] = set()
        self.submitted = 0
        job = self.submit("east")
        for _ in range(3):
            self.act(job)

    def teardown(self) -> None:
        try:
            self.check_end()
        finally:
            self.clock.stop()

    # ---------------------------------------------------------------------------------------------------- helpers

    def submit(self, place: str, moves_from: str = "") -> Job:
        """Apply a new RayJob in a place, and record it."""
        self.submitted += 1
        owner = Owner("run-1", f"{self.submitted:08x}", "sunspot", place, place)
        job = Job(owner, moves_from, self.submitted)
        self.jobs.append(job)
        record_submission(self.run, SubmissionRecord(owner.job, "sunspot", place, place=place, time=self.storage.now))
        return job

    def delete(self, job: Job) -> None:
        """Delete a RayJob if its cluster answers. Otherwise it stays."""
        if job.place not in self.deaf:
            job.phase = "ended"

    def job_in(self, place: str) -> Job | None:
        return next((job for job in reversed(self.jobs) if job.place == place and job.phase != "ended"), None)

    def claims(self, job: Job) -> bool:
        return any(attempt.owner == str(job.owner) for attempt in read_attempts(self.run))

    def owns(self, job: Job) -> bool:
        """Return True if a job's workers could commit now."""
        if job.phase not in ("training", "saving") or not job.attempt:
            return False
        try:
            ensure_owner(self.run, job.attempt)
        except SupersededError:
            return False
        return True

    def say(self, job: Job, state: RunState, kind: StatusKind, reason: str = "") -> None:
        assert job.attempt
        workers = int(job.place not in self.short)
        status = Status(
            state, str(job.owner), reason, attempt=job.attempt.number, driver=job.driver, world_size=workers
        )
        write_status_as_is(self.run, replace(status, step=len(job.state), time=self.storage.now), kind)

    def save(self, job: Job) -> str:
        """Commit the workers' state. Raises `SupersededError`."""
        assert job.attempt
        ensure_owner(self.run, job.attempt)
        name = commit(self.run, job.attempt, len(job.state)).name
        self.saved[name] = list(job.state)
        return name

    # -------------------------------------------------------------------------------------------- the environment

    @rule(seconds=st.sampled_from([1, 10, 60, 1000]))
    def time_passes(self, seconds: int) -> None:
        self.storage.now += seconds

    @rule(place=st.sampled_from(PLACES))
    def api_server_stops_answering(self, place: str) -> None:
        self.deaf ^= {place}

    @rule(place=st.sampled_from(PLACES))
    def bucket_stops_answering(self, place: str) -> None:
        self.cut_off ^= {place}

    @rule(place=st.sampled_from(PLACES))
    def workers_go_or_come_back(self, place: str) -> None:
        self.short ^= {place}

    @rule(place=st.sampled_from(PLACES))
    def nodes_go(self, place: str) -> None:
        """End all processes in a place without notice. The operator starts the RayJobs' drivers again."""
        for job in self.jobs:
            if job.place == place and job.phase != "ended":
                job.phase = "pending"
                job.attempt = None
                job.state = []

    # ------------------------------------------------------------------------------------------------ the drivers

    @rule(choices=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def drivers_act(self, choices: list[int]) -> None:
        """Let pods start, workers claim the run, and workers train, in any order."""
        for choice in choices:
            able = [job for job in self.jobs if job.phase != "ended" and job.place not in self.cut_off]
            if able:
                self.act(able[choice % len(able)])

    def act(self, job: Job) -> None:
        if job.phase == "pending":
            self.begin(job)
        elif job.phase == "waiting":
            self.claim(job)
        elif job.phase == "saving":
            self.end_for_move(job)
        else:
            self.train(job)

    def begin(self, job: Job) -> None:
        attempts = read_attempts(self.run)
        try:
            refuse_if_superseded(attempts, str(job.owner))
            refuse_if_left(self.run, attempts, str(job.owner))
            job.phase = "waiting"
        except SupersededError:
            job.phase = "ended"

    def claim(self, job: Job) -> None:
        if job.moves_from and not has_handed_over(self.run, job.moves_from, str(job.owner)):
            return
        if job.moves_from:
            clear_handover(self.run)
        attempts = read_attempts(self.run)
        status = read_status(self.run)
        if status and status.owner == job.moves_from:
            assert not is_alive(status, self.storage.now), "the old workers still train"
        first_time = not self.claims(job)
        try:
            newest, _ = find_newest_good(self.run, attempts, trust_listing=True)
            job.driver = f"{len(attempts) + 1:08x}"
            after = tuple(attempt.driver for attempt in attempts)
            job.attempt = start(
                self.run, str(job.owner), newest.name if newest else None, driver=job.driver, after=after
            )
        except SupersededError:
            job.phase = "ended"
            return
        newest_owner = attempts[-1].owner if attempts else ""
        assert first_time or newest_owner == str(job.owner), "a superseded RayJob trains again"
        if first_time:
            assert str(job.owner) not in self.withdrawn, "a withdrawn RayJob trains"
            later = [other for other in self.jobs if str(other.owner) == newest_owner]
            assert not later or later[0].number < job.number, "the run was submitted elsewhere after this RayJob"
        job.state = list(self.saved[newest.name]) if newest else []
        if self.handed_over:
            name, step = self.handed_over
            assert len(job.state) == step, f"{step - len(job.state)} steps after {name} are repeated"
        self.handed_over = None
        job.phase = "training"
        self.say(job, RunState.RUNNING, StatusKind.WORKERS)

    def train(self, job: Job, steps: int = 1) -> None:
        """Take steps, save, and act on a request to hand the run over."""
        job.state += range(len(job.state) + 1, len(job.state) + steps + 1)
        try:
            self.save(job)
        except SupersededError:
            job.phase = "ended"
            return
        self.say(job, RunState.RUNNING, StatusKind.WORKERS)
        job.phase = "saving" if self.is_asked_to_move(job) else "training"

    def is_asked_to_move(self, job: Job) -> bool:
        request = read_handover(self.run)
        return request is not None and request.old == str(job.owner)

    def end_for_move(self, job: Job) -> None:
        """End if the move has not been cancelled since the workers started saving. Otherwise, resume training."""
        if not self.is_asked_to_move(job):
            self.train(job)
            return
        job.phase = "ended"
        try:
            name = self.save(job)
        except SupersededError:
            return
        self.say(job, RunState.STOPPED, StatusKind.ENDED, "stopped by its move to another place")
        self.handed_over = name, len(job.state)

    @rule(choice=st.integers(0, 9))
    def workers_train_without_the_bucket(self, choice: int) -> None:
        jobs = [job for job in self.jobs if job.phase == "training"]
        if jobs:
            jobs[choice % len(jobs)].state.append(len(jobs[choice % len(jobs)].state) + 1)

    # -------------------------------------------------------------------------------------------------- the mover

    @rule()
    def mover_acts(self) -> None:
        if self.moving is None:
            self.consider()
        elif self.claims(self.moving):
            self.finish()

    def consider(self) -> None:
        run, now = self.run, self.storage.now
        status = read_status(run)
        alive = status is not None and is_alive(status, now)
        if status and is_moving(status, now):
            return
        known = learn(find_sightings(read_attempts(run), read_submissions(run), status, now))
        here = Owner.parse(status.owner).place if status and alive else ""
        place = choose_place(OFFERS, known, Situation(now, here)).place
        if place == here or place in self.deaf or (not alive and self.job_in(place)):
            return
        moves_from = status.owner if status and alive else ""
        there = self.job_in(place)
        if there and there.moves_from == moves_from:
            self.moving = there
            return
        if there:
            self.delete(there)
        self.moving = self.submit(place, moves_from)
        if not alive:
            self.finish()

    def finish(self) -> None:
        """Delete the RayJobs that the run has left."""
        for job in self.jobs:
            if job is not self.moving:
                self.delete(job)
        self.moving = None

    @precondition(lambda self: self.moving is not None)
    @rule()
    def mover_gives_up(self) -> None:
        """Undo a move, and start the old RayJob again if its driver has ended for the move."""
        new = self.moving
        assert new
        withdraw_submission(self.run, new.owner.job, new.place)
        if self.claims(new):
            self.finish()
            return
        self.withdrawn.add(str(new.owner))
        self.delete(new)
        clear_handover(self.run)
        self.moving = None
        status = read_status(self.run)
        if status and left_for_move(status) and status.owner == new.moves_from:
            old = Owner.parse(status.owner).place
            if old not in self.deaf:
                self.submit(old)

    @rule()
    def mover_restarts(self) -> None:
        self.moving = None

    # ------------------------------------------------------------------------------------------------------ checks

    @invariant()
    def at_most_one_owner_can_commit(self) -> None:
        owners = [str(job.owner) for job in self.jobs if self.owns(job)]
        assert len(owners) <= 1, owners

    @invariant()
    def no_step_is_lost_or_repeated(self) -> None:
        for job in self.jobs:
            assert job.state == list(range(1, len(job.state) + 1))

    def check_end(self) -> None:
        """Let everything answer again. The run must then have exactly one owner, which trains to the last step."""
        for places in (self.deaf, self.cut_off, self.short):
            places.clear()
        for _ in range(12):
            for job in list(self.jobs):
                if job.phase != "ended":
                    self.act(job)
            if self.moving:
                self.mover_acts()
            self.storage.now += 5
            status = read_status(self.run)
            if not self.moving and not any(job.phase != "ended" for job in self.jobs):
                self.storage.now += 1000
                self.consider()
        owners = [job for job in self.jobs if self.owns(job)]
        assert len(owners) == 1, f"{[(job.place, job.phase) for job in self.jobs]}, {status}"
        trained = len(owners[0].state)
        self.train(owners[0], LAST_STEP - trained)
        newest, _ = find_newest_good(self.run, read_attempts(self.run), trust_listing=True)
        assert newest
        assert self.saved[newest.name] == list(range(1, LAST_STEP + 1))


def explore(model: type[Moves]) -> None:
    thorough = settings().max_examples > 100
    run_state_machine_as_test(
        model,
        settings=settings(
            max_examples=2000 if thorough else 60,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_order_of_failures_gives_a_moving_run_two_owners_or_loses_a_step() -> None:
    explore(Moves)
