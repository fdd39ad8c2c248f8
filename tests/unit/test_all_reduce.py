"""Tests of the all-reduce between two pods: its time between two real processes, and the warnings about its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.parallel.nccl_log import read_network
from sunspot.storage import open_storage
from sunspot.storage.prove import FOLDER, Result
from sunspot.train import all_reduce
from sunspot.train.all_reduce import Timing, judge, try_all_reduce
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants


def test_two_pods_connect_and_measure_the_duration_of_an_all_reduce(tmp_path: Path) -> None:
    """`sunspot doctor` starts the same processes in pods."""
    environment = {**os.environ, "SUNSPOT_STORAGE_PATH": str(tmp_path / "runs")}
    command = [sys.executable, "-m", "sunspot.train.pod_probe", "--meeting", "here"]
    pods = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--output", str(tmp_path / str(rank))],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, pod in enumerate(pods):
        _, errors = pod.communicate(timeout=180)
        assert pod.returncode == 0, errors
        check = json.loads((tmp_path / str(rank)).read_text())[-1]
        assert (check["check"], check["result"]) == ("network", "ok"), check
        assert "sums 100 MB in " in check["seen"]
        assert check["seen"].endswith(" ms, by gloo")
    assert not open_storage(str(tmp_path / "runs")).list("")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_warns_if_the_other_pod_does_not_appear_in_time(
    rank: int, tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(all_reduce, WAIT_S=1.0, LOOK_S=0.1)
    check = try_all_reduce(str(tmp_path), "here", rank, 0)
    assert (check.result, check.seen) == (Result.WARNING, "not tried: the other pod did not come within 1 s")
    assert not open_storage(str(tmp_path)).list("")


def test_a_pod_reports_the_address_that_it_cannot_reach(tmp_path: Path, set_constants: SetConstants) -> None:
    set_constants(all_reduce, ANSWER_S=1.0)
    open_storage(str(tmp_path)).write(f"{FOLDER}/here", b"127.0.0.1 9")
    check = try_all_reduce(str(tmp_path), "here", 1, 0)
    assert check.result == Result.FAILED
    assert "127.0.0.1" in check.seen
    assert "within-clusters" in check.fix


@pytest.mark.parametrize(
    ("timing", "gpus", "devices", "result", "told"),
    [
        (Timing(0.4, 0.001), 0, False, Result.OK, "100 MB in 400.0 ms (2.0 Gb/s), and one number in 1.00 ms, by gloo"),
        (
            Timing(0.1, 0.001, "Socket"),
            1,
            False,
            Result.OK,
            "and one number in 1.00 ms, by NCCL over Socket, 1 GPU per pod",
        ),
        (Timing(0.3, 0.001, "Socket"), 1, False, Result.WARNING, "GPUs wait if it takes more than 0.2 s"),
        (Timing(0.1, 0.001, "Socket"), 8, True, Result.WARNING, "for EFA, the image needs libfabric"),
        (Timing(0.005, 0.001, "IB"), 8, True, Result.OK, "in 5.0 ms (300.0 Gb/s), "),
        (Timing(0.005, 0.001), 8, True, Result.OK, "by NCCL over an unknown network, 8 GPUs per pod"),
    ],
)
def test_networks_that_are_slow_or_use_tcp_cause_a_warning(
    timing: Timing, gpus: int, devices: bool, result: Result, told: str, tmp_path: Path, set_constants: SetConstants
) -> None:
    set_constants(all_reduce, RDMA=tmp_path if devices else tmp_path / "none")
    check = judge(timing, gpus)
    assert check.result == result
    assert told in check.seen + check.fix


@pytest.mark.parametrize("network", ["Socket", "IB", "AWS Libfabric", ""])
def test_the_name_of_the_network_is_read_from_the_nccl_log(network: str, tmp_path: Path) -> None:
    log = tmp_path / "nccl"
    lines = ["node:1:1 [0] NCCL INFO NET/IB : No device found.", f"node:1:1 [0] NCCL INFO Using network {network}"]
    log.write_text("\n".join([*lines, "node:1:1 [0] NCCL INFO ncclCommInitRankConfig comm 0x1"] if network else []))
    assert read_network(log) == network


def test_the_nccl_log_is_private_and_is_deleted_when_the_process_exits() -> None:
    program = "from sunspot.parallel.nccl_log import own_log; log = own_log(); log.touch(); "
    program += "print(log, oct(log.parent.stat().st_mode)[-3:], log == own_log())"
    said = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    place, mode, same = said.split()
    assert (mode, same) == ("700", "True")
    assert not Path(place).parent.exists()
