"""Tests of a run's cost: the sums, the prices in profiles, and the output of commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.errors import SettingsError
from sunspot.report.model import read_report
from sunspot.report.page import render as render_page
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, Metadata
from sunspot.run.cost import Spending, compute_spending, cost_of_loss
from sunspot.run.incidents import Cause, Receipt
from sunspot.run.seen import look, read_details
from sunspot.run.status import RunState, Status, new_driver, write_status, write_status_as_is
from sunspot.settings import load_settings
from sunspot.settings.search_space import load_search
from sunspot.submitter.cluster.progress_lines import print_pods
from sunspot.submitter.manifest.render import Rendered, settings_of
from tests.harness.commands import StorageCommand
from tests.harness.manifests import render
from tests.harness.runs import begin, start, write_receipt

SPOT = {"head": {"price": 0.25}, "workers": {"price": 1.0, "on_demand_price": 3.0}, "workers-2": {"price": 4.0}}

HOUR = 3600

BEGAN = 1_700_000_000


def settings(prices: dict[str, Any] = SPOT, **labels: str) -> dict[str, str]:
    """Return the settings that an attempt records."""
    return {"SUNSPOT_PRICES": json.dumps(prices), "SUNSPOT_LABELS": json.dumps(labels)}


def hosts(*names: str) -> dict[str, str]:
    return {str(rank): name for rank, name in enumerate(names)}


# ----------------------------------------------------------------------------------------------------------- arithmetic


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Attempt], list[Receipt], int]:
    """Return attempts on up to four nodes of two groups, receipts for some of them, and the end of the run."""
    moments = st.integers(0, 40)
    claims = sorted(draw(st.lists(moments, min_size=1, max_size=6)))
    attempts, receipts = [], []
    for number, claimed in enumerate(claims, 1):
        names = draw(st.lists(st.sampled_from("abcd"), max_size=5))
        groups = {name: group for name in names if (group := draw(st.sampled_from(["", "workers", "workers-2"])))}
        priced = draw(st.sampled_from([{}, SPOT, {"workers": {"price": 2.0}}]))
        metadata = Metadata(nodes=hosts(*names), groups=groups, settings=settings(priced))
        attempts.append(Attempt(number, "job", None, 0, time=claimed, metadata=metadata))
        if draw(st.booleans()):
            cause = draw(st.sampled_from([Cause.BEGIN, Cause.PREEMPTED, Cause.NODE_LOST, Cause.RESUMED]))
            left, ends = draw(st.integers(0, claimed)), claimed + draw(st.integers(0, 20))
            paused_s = draw(st.integers(0, claimed - left))
            fields = {"restarted": claimed, "first_step": ends, "left": left, "paused_s": paused_s, "cause": cause}
            state = {"step": 0, "last_step": 0, "tier": "memory", "world_before": 0, "world_after": 0, "detail": ""}
            times = dict.fromkeys(("noticed", "save_began", "committed"))
            receipts.append(Receipt(attempt=number, since=number - 1, **fields, **state, **times))
    return attempts, receipts, draw(st.integers(0, 80))


@given(histories())
def test_every_second_of_every_node_is_counted_once(history: tuple[list[Attempt], list[Receipt], int]) -> None:
    """The expected sums are computed second by second and node by node."""
    attempts, receipts, end = history
    nodes = unpriced = lost_nodes = cost = lost = saved = 0.0
    for second in range(int(attempts[0].time), max(end, int(attempts[-1].time))):
        if any(r.restarted - r.paused_s <= second < r.restarted for r in receipts):
            continue
        metadata = [a for a in attempts if a.time <= second][-1].metadata
        prices = json.loads(metadata.settings["SUNSPOT_PRICES"])
        names = sorted(set(metadata.nodes.values()))
        paid = [prices.get(metadata.groups.get(name, "workers")) for name in names]
        known = [price for price in [*paid, prices.get("head")] if price]
        is_lost = any(r.left <= second < r.first_step for r in receipts if r.cause.incident)
        nodes += len(names)
        unpriced += paid.count(None)
        cost += sum(price["price"] for price in known)
        lost_nodes += len(names) * is_lost
        lost += sum(price["price"] for price in known) * is_lost
        if any("on_demand_price" in price for price in known):
            saved += sum(p.get("on_demand_price", p["price"]) for p in known) * (not is_lost)
            saved -= sum(price["price"] for price in known)
    found = compute_spending(attempts, receipts, end)
    expected = [nodes, unpriced, cost, lost_nodes, lost, saved]
    figures = [found.node_hours, found.unpriced_hours, found.cost, found.lost_hours, found.lost, found.saved]
    assert [(figure or 0) * HOUR for figure in figures] == pytest.approx(expected, abs=1e-6)


def test_unknown_costs_are_excluded_from_sums() -> None:
    known, unknown = Spending(2.0, 0.0, 3.0, 1.0, 1.5, 4.0), Spending(5.0, 5.0, None, 0.0, None, None)
    assert known + unknown == Spending(7.0, 5.0, 3.0, 1.0, 1.5, 4.0)
    assert unknown + unknown == Spending(10.0, 10.0)
    assert compute_spending([], [], 10.0) == Spending()


# ------------------------------------------------------------------------------------------------- three runs, by hand


@pytest.fixture
def sunspot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> StorageCommand:
    """Return the command with three ended runs in storage, two with prices and one without."""
    storage = str(tmp_path / "runs")

    def ended(name: str, hours: float, **more: Any) -> Run:
        run = begin(open_run(storage, name))
        first = start(run, "job-1", at=BEGAN, world_size=4, nodes=hosts("a", "a", "b", "b"), **more)
        write_receipt(run, first, 0, Cause.BEGIN)
        state = {"attempt": 1, "driver": first.driver, "step": 500, "time": BEGAN + hours * HOUR}
        write_status_as_is(run, Status(RunState.SUCCEEDED, "job-1", **state))
        return run

    ended("digits", 2.0, settings=settings(team="vision"))
    ended("plain", 1.0)
    run = ended("words", 10.0, settings=settings(team="text"))
    # After 4 hours, a node is lost along with half an hour of work. The second attempt has a node of each group.
    second = start(
        run,
        "job-1",
        at=BEGAN + 4 * HOUR,
        world_size=4,
        nodes=hosts("a", "a", "c", "c"),
        groups={"a": "workers", "c": "workers-2"},
        settings=settings(team="text"),
    )
    times = {"left": BEGAN + 3.5 * HOUR, "first_step": BEGAN + 4.5 * HOUR}
    write_receipt(run, second, 1, **times, worker_seconds_lost=4.0 * HOUR, cost=3.75)
    state = {"attempt": 2, "driver": second.driver, "step": 1000, "time": BEGAN + 10 * HOUR}
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job-1", **state))
    return StorageCommand(storage, capsys)


DIGITS = {"node_hours": 4.0, "cost": 2 * 2.25, "lost": 0.0, "saved": 2 * (6.25 - 2.25), "cost_per_step": 4.5 / 500}
"""The cost of two nodes and the head for two hours at 2.25 per hour, or 6.25 on demand."""

WORDS = {
    "node_hours": 20.0,
    "cost": 4 * 2.25 + 6 * 5.25,
    "lost_hours": 2.0,
    "lost": 0.5 * 2.25 + 0.5 * 5.25,
    "saved": 3.5 * 6.25 + 5.5 * 7.25 - 40.5,
    "cost_per_step": 40.5 / 1000,
}
"""The cost of 4 hours at 2.25 and 6 hours at 5.25. The hour around the change is lost."""


def test_the_costs_of_three_runs_match_sums_computed_by_hand(sunspot: StorageCommand) -> None:
    found = sunspot("cost", "--json").json
    runs = {run["run"]: run for run in found["runs"]}
    for name, expected in (("digits", DIGITS), ("words", WORDS)):
        assert {key: runs[name][key] for key in expected} == pytest.approx(expected)
    assert (runs["plain"]["node_hours"], runs["plain"]["cost"], runs["plain"]["saved"]) == (2.0, None, None)
    assert runs["words"]["labels"] == {"team": "text"}
    total = found["total"]
    assert (total["node_hours"], total["unpriced_hours"]) == (26.0, 2.0)
    assert (total["cost"], total["lost"]) == pytest.approx((45.0, 3.75))
    lines = [line.split() for line in sunspot("cost").out.splitlines()]
    assert ["words", "succeeded", "20", "40.5", "3.75", "21.25", "0.0405"] in lines
    assert ["plain", "succeeded", "2"] in lines
    assert lines[-1] == ["all", "26", "45", "3.75", "29.25"]


def test_costs_are_summed_by_label(sunspot: StorageCommand) -> None:
    found = sunspot("cost", "--by", "team", "--json").json["by"]
    assert {team: (each["runs"], each["node_hours"], each["cost"]) for team, each in found.items()} == {
        "text": (1, 20.0, 40.5),
        "vision": (1, 4.0, 4.5),
        "": (1, 2.0, None),
    }
    lines = sunspot("cost", "--by", "team").out.splitlines()
    assert [line.split()[0] for line in lines] == ["team", "text", "vision", "without", "all"]


def test_the_cost_of_a_run_is_shown_by_the_status_and_events_commands_and_in_the_report(
    sunspot: StorageCommand,
) -> None:
    status = sunspot("status", "words", "--json").json
    assert {key: status["cost"][key] for key in WORDS} == pytest.approx(WORDS)
    assert "labels:     team=text" in sunspot("status", "words").out
    line = "40.50 for 20.0 node hours, 0.0405 a step, 3.75 lost to incidents, 21.25 saved by spot nodes"
    assert f"cost:       {line}" in sunspot("status", "words").out
    assert "cost:       2 node hours, 0 of them lost to incidents; no price is known" in sunspot("status", "plain").out
    assert "14400 worker-seconds lost (3.75), from" in sunspot("events", "words").out
    page = render_page(read_report(look(open_run(sunspot.storage, "words")))).decode()
    assert '<dd id="figure-cost">40.50<small>' in page
    assert f"Cost: {line}." in page


def test_the_cost_command_fails_if_storage_contains_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = StorageCommand(str(tmp_path), capsys)("cost")
    assert (answer.code, answer.err) == (3, f"error: no run in {tmp_path}\n")


# ----------------------------------------------------------------------------------------------- runs that have no end


def test_a_stopped_run_costs_nothing_until_it_trains_again(tmp_path: Path) -> None:
    """A resumed run costs nothing until its workers claim an attempt."""
    run = begin(open_run(str(tmp_path), "run"))
    first = start(run, "job-1", at=BEGAN, nodes=hosts("a"), settings=settings())
    state = {"attempt": 1, "driver": first.driver, "time": BEGAN + HOUR}
    write_status_as_is(run, Status(RunState.STOPPED, "job-1", **state))
    assert read_details(look(run)).spending.node_hours == pytest.approx(1.0)
    write_status(run, Status(RunState.STARTING, "job-2", attempt=1, driver=new_driver()))
    assert read_details(look(run)).spending.node_hours == 0.0, "it has no records that would show a later sign of life"


def test_the_cost_of_an_incident_includes_node_time_until_the_first_step() -> None:
    run = [
        Attempt(n, "job", None, 0, time=time, metadata=Metadata(nodes=hosts("a"), settings=settings()))
        for n, time in ((1, 0), (2, 2 * HOUR))
    ]
    state = {"step": 0, "last_step": 0, "tier": "memory", "world_before": 1, "world_after": 1, "detail": ""}
    times = {"noticed": None, "save_began": None, "committed": None, "restarted": 2 * HOUR}
    spans = {"left": HOUR, "first_step": 3 * HOUR}
    loss = Receipt(attempt=2, since=1, cause=Cause.NODE_LOST, **state, **times, **spans)
    assert cost_of_loss(run, loss) == pytest.approx(2.5)
    paused = Receipt(attempt=2, since=1, cause=Cause.RESUMED, **state, **times, **spans, paused_s=HOUR / 2)
    assert cost_of_loss(run, paused) == pytest.approx(1.5 * 1.25)


# ----------------------------------------------------------------------------------------------------------- a profile


PROFILE = """
extends: kind
labels: {team: vision, example.com/zone: a}
settings: {NUM_WORKERS: 2..8}
head: {price: 0.2}
worker: {price: 1.5}
workers:
- {on_demand_price: 4}
- {price: 4, max: 4}
"""


def rendered(folder: Path, text: str, **more: str) -> Rendered:
    (folder / "mine.yaml").write_text(text)
    return render(str(folder / "mine.yaml"), more)


def test_prices_and_labels_in_a_profile_are_recorded_in_the_run(tmp_path: Path) -> None:
    job = rendered(tmp_path, PROFILE)
    known = load_settings(settings_of(job.manifest))
    assert {name: (price.price, price.on_demand_price) for name, price in known.job.prices.items()} == {
        "head": (0.2, None),
        "workers": (1.5, 4.0),
        "workers-2": (4.0, None),
    }
    assert known.labels == {"team": "vision"}, "labels with a prefix are for Kubernetes"
    again = load_settings(known.environment())
    assert (again.job.prices, again.labels) == (known.job.prices, known.labels)
    dearer = rendered(tmp_path, PROFILE.replace("1.5", "1.75"))
    assert dearer.name == job.name, "a changed price does not change the job"
    assert load_settings(settings_of(dearer.manifest)).job.prices["workers"].price == 1.75


def test_submit_shows_the_highest_possible_cost_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_pods(rendered(tmp_path, PROFILE).pods)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["head", "1", "0.2", "0.2"],
        ["workers", "0..8", "1.5", "12"],
        ["workers-2", "0..4", "4", "16"],
        ["all", "28.2"],
    ]
    print_pods(rendered(tmp_path, "extends: kind").pods)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["pods", "number"],
        ["head", "1"],
        ["workers", "2"],
    ]


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("extends: kind\nworker: {price: -1}", {}, "worker.price=-1 is not valid; set it to a number >= 0, e.g. 0.35"),
        (
            "extends: kind\nhead: {price: cheap}",
            {},
            "head.price='cheap' is not valid; set it to a number >= 0, e.g. 0.35",
        ),
        ("extends: kind\nworker: {prise: 1}", {}, "worker.prise is an unknown key; did you mean worker.price?"),
        (
            "extends: kind",
            {"PRICES": '{"head": {"price": 1}}'},
            "SUNSPOT_PRICES cannot be set; set price under head and worker in the profile instead",
        ),
    ],
)
def test_invalid_prices_in_a_profile_are_rejected(
    tmp_path: Path, text: str, more: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        rendered(tmp_path, text, **more)
    assert message in str(refused.value)


def test_prices_for_an_existing_cluster_come_from_the_prices_setting() -> None:
    prices = '{"head": {"price": 1}}'
    job = render("kind", {"PRICES": prices}, cluster="shared")
    assert load_settings(settings_of(job.manifest)).job.prices["head"].price == 1.0


@pytest.mark.parametrize("value", ["7", '{"workers": {"price": "x"}}', '{"workers": {"cost": 1}}', "{"])
def test_invalid_prices_in_a_setting_are_rejected(value: str) -> None:
    with pytest.raises(SettingsError, match=r"SUNSPOT_PRICES=.*: set it to a JSON object, e.g. "):
        load_settings({"PRICES": value})


def test_trials_are_not_charged_for_the_head_of_their_search() -> None:
    prices = json.dumps({"head": {"price": 1.0}, "workers": {"price": 2.0}})
    given = {"LEARNING_RATE": "uniform(0.1,0.2)", "TRIALS": "2", "RUN_NAME": "tune", "PRICES": prices}
    search = load_search({f"SUNSPOT_{name}": value for name, value in given.items()})
    assert (set(search.settings.job.prices), search.settings.labels) == ({"head", "workers"}, {"search": "tune"})
    assert [(set(trial.job.prices), trial.labels) for trial in search.trials] == [({"workers"}, {"search": "tune"})] * 2
