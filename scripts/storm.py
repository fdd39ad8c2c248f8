"""`python -m scripts.storm`: kill workers of a local run at random, and check that the others keep training.

Three workers train in double precision with SURVIVORS=auto. No step may be repeated, no row may be missing, and the
weights must equal those of an undisturbed run. One worker is spared in the first half, and its open files and threads
are counted. `--task teacher` moves frozen weights in each forward pass, and `--task gan` has two optimizers. They must
not repeat a step, either. With --gpu, all workers share one GPU, and NCCL sums their gradients. With --parallel hsdp,
six workers hold three replicas of the model, and at least one worker with each shard survives every loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.cluster import until
from scripts.ray_processes import ray_processes
from scripts.storm_task import SHARED_MEMORY, moment_of
from sunspot.checkpoint.parts import load_model
from sunspot.errors import SunspotError, run_and_exit
from sunspot.run import Run, open_run
from sunspot.run.attempts import IN_PLACE, Attempt, read_attempts
from sunspot.run.checkpoints import MANIFEST, Checkpoint, by_step, find_newest_good, list_directories
from sunspot.run.history import read_journal
from sunspot.run.incidents import Receipt, read_receipts
from sunspot.run.requests import request_stop
from sunspot.submitter.proof import prove

WORKERS = {"ddp": 3, "hsdp": 6}
SHARD_DEGREE = {"ddp": 1, "hsdp": 2}
BATCH = 30
ROWS = 10 * BATCH
"""Number of training rows. An epoch takes three seconds, so that losses also hit its end and its evaluation."""

PAUSE_S = 0.1
"""Average pause in each of a step's three parts, in seconds."""

WAIT_S = 180.0
"""Seconds for a first step, a replacement, or the end of the run."""

TASKS = {"plain": "scripts.storm_task", "teacher": "scripts.storm_teacher", "gan": "scripts.storm_gan"}

SETTINGS = {
    "RESOURCES_PER_WORKER": '{"CPU": 0.5}',
    "GLOBAL_BATCH_SIZE": str(BATCH),
    "EPOCHS": "10000",
    "LEARNING_RATE": "0.0001",
    "SCHEDULE": "constant",  # the undisturbed run has another number of steps
    "CHECKPOINT_EVERY_STEPS": "3",
    "CHECKPOINT_EVERY_S": "0",
    "REPORT_EVERY_S": "1",
    "PREDICT_ROWS": "0",
    "AUDIT": "true",
    "SURVIVORS": "auto",
}

OWN_HOST = """
import os
os.environ["NCCL_HOSTID"] = str(os.getpid())
"""
"""Code that each process runs first. NCCL wants a GPU for each rank of a host, so each rank pretends to be a host."""

ON_GPU = {"USE_GPU": "true", "RESOURCES_PER_WORKER": json.dumps({"CPU": 0.5, "GPU": 0.15})}


class Loss:
    """A group of workers killed at the same time."""

    def __init__(self, run: Run, victims: list[psutil.Process]) -> None:
        notes = [moment_of(victim.pid) for victim in victims]
        begun = list_directories(run)
        saving = [" and commit" for name in by_step(begun)[-1:] if MANIFEST not in begun[name]]
        self.moments = ["".join([note.read_text(), *saving]) if note.exists() else "joining" for note in notes]
        self.at = time.time()
        for victim in victims:
            victim.kill()
        for note in notes:
            note.unlink(missing_ok=True)

    def pause_s(self, receipts: list[Receipt]) -> float | None:
        """Return the seconds until the survivors' next step, or None before that step."""
        return min((each.first_step - self.at for each in receipts if each.first_step > self.at), default=None)


