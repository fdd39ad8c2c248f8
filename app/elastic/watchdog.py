"""A rank that takes no step any more says where it stands, and ends itself, so that Ray starts the group again.

A rank that hangs makes all others wait for it in the next collective, so all of them find out within moments; each
records its own stacks. A thread of this process watches, which a training thread can keep from running: one that holds
the interpreter's lock in C. For that case a timer without Python (`faulthandler`) is set ahead again and again. When it
runs out, it ends the process, and the stacks lie in a file in this node's memory, which the next worker on the node
carries to storage. Two ranks leave no stacks: one that is stopped (SIGSTOP), and one whose node is lost too. The
others' still tell (`layout.hangs.suspects`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from app.errors import SunspotError
from app.run import Run
from app.run.attempts import Attempt
from app.run.failures import INSTALLED
from app.run.history import Journal
from app.run.incidents import HUNG

FIRST_STEP_S = 600
"""Allowed besides the timeout until the first step, which waits for imports, compilation, and Ray Data's first rows."""

CHECK_EVERY_S = 1.0
"""Seconds between two looks at the last heartbeat."""

REPORT_S = 20
"""The most that storage and the control channel are waited for: either may be what is away."""

LINGER_S = 5
"""Between a rank's report and its end, which ends the others too: they hang since the same step, and report now."""

STACKS_CHARACTERS = 20_000
"""A deep recursion, or many threads, would make the journal heavy; the training thread comes first."""

COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/graph.py", "/ray/train/", "/agreement.py")
"""Where Python stands that waits for other ranks: in DDP, gradients are exchanged inside of backward()."""

BENEATH = re.compile(r"/ray/_private/|/threading\.py$")
"""Where Python stands that waits at all."""


