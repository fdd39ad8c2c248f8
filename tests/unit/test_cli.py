"""Tests of the `sunspot` command without a cluster: its output and exit codes."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sunspot.cli import VERBS, main, make_parser
from sunspot.errors import StorageError
from sunspot.run import Run, open_run
from sunspot.run.attempts import Attempt, checkpoint_name
from sunspot.run.checkpoints import Checkpoint, delete_checkpoint, find_faults
from sunspot.run.incidents import Cause
from sunspot.storage.base import Entry
from sunspot.storage.local import LocalStorage
from sunspot.submitter.printing import progress_note
from tests.harness.commands import StorageCommand, process
from tests.harness.constants import SetConstants
from tests.harness.runs import (
    BATCH,
    ROWS,
    STEPS_PER_EPOCH,
    begin,
    commit,
    consumed,
    damage,
    record_audit,
    report,
    start,
    write_receipt,
)
from tests.harness.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
WITH_A_CLUSTER = {
    "submit",
    "status",
    "wait",
    "stop",
    "resume",
    "scale",
    "list",
    "move",
    "logs",
    "events",
    "chaos",
    "doctor",
    "dashboard",
    "delete",
}
HEAVY = ("boto3", "pyarrow", "rich", "pydantic", "kubernetes", "yaml")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(open_run(str(tmp_path), "run"))


@pytest.fixture
def sunspot(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> StorageCommand:
    return StorageCommand(str(tmp_path), capsys)


# ---------------------------------------------------------------------------------------------------------- the command


WINDOWS = """
import os, sys
os.name = "nt"
for name in ("O_NONBLOCK", "getuid", "getpgid"):
    delattr(os, name)
