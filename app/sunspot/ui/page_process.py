"""Renders run pages in a separate process, so that an expensive page does not slow down other pages.

Each limit in `sunspot.run.size_limits` applies to one kind of data. In addition, the total memory and time of the
separate process are limited. If the process exceeds a limit, the server starts a new process for the next page.
"""

import logging
import multiprocessing.connection
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from sunspot.errors import SunspotError, shorten
from sunspot.log import print_logs
from sunspot.machine.cgroup import memory_left
from sunspot.storage import open_storage
from sunspot.storage.limits import ProgressDeadline
from sunspot.ui.pages import PageReader, RunPage
from sunspot.ui.read_only import ReadOnlyStorage
from sunspot.ui.refreshing import DEADLINE_S

log = logging.getLogger("sunspot.ui.page_process")

LEAST_BYTES, MOST_BYTES = 256 << 20, 2 << 30
"""Bounds of the process's memory limit, which is half of the available memory. The page of a run with 40 MB of
history takes 160 MiB, and a container of 512 MiB has room for the lower bound and the server."""

READ_WITHIN_S = 120.0
"""Longest time in seconds to render a page. A run with 40 MB of history takes 3 to 9 s."""

STACK_BYTES = 1 << 20
"""Stack size of a thread. The default of 8 MiB would count as memory for each of up to 16 threads."""


class PageProcess:
    """Renders pages in a separate process, one at a time."""

    def __init__(self, storage_path: str) -> None:
        self._storage_path = storage_path
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def read(self, read: PageReader, names: Sequence[str]) -> RunPage:
        """Run `read` in the process, and return the page. Raises `SunspotError` if it fails."""
        with self._lock:
            process = self._process or self._start()
            try:
                self._pipe.send((read, names))
                if not self._pipe.poll(READ_WITHIN_S):
                    raise SunspotError(f"{_subject(names)}: rendering took more than {READ_WITHIN_S:.0f} s")
                outcome, ends = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise SunspotError(f"{_subject(names)}: {self._describe_end(process)}") from error
            except BaseException:
                self.close()
                raise
            if ends:
                self.close()
        if isinstance(outcome, SunspotError):
            raise outcome
        page: RunPage = outcome
        return page

    def close(self) -> None:
        """Stop the process. The next request starts a new one."""
        process, self._process = self._process, None
        if process:
            process.kill()
            process.wait()
            self._pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._limit = min(max((memory_left() or 2 * MOST_BYTES) // 2, LEAST_BYTES), MOST_BYTES)
        self._pipe, theirs = multiprocessing.connection.Pipe()
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", __name__, str(number), str(self._limit), self._storage_path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RUST_BACKTRACE": "0"}
        # The process has its own session, so that Ctrl-C reaches only the server. It ends when the pipe is closed.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[number], env=environment, start_new_session=True
        )
        theirs.close()
        return self._process

    def _describe_end(self, process: subprocess.Popen[bytes]) -> str:
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        self.close()
        if code in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
            return f"making it takes more than {self._limit >> 20} MiB of memory"
        return f"the process that made it ended with {code}"


def _subject(names: Sequence[str]) -> str:
    return f"the page of {' and '.join(names)} cannot be shown"


OUT_OF_MEMORY = 77
"""The process's exit code if it runs out of memory."""


def main(pipe: int, limit: int, storage_path: str) -> None:
    """Render each page that the server requests, and return when the server exits."""
    print_logs("stderr")
    threading.stack_size(STACK_BYTES)
    with suppress(ValueError, OSError):  # not on macOS
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    storage = ReadOnlyStorage(open_storage(storage_path), limit // 4)
    with multiprocessing.connection.Connection(pipe) as server, suppress(EOFError, OSError):
        while True:
            server.send(_read(storage, *server.recv()))


def _read(storage: ReadOnlyStorage, read: PageReader, names: Sequence[str]) -> tuple[RunPage | SunspotError, bool]:
    """Return the page or an error, and whether the process must exit because some of its threads are still running."""
    what = f"reading {' and '.join(names)}"
    deadline = ProgressDeadline(DEADLINE_S, what)
    try:
        return deadline.run(lambda: read(storage, names)), False
    except SunspotError as error:
        return error, deadline.passed
    except BaseException as error:
        # If memory runs out, Pydantic panics, which is not an Exception.
        if isinstance(error, MemoryError) or not isinstance(error, Exception) or "start new thread" in str(error):
            os._exit(OUT_OF_MEMORY)
        log.exception("%s failed", what)
        return SunspotError(shorten(error)), False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
