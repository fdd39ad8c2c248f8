"""Ends a rank that takes no more steps, after recording its stacks, so that Ray restarts the worker group.

A rank that hangs makes all others wait for it in the next collective, so all watchdogs act within moments, and each
records the stacks of its own rank. A watchdog is a thread, which cannot run while the training thread holds the
interpreter's lock in C. For that case it keeps postponing a timer that needs no Python (`faulthandler`): when that runs
out, it ends the process and leaves the stacks in a file in the node's memory, which the next worker on the node
uploads. Two ranks leave no stacks: one that is stopped (SIGSTOP), and one whose node is lost too; those of the others
still show which it was (`run.failures.find_suspects`).
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
"""Added to the timeout of the first step, which waits for imports, compilation, and Ray Data's first rows."""

START_S = 10
"""Added to the timeout until an attempt is claimed: ranks that wait tell each other every ROUND_S that they live
(parallel/collectives.py)."""

CHECK_EVERY_S = 1.0
"""Seconds between two checks of the last heartbeat."""

REPORT_S = 20
"""Limit on the wait for storage and the control channel: either may be what is gone."""

LINGER_S = 5
"""Seconds between a rank's report and its exit: the others have hung since the same step, and report at the same
time."""

SPARED_S = 10
"""How much longer a rank lives that waits for others: the end of the one it waits for ends its group, and it may go
on in the next (train/survivor.py)."""

STDERR = 2
"""Descriptor of the process's own stderr, even if `sys.stderr` is another stream."""

FILES = "sunspot-hang-"
"""How the name of the file of each process begins."""

FORGOTTEN_S = 86_400
"""The age of a file at which nobody asks for it any more: its run was killed, and has not begun again here."""

MAX_STACKS = 20_000
"""Characters of stacks kept in an event, so that the journal stays small; the training thread comes first."""

MAX_DUMP_BYTES = 1 << 20
"""Largest number of bytes that are read of a dump. `faulthandler` writes at most 100 frames of each of 100 threads."""

COLLECTIVES = (
    "/torch/distributed/",
    "/torch/nn/parallel/",
    "/torch/autograd/graph.py",
    "/ray/train/",
    "/sunspot/parallel/",
)
"""Parts of the paths of code that waits for other ranks; DDP exchanges gradients inside backward()."""

LOADING = "/ray/data/"
"""Part of the paths of code that waits for rows from Ray Data."""

BENEATH = re.compile(r"/ray/_private/|/(threading|queue)\.py$")
"""The paths of code that waits for others' sake: what called it says for what."""

OnHang = Callable[[Hang, bool], Any]
"""Takes what is known of a rank that hung, and whether that comes late, as the rank is of the attempt before."""


class Watchdog:
    """Ends this process when the thread that made it has taken no step for `timeout_s` seconds (0: never).

    Before that, it records an event in this rank's journal and calls `on_hang`; it also does so for a rank of the
    attempt before that left only its stacks on this node. Until the group has claimed an attempt, when no rank takes
    steps yet, hearing from the others counts as one.
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
        """`around_pauses` makes a context in which the watchdog is paused, each time that no heartbeat is expected."""
        self._around_pauses = around_pauses
        self._run, self._rank, self._world_size = run, rank, world_size
        self._timeout_s, self._on_hang = timeout_s, on_hang
        self._training_thread = threading.get_ident()
        self._attempt = self.step = 0
        "Its number, once it is claimed, and the optimizer steps taken."
        self._last_heartbeat = time.monotonic()
        self._started = self._paused = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def claimed(self, attempt: Attempt) -> None:
        """Record the attempt that the group has claimed: from here on, its first step is expected."""
        with contextlib.suppress(SunspotError):
            with_deadline(REPORT_S, "recording an earlier hang", upload_dumps, self._run, attempt.number, self._on_hang)
        self.step = attempt.step
        self.heartbeat()
        self._attempt = attempt.number

    def heartbeat(self, step: int | None = None) -> None:
        """Record progress: the number of optimizer steps taken, or None for rows evaluated or ranks heard from."""
        self._last_heartbeat = time.monotonic()
        if step is not None:
            self.step, self._started = step, True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Expect no heartbeat during what has a limit of its own, such as a wait for storage."""
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
                prefix=_prefix(self._run), dir=_folder(), buffering=0, delete=False
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
                # After the other ranks have reported, and before they exit.
                self._set_timer(allowed_s + LINGER_S / 2)
                if not self._paused and time.monotonic() - self._last_heartbeat > allowed_s:
                    self._report_and_end()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _set_timer(self, after_s: float) -> None:
        """Write all stacks to the file and end the process, `after_s` from now."""
        with contextlib.suppress(OSError):  # no room for it: the process ends all the same
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
        self._set_timer(REPORT_S + LINGER_S + SPARED_S)  # should this hang, too
        lives_s = LINGER_S
        try:
            faulthandler.dump_traceback(self._file)
            hang = describe(self._header(), self._path.read_text(encoding="utf-8", errors="replace"), time.time())
            reports: list[Callable[[], Any]] = [
                lambda: print(f"{hang.detail}\n", end="", file=sys.stderr, flush=True),  # at once: others print too
                lambda: self._on_hang(hang, False),
                lambda: _record(self._run, hang, self._path),
            ]
            lives_s += SPARED_S if hang.waiting else 0
            wait([start_thread(report, "report") for report in reports])  # so that none waits for another
        finally:
            if not self._closing.wait(lives_s):
                os._exit(1)


