"""Trains a Trainer's worker groups without Ray. hugging_face.py calls it.

The task of docs/finetune.md, and a task with its own Trainer, train for STEPS steps on changing numbers of ranks, as
defined in `RUNS`. The losses of each run's last group are written to `RUN.json`, the messages about REFUSED to
`refused.json`, and the measurements of a check to `checked.json`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from sunspot.errors import SettingsError
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.train.task_check import check
from tests.harness.documentation import find_patched
from tests.harness.language_models import write_base, write_texts
from tests.harness.loop import plan_without_evaluation, train_group

STEPS, KILLED_AT = 6, 4

OF_THE_PAGE, ADAPTING = "my_trainer", "tests.tasks.adapting_trainer"

RUNS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "one": (OF_THE_PAGE, [1], {"weights": "safetensors"}),
    "killed": (OF_THE_PAGE, [2, 3], {"micro_batch_size": 3, "audit": True}),
    "adapted": (ADAPTING, [1], {}),
    "adapted-killed": (ADAPTING, [3, 2], {"micro_batch_size": 3, "audit": True}),
}
"""Each run's task, settings, and number of ranks per group. All groups except the last are killed."""

REFUSED: dict[str, Any] = {
    "auto_find_batch_size": True,
    "enable_jit_checkpoint": True,
    "optim": "lomo",
    "left_out": 1,
}
"""Arguments of the Trainer, and of its task, that are rejected."""


def main(root: str) -> None:
    for library in ("peft", "transformers", "transformers.trainer"):
        importlib.import_module(library)  # here, so that the children need not import it
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise, Accelerate chooses another number
    os.chdir(root)
    sys.path.insert(0, root)
    base = write_base(Path("model").absolute())
    texts = pq.read_table(write_texts(Path("texts"))).to_pylist()
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    Path("my_trainer.py").write_text(find_patched("my_trainer.py"))
    common: dict[str, Any] = {
        "storage_path": root,
        "dataset": str(Path("texts.jsonl").absolute()),
        "max_steps": STEPS,
        "global_batch_size": 10,
        "checkpoint_every_steps": 1,
        "checkpoint_every_s": 0,
    }
    for name, (task, groups, more) in RUNS.items():
        arguments = {"base": base} if task == ADAPTING else {}
        settings = Settings(run_name=name, task=task, task_args=arguments, **common, **more)
        *killed, last = groups
        for ranks in killed:
            train_group(plan_without_evaluation(settings), ranks, killed_at=KILLED_AT)
        losses = train_group(plan_without_evaluation(settings), last)
        Path(f"{name}.json").write_text(json.dumps(losses))

    Path("refused.json").write_text(json.dumps({name: refusal_of(base, name) for name in REFUSED}))
    settings = Settings(task=ADAPTING, task_args={"base": base}, use_gpu="false", global_batch_size=10)
    Path("checked.json").write_text(json.dumps(check(settings).metrics))


def refusal_of(base: str, argument: str) -> str:
    """Return the message about a Trainer with one of the arguments in REFUSED."""
    settings = Settings(task=ADAPTING, task_args={"base": base, argument: REFUSED[argument]})
    task: Any = load_task(settings)
    try:
        task.build_model(settings, task.find_sources(settings)[0])
    except SettingsError as error:
        return str(error)
    return ""
