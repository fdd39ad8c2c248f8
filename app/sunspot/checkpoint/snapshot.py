"""Copies of the training state, taken behind the training.

What only the optimizer changes stays as it is during forward and backward, so it is copied meanwhile, and only the next
optimizer step waits (`wait_for_copy`). Anything else in the model may change in the very next forward pass (batch
norm's averages, a teacher that follows the weights), and is copied at once. What turns out to have changed while it was
copied has torn that copy, which is dropped, and is copied at once from then on.

A GPU copies in a stream of its own. The training's stream waits for that, and no thread: the CPU goes on filling it.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from sunspot.background import start_thread
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.memory import NodeMemory, Slot, Use
from sunspot.checkpoint.memory_files import Sidecar
from sunspot.checkpoint.replicas import PartExchange
from sunspot.checkpoint.tensors import ALIGNMENT, in_buffer, map_tensors, parameter_names, size_of, tensors_in
from sunspot.parallel.collectives import sum_of_bits
from sunspot.parallel.sharding import TensorSlice, find_slices, parameters_of, part_of
from sunspot.run.checkpoints import Checkpoint

Pairs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Target and source of each copy."""

MoreFiles = Callable[[Mapping[str, torch.Tensor]], Mapping[str, bytes]]
"""Returns what else a task wants in its checkpoints, by the names of the files, given the model's state_dict."""


