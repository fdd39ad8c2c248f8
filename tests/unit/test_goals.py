"""Tests of DEADLINE and BUDGET: their values, the forecast, the warnings, and what `submit` refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from sunspot.errors import SettingsError
from sunspot.run import Run, open_run
from sunspot.run.forecast import Forecast, find_spent, forecast
from sunspot.run.requests import describe_stop, read_stop, request_stop, stop_requested
from sunspot.run.seen import look, read_details
from sunspot.run.status import RunState, Status, write_status
from sunspot.settings import load_settings
from sunspot.submitter.cluster.observation import RunAccess
from sunspot.submitter.doctor.diagnose import examine
from sunspot.submitter.findings import Diagnosis
from sunspot.submitter.manifest.render import JobRequest, render
from sunspot.train.budget import refuse_unpriced_budget, within_budget
from tests.harness.commands import Command
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster
from tests.harness.runs import begin, start

HOUR_S = 3600.0

PRICES = {"SUNSPOT_PRICES": json.dumps({"workers": {"price": 10.0}})}


def as_text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


@pytest.fixture
def sunspot(s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(open_run(f"s3://{s3_bucket}/runs", "run"), capsys)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"extends": "kind", "worker": {"price": 10.0}}))
    return str(path)


Train = Callable[..., Run]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Return a function that writes a run that has trained on one node for two hours, with half of its work left."""

    def train(state: RunState = RunState.RUNNING, reason: str = "", run: Run | None = None, **given: str) -> Run:
        hours = 2.0
        run = begin(run or open_run(str(tmp_path / "runs"), "run"))
        now = time.time()
        settings = {**PRICES, **{f"SUNSPOT_{name}": value for name, value in given.items()}}
        attempt = start(run, "job", at=now - hours * HOUR_S, nodes={"0": "a"}, world_size=1, settings=settings)
        status = Status(
            state,
            "job",
            reason,
            attempt=attempt.number,
            driver=attempt.driver,
            world_size=1,
            step=100,
            total_steps=200,
            step_time_s=hours * HOUR_S / 100,
            began=now - hours * HOUR_S,
            heartbeat=now,
        )
        write_status(run, status)
        return run

    return train


def expect(run: Run) -> Forecast:
    return forecast(read_details(look(run)))


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DEADLINE", "tomorrow"),
        ("DEADLINE", "2026-12-01"),
        ("DEADLINE", "2026-12-01T18:00"),
        ("BUDGET", "0"),
        ("BUDGET", "-1"),
        ("BUDGET", "nan"),
        ("BUDGET", "inf"),
        ("BUDGET", "ten"),
    ],
)
def test_an_invalid_deadline_or_budget_is_rejected(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"SUNSPOT_{variable}={value}: set it to a") as refused:
        load_settings({f"SUNSPOT_{variable}": value})
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("value", ["", "2026-12-01T18:00Z", "2026-12-01T18:00+02:00", "2026-12-01 18:00:00+00:00"])
def test_a_deadline_with_a_time_zone_is_accepted(value: str) -> None:
    assert load_settings({"SUNSPOT_DEADLINE": value}).deadline == value


def test_a_budget_needs_the_price_of_all_training_pods(profile: str, tmp_path: Path) -> None:
    assert render(JobRequest(profile, {"BUDGET": "40"})).settings.budget == "40"
    with pytest.raises(SettingsError, match="SUNSPOT_BUDGET=40 needs the price of all training pods; set price under"):
        render(JobRequest("kind", {"BUDGET": "40"}))
    (tmp_path / "two.yaml").write_text("extends: kind\nworkers: [{price: 1}, {after_s: 60}]\n")
    with pytest.raises(SettingsError, match="needs the price of all training pods"):
        render(JobRequest(str(tmp_path / "two.yaml"), {"BUDGET": "40", "NUM_WORKERS": "1..2"}))


