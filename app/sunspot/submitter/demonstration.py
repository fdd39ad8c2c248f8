"""Demonstrates on this machine that every row counts exactly once, even if a worker is lost."""

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
from sunspot.report import FILE
from sunspot.run import Run
from sunspot.run.attempts import read_attempts
from sunspot.run.history import read_journal
from sunspot.run.incidents import Receipt, describe_replayed, read_receipts
from sunspot.run.seen import look, read_details
from sunspot.run.status import RunState, read_status
from sunspot.settings import PREFIX
from sunspot.settings.file import as_variables
from sunspot.submitter.cluster.deletion import delete_run
from sunspot.submitter.local_training import COMMAND, refuse_without_training
from sunspot.submitter.printing import progress_note, warn
from sunspot.submitter.proof import Proof, prove

NAME = "demo"
"""The name of the demonstration's run."""

SETTINGS = {
    "NUM_WORKERS": "3",
    "USE_GPU": "false",
    "EPOCHS": str(
        min(3, 1 + (os.cpu_count() or 1) // 8)
    ),  # with many cores, one epoch would end before a worker is killed
    "AUDIT": "true",
    "REPORT_EVERY_S": "1",  # so that the step at which a worker is killed is known
}
"""Settings that differ from their defaults."""

JOB = "sunspot-demo-"
"""Prefix of the owner in a demonstration's attempts, which distinguishes it from a user's run with the same name."""

KILLED_AT = 0.4
"""Fraction of the steps after which a worker is killed."""

LOOK_EVERY_S = 0.2

MAX_WAIT_S = 300.0
"""Longest wait for the next event in seconds. On two cores, the whole demonstration takes a third of this time."""

END_WITHIN_S = 30.0
"""Seconds for the training to save and end after the demonstration is interrupted."""

MAX_TAIL = 4000
"""Maximum number of characters of a failed training's output in the error."""

WORKER = "ray::RayTrainWorker"
"""Prefix of a training worker's process title."""


@dataclass(frozen=True)
class Demonstration:
    """The results of a demonstration."""

    loss: Receipt
    "The receipt for the killed worker, with the cost of losing it."
    proof: Proof
    report: str
    "The path or URL of the run's report."


Found = TypeVar("Found")

Report = Callable[[float, str], None]
"""A function that takes an event's time, in seconds since the epoch, and its description."""


def demonstrate(run: Run, report: Report) -> Demonstration:
    """Train the run in a subprocess, kill one of its workers, and audit which rows the run consumed.

    Raises `ConflictError` if another run with this name exists, `SunspotError` if the training fails, and `GaveUpError`
    if the training makes no progress.
    """
    refuse_without_training()
    if look(run).exists:
        remove_earlier(run)
        report(time.time(), f"removed an earlier demonstration from {run.location}")
    report(time.time(), f"three processes start training a ResNet-18 on the bundled digits, as the run {run.location}")
    with training(run) as trainer:
        begin = trainer.wait("the first step", lambda: receipts_of(run))[0]
        report(begin.first_step, "step 1: the three workers share the rows of each step")
        step = trainer.wait("the step at which to kill a worker", lambda: reached_kill_step(run))
        worker = trainer.wait("a worker to kill", trainer.kill_worker)
        report(time.time(), f"step {step}: kill -9 {worker}, one of the three workers")
        receipts = trainer.wait("training to continue", lambda: receipts_of(run, 2))
        loss = receipts[1]
        for moment, text in describe(loss):
            report(moment, text)
        receipts = trainer.wait("another worker", lambda: receipts_of(run, 2 if trainer.ended else 3))
        for joined in receipts[2:3]:
            report(
                joined.first_step, f"step {joined.step + 1}: a new process has joined them, with a copy of their state"
            )
        trainer.finish()
    seen = read_details(look(run))
    if seen.state is not RunState.SUCCEEDED:
        raise SunspotError(f"{run.location}: {seen.state}, {seen.reason}")
    accuracy = seen.checkpoint.metrics.get("test_accuracy") if seen.checkpoint else None
    held_out = "" if accuracy is None else f"; the model reads {accuracy:.0%} of the held-out digits"
    report(seen.newest_record.get("time", seen.time), f"step {seen.step}: the last step{held_out}")
    proof = prove(run)
    if not proof.epochs:
        raise DamageError(f"{run.location}: the rows that the run consumed were not recorded")
    report(time.time(), f"audit: {proof.summary or 'every row counts once, and every checkpoint is intact'}")
    return Demonstration(loss, proof, run.storage.locate(run.key(FILE)))


def remove_earlier(run: Run) -> None:
    """Remove an earlier demonstration's run.

    Raises `ConflictError` if the run is live or was not created by `sunspot demo`.
    """
    seen = look(run)
    owners = [attempt.owner for attempt in read_attempts(run)] + ([seen.status.owner] if seen.status else [])
    if not owners or not all(owner.startswith(JOB) for owner in owners):
        instead = f"choose another --storage, or run `sunspot delete {run.name}` first"
        raise ConflictError(
            f"{run.location} was not created by `sunspot demo`, so the demo does not delete it; {instead}"
        )
    if not seen.state.terminal:
        instead = "wait for that demonstration, or choose another --storage"
        raise ConflictError(f"{run.location}: {seen.state}, {seen.reason}; {instead}")
    delete_run(run)


def receipts_of(run: Run, least: int = 1) -> list[Receipt]:
    """Return the run's receipts. Returns an empty list if there are fewer than `least`."""
    receipts = read_receipts(read_journal(run, "events"))
    return receipts if len(receipts) >= least else []


def reached_kill_step(run: Run) -> int:
    """Return the newest step if the run has taken at least the fraction KILLED_AT of its steps, or 0 otherwise."""
    status = read_status(run)
    return status.step if status and status.total_steps and status.step >= KILLED_AT * status.total_steps else 0


def describe(loss: Receipt) -> Iterator[tuple[float, str]]:
    """Yield the time and description of each event after a worker was lost."""
    if loss.noticed:
        yield loss.noticed, "the other two workers notice the loss and break off the step"
    if loss.formed:
        yield loss.formed, "they form a group of two, take over the rows of the third, and repeat the step"
    again = describe_replayed(loss.replayed, loss.at_least)
    repeated = f"{again} repeated" if loss.replayed or loss.at_least else "no other step repeated"
    yield (
        loss.first_step,
        f"step {loss.step + 1}: training continues {loss.recovery_s:.1f} s after the loss ({repeated})",
    )


class Trainer:
    """A handle for the training process that `training` starts."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        self.process = process
        self.output = output

    def wait(self, what: str, look: Callable[[], Found]) -> Found:
        """Call `look` until it returns a true value, and return that value."""
        until = time.monotonic() + MAX_WAIT_S
        while True:
            ended = self.ended  # read first, because the awaited event can happen just before the process ends
            found = look()
            if found:
                return found
            if ended:
                raise self._failed(f"the training ended before {what}")
            if time.monotonic() > until:
                raise GaveUpError(f"timed out after waiting {MAX_WAIT_S:.0f} s for {what}")
            time.sleep(LOOK_EVERY_S)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def finish(self) -> None:
        """Wait for the training to end. Raises `SunspotError` if it failed."""
        try:
            self.process.wait(MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            raise GaveUpError(f"timed out after waiting {MAX_WAIT_S:.0f} s for the training to end") from None
        if self.process.returncode:
            raise self._failed("the training failed")

    def kill_worker(self) -> int:
        """Kill one of the workers and return its process ID, or 0 if no worker is found."""
        processes = list_processes()
        for pid in sorted(processes, reverse=True):  # the highest ID rarely belongs to rank 0
            if processes[pid][1].startswith(WORKER) and self.process.pid in ancestors(pid, processes):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
                    return pid
        return 0

    def _failed(self, what: str) -> SunspotError:
        self.output.seek(0)
        return SunspotError(f"{what}:\n{self.output.read().decode(errors='replace')[-MAX_TAIL:].strip()}")


@contextmanager
def training(run: Run) -> Iterator[Trainer]:
    """Train the run inside the context, and stop it on exit if it is still running."""
    place = {"RUN_NAME": run.name, "STORAGE_PATH": run.storage.locate("").rstrip("/")}
    settings = {**SETTINGS, **place, "JOB_ID": f"{JOB}{uuid.uuid4().hex[:8]}"}
    others = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "RAY_"))}
    environment = {**others, **as_variables(settings)}
    given = sorted(name for name in os.environ if name.startswith(PREFIX) and name != f"{PREFIX}STORAGE_PATH")
    if given:
        warn(f"the demonstration ignores {', '.join(given)}, because it has its own settings")
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
    """Yield the process IDs of a process's ancestors, starting with its parent."""
    while pid in processes:
        pid, _ = processes[pid]
        yield pid


def list_processes() -> dict[int, tuple[int, str]]:
    """Return each process's parent ID and title, keyed by process ID."""
    found = {}
    if Path("/proc/self/stat").exists():
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                parent = os.fsdecode((folder / "stat").read_bytes()).rpartition(")")[2].split()[1]
                found[int(folder.name)] = int(parent), os.fsdecode((folder / "cmdline").read_bytes())
        return found
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, check=True)
    for line in os.fsdecode(listed.stdout).splitlines():
        fields = line.split(maxsplit=2)
        found[int(fields[0])] = int(fields[1]), " ".join(fields[2:])
    return found