sys.modules.update(dict.fromkeys(["fcntl", "grp", "posix", "pwd", "resource", "termios"]))
from sunspot.cli import main
main()
"""
"""A program that runs the command without the modules that Windows lacks."""


@pytest.mark.parametrize("words", [["list"], ["--help"]])
def test_commands_fail_on_windows_with_advice_to_use_wsl(words: list[str]) -> None:
    answer = process(*words, program=WINDOWS)
    said = "error: sunspot needs Linux or macOS, and this is Windows; use WSL (`wsl --install`)\n"
    assert (answer.code, answer.out, answer.err) == (2, "", said)


def imported_by(*words: str, code: int) -> set[str]:
    """Run a command that exits with `code`, and return the libraries that it imports."""
    program = (
        "import sys, atexit; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr)); "
        "from sunspot.cli import main; main()"
    )
    answer = process(*words, program=program)
    assert answer.code == code
    imported = answer.err.splitlines()[-1].split()
    assert "sunspot.cli" in imported
    return {name.partition(".")[0] for name in imported}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["metrics", "--help"],
        ["predict", "--help"],
        ["tune", "--help"],
        ["checkpoints"],
        ["metrics"],
        ["audit", "run", "--jso"],
        ["no-verb"],
    ],
)
def test_help_and_usage_errors_import_no_heavy_library(words: list[str]) -> None:
    assert not imported_by(*words, code=0 if "--help" in words else 2) & {*HEAVY, "torch", "ray", "numpy"}


def test_help_imports_no_modules_that_are_needed_only_for_errors() -> None:
    assert not imported_by("--help", code=0) & {"difflib", "logging", "traceback", "urllib"}


def test_status_without_a_cluster_does_not_import_the_kubernetes_client(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    report(run, start(run, "job"), {"step": 1, "loss": 0.5})
    imported = imported_by("status", "run", "--storage", str(tmp_path), code=0)
    assert not imported & {"kubernetes", "boto3", "pyarrow", "rich", "torch", "ray", "numpy"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stauts", "run"], "stauts: no such command; did you mean status?"),
        (["checkpoints", "lst"], "lst: no such command; did you mean ls?"),
        (["audit", "run", "--jsno"], "--jsno: no such option; did you mean --json?"),
        (["chaos", "run", "--knid", "kill"], "--knid: no such option; did you mean --kind?"),
        (["wait", "run", "--timout=5"], "--timout: no such option; did you mean --timeout?"),
        (["ls"], "ls: no such command; did you mean list?"),
        (["ps"], "ps: no such command; did you mean list?"),
        (["version"], "version: no such command; did you mean --version?"),
        (["checkpoints", "list", "run"], "list: no such command; did you mean ls?"),
        (["xyzzy"], "xyzzy: no such command; see `sunspot --help`"),
        (["audit", "run", "--far"], "--far: no such option; see `sunspot audit --help`"),
        (["cost", "mnist"], "mnist: no such argument; see `sunspot cost --help`"),
        (["render", "--run", "a", "EPOCHS=3"], "EPOCHS=3: write --set EPOCHS=3"),
    ],
)
def test_an_unknown_command_or_argument_is_reported_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, *capsys.readouterr()) == (2, "", f"error: {said}\n")


def test_cluster_commands_accept_the_context_option_and_all_commands_accept_the_storage_and_json_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = make_parser()
    for verb in VERBS:
        if verb != "checkpoints":
            with pytest.raises(SystemExit):
                parser.parse_args([*verb.split(), "--help"])
            text = capsys.readouterr().out
            for option in ("--storage PATH", "--json"):
                assert option in text, verb
            assert ("--context NAME" in text) is (verb in WITH_A_CLUSTER), verb
            assert ("--namespace NAME" in text) is (verb in {*WITH_A_CLUSTER, "render"}), verb
            assert VERBS[verb].partition(" ")[0] in text


def test_a_command_that_needs_no_cluster_rejects_cluster_options(sunspot: StorageCommand) -> None:
    answer = sunspot("metrics", "run", "--context", "nowhere")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "error: --context: no such option; see `sunspot metrics --help`\n"


def test_a_long_operation_is_announced(capsys: pytest.CaptureFixture[str], set_constants: SetConstants) -> None:
    with progress_note("reading"):
        pass
    set_constants("sunspot.submitter.printing", NOTE_AFTER_S=0.01)
    printed: list[tuple[str, str]] = []
    with progress_note("waiting"):
        wait_until(lambda: printed.append(capsys.readouterr()) or printed[-1] != ("", ""))
    assert printed[-1] == ("", "waiting ...\n")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "verb",
    [*(["checkpoints", verb] for verb in ("ls", "verify", "get", "gc")), ["metrics"], ["events"], ["logs"], ["audit"]],
)
def test_a_missing_run_is_reported(sunspot: StorageCommand, verb: list[str]) -> None:
    answer = sunspot(*verb, "runn", "--json")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == f"error: no run runn in {sunspot.storage}; it contains run\n"


def test_the_error_for_an_unknown_run_lists_similar_names_first(sunspot: StorageCommand, tmp_path: Path) -> None:
    for name in ("mnist-1", "mnist-2", "other", "a", "b", "c"):
        begin(open_run(str(tmp_path), name))
    (tmp_path / "not-a-run").mkdir()
    answer = sunspot("metrics", "mnist")
    assert answer.code == 3
    assert re.search(r"it contains mnist-\d, mnist-\d, .* and 2 more$", answer.err)
    assert "not-a-run" not in answer.err


def test_storage_without_runs_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = StorageCommand(str(tmp_path / "nowhere"), capsys)("metrics", "run")
    assert (answer.code, answer.err) == (3, f"error: no run run in {tmp_path}/nowhere; it contains no runs\n")


def test_a_missing_run_is_reported_even_if_no_runs_can_be_listed(
    sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalStorage, prefix: str) -> list[Entry]:
        if not prefix:
            raise StorageError("private")
        return []

    monkeypatch.setattr("sunspot.storage.local.LocalStorage.list", refuse)
    assert sunspot("metrics", "other").code == 3


@pytest.mark.parametrize("name", ["Run", "run/../run", "", "-", "r" * 39])
def test_an_invalid_run_name_is_rejected(sunspot: StorageCommand, name: str) -> None:
    answer = sunspot("metrics", name)
    assert (answer.code, answer.out) == (2, "")


def test_an_empty_storage_option_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert StorageCommand("", capsys)("metrics", "run").code == 2


def test_a_misspelled_setting_is_rejected(sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUNSPOT_STORAGE_PAHT", "/elsewhere")
    answer = sunspot("metrics", "run")
    assert answer.code == 2
    assert "did you mean SUNSPOT_STORAGE_PATH?" in answer.err


def test_the_storage_location_is_read_from_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask() -> int:
        with pytest.raises(SystemExit) as ended:
            main(["metrics", "run"])
        return ended.value.code

    monkeypatch.chdir(tmp_path)
    assert ask() == 3
    assert f"{tmp_path}/runs" in capsys.readouterr().err
    monkeypatch.setenv("SUNSPOT_STORAGE_PATH", str(tmp_path))
    assert ask() == 0


def test_unreachable_storage_is_reported(s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = StorageCommand("s3://no-such-bucket/runs", capsys)("metrics", "run", "--json")
    assert (answer.code, answer.out) == (4, "")
    assert "create the bucket" in answer.err


@pytest.mark.parametrize(("records", "code"), [(1, 0), (5000, 141)], ids=["met at the end", "met on the way"])
def test_a_closed_pipe_is_not_an_error_but_has_its_own_exit_code(run: Run, records: int, code: int) -> None:
    report(run, start(run, "job"), *({"step": step, "time": 0.0} for step in range(1, records + 1)))
    program = "from sunspot.cli import main; main()"
    words = [sys.executable, "-c", program, "metrics", "run", "--storage", run.storage.locate("")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(words, cwd=REPOSITORY, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", code)
    process.stderr.close()


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_are_listed_by_step(run: Run, sunspot: StorageCommand) -> None:
    attempt = start(run, "job")
    for step in (10, 5, 7):
        commit(run, attempt, step, loss=1 / step, rows=3)
    listed = sunspot.process("checkpoints", "ls", "run", "--json")
    assert (listed.code, listed.err) == (0, "")
    assert [line["step"] for line in listed.json] == [5, 7, 10]
    size = sum(len(f"{file} of step-00000005-attempt-0001") for file in ("model.pt", "optimizer.pt"))
    first = listed.json[0]
    assert 0 <= first.pop("age_s") < 60
    assert first == {
        "name": "step-00000005-attempt-0001",
        "step": 5,
        "epoch": 1,
        "metrics": {"loss": 0.2, "rows": 3},
        "finite": True,
        "bytes": size,
        "verified": True,
        "faults": [],
    }


def test_checkpoints_are_printed_as_a_table(run: Run, sunspot: StorageCommand) -> None:
    commit(run, start(run, "job"), 5, loss=0.123456, test_accuracy=None)
    table = sunspot("checkpoints", "ls", "run")
    heads, line = table.out.splitlines()
    assert heads.split() == ["name", "step", "epoch", "loss", "test_accuracy", "bytes", "age", "verified"]
    assert line.split()[:4] == ["step-00000005-attempt-0001", "5", "1", "0.1235"]
    assert line.endswith("yes")


def test_the_checkpoint_list_of_a_run_without_checkpoints_is_empty(run: Run, sunspot: StorageCommand) -> None:
    listed = sunspot("checkpoints", "ls", "run", "--json")
    assert (listed.code, listed.json) == (0, [])
    assert (sunspot("checkpoints", "verify", "run", "--json").json, sunspot("checkpoints", "ls", "run").code) == ([], 0)


def test_damaged_checkpoints_are_listed_as_damaged(run: Run, sunspot: StorageCommand) -> None:
    attempt = start(run, "job")
    whole, changed, broken = (commit(run, attempt, step) for step in (3, 5, 7))
    damage(run, changed)
    run.storage.write(run.key("checkpoints", broken.name, "manifest.json"), b"{")
    listed = sunspot("checkpoints", "ls", "run", "--json")
    assert (listed.code, [line["verified"] for line in listed.json]) == (0, [True, False, False])
    assert [line.partition(",")[0] for line in listed.err.splitlines()] == [
        f"{changed.name}: damaged",
        f"{broken.name}: damaged",
    ]
    lines = sunspot("checkpoints", "ls", "run").out.splitlines()[1:]
    assert [line.partition("no: ")[2].partition(" ")[0] for line in lines] == ["", "model.pt", "manifest.json"]

    verified = sunspot.process("checkpoints", "verify", "run", "--json")
    assert verified.code == 7
    assert verified.json[0] == {"name": whole.name, "verified": True, "faults": []}
    assert [len(line["faults"]) for line in verified.json] == [0, 1, 1]
    assert "2 of 3 checkpoints" in verified.err
    assert sunspot("checkpoints", "verify", "run", whole.name).code == 0
    one = sunspot("checkpoints", "verify", "run", changed.name)
    assert (one.code, one.out.splitlines()[1].split()[1:3]) == (7, ["model.pt", "has"])


def test_checkpoints_of_superseded_attempts_are_not_listed(run: Run, sunspot: StorageCommand) -> None:
    old = start(run, "old")
    origin = commit(run, old, 5)
    start(run, "new", origin.name)
    late, unfinished = commit(run, old, 9), commit(run, old, 3)
    run.storage.delete(run.key("checkpoints", unfinished.name, "manifest.json"))
    listed = sunspot("checkpoints", "ls", "run", "--json")
    assert [line["name"] for line in listed.json] == [origin.name]
    assert "the list omits 1 incomplete checkpoint without manifest.json" in listed.err
    assert "the list omits 1 checkpoint of superseded attempts" in listed.err
    assert sunspot("checkpoints", "verify", "run").code == 0
    for name, reason in [(late.name, "superseded"), (unfinished.name, "incomplete"), ("step-1", "no such checkpoint")]:
        answer = sunspot("checkpoints", "verify", "run", name, "--json")
        assert (answer.code, answer.out) == (3, "")
        assert reason in answer.err


def test_a_checkpoint_deleted_during_verify_is_not_reported_as_damaged(
    run: Run, sunspot: StorageCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = start(run, "job")
    old, new = commit(run, attempt, 3), commit(run, attempt, 5)

    def delete_first(run: Run, checkpoint: Checkpoint, listed: Any) -> list[str]:
        delete_checkpoint(run, old.name)
        return find_faults(run, checkpoint, listed)

    monkeypatch.setattr("sunspot.run.checkpoints.find_faults", delete_first)
    verified = sunspot("checkpoints", "verify", "run", "--json")
    assert (verified.code, [line["name"] for line in verified.json]) == (0, [new.name])


# -------------------------------------------------------------------------------------------------------------- metrics


@pytest.fixture
def history(run: Run) -> list[dict[str, Any]]:
    """Write four records that count, and one from a superseded attempt."""
    first = start(run, "job")
    ranks = [{"rows": 3}, {"rows": 2}]
    records = [
        {"step": step, "epoch": 1, "time": float(step), "loss": 1 / step, "rows": 5, "ranks": ranks}
        for step in range(1, 6)
    ]
    report(run, first, *records[:3])
    second = start(run, "job", commit(run, first, 2).name)
    later = [records[2], records[3], {**records[4], "loss": float("nan"), "test_accuracy": 0.5}]
    report(run, second, *later)
    return [{"attempt": 1, **record} for record in records[:2]] + [{"attempt": 2, **record} for record in later]


def test_the_metrics_command_prints_the_steps_of_the_lineage(
    sunspot: StorageCommand, history: list[dict[str, Any]]
) -> None:
    shown = sunspot.process("metrics", "run", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.json == [*history[:-1], {**history[-1], "loss": None}]


def test_metrics_are_printed_as_csv(sunspot: StorageCommand, history: list[dict[str, Any]]) -> None:
    shown = sunspot("metrics", "run", "--csv")
    lines = list(csv.DictReader(io.StringIO(shown.out)))
    assert list(lines[0]) == ["attempt", "step", "epoch", "time", "loss", "rows", "test_accuracy"]
    assert [float(line["loss"]) for line in lines[:-1]] == [record["loss"] for record in history[:-1]]
    assert [line["test_accuracy"] for line in lines] == ["", "", "", "", "0.5"]
    assert sunspot("metrics", "run", "--csv", "--json").code == 2


def test_metrics_are_written_as_parquet(sunspot: StorageCommand, history: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "history.parquet"
    shown = sunspot.process("metrics", "run", "--parquet", str(file))
    assert (shown.code, shown.out) == (0, f"{file}: 5 records, 8 columns\n")
    table = pq.read_table(file)
    assert table.column_names == ["attempt", "step", "epoch", "time", "loss", "rows", "ranks", "test_accuracy"]
    rows = table.to_pylist()
    assert [row.pop("test_accuracy") for row in rows] == [None, None, None, None, 0.5]
    assert math.isnan(rows[-1].pop("loss"))
    assert rows[:-1] == history[:-1]
    assert rows[-1]["ranks"] == [{"rows": 3}, {"rows": 2}]


def test_the_metrics_command_with_the_parquet_and_json_options_reports_the_written_file(
    run: Run, sunspot: StorageCommand, history: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "history.parquet"
    shown = sunspot("metrics", "run", "--parquet", str(file), "--json")
    assert shown.json == {"run": "run", "path": str(file), "records": 5, "bytes": file.stat().st_size}
    assert sunspot("metrics", "run", "--parquet", str(file), "--csv").code == 2
    refused = sunspot("metrics", "run", "--parquet", str(tmp_path / "no" / "folder.parquet"))
    assert (refused.code, "cannot be written" in refused.err) == (4, True)
    assert sunspot("metrics", "other", "--parquet", str(tmp_path / "other.parquet")).code == 3
    empty = begin(Run(run.storage, "empty"))
    assert sunspot("metrics", empty.name, "--parquet", str(file)).out == f"{file}: 0 records, 0 columns\n"


def test_numbers_that_some_ranks_did_not_record_are_null_in_parquet(
    run: Run, sunspot: StorageCommand, tmp_path: Path
) -> None:
    old, new = {"rows": 3}, {"rows": 2, "forward_s": 0.5, "throttled_s": None}
    records = [{"step": 1, "loss": 1, "ranks": [old]}, {"step": 2, "loss": 0.5, "ranks": [new, old]}]
    report(run, start(run, "job"), *records)
    assert sunspot("metrics", "run", "--parquet", str(tmp_path / "m.parquet")).code == 0
    rows = pq.read_table(tmp_path / "m.parquet").to_pylist()
    assert [row["loss"] for row in rows] == [1.0, 0.5]
    assert [[rank["forward_s"] for rank in row["ranks"]] for row in rows] == [[None], [0.5, None]]


def test_metrics_are_printed_as_a_table(sunspot: StorageCommand, history: list[dict[str, Any]]) -> None:
    lines = [line.split() for line in sunspot("metrics", "run").out.splitlines()]
    assert lines[0] == ["attempt", "step", "epoch", "loss", "test_accuracy"]
    assert lines[2] == ["1", "2", "1", "0.5"]
    assert lines[-1] == ["2", "5", "1", "nan", "0.5"]


def test_a_table_in_a_pipe_is_never_truncated(run: Run, sunspot: StorageCommand) -> None:
    names = {f"a_metric_with_a_long_name_{number}": 1.5 for number in range(60)}
    report(run, start(run, "job"), {"step": 1, "time": 0.0, "task": "[bold]text[/bold] :smile:", **names})
    heads, line = sunspot.process("metrics", "run").out.splitlines()
    assert heads.split() == ["attempt", "step", "task", *names]
    assert line.split()[2:] == ["[bold]text[/bold]", ":smile:", *["1.5"] * 60]


# ---------------------------------------------------------------------------------------------------------------- audit


def started(run: Run, owner: str, starts_from: str | None = None) -> Attempt:
    """Start an attempt and write its receipt."""
    attempt = start(run, owner, starts_from)
    write_receipt(run, attempt, attempt.number - 1)
    return attempt


def audited(run: Run, last: int, **changes: list[int]) -> None:
    """Record an attempt with a checkpoint at step `last`. `changes` replaces a step's rows, as in `step_3=[...]`."""
    attempt = started(run, "job")
    steps = consumed(1, last) | {int(name.removeprefix("step_")): rows for name, rows in changes.items()}
    record_audit(run, attempt, steps)
    commit(run, attempt, last)


