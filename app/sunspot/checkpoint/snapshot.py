"""Copies the training state while training continues.

Tensors that only the optimizer changes stay the same during the forward and backward passes. They are copied during
these passes, and only the next optimizer step waits for the copy (`wait_for_copy`). Any other tensor of the model, such
as batch norm's averages, can change in the next forward pass, and is copied at once. If a tensor changes while it is
copied, the copy is torn and dropped, and from then on the tensor is copied at once. Code that changes parameters must
therefore call `wait_for_copy` first. In train/run.py, `TrainingRun` does so in a hook for torch's optimizers. Loops
that change parameters in another way must notify `TrainingRun` first.

A GPU copies in a separate stream. Only the training stream waits for this copy, while the CPU keeps queueing work.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from sunspot.background import start_thread
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.memory import NodeMemory, Slot, Use
from sunspot.checkpoint.memory_files import Sidecar
from sunspot.checkpoint.part_exchange import PartExchange
from sunspot.checkpoint.tensors import ALIGNMENT, in_buffer, map_tensors, parameter_names, size_of, tensors_in
from sunspot.parallel.collectives import sum_of_bits
from sunspot.parallel.sharding import TensorSlice, find_slices, parameters_of, part_of
from sunspot.parallel.sum_guard import SumGuard
from sunspot.run.checkpoints import Checkpoint

Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""The target and source tensors of copies."""

MoreFiles = Callable[[Mapping[str, torch.Tensor]], Mapping[str, bytes]]
"""A function from the model's state_dict to a task's additional checkpoint files, keyed by name."""


