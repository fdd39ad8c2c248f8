"""Terminates a hung rank after recording its stacks, so that the rank counts as lost.

A rank that hangs makes all others wait for it in the next collective. All watchdogs therefore act within moments of
each other, and each one records its own rank's stacks. A watchdog is a thread, and cannot run while the training thread
holds the GIL in C code. It therefore keeps postponing a timer that does not need the GIL (`faulthandler`). If this
timer expires, it writes the stacks to a file in the node's shared memory and terminates the process. The next worker on
the node uploads the file. A stopped rank (SIGSTOP) leaves no stacks, and neither does a rank on a lost node. The other
ranks' stacks still show which rank has stopped (`run.failures.find_suspects`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from stat import S_ISREG
from typing import Any

from sunspot.background import start_thread
from sunspot.errors import SunspotError
from sunspot.run import SHARED_MEMORY, Run
from sunspot.run.attempts import Attempt, newest_number
from sunspot.run.failures import INSTALLED, Hang
from sunspot.run.history import Journal
from sunspot.storage.limits import with_deadline

FIRST_STEP_S = 600
"""Seconds added to the timeout of the first step, which waits for imports, compilation, and Ray Data's first rows."""

START_S = 10
"""Seconds added to the timeout until an attempt is claimed. Waiting ranks tell each other every ROUND_S that they are
alive (parallel/collectives.py)."""

CHECK_EVERY_S = 1.0
"""Seconds between two checks of the last heartbeat."""

REPORT_S = 20
"""Maximum number of seconds to wait for storage and the control channel, because either can be gone."""

LINGER_S = 5
"""Seconds between a rank's report and its exit. The other ranks have hung since the same step, and report at the same
time."""

WAITING_RANK_S = 10
"""Additional seconds for a rank that waits for others. Once the rank that it waits for ends, the group ends, and this
process may continue in the next group (train/survivor.py)."""

STDERR = 2
"""File descriptor of the process's original stderr, even if `sys.stderr` is another stream."""

FILE_PREFIX = "sunspot-hang-"
"""Prefix for the name of the file with a process's stacks."""

STALE_FILE_S = 86_400
"""Age in seconds after which a file is deleted, because its run was killed and has not started here again."""

MAX_STACKS = 20_000
"""Maximum number of characters of stacks in an event, which keeps the journal small. The training thread comes
first."""

MAX_DUMP_BYTES = 1 << 20
"""Maximum number of bytes read from a dump. `faulthandler` writes at most 100 frames of each of 100
threads."""

COLLECTIVES = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/graph.py",
    "/ray/train/",
    "/sunspot/parallel/",
)
"""Path fragments of code that waits for other ranks. DDP exchanges gradients inside backward()."""

LOADING = "/ray/data/"
"""Path fragment of code that waits for rows from Ray Data."""

WAIT_HELPERS = re.compile(r"/ray/_private/|/(threading|queue)\.py$")
"""Matches the paths of code that only waits on behalf of its caller. The caller shows what the rank waits for."""

OnHang = Callable[[Hang, bool], Any]
"""A function that gets the facts about a rank that hung, and whether the rank belongs to the previous attempt."""


