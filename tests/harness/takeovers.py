"""Two processes that take one run over from each other, again and again, over a network that delays every request.

Each process is a worker without Ray: it claims the run, loads the state, takes tiny steps, records their rows, and
commits, all by the product's own code. Every third process has no copies in memory, as if it were on another node. In
the end the run's weights must be those of an undisturbed one, to the bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import torch

from sunspot.checkpoint import CheckpointManager, NodeMemory, SavedObjects
from sunspot.checkpoint.files import load_state
from sunspot.checkpoint.memory import find_snapshot
from sunspot.checkpoint.node_state import NodeParts, NodeState
from sunspot.data.order import Order, Steps
from sunspot.data.source import EmptySource
from sunspot.elastic.claim import LocalState, Readers, begin_attempt
from sunspot.elastic.copies import NodeInventory
from sunspot.elastic.restore import load_start
from sunspot.errors import SupersededError
from sunspot.plan import Plan
from sunspot.run import Run, open_run
from sunspot.run.attempts import lineage, read_attempts
from sunspot.run.checkpoints import find_faults, find_newest_good, in_lineage, list_checkpoints
from sunspot.run.claimant import Claimant
from sunspot.run.identity import Rows, keep_identity
from sunspot.settings import IDENTITY, Settings
from sunspot.submitter.proof import prove
from tests.harness.s3 import FaultProxy, Request, _Handler

ROWS, BATCH, STEP_S = 1000, 10, 0.05

SUPERSEDED = 6


def make_settings(storage: str) -> Settings:
    return Settings(storage_path=storage, run_name="run", global_batch_size=BATCH, audit=True, checkpoint_every_s=1)


class Model(torch.nn.Module):
    """Some weights, and how many steps they have taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 8)
        self.register_buffer("steps", torch.tensor(0))


