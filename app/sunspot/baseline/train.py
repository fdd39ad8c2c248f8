"""Training in plain PyTorch: read this first, then sunspot/train/loop.py, where workers share the rows and may be lost.

It takes the same SUNSPOT_ settings and writes metrics.csv and model.pt to <STORAGE_PATH>/<RUN_NAME>-baseline.
"""

import csv
import io
import time
from collections.abc import Iterator

import torch

from sunspot.data.source import Batch
from sunspot.data.torch_loader import load_rows
from sunspot.errors import SettingsError
from sunspot.parallel.gradients import clip_gradients
from sunspot.plan import make_plan
from sunspot.settings import Settings
from sunspot.storage import open_storage
from sunspot.tasks import HOOKS, Task, load_task


def train(settings: Settings) -> str:
    """Train for EPOCHS on this machine; returns the folder of the results."""
    task = load_task(settings)
    if own := [name for name in HOOKS if hasattr(task, name)]:
        raise SettingsError(
            f"SUNSPOT_TASK={settings.task}: has {own[0]}, which the baseline lacks; use `python -m sunspot.train`"
        )
    plan = make_plan(settings, task)
    device = torch.device("cuda" if torch.cuda.is_available() and settings.use_gpu != "false" else "cpu")
    rows = load_rows(plan.source)
    test = load_rows(plan.test) if plan.test else None

    torch.manual_seed(settings.seed)
    model = task.build_model(settings, plan.source).to(device)
    optimizer = task.build_optimizer(model, settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.schedule(step, plan.total_steps))

    history = []
    for epoch in range(1, settings.epochs + 1):
        began = time.perf_counter()
        model.train()
        loss_sum = torch.zeros((), device=device)
        for batch in shuffled(rows, settings.global_batch_size, device):
            losses, _ = task.loss(model, batch)
            losses.mean().backward()
            clip_gradients(model, settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            loss_sum += losses.detach().sum()
            if scheduler.last_epoch == plan.total_steps:
                break
        seconds = time.perf_counter() - began
        record = {"epoch": epoch, "loss": float(loss_sum) / len(rows["row"]), "rows_per_s": len(rows["row"]) / seconds}
        if test:
            record |= evaluate(task, model, test, settings.global_batch_size, device)
        print("  ".join(f"{name} {value:.4g}" for name, value in record.items()), flush=True)
        history.append(record)
    return save(settings, model, history)


def shuffled(rows: Batch, batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Yield all rows once, in batches; a single row left over joins the batch before it, as batch norm needs two."""
    order = torch.randperm(len(rows["row"]))
    batches = list(order.split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    for chosen in batches:
        yield {name: column[chosen].to(device) for name, column in rows.items()}


@torch.no_grad()
def evaluate(
    task: Task, model: torch.nn.Module, test: Batch, batch_size: int, device: torch.device
) -> dict[str, float]:
    """Mean loss and metrics over the held-out rows."""
    model.eval()
    sums: dict[str, float] = {}
    for chosen in torch.arange(len(test["row"])).split(batch_size):
        losses, metrics = task.loss(model, {name: column[chosen].to(device) for name, column in test.items()})
        for name, values in {"loss": losses, **metrics}.items():
            sums[f"test_{name}"] = sums.get(f"test_{name}", 0.0) + float(values.double().sum())
    return {name: total / len(test["row"]) for name, total in sums.items()}


def save(settings: Settings, model: torch.nn.Module, history: list[dict[str, float]]) -> str:
    """Write metrics.csv and model.pt; returns their folder."""
    storage, folder = open_storage(settings.storage_path), f"{settings.run_name}-baseline"
    table = io.StringIO()
    writer = csv.DictWriter(table, list(history[-1]))
    writer.writeheader()
    writer.writerows(history)
    storage.write(f"{folder}/metrics.csv", table.getvalue().encode())
    with storage.writer(f"{folder}/model.pt") as file:
        torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, file)  # type: ignore[arg-type]
    return storage.locate(folder)
