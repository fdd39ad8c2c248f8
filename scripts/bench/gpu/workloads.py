"""Models to measure, trained by Sunspot and by a plain loop on the same rows."""

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scripts.bench.product import load_rows, step_ms, train_ms
from sunspot.data.image_table import SAMPLE
from sunspot.data.text import REFERENCE, read_text
from sunspot.plan import make_plan
from sunspot.settings import Settings, load_settings
from sunspot.tasks import load_task


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Workload:
    """A task with a batch size."""

    name: str
    task: str
    batch: int
    steps: int
    args: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    "The number of tokens in a row, or 0 if rows are images."

    def settings(self, folder: str, device: torch.device, **more: str) -> Settings:
        """Return settings for one worker, no checkpoint before the end, and four records per second."""
        return load_settings(
            {
                "TASK": self.task,
                "TASK_ARGS": json.dumps(self.args),
                "DATASET": dataset(self, folder),
                "STORAGE_PATH": folder,
                "NUM_WORKERS": "1",
                "USE_GPU": str(device.type == "cuda").lower(),
                "GLOBAL_BATCH_SIZE": str(self.batch),
                "MAX_STEPS": str(self.steps),
                "CHECKPOINT_EVERY_S": "0",
                "REPORT_EVERY_S": "0.25",
                "PREDICT_ROWS": "0",
                **more,
            }
        )

    @property
    def rate_unit(self) -> str:
        return "tokens/s" if self.tokens else "rows/s"

    def rate(self, step_ms: float) -> float:
        """Return the tokens or rows per second."""
        return 1000 * self.batch * (self.tokens or 1) / step_ms


def workloads(device: torch.device) -> list[Workload]:
    """Return the workloads: ResNet-18 on digits, and a GPT as large as GPT-2 small.

    The GPT has more layers than GPT-2, because its vocabulary of bytes is smaller.
    """
    if device.type != "cuda":
        small = {"layers": 2, "width": 64, "heads": 2, "context": 64}
        return [
            Workload("ResNet-18, 32", "sunspot.tasks.mnist", 32, 60),
            Workload("GPT, 0.1 M", "sunspot.tasks.gpt", 8, 300, small, 64),
        ]
    gpt = {"layers": 17, "width": 768, "heads": 12, "context": 1024}
    return [
        Workload("ResNet-18, 128", "sunspot.tasks.mnist", 128, 1500),
        Workload("ResNet-18, 1,024", "sunspot.tasks.mnist", 1024, 600),
        Workload("ResNet-18, 4,096", "sunspot.tasks.mnist", 4096, 200),
        Workload("GPT, 121 M, 2 x 1,024 tokens", "sunspot.tasks.gpt", 2, 400, gpt, 1024),
        Workload("GPT, 121 M, 32 x 1,024 tokens", "sunspot.tasks.gpt", 32, 60, gpt, 1024),
    ]


def dataset(workload: Workload, folder: str) -> str:
    """Write a dataset for exactly one epoch, so that no evaluation is measured, and return its path."""
    if workload.tokens:
        path = Path(folder, "rows.txt")
        text = read_text(REFERENCE)
        wanted = int(workload.batch * workload.steps * workload.tokens * 1.2)
        path.write_bytes((text * (1 + wanted // len(text)))[:wanted])
        return str(path)
    path = Path(folder, "rows.parquet")
    table = pq.read_table(SAMPLE)
    rows = workload.batch * workload.steps
    pq.write_table(pa.concat_tables([table] * (1 + rows // len(table))).slice(0, rows), path, row_group_size=8192)
    return str(path)


def ours(workload: Workload, device: torch.device, **more: str) -> float:
    """Return the milliseconds per step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        return train_ms(workload.settings(folder, device, **more))


def plain(workload: Workload, device: torch.device, precision: str) -> float:
    """Return the milliseconds per step of the simplest loop, with all rows on the device already."""
    with tempfile.TemporaryDirectory() as folder:
        settings = workload.settings(folder, device)
        task: Any = load_task(settings)
        plan = make_plan(settings, task)
        rows = {name: column.to(device) for name, column in load_rows(plan.source).items()}
    model = task.build_model(settings, plan.source).to(device)
    optimizer = task.build_optimizer(model, settings)
    order = torch.randperm(plan.steps.rows, device=device)
    marks: list[tuple[int, float]] = []
    for step in range(workload.steps):
        chosen = order[step * workload.batch : (step + 1) * workload.batch]
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            losses, _ = task.loss(model, {name: column[chosen] for name, column in rows.items()})
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            synchronize(device)
            marks.append((step, time.perf_counter()))
    return step_ms(marks)