def main() -> int:
    """Kill workers until the number is reached, and compare the result with an undisturbed run."""
    parser = argparse.ArgumentParser("storm", description="Kills workers at random, and checks the others' result.")
    parser.add_argument("--kills", type=int, default=200, help="number of SIGKILLs; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers; default: 0")
    parser.add_argument("--task", choices=TASKS, default="plain", help="task to train; default: plain")
    parser.add_argument("--parallel", choices=WORKERS, default="ddp", help="distribution of the model; default: ddp")
    parser.add_argument("--gpu", action="store_true", help="train on this machine's GPU")
    arguments = parser.parse_args()
    SETTINGS["TASK"] = TASKS[arguments.task]
    workers = WORKERS[arguments.parallel]
    SETTINGS["NUM_WORKERS"] = str(workers)
    if arguments.parallel == "hsdp":
        SETTINGS["PARALLEL"] = "hsdp"
        SETTINGS["SHARD_DEGREE"] = str(SHARD_DEGREE["hsdp"])
        SETTINGS["RESOURCES_PER_WORKER"] = '{"CPU": 0.3}'
    if arguments.task == "teacher":  # each pass moves the teacher, so every worker must make one pass per step
        SETTINGS["MICRO_BATCH_SIZE"] = str(BATCH)
    if arguments.gpu:
        SETTINGS.update(ON_GPU)
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        write_data(folder)
        if arguments.gpu:
            (folder / "sitecustomize.py").write_text(OWN_HOST)
        run = open_run(str(folder / "runs"), "storm")
        with training(folder, run, PAUSE_S) as process:
            storm = Storm(run, process, arguments.parallel, random.Random(arguments.seed))
            losses = storm.strike(arguments.kills)
            request_stop(run, "the storm")
            process.wait(WAIT_S)
        calm = open_run(str(folder / "runs"), "calm")
        steps = newest(run).step
        with training(folder, calm, 0, MAX_STEPS=steps, AUDIT="false") as process:
            process.wait()
        print(f"{steps} steps; weights differ by {difference(run, calm):.1e} from those of an undisturbed run")
        report(run, losses, workers)
    return 0


def write_data(folder: Path) -> None:
    """Write small images of noise in three classes."""
    chance = np.random.default_rng(0)
    for split, rows in [("train", ROWS), ("test", 2 * BATCH)]:
        pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(chance.integers(0, 256, (rows, 4, 4), dtype=np.uint8))
        (folder / "data" / split).mkdir(parents=True)
        table = pa.table({"image": pixels, "label": np.arange(rows) % 3})
        pq.write_table(table, folder / "data" / split / "rows.parquet", row_group_size=100)


@contextlib.contextmanager
def training(folder: Path, run: Run, pause_s: float, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """Train inside the context, and end the training on exit. Print its output, which goes to a file, if it fails."""
    own = {
        "STORAGE_PATH": folder / "runs",
        "RUN_NAME": run.name,
        "DATASET": folder / "data",
        "TASK_ARGS": json.dumps({"pause_s": pause_s}),
    }
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {f"SUNSPOT_{name}": str(value) for name, value in {**SETTINGS, **own, **settings}.items()}
    log = folder / f"{run.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sunspot.train"],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdout=output,
            stderr=output,
        )
        try:
            yield process
            if process.returncode:
                raise SunspotError(f"the training ended with exit code {process.returncode}")
        except BaseException:
            print(log.read_text()[-5000:], flush=True)
            raise
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()


class Storm:
    """Kills the workers of one run."""

    def __init__(self, run: Run, process: subprocess.Popen[bytes], parallel: str, chance: random.Random) -> None:
        self._run = run
        self._process = process
        self._workers = WORKERS[parallel]
        self._degree = SHARD_DEGREE[parallel]
        self._chance = chance

    def strike(self, kills: int) -> list[Loss]:
        """Kill one or two workers at a time until `kills` workers have been killed, and return the losses.

        In half of the cases, do not wait until the previous victims have been replaced.
        """
        run, process = self._run, self._process
        chance = self._chance
        losses: list[Loss] = []
        spared: psutil.Process | None = None
        while (killed := sum(len(loss.moments) for loss in losses)) < kills:
            wanted = 2 if losses and chance.random() < 0.5 else self._workers
            until(f"group of {wanted} workers", WAIT_S, partial(has_size, run, process, wanted))
            time.sleep(chance.uniform(0, 6 * PAUSE_S))
            workers = ray_processes("RayTrain", psutil.Process(process.pid))  # includes workers that are still starting
            members = [worker for worker in workers if moment_of(worker.pid).exists()]
            if not losses:
                spared = members[0]
            if killed >= kills / 2:
                spared = None
            if spared:
                shared = sum(1 for _ in SHARED_MEMORY.iterdir())
                print(
                    f"   spared: {spared.num_fds()} files, {spared.num_threads()} threads; {shared} in {SHARED_MEMORY}"
                )
            joining = [worker for worker in workers if worker not in members]
            victims = self._choose(members, spared)
            if not victims:
                continue
            loss = Loss(run, victims + (joining if chance.random() < 0.2 else []))
            losses.append(loss)
            pause_s = until("next step", WAIT_S, partial(next_step, run, process, loss))
            print(f"{killed + len(loss.moments)}: {', '.join(loss.moments)}: {pause_s:.2f} s", flush=True)
        return losses

    def _choose(self, members: list[psutil.Process], spared: psutil.Process | None) -> list[psutil.Process]:
        """Return one or two members to kill, or none if the other workers would then lack a shard of the state."""
        attempts = read_attempts(self._run)
        ranks = ranks_of(attempts[-1])
        stepped = receipts_of(self._run, self._process)[-1].attempt
        trained = [pid for attempt in attempts if attempt.number == stepped for pid in ranks_of(attempt)]
        others = [member for member in members if member != spared and member.pid in ranks]
        number = min(self._chance.choice([1, 1, 1, 2]), len(ranks) - 1, len(others))
        victims = self._chance.sample(others, number)
        living = set(trained).intersection(ranks) - {victim.pid for victim in victims}
        return victims if len({ranks[pid] % self._degree for pid in living}) == self._degree else []