class ChangeWatch:
    """Tells which tensors are changed in place while they are copied, except through `.data`.

    It reads the count of changes by which autograd finds them (`_version`), as torch has no public name for it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._final: set[int] | None = None

    def changed(self) -> set[int]:
        """Return the `id` of each tensor that has changed before the watch ended; from any thread."""
        so_far = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        return so_far if self._final is None else self._final  # after the end, the optimizer changes them

    def end(self) -> set[int]:
        """End the watch, and return what has changed."""
        self._final = self.changed()
        self._versions = []
        return self._final


@dataclass(frozen=True)
class SavedObjects:
    """The objects whose state is saved, while training goes on to change them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None = None
    "Saved in the place of the weights."
    more_files: MoreFiles | None = None
    stepped: "OptimizerOnlyParameters | None" = None
    "The parameters that only the optimizer changes, as this process found in earlier groups."

    def state(self) -> dict[str, Any]:
        """Return the state_dicts of `model` and `optimizer`, with the very tensors that are trained."""
        return {"model": self.model.state_dict(keep_vars=True), "optimizer": self.optimizer.state_dict()}

    def with_average(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as a checkpoint has it: with the average, if there is one, for the weights."""
        return self.average.exchange(state) if self.average else state


@dataclass
class Snapshot:
    """A copy of the state at one step, in host memory."""

    manifest: Checkpoint
    "Without its files, which are not written yet."
    extra_state: dict[str, Any]
    state: dict[str, Any]
    "`model` and `optimizer`: state_dicts whose tensors lie in the slot."
    slot: Slot
    copied: Future[bool]
    watch: ChangeWatch
    places: list[TensorSlice | None]
    "For each tensor of the model, then of the optimizer (`tensors_in`): under fsdp, where in the whole tensor it lies."

    @property
    def torn(self) -> bool:
        """Whether something is known to have changed while it was copied; an operation counts once it has ended."""
        return bool(self.watch.changed())

    def release(self) -> None:
        """Let the slot be used again: the commit thread no longer needs it."""
        self.slot.uses.discard(Use.UPLOADING)


class OptimizerOnlyParameters:
    """The parameters that nothing but optimizer steps changes: in the second step, they get a gradient and its forward
    pass leaves them alone, even through `.data`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters_of(optimizer)
        self._after_first: list[tuple[int, torch.Tensor]] = []
        "Each parameter's `_fingerprint` after the first step."
        self.ids: set[int] | None = None
        "Their `id`; None: not known yet."
        self.moved = set[int]()
        "The `id` of each parameter that the second step changed before the optimizer did, without PyTorch counting it."

    def begin_group(self) -> None:
        """Forget the values after the first step if they were not compared yet, as they may now be another worker's."""
        if self.ids is None:
            self._after_first = []

    def after_step(self) -> None:
        """Note the parameters' values; call it after each optimizer step."""
        if not self._after_first:
            self._after_first = [_fingerprint(parameter) for parameter in self._parameters]

    def before_step(self) -> None:
        """Compare them; call it before each optimizer step, with its gradients."""
        if self.ids is None and self._after_first and any(p.grad is not None for p in self._parameters):
            now = map(_fingerprint, self._parameters)
            pairs = list(zip(self._parameters, self._after_first, now, strict=True))
            changed = {id(p) for p, before, after in pairs if before != after}
            self.moved = {id(p) for p, before, after in pairs if before[0] == after[0]} & changed
            self.ids = {id(p) for p in self._parameters if p.grad is not None} - changed


def _fingerprint(parameter: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return PyTorch's count of a parameter's changes in place, and the sum of its bits, without waiting for a device.

    The count misses changes through `.data`, and the sum those that leave it as it was.
    """
    return parameter._version, sum_of_bits(part_of(parameter.detach()))


class Snapshots:
    """Takes snapshots in one worker, one at a time."""

    def __init__(
        self,
        memory: NodeMemory,
        saved: SavedObjects,
        stepped: OptimizerOnlyParameters,
        exchange: PartExchange | None = None,
    ) -> None:
        """Of a state in parts, `exchange` has them kept on two nodes."""
        self._memory, self._saved, self._stepped, self._exchange = memory, saved, stepped, exchange
        self._names = parameter_names(saved.model, saved.optimizer) if exchange else []
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="state-copy")
        self._copying: Future[torch.cuda.Event | None] | None = None
        "The copy that the training has to wait for; its result is the end of a GPU's copies."
        self._watch = ChangeWatch(())
        "The newest copy's."
        self._unsteady: set[int] = set()
        "The `id` of each tensor that has torn a copy."
        self._queue_wait: QueueWait | None = None
        self._sealing: Future[None] | None = None
        self.spent_s = 0.0
        "Seconds of training that all snapshots so far have cost."
        self._charged_s = 0.0
        "Those of all but the newest."
        self.size = 0
        "Bytes of a snapshot."
        self.costs: deque[float] = deque(maxlen=5)
        "Seconds of training that each of the last snapshots cost."

    # In the training thread.

    def take(
        self, manifest: Checkpoint, ledger: list[Any], extra_state: dict[str, Any] | None, *, needed: bool
    ) -> Snapshot | None:
        """Begin to copy the state; call `wait_for_copy` before parameters change.

        `ledger` lies beside it in memory. With `extra_state` the snapshot is for storage, and its slot is kept until it
        is released. Returns None when the copy is not `needed` and no slot is free, or the copy before is not sealed
        yet.
        """
        began = time.perf_counter()
        self.wait_for_copy()
        if needed:
            self.wait_until_complete()  # then a slot is free
        elif self._sealing and not self._sealing.done():
            if self._exchange:
                self._exchange.all_copy(False)
            return None
        self._add_up_costs()

        # What to copy, and where to: all workers of a state in parts, or none.
        source = self._saved.state()
        changing = {id(tensor) for tensor in tensors_in(source["model"])} - (self._stepped.ids or set())
        changing |= self._unsteady
        source = self._saved.with_average(source)
        structure, device = self._outline(source)
        slot = self._memory.free_slot(self.size, needed, device)
        asked = time.perf_counter()
        agreed = self._exchange.all_copy(slot is not None) if self._exchange else True
        began += time.perf_counter() - asked  # waiting for slower workers is no cost: the next gradients would
        if slot is None or not agreed:
            return None
        state, places = in_buffer(structure, slot.map), find_slices(tensors_in(source))

        # What may change in the next forward pass is copied now, and the rest in the copy thread.
        later: Pairs = []
        watched: list[torch.Tensor] = []
        for target, tensor in zip(tensors_in(state), tensors_in(source), strict=True):
            part = part_of(tensor.detach())
            if id(tensor) in changing:
                target.copy_(part, non_blocking=True)  # before whatever comes later in a GPU's queue
            else:
                later.append((target, part))
                watched.append(tensor)
        mark = mark_queue(device)
        if extra_state is not None:
            slot.uses.add(Use.UPLOADING)
        self._watch = ChangeWatch(watched)
        self._copying = self._copies.submit(self._copy, later, mark)
        copied = self._copies.submit(_wait_for_end, self._copying, source)
        if mark:  # a slot that was made at once is not pinned; nobody waits for that
            self._copies.submit(self._memory.pin, slot, mark.device)
        snapshot = Snapshot(manifest, extra_state or {}, state, slot, copied, self._watch, places)

        # Once it is copied, it is marked in memory as complete.
        if self._memory.shared:
            slot.uses.add(Use.SEALING)
            fields = {name: value for name, value in asdict(manifest).items() if name != "files"}
            plain_places = [place and tuple(place) for place in places]
            sidecar = Sidecar(structure, fields, plain_places, ledger, self._names)
            self._sealing = start_thread(lambda: self._seal(snapshot, sidecar), "state-seal")
        self.spent_s += time.perf_counter() - began
        return snapshot

    def reserve(self) -> None:
        """Begin to make room for the first copy, which then does not have to wait for it."""
        _, device = self._outline(self._saved.with_average(self._saved.state()))
        self._memory.reserve(self.size, device)

    def charge(self, seconds: float) -> None:
        """Add to the cost of the newest snapshot."""
        self.spent_s += seconds

    def wait_for_copy(self) -> None:
        """Return when the state may change: by this thread, or by what it puts into the GPU's queue from now on."""
        if self._copying:
            began = time.perf_counter()
            end = self._copying.result()
            self._copying, self._queue_wait = None, QueueWait(end) if end else None
            self._unsteady |= self._watch.end()
            self.spent_s += time.perf_counter() - began

    def wait_until_complete(self) -> None:
        """Return when the newest copy is complete, in memory."""
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
        """Return the state to copy without its values, and the GPU that it is on, if any."""
        structure = map_tensors(source, lambda tensor: torch.empty_like(part_of(tensor), device="meta"))
        self.size = max(ALIGNMENT, size_of(structure))  # a worker may have no part of anything
        return structure, next((tensor.device for tensor in tensors_in(source) if tensor.is_cuda), None)

    # In the copy thread.

    def _copy(self, pairs: Pairs, mark: torch.cuda.Event | None) -> torch.cuda.Event | None:
        before = time.thread_time()
        end = copy(pairs, mark)
        self._charge_thread(before, mark is None)
        return end

    # In the seal thread.

    def _seal(self, snapshot: Snapshot, sidecar: Sidecar) -> None:
        on_cpu = snapshot.copied.result()
        before = time.thread_time()
        complete = self._exchange.complete if self._exchange else self._memory.complete
        complete(snapshot.slot, snapshot.manifest, sidecar.to_bytes(), snapshot.watch.changed)
        self._charge_thread(before, on_cpu)
        if self._exchange:
            self.spent_s += self._exchange.cost_s

    def _charge_thread(self, before: float, on_cpu: bool) -> None:
        """On a CPU, this thread's work slows the threads that train; beside a GPU it is free."""
        if on_cpu:
            self.spent_s += (time.thread_time() - before) / torch.get_num_threads()


def _wait_for_end(copying: Future[torch.cuda.Event | None], source: Any) -> bool:
    """Return when all is copied, and whether a CPU did it; until then, the tensors of `source` are kept."""
    if end := copying.result():
        end.synchronize()
    return end is None


def mark_queue(device: torch.device | None) -> torch.cuda.Event | None:
    """Mark the point in the GPU's current stream at which the state is the one to copy; None without a GPU."""
    if device is None:
        return None
    mark = torch.cuda.Event()
    mark.record()
    return mark


def copy(pairs: Pairs, mark: torch.cuda.Event | None) -> torch.cuda.Event | None:
    """Copy, or with a `mark` have the GPU copy what is there at that point; returns the end of the GPU's copies.

    The sources must be kept until that end: memory that is free is given to other tensors.
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
    """Return the stream of all copies from a GPU: one for all, as each keeps memory of its own for what it lays out."""
    return torch.cuda.Stream(device)


class QueueWait:
    """A wait of the training's stream for copies."""

    def __init__(self, end: torch.cuda.Event) -> None:
        """Have the current stream wait for the `end` of the copies, and not the CPU."""
        stream = torch.cuda.current_stream(end.device)
        self._end, self._reached = end, torch.cuda.Event(enable_timing=True)
        self._reached.record(stream)
        stream.wait_event(end)

    @property
    def seconds(self) -> float:
        """How long the GPU stood still for the copies; returns once these have ended."""
        self._end.synchronize()
        return max(0.0, self._reached.elapsed_time(self._end) / 1000) if self._reached.query() else 0.0
