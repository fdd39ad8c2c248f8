"""Tests of the search space: expressions are parsed, errors are reported, and a trial always draws the same values."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.errors import SettingsError
from sunspot.settings.search_space import Dimension, find_dimensions, load_search, parse, trial_name
from sunspot.tune.search import ranked_by_held_out
from tests.harness import GOLDEN, REPOSITORY
from tests.harness.manifests import render

SPACE = {"SUNSPOT_LEARNING_RATE": "loguniform(1e-4,1e-2)", "SUNSPOT_TASK_ARGS": '{"width": "choice(8,16)", "depth": 3}'}


def dimension(text: str, name: str = "LEARNING_RATE") -> Dimension:
    found = parse(name, text)
    assert found
    return found


def problems(**settings: str) -> list[str]:
    """Return the problems in the error message for an invalid space, one per line."""
    with pytest.raises(SettingsError) as refused:
        load_search({f"SUNSPOT_{name}": text for name, text in settings.items()})
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("text", "function", "arguments"),
    [
        ("uniform(0.1,0.5)", "uniform", (0.1, 0.5)),
        (" loguniform( 1e-4 , 1e-2 ) ", "loguniform", (1e-4, 1e-2)),
        ("randint(2,5)", "randint", (2, 5)),
        ("choice(a, b,c)", "choice", ("a", "b", "c")),
    ],
)
def test_search_expressions_are_parsed(text: str, function: str, arguments: tuple[object, ...]) -> None:
    found = dimension(text)
    assert (found.function, found.arguments) == (function, arguments)


def test_task_arguments_are_parsed_as_json() -> None:
    assert dimension("choice(8,0.5,true,relu)", "TASK_ARGS.x").arguments == (8, 0.5, True, "relu")


@pytest.mark.parametrize("text", ["0.1", "", "s3://bucket/uniform(0,1)", "runs/choice", "mean(1,2)"])
def test_ordinary_values_are_not_search_expressions(text: str) -> None:
    assert parse("TASK_ARGS.x", text) is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 10_000), st.floats(1e-9, 1e6), st.floats(1.001, 1e6))
def test_numbers_are_drawn_between_the_bounds(seed: int, trial: int, low: float, factor: float) -> None:
    high = low * factor
    for function in ("uniform", "loguniform"):
        found = Dimension("LEARNING_RATE", f"{function}({low},{high})", function, (low, high))
        assert low <= found.draw(seed, trial) <= high
        assert found.draw(seed, trial) == found.draw(seed, trial)


@given(st.integers(0, 2**32 - 1), st.integers(1, 10_000), st.integers(-5, 5), st.integers(1, 9))
def test_randint_excludes_its_upper_bound(seed: int, trial: int, low: int, more: int) -> None:
    assert dimension(f"randint({low},{low + more})", "EPOCHS").draw(seed, trial) in range(low, low + more)


def test_random_draws_cover_the_whole_search_space() -> None:
    rates = [dimension("loguniform(1e-4,1e-2)").draw(0, trial) for trial in range(1, 401)]
    assert 160 < sum(rate < 1e-3 for rate in rates) < 240, "one order of magnitude is as likely as the other"
    widths = [dimension("choice(8,16,32)", "TASK_ARGS.width").draw(0, trial) for trial in range(1, 301)]
    assert all(70 < widths.count(width) < 130 for width in (8, 16, 32))


def test_the_values_of_a_trial_do_not_depend_on_other_dimensions() -> None:
    few = load_search({**SPACE, "SUNSPOT_TRIALS": "3", "SUNSPOT_SEED": "7"})
    more = load_search({**SPACE, "SUNSPOT_TRIALS": "30", "SUNSPOT_SEED": "7", "SUNSPOT_EPOCHS": "randint(1,5)"})
    for before, after in zip(few.samples, more.samples, strict=False):
        assert before.items() <= after.items()
    assert few.samples != load_search({**SPACE, "SUNSPOT_TRIALS": "3", "SUNSPOT_SEED": "8"}).samples
    # A search that was started with one version of this program must continue with the next.
    assert few.samples[0] == {"TASK_ARGS.width": 16, "LEARNING_RATE": 0.008884}


def test_each_trial_has_valid_settings() -> None:
    search = load_search({**SPACE, "SUNSPOT_TRIALS": "2", "SUNSPOT_RUN_NAME": "s"})
    assert [trial.run_name for trial in search.trials] == ["s-01", "s-02"]
    for sample, trial in zip(search.samples, search.trials, strict=True):
        assert trial.learning_rate == sample["LEARNING_RATE"]
        assert trial.task_args == {"width": sample["TASK_ARGS.width"], "depth": 3}
    assert search.settings.run_name == "s"
    assert set(search.identity) >= {"learning_rate", "task_args", "dataset"}


def test_a_dimension_in_task_args_is_named_by_its_path() -> None:
    arguments = json.dumps({"optimizer": {"beta": "uniform(0.5,0.9)"}})
    search = load_search({"SUNSPOT_TASK_ARGS": arguments})
    [found] = search.dimensions
    assert found.name == "TASK_ARGS.optimizer.beta"
    assert search.trials[0].task_args == {"optimizer": {"beta": search.samples[0][found.name]}}


def test_settings_without_an_expression_are_not_a_search() -> None:
    search = load_search({"SUNSPOT_EPOCHS": "3"})
    assert (search.dimensions, search.trials, search.settings.epochs) == ((), (), 3)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (
            "loguniform(1e-4",
            "loguniform takes two positive numbers, the first smaller than the second, as in loguniform(",
        ),
        ("loguniform(0,1)", "loguniform takes two positive numbers"),
        ("uniform(2,1)", "uniform takes two numbers, the first smaller than the second"),
        ("uniform(1,inf)", "uniform takes two numbers"),
        ("uniform(1,2,3)", "uniform takes two numbers"),
        ("randint(0.5,2)", "randint takes two integers"),
        ("choice(1,,2)", "choice takes values separated by commas"),
        ("choice()", "choice takes values separated by commas"),
        (
            "lognormal(1,2)",
            "lognormal is not a search function; use uniform(0.01,0.1), loguniform(1e-4,1e-2), randint(2,5)",
        ),
        ("__import__('os')", "__import__ is not a search function; use "),
    ],
)
def test_an_invalid_search_expression_is_reported_with_the_fix(text: str, fix: str) -> None:
    [line] = problems(LEARNING_RATE=text)
    assert line.startswith(f"SUNSPOT_LEARNING_RATE={text}: {fix}")


def test_all_problems_of_a_search_are_reported_in_one_error() -> None:
    lines = problems(LEARNING_RATE="uniform(2,1)", NUM_WORKERS="choice(1,2)", RUN_NAME="choice(a,b)")
    assert len(lines) == 3
    assert "SUNSPOT_NUM_WORKERS=choice(1,2): a search can only vary TASK, " in lines[1]


def test_the_extreme_values_of_a_search_expression_are_validated() -> None:
    assert problems(EPOCHS="choice(1,2,3,4,5,6,7,8,0)", TRIALS="1") == ["SUNSPOT_EPOCHS=0: set it to an integer >= 1"]
    assert problems(LEARNING_RATE="uniform(-1,1)") == [
        "SUNSPOT_LEARNING_RATE=-1.0: set it to a number above 0, e.g. 1e-3"
    ]
    assert problems(PRECISION="choice(fp32,fp8)") == ["SUNSPOT_PRECISION=fp8: set it to fp32, tf32 or bf16"]


def test_a_run_name_too_long_for_its_trials_is_rejected() -> None:
    assert trial_name("s", 3) == "s-03"
    [line] = problems(LEARNING_RATE="uniform(1,2)", RUN_NAME="a" * 36)
    assert "would have more than 38 characters; set it to a name of at most 35" in line


def test_a_search_with_elastic_workers_is_rejected() -> None:
    [line] = problems(LEARNING_RATE="uniform(1,2)", NUM_WORKERS="1..2")
    assert line == "SUNSPOT_NUM_WORKERS=1..2: trials would take workers from each other; set it to a single number"


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (
            "sunspot.train",
            {"SUNSPOT_LEARNING_RATE": "loguniform(1e-4,1e-2)"},
            "SUNSPOT_LEARNING_RATE=loguniform(1e-4,1e-2): a run needs a single value for each setting; use",
        ),
        (
            "sunspot.tune",
            {},
            "there is nothing to search: no setting is an expression, such as SUNSPOT_LEARNING_RATE=",
        ),
        (
            "sunspot.tune",
            {"SUNSPOT_LEARNING_RATE": "uniform(1)"},
            "SUNSPOT_LEARNING_RATE=uniform(1): uniform takes two",
        ),
    ],
)
def test_invalid_settings_are_reported_without_importing_torch(
    module: str, settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    check = (
        f"import sys, runpy\ntry: runpy.run_module({module!r}, run_name='__main__')\n"
        "finally: print('imported', sorted({'torch', 'ray', 'numpy'} & sys.modules.keys()))"
    )
    environment = {**os.environ, **settings, "SUNSPOT_STORAGE_PATH": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", check], env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert answer.returncode == 2
    assert said in answer.stderr
    assert answer.stdout == "imported []\n"


# ------------------------------------------------------------------------------------------------------------- manifest


def test_the_job_of_a_search_matches_the_golden_file() -> None:
    """Compare with the golden file. `WRITE_GOLDEN=1` updates it, like those of the profiles (test_render.py)."""
    rendered = render("kind", {**SPACE, "SUNSPOT_RUN_NAME": "s", "SUNSPOT_CONCURRENT_TRIALS": "3"})
    text = rendered.to_yaml()
    if os.environ.get("WRITE_GOLDEN"):
        (GOLDEN / "search.yaml").write_text(text)
    assert text == (GOLDEN / "search.yaml").read_text()
    spec = rendered.manifest["spec"]
    assert spec["entrypoint"] == "python -m sunspot.tune"
    cluster = spec["rayClusterSpec"]
    assert cluster["workerGroupSpecs"][0]["replicas"] == 6, "three trials of two workers"
    container = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == "9Gi", "the drivers of all three are on the head"
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["SUNSPOT_LEARNING_RATE"] == SPACE["SUNSPOT_LEARNING_RATE"]
    assert variables["SUNSPOT_TASK_ARGS"] == '{"depth": 3, "width": "choice(8,16)"}'


def test_the_job_of_a_single_run_is_not_a_search() -> None:
    rendered = render("kind", {"SUNSPOT_CONCURRENT_TRIALS": "3"})
    assert rendered.manifest["spec"]["entrypoint"] == "python -m sunspot.train"
    assert rendered.manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 2


def test_a_search_can_run_in_an_existing_cluster() -> None:
    rendered = render("kind", SPACE, cluster="mine")
    assert rendered.manifest["spec"]["entrypoint"] == "python -m sunspot.tune"
    assert "loguniform(1e-4,1e-2)" in rendered.manifest["spec"]["runtimeEnvYAML"]


def test_an_invalid_search_space_is_not_rendered() -> None:
    with pytest.raises(SettingsError, match="uniform takes two numbers"):
        render("kind", {"SUNSPOT_LEARNING_RATE": "uniform(1)"})


def test_search_dimensions_are_found_in_an_incomplete_set_of_settings() -> None:
    assert [d.name for d in find_dimensions(SPACE)] == ["TASK_ARGS.width", "LEARNING_RATE"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TASK_ARGS", "[" * 50_000),
        ("TASK_ARGS", '{"a":' * 200 + '"choice(1,2)"' + "}" * 200),
        ("EPOCHS", f"randint(0,{10**400})"),
        ("EPOCHS", f"randint(-{10**30},{10**30})"),
        ("TRIALS", "1000000"),
    ],
)
def test_an_unbounded_expression_is_rejected_immediately(name: str, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(SettingsError):
        load_search({"SUNSPOT_SEED": "choice(1,2)", f"SUNSPOT_{name}": text})
    assert time.monotonic() - began < 5


def test_parsing_time_is_linear_in_the_length_of_an_expression() -> None:
    began = time.monotonic()
    for text in ("choice(" + " " * 100_000 + "x", "choice" + " " * 100_000, " " * 100_000):
        with contextlib.suppress(ValueError):
            parse("LEARNING_RATE", text)
    assert time.monotonic() - began < 2


def test_a_search_can_vary_a_task_argument_with_a_lone_surrogate_in_its_name() -> None:
    assert load_search({"SUNSPOT_TASK_ARGS": '{"a\\ud800": "choice(1,2)"}'}).trials


@pytest.mark.parametrize(
    ("test_rows", "given", "metric"), [(9, "loss", "test_loss"), (9, "test_f1", "test_f1"), (0, "f1", "f1")]
)
def test_trials_are_ranked_by_a_held_out_metric_if_there_are_held_out_rows(
    make_data: Callable[..., str], test_rows: int, given: str, metric: str
) -> None:
    data = {"SUNSPOT_DATASET": make_data(20, test_rows=test_rows), "SUNSPOT_CHECKPOINT_METRIC": given}
    search = ranked_by_held_out(load_search({**SPACE, **data, "SUNSPOT_TRIALS": "2"}))
    assert [each.checkpoint_metric for each in (search.settings, *search.trials)] == [metric] * 3
