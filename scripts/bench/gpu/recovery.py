"""A worker that is killed: from the signal to the first step of the next group, and the weights it ends with."""

import tempfile
from pathlib import Path

import torch

from scripts.bench.product import phases_of, train
from sunspot.ray_session import ray_session
from sunspot.run import Run
from sunspot.run.history import read_journal
from sunspot.run.incidents import read_receipts
from sunspot.settings import load_settings

KILLS = 3

SETTINGS = {
    "TASK": "scripts.bench.gpu.killed_task",
    "NUM_WORKERS": "1",
    "EPOCHS": "15",
    "CHECKPOINT_EVERY_S": "0",
    "REPORT_EVERY_S": "1",
    "MAX_FAILURES": str(KILLS),
}


def measure(device: torch.device) -> None:
    """Print each loss with its phases, and how far the weights are from those of undisturbed runs."""
    gpu = device.type == "cuda"
    with ray_session(), tempfile.TemporaryDirectory() as folder:
        models = {}
        for name, kills in {"killed": KILLS, "undisturbed": 0, "again": 0}.items():
            signals = Path(folder, f"{name}-signals")
            sizes = {"USE_GPU": "true"} if gpu else {"USE_GPU": "false", "MAX_STEPS": "24"}
            args = f'{{"signals": "{signals}", "kills": {kills}}}'
            settings = load_settings({**SETTINGS, "STORAGE_PATH": folder, "RUN_NAME": name, "TASK_ARGS": args, **sizes})
            run, newest = train(settings)
            models[name] = torch.load(Path(folder, run.key("checkpoints", newest.name, "model.pt")), map_location="cpu")
            if kills:
                print_losses(run, [float(line) for line in signals.read_text().split()])
    for one, other in (("killed", "undisturbed"), ("again", "undisturbed")):
        print(f"largest difference of a weight, {one} against {other}: {distance(models[one], models[other]):g}")


def print_losses(run: Run, signals: list[float]) -> None:
    """A line for each signal, with the seconds from it to each phase in the receipt."""
    receipts = [receipt for receipt in read_receipts(read_journal(run, "events")) if receipt.cause.incident]
    for signal, receipt in zip(signals, receipts, strict=True):
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases_of(receipt, signal).items())
        print(f"SIGKILL to {phases}; {receipt.replayed} steps again, from {receipt.tier}", flush=True)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of two values at the same place."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
