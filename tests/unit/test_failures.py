"""The benchmark of failures: its schedule, what it counts, and what it leaves. Needs no cluster."""

from __future__ import annotations

import argparse
import itertools
import json
import time
import xml.etree.ElementTree
from pathlib import Path

import pytest

import scripts.cluster
import scripts.failures.__main__ as program
from app.errors import SunspotError
from app.storage import open_storage
from scripts.failures.losses import schedule
from scripts.failures.result import Result, plot, table
from scripts.failures.rows import of_checkpoints, of_replicas
from submitter.commands.audit import Epoch


def test_the_schedule_is_the_same_for_all_and_half_of_it_comes_with_notice() -> None:
    first, again = (list(itertools.islice(schedule(7, 100, 3), 100)) for _ in range(2))
    assert first == again != list(itertools.islice(schedule(8, 100, 3), 100))
    assert [loss.kind for loss in first].count("reclaim") == 50
    assert {loss.node for loss in first} == {0, 1, 2}
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(first)]
    assert min(gaps) >= 50
    assert max(gaps) <= 150


def write_rows(folder: Path, name: str, time: float, *taken: tuple[int, int, list[int]]) -> None:
    text = json.dumps({"rows": 4, "time": time, "taken": taken}).encode()
    open_storage(str(folder)).write(f"job/rows/{name}.json", text)


def test_rows_that_led_to_the_newest_checkpoint(tmp_path: Path) -> None:
    """The first workers' step 4 is lost, as others go on from the checkpoint at 3; they begin its epoch again."""
    write_rows(tmp_path, "1.0-after-none-at-0/2-0", 0.0, (1, 1, [0, 1]), (1, 2, [2, 3]))
    write_rows(tmp_path, "1.0-after-none-at-0/4-0", 0.0, (2, 3, [3, 0]), (2, 4, [1, 2]))
    write_rows(tmp_path, "2.0-after-1.0-at-3/5-0", 0.0, (2, 3, [3]), (3, 4, [2]))
    write_rows(tmp_path, "2.0-after-1.0-at-3/5-1", 0.0, (2, 3, [1]))
    write_rows(tmp_path, "1.5-after-1.0-at-2/9-0", 0.0, (2, 3, [3, 3, 3]))  # not gone on from
    epochs = of_checkpoints(open_storage(str(tmp_path)), "job")
    assert epochs == [Epoch(1, 4, 0, 0), Epoch(2, 4, 1, 1), Epoch(3, 1, 0, 0)]
    assert of_checkpoints(open_storage(str(tmp_path)), "nothing") == []


def test_rows_of_replicas_that_lose_one_and_then_all(tmp_path: Path) -> None:
    for number, (start, name, taken) in enumerate(
        (
            ("1.0", "4-0", (1, 4, [0, 1])),
            ("1.1", "4-1", (1, 4, [2])),
            ("1.0", "5-0", (1, 5, [3])),
            ("1.1", "6-1", (1, 6, [3])),
            ("1.1", "5-1", (1, 5, [0])),  # by a clock that is late
            ("3.0", "3-0", (1, 3, [0])),  # from an earlier step: the above is forgotten
            ("3.0", "4-0", (1, 4, [0, 2])),
            ("3.0", "5-0", (2, 5, [1])),
        )
    ):
        write_rows(tmp_path, f"{start}-after-none-at-0/{name}", float(number), taken)
    assert of_replicas(open_storage(str(tmp_path)), "job") == [Epoch(1, 3, 2, 1), Epoch(2, 1, 0, 0)]


def test_figures_of_a_contender() -> None:
    points = [(float(at), at + 1) for at in range(50)] + [(float(at + 100), at + 41) for at in range(60)]
    result = Result("Sunspot", 100, points, 10, [(49.5, "kill", "a")])
    assert (result.reached, result.wall_s, result.longest_s) == (100, 159.0, 61.0)
    assert result.goodput == pytest.approx(99 / 159)
    cut = Result("stock", 200, points, 10, [(49.5, "kill", "a"), (70.0, "reclaim", "b")], 3, 4, "Failed")
    lines = table([result, cut, Result("TorchFT", 5)]).splitlines()
    assert lines[2].startswith("| Sunspot | 100 | 2.6 min | 62.3% | 0 | 1 | 10 |  |  |")
    assert lines[3].startswith("| stock (Failed) | 100 of 200 | 2.6 min | 62.3% | 1 | 1 | 10 | 3 | 4 |")
    assert len({line.count("|") for line in lines}) == 1
    drawing = xml.etree.ElementTree.fromstring(plot([result, cut, Result("TorchFT", 5)]))
    assert "stock: 100 steps in 2.6 min." in next(e.get("aria-label", "") for e in drawing.iter() if e.get("role"))


class Subject:
    """A job that takes a step at each look."""

    job, namespace, workers = "job", "sunspot", 2

    def __init__(self, ends_after: int) -> None:
        self.began, self.steps, self.ends_after, self.deleted = time.time(), 0, ends_after, False

    def submit(self) -> None: ...

    def over(self) -> str:
        return "Failed" if self.steps >= self.ends_after else ""

    def timeline(self) -> list[tuple[float, int]]:
        self.steps += 1
        return [(self.began + step / 20, step) for step in range(1, self.steps + 1)]

    def replayed(self) -> int:
        return 7

    def end(self) -> None:
        self.deleted = True


@pytest.mark.parametrize(("ends_after", "ended", "add"), [(99, "", "echo"), (8, "Failed", "echo"), (99, "", "false")])
def test_a_contender_goes_through_the_losses(
    ends_after: int, ended: str, add: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends with its last step, when the job fails, or with a command that does."""
    monkeypatch.setattr(program, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(program, "ready_nodes", lambda namespace: {"a", "b", "c"})
    monkeypatch.setattr(scripts.cluster, "LOOK_EVERY_S", 0.01)
    log = tmp_path / "log"
    commands = {name: f"echo {name} {{node}} >> {log}" for name in ("reclaim", "kill")}
    commands["add"] = f"{add} add {{node}} >> {log}"
    arguments = argparse.Namespace(steps=20, every=0.1, away=0.01, seed=0, nodes="b,a", output=str(tmp_path / "out"))
    subject, results = Subject(ends_after), [Result("it", 20)]
    if add == "false":
        with pytest.raises(SunspotError, match="ended with 1"):
            program.train(subject, results, commands, arguments)  # type: ignore[arg-type]
    else:
        program.train(subject, results, commands, arguments)  # type: ignore[arg-type]
        said = log.read_text().splitlines()
        assert [line for line in said if not line.startswith("add")] == [
            f"{kind} {n}" for _, kind, n in results[0].losses
        ]
        assert said[1::2] == [f"add {node}" for _, _, node in results[0].losses]
        assert results[0].losses
        assert (results[0].reached >= 20, results[0].ended, results[0].again) == (not ended, ended, 7)
        assert {file.name for file in (tmp_path / "out").iterdir()} == {"table.md", "plot.svg", "results.json"}
    assert subject.deleted