def test_a_driver_without_prices_refuses_a_budget() -> None:
    with pytest.raises(SettingsError, match="SUNSPOT_BUDGET=40 needs the prices of the nodes"):
        refuse_unpriced_budget(load_settings({"SUNSPOT_BUDGET": "40"}))
    refuse_unpriced_budget(load_settings({"SUNSPOT_BUDGET": "40", **PRICES}))
    refuse_unpriced_budget(load_settings({}))


# ------------------------------------------------------------------------------------------------------------- forecast


def test_a_run_within_its_limits_gets_no_warning(train: Train) -> None:
    expected = expect(train(DEADLINE=as_text(time.time() + 3 * HOUR_S + 30), BUDGET="50"))

    assert expected.spent == pytest.approx(20, abs=0.1)
    assert expected.total == pytest.approx(40, abs=0.1)
    assert expected.describe_deadline().endswith("UTC, the run will finish 60 min early at this speed")
    assert expected.describe_budget() == "20.00 of 50.00 spent, 40.00 expected in total with these nodes"
    assert expected.warnings == []


def test_a_run_is_warned_early_that_it_will_miss_its_deadline(train: Train) -> None:
    expected = expect(train(DEADLINE=as_text(time.time() + HOUR_S)))

    assert expected.late_s == pytest.approx(HOUR_S, abs=10)
    assert "it will be missed by 60 min at this speed" in expected.describe_deadline()
    assert expected.warnings == ["it will miss its deadline by 60 min; it needs more workers or faster nodes"]


def test_the_user_is_warned_early_if_the_budget_is_too_small(train: Train) -> None:
    expected = expect(train(BUDGET="30"))

    assert expected.excess == pytest.approx(10, abs=0.1)
    assert expected.warnings == [
        "its budget is too small; it is expected to cost 40.00, but will stop with a checkpoint at 30.00"
    ]


def test_a_run_that_is_waiting_for_nodes_after_its_deadline_is_late() -> None:
    expected = Forecast(now=1000.0, deadline=400.0)

    assert expected.late_s == 600
    assert "it will be missed by 10 min" in expected.describe_deadline()


def test_an_ended_run_or_a_run_without_limits_has_no_forecast(train: Train) -> None:
    ended = expect(train(RunState.STOPPED, BUDGET="1"))

    assert (ended.describe_budget(), ended.describe_deadline(), ended.warnings) == ("", "", [])


