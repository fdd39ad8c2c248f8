"""Profiles some steps of a live run with torch.profiler, and writes the traces of the chosen ranks to storage.

A thread of rank 0 finds a request in storage (`run.profiles`), and rank 0 broadcasts it after a step. All workers
then know which steps to profile, and the chosen ranks proceed as follows:

1. As many steps as requested are timed without the profiler, for comparison.
2. The profiler starts. Its first step is slower than the others, and is not recorded.
3. The requested steps are recorded. No epoch ends between them, so that no trace contains an evaluation.
4. A thread writes the trace to a file, compresses it and writes it to storage, while training continues.

If the group ends before all requested steps are recorded, the profile is dropped, and the interrupted step is repeated
as usual. An error in the profiler ends the profile, but never the training.
"""

import gzip
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerAction, profile

from sunspot.background import start_thread
from sunspot.errors import shorten
from sunspot.parallel.collectives import WorkerPlace, broadcast_from_rank0
from sunspot.plan import Plan
from sunspot.run import Run, open_run
from sunspot.run.profiles import ProfileRequest, RankProfile, read_request, trace_key, write_rank_profile
from sunspot.storage.base import CHUNK
from sunspot.storage.limits import retry_storage

LOOK_EVERY_S = 5.0
"""Seconds between two checks by rank 0 for a request."""

HEAD_BYTES = 1 << 16
"""Number of bytes at the start of a trace in which torch names the process."""

PROCESS_NAME = re.compile(rb'("name": "process_name",.*?"name": ")[^"]*', re.DOTALL)
"""Pattern for the first name of a process in a trace, which is `python`."""

COMPRESSION = 1
"""Level of gzip, which shrinks a trace to a twelfth. The default level takes nine times longer for a seventeenth."""


class StepProfiler:
    """Records this worker's steps when a profile of its group is requested."""

    def __init__(self, plan: Plan, place: WorkerPlace) -> None:
        self._plan = plan
        self._place = place
        self._found: ProfileRequest | None = None
        "The request that is in storage, as far as rank 0 knows."
        self._request: ProfileRequest | None = None
        "The newest request for which rank 0 wanted a profile to begin."
        self._busy_until = 0
        "Last step of the newest profile."
        self._recording: StepRecording | None = None
        "The profile that this worker records, or None."

    def look_for_request(self, run: Run, attempt: int) -> None:
        """Check storage for a request to profile this attempt. A thread of rank 0 calls this."""
        found = read_request(run)
        self._found = found if found and found.attempt == attempt else None

    def is_due(self, step: int) -> bool:
        """Return True on rank 0 if a newly requested profile should start after `step`."""
        found = self._found
        if found is None or found == self._request or step <= self._busy_until:
            return False
        self._request = found
        return True

    def begin(self, step: int) -> None:
        """Start the requested profile after `step`. All workers call this together."""
        request = broadcast_from_rank0(self._place.group, lambda: self._request)
        assert request
        first = find_first_step(step, request.steps, self._plan.steps.per_epoch)
        self._busy_until = first + request.steps - 1
        if self._place.rank in request.ranks:
            self._recording = StepRecording(request, first)

    def end_step(self, step: int) -> None:
        """Record the end of a step. If the profiler fails, the profile ends, but training continues."""
        recording = self._recording
        if not recording:
            return
        error = ""
        try:
            recording.end_step(step)
        except Exception as failure:
            error = shorten(failure)
            self.drop()
        if error or step == self._busy_until:
            self._recording = None
            start_thread(lambda: self._write(recording, error), "profile")

    def drop(self) -> None:
        """Stop the profiler without writing a trace. Call this if the group has ended or the profile has failed."""
        if self._recording:
            with suppress(Exception):  # the profiler itself may have failed
                self._recording.stop()
            self._recording = None

    def _write(self, recording: "StepRecording", error: str) -> None:
        """Write the trace and a `RankProfile` to storage. After an error, write only a `RankProfile` with the error."""
        settings = self._plan.settings
        request, rank = recording.request, self._place.rank
        run = open_run(settings.storage_path, settings.run_name)

        def upload() -> None:
            if read_request(run) != request:
                return  # nobody waits for it, and perhaps the run was deleted
            with open(path, "rb") as trace, run.storage.writer(trace_key(run, request, rank)) as writer:
                name = f"rank {rank} of {self._place.world_size} on {socket.gethostname()}".encode()
                with gzip.GzipFile(fileobj=writer, mode="wb", compresslevel=COMPRESSION) as packed:
                    packed.write(PROCESS_NAME.sub(rb"\g<1>" + name, trace.read(HEAD_BYTES), count=1))
                    shutil.copyfileobj(trace, packed, CHUNK)
            write_rank_profile(run, request, report)

        try:
            if error:
                raise RuntimeError(error)
            with TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")
                report = recording.export(path, rank)
                retry_storage(settings.storage_timeout_s, "writing a profile", upload)
        except Exception as failure:
            write_rank_profile(run, request, RankProfile(rank, error=error or shorten(failure)))


class StepRecording:
    """The recording of one profile on one rank."""

    def __init__(self, request: ProfileRequest, first: int) -> None:
        """Prepare to record `request.steps` steps, beginning with step `first`."""
        self.request = request
        self._first = first
        self._stopped = True
        self._steps_s: list[float] = []
        "Seconds of each step so far."
        self._inside_s = 0.0
        "Seconds in which the profiler started and stopped."
        self._since = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Time a step, and start, continue or stop the profiler."""
        began = time.perf_counter()
        self._steps_s.append(began - self._since)
        if step == self._first - 2:
            self._start()
        elif step == self._first + self.request.steps - 1:
            self.stop()
        elif step >= self._first - 1:
            self._profiler.step()
        self._since = time.perf_counter()
        self._inside_s += self._since - began

    def _start(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:  # torch 2.15 has no public API for this, and would crash
            raise RuntimeError("the task runs a profiler of its own")
        first = self._first
        self._profiler = profile(schedule=lambda step: ProfilerAction.WARMUP if step < first else ProfilerAction.RECORD)
        self._profiler.step_num = first - 1  # it names steps by their numbers (`ProfilerStep#461`)
        self._profiler.start()
        self._stopped = False

    def stop(self) -> None:
        """Stop the profiler, if it is running."""
        if not self._stopped:
            self._stopped = True
            self._profiler.stop()

    def export(self, path: Path, rank: int) -> RankProfile:
        """Write the trace to a file, and return the report about it."""
        began = time.perf_counter()
        self._profiler.export_chrome_trace(str(path))  # holds the GIL, so that training waits for it
        export_s = time.perf_counter() - began
        steps = self.request.steps
        *usual, warm_up = self._steps_s[:-steps]
        overhead_s = self._inside_s + export_s + max(0.0, warm_up - median(usual))
        return RankProfile(rank, self._first, sum(self._steps_s[-steps:]), median(usual) * steps, overhead_s)


def find_first_step(step: int, steps: int, per_epoch: int) -> int:
    """Return the first step to record for a profile of `steps` steps that is requested after `step`.

    Before this step, at least `steps` steps are timed for comparison, and one step is profiled but not recorded. No
    epoch ends between the unrecorded step and the last recorded step, unless an epoch has too few steps.
    """
    warm_up = step + steps + 1
    position = (warm_up - 1) % per_epoch
    if position + 1 + steps > per_epoch:
        warm_up += per_epoch - position
    return warm_up + 1