def ranks_of(attempt: Attempt) -> dict[int, int]:
    """Return the rank of each process of an attempt, keyed by process id."""
    return {int(name.rpartition("-")[2]): rank for rank, name in enumerate(attempt.metadata.processes)}


def receipts_of(run: Run, process: subprocess.Popen[bytes]) -> list[Receipt]:
    """Return the receipts of the run's losses. Raises `SunspotError` if the training has ended."""
    if process.poll() is not None:
        raise SunspotError("the training has ended")
    return read_receipts(read_journal(run, "events"))


def has_size(run: Run, process: subprocess.Popen[bytes], wanted: int) -> bool:
    """Return True if at least `wanted` workers took the newest group's first step."""
    receipts = receipts_of(run, process)
    return bool(receipts) and receipts[-1].world_after >= wanted


def next_step(run: Run, process: subprocess.Popen[bytes], loss: Loss) -> float | None:
    """Return the seconds from a loss to the next step, or None before that step."""
    return loss.pause_s(receipts_of(run, process))


def newest(run: Run) -> Checkpoint:
    """Return the newest checkpoint of a stopped run."""
    checkpoint, _ = find_newest_good(run, read_attempts(run))
    assert checkpoint
    return checkpoint


def difference(run: Run, other: Run) -> float:
    """Return the largest difference between the parameters of two runs."""
    ours, theirs = (load_model(each, newest(each)) for each in (run, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def report(run: Run, losses: list[Loss], workers: int) -> None:
    """Print the costs of the losses. Raises `SunspotError` if a step was repeated or a row is missing."""
    receipts = read_receipts(read_journal(run, "events"))
    pauses = sorted(pause for loss in losses if (pause := loss.pause_s(receipts)) is not None)
    moments = Counter(moment for loss in losses for moment in loss.moments)
    print(f"{moments.total()} workers killed in {len(losses)} losses, by phase: {dict(moments.most_common())}")
    most = f"90th percentile {pauses[int(0.9 * len(pauses))]:.2f} s, maximum {pauses[-1]:.2f} s"
    print(f"time to the next step: median {median(pauses):.2f} s, {most}")
    full = [receipt.first_step for receipt in receipts[1:] if receipt.world_after == workers]
    joins = [at - max(loss.at for loss in losses if loss.at < at) for at in full]
    if joins:
        print(f"to the first step of {workers} workers again: median {median(joins):.1f} s of {len(joins)}")
    print(f"receipts: {dict(Counter((str(receipt.cause), receipt.tier) for receipt in receipts))}")
    again = sum(receipt.replayed for receipt in receipts)
    faults = prove(run).summary
    print(f"{again} steps repeated; audit: {faults or 'clean'}")
    if again or faults or any(receipt.tier != IN_PLACE for receipt in receipts[1:]):
        raise SunspotError("expected the other workers to keep training after each loss")


if __name__ == "__main__":
    run_and_exit(main)
