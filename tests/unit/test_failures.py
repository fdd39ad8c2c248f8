"""Tests of the benchmark of failures without a cluster: its schedule, figures and files."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import time
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

import scripts.cluster
import scripts.failures.__main__ as program
import scripts.subjects
from scripts.cluster import Pod
from scripts.failures.losses import schedule
from scripts.failures.result import RESULTS, Result, plot, read, table, write
from scripts.failures.rows import of_checkpoints, of_replicas
from scripts.subjects import Group, Stock, Torchft
from sunspot.errors import ClusterError, SettingsError, SunspotError
from sunspot.storage import open_storage
from sunspot.submitter.manifest.render import JobRequest
from sunspot.submitter.proof import Epoch
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants


def test_the_failure_schedule_is_reproducible_and_half_of_its_losses_are_announced() -> None:
    first, again = (list(itertools.islice(schedule(7, 100, "abc"), 100)) for _ in range(2))
    assert first == again != list(itertools.islice(schedule(8, 100, "abc"), 100))
    assert [loss.kind for loss in first].count("reclaim") == 50
    assert {loss.node for loss in first} == set("abc")
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(first)]
    assert min(gaps) >= 50
    assert max(gaps) <= 150


def write_rows(folder: Path, name: str, time: float, *taken: tuple[int, int, list[int]]) -> None:
    text = json.dumps({"rows": 4, "time": time, "taken": taken}).encode()
    open_storage(str(folder)).write(f"job/rows/{name}.json", text)


def test_only_rows_in_the_lineage_of_the_newest_checkpoint_are_counted(tmp_path: Path) -> None:
    """Check a loss at step 4. Other workers continue from the checkpoint at step 3, and begin its epoch again."""
    write_rows(tmp_path, "1.0-after-none-at-0/2-0", 0.0, (1, 1, [0, 1]), (1, 2, [2, 3]))
    write_rows(tmp_path, "1.0-after-none-at-0/4-0", 0.0, (2, 3, [3, 0]), (2, 4, [1, 2]))
    write_rows(tmp_path, "2.0-after-1.0-at-3/5-0", 0.0, (2, 3, [3]), (3, 4, [2]))
    write_rows(tmp_path, "2.0-after-1.0-at-3/5-1", 0.0, (2, 3, [1]))
    write_rows(tmp_path, "1.5-after-1.0-at-2/9-0", 0.0, (2, 3, [3, 3, 3]))  # nothing continued from here
    epochs = of_checkpoints(open_storage(str(tmp_path)), "job")
    assert epochs == [Epoch(1, 4, 0, 0, True), Epoch(2, 4, 1, 1, True), Epoch(3, 1, 0, 0, False)]
    assert of_checkpoints(open_storage(str(tmp_path)), "nothing") == []


def test_rows_are_counted_even_if_one_or_all_replicas_are_lost(tmp_path: Path) -> None:
    for number, (name, *taken) in enumerate(
        (
            ("3-0", (1, 1, [0, 1]), (1, 1, [2]), (1, 1, [3])),
            ("5-0", (2, 1, [3]), (2, 1, [0])),
            ("7-0", (2, 2, [1]), (2, 2, [2, 0])),
            ("9-0", (3, 3, [0])),
            ("8-0", (3, 2, [3])),  # the clock is slow
            (
                "3-0",
                (1, 1, [0, 1]),
                (1, 1, [2]),
                (1, 1, [2]),
            ),  # all replicas start over, so the lines above do not count
            ("4-0", (2, 1, [3])),
        )
    ):
        write_rows(tmp_path, f"0-after-none-at-0/{name}", float(number), *taken)
    assert of_replicas(open_storage(str(tmp_path)), "job") == [Epoch(1, 4, 1, 1, True), Epoch(2, 1, 0, 0, False)]


def test_torchft_counts_steps_as_repeated_only_if_all_workers_restart() -> None:
    """A step counts as new even if its worker prints it after another worker has printed the next step."""
    torchft = Torchft(JobRequest("kind", {"RUN_NAME": "mine", "NUM_WORKERS": "3"}))
    for told, again in (([4, 5, 4, 6, 5, 6, 7], 0), ([4, 5, 6, 1, 1, 2, 1, 3], 6), ([9, 1, 2, 1, 2, 3, 1], 12)):
        lines = [f'(pid=1) {{"time": {float(number)}, "step": {step}}}' for number, step in enumerate(told)]
        torchft.lines = dict.fromkeys(lines)
        assert torchft.replayed() == again, told


def test_no_worker_runs_on_the_cpu_of_the_torchft_lighthouse() -> None:
    settings = {"RUN_NAME": "mine", "NUM_WORKERS": "3", "RESOURCES_PER_WORKER": '{"CPU": 2}'}
    _, job = Torchft(JobRequest("kind", settings)).objects
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "1"}
    given = shlex.split(workers["rayStartParams"]["resources"])  # the operator inserts it into a shell command
    assert [json.loads(word) for word in given] == [{"worker": 1}]
    for group in (cluster["headGroupSpec"], workers):
        environment = {one["name"]: one["value"] for one in group["template"]["spec"]["containers"][0]["env"]}
        assert json.loads(environment["SUNSPOT_RESOURCES_PER_WORKER"]) == {"CPU": 2, "worker": 1}


def test_reading_the_log_of_a_driver_continues_after_the_last_complete_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also check carriage returns, and that another head's log is read from its beginning."""
    logs, asked = {"a": "one\r\ntwo\rtwo\nthr", "b": "four\n"}, []

    def kubectl(verb: str, head: str, *words: str, namespace: str) -> str:
        asked.append(int(words[3]))
        return "\n".join(logs[head].split("\n")[asked[-1] - 1 :])

    monkeypatch.setattr(scripts.subjects, "kubectl", kubectl)
    stock = Stock(JobRequest("kind", {"RUN_NAME": "mine", "NUM_WORKERS": "3"}))
    stock.read_log("a", "log")
    logs["a"] += "ee\n"
    stock.read_log("a", "log")
    stock.read_log("b", "log")
    assert (list(stock.lines), asked) == (["one\r", "two\rtwo", "three", "four"], [1, 3, 1])


