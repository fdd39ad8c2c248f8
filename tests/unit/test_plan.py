"""Tests of the plan: its choices fit the machine, and it gives reasons."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.data.order import Steps, largest_pass
from sunspot.data.source import EmptySource
from sunspot.errors import SettingsError
from sunspot.plan import Plan, choose_resources, make_plan, with_absolute_paths
from sunspot.settings import load_settings
from sunspot.tasks import load_task


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from(["torch", "ray"]))
def test_workers_and_readers_fit_onto_any_number_of_cores(cores: int, workers: int, loader: str) -> None:
    settings = load_settings({"NUM_WORKERS": str(workers), "LOADER": loader})
    resources = choose_resources(settings, {"CPU": cores}, nodes=1)
    used = workers * resources.per_worker["CPU"]
    assert resources.per_worker["CPU"] > 0
    assert used <= cores
    assert resources.threads * workers <= max(cores, workers)
    if loader == "ray":
        assert 0 < resources.reading_cpus <= cores - used + 1e-9


def test_resources_that_leave_no_core_for_reading_are_rejected() -> None:
    settings = load_settings({"LOADER": "ray", "RESOURCES_PER_WORKER": '{"CPU": 1}'})
    with pytest.raises(SettingsError, match="SUNSPOT_LOADER=ray would wait forever for a core"):
        choose_resources(settings, {"CPU": 2}, nodes=1)


@pytest.mark.parametrize(("use_gpu", "gpus", "used"), [("auto", 2, True), ("auto", 1, False), ("false", 8, False)])
def test_gpus_are_used_if_each_worker_gets_a_gpu(use_gpu: str, gpus: int, used: bool) -> None:
    resources = choose_resources(load_settings({"USE_GPU": use_gpu}), {"CPU": 8, "GPU": gpus}, nodes=1)
    assert resources.use_gpu is used
    assert ("GPU" in resources.per_worker) is used
    assert f"GPUs: {gpus}, workers: 2" in resources.reason or use_gpu == "false"


def test_the_plan_explains_the_number_of_steps() -> None:
    task = load_task(load_settings())
    plan = make_plan(load_settings(), task)
    assert (plan.steps.rows, plan.total_steps) == (12_000, 188)
    assert "188 = 2 epochs of 94 steps of 128 rows" in plan.reasons[1]
    fewer = make_plan(load_settings({"GLOBAL_BATCH_SIZE": "20000"}), task)
    every_row = "12000 rows, the whole dataset (SUNSPOT_GLOBAL_BATCH_SIZE=20000)"
    assert fewer.reasons[1] == f"steps: 2 = 2 epochs of 1 step of {every_row}"
    assert make_plan(load_settings({"MAX_STEPS": "10"}), task).total_steps == 10
    assert make_plan(load_settings({"MAX_STEPS": "1000"}), task).total_steps == 188


@pytest.mark.parametrize(
    ("workers", "micro", "limit", "rows"),
    [("2..8", "0", 16, 16), ("2..64", "0", 3, 3), ("8", "0", 16, 16), ("1", "0", 128, 128), ("8", "5", 5, 4)],
)
def test_forward_passes_do_not_become_larger_with_fewer_workers(
    workers: str, micro: str, limit: int, rows: int
) -> None:
    """Check that all passes have the same size with COMPILE. A limit of five rows splits a share of 16 into fours."""
    settings = load_settings({"NUM_WORKERS": workers, "MICRO_BATCH_SIZE": micro})
    plan = Plan(settings, EmptySource((1,), 2), None, Steps(1024, 128), 8)
    compiled = dataclasses.replace(plan, settings=settings.model_copy(update={"compile": "default"}))
    assert (plan.pass_limit, plan.pass_rows) == (limit, 0)
    assert (compiled.pass_limit, compiled.pass_rows) == (rows, rows)
    assert plan.passes(2) == -(-64 // limit)
    assert compiled.passes(2) == -(-64 // rows)
    assert all(largest_pass(128, fewer, plan.pass_limit) <= limit for fewer in range(1, 9))


def test_the_plan_warns_about_workers_without_rows() -> None:
    plan = make_plan(load_settings({"GLOBAL_BATCH_SIZE": "4", "NUM_WORKERS": "3"}), load_task(load_settings()))
    assert "only 2 of 3 workers get rows" in plan.reasons[2]


def test_a_task_that_cannot_be_imported_or_lacks_build_model_is_rejected() -> None:
    with pytest.raises(SettingsError, match="does not define build_model"):
        load_task(load_settings({"TASK": "json"}))
    with pytest.raises(SettingsError, match=r"no\.such\.module cannot be imported"):
        load_task(load_settings({"TASK": "no.such.module"}))


def test_local_paths_become_absolute() -> None:
    settings = with_absolute_paths(load_settings({"DATASET": "rows", "INIT_FROM": "run:other", "DATA_ROOT": "~/data"}))
    assert settings.storage_path.startswith("/")
    assert settings.storage_path.endswith("/runs")
    assert settings.dataset.endswith("/rows")
    assert settings.init_from == "run:other"
    assert "~" not in settings.data_root
    assert with_absolute_paths(load_settings({"STORAGE_PATH": "s3://bucket/runs"})).storage_path == "s3://bucket/runs"
