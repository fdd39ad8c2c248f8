"""Tests that a hung rank reports where it is stuck and ends itself, but that a working or waiting rank does not."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sunspot.elastic import watchdog as hang
from sunspot.elastic.watchdog import (
    MAX_DUMP_BYTES,
    MAX_STACKS,
    Watchdog,
    describe,
    stacks_folder,
    stacks_prefix,
    upload_dumps,
)
from sunspot.run import SHARED_MEMORY, Run, open_run
from sunspot.run.attempts import Attempt, claim
from sunspot.run.failures import Hang, find_suspects, read_hangs, waited_for_rows
from sunspot.run.history import Journal, read_journal
from tests.harness import REPOSITORY

TIMEOUT_S = 2.0

RANK = """
import ctypes, json, re, sys, threading, time
from sunspot.elastic import watchdog as hang
from sunspot.run import open_run
from sunspot.run.attempts import Attempt
storage, rank = sys.argv[1], int(sys.argv[2])
hang.LINGER_S, hang.REPORT_S, hang.FIRST_STEP_S, hang.START_S = 1, 2, 2, 0
run = open_run(storage, "run")
def on_hang(rank_that_hung, late):
    print(f"told: {rank_that_hung.detail}", flush=True)
def train():
    with hang.Watchdog(run, rank, 2, TIMEOUT_S, on_hang) as watchdog:
        if CLAIMS:
            watchdog.claimed(Attempt(3, "job", None, 40))
        do_train(watchdog)
    print("trained", flush=True)
def run_rank():
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
"""
"""Program of a rank. As in Ray Train, the training thread is not the main thread."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = open_run(str(tmp_path), "run")
    yield run
    for path in left_behind(run):
        path.unlink()


