"""Starts a worker as a fork of the node's server, or, without one, as a Python of its own.

Ray runs this file in Python's place, so it imports little, and nothing of ours. This process stands for the worker: it
passes signals on to it, ends as it ends, and the worker ends with it.
"""

import array
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

ANSWER_S = 5.0
"""A server that does not answer for so long is left alone."""

LOOK_EVERY_S = 1.0
"""Between two looks whether the parent lives."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a connection."""


def main() -> None:
    """Run `client.py KEY OPTION SCRIPT ARGUMENTS...`: the script as a worker, forked or not.

    OPTION begins the argument in which Ray tells a worker its node.
    """
    key, option, *command = sys.argv[1:]
    ray = os.getppid()
    node = next((argument.removeprefix(option) for argument in command if argument.startswith(option)), "")
    ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    request = {
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": ignored,
    }
    try:
        connection = connect(key, node)
        send(connection, request, [0, 1, 2])
        worker = int(receive(connection)[0]["process"])
        for number in set(PASSED_ON) - set(ignored):
            signal.signal(number, lambda number, _: os.kill(worker, number))
        send(connection, {})  # only now does the worker begin
    except (OSError, ValueError, KeyError):
        os.execv(sys.executable, [sys.executable, *command])
    while not select.select([connection], [], [], LOOK_EVERY_S)[0]:
        if os.getppid() != ray:
            os._exit(1)  # Ray's process on the node has ended: no worker may outlive it
    try:
        code = int(receive(connection)[0]["code"])
    except (OSError, ValueError, KeyError):
        code = 1  # the server ended before the worker
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def address(key: str, node: str) -> str:
    """Return where the server of a node listens: an abstract address of Linux, which leaves no file behind."""
    return f"\0sunspot-warm-{key}-{node}"


def connect(key: str, node: str) -> socket.socket:
    """Connect to the node's server; raises `OSError` without one of this user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_S)
    connection.connect(address(key, node))
    if peer_of(connection)[1] != os.getuid():
        raise PermissionError("another user's")
    return connection


def peer_of(connection: socket.socket) -> tuple[int, ...]:
    """Return the process, user and group at the other end."""
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))


def send(connection: socket.socket, message: dict[str, Any], files: list[int] | None = None) -> None:
    """Send a message, and the descriptors of open files with it."""
    content = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([LENGTH.pack(len(content))], rights)
    connection.sendall(content)


def receive(connection: socket.socket, most_files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive the next message and the descriptors with it; raises `OSError` at the end of the connection."""
    head, files, *_ = socket.recv_fds(connection, LENGTH.size, most_files)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 1
    content = bytearray()
    while len(content) < size:
        if not (chunk := connection.recv(size - len(content))):
            raise ConnectionError("the other end is closed")
        content += chunk
    message: dict[str, Any] = json.loads(content)
    return message, files


if __name__ == "__main__":
    main()