def test_the_results_of_each_contender_are_computed_and_stored(tmp_path: Path) -> None:
    points = [(float(at), at + 1) for at in range(50)] + [(float(at + 100), at + 41) for at in range(60)]
    result = Result("Sunspot", "job", 100, points, 10, [(49.5, "kill", "a")])
    assert (result.reached, result.wall_s, result.longest_s) == (100, 159.0, 61.0)
    assert result.goodput == pytest.approx(99 / 159)
    cut = Result("stock", "job", 200, points, 10, [(49.5, "kill", "a"), (70.0, "reclaim", "b")], 3, 4, "Failed")
    late = replace(cut, points=[*points, (230.0, 100)])
    assert (late.wall_s, late.longest_s, late.goodput) == (230, 71, pytest.approx(99 / 230))
    results = [result, cut, Result("TorchFT", "job", 5)]
    lines = table(results).splitlines()
    assert lines[2].startswith("| Sunspot | 100 | 2.6 min | 62.3% | 0 | 1 | 10 |  |  |")
    assert lines[3].startswith("| stock (Failed) | 100 of 200 | 2.6 min | 62.3% | 1 | 1 | 10 | 3 | 4 |")
    assert len({line.count("|") for line in lines}) == 1
    drawing = xml.etree.ElementTree.fromstring(plot(results))
    assert "stock: 100 steps in 2.6 min." in drawing.get("aria-label", "")
    write(results, tmp_path)
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(kept) == {RESULTS, "table.md", "plot.svg"}
    (tmp_path / "plot.svg").unlink()
    write(read(tmp_path), tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == kept


class Subject:
    """A job that takes a step at each look."""

    job = "job"
    namespace = "sunspot"
    workers = 2

    def __init__(self, ends_after: int) -> None:
        self.began = time.time()
        self.steps = 0
        self.ends_after = ends_after
        self.deleted = False

    def submit(self) -> None: ...

    def groups(self) -> list[Group]:
        return [Group(1, self.workers, self.began + 1, 0)]

    def over(self) -> str:
        return "Failed" if self.steps >= self.ends_after else ""

    def timeline(self) -> list[tuple[float, int]]:
        self.steps += 1
        return [(self.began + step / 20, step) for step in range(1, self.steps + 1)]

    def replayed(self) -> int:
        return 7

    def end(self) -> None:
        self.deleted = True


@pytest.mark.parametrize(
    ("ends_after", "ended", "add"),
    [(99, "", "echo"), (8, "Failed", "echo"), (99, "time is up", "echo"), (99, "", "false")],
)
def test_the_benchmark_removes_nodes_until_a_contender_finishes_or_fails_or_times_out(
    ends_after: int, ended: str, add: str, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, tmp_path: Path
) -> None:
    """Check all endings: the last step, a failed job, the time limit, and a failing command."""
    set_constants(program, LOOK_EVERY_S=0.05, END_S=0)
    set_constants(scripts.subjects, SETTLE_S=-2)
    monkeypatch.setattr(program, "ready_nodes", lambda namespace: {"a", "b", "c"})
    monkeypatch.setattr(program, "pods", lambda job, namespace: [Pod("head", "c", "", True), Pod("w", "a", "", False)])
    set_constants(scripts.cluster, LOOK_EVERY_S=0.01)
    log = tmp_path / "log"
    commands = {name: f"echo {name} {{node}} >> {log}" for name in ("reclaim", "kill")}
    commands["add"] = f"{add} add {{node}} >> {log}"
    arguments = argparse.Namespace(steps=20, every=0.1, away=0.01, seed=0, nodes="b,a", output=str(tmp_path / "out"))
    arguments.minutes = 0.005 if ended == "time is up" else 1
    subject, results = Subject(ends_after), [Result("it", "job", 20)]
    if add == "false":
        with pytest.raises(SunspotError, match="ended with exit code 1"):
            program.train(subject, results, commands, arguments)
    else:
        program.train(subject, results, commands, arguments)
        said = log.read_text().splitlines()
        dealt = [f"{kind} {node}" for _, kind, node in results[0].losses]
        assert dealt == said[: 2 * len(dealt) : 2]
        assert said[1::2] == [f"add {line.split()[1]}" for line in said[::2]]
        assert results[0].losses
        assert ended or results[0].losses[-1][0] <= results[0].wall_s
        assert (ended == "time is up") == (results[0].points[-1][1] == results[0].points[-2][1])
        assert (results[0].reached >= 20, results[0].ended, results[0].again) == (not ended, ended, 7)
        assert {file.name for file in (tmp_path / "out").iterdir()} == {"table.md", "plot.svg", RESULTS}
    assert subject.deleted


def test_the_documented_benchmark_command_is_parsed() -> None:
    [line] = re.findall(r"^make bench-failures .*$", (REPOSITORY / "docs/benchmarks.md").read_text(), re.M)
    given = dict(word.partition("=")[::2] for word in shlex.split(line)[2:])
    strike = re.findall(r"^STRIKE = .*\n.*$", (REPOSITORY / "Makefile").read_text(), re.M)[0]
    assert all(f"$({name})" in strike for name in given if name != "OPTIONS"), given
    arguments = program.make_parser().parse_args(shlex.split(given["OPTIONS"]))
    assert (arguments.nodes, arguments.steps, arguments.torchft_image) == ("a,b,c", 3000, "sunspot-torchft:1")


def test_the_benchmark_refuses_to_remove_the_head_node(
    monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants, tmp_path: Path
) -> None:
    set_constants(scripts.subjects, SETTLE_S=-2)
    monkeypatch.setattr(program, "ready_nodes", lambda namespace: {"a", "b"})
    monkeypatch.setattr(program, "pods", lambda job, namespace: [Pod("head", "a", "", True)])
    arguments = argparse.Namespace(steps=20, every=9, away=9, seed=0, nodes="b,a", output=str(tmp_path))
    subject = Subject(99)
    with pytest.raises(SettingsError, match="--nodes b,a: the head of job runs on a"):
        program.train(subject, [Result("it", "job", 20)], {}, arguments)
    assert subject.deleted


def test_a_contender_fails_if_it_takes_no_step_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, result = Subject(99), Result("it", "job", 20, [(0.0, 1)])
    monkeypatch.setattr(subject, "over", lambda: (_ for _ in ()).throw(ClusterError("gone")))
    program.look(subject, result, time.time() - program.STILL_S + 60, time_is_up=False)
    assert not result.ended
    program.look(subject, result, time.time() - program.STILL_S - 60, time_is_up=False)
    assert result.ended == "no step for 1860 s"