@functools.cache
def _cancel_timers_at_fork() -> None:
    """Cancel the timer before each fork: a child would have the timer's lock without its thread, and hang."""
    os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)


@contextlib.contextmanager
def ended_after(limit_s: float, until: str) -> Iterator[None]:
    """End this process, with its stacks on stderr, if the context lasts for `limit_s` seconds.

    The message says that the process waited `until` something happened. No watchdog may be active meanwhile, because a
    process has only one timer that works without the GIL (`faulthandler`).
    """
    _cancel_timers_at_fork()

    def end() -> None:
        print(f"this process ends itself, because it waited {limit_s:.0f} s until {until}", file=sys.stderr, flush=True)
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
    """Describe where a rank hung, from the `dump` that `faulthandler` wrote of all its threads."""
    parts = re.split(r"^(Current t|T)hread (0x[0-9a-f]+) \(most recent call first\):\n", dump, flags=re.MULTILINE)
    threads: dict[int, str] = {}
    for kind, number, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if kind == "T":  # the current one is the watchdog
            threads.setdefault(int(number, 16), text)
    training = threads.pop(header["thread"], "")
    stacks = [f"Training thread (most recent call first):\n{training}"]
    stacks += [f"Thread {number:#x} (most recent call first):\n{text}" for number, text in threads.items()]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', training, re.MULTILINE)
    innermost = next((file for file, *_ in frames if not BENEATH.search(file)), "")
    waiting, loading = any(part in innermost for part in COLLECTIVES), LOADING in innermost
    does = "waits for other ranks" if waiting else "waits for rows of Ray Data" if loading else "stands"
    silent_s, starting = max(0, now - header["beat"]), not header["attempt"]
    detail = f"rank {header['rank']}: {'not all ranks answered' if starting else 'no step'} for {silent_s:.0f} s"
    if starting:
        detail += ", while the group agreed on its start"
    if frames:
        file, line, function = next((frame for frame in frames if not INSTALLED.search(frame[0])), frames[0])
        detail += f"; {does} in {function} at {file}:{line}"
    if parts[0].startswith("Timeout"):
        detail += ", and kept all its other threads from running"
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
    """Record the hangs whose stacks ranks of earlier attempts left on this node; forget those of runs long gone."""
    for path in _folder().glob(f"{FILES}*"):
        with contextlib.suppress(OSError):  # another user's
            if time.time() - path.lstat().st_mtime > FORGOTTEN_S:
                path.unlink()
    for path in _folder().glob(f"{_prefix(run)}*"):
        # Storage is gone, another worker was faster, or it is no dump of ours.
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
    """Read at most MAX_DUMP_BYTES of a dump. Raises `OSError` for a link and for a file of another user."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(f"{path} is no file of this user's")
        return file.read(MAX_DUMP_BYTES).decode(errors="replace")


def _record(run: Run, hang: Hang, path: Path) -> None:
    attempt = hang.attempt or newest_number(run)  # of a group that has claimed none yet: the one that it follows
    journal = Journal(run, "events", attempt)
    journal.append({**hang.record(), "attempt": attempt})
    journal.flush()
    path.unlink(missing_ok=True)


def _folder() -> Path:
    """Return where the stacks are kept: in shared memory where there is some, as the disk may be full."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _prefix(run: Run) -> str:
    return f"{FILES}{hashlib.sha256(run.location.encode()).hexdigest()[:12]}-"
