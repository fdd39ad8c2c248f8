"""The claim, shown on this machine: a run loses a worker in the middle, and every row still counts once."""

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from sunspot.errors import ConflictError, DamageError, GaveUpError, SunspotError
from sunspot.formatting import plural
from sunspot.report import FILE
from sunspot.run import Run
from sunspot.run.attempts import read_attempts
from sunspot.run.history import read_journal
from sunspot.run.incidents import Receipt, read_receipts
from sunspot.run.overview import read_state, read_view, run_exists
from sunspot.run.status import RunState, read_status
from sunspot.settings import PREFIX
from sunspot.settings_file import as_variables
from sunspot.submitter.cluster.deletion import delete_run
from sunspot.submitter.local_training import COMMAND, refuse_without_training
from sunspot.submitter.printing import progress_note, warn
from sunspot.submitter.proof import Proof, prove

NAME = "demo"
"""The run."""

SETTINGS = {
    "NUM_WORKERS": "3",
    "USE_GPU": "false",
    "EPOCHS": str(min(3, 1 + (os.cpu_count() or 1) // 8)),  # many cores would end one before a worker is killed
    "AUDIT": "true",
    "REPORT_EVERY_S": "1",  # so that the step at which a worker is killed is known
}
"""What differs from a run of the default settings."""

JOB = "sunspot-demo-"
"""Beginning of the owner's name in every attempt of a demonstration, which tells it from a user's run of that name."""

KILLED_AT = 0.4
"""The share of the steps after which a worker is killed."""

LOOK_EVERY_S = 0.2

MAX_WAIT_S = 300.0
"""The longest wait for the next thing to happen: a run of the default settings takes a third of it on two cores."""

END_WITHIN_S = 30.0
"""How long a training that is not waited for any more may take to save."""

MAX_TAIL = 4000
"""Characters shown of what a failed training has printed."""

WORKER = "ray::RayTrainWorker"
"""How the title of a training worker's process begins."""


@dataclass(frozen=True)
class Demonstration:
    """What a demonstration has shown."""

    loss: Receipt
    "What the killed worker has cost."
    proof: Proof
    report: str
    "The place of the run's report."


Found = TypeVar("Found")

Tell = Callable[[float, str], None]
"""Takes a time, in seconds since the epoch, and what happened then."""


def demonstrate(run: Run, tell: Tell) -> Demonstration:
    """Train the run in a process of its own, kill one of its workers, and prove which rows it consumed.

    Raises `ConflictError` for a run of that name that no demonstration made, `SunspotError` when the training fails,
    and `GaveUpError` when it does not go on.
    """
    refuse_without_training()
    if run_exists(run):
        remove_earlier(run)
        tell(time.time(), f"removed the demonstration before this one from {run.location}")
    tell(time.time(), f"three processes begin to train a ResNet-18 on the bundled digits: the run {run.location}")
    with training(run) as trainer:
        begin, *_ = trainer.wait("the first step", lambda: receipts_of(run))
        tell(begin.first_step, "step 1: the three share the rows of each step")
        step = trainer.wait("the step at which to kill a worker", lambda: step_to_strike(run))
        worker = trainer.wait("the kill of one", trainer.kill_worker)
        tell(time.time(), f"step {step}: kill -9 {worker}, one of the three")
        _, loss, *_ = trainer.wait("training to go on", lambda: receipts_of(run, 2))
        for moment, text in describe(loss):
            tell(moment, text)
        _, _, *later = trainer.wait("another worker", lambda: receipts_of(run, 2 if trainer.ended else 3))
        if later:
            tell(later[0].first_step, f"step {later[0].step + 1}: a new process has joined them, with their state")
        trainer.finish()
    view = read_view(run)
    if view.state is not RunState.SUCCEEDED:
        raise SunspotError(f"{run.location}: {view.state}, {view.reason}")
    accuracy = view.checkpoint.metrics.get("test_accuracy") if view.checkpoint else None
    held_out = "" if accuracy is None else f"; it reads {accuracy:.0%} of the held-out digits"
    tell(view.newest_record.get("time", view.time), f"step {view.step}: the last{held_out}")
    proof = prove(run)
    if not proof.epochs:
        raise DamageError(f"{run.location}: which rows it consumed is not recorded")
    tell(time.time(), f"audit: {proof.summary or 'every row counts once, every checkpoint is whole'}")
    return Demonstration(loss, proof, run.storage.locate(run.key(FILE)))


def remove_earlier(run: Run) -> None:
    """Remove the run if demonstrations alone have made it, and none is going on; raises `ConflictError` otherwise."""
    status = read_status(run)
    owners = [attempt.owner for attempt in read_attempts(run)] + ([status.owner] if status else [])
    if not owners or not all(owner.startswith(JOB) for owner in owners):
        instead = f"give another --storage, or `sunspot delete {run.name}` first"
        raise ConflictError(f"{run.location}: this run is none of `sunspot demo`, which would remove it; {instead}")
    state, reason = read_state(run, status)
    if not state.terminal:
        instead = "wait for that demonstration, or give another --storage"
        raise ConflictError(f"{run.location}: {state}, {reason}; {instead}")
    delete_run(run)


def receipts_of(run: Run, least: int = 1) -> list[Receipt]:
    """Return the run's receipts once there are `least`; until then none."""
    receipts = read_receipts(read_journal(run, "events"))
    return receipts if len(receipts) >= least else []


def step_to_strike(run: Run) -> int:
    """Return the newest step once enough are taken; until then 0."""
    status = read_status(run)
    return status.step if status and status.total_steps and status.step >= KILLED_AT * status.total_steps else 0


def describe(loss: Receipt) -> Iterator[tuple[float, str]]:
    """Yield what happened after a worker was lost, and when."""
    if loss.noticed:
        yield loss.noticed, "the loss is noticed: the other two break off the step"
    if loss.formed:
        yield loss.formed, "they stand as a group of two, and take that step again with the rows of the third"
    again = f"{plural(loss.replayed, 'step')} again" if loss.replayed else "none again"
    yield loss.first_step, f"step {loss.step + 1}: training goes on ({again}), {loss.recovery_s:.1f} s after the loss"


class Trainer:
    """A training on this machine, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        self._process, self._output = process, output

    def wait(self, what: str, look: Callable[[], Found]) -> Found:
        """Return what `look` finds, as soon as that is something."""
        until = time.monotonic() + MAX_WAIT_S
        while True:
            ended = self.ended  # before the look: its last words may be what is awaited
            if found := look():
                return found
            if ended:
                raise self._failed(f"the training ended before {what}")
            if time.monotonic() > until:
                raise GaveUpError(f"gave up after {MAX_WAIT_S:.0f} s of waiting for {what}")
            time.sleep(LOOK_EVERY_S)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def finish(self) -> None:
        """Wait for its end; raises `SunspotError` when it failed."""
        try:
            self._process.wait(MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            raise GaveUpError(f"gave up after {MAX_WAIT_S:.0f} s of waiting for the end of the training") from None
        if self._process.returncode:
            raise self._failed("the training failed")

    def kill_worker(self) -> int:
        """Kill one of its workers, and return the process id; 0 where none is found."""
        processes = list_processes()
        for pid in sorted(processes, reverse=True):  # mostly not that of rank 0
            if processes[pid][1].startswith(WORKER) and self._process.pid in ancestors(pid, processes):
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, signal.SIGKILL)
                    return pid
        return 0

    def _failed(self, what: str) -> SunspotError:
        self._output.seek(0)
        return SunspotError(f"{what}:\n{self._output.read().decode(errors='replace')[-MAX_TAIL:].strip()}")


@contextmanager
def training(run: Run) -> Iterator[Trainer]:
    """Train the run while the context lasts; what still trains after it is ended."""
    place = {"RUN_NAME": run.name, "STORAGE_PATH": run.storage.locate("").rstrip("/")}
    settings = {**SETTINGS, **place, "JOB_ID": f"{JOB}{uuid.uuid4().hex[:8]}"}
    others = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "RAY_"))}
    environment = {**others, **as_variables(settings)}
    given = sorted(name for name in os.environ if name.startswith(PREFIX) and name != f"{PREFIX}STORAGE_PATH")
    if given:
        warn(f"without {', '.join(given)}: a demonstration has settings of its own")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(COMMAND, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Trainer(process, output)
        finally:
            with progress_note("ending the training"), suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(END_WITHIN_S)
            process.kill()
            process.wait()


def ancestors(pid: int, processes: Mapping[int, tuple[int, str]]) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on, as far as `list_processes` knows them."""
    while pid in processes:
        pid, _ = processes[pid]
        yield pid


def list_processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the title of each process of this machine, by its id."""
    found = {}
    if Path("/proc/self/stat").exists():
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended since
                parent = os.fsdecode((folder / "stat").read_bytes()).rpartition(")")[2].split()[1]
                found[int(folder.name)] = int(parent), os.fsdecode((folder / "cmdline").read_bytes())
        return found
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, check=True)
    for line in os.fsdecode(listed.stdout).splitlines():
        pid, parent, *title = line.split(maxsplit=2)
        found[int(pid)] = int(parent), " ".join(title)
    return found