def epoch(number: int, rows: int = ROWS, missing: int = 0, repeated: int = 0) -> dict[str, int]:
    return {"epoch": number, "rows": rows, "missing": missing, "repeated": repeated}


def test_an_audit_that_finds_no_errors_succeeds(run: Run, sunspot: StorageCommand) -> None:
    audited(run, 2 * STEPS_PER_EPOCH + 2)
    proved = sunspot.process("audit", "run", "--json")
    assert (proved.code, proved.err) == (0, "")
    assert proved.json == [epoch(1), epoch(2), epoch(3, rows=2 * BATCH)]
    lines = [line.split() for line in sunspot("audit", "run").out.splitlines()]
    assert lines[1] == ["1", str(ROWS), "0", "0"]
    assert lines[3] == ["3", str(2 * BATCH), "unfinished", "0"], "missing rows are not known yet"


def test_rows_outside_the_lineage_of_the_newest_checkpoint_are_not_audited(run: Run, sunspot: StorageCommand) -> None:
    """Attempt 1 continues after attempt 2 has started. Attempt 2 leaves an unfinished checkpoint and steps after its
    last one."""
    first = started(run, "old")
    record_audit(run, first, consumed(1, 6))
    origin = commit(run, first, 4)
    second = started(run, "new", origin.name)
    record_audit(run, first, {7: [0, 0], 8: [0]})
    record_audit(run, second, consumed(5, 5))
    commit(run, second, 5)
    record_audit(run, second, {6: [0], 7: [0]})
    commit(run, first, 8)
    unfinished = commit(run, second, 6)
    run.storage.delete(run.key("checkpoints", unfinished.name, "manifest.json"))
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, proved.json) == (0, [epoch(1)])


