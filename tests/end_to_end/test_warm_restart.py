"""Workers that are forked on restarts, of a real run: what they train is the same, and nothing is left of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sunspot.run import SHARED_MEMORY, node_memory_directory
from tests.harness.language_models import write_base, write_texts
from tests.harness.program import Program
from tests.harness.training import (
    MakeData,
    assert_audit_clean,
    assert_complete,
    receipts_of,
    the_run,
    wait_for_receipts,
    weights,
    worker_processes,
)
from tests.harness.waiting import wait_until


@pytest.mark.slow
def test_forked_workers_end_with_the_same_bits_and_leave_nothing(
    program: Program, make_data: MakeData, tmp_path: Path
) -> None:
    settings = {"TASK": "tests.tasks.waiting", "DATASET": make_data(4000, row_group=1000), "GLOBAL_BATCH_SIZE": 20}
    settings |= {"EPOCHS": 1, "CHECKPOINT_EVERY_STEPS": 50, "REPORT_EVERY_S": 1}
    program.run(**settings, RUN_NAME="undisturbed")

    served = tmp_path / "served"
    process = program.start(
        **settings, WARM_RESTART_AFTER_S=0.1, MAX_FAILURES=2, TASK_ARGS=json.dumps({"60": str(served)})
    )
    run = the_run(program)
    wait_for_receipts(run, 1, process)
    wait_until(servers, process)
    [server] = servers()
    for count in (2, 3):
        worker_processes()[0].kill()
        lost = wait_for_receipts(run, count, process)[-1]
        assert (lost.forked, lost.world_after) == (2, 2)
        assert {worker.ppid() for worker in worker_processes()} == {server.pid}
    served.touch()
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert [receipt.forked for receipt in receipts_of(run)] == [0, 2, 2]
    assert_complete(run)
    assert_audit_clean(program)
    for name, tensor in weights(the_run(program, "undisturbed")).items():
        assert torch.equal(tensor, weights(run)[name]), name
    wait_until(lambda: not server.is_running() and not worker_processes())
    copies = node_memory_directory(run.location)
    assert not copies.exists()
    assert not list(SHARED_MEMORY.glob(f"sunspot-hang-{copies.name[:12]}-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"TASK": "tests.tasks.tiny", "LOADER": "ray"}, ""),
        ({"TASK": "tests.tasks.lightning"}, "lightning"),
        ({"TASK": "sunspot.tasks.gpt", "PARALLEL": "fsdp"}, ""),
        ({"TASK": "sunspot.tasks.finetune"}, "peft"),
        ({"TASK": "sunspot.tasks.keras_mnist"}, "keras"),
        ({"TASK": "tests.tasks.slow_trees", "TASK_ARGS": '{"library": "xgboost", "pause_s": 0.5}'}, "xgboost"),
        ({"TASK": "tests.tasks.slow_trees", "TASK_ARGS": '{"library": "lightgbm", "pause_s": 0.5}'}, "lightgbm"),
    ],
    ids=lambda value: value.get("LOADER", value["TASK"]) if isinstance(value, dict) else value,
)
def test_workers_of_every_kind_are_forked(
    settings: dict[str, Any], needs: str, program: Program, make_data: MakeData, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs, reason="its extra is not installed")
    settings = {"DATASET": make_data(20_000, row_group=1000), "GLOBAL_BATCH_SIZE": 20, "EPOCHS": 1000, **settings}
    if settings["TASK"] == "sunspot.tasks.finetune":
        base, texts = write_base(tmp_path / "base"), write_texts(tmp_path / "texts")
        settings |= {"TASK_ARGS": json.dumps({"base": base, "rank": 4, "context": 32}), "DATASET": texts}
    elif settings["TASK"] == "sunspot.tasks.gpt":
        del settings["DATASET"]
    elif settings["TASK"] == "tests.tasks.slow_trees":
        del settings["GLOBAL_BATCH_SIZE"], program.settings["LEARNING_RATE"]  # neither means anything to trees
    process = program.start(**settings, WARM_RESTART_AFTER_S=0.1)
    run = the_run(program)
    wait_for_receipts(run, 1, process)
    wait_until(servers, process)
    worker_processes()[0].kill()
    lost = wait_for_receipts(run, 2, process)[-1]
    process.terminate()
    output = process.communicate(timeout=120)[0]
    assert (lost.forked, lost.world_after) == (2, 2), output
    assert lost.step > 0
    assert "Traceback" not in output
    assert_audit_clean(program)


def servers() -> list[psutil.Process]:
    """Those that serve."""
    if "@sunspot-warm-" not in Path("/proc/net/unix").read_text():
        return []
    every = psutil.process_iter(["cmdline"])
    return [process for process in every if "sunspot.warm.server" in "".join(process.info["cmdline"] or ())]
