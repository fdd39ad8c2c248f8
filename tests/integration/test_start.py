"""Ranks of a group that starts, one of which freezes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.elastic import watchdog as hang
from sunspot.run import open_run
from sunspot.run.hangs import read_hangs, suspects
from sunspot.run.history import read_journal
from tests.harness import REPOSITORY

RANK = """
import os, signal, sys, time
from types import SimpleNamespace
import ray, ray.train.torch, torch, torch.distributed as dist
import sunspot.parallel.collectives as parallel
from sunspot.elastic import claim, watchdog as hang
from sunspot.settings import Settings
from sunspot.train import join
from sunspot.train.config import WorkerConfig
from tests.harness.control import LocalControl
storage, rank, freezes = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "freezes"
hang.LINGER_S, hang.REPORT_S, hang.START_S, parallel.ROUND_S = 1, 5, 0, 0.5
ranks = {"get_world_rank": lambda: rank, "get_world_size": lambda: 2, "get_local_rank": lambda: rank}
ray.train.get_context = lambda: SimpleNamespace(**ranks)
ray.train.torch.get_device = lambda: torch.device("cpu")
ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "node")
join.processes_up = join.launch_time = lambda: 0.0
class Control(LocalControl):
    def tell(self, method, *given, **named):
        print("told", method.__name__, *given, flush=True)
claim_attempt, find_heartbeats = claim.claim_attempt, claim.find_heartbeats
def read_slowly(*arguments):
    time.sleep(6)
    return claim_attempt(*arguments)
def freeze(location):
    if freezes and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return find_heartbeats(location)
claim.claim_attempt, claim.find_heartbeats = read_slowly, freeze
def load_start(*_):
    print("agreed", flush=True)
    os._exit(0)
join.load_start = load_start
dist.init_process_group("gloo", init_method=f"file://{storage}/init", rank=rank, world_size=2)
settings = Settings(storage_path=storage, run_name="run", hang_timeout_s=3)
plan = SimpleNamespace(settings=settings, total_steps=1, steps=SimpleNamespace(per_epoch=1))
config = WorkerConfig(plan, "me", "", Control(), threads=1, warm_key="", collective_timeout_s=300)
with join.join_run(config):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["freezes", "reads slowly"])
def test_a_rank_that_freezes_while_a_group_starts_is_found_by_the_others(what: str, tmp_path: Path) -> None:
    """As long as rank 0 reads, they hear of each other."""
    run = open_run(str(tmp_path), "run")
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), what], cwd=REPOSITORY, text=True, stdout=-1, stderr=subprocess.STDOUT)
        for rank in (0, 1)
    ]
    try:
        output = ranks[0].communicate(timeout=100)[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for path in hang._folder().glob(f"{hang._prefix(run)}*"):
            path.unlink()
    events = [event for event in read_journal(run, "events") if event["event"] == "hung"]
    if what == "reads slowly":
        assert (ranks[0].returncode, "agreed" in output, events) == (0, True, []), output
        return
    assert ranks[0].returncode == 1, output
    [event] = events
    assert suspects(read_hangs(events), 2) == [1]
    assert "rank 0: not all ranks answered for" in output
    assert "waits for other ranks in gather_objects" in event["detail"]
    assert "in agree_on_start" in event["stacks"]
    assert "told add_hang" in output
