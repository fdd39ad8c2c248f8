"""Local Ray sessions, without starting Ray: their token, their folder, and the errors of starting one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sunspot.errors import SettingsError, SunspotError
from sunspot.ray_session import MAX_SOCKET_PATH_BYTES, ray_session

ray = pytest.importorskip("ray")

SOCKET = "session_2026-11-28_16-44-23_288883_25507/sockets/plasma_store"
"""Path of a socket of Ray 2.60, below the folder of its sessions."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder for temporary files with a short path, as on most machines."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> list[dict[str, Any]]:
    """Record the arguments of each call of `ray.init`, and the token at that time."""
    calls: list[dict[str, Any]] = []
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"):
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: calls.append({**given, "token": os.environ.get("RAY_AUTH_TOKEN")}))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


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
def test_a_users_own_token_and_folder_are_kept(
    name: str, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    begin()
    [call] = started
    assert call["token"] == ("mine" if name == "RAY_AUTH_TOKEN" else None)
    assert "_temp_dir" not in call


def test_a_session_on_a_cluster_gets_neither_a_token_nor_a_folder(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    begin()
    [call] = started
    assert call["token"] is None
    assert "_temp_dir" not in call


def test_a_long_folder_for_temporary_files_leaves_room_for_sockets(
    started: list[dict[str, Any]], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    begin()
    [call] = started
    assert len(os.fsencode(f"{call['_temp_dir']}/{SOCKET}")) <= MAX_SOCKET_PATH_BYTES


def test_another_users_folder_is_refused(started: list[dict[str, Any]], temporary: Path) -> None:
    (temporary / f"sunspot-{os.getuid()}").symlink_to(temporary)
    with pytest.raises(SettingsError, match=f"sunspot-{os.getuid()} belongs to another user, or is a link"):
        begin()
    assert started == []


@pytest.mark.parametrize(
    ("address", "fault", "told"),
    [
        (
            "",
            "The current node timed out during startup.",
            "started on this machine; try again when it has less to do: ",
        ),
        ("", "[Errno 30] Read-only file system: '/home/me/.ray'", "started on this machine: [Errno 30] Read-only"),
        ("head:6379", "The request timed out.", "reached at RAY_ADDRESS=head:6379: The request"),
    ],
)
def test_an_error_of_starting_ray_is_one_message(
    address: str, fault: str, told: str, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise Exception(fault)

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(SunspotError) as raised:
        begin()
    assert str(raised.value).startswith(f"Ray cannot be {told}")
    assert fault in str(raised.value)