class Watchdog:
    """Ends this process when the thread that made it has taken no step for `timeout_s` seconds (0: never).

    Before that, an event goes to this rank's own journal, and `on_hang` gets its text. `on_hang` also hears of a rank
    of the attempt before that could not report itself, and whose stacks were found on this node.
    """

    def __init__(self, run: Run, attempt: Attempt, rank: int, timeout_s: float, on_hang: Callable[[str], Any]) -> None:
        self._run, self._attempt, self._rank = run, attempt.number, rank
        self._timeout_s, self._on_hang = timeout_s, on_hang
        self._training_thread = threading.get_ident()
        self._step, self._last_heartbeat = attempt.step, time.monotonic()
        self._started = self._paused = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._step

    def heartbeat(self, step: int | None = None) -> None:
        """Progress was made: `step` optimizer steps are taken, or (None) some rows were evaluated."""
        self._last_heartbeat = time.monotonic()
        if step is not None:
            self._step, self._started = step, True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For what has limits of its own, such as storage: no heartbeat is expected meanwhile."""
        self._paused = True
        try:
            yield
        finally:
            self.heartbeat()
            self._paused = False

    def __enter__(self) -> Watchdog:
        carry_dumps(self._run, self._attempt, self._on_hang)
        self._last_heartbeat = time.monotonic()
        if self._timeout_s:
            path = _folder() / f"{_prefix(self._run)}{self._attempt:04d}-{self._rank:04d}"
            self._file = path.open("wb+", buffering=0)
            # A forked child has the timer's lock but not its thread, and would wait for it at its end.
            os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timeout_s:
            self._over.set()
            self._thread.join()  # which does not return once it has begun to report
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)

    def _watch(self) -> None:
        try:
            while not self._over.wait(min(CHECK_EVERY_S, self._timeout_s / 10)):
                allowed_s = self._timeout_s + (FIRST_STEP_S if self._paused or not self._started else 0)
                # When the other ranks have reported, and before they end.
                self._set_timer(allowed_s + LINGER_S / 2)
                if not self._paused and time.monotonic() - self._last_heartbeat > allowed_s:
                    self._report_and_end()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _set_timer(self, after_s: float) -> None:
        """Have all stacks written to the file, and the process ended, `after_s` from now."""
        with contextlib.suppress(OSError):  # no memory for it: the process ends all the same
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(self._about()).encode() + b"\n")
        faulthandler.dump_traceback_later(after_s, exit=True, file=self._file)

    def _about(self) -> dict[str, Any]:
        return {
            "attempt": self._attempt,
            "rank": self._rank,
            "step": self._step,
            "beat": time.time() - (time.monotonic() - self._last_heartbeat),
            "thread": self._training_thread,
        }

    def _report_and_end(self) -> None:
        self._set_timer(REPORT_S + LINGER_S)  # whatever hangs below
        try:
            faulthandler.dump_traceback(self._file)
            path = Path(self._file.name)
            event = describe(self._about(), path.read_text(errors="replace"), time.time())
            reports: list[Callable[[], Any]] = [
                lambda: print(f"{event['detail']}\n", end="", file=sys.stderr, flush=True),  # at once: others print too
                lambda: self._on_hang(event["detail"]),
                lambda: _record(self._run, event, path),
            ]
            threads = [threading.Thread(target=report, daemon=True) for report in reports]  # none waits for another
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            time.sleep(LINGER_S)
            os._exit(1)


def describe(about: dict[str, Any], dump: str, now: float) -> dict[str, Any]:
    """The event of a rank that hung, from what `faulthandler` wrote of all its threads."""
    parts = re.split(r"^(Current t|T)hread (0x[0-9a-f]+) \(most recent call first\):\n", dump, flags=re.MULTILINE)
    threads: dict[int, str] = {}
    for kind, number, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if kind == "T":  # the current one is the watchdog
            threads.setdefault(int(number, 16), text)
    training = threads.pop(about["thread"], "")
    stacks = [f"Training thread (most recent call first):\n{training}"]
    stacks += [f"Thread {number:#x} (most recent call first):\n{text}" for number, text in threads.items()]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', training, re.MULTILINE)
    waiting = any(part in next((file for file, *_ in frames if not BENEATH.search(file)), "") for part in COLLECTIVES)
    detail = f"rank {about['rank']}: no step for {now - about['beat']:.0f} s"
    if frames:
        file, line, function = next((frame for frame in frames if not INSTALLED.search(frame[0])), frames[0])
        detail += f"; {'waits for other ranks' if waiting else 'stands'} in {function} at {file}:{line}"
    if parts[0].startswith("Timeout"):
        detail += ", and kept all its other threads from running"
    return {
        "attempt": about["attempt"],
        "step": about["step"],
        "time": now,
        "event": HUNG,
        "rank": about["rank"],
        "detail": detail,
        "waiting": waiting,
        "stacks": "".join(stacks)[:STACKS_CHARACTERS],
    }


def carry_dumps(run: Run, attempt: int, on_hang: Callable[[str], Any]) -> None:
    """Bring to storage what ranks of earlier attempts than this one left on this node."""
    for path in _folder().glob(f"{_prefix(run)}*"):
        since = attempt - int(path.name.split("-")[-2])
        if since <= 0:
            continue
        with contextlib.suppress(SunspotError, OSError, ValueError):  # storage is away, or another worker was faster
            about, _, dump = path.read_text(errors="replace").partition("\n")
            if dump:
                event = describe(json.loads(about), dump, path.stat().st_mtime)
                _record(run, event, path)
                if since == 1:
                    on_hang(event["detail"])
            path.unlink(missing_ok=True)


def _record(run: Run, event: dict[str, Any], path: Path) -> None:
    journal = Journal(run, "events", event["attempt"], event["rank"])
    journal.append(event)
    journal.flush()
    path.unlink(missing_ok=True)


def _folder() -> Path:
    """Memory, where there is some: it is there when the disk is full."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _prefix(run: Run) -> str:
    return f"sunspot-hang-{hashlib.sha256(run.location.encode()).hexdigest()[:12]}-"
