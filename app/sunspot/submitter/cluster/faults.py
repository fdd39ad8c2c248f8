"""Injects faults into a live run and follows its recovery."""

import contextlib
import enum
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from sunspot.errors import GaveUpError, NotFoundError, SettingsError, StorageError
from sunspot.formatting import in_words, plural
from sunspot.run.attempts import attempt_of, read_attempts
from sunspot.run.checkpoints import MANIFEST, list_directories
from sunspot.run.history import read_journal
from sunspot.run.incidents import Receipt, describe_receipt, read_receipts
from sunspot.run.status import RunState
from sunspot.submitter.cluster.api import UnreachableError
from sunspot.submitter.cluster.observation import OutageReporter, RunAccess, require_answers, stored_arguments
from sunspot.submitter.cluster.views import PodView
from sunspot.submitter.printing import print_json_line, print_text, warn

POLL_EVERY_S = 2.0

READY_WITHIN_S = 600.0
"""Seconds to wait for a ready pod before each fault. A cloud takes minutes to add a node."""

RECOVERED_WITHIN_S = 600.0
"""Seconds within which a run must recover from the last fault and commit a checkpoint."""

KILL_GRACE_S = 1
"""Shortest grace period in seconds that kills a pod. With 0, the kubelet sends SIGTERM and waits for the pod's own
grace period (kubernetes#120449)."""


class FaultKind(enum.StrEnum):
    """The kinds of faults that can be injected."""

    RECLAIM = "reclaim"
    "A training worker's pod is deleted with its own grace period, like in a preemption with notice."
    KILL = "kill"
    "A training worker's pod is killed immediately."
    HEAD = "head"
    "The head pod, which runs the driver, is killed immediately."

    @property
    def verb(self) -> str:
        return "reclaim" if self is FaultKind.RECLAIM else "kill"

    @property
    def victim(self) -> str:
        return "head" if self is FaultKind.HEAD else "training worker"


@dataclass(frozen=True)
class FaultPlan:
    """A plan of the faults to inject. Its string form completes a sentence that starts with "this would"."""

    kinds: tuple[FaultKind, ...]
    "The kind of each fault, in order."
    every_s: float
    "Seconds between faults."
    seed: int

    def __str__(self) -> str:
        counts = {kind: self.kinds.count(kind) for kind in FaultKind}
        parts = [f"{kind.verb} {plural(count, kind.victim)}" for kind, count in counts.items() if count]
        apart = f", {self.every_s:g} s apart," if len(self.kinds) > 1 else ""
        return f"{' and '.join(parts)}{apart}"


def make_plan(kinds: Sequence[str], every_s: float, faults: int, seed: int | None) -> FaultPlan:
    """Return a plan with about the same number of faults of each kind, in random order.

    `kinds` can contain comma-separated lists. `faults` is the total number of faults. Raises `SettingsError` if a kind
    is unknown.
    """
    words = [word.strip() for text in kinds for word in text.split(",")]
    unknown = [word for word in words if word not in list(FaultKind)]
    if unknown:
        raise SettingsError(f"--kind {', '.join(unknown)} is unknown; choose from {', '.join(FaultKind)}")
    seed = secrets.randbelow(10**6) if seed is None else seed
    order = [FaultKind(words[number % len(words)]) for number in range(faults)]
    Random(seed).shuffle(order)
    return FaultPlan(tuple(order), every_s, seed)