def test_status_and_doctor_show_the_deadline_and_the_budget(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    deadline = time.time() + HOUR_S
    run = train(DEADLINE=as_text(deadline), BUDGET="30")
    sunspot = Command(run, capsys)

    assert sunspot("status", "run") == 0
    assert (
        "it will miss its deadline by 60 min; it needs more workers or faster nodes; its budget is too small"
        in sunspot.out
    )
    assert "budget:     20.00 of 30.00 spent" in sunspot.out
    assert sunspot("status", "run", "--json") == 0
    assert sunspot.json["deadline"] == pytest.approx(deadline, abs=0.001)
    assert sunspot.json["late_s"] == pytest.approx(HOUR_S, abs=10)
    assert (sunspot.json["budget"], sunspot.json["expected_cost"]) == (30, pytest.approx(40, abs=0.1))

    findings = {finding.finding: finding for finding in examine(RunAccess(run)).findings}
    assert findings[Diagnosis.LATE].evidence.startswith("the deadline will be missed by 60 min: ")
    assert findings[Diagnosis.OVER_BUDGET].evidence.startswith("the budget is 10.00 too small: 20.00 of 30.00 spent")


# --------------------------------------------------------------------------------------------------------------- budget


def test_a_run_stops_once_it_has_spent_its_budget(train: Train, set_constants: SetConstants) -> None:
    set_constants("sunspot.train.budget", CHECK_EVERY_S=0.01)
    run = train()
    settings = load_settings({"SUNSPOT_BUDGET": "20.00001", **PRICES})
    with within_budget(run, settings):
        deadline = time.monotonic() + 20
        while not stop_requested(run) and time.monotonic() < deadline:
            time.sleep(0.01)

    assert describe_stop(run) == "its spent budget of 20.00, because it has cost 20.00"


def test_a_run_whose_budget_is_spent_is_stopped_before_it_trains(train: Train) -> None:
    run = train(BUDGET="15")
    with within_budget(run, load_settings({"SUNSPOT_BUDGET": "15", **PRICES})):
        assert stop_requested(run)


def test_a_run_within_its_budget_is_not_stopped(train: Train) -> None:
    run = train()
    for budget in ("", "21"):
        with within_budget(run, load_settings({"SUNSPOT_BUDGET": budget, **PRICES})):
            assert not stop_requested(run)


def test_a_spent_budget_does_not_override_a_users_stop_request(train: Train) -> None:
    run = train()
    request_stop(run, "me@here")
    with within_budget(run, load_settings({"SUNSPOT_BUDGET": "1", **PRICES})):
        request = read_stop(run)

    assert request
    assert request.by == "me@here"
    assert describe_stop(run) == "`sunspot stop`"


def test_a_run_that_has_not_begun_has_spent_nothing(tmp_path: Path) -> None:
    assert find_spent(open_run(str(tmp_path), "run")) == 0


def test_doctor_advises_a_larger_budget(train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run = train(RunState.STOPPED, "stopped by its spent budget of 20.00, because it has cost 20.01")

    [finding] = [each for each in examine(RunAccess(run)).findings if each.finding is Diagnosis.STOPPED]
    assert finding.advice == "submit it again with a larger SUNSPOT_BUDGET, and it continues from its last checkpoint"


# --------------------------------------------------------------------------------------------------------------- submit


def test_submit_refuses_a_deadline_that_has_passed(cluster: FakeCluster, sunspot: Command) -> None:
    passed = as_text(time.time() - 600)

    assert sunspot("submit", "--run", "run", "--set", f"DEADLINE={passed}") == 2
    assert f"SUNSPOT_DEADLINE={passed} passed 10 min ago; set a later deadline, or omit it" in sunspot.err
    assert not cluster.jobs


def test_submit_says_that_the_run_will_stop_once_its_budget_is_spent(
    cluster: FakeCluster, sunspot: Command, profile: str
) -> None:
    words = ("submit", "--run", "run", "--profile", profile, "--set", "BUDGET=40")

    assert sunspot(*words) == 0, sunspot.err
    warning = "SUNSPOT_BUDGET=40: once the run's nodes have cost this amount, the run saves a checkpoint and stops"
    assert warning in sunspot.err
    assert len(cluster.jobs) == 1


@pytest.mark.parametrize(("answer", "jobs"), [("y\n", 1), ("\n", 0), ("", 0)])
def test_submit_asks_for_confirmation_in_a_terminal_if_the_run_has_a_budget(
    answer: str, jobs: int, cluster: FakeCluster, sunspot: Command, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from io import StringIO

    terminal = StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    assert sunspot("submit", "--run", "run", "--profile", profile, "--set", "BUDGET=40") == 0, sunspot.err
    assert len(cluster.jobs) == jobs
    assert ("nothing was submitted" in sunspot.out) == (not jobs)


def test_submit_refuses_a_spent_budget(cluster: FakeCluster, sunspot: Command, profile: str, train: Train) -> None:
    train(RunState.STOPPED, run=sunspot.run)
    words = ("submit", "--run", "run", "--profile", profile, "--set")

    assert sunspot(*words, "BUDGET=15") == 2
    assert "SUNSPOT_BUDGET=15 is spent, because the run has cost 20.00; set a larger budget" in sunspot.err
    assert not cluster.jobs
    assert sunspot(*words, "BUDGET=25") == 0, sunspot.err
    assert len(cluster.jobs) == 1