def test_rows_after_the_newest_intact_checkpoint_are_not_audited(run: Run, sunspot: StorageCommand) -> None:
    """Attempt 2 starts from a checkpoint that is damaged later. The steps that led to it are not audited, either."""
    first = start(run, "job")
    record_audit(run, first, consumed(1, 3))
    record_audit(run, first, {4: [0, 0]})
    commit(run, first, 3)
    damaged = commit(run, first, 4)
    start(run, "job", damaged.name)
    damage(run, damaged)
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, proved.json) == (7, [epoch(1, rows=3 * BATCH)])
    assert "step 4: 2 rows" not in proved.err


def test_an_attempt_needs_no_receipt_if_it_only_evaluated(run: Run, sunspot: StorageCommand) -> None:
    """Attempt 2 does the evaluation that attempt 1 missed, commits it, and is lost before its first step."""
    first = start(run, "job", tier="beginning", world_size=2)
    record_audit(run, first, consumed(1, 5))
    second = start(run, "job", commit(run, first, 5).name, tier="storage", world_size=2)
    start(run, "job", commit(run, second, 5).name, tier="storage", world_size=2)
    write_receipt(run, first, 0, Cause.BEGIN)
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, proved.json, proved.err) == (0, [epoch(1)], "")


FIRST = consumed(1, 1)[1]
SECOND = consumed(2, 2)[2]
LAST = consumed(5, 5)[5]


