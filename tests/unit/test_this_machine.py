"""Tests that a run that can never start on this machine is rejected before anything is started or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sunspot.ray_session
from sunspot.errors import SettingsError
from sunspot.settings import load_settings
from sunspot.train import this_machine
from sunspot.train.driver import train_run
from sunspot.train.this_machine import refuse_impossible, refuse_lack


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has two cores, no GPU, and memory for a hundred workers."""
    monkeypatch.setattr(sunspot.ray_session, "starts_own_session", lambda: True)  # other tests may have started Ray
    monkeypatch.setattr(this_machine, "cores_here", lambda: 2)
    monkeypatch.setattr(this_machine, "memory_left", lambda: 30_000_000_000)
    monkeypatch.setattr(this_machine.torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"USE_GPU": "true"},
            "SUNSPOT_USE_GPU=true: the run needs 2 GPU for 2 workers, but this machine has 0 that torch sees; set it "
            "to auto",
        ),
        (
            {"RESOURCES_PER_WORKER": '{"CPU": 4}'},
            'SUNSPOT_RESOURCES_PER_WORKER={"CPU": 4}: the run needs 8 CPU for 2 workers, but this machine has 2; '
            "lower it",
        ),
        (
            {"RESOURCES_PER_WORKER": '{"CPU": 2}'},
            'SUNSPOT_RESOURCES_PER_WORKER={"CPU": 2}: the run needs 4 CPU for 2 workers, but this machine has 2; lower '
            "it, or set SUNSPOT_NUM_WORKERS to 1",
        ),
        (
            {"NUM_WORKERS": "64"},
            "SUNSPOT_NUM_WORKERS=64: 64 workers would be too many for this machine, which has 2 cores and 30 GB of "
            "free memory (a worker needs at least 300 MB); set it to 8 or less, or start them anyway with "
            "SUNSPOT_ACCEPT=64-workers",
        ),
    ],
)
def test_the_error_for_a_run_that_can_never_start_includes_the_fix(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        train_run(load_settings({**settings, "STORAGE_PATH": str(tmp_path)}))
    assert not (tmp_path / "mnist" / "run.json").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"NUM_WORKERS": "8"},
        {"NUM_WORKERS": "64", "ACCEPT": "order-of-rows,64-workers"},
        {"NUM_WORKERS": "2..64", "RESOURCES_PER_WORKER": '{"CPU": 1}'},  # only two workers start
        {"NUM_WORKERS": "1", "RESOURCES_PER_WORKER": '{"CPU": 2, "accelerator_type:A100": 0.1}'},
        {"NUM_WORKERS": "6", "RESOURCES_PER_WORKER": '{"CPU": 0.3333}'},
    ],
)
def test_a_run_that_can_start_is_accepted(settings: dict[str, str]) -> None:
    refuse_impossible(load_settings(settings))


@pytest.mark.parametrize(
    ("left", "fix"),
    [(1_000_000_000, "set it to 3 or less, or start"), (200_000_000, "free some memory, or start")],
)
def test_more_workers_than_fit_in_memory_are_rejected(left: int, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "memory_left", lambda: left)
    with pytest.raises(SettingsError, match=fix):
        refuse_impossible(load_settings({"NUM_WORKERS": "4"}))


def test_the_number_of_cores_limits_the_workers_if_the_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "memory_left", lambda: None)
    refuse_impossible(load_settings({"NUM_WORKERS": "8"}))
    with pytest.raises(SettingsError, match="which has 2 cores; set it to 8 or less"):
        refuse_impossible(load_settings({"NUM_WORKERS": "9"}))


def test_a_resource_unknown_to_ray_is_reported() -> None:
    given = {"CPU": 1.0, "gpu": 1.0}
    settings = load_settings({"RESOURCES_PER_WORKER": '{"CPU": 1, "gpu": 1}'})
    with pytest.raises(SettingsError, match=r'"gpu": 1\}: the run needs 2 gpu for 2 workers, but this machine has 0; '):
        refuse_lack(settings, given, {"CPU": 2.0, "GPU": 2.0})
