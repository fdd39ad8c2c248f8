"""Tests of local Ray sessions without starting Ray: the token, the folder, and errors at the start."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sunspot.errors import SettingsError, SunspotError
from sunspot.ray_session import MAX_SOCKET_PATH_BYTES, ray_session
from tests.harness.constants import SetConstants

ray = pytest.importorskip("ray")

SOCKET = "session_2026-11-28_16-44-23_288883_25507/sockets/plasma_store"
"""Path of a Ray 2.60 socket, below the folder of its sessions."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for temporary files with a short path, as on most machines."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> list[dict[str, Any]]:
    """Return a list of the arguments of each call of `ray.init`, with the token at that time."""
    calls: list[dict[str, Any]] = []
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        monkeypatch.setenv(name, "")  # restored at the end of the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: calls.append({**given, "token": os.environ.get("RAY_AUTH_TOKEN")}))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


@pytest.fixture
def port() -> Iterator[int]:
    """Listen at a port like Ray does, and return the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def begin() -> None:
    with ray_session():
        pass


def test_a_new_session_has_a_secret_token_and_a_private_folder(started: list[dict[str, Any]], temporary: Path) -> None:
    begin()
    [call] = started
    assert len(call["token"]) == 64
    assert call["_temp_dir"] == str(temporary / f"sunspot-{os.getuid()}" / "ray")
    assert (temporary / f"sunspot-{os.getuid()}").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_ray_token_or_folder_set_by_the_user_is_kept(
    name: str, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    begin()
    [call] = started
    assert call["token"] == ("mine" if name == "RAY_AUTH_TOKEN" else None)
    assert "_temp_dir" not in call


def test_a_session_on_a_cluster_gets_no_token_and_no_folder(
    port: int, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    begin()
    [call] = started
    assert call["token"] is None
    assert "_temp_dir" not in call


def test_socket_paths_fit_even_if_tmpdir_is_long(
    started: list[dict[str, Any]], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    begin()
    [call] = started
    assert len(os.fsencode(f"{call['_temp_dir']}/{SOCKET}")) <= MAX_SOCKET_PATH_BYTES


def test_a_session_folder_of_another_user_is_rejected(started: list[dict[str, Any]], temporary: Path) -> None:
    (temporary / f"sunspot-{os.getuid()}").symlink_to(temporary)
    with pytest.raises(SettingsError, match=f"sunspot-{os.getuid()} belongs to another user or is a link"):
        begin()
    assert started == []


def fail_with(error: Exception) -> Any:
    def init(**_: object) -> None:
        raise error

    return init


def refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the error message if Ray does not start a session for this reason."""
    monkeypatch.setattr(ray, "init", fail_with(error))
    with pytest.raises(SunspotError) as raised:
        begin()
    return str(raised.value).removeprefix("Ray cannot be started on this machine: ")


def test_the_error_for_a_slow_start_of_ray_mentions_the_busy_machine_and_the_log_folder(
    started: list[dict[str, Any]], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "The current node timed out during startup"
    logs = f"{temporary}/sunspot-{os.getuid()}/ray/session_latest/logs"
    assert refused(Exception(f"{said}."), monkeypatch) == (
        f"{said}; try again when the machine is less busy; Ray's logs are in {logs}"
    )


@pytest.mark.parametrize(
    ("number", "name", "fix"),
    [
        (errno.ENOSPC, "TMPDIR/a", "free some space, or set TMPDIR to another folder"),
        (errno.EROFS, "/home/me/.ray", "let this user write there, or set HOME to another folder"),
        (errno.EACCES, "/opt/a", "let this user write there"),
        (errno.EMFILE, "TMPDIR/a", "raise the limit of open files, for example with `ulimit -n 65536`"),
    ],
)
def test_a_system_error_is_reported_with_its_fix(
    number: int,
    name: str,
    fix: str,
    started: list[dict[str, Any]],
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = name.replace("TMPDIR", str(temporary))
    error = RuntimeError("Ray's own words")
    error.__cause__ = OSError(number, os.strerror(number), file)
    assert refused(error, monkeypatch) == f"Ray's own words; {fix}"


def test_a_ray_tmpdir_that_is_too_long_is_reported(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/long")
    said = "validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long/ray"
    assert refused(Exception(said), monkeypatch) == (
        f"{said}; set RAY_TMPDIR to a folder with a shorter path, or unset it"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize(("number", "fix"), [(errno.EROFS, "let this user write there"), (errno.ENOSPC, "free some")])
def test_the_error_after_a_timeout_names_unwritable_shared_memory_as_the_cause(
    number: int, fix: str, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", fail_with(OSError(number, os.strerror(number))))
    told = refused(Exception("The current node timed out during startup."), monkeypatch)
    assert told.startswith(f"/dev/shm cannot be written ({os.strerror(number)}), but Ray needs it; {fix}")


# ------------------------------------------------------------------------------------------------------- at RAY_ADDRESS


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "nowhere.invalid:6379", "127.0.0.1:99999"]
)
def test_an_address_where_nothing_listens_is_reported_with_the_fix(
    address: str, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants("sunspot.ray_session.start_errors", REACH_WITHIN_S=0, TRY_EVERY_S=0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SunspotError, match=f"^Ray cannot be reached at RAY_ADDRESS={re.escape(address)}: ") as raised:
        begin()
    assert "correct the address, start Ray there, or unset RAY_ADDRESS to start" in str(raised.value)
    assert started == []


def test_a_session_waits_for_a_head_that_starts_later(
    port: int,
    started: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    set_constants: SetConstants,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connect, tries = socket.create_connection, []

    def refuse_first(*words: Any) -> socket.socket:
        tries.append(words)
        if len(tries) == 1:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return connect(*words)

    monkeypatch.setattr(socket, "create_connection", refuse_first)
    set_constants("sunspot.ray_session.start_errors", TRY_EVERY_S=0)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with caplog.at_level(logging.INFO, "sunspot"):
        begin()
    assert len(started) == 1
    assert f"waiting up to 60 s for Ray at RAY_ADDRESS=127.0.0.1:{port}: " in caplog.text


def test_a_cluster_error_includes_the_address(
    port: int, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setattr(ray, "init", fail_with(Exception("The request timed out.")))
    with pytest.raises(SunspotError) as raised:
        begin()
    assert str(raised.value) == f"Ray cannot be reached at RAY_ADDRESS=127.0.0.1:{port}: The request timed out."


def test_a_new_session_starts_if_ray_address_is_local(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    begin()
    [call] = started
    assert call["address"] == "local"
    assert len(call["token"]) == 64
