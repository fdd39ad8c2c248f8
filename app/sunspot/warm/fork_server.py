"""Runs a fork server on this node: starts it once training has run for a while, and ends it with the run."""

import contextlib
import json
import logging
import os
import secrets
import select
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Event

from sunspot.background import start_thread
from sunspot.cgroup import memory_left
from sunspot.formatting import as_bytes
from sunspot.ray_internals.workers import NODE
from sunspot.warm import client

log = logging.getLogger(__name__)

IMPORTS_S = 300.0
"""The longest that a server may take to import what a worker had imported."""

LINGER_S = 60.0
"""How long a server stays when no worker is left: until then Ray has mostly started the next group."""

ROOM = 1_000_000_000
"""Bytes of memory left for a server to begin: half of it is what one was seen to take, the rest stays for training."""

RUNTIME_ENV = {"env_vars", "working_dir", "py_modules", "excludes", "config", "worker_process_setup_hook"}
"""The fields of a job's runtime environment that leave its workers the Python of the driver."""

NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Lets a server import pyarrow, whose allocator would begin a thread; in what is forked it has none either way."""

BEGIN = """
import sys
plain_path = sys.path[1:]
sys.path.insert(0, sys.argv[1])
from sunspot.warm.server import main
main(plain_path)
"""


def new_key() -> str:
    """Return a key that tells the servers of one driver's run from any others."""
    return secrets.token_hex(8)


def why_unsupported(runtime_env: Collection[str]) -> str:
    """Say why workers cannot be forked, given the fields of the job's runtime environment; empty if they can."""
    if not hasattr(os, "pidfd_open"):
        return "this system has no pidfd_open, as Linux has since 5.3"
    others = ", ".join(sorted(set(runtime_env) - RUNTIME_ENV))
    return f"the job's runtime environment has {others}" if others else ""


def executable(key: str) -> str:
    """Return the command line that Ray is to run in place of Python."""
    return shlex.join([sys.executable, "-I", "-S", client.__file__, key, NODE])


@contextlib.contextmanager
def fork_server_running(key: str, node: str, raylet: int, after_s: float) -> Iterator[None]:
    """Have a server on this node once the context has lasted for `after_s`; a context that ends well ends it.

    `raylet` is the process without which there are no workers.
    """
    ending = Event()

    def begin() -> None:
        if ending.wait(after_s) or serves(key, node):
            return
        modules = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None)]
        obstacle = begin_server(key, node, raylet, modules)
        if obstacle:
            log.warning(f"no warm restarts on node {node[:12]}: {obstacle}")
        else:
            print("warm restarts: the next workers of this node will be forked")

    start_thread(begin, "warm")
    try:
        yield
        end_server(key, node)
    finally:
        ending.set()


def serves(key: str, node: str) -> bool:
    """Return whether there is a server."""
    with contextlib.suppress(OSError):
        client.connect(key, node).close()
        return True
    return False


def begin_server(key: str, node: str, raylet: int, modules: list[str], linger_s: float = LINGER_S) -> str:
    """Begin a server that imports these modules, and wait until it serves; returns why it does not.

    It stays for `linger_s` seconds beyond this process and its workers.
    """
    if (left := memory_left()) is not None and left < ROOM:
        return f"{as_bytes(left)} of memory is left there, of {as_bytes(ROOM)} that it wants"
    order = {"key": key, "node": node, "raylet": raylet, "linger_s": linger_s, "path": sys.path, "modules": modules}
    command = [sys.executable, "-c", BEGIN, str(Path(client.__file__).parents[2])]
    environment = {**os.environ, **NO_THREADS}
    stdin, held = os.pipe()  # what is written to stays open as long as this process lives
    try:
        with (
            subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=subprocess.PIPE, start_new_session=True
            ) as server,
            open(held, "wb", closefd=False) as pipe,
        ):
            assert server.stdout
            os.close(stdin)
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()
            answers = select.poll()  # `select` knows no descriptor above 1,023, and a rank of hundreds has more open
            answers.register(server.stdout, select.POLLIN)
            if answers.poll(IMPORTS_S * 1000) and (line := server.stdout.readline()):
                return str(json.loads(line)["obstacle"])
    except (OSError, ValueError) as error:
        log.warning(f"no server of warm restarts: {error}")
    os.close(held)
    return "its process has not begun to serve"


def end_server(key: str, node: str) -> None:
    """Have the server end as soon as its workers have."""
    with contextlib.suppress(OSError), client.connect(key, node) as connection:
        client.send(connection, {})