class ChangeWatch:
    """Finds tensors that are changed in place while they are copied. It misses changes made through `.data`.

    It uses autograd's version counter (`_version`), for which torch has no public API.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._final: set[int] | None = None

    def changed(self) -> set[int]:
        """Return the `id` of each tensor that changed before the watch ended. Can be called from any thread."""
        so_far = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        return so_far if self._final is None else self._final  # after that, the optimizer changes them

    def end(self) -> set[int]:
        """End the watch, and return the `id` of each changed tensor."""
        self._final = self.changed()
        self._versions = []
        return self._final


@dataclass(frozen=True)
class SavedObjects:
    """The objects to save. Training keeps changing them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None = None
    "The average that is saved instead of the weights."
    more_files: MoreFiles | None = None
    optimizer_only: "OptimizerOnlyParameters | None" = None
    "The parameters that only the optimizer changes, if earlier groups of this process have found them."

    def state(self) -> dict[str, Any]:
        """Return the state_dicts of `model` and `optimizer`. They contain the trained tensors, not copies."""
        return {"model": self.model.state_dict(keep_vars=True), "optimizer": self.optimizer.state_dict()}

    def with_average(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as checkpoints store it. If weights are averaged, the average replaces the weights."""
        return self.average.exchange(state) if self.average else state


class CopyEnd(NamedTuple):
    """The outcome of copying a snapshot's tensors."""

    on_cpu: bool
    "True if the CPU copied the tensors."
    aborted: bool
    "True if the device's collectives were being aborted when the copy finished. The copy may then be wrong."


@dataclass
class Snapshot:
    """A copy of the state at one step, in host memory."""

    manifest: Checkpoint
    "The manifest without files, which have not been written yet."
    extra_state: dict[str, Any]
    state: dict[str, Any]
    "The state_dicts of `model` and `optimizer`, with tensors in the slot."
    slot: Slot
    copied: Future[CopyEnd]
    watch: ChangeWatch
    places: list[TensorSlice | None]
    "Under FSDP, the position of each tensor of `state` in its whole tensor, or None if it is whole."

    @property
    def torn(self) -> bool:
        """True if a tensor is known to have changed while being copied. A change in progress is not known yet."""
        return bool(self.watch.changed())

    def release(self) -> None:
        """Free the slot. Call this once the commit thread no longer needs the slot."""
        self.slot.uses.discard(Use.UPLOADING)


class OptimizerOnlyParameters:
    """Finds the parameters that only optimizer steps change.

    A parameter qualifies if it has a gradient in the second training step, and if that step's forward pass does not
    change the parameter, not even through `.data`. Later steps are not checked.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters_of(optimizer)
        self._after_first: list[tuple[int, torch.Tensor]] = []
        "Each parameter's `_fingerprint` after the first step."
        self.ids: set[int] | None = None
        "The `id` of each qualifying parameter, or None before the second step."
        self.moved = set[int]()
        "The `id` of each parameter that the second forward pass changed without PyTorch's counter noticing."

    def begin_group(self) -> None:
        """Discard values that have not been compared yet.

        Call this when the worker moves to another group, because its state can then come from another worker.
        """
        if self.ids is None:
            self._after_first = []

    def after_step(self) -> None:
        """Record the parameters' values. Call this after each optimizer step."""
        if not self._after_first:
            self._after_first = [_fingerprint(parameter) for parameter in self._parameters]

    def before_step(self) -> None:
        """Compare the parameters with their recorded values.

        Call this before each optimizer step, once gradients exist.
        """
        if self.ids is None and self._after_first and any(p.grad is not None for p in self._parameters):
            now = map(_fingerprint, self._parameters)
            pairs = list(zip(self._parameters, self._after_first, now, strict=True))
            changed = {id(p) for p, before, after in pairs if before != after}
            self.moved = {id(p) for p, before, after in pairs if before[0] == after[0]} & changed
            self.ids = {id(p) for p in self._parameters if p.grad is not None} - changed


def _fingerprint(parameter: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return a parameter's in-place version counter and a checksum of its bits, without waiting for the device.

    The counter misses changes made through `.data`, and the checksum can collide.
    """
    return parameter._version, sum_of_bits(part_of(parameter.detach()))


class Snapshots:
    """Takes snapshots in one worker, one at a time."""

    def __init__(
        self,
        memory: NodeMemory,
        saved: SavedObjects,
        optimizer_only: OptimizerOnlyParameters,
        exchange: PartExchange | None = None,
        sums: SumGuard | None = None,
    ) -> None:
        """Prepare to take one worker's snapshots.

        If the state is sharded, `exchange` stores each part on two nodes. `sums` tells whether collectives were already
        being aborted when a copy finished. Such a copy may contain wrong values.
        """
        self._memory = memory
        self._saved = saved
        self._optimizer_only = optimizer_only
        self._exchange = exchange
        self._sums = sums
        self._names = parameter_names(saved.model, saved.optimizer) if exchange else []
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="state-copy")
        self._copying: Future[torch.cuda.Event | None] | None = None
        "The copy for which training must wait. Its result is an event that completes with a GPU's copies, or None."
        self._watch = ChangeWatch(())
        "The watch of the newest copy."
        self._unsteady: set[int] = set()
        "The `id` of each tensor that has ever changed during a copy."
        self._queue_wait: QueueWait | None = None
        self._sealing: Future[None] | None = None
        self.spent_s = 0.0
        "Seconds for which all snapshots so far have delayed training."
        self._charged_s = 0.0
        "Seconds for which all snapshots except the newest have delayed training."
        self.size = 0
        "The size of a snapshot in bytes."
        self.costs: deque[float] = deque(maxlen=5)
        "Seconds for which each of the last snapshots delayed training."

    # In the training thread.

    def take(
        self, manifest: Checkpoint, ledger: list[Any], extra_state: dict[str, Any] | None, *, needed: bool
    ) -> Snapshot | None:
        """Start copying the state. Call `wait_for_copy` before parameters change.

        `ledger` is stored with the copy in memory. Returns None if the copy is not `needed` and cannot begin now,
        because no slot is free or the previous copy is not sealed yet.

        If `extra_state` is given, the snapshot is for storage, and its slot stays in use until the snapshot is
        released. Do not take such a snapshot until the collectives that computed the state are known to be complete,
        because the snapshot is kept even if collectives are aborted during the copy.
        """
        began = time.perf_counter()
        self.wait_for_copy()
        if needed:
            self.wait_until_complete()  # after that, a slot is free
        elif self._sealing and not self._sealing.done():
            if self._exchange:
                self._exchange.agree_to_copy(False)
            return None
        self._add_up_costs()

        # Find the tensors to copy and a slot. If the state is in parts, either all workers copy or none.
        source = self._saved.state()
        changing = {id(tensor) for tensor in tensors_in(source["model"])} - (self._optimizer_only.ids or set())
        changing |= self._unsteady
        source = self._saved.with_average(source)
        structure, device = self._outline(source)
        slot = self._memory.free_slot(self.size, needed, device)
        asked = time.perf_counter()
        agreed = self._exchange.agree_to_copy(slot is not None) if self._exchange else True
        began += time.perf_counter() - asked  # not counted, because gradients would wait, too
        if slot is None or not agreed:
            return None
        state = in_buffer(structure, slot.map)
        places = find_slices(tensors_in(source))

        # Copy the tensors that the next forward pass can change now, and the other tensors in the copy thread.
        later: Pairs = []
        watched: list[torch.Tensor] = []
        for target, tensor in zip(tensors_in(state), tensors_in(source), strict=True):
            part = part_of(tensor.detach())
            if id(tensor) in changing:
                target.copy_(part, non_blocking=True)  # before all later work in a GPU's queue
            else:
                later.append((target, part))
                watched.append(tensor)
        mark = mark_queue(device)
        if extra_state is not None:
            slot.uses.add(Use.UPLOADING)
        self._watch = ChangeWatch(watched)
        self._copying = self._copies.submit(self._copy, later, mark)
        copied = self._copies.submit(self._wait_for_end, self._copying, source)
        if mark:  # a slot that was created at once is not pinned yet; the copy does not wait
            self._copies.submit(self._memory.pin, slot, mark.device)
        snapshot = Snapshot(manifest, extra_state or {}, state, slot, copied, self._watch, places)

        if self._memory.shared:
            self._begin_sealing(snapshot, structure, ledger)
        self.spent_s += time.perf_counter() - began
        return snapshot

    def _begin_sealing(self, snapshot: Snapshot, structure: Any, ledger: list[Any]) -> None:
        """Start the thread that marks the copy in memory as complete once all tensors are copied."""
        snapshot.slot.uses.add(Use.SEALING)
        fields = {name: value for name, value in asdict(snapshot.manifest).items() if name != "files"}
        places = [place and tuple(place) for place in snapshot.places]
        sidecar = Sidecar(structure, fields, places, ledger, self._names)
        self._sealing = start_thread(lambda: self._seal(snapshot, sidecar), "state-seal")

    def reserve(self) -> None:
        """Start creating a slot in advance, so that the first copy does not have to wait for it."""
        _, device = self._outline(self._saved.with_average(self._saved.state()))
        self._memory.reserve(self.size, device)

    def charge(self, seconds: float) -> None:
        """Add `seconds` to the cost of the newest snapshot."""
        self.spent_s += seconds

    def wait_for_copy(self) -> None:
        """Block until it is safe for this thread to change the state, directly or by queueing work on the GPU."""
        if self._copying:
            began = time.perf_counter()
            end = self._copying.result()
            self._copying = None
            self._queue_wait = QueueWait(end) if end else None
            self._unsteady |= self._watch.end()
            self.spent_s += time.perf_counter() - began

    def wait_until_complete(self) -> None:
        """Block until the newest copy in memory is complete."""
        if self._sealing:
            self._sealing.result()

    def _add_up_costs(self) -> None:
        if self._queue_wait:
            self.spent_s += self._queue_wait.seconds
            self._queue_wait = None
        if self.spent_s > self._charged_s:
            self.costs.append(self.spent_s - self._charged_s)
            self._charged_s = self.spent_s

    def _outline(self, source: dict[str, Any]) -> tuple[Any, torch.device | None]:
        """Return the state's outline with tensors on the meta device, and the state's GPU, if any."""
        structure = map_tensors(source, lambda tensor: torch.empty_like(part_of(tensor), device="meta"))
        self.size = max(ALIGNMENT, size_of(structure))  # a worker might have no part of any tensor
        return structure, next((tensor.device for tensor in tensors_in(source) if tensor.is_cuda), None)

    # In the copy thread.

    def _copy(self, pairs: Pairs, mark: torch.cuda.Event | None) -> torch.cuda.Event | None:
        before = time.thread_time()
        end = copy(pairs, mark)
        self._charge_thread(before, mark is None)
        return end

    def _wait_for_end(self, copying: Future[torch.cuda.Event | None], source: Any) -> CopyEnd:
        """Block until everything is copied, keeping `source` alive."""
        end = copying.result()
        if end:
            end.synchronize()
        return CopyEnd(on_cpu=end is None, aborted=self._sums is not None and self._sums.aborted)

    # In the seal thread.

    def _seal(self, snapshot: Snapshot, sidecar: Sidecar) -> None:
        on_cpu, aborted = snapshot.copied.result()
        if aborted and not snapshot.extra_state:  # the copied step may be taken back
            snapshot.slot.uses.discard(Use.SEALING)
            return
        before = time.thread_time()
        complete = self._exchange.complete if self._exchange else self._memory.complete
        complete(snapshot.slot, snapshot.manifest, sidecar.to_bytes(), snapshot.watch.changed)
        self._charge_thread(before, on_cpu)
        if self._exchange:
            self.spent_s += self._exchange.cost_s

    def _charge_thread(self, before: float, on_cpu: bool) -> None:
        """Add this thread's CPU time since `before` to the cost of snapshots, unless training runs on a GPU."""
        if on_cpu:  # this slows down the training threads
            self.spent_s += (time.thread_time() - before) / torch.get_num_threads()


def mark_queue(device: torch.device | None) -> torch.cuda.Event | None:
    """Record and return an event in the GPU's current stream. The state can be copied after this event.

    Returns None if there is no GPU.
    """
    if device is None:
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def copy(pairs: Pairs, mark: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """Copy each source to its target now, or on the GPU after the event `mark`.

    Returns an event that completes when the GPU has finished, or None without a `mark`. The caller must keep the
    sources alive until then, because freed memory is reused for other tensors.
    """
    if mark is None:
        for target, source in pairs:
            target.copy_(source)
        return None
    end = torch.cuda.Event(enable_timing=True)
    stream = _side_stream(mark.device)
    stream.wait_event(mark)
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        end.record()
    return end


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all copies on a GPU. Each further stream would cache additional memory."""
    return torch.cuda.Stream(device)


class QueueWait:
    """Makes the training stream wait for copies, and measures how long it waited."""

    def __init__(self, end: torch.cuda.Event) -> None:
        """Make the current stream wait for the event `end`, without blocking the CPU."""
        stream = torch.cuda.current_stream(end.device)
        self._end = end
        self._reached = torch.cuda.Event(enable_timing=True)
        self._reached.record(stream)
        stream.wait_event(end)

    @property
    def seconds(self) -> float:
        """Seconds that the GPU waited for the copies. Blocks until the copies have ended."""
        self._end.synchronize()
        return max(0.0, self._reached.elapsed_time(self._end) / 1000) if self._reached.query() else 0.0