@pytest.mark.parametrize(
    ("last", "changes", "found", "told"),
    [
        (5, {"step_2": FIRST}, epoch(1, missing=5, repeated=5), ""),
        (5, {"step_2": SECOND[:4]}, epoch(1, rows=ROWS - 1, missing=1), "step 2: 4 rows instead of 5"),
        (5, {"step_2": [*SECOND, FIRST[0]]}, epoch(1, rows=ROWS + 1, repeated=1), "step 2: 6 rows instead of 5"),
        (5, {"step_2": [*SECOND, LAST[0]], "step_5": LAST[1:]}, epoch(1), "step 5: 1 rows instead of 2"),
        (5, {"step_2": []}, epoch(1, rows=ROWS - 5, missing=5), "steps 2..2: not recorded"),
        (5, {"step_5": [LAST[0], ROWS]}, epoch(1, missing=1), f"step 5: row {ROWS} is not one of 0..{ROWS - 1}"),
        (5, {"step_5": [LAST[0], -1]}, epoch(1, missing=1), f"step 5: row -1 is not one of 0..{ROWS - 1}"),
        (3, {"step_2": FIRST}, epoch(1, rows=15, repeated=5), ""),
        (3, {"step_2": SECOND[:4]}, epoch(1, rows=14), "step 2: 4 rows instead of 5"),
    ],
)
def test_an_audit_finds_rows_that_are_missing_or_repeated_or_unknown(
    run: Run, sunspot: StorageCommand, last: int, changes: dict[str, list[int]], found: dict[str, int], told: str
) -> None:
    audited(run, last, **changes)
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, proved.json) == (7, [found])
    assert told in proved.err


