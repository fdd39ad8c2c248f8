"""Tests that `sunspot.client` returns what the command prints and raises the command's errors."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sunspot.cli import main
from sunspot.client import Run, list_runs, submit
from sunspot.errors import ClusterError, ConflictError, GaveUpError, NotFoundError, SettingsError, SunspotError
from sunspot.run import Run as StoredRun
from sunspot.run import open_run
from sunspot.run.logs import LogWriter, rank_stream
from sunspot.run.requests import request_stop, stop_requested
from sunspot.run.status import RunState, Status, write_status
from tests.harness import REPOSITORY
from tests.harness.commands import WITHOUT, process
from tests.harness.kubernetes import FakeCluster
from tests.harness.runs import begin, commit, consumed, record_audit, report, set_status, start, write_receipt
from tests.harness.waiting import wait_until


def end(cluster: FakeCluster, stored: StoredRun, state: RunState) -> None:
    """End the driver of the only RayJob."""
    [name] = cluster.jobs
    write_status(stored, Status(state, settings_of(cluster)["SUNSPOT_JOB_ID"], reason="so it was"))
    ended = ("Complete", "SUCCEEDED") if state is RunState.SUCCEEDED else ("Failed", "FAILED")
    cluster.set_status(name, *ended, reason="" if state is RunState.SUCCEEDED else "AppFailed")


def settings_of(cluster: FakeCluster) -> dict[str, str]:
    [job] = cluster.jobs.values()
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return {variable["name"]: variable.get("value", "") for variable in head["env"]}


def test_a_run_is_submitted_and_followed_to_its_end(cluster: FakeCluster, s3_bucket: str) -> None:
    storage = f"s3://{s3_bucket}/runs"
    wanted: dict[str, Any] = {"EPOCHS": 3, "AUDIT": True, "SUNSPOT_TASK_ARGS": {"hidden": 32}, "PRECISION": "bf16"}
    run = submit("run", settings=wanted, storage=storage)
    env = settings_of(cluster)
    assert (env["SUNSPOT_EPOCHS"], env["SUNSPOT_AUDIT"], env["SUNSPOT_PRECISION"]) == ("3", "true", "bf16")
    assert json.loads(env["SUNSPOT_TASK_ARGS"]) == {"hidden": 32}
    assert run.status()["state"] == "pending"
    with pytest.raises(GaveUpError, match=r"run is pending after 0\.1 s"):
        run.wait(timeout=0.1)
    with pytest.raises(ConflictError, match="SUNSPOT_EPOCHS"):
        submit("run", settings={"EPOCHS": 4}, storage=storage)
    end(cluster, open_run(storage, "run"), RunState.SUCCEEDED)
    assert run.wait() == "succeeded"
    assert Run("run", storage).wait() == "succeeded"


def test_wait_raises_an_error_if_the_run_failed(cluster: FakeCluster, s3_bucket: str) -> None:
    run = submit("run", storage=f"s3://{s3_bucket}/runs")
    end(cluster, open_run(f"s3://{s3_bucket}/runs", "run"), RunState.FAILED)
    with pytest.raises(SunspotError, match="run failed: so it was"):
        run.wait()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"EPOCHES": 3}, "SUNSPOT_EPOCHES: no such setting; did you mean SUNSPOT_EPOCHS?"),
        ({"EPOCHS": "many"}, "SUNSPOT_EPOCHS=many"),
        (
            {"TASK_ARGS": {1, 2}},
            "TASK_ARGS={1, 2} is not a JSON value; use a string, a number or a boolean",
        ),
    ],
)
def test_all_invalid_settings_are_reported_in_one_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        submit("run", settings=settings, storage="s3://bucket/runs")


def test_submit_raises_an_error_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="no cluster is configured: /dev/null does not exist"):
        submit("run", storage="s3://bucket/runs")


def test_python_methods_return_the_same_json_as_the_commands(
    run: StoredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = run.storage.locate("")
    attempt = start(begin(run), "run-1")
    records = [{"step": step, "steps": 1, "epoch": 1, "time": 7.0, "loss": 1.0 / step} for step in (1, 2)]
    ranks = [{"rank": 0, "rows": 3}, {"rank": 1, "rows": 2}]
    record_audit(run, attempt, consumed(1, 2))
    write_receipt(run, attempt, 0)
    write_receipt(run, start(run, "run-1", commit(run, attempt, 2).name), attempt.number)
    report(run, attempt, {**records[0], "ranks": ranks}, {**records[1], "test_loss": 0.3})
    set_status(run, RunState.SUCCEEDED, step=2)
    writer = LogWriter(run, rank_stream(1, 1))
    writer.append("a ränk\n".encode())
    writer.flush()

    def sunspot(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--storage", storage])
        assert ended.value.code == 0
        return capsys.readouterr().out

    found = Run("run", storage)
    status, printed = found.status(), json.loads(sunspot("status", "run", "--json"))
    assert {**status, "checkpoint_age_s": 0} == {**printed, "checkpoint_age_s": 0}
    assert_plain(status)
    for asked, words in {
        found.events: ["events", "run"],
        found.audit: ["audit", "run"],
        found.checkpoints: ["checkpoints", "ls", "run"],
        found.doctor: ["doctor", "run"],
        lambda: list_runs(storage): ["list"],
    }.items():
        answer = asked()
        assert_plain(answer)
        printed = json.loads(sunspot(*words, "--json"))
        assert answer
        assert without_age(answer) == without_age(printed)
    sunspot("report", "run", "--output", str(tmp_path / "command.html"))
    page = found.report(str(tmp_path / "client.html")).read_text()
    assert len(page) == len((tmp_path / "command.html").read_text())
    sunspot("metrics", "run", "--parquet", str(tmp_path / "metrics.parquet"))
    table = found.metrics()
    assert table.equals(pq.read_table(io.BytesIO((tmp_path / "metrics.parquet").read_bytes())))
    assert table["loss"].to_pylist() == [1.0, 0.5]
    assert table["test_loss"].to_pylist() == [None, 0.3]
    assert [each["rows"] for each in table["ranks"][0].as_py()] == [3, 2]
    assert found.logs(rank=1) == "a ränk\n" == sunspot("logs", "run", "--rank", "1")
    with pytest.raises(NotFoundError, match="no output of the driver"):
        found.logs()


def assert_plain(answer: Any) -> None:
    """Check that a value contains only JSON types, such as strings instead of enum members."""
    if isinstance(answer, dict):
        answer = [*answer, *answer.values()]
    if isinstance(answer, list):
        for each in answer:
            assert_plain(each)
    else:
        assert type(answer) in (str, int, float, bool, type(None)), repr(answer)


def without_age(answer: Any) -> Any:
    """Return a record without the values that depend on the clock."""
    if isinstance(answer, list):
        return [without_age(each) for each in answer]
    return {name: value for name, value in answer.items() if name not in ("age_s", "run")}


def test_a_run_can_be_resumed_and_deleted_from_python(run: StoredRun) -> None:
    start(begin(run), "run-1")
    set_status(run, RunState.STOPPED, step=2)
    request_stop(run, "a test")
    found = Run("run", run.storage.locate(""))
    with pytest.raises(NotFoundError, match="no intact checkpoint"):
        found.audit()
    found.resume()
    assert not stop_requested(run)
    found.delete()
    assert list_runs(run.storage.locate("")) == []
    with pytest.raises(NotFoundError):
        found.delete()


def test_a_missing_run_raises_a_not_found_error(run: StoredRun) -> None:
    begin(run)
    missing = Run("rum", run.storage.locate(""))
    calls = [call for name, call in vars(Run).items() if name not in ("predict", "delete") and not name.startswith("_")]
    for ask in calls:
        with pytest.raises(NotFoundError, match="no run rum in "):
            ask(missing)


@pytest.mark.parametrize("call", ["Run(*sys.argv[1:]).predict([])", "train(sys.argv[1], storage=sys.argv[2])"])
def test_the_error_for_a_missing_extra_names_the_call_that_needs_it(call: str, run: StoredRun) -> None:
    program = f"{WITHOUT}from sunspot.client import Run, train; {call}"
    begin(run)
    answer = process("run", run.storage.locate(""), program=program)
    assert re.fullmatch(
        r"sunspot.errors.SettingsError: (predict|train): (numpy|torch) is not installed; "
        r"`make .venv/train` installs it",
        answer.err.splitlines()[-1],
    )


def test_the_examples_on_the_python_page_work(
    cluster: FakeCluster, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUNSPOT_STORAGE_PATH", f"s3://{s3_bucket}/runs")
    stored = open_run(f"s3://{s3_bucket}/runs", "digits")

    def operate() -> None:
        wait_until(lambda: cluster.jobs)
        end(cluster, stored, RunState.SUCCEEDED)

    operator = threading.Thread(target=operate)
    operator.start()
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "docs/python.md").read_text(), re.S | re.M):
        exec(block, names)
    operator.join()
    assert names["run"].status()["state"] == "succeeded"


def test_the_python_page_mentions_every_method() -> None:
    page = (REPOSITORY / "docs/python.md").read_text()
    assert set(re.findall(r"^\| `(\w+)\(", page, re.M)) == {"submit", "train", "list_runs"}
    assert set(re.findall(r"^\| `run\.(\w+)", page, re.M)) == {name for name in vars(Run) if not name.startswith("_")}