class FaultInjector:
    """Injects faults into a run and follows its recovery."""

    def __init__(self, access: RunAccess, as_json: bool) -> None:
        self._access = access
        self._as_json = as_json
        self.run = access.run
        self.cluster = access.require_cluster()
        self._outage = OutageReporter()
        self._step = 0
        self._attempt = 0
        self._faults: dict[int, int] = {}
        """The newest attempt's number when each fault was injected, keyed by the fault's number.

        A later attempt counts as a consequence of the fault. Times are not compared, because clocks can differ.
        """
        self._recovered: set[int] = set()
        self._ended = ""
        "The run's final state and reason, or empty while the run is live."

    def refuse_unless_live(self) -> None:
        """Raise an error if the run is not live or shares its cluster with other jobs."""
        snapshot = self._access.observe()
        require_answers(snapshot)
        self._access.require_known(snapshot)
        if snapshot.storage.status:
            self._step = snapshot.storage.status.step
        live = next((job for job in snapshot.cluster.jobs if job.live), None)
        state, reason = snapshot.state()
        if not live or state.terminal:
            raise NotFoundError(f"faults need a live run, but the state of {self.run.name} is {state}: {reason}")
        if live.borrows_cluster:
            raise SettingsError(f"{live.name} shares its cluster with other jobs, which would also be affected")

    def inject_all(self, plan: FaultPlan) -> None:
        """Inject all faults of a plan, and wait until the run has recovered or ended."""
        kinds = plan.kinds
        random = Random(plan.seed)
        self.say({"event": "begin", "seed": plan.seed, "kinds": kinds}, f"seed {plan.seed}: {', '.join(kinds)}")
        for number, kind in enumerate(kinds, 1):
            if number > 1:
                self._watch(plan.every_s)
            if not self._ended:
                self._inject(number, kind, random)
        audit = (
            f"so it has not recovered; it keeps training, and `sunspot audit {stored_arguments(self.run)}` audits it"
        )
        self._wait(self._find_missing, RECOVERED_WITHIN_S, audit)
        if self._ended:
            injected = len(self._faults)
            text = f"the run has ended after {plural(injected, 'fault')} of {len(kinds)}: {self._ended}"
            self.say({"event": "ended", "reason": self._ended, "faults": injected}, text)

    def say(self, record: dict[str, Any], text: str) -> None:
        """Print a line to stdout, as text or as JSON."""
        if self._as_json:
            print_json_line({"time": time.time(), **record})
        else:
            print_text(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)

    def _inject(self, number: int, kind: FaultKind, random: Random) -> None:
        """Wait until a suitable pod is ready, and delete it. Do nothing if the run ends first."""
        deleted: list[PodView] = []

        def find_missing() -> str:
            pod = self._delete_one(kind, random)
            if pod:
                deleted.append(pod)
            return "" if deleted else f"a ready {kind.victim}"

        why = f"so fault {number} was not injected; `sunspot status {self._access.arguments}` says why"
        self._wait(find_missing, READY_WITHIN_S, why)
        if not deleted:
            return
        [pod] = deleted
        try:
            self._attempt = max(self._attempt, *(attempt.number for attempt in read_attempts(self.run)), 0)
        except StorageError as error:
            warn(str(error))
        self._faults[number] = self._attempt
        record = {
            "event": "fault",
            "fault": number,
            "kind": kind,
            "pod": pod.name,
            "node": pod.node,
            "step": self._step,
        }
        self.say(record, f"fault {number}: {kind}, {pod.name} on {pod.node}, at step {self._step}")

    def _delete_one(self, kind: FaultKind, random: Random) -> PodView | None:
        """Delete and return a random ready pod of the run's newest live RayJob.

        Returns None if no pod of this kind is ready or the API server does not answer.
        """
        try:
            live = [job for job in self.cluster.list_jobs(self.run.name) if job.live][:1]
            ready = [pod for pod in self.cluster.list_pods(live) if pod.ready and not pod.deleting]
            if kind is FaultKind.HEAD:
                pods = [pod for pod in ready if pod.head]
            else:
                pods = [pod for pod in ready if not pod.head and pod.group in live[0].training_groups]
            if not pods:
                return None
            pod = random.choice(sorted(pods, key=lambda pod: pod.name))
            self.cluster.delete_pod(pod, None if kind is FaultKind.RECLAIM else KILL_GRACE_S)
            return pod
        except UnreachableError as error:
            warn(str(error))
            return None

    def _watch(self, seconds: float) -> None:
        """Watch the run for `seconds` seconds or until it ends, and print new receipts."""
        until = time.monotonic() + seconds
        while not self._ended and time.monotonic() < until:
            time.sleep(max(0.0, min(until - time.monotonic(), POLL_EVERY_S)))
            self._look()

    def _wait(self, find_missing: Callable[[], str], seconds: float, why: str) -> None:
        """Watch the run until it has ended, or until `find_missing` returns an empty string.

        Prints what is missing. Raises `GaveUpError` after `seconds`, with a message that ends with `why`.
        """
        deadline = time.monotonic() + seconds
        printed = ""
        while not self._ended and (missing := find_missing()):
            if missing != printed:
                warn(f"waiting for {missing}")
                printed = missing
            if time.monotonic() > deadline:
                raise GaveUpError(f"{self.run.name}: waited {in_words(seconds)} for {missing}, {why}")
            self._watch(POLL_EVERY_S)

    def _look(self) -> None:
        """Read the run's state and print new receipts."""
        snapshot = self._access.observe()
        self._outage.note(snapshot.cluster.trouble, snapshot.storage.trouble)
        if snapshot.storage.status:
            self._step = snapshot.storage.status.step
        if self._faults.keys() - self._recovered:
            with contextlib.suppress(StorageError):  # the next look tries again
                for receipt in read_receipts(read_journal(self.run, "events")):
                    self._print_receipt(receipt)
        state, reason = snapshot.state()
        # While the cluster does not answer, a failure can still be followed by another attempt.
        if state.terminal and (state in (RunState.SUCCEEDED, RunState.STOPPED) or not snapshot.cluster.trouble):
            self._ended = f"{state}, {reason}"

    def _print_receipt(self, receipt: Receipt) -> None:
        """Print a receipt and the faults that caused it. Prints nothing if no fault caused it."""
        open_faults = sorted(self._faults.keys() - self._recovered)
        numbers = [number for number in open_faults if self._faults[number] < receipt.attempt]
        if not numbers:
            return
        self._recovered.update(numbers)
        times = {"recovery_s": receipt.recovery_s, "replayed": receipt.replayed}
        which = f"fault{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        self.say(
            {**receipt.record(), "faults": numbers, **times}, f"recovered from {which}: {describe_receipt(receipt)}"
        )

    def _find_missing(self) -> str:
        """Describe what the run's recovery still lacks, such as a checkpoint after the last fault.

        Returns an empty string once the run has recovered.
        """
        last = max(self._faults)
        if last not in self._recovered:
            return f"the receipt of fault {last}"
        names: list[str] = []
        with contextlib.suppress(StorageError):
            names = [name for name, files in list_directories(self.run).items() if MANIFEST in files]
        committed = any(attempt_of(name) > self._faults[last] for name in names)
        return "" if committed else f"a checkpoint after fault {last}"