def test_a_single_row_left_at_the_end_of_an_epoch_joins_the_last_step(run: Run, sunspot: StorageCommand) -> None:
    begin(run, rows=11, batch=5, steps_per_epoch=2)
    attempt = started(run, "job")
    record_audit(run, attempt, {1: [0, 1, 2, 3, 4], 2: [5, 6, 7, 8, 9, 10], 3: [10, 9, 8, 7, 6], 4: [5, 4, 3, 2, 1, 0]})
    commit(run, attempt, 4)
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, proved.json, proved.err) == (0, [epoch(1, 11), epoch(2, 11)], "")


def test_an_audit_needs_recorded_rows(run: Run, sunspot: StorageCommand) -> None:
    answer = sunspot.process("audit", "run", "--json")
    assert (answer.code, answer.out) == (3, "")
    assert "no intact checkpoint" in answer.err
    commit(run, started(run, "job"), 5)
    answer = sunspot.process("audit", "run", "--json")
    assert (answer.code, answer.out) == (3, "")
    assert "start a run with another name and SUNSPOT_AUDIT=true" in answer.err


def test_steps_before_the_first_record_are_reported_as_missing(run: Run, sunspot: StorageCommand) -> None:
    first = start(run, "job")
    second = start(run, "job", commit(run, first, 7).name)
    record_audit(run, second, consumed(8, 10))
    commit(run, second, 10)
    proved = sunspot("audit", "run", "--json")
    assert proved.code == 7
    assert proved.json == [epoch(1, rows=0, missing=ROWS), epoch(2, rows=ROWS - 10, missing=10)]
    assert "steps 1..7: not recorded" in proved.err