class Watchdog:
    """Terminates this process if the thread that created the watchdog has taken no step for `timeout_s` seconds.

    A `timeout_s` of 0 disables the watchdog. Before the process exits, the watchdog records an event in this rank's
    journal and calls `on_hang`. A hung rank of the previous attempt may have written its stacks to this node without
    recording an event. In that case, this watchdog records the hang of that rank and calls `on_hang`.

    Before the group has claimed an attempt, ranks take no steps, so each message from the other ranks counts as a
    heartbeat.
    """

    def __init__(
        self,
        run: Run,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_hang: OnHang,
        around_pauses: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Create a watchdog.

        `around_pauses` returns a context manager that is entered while no heartbeat is expected.
        """
        self._around_pauses = around_pauses
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._training_thread = threading.get_ident()
        self._attempt = 0
        "Number of the attempt, or 0 until it is claimed."
        self.step = 0
        "Number of optimizer steps taken."
        self._last_heartbeat = time.monotonic()
        self._started = self._paused = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def claimed(self, attempt: Attempt) -> None:
        """Record the attempt that the group has claimed. The watchdog now expects the attempt's first step."""
        with contextlib.suppress(SunspotError):
            with_deadline(REPORT_S, "recording an earlier hang", upload_dumps, self._run, attempt.number, self._on_hang)
        self.step = attempt.step
        self.heartbeat()
        self._attempt = attempt.number

    def heartbeat(self, step: int | None = None) -> None:
        """Record that this rank has made progress.

        `step` is the number of optimizer steps, or None after an evaluation batch or a round of `run_on_all_ranks`.
        """
        self._last_heartbeat = time.monotonic()
        if step is not None:
            self.step, self._started = step, True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which no heartbeat is expected.

        Use it for an operation that has its own time limit, such as a wait for storage.
        """
        self._paused = True
        try:
            with self._around_pauses():
                yield
        finally:
            self.heartbeat()
            self._paused = False

    def __enter__(self) -> Watchdog:
        self._last_heartbeat = time.monotonic()
        if self._timeout_s:
            self._file = tempfile.NamedTemporaryFile(
                prefix=stacks_prefix(self._run), dir=stacks_folder(), buffering=0, delete=False
            )
            self._path = Path(self._file.name)
            _cancel_timers_at_fork()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeout_s:
            self._closing.set()
            self._thread.join()
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        try:
            while not self._closing.wait(min(CHECK_EVERY_S, self._timeout_s / 10)):
                first = self._attempt and not self._started
                allowed_s = self._timeout_s + (FIRST_STEP_S if self._paused or first else 0)
                allowed_s += 0 if self._attempt else START_S
                # The timer ends after the other ranks have reported, and before they exit.
                self._set_timer(allowed_s + LINGER_S / 2)
                if not self._paused and time.monotonic() - self._last_heartbeat > allowed_s:
                    self._report_and_end()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _set_timer(self, after_s: float) -> None:
        """Make the timer write all stacks to the file and terminate the process after `after_s` seconds."""
        with contextlib.suppress(OSError):  # without room for the file, the process still exits
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(self._header()).encode() + b"\n")
        faulthandler.dump_traceback_later(after_s, exit=True, file=self._file)

    def _header(self) -> dict[str, Any]:
        return {
            "attempt": self._attempt,
            "rank": self._rank,
            "world_size": self._world_size,
            "step": self.step,
            "beat": time.time() - (time.monotonic() - self._last_heartbeat),
            "thread": self._training_thread,
        }

    def _report_and_end(self) -> None:
        self._set_timer(REPORT_S + LINGER_S + WAITING_RANK_S)  # in case this hangs, too
        linger_s = LINGER_S
        try:
            faulthandler.dump_traceback(self._file)
            hang = describe(self._header(), self._path.read_text(encoding="utf-8", errors="replace"), time.time())
            reports: list[Callable[[], Any]] = [
                lambda: print(f"{hang.detail}\n", end="", file=sys.stderr, flush=True),  # one write: others print too
                lambda: self._on_hang(hang, False),
                lambda: _record(self._run, hang, self._path),
            ]
            linger_s += WAITING_RANK_S if hang.waiting else 0
            wait([start_thread(report, "report") for report in reports])  # in threads, so that no report blocks another
        finally:
            if not self._closing.wait(linger_s):
                os._exit(1)


@functools.cache
def _cancel_timers_at_fork() -> None:
    """Cancel the timer before each fork.

    Otherwise, a child process would have the timer's lock but not the timer's thread, and would hang.
    """
    os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)


@contextlib.contextmanager
def ended_after(limit_s: float, until: str) -> Iterator[None]:
    """Context manager that terminates this process if the `with` block takes longer than `limit_s` seconds.

    The process prints its stacks on stderr before it exits. `until` describes what should have happened within this
    time. No watchdog may be active at the same time, because a process has only one timer that works without the GIL
    (`faulthandler`).
    """
    _cancel_timers_at_fork()

    def end() -> None:
        why = f"it waited more than {limit_s:.0f} s until {until}"
        print(f"this process exits, because {why}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(STDERR)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit_s + LINGER_S, exit=True, file=STDERR)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def describe(header: dict[str, Any], dump: str, now: float) -> Hang:
    """Describe where a rank hung, given the `dump` of its threads that `faulthandler` wrote."""
    parts = re.split(r"^(Current t|T)hread (0x[0-9a-f]+) \(most recent call first\):\n", dump, flags=re.MULTILINE)
    threads: dict[int, str] = {}
    for kind, number, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if kind == "T":  # the current thread is the watchdog's
            threads.setdefault(int(number, 16), text)
    training = threads.pop(header["thread"], "")
    stacks = [f"Training thread (most recent call first):\n{training}"]
    stacks += [f"Thread {number:#x} (most recent call first):\n{text}" for number, text in threads.items()]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', training, re.MULTILINE)
    innermost = next((file for file, *_ in frames if not WAIT_HELPERS.search(file)), "")
    waiting = any(part in innermost for part in COLLECTIVES)
    loading = LOADING in innermost
    does = "waits for other ranks" if waiting else "waits for rows of Ray Data" if loading else "is stuck"
    silent_s = max(0, now - header["beat"])
    starting = not header["attempt"]
    detail = f"rank {header['rank']}: {'not all ranks answered' if starting else 'no step'} for {silent_s:.0f} s"
    if starting:
        detail += ", while the group agreed on its start"
    if frames:
        file, line, function = next((frame for frame in frames if not INSTALLED.search(frame[0])), frames[0])
        detail += f"; {does} in {function} at {file}:{line}"
    if parts[0].startswith("Timeout"):
        detail += ", and blocks all its other threads"
    return Hang(
        rank=header["rank"],
        detail=detail,
        waiting=waiting,
        loading=loading,
        starting=starting,
        world_size=header["world_size"],
        attempt=header["attempt"],
        step=header["step"],
        time=now,
        stacks="".join(stacks)[:MAX_STACKS],
    )


def upload_dumps(run: Run, attempt: int, on_hang: OnHang) -> None:
    """Record the hangs of earlier attempts from the stacks on this node, and delete the files of old runs."""
    for path in stacks_folder().glob(f"{FILE_PREFIX}*"):
        with contextlib.suppress(OSError):  # the file belongs to another user
            if time.time() - path.lstat().st_mtime > STALE_FILE_S:
                path.unlink()
    for path in stacks_folder().glob(f"{stacks_prefix(run)}*"):
        # Storage may be gone, another worker may have been faster, or the file may not be a dump.
        with contextlib.suppress(SunspotError, OSError, ValueError, KeyError, TypeError, RecursionError):
            text, _, dump = _read_own(path).partition("\n")
            header = json.loads(text)
            if not 0 < header["attempt"] < attempt:
                continue
            if dump:
                hang = describe(header, dump, path.stat().st_mtime)
                _record(run, hang, path)
                if hang.attempt == attempt - 1:
                    on_hang(hang, True)
            path.unlink(missing_ok=True)


def _read_own(path: Path) -> str:
    """Read at most MAX_DUMP_BYTES of a dump. Raises `OSError` for a symlink and for another user's file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a regular file that belongs to this user")
        return file.read(MAX_DUMP_BYTES).decode(errors="replace")


def _record(run: Run, hang: Hang, path: Path) -> None:
    attempt = hang.attempt or newest_number(run)  # a group without a claim belongs to the attempt that it follows
    journal = Journal(run, "events", attempt)
    journal.append({**hang.record(), "attempt": attempt})
    journal.flush()
    path.unlink(missing_ok=True)


def stacks_folder() -> Path:
    """Return the folder for the stacks: shared memory if it is available, because the disk may be full."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def stacks_prefix(run: Run) -> str:
    """Return the prefix of the file names that a run uses in `stacks_folder()`."""
    return f"{FILE_PREFIX}{hashlib.sha256(run.location.encode()).hexdigest()[:12]}-"
