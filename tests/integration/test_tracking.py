"""Tests for tracking with a real MLflow server, which is killed and restarted, and with W&B's files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sunspot.tracking.delivery
from sunspot.errors import SettingsError, TrackingError
from sunspot.run import Run, open_run
from sunspot.run.attempts import checkpoint_name, lineage, read_attempts
from sunspot.run.checkpoints import choose
from sunspot.run.history import read_journal
from sunspot.run.status import RunState, Status, read_status, write_status_as_is
from sunspot.settings import Settings
from sunspot.tracking import __main__ as command
from sunspot.tracking import process
from sunspot.tracking.delivery import Delivery, claim_tracking_run, read_delivered, read_tracking_run, to_point
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants
from tests.harness.mlflow_server import Server
from tests.harness.program import Program
from tests.harness.runs import begin, commit, report, start
from tests.harness.trained import BEGUN, attempt_metadata, record, trained
from tests.harness.waiting import wait_until

MakeData = Callable[..., str]
Points = dict[str, list[tuple[int, int, float]]]


@pytest.fixture(autouse=True)
def clean_services(mlflow_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the developer's services, and start the MLflow server."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


@pytest.fixture
def server(mlflow_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the running server. Environment variables point to it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.wait())
    return mlflow_server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deliver(run: Run, project: str) -> Delivery:
    """Deliver a run to MLflow like the command, and return the delivery."""
    delivery = Delivery(run, "mlflow", project)
    delivery.finish()
    return delivery


def by_hand(run: Run, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m sunspot.tracking` for a run."""
    words = [sys.executable, "-m", "sunspot.tracking", run.name, "--storage", run.storage.locate(""), *more]
    given = {**os.environ, **environment}
    return subprocess.run(words, env=given, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def history(run: Run) -> Points:
    """Return the metrics in the run's own history, sorted and keyed by name, as a service should have them."""
    found: Points = {}
    for line in read_journal(run, "metrics", lineage(read_attempts(run))):
        point = to_point(line)
        for name, value in point.values.items():
            found.setdefault(name, []).append((point.step, int(point.time * 1000), value))
    return {name: sorted(points) for name, points in found.items()}


class Shown:
    """The data of a run on an MLflow server."""

    def __init__(self, run: Run, project: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        experiment = self.client.get_experiment_by_name(project)
        self.runs = self.client.search_runs([experiment.experiment_id])
        self.id = read_tracking_run(run, "mlflow") or ""
        self.info, self.data = self.client.get_run(self.id).info, self.client.get_run(self.id).data

    @property
    def points(self) -> Points:
        """All metrics except those that are sent at the end of the run."""
        return {
            name: sorted((point.step, point.timestamp, point.value) for point in self._of(name))
            for name in self.data.metrics
            if name != "goodput"
        }

    def _of(self, name: str) -> list[Any]:
        found: list[Any] = self.client.get_metric_history(self.id, name)
        return found

    def read(self, artifact: str, folder: Path) -> bytes:
        return Path(self.client.download_artifacts(self.id, artifact, str(folder))).read_bytes()


# ------------------------------------------------------------------------------------------------------------- failures


def test_nothing_is_delivered_without_a_tracking_service(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    process.refuse_unusable(Settings())
    with process.tracked(run, Settings()):
        pass
    assert not run.storage.exists(run.key("tracking"))


def test_an_unusable_tracking_service_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sunspot.train.__main__ import main

    monkeypatch.setenv("SUNSPOT_TRACKING", "mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(SettingsError, match="MLFLOW_TRACKING_URI is not set"):
        main([])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(SettingsError, match=r"MLFLOW_TRACKING_URI=mlruns: .* set it to sqlite:///mlflow.db"):
        main([])
    with pytest.raises(SettingsError, match="STORAGE_PATH=s3://models is a bucket; set SUNSPOT_TRACKING to"):
        process.refuse_unusable(Settings(tracking="tensorboard", storage_path="s3://models"))
    # W&B's output folder can exist even if the library is not installed.
    (tmp_path / "wandb").mkdir()
    words = "import sys; from sunspot.settings import Settings; from sunspot.tracking.process import refuse_unusable"
    words += f"; sys.path = ['{tmp_path}', *(p for p in sys.path if 'site-packages' not in p)]"
    words += "; refuse_unusable(Settings(tracking='wandb'))"
    ended = subprocess.run([sys.executable, "-c", words], cwd=REPOSITORY, capture_output=True, text=True)
    assert (
        "SettingsError: SUNSPOT_TRACKING=wandb needs a library that is not installed; add EXTRAS=wandb to `make train`"
        in ended.stderr
    )


def test_an_outage_is_reported_once_and_undelivered_records_are_counted_at_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(run)
    write_status_as_is(run, Status(RunState.RUNNING, "job", attempt=2, checkpoint=checkpoint_name(188, 2)))
    delivery = Delivery(run, "mlflow", "away")
    inside, outside = os.pipe()
    set_constants(command, END_TIMEOUT_S=1)
    monkeypatch.setattr(command.sys, "stdin", os.fdopen(inside))
    follower = threading.Thread(target=command.follow, args=(delivery, 1, "`the command`"))
    follower.start()
    wait_until(lambda: any(event["event"] == "tracking behind" for event in read_journal(run, "events")))
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job", attempt=2))
    os.close(outside)
    follower.join(60)
    assert not follower.is_alive()
    out = capsys.readouterr().out
    assert out.count("tracking behind") == 1
    assert "could not deliver 20 records of steps 10 to 188, the report, the model and the final state: MLflow" in out
    assert out.endswith("run `the command` to deliver the rest\n")
    events = [event["event"] for event in read_journal(run, "events")]
    assert events.count("tracking behind") == 1


def test_an_unresponsive_server_does_not_delay_the_end_of_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(run)
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job", attempt=2, checkpoint=checkpoint_name(188, 2)))
    settings = Settings(tracking="mlflow", storage_path=run.storage.locate(""), run_name=run.name)
    set_constants(process, FINISH_TIMEOUT_S=0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        silent.settimeout(120)
        with process.tracked(run, settings):
            connection, _ = silent.accept()  # but never respond
        connection.close()
    out = capsys.readouterr().out
    later = f"`python -m sunspot.tracking run --storage {settings.storage_path}`"
    assert f"the delivery did not finish within 0.5 s; run {later} to continue" in out


def test_a_failing_tracking_process_is_reported_immediately(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process.sys, "executable", shutil.which("false"))
    with process.tracked(run, Settings(tracking="mlflow", storage_path=run.storage.locate(""))):
        printed: list[str] = []
        wait_until(lambda: printed.append(capsys.readouterr().out) or printed[-1], seconds=60)
    assert printed[-1].startswith(
        "warning: tracking: the process exited with code 1; run `python -m sunspot.tracking run --storage /"
    )


# ----------------------------------------------------------------------------------------------------------- deliveries


def test_the_tracking_service_receives_exactly_the_metrics_in_the_history(
    run: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run)
    run.storage.write(run.key("report.html"), b"<html>the report")
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job", attempt=2, time=BEGUN + 250))
    said = by_hand(run, SUNSPOT_TRACKING="mlflow", SUNSPOT_TRACKING_PROJECT="digits")
    assert said.returncode == 0, said.stderr
    shown = Shown(run, "digits")
    assert shown.points == history(run)
    assert len(shown.points["loss"]) == 20, "neither step 100 of the attempt that was lost, nor anything twice"
    assert shown.points["test_loss"][-1] == (188, int((BEGUN + 240) * 1000), 0.0586)
    assert (shown.info.status, shown.info.run_name) == ("FINISHED", "run")
    assert shown.data.params["learning_rate"] == "0.001"
    assert shown.data.params["checkpoint_every_s"] == "30.0"
    assert shown.data.params["version.ray"] == "2.60.0"
    assert shown.data.tags["sunspot.run"] == run.location
    assert shown.data.tags["sunspot.incidents"] == "1"
    assert 0 < shown.data.metrics["goodput"] < 1
    best = choose(run, "best")[0]
    assert shown.data.tags["sunspot.checkpoint"] == best.name
    assert shown.read("report.html", tmp_path) == b"<html>the report"
    assert shown.read("model/model.pt", tmp_path) == f"model.pt of {best.name}".encode()
    # Once everything is delivered, no request is sent.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    assert deliver(run, "digits").place == ""


def test_metrics_are_sent_after_the_next_checkpoint_and_never_twice(run: Run, server: Server) -> None:
    first = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    report(run, first, *(record(step, BEGUN + step) for step in (5, 10, 15)))
    following = Delivery(run, "mlflow", "lineage")
    following.deliver()
    assert Shown(run, "lineage").points == {}, "no checkpoint yet"
    origin = commit(run, first, 10)
    following.deliver()
    assert [step for step, *_ in Shown(run, "lineage").points["loss"]] == [5, 10]
    # The next attempt continues from there, repeats step 15, and runs the missing evaluation.
    second = start(run, "job", origin.name, at=BEGUN + 50, **attempt_metadata(epochs=7))
    made_up = {**record(10, BEGUN + 55), "steps": 0, "rows": 0, "seconds": 0.0, "test_loss": 0.5}
    report(run, second, made_up, record(15, BEGUN + 60), record(20, BEGUN + 65))
    commit(run, second, 20)
    following.deliver()
    deliver(run, "lineage")
    shown = Shown(run, "lineage")
    assert shown.points == history(run)
    assert [(step, time) for step, time, _ in shown.points["loss"]] == [
        (step, int(BEGUN + at) * 1000) for step, at in ((5, 5), (10, 10), (15, 60), (20, 65))
    ]
    assert shown.points["test_loss"] == [(10, int(BEGUN + 55) * 1000, 0.5)]
    assert len(shown.runs) == 1
    assert shown.info.status == "RUNNING"
    assert shown.data.params["epochs"] == "2"
    assert shown.data.tags["sunspot.now.epochs"] == "7", "a parameter keeps its first value"
    assert shown.data.tags["sunspot.attempts"] == "2"


def test_a_run_has_only_one_tracking_run_despite_crashes(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run)
    deliver(run, "one")
    # The process ended after it had created the tracking run, but before it stored the ID.
    for file in ("mlflow.json", "mlflow-delivered.json"):
        run.storage.delete(run.key("tracking", file))
    deliver(run, "one")
    shown = Shown(run, "one")
    assert len(shown.runs) == 1
    assert shown.points == history(run), "sent again, and kept once"
    # Two processes create a tracking run at the same time. The first to store its ID wins.
    other = trained(open_run(run.storage.locate(""), "other"))
    claim_tracking_run(other, "mlflow", shown.id)
    monkeypatch.setattr(sunspot.tracking.delivery, "read_tracking_run", lambda run, service: None)
    deliver(other, "one")
    assert len(shown.client.search_runs([shown.info.experiment_id])) == 1


def test_a_run_that_replaces_a_deleted_run_gets_a_new_tracking_run(run: Run, server: Server) -> None:
    trained(run)
    first = deliver(run, "again")
    for entry in run.storage.list(run.name):
        run.storage.delete(entry.key)
    second = start(begin(run), "job", at=BEGUN + 9999, **attempt_metadata())
    report(run, second, record(5, BEGUN))
    commit(run, second, 5)
    assert deliver(run, "again").place != first.place
    assert len(Shown(run, "again").runs) == 2


def test_records_rejected_by_the_tracking_service_are_reported(run: Run, server: Server, warned: list[str]) -> None:
    attempt = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    endless = {**record(10, BEGUN + 10), "m" * 300: 1.0}
    report(run, attempt, record(5, BEGUN + 5), endless, {**record(15, BEGUN + 15), "top@1": float("nan")})
    commit(run, attempt, 15)
    delivered = deliver(run, "refused").delivered
    assert (delivered.records, delivered.refused) == (2, 1)
    assert [text for text in warned if text.startswith("tracking: the service rejected the record of step 10")]
    shown = Shown(run, "refused")
    assert [step for step, *_ in shown.points["loss"]] == [5, 15]
    assert shown.points["top_1"][0][2] != shown.points["top_1"][0][2], "NaN"


def test_delivery_waits_until_a_deleted_tracking_run_is_restored(run: Run, server: Server) -> None:
    attempt = start(begin(run), "job", at=BEGUN, **attempt_metadata())
    report(run, attempt, record(5, BEGUN + 5))
    commit(run, attempt, 5)
    following = Delivery(run, "mlflow", "deleted")
    following.deliver()
    shown = Shown(run, "deleted")
    shown.client.delete_run(shown.id)
    report(run, attempt, record(10, BEGUN + 10))
    commit(run, attempt, 10)
    with pytest.raises(TrackingError, match=f"deleted in MLflow; `mlflow runs restore --run-id {shown.id}`"):
        following.deliver()
    shown.client.restore_run(shown.id)
    following.deliver()
    assert Shown(run, "deleted").points == history(run)


# ---------------------------------------------------------------------------------------------------------- TensorBoard


def test_event_files_contain_the_history(run: Run) -> None:
    from tensorboardX.proto.event_pb2 import Event

    trained(run)
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job", attempt=2, time=BEGUN + 250))
    said = by_hand(run, SUNSPOT_TRACKING="tensorboard")
    assert (
        f"20 records delivered, 0 rejected: view them with `tensorboard --logdir {Path(run.location).parent}`"
        in said.stdout
    )
    [file] = Path(run.location, "tensorboard").iterdir()
    content, points = file.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")  # followed by a checksum, the event and another checksum
        event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
        points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
    assert points == [(step, pytest.approx(value)) for step, _, value in history(run)["loss"]]


# ----------------------------------------------------------------------------------------------------- Weights & Biases


def test_wandb_offline_files_contain_the_history(run: Run, tmp_path: Path) -> None:
    trained(run)
    run.storage.write(run.key("report.html"), b"<html>")
    write_status_as_is(run, Status(RunState.SUCCEEDED, "job", attempt=2, time=BEGUN + 250))
    said = by_hand(run, SUNSPOT_TRACKING="wandb")
    assert said.returncode == 0, said.stderr
    [first] = (tmp_path / "wandb").glob("offline-run-*")
    assert f"20 records delivered, 0 rejected: send them with `wandb sync {first}`" in said.stdout
    rows, files = read_wandb(first)
    points = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert points == [(step, value) for step, _, value in history(run)["loss"]]
    assert "report.html" in files
    assert f"{read_tracking_run(run, 'wandb')}-model" in files
    # The run trains further. The same tracking run gets only the new steps.
    resumed = start(run, "job", choose(run, "newest")[0].name, at=BEGUN + 999, **attempt_metadata())
    report(run, resumed, record(200, BEGUN + 1000))
    commit(run, resumed, 200)
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second)  # W&B's folder name contains the second
    assert by_hand(run, SUNSPOT_TRACKING="wandb").returncode == 0
    resumed_in = next(folder for folder in (tmp_path / "wandb").glob("offline-run-*") if folder != first)
    assert resumed_in.name.rpartition("-")[2] == first.name.rpartition("-")[2] == read_tracking_run(run, "wandb")
    assert [row["step"] for row in read_wandb(resumed_in)[0] if "loss" in row] == [200]


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of W&B's history file, and the names of its files and artifacts."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, Any]] = []
    files: list[str] = []
    for data in each_entry(next(folder.glob("*.wandb")).read_bytes()):
        line = Record.FromString(data)
        items = line.history.item
        rows += [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}]
        files += [file.path for file in line.files.files]
        files += [line.artifact.name, line.request.log_artifact.artifact.name]
    return rows, files


def each_entry(content: bytes) -> Iterator[bytes]:
    """Yield the entries of a file in LevelDB's log format, which W&B uses.

    After a header of 7 bytes, the file has blocks of 32 KiB with parts of entries. Each part begins with 7 bytes of
    checksum, length and kind (1: complete, 2: first, 3: middle, 4: last).
    """
    entry = b""
    for first in range(0, len(content), 32768):
        block, at = content[first : first + 32768], 0 if first else 7
        while at + 7 < len(block):
            _, length, kind = struct.unpack_from("<IHB", block, at)
            entry += block[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield entry
                entry = b""


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_a_restarted_tracking_server_receives_the_complete_run(
    program: Program, make_data: MakeData, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(program.settings["STORAGE_PATH"], "run")
    gone, back = tmp_path / "server-is-gone", tmp_path / "server-is-back"
    faults: list[BaseException] = []

    def strike() -> None:
        try:
            wait_until(lambda: read_delivered(run, "mlflow").step == 30)
            server.kill()
            gone.touch()
            wait_until(lambda: any(e["event"] == "tracking behind" for e in read_journal(run, "events")))
            wait_until(lambda: choose(run, "newest")[0].step == 70)  # the run keeps training
            assert read_delivered(run, "mlflow").step == 30
            server.start()
            server.wait()
        except BaseException as error:
            faults.append(error)
        gone.touch()
        back.touch()

    striker = threading.Thread(target=strike)
    striker.start()
    program.run(
        DATASET=make_data(2000, test_rows=50),
        GLOBAL_BATCH_SIZE=50,
        EPOCHS=3,
        TASK="tests.tasks.waiting",
        TASK_ARGS=json.dumps({"30": str(gone), "70": str(back)}),
        CHECKPOINT_EVERY_STEPS=10,
        REPORT_EVERY_S=1,
        TRACKING="mlflow",
        TRACKING_PROJECT="outage",
    )
    striker.join()
    assert not faults
    out = capsys.readouterr().out
    assert "succeeded at step 120 of 120" in out
    status = read_status(run)
    assert status.state is RunState.SUCCEEDED
    assert [attempt.number for attempt in read_attempts(run)] == [1], "no worker has ended"
    shown = Shown(run, "outage")
    assert len(shown.runs) == 1
    assert shown.points == history(run)
    assert shown.points["loss"][-1][0] == 120
    assert len(shown.points["test_accuracy"]) == 3
    assert shown.info.status == "FINISHED"
    assert shown.data.params["task"] == "tests.tasks.waiting"
    assert shown.read("report.html", tmp_path) == run.storage.read(run.key("report.html"))
    model = run.storage.read(run.key("checkpoints", choose(run, "best")[0].name, "model.pt"))
    assert shown.read("model/model.pt", tmp_path) == model
    told = [e["event"] for e in read_journal(run, "events") if e["event"].startswith("tracking")]
    assert told == ["tracking behind", "tracking goes on"]
    assert out.count("tracking behind") == 1


@pytest.mark.slow
def test_a_run_succeeds_without_the_tracking_server_and_its_history_can_be_delivered_later(
    program: Program, make_data: MakeData, mlflow_server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = make_data(500)
    settings = {"DATASET": data, "GLOBAL_BATCH_SIZE": 50, "TRACKING": "mlflow", "TRACKING_PROJECT": "later"}
    program.run(**settings)
    run = open_run(program.settings["STORAGE_PATH"], "run")
    out = capsys.readouterr().out
    assert "succeeded at step 20 of 20" in out
    count = len(history(run)["loss"])
    assert f"could not deliver {count} records of steps 10 to 20, the report, the model and the final state" in out
    later = f"python -m sunspot.tracking run --storage {program.settings['STORAGE_PATH']}"
    assert f"run `{later}` to deliver the rest" in out
    url = mlflow_server.wait()
    said = by_hand(run, MLFLOW_TRACKING_URI=url)
    assert said.returncode == 0, said.stderr
    assert f"{count} records delivered" in said.stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", url)
        assert Shown(run, "later").points == history(run)
        # If another driver trains the run further, it uses the same tracking run.
        program.run(**settings, EPOCHS=4)
        shown = Shown(run, "later")
        assert len(shown.runs) == 1
        assert shown.points == history(run)
        assert (shown.info.status, shown.points["loss"][-1][0]) == ("FINISHED", 40)