@pytest.mark.parametrize("which", ["the newest", "an older one", "the only one"])
def test_the_audit_fails_if_a_checkpoint_is_damaged(run: Run, sunspot: StorageCommand, which: str) -> None:
    attempt = started(run, "job")
    record_audit(run, attempt, consumed(1, 2 * STEPS_PER_EPOCH))
    older = [] if which == "the only one" else [commit(run, attempt, STEPS_PER_EPOCH)]
    damaged = [*older, commit(run, attempt, 2 * STEPS_PER_EPOCH)][0 if which == "an older one" else -1]
    damage(run, damaged)
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, len(proved.err.splitlines())) == (7, 2)
    assert proved.err.startswith(f"{damaged.name}: damaged, model.pt has ")
    if which == "the only one":
        assert proved.out == ""
    else:
        assert proved.json == [epoch(1), epoch(2)][: 2 if which == "an older one" else 1]
        assert "1 checkpoint damaged" in proved.err


def interrupted(run: Run, receipts: list[int]) -> None:
    """Record four attempts. Attempt 2 is lost before its first step, and 3 starts from a copy in memory alone.

    Attempt 3 writes the rows that 1 had not written, and 4 has begun but left no trace.
    """
    first = start(run, "job", tier="beginning", world_size=2)
    record_audit(run, first, consumed(1, 2))
    origin = commit(run, first, 2)
    start(run, "job", origin.name, tier="storage", world_size=2)
    third = start(run, "job", checkpoint_name(4, 1), tier="memory", world_size=2)
    record_audit(run, first, consumed(3, 4))
    record_audit(run, third, consumed(5, 6))
    report(run, third, {"step": 4, "time": 0.0, "test_loss": 1.0}, {"step": 6, "time": 0.0})
    commit(run, third, 6)
    fourth = start(run, "job", checkpoint_name(6, 3), tier="memory", world_size=2)
    report(run, fourth, {"step": 6, "time": 0.0, "test_loss": 1.0})
    for attempt, since in ((first, 0), (third, 1)):
        if attempt.number in receipts:
            write_receipt(run, attempt, since)