def start_rank(
    run: Run,
    train: str,
    rank: int = 1,
    timeout_s: float = TIMEOUT_S,
    begin: str = "run_rank()",
    claims: bool = True,
) -> subprocess.Popen[str]:
    """Run a rank whose `do_train(watchdog)` has the body `train`. With `claims`, its attempt 3 begins at step 40."""
    body = textwrap.indent(textwrap.dedent(train), "    ")
    rank_program = RANK.replace("TIMEOUT_S", str(timeout_s), 1).replace("CLAIMS", str(claims))
    program = f"{rank_program}\ndef do_train(watchdog):\n{body}\n{begin}\n"
    return subprocess.Popen(
        [sys.executable, "-c", program, run.location.removesuffix("/run"), str(rank)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_rank(run: Run, train: str, **options: Any) -> tuple[int, str, float]:
    """Return the exit code, the output, and the duration in seconds."""
    began = time.monotonic()
    process = start_rank(run, train, **options)
    output = wait_for(process)
    return process.returncode, output, time.monotonic() - began


def wait_for(process: subprocess.Popen[str], timeout_s: float = 60) -> str:
    """Return the output of a process once it has ended."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    finally:
        process.kill()


def left_behind(run: Run) -> list[Path]:
    return list(hang.stacks_folder().glob(f"{hang.stacks_prefix(run)}*"))


def test_a_hung_rank_records_its_stacks_and_exits(run: Run) -> None:
    hangs = """
        watchdog.heartbeat(41)
        def consume_batch():
            time.sleep(1000)
        consume_batch()
    """
    code, output, seconds = run_rank(run, hangs)
    assert code == 1
    assert seconds < 20
    [event] = read_journal(run, "events")
    assert {name: event[name] for name in ("attempt", "step", "event", "rank", "waiting")} == {
        "attempt": 3,
        "step": 41,
        "event": "hung",
        "rank": 1,
        "waiting": False,
    }
    assert event["detail"].startswith("rank 1: no step for 2 s; is stuck in consume_batch at <string>:")
    assert abs(event["time"] - time.time()) < 60
    first, _, others = event["stacks"].partition("\nThread 0x")
    assert first.startswith("Training thread")
    assert "in do_train" in first, "the first stack is the training thread's"
    assert "in run_rank" in others, "the main thread's stack is recorded"
    assert "_report_and_end" not in event["stacks"], "the watchdog's own stack is left out"
    assert f"told: {event['detail']}" in output
    assert output.count(event["detail"]) == 2, "the rank's own log has the reason, too"
    assert left_behind(run) == []


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(
            "for step in range(40):\n    time.sleep(0.1)\n    watchdog.heartbeat(step)",
            id="steps",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "watchdog.heartbeat(41)\nwith watchdog.paused():\n    time.sleep(5)\ntime.sleep(0.5)", id="paused"
        ),
        pytest.param("time.sleep(3)\nwatchdog.heartbeat(41)", id="first step", marks=pytest.mark.slow),
        pytest.param(
            "watchdog.heartbeat()\ntime.sleep(3)\nwatchdog.heartbeat(41)",
            id="first step, after an evaluation",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_makes_progress_is_not_stopped(run: Run, train: str) -> None:
    code, output, _ = run_rank(run, train)
    assert code == 0, output
    assert "trained" in output
    assert read_journal(run, "events") == []
    assert left_behind(run) == []


@pytest.mark.slow
def test_a_timeout_of_0_disables_the_watchdog(run: Run) -> None:
    code, output, _ = run_rank(run, "watchdog.heartbeat(41)\ntime.sleep(2)", timeout_s=0)
    assert (code, output) == (0, "trained\n")


@pytest.mark.slow
def test_a_rank_has_more_time_for_its_first_step(run: Run) -> None:
    code, _, _ = run_rank(run, "time.sleep(1000)")
    assert code == 1
    [event] = read_journal(run, "events")
    assert event["detail"].startswith("rank 1: no step for 4 s")


def test_the_watchdog_stops_a_rank_that_waits_too_long_for_its_group_to_start(run: Run) -> None:
    """Such a rank gets no additional time for a first step, and its hang is recorded with the previous attempt."""
    claim(run, [], Attempt(1, "job", None, 0))
    waits = """
        for _ in range(6):  # rounds in which rank 0 reads storage
            time.sleep(0.5)
            watchdog.heartbeat()
        time.sleep(1000)
    """
    code, output, _ = run_rank(run, waits, claims=False)
    assert code == 1, output
    [event] = read_journal(run, "events")
    assert (event["attempt"], event["rank"], event["world_size"], event["starting"]) == (1, 1, 2, True)
    assert event["detail"].startswith(
        "rank 1: not all ranks answered for 2 s, while the group agreed on its start; is stuck in do_train at "
    )
    assert left_behind(run) == []


@pytest.mark.slow
def test_a_rank_that_hangs_after_a_pause_is_stopped(run: Run) -> None:
    code, output, _ = run_rank(
        run, "watchdog.heartbeat(41)\nwith watchdog.paused():\n    time.sleep(3)\ntime.sleep(1000)"
    )
    assert code == 1, output


@pytest.mark.parametrize(
    "hangs",
    [
        pytest.param('re.match(r"(a+)+$", "a" * 40 + "b")', id="in the interpreter", marks=pytest.mark.slow),
        pytest.param("ctypes.PyDLL(None).sleep(1000)", id="in a library"),
    ],
)
def test_a_hang_that_holds_the_gil_is_reported_by_the_next_rank_on_the_node(run: Run, hangs: str) -> None:
    code, output, _ = run_rank(run, f"watchdog.heartbeat(41)\ntime.sleep(0.5)\n{hangs}")
    assert code == 1, output
    assert read_journal(run, "events") == [], "a rank that holds the GIL writes no event"

    told: list[tuple[str, bool]] = []

    def tell(hang: Hang, late: bool) -> None:
        told.append((hang.detail, late))

    upload_dumps(run, 3, tell)
    assert read_journal(run, "events") == [], "an attempt leaves the dumps of its own ranks alone"
    with Watchdog(run, 0, 2, 300, tell) as watchdog:
        watchdog.claimed(Attempt(4, "job", None, 40))
    [event] = read_journal(run, "events")
    assert (event["attempt"], event["rank"], event["step"], event["event"]) == (3, 1, 41, "hung")
    assert "blocks all its other threads" in event["detail"]
    assert event["stacks"].startswith("Training thread")
    assert "in do_train" in event["stacks"]
    assert told == [(event["detail"], True)]
    assert left_behind(run) == []


def test_a_run_removes_the_old_stack_dumps_of_other_runs(run: Run) -> None:
    gone = [SHARED_MEMORY / f"sunspot-hang-{secrets.token_hex(6)}-0001-0000" for _ in range(2)]
    for path, age_s in zip(gone, (2 * 86_400, 3_600), strict=True):
        path.write_text("{}\n")
        os.utime(path, (time.time() - age_s,) * 2)
    try:
        upload_dumps(run, 1, lambda *_: None)
        assert [path.exists() for path in gone] == [False, True], "a dump from an hour ago may still be needed"
    finally:
        gone[1].unlink()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", "link", "of another user", "huge", "deep"])
def test_a_stack_dump_of_another_user_is_neither_read_nor_reported(run: Run, kind: str, tmp_path: Path) -> None:
    path = Path(f"{stacks_folder()}/{stacks_prefix(run)}x")
    header = {"attempt": 1, "rank": 0, "world_size": 2, "step": 3, "beat": 0.0, "thread": 1}
    stacks = "\nThread 0x1 (most recent call first):\n"
    content = json.dumps(header) + stacks
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "dump").write_text(content)
        path.symlink_to(tmp_path / "dump")
    elif kind == "of another user":
        if os.getuid():
            pytest.skip("only a superuser can give a file away")
        path.write_text(content)
        os.chown(path, 12345, 12345)
    elif kind == "huge":
        path.write_text(json.dumps(header) + " " * (2 * MAX_DUMP_BYTES) + stacks)
    else:
        path.write_text("[" * 100_000)
    told: list[Any] = []
    upload_dumps(run, 2, lambda *event: told.append(event))
    assert (told, read_journal(run, "events")) == ([], [])


def test_a_rank_exits_even_if_storage_and_the_control_channel_hang(run: Run) -> None:
    hangs = """
        def never(*words):
            print("asked", flush=True)
            time.sleep(1000)
        hang.Journal.flush = never
        watchdog._on_hang = never
        watchdog.heartbeat(41)
        time.sleep(1000)
    """
    code, output, seconds = run_rank(run, hangs)
    assert code == 1
    assert output.count("asked") == 2
    assert seconds < 20
    told: list[object] = []
    upload_dumps(run, 9, lambda *event: told.append(event))
    assert [event["step"] for event in read_journal(run, "events")] == [41], "the hang is recorded once storage works"
    assert told == [], "an old hang is not reported as the newest incident"


@pytest.mark.slow
def test_the_timer_stops_a_rank_that_hangs_while_it_reports(run: Run) -> None:
    code, _, seconds = run_rank(
        run, "hang.describe = lambda *a: ctypes.PyDLL(None).sleep(1000)\nwatchdog.heartbeat(41)\ntime.sleep(1000)"
    )
    assert code == 1
    assert seconds < 20


@pytest.mark.slow
def test_the_watchdog_does_not_affect_how_a_forked_child_exits(run: Run) -> None:
    forks = """
        import os, signal
        time.sleep(2)  # by now the timer is set
        child = os.fork()
        if not child:
            signal.alarm(10)
            sys.exit(0)
        print("child:", os.waitpid(child, 0)[1], flush=True)
    """
    process = start_rank(
        run, forks, begin="train()", timeout_s=1000
    )  # only the main thread can end a process in the usual way
    assert wait_for(process) == "child: 0\ntrained\n"


def test_a_heartbeat_costs_almost_nothing(run: Run) -> None:
    with Watchdog(run, 0, 2, 300, print) as watchdog:
        began = time.perf_counter()
        for step in range(10_000):
            watchdog.heartbeat(step)
        assert (time.perf_counter() - began) / 10_000 < 10e-6


TORCH = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
hang.FIRST_STEP_S = 60
run_rank()
"""

COLLECTIVE = """
with watchdog.paused():  # torch imports many modules at first
    dist.init_process_group("gloo", init_method="file://INIT", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
watchdog.heartbeat(41)
def consume_batch():
    if rank == 1:
        time.sleep(1000)
consume_batch()
model(torch.ones(1, 4)).sum().backward()
"""


def test_the_rank_for_which_the_other_ranks_wait_is_identified(run: Run, tmp_path: Path) -> None:
    train = COLLECTIVE.replace("INIT", str(tmp_path / "init"))
    processes = [start_rank(run, train, rank=rank, begin=TORCH, timeout_s=3) for rank in (0, 1)]
    waiting, hung = [wait_for(process, 120) for process in processes]
    assert processes[1].returncode == 1, hung
    assert "RuntimeError" in waiting, "the end of the other rank breaks the collective, but does not end this process"
    events = sorted(read_journal(run, "events"), key=lambda event: event["rank"])
    assert [event["waiting"] for event in events] == [True, False], [event["stacks"] for event in events]
    assert "waits for other ranks in" in events[0]["detail"]
    assert "is stuck in consume_batch" in events[1]["detail"]
    assert find_suspects(read_hangs(events), 2) == [1]


RANKS, ROWS = "other ranks", "rows of Ray Data"


def dump(*threads: list[str], first: int = 1) -> str:
    """Return faulthandler's output for threads 1, 2, ..., each given as a list of files."""
    return "".join(
        f"Thread {number:#018x} (most recent call first):\n" + "".join(f'  File "{f}", line 7 in work\n' for f in files)
        for number, files in enumerate(threads, first)
    )


ABOUT = {"attempt": 3, "rank": 1, "world_size": 2, "step": 41, "beat": 1000.0, "thread": 2}


@pytest.mark.parametrize(
    ("files", "waits_for", "place"),
    [
        (["/w/sunspot/tasks/mnist.py"], "", "/w/sunspot/tasks/mnist.py"),
        (["/usr/lib/python3.11/socket.py", "/w/my_task.py"], "", "/w/my_task.py"),
        (
            ["/v/site-packages/torch/distributed/distributed_c10d.py", "/w/sunspot/metrics.py"],
            RANKS,
            "/w/sunspot/metrics.py",
        ),
        (["/w/sunspot/parallel/decisions.py", "/w/sunspot/train/loop.py"], RANKS, "/w/sunspot/parallel/decisions.py"),
        (["/v/site-packages/torch/autograd/graph.py", "/w/sunspot/train/loop.py"], RANKS, "/w/sunspot/train/loop.py"),
        (["/w/my_layer.py", "/v/site-packages/torch/autograd/graph.py", "/w/a.py"], "", "/w/my_layer.py"),
        (
            [
                "/usr/lib/python3.11/threading.py",
                "/v/site-packages/ray/_private/worker.py",
                "/v/site-packages/ray/train/collective.py",
                "/w/sunspot/worker.py",
            ],
            RANKS,
            "/w/sunspot/worker.py",
        ),
        (["/v/site-packages/boto3/x.py", "/v/site-packages/ray/train/run.py"], "", "/v/site-packages/boto3/x.py"),
        (["/usr/lib/python3.11/queue.py", "/v/site-packages/ray/data/iterator.py", "/w/step.py"], ROWS, "/w/step.py"),
        (["/w/my_collate.py", "/v/site-packages/ray/data/iterator.py", "/w/step.py"], "", "/w/my_collate.py"),
    ],
)
def test_a_hang_is_located_at_the_innermost_relevant_frame(files: list[str], waits_for: str, place: str) -> None:
    found = describe(ABOUT, dump(["/main.py"], files), 1300.4)
    verb = f"waits for {waits_for}" if waits_for else "is stuck"
    assert found.detail == f"rank 1: no step for 300 s; {verb} in work at {place}:7"
    assert (found.waiting, found.loading) == (waits_for == RANKS, waits_for == ROWS)


def test_stacks_are_shortened_and_begin_with_the_training_thread() -> None:
    deep = ["/w/recursive.py"] * 100
    found = describe(ABOUT, dump(*[deep] * 100), 1300)
    assert len(found.stacks) == MAX_STACKS
    assert len(json.dumps(found.record())) < MAX_STACKS + 2000
    assert found.stacks.startswith('Training thread (most recent call first):\n  File "/w/recursive.py"')


def test_a_hang_is_described_even_if_no_stacks_were_recorded() -> None:
    assert describe(ABOUT, "", 1300).detail == "rank 1: no step for 300 s"


@pytest.mark.parametrize(
    ("waits_for", "found"),
    [
        ({0: ROWS, 1: ROWS}, True),
        ({0: RANKS, 1: ROWS}, True),
        ({0: RANKS, 1: RANKS}, False),
        ({0: "", 1: ROWS}, False),
        ({1: ROWS}, False),
    ],
    ids=["all", "one, and the other waits for it", "none", "beside a hung one", "beside a silent one"],
)
def test_ranks_without_rows_from_ray_data_do_not_count_as_hung(waits_for: dict[int, str], found: bool) -> None:
    hangs = [Hang(rank, "", what == RANKS, what == ROWS) for rank, what in waits_for.items()]
    assert waited_for_rows(hangs, 2) == found


@pytest.mark.parametrize(
    ("waiting", "found"),
    [
        ({}, []),
        ({0: True, 1: False, 2: True}, [1]),
        ({0: True, 2: True}, [1]),
        ({0: True, 1: True, 2: True}, []),
        ({0: False, 1: True}, [0, 2]),
    ],
)
def test_ranks_for_which_other_ranks_wait_are_suspected_of_hanging(waiting: dict[int, bool], found: list[int]) -> None:
    hangs = [Hang(rank, "", waits) for rank, waits in waiting.items()]
    assert find_suspects(hangs, 3) == found
    assert read_hangs([{"event": "commit failed"}, *(hang.record() for hang in hangs)]) == hangs


def test_records_from_several_journals_are_read_in_order(run: Run) -> None:
    for step in range(3):
        journal = Journal(run, "events", 1)
        journal.append({"step": step, "time": 0.0, "event": "a test"})
        journal.flush()
    assert [(record["attempt"], record["step"]) for record in read_journal(run, "events")] == [(1, 0), (1, 1), (1, 2)]


def test_a_process_exits_if_it_hangs_before_its_first_step() -> None:
    """No other rank can end a process that hangs while its group forms, for example."""
    program = """
        import ctypes, sys, time
        from sunspot.elastic import watchdog
        watchdog.LINGER_S = 1
        with watchdog.ended_after(60.0, "never"):
            pass
        with watchdog.ended_after(1.0, "a group of 3 formed"):
            hang = ctypes.PyDLL(None).usleep if sys.argv[1] == "lock" else lambda us: time.sleep(us / 1e6)
            hang(30_000_000)
    """
    for holds in ("lock", "nothing"):
        command = [sys.executable, "-c", textwrap.dedent(program), holds]
        ended = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, timeout=120)
        assert ended.returncode == 1
        assert 'File "<string>"' in ended.stderr, "the output shows where the process hung"
    assert "this process exits, because it waited more than 1 s until a group of 3 formed" in ended.stderr


def test_pausing_the_watchdog_enters_the_given_context_manager(run: Run) -> None:
    pauses = list[str]()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        pauses.append("begins")
        yield
        pauses.append("ends")

    watchdog = Watchdog(run, 0, 2, 300, print, around)
    with watchdog.paused():
        assert pauses == ["begins"]
    assert pauses == ["begins", "ends"]


def test_the_fork_hook_that_cancels_timers_is_registered_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of the process has a watchdog, but a fork hook stays registered until the process ends."""
    registered = list[object]()
    monkeypatch.setattr(os, "register_at_fork", lambda before: registered.append(before))
    hang._cancel_timers_at_fork.cache_clear()
    for _ in range(3):
        with Watchdog(run, 0, 2, 300, print):
            pass
    hang._cancel_timers_at_fork.cache_clear()
    assert len(registered) == 1