def rows_of(step: int) -> torch.Tensor:
    """The rows that step + 1 consumes, int64 [BATCH]."""
    epoch, place = divmod(step, ROWS // BATCH)
    order = Order((ROWS,), 0, ROWS)
    [window] = order.windows(epoch + 1)
    return torch.from_numpy(order.permutation(epoch + 1, window)[place * BATCH : (place + 1) * BATCH])


def take_step(model: Model, rows: torch.Tensor) -> None:
    """Gradients of a step; its parameters' own change is the caller's."""
    (model.layer(rows.float()[:, None] / ROWS) - 1).square().mean().backward()
    model.steps += 1


def train(storage: str, owner: str, has_memory: bool) -> int:
    """Train until SIGTERM (0), or until another process owns the run (SUPERSEDED)."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    settings, run = make_settings(storage), open_run(storage, "run")
    keep_identity(run, settings.environment(), IDENTITY, Rows("", ROWS, ROWS // BATCH, "", ""))
    found = find_snapshot(run.location) if has_memory else None
    machines = [NodeInventory("host", owner, found.held if found else None, [])]
    node = NodeState(run, None, [owner])
    start = begin_attempt(Claimant(run, owner), settings, machines, readers=Readers(node.read))
    if start is None:
        return SUPERSEDED
    state = load_start(run, settings, start, LocalState(found, node, NodeParts(None, [owner])), None)  # a worker alone
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    if state.model:
        model.load_state_dict(state.model)
        optimizer.load_state_dict(state.optimizer)
    step = start.attempt.step
    assert model.steps == step, f"attempt {start.attempt.number} loaded step {model.steps} as {step}"
    plan = Plan(settings, EmptySource((1,), 8), None, Steps(ROWS, BATCH), 10**6)
    memory = NodeMemory(run.location if has_memory else None)
    checkpoints = CheckpointManager(
        run, start.attempt, plan, SavedObjects(model, optimizer), memory=memory, windows=state.ledger
    )
    try:
        while not stopping.wait(STEP_S):
            rows = rows_of(step)
            take_step(model, rows)
            checkpoints.wait_for_copy()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpoints.took_step(step, rows)
            actions = checkpoints.due(step, STEP_S)
            if actions.save or actions.copy:
                checkpoints.save(step, {"loss": 1.0 / (1 + step)}, to_storage=actions.save)
        checkpoints.save(step, {"loss": 1.0 / (1 + step)})
        checkpoints.close(finished=True)
    except SupersededError:
        return SUPERSEDED
    return 0


def _train(storage: str, owner: str, has_memory: bool) -> None:
    torch.set_num_threads(1)
    sys.exit(train(storage, owner, has_memory))


def fight(storage: str, seconds: float, takeovers: int, delay_s: float) -> dict[str, Any]:
    """Let two processes at a time take the run over from each other; returns what stands in the end.

    It takes at least so many seconds and takeovers, and each request up to `delay_s`.
    """
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    proxy = FaultProxy(str(server.hostname), server.port or 80)

    def dawdle(handler: _Handler, request: Request) -> None:
        time.sleep(random.uniform(0, delay_s))
        handler.reply(*handler.ask_server(request))

    proxy.on(lambda _: True, dawdle)
    os.environ["AWS_ENDPOINT_URL"] = proxy.url
    context = multiprocessing.get_context("forkserver")  # what takes seconds to import is imported once
    context.set_forkserver_preload(["tests.harness.takeovers", "torch.optim.adam", "boto3"])
    began, codes, processes = time.monotonic(), [], []

    def wait(seconds: float, most: int) -> None:
        """At least so many seconds, and until at most so many processes are left."""
        deadline = time.monotonic() + seconds
        while len(processes) > most or time.monotonic() < deadline:
            for process in [process for process in processes if process.exitcode is not None]:
                processes.remove(process)
                codes.append(process.exitcode)
            time.sleep(0.1)
            assert time.monotonic() - deadline < 300, "the older process does not end"

    while len(codes) < takeovers or time.monotonic() - began < seconds:
        number = len(codes) + len(processes)
        processes.append(context.Process(target=_train, args=(storage, f"job-{number}", number % 3 != 0)))
        processes[-1].start()
        wait(random.uniform(0, 2 * seconds / takeovers), most=1)
    for process in processes:
        process.terminate()
    wait(0, most=0)
    os.environ["AWS_ENDPOINT_URL"] = server.geturl()
    proxy.end()
    seconds, requests = round(time.monotonic() - began), len(proxy.requests)
    return {"seconds": seconds, "requests": requests, "exit codes": codes, **judge(open_run(storage, "run"))}


def judge(run: Run) -> dict[str, Any]:
    """What stands in storage."""
    attempts = read_attempts(run)
    checkpoints = list_checkpoints(run)
    newest, passed_over = find_newest_good(run, attempts)
    proof = prove(run)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(newest.step if newest else 0):
        take_step(model, rows_of(step))
        optimizer.step()
        optimizer.zero_grad()
    stored = load_state(run, newest, "model.pt") if newest else {}
    return {
        "attempts": len(attempts),
        "began from": {
            tier: sum(attempt.metadata.get("tier") == tier for attempt in attempts if attempt.chosen)
            for tier in ("beginning", "memory", "storage")
        },
        "unchosen": sum(not attempt.chosen for attempt in attempts),
        "skipped": [text for attempt in attempts for text in attempt.skipped if "incomplete" not in text],
        "checkpoints": len(checkpoints),
        "damaged": [fault for checkpoint in checkpoints for fault in find_faults(run, checkpoint)],
        "in lineage": len(in_lineage(checkpoints, lineage(attempts))),
        "passed over": [str(each) for each in passed_over],
        "step": newest.step if newest else None,
        "impossible rows": proof.wrong_rows,
        "rows": [[epoch.rows, epoch.missing, epoch.repeated] for epoch in proof.epochs],
        "same weights": all(torch.equal(stored[name], value) for name, value in model.state_dict().items()),
    }