@pytest.mark.parametrize(
    ("receipts", "missing"), [([1, 3], []), ([1], [3]), ([3], [1]), ([], [1, 3])], ids=["all", "one", "first", "none"]
)
def test_every_attempt_that_took_a_step_needs_a_receipt(
    run: Run, sunspot: StorageCommand, receipts: list[int], missing: list[int]
) -> None:
    interrupted(run, receipts)
    proved = sunspot.process("audit", "run", "--json")
    assert proved.json == [epoch(1), epoch(2, rows=BATCH)]
    assert proved.code == (7 if missing else 0)
    lines = proved.err.splitlines()
    assert lines[:-1] == [f"attempt {number} took steps, but has no receipt" for number in missing]
    if missing:
        assert lines[-1].endswith(f": {len(missing)} receipt{'s' if len(missing) > 1 else ''} missing")


def test_the_audit_reports_a_missing_receipt_even_without_recorded_rows(run: Run, sunspot: StorageCommand) -> None:
    commit(run, start(run, "job", tier="beginning"), 5)
    proved = sunspot("audit", "run", "--json")
    assert (proved.code, proved.out) == (7, "")
    assert "1 receipt missing" in proved.err


def test_a_state_that_existed_only_in_memory_is_not_reported_as_a_damaged_or_lost_checkpoint(
    run: Run, sunspot: StorageCommand
) -> None:
    """The run continues from step 4 of attempt 1, but storage has only its step 2."""
    first = start(run, "job", tier="beginning", world_size=2)
    report(run, first, *({"step": step, "time": float(step), "loss": 1.0} for step in (2, 4, 6)))
    origin, late = commit(run, first, 2), commit(run, first, 6)
    second = start(run, "job", checkpoint_name(4, 1), tier="memory", world_size=2)
    report(run, second, {"step": 5, "time": 9.0, "loss": 0.5})
    write_receipt(run, first, 0, Cause.BEGIN)
    write_receipt(run, second, 1, Cause.NODE_LOST, last_step=6)

    listed = sunspot("checkpoints", "ls", "run", "--json")
    assert [(line["name"], line["verified"]) for line in listed.json] == [(origin.name, True)]
    verified = sunspot("checkpoints", "verify", "run", "--json")
    assert (verified.code, len(verified.json), verified.err) == (0, 1, "")
    status = sunspot("status", "run", "--json")
    assert (status.json["step"], status.json["checkpoint"], status.json["steps_replayed"]) == (5, origin.name, 2)
    assert "passed over" not in sunspot("status", "run").out
    assert [record["step"] for record in sunspot("metrics", "run", "--json").json] == [2, 4, 5]
    assert sunspot("events", "run", "--json").code == 0
    removals = sunspot("checkpoints", "gc", "run", "--json").json
    assert [removal["name"] for removal in removals] == [late.name]
    got = sunspot("checkpoints", "get", "run", "--json", "--output", str(Path(sunspot.storage, "out")))
    assert (got.code, got.json["name"]) == (0, origin.name)


def test_the_audit_lists_only_the_first_of_many_errors(run: Run, sunspot: StorageCommand) -> None:
    audited(run, 20, **{f"step_{step}": [0] for step in range(1, 15)})
    proved = sunspot("audit", "run")
    assert proved.code == 7
    assert "and 9 more like it" in proved.err


def test_a_damaged_audit_file_is_reported(run: Run, sunspot: StorageCommand) -> None:
    audited(run, 5)
    [entry] = run.storage.list(run.key("audit"))
    run.storage.write(entry.key, b"PAR1")
    assert sunspot("audit", "run").code == 7
