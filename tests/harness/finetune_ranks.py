"""Fine-tunes with LoRA in worker groups without Ray. hugging_face.py calls it.

A tiny model trains for STEPS steps on changing numbers of ranks, as defined in `RUNS`. The losses of each run's last
group are written to the file `RUN.json`.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from sunspot.settings import Settings
from tests.harness.language_models import write_base, write_texts
from tests.harness.loop import plan_without_evaluation, train_group

STEPS, KILLED_AT = 6, 4

RUNS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one": ([1], {}),
    "two": ([2], {}),
    "three": ([3], {}),
    "killed": ([2, 3], {}),
    "fsdp": ([2, 1], {"parallel": "fsdp"}),
    "bf16": ([2], {"parallel": "fsdp", "precision": "bf16"}),
}
"""Each run's settings, and the number of ranks in each of its groups. All groups except the last are killed."""


def main(root: str) -> None:
    for library in ("peft", "transformers"):
        importlib.import_module(library)  # here, so that the children need not import it
    torch.set_num_threads(1)
    base, texts = write_base(Path(root, "base")), write_texts(Path(root, "texts"))
    for name, (groups, more) in RUNS.items():
        settings = Settings(
            storage_path=root,
            run_name=name,
            task="sunspot.tasks.finetune",
            task_args={"base": base, "context": 32, "rank": 4},
            dataset=texts,
            max_steps=STEPS,
            global_batch_size=10,
            micro_batch_size=4,
            learning_rate=0.01,
            checkpoint_every_steps=1,
            checkpoint_every_s=0,
            **more,
        )
        *killed, last = groups
        for ranks in killed:
            train_group(plan_without_evaluation(settings), ranks, killed_at=KILLED_AT)
        losses = train_group(plan_without_evaluation(settings), last)
        Path(root, f"{name}.json").write_text(json.dumps(losses))
