"""Copies of the training state, taken behind the training.

What only the optimizer changes stays as it is during forward and backward, so it is copied meanwhile, and only the next
optimizer step waits (`wait_for_copy`; on a GPU, its queue does: copying.py). Anything else in the model may change in
the very next forward pass (batch norm's averages, a teacher that follows the weights), and is copied at once. What
turns out to have changed while it was copied has torn that copy, which is dropped, and is copied at once from then on.
The copy lies in the node's shared memory (memory.py). Under DDP every node has the whole state; under FSDP each worker
copies its part, and one on the next node keeps it, too (neighbours.py). After a loss, the next worker group resumes
from the newest copy that the surviving nodes have (sunspot/elastic/restore.py), and only without one from storage. The
commit thread uploads the same copy (commit.py).
"""

import functools
import io
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sunspot.background import start_thread
from sunspot.checkpoint.average import WeightAverage
from sunspot.checkpoint.copying import Pairs, QueueWait, copy, mark_queue
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.neighbours import PartExchange
from sunspot.checkpoint.slots import Slot
from sunspot.parallel.sharding import Place, find_places, parameters_of, part_of
from sunspot.run.checkpoints import Checkpoint

ALIGNMENT = 64
"""Bytes, of each tensor in a slot: any dtype can be viewed there."""

OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangeWatch:
    """Tells which tensors are changed in place while they are copied; not of changes through `.data`.

    It reads the count of changes by which autograd finds them (`_version`), as torch has no public name for it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._final: set[int] | None = None

    def changed(self) -> set[int]:
        """The `id` of each tensor that has changed, until the watch ends; from any thread."""
        so_far = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        return so_far if self._final is None else self._final  # after the end, the optimizer changes them

    def end(self) -> set[int]:
        """The last `changed`."""
        self._final = self.changed()
        self._versions = []
        return self._final


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
    places: list[Place | None]
    "For each tensor of the model, then of the optimizer (`tensors_in`): under fsdp, where in the whole tensor it lies."

    @property
    def torn(self) -> bool:
        """Whether something is known to have changed while it was copied; an operation counts once it has ended."""
        return bool(self.watch.changed())

    def release(self) -> None:
        """Free the slot: the commit thread no longer needs it."""
        self.slot.uploading = False


class SteppedParameters:
    """The parameters that nothing but optimizer steps changes, as the second step shows: they get a gradient, and its
    forward pass leaves them alone, even through `.data`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters_of(optimizer)
        self._after_first: list[tuple[int, torch.Tensor]] = []
        "Of each parameter after the first step (`_fingerprint`)."
        self.ids: set[int] | None = None
        "Their `id`; None: not known yet."

    def after_step(self) -> None:
        """To be called after each optimizer step."""
        if not self._after_first:
            self._after_first = [_fingerprint(parameter) for parameter in self._parameters]

    def before_step(self) -> None:
        """To be called before each optimizer step, with its gradients; without any, it tells nothing."""
        if self.ids is None and self._after_first and any(p.grad is not None for p in self._parameters):
            pairs = zip(self._parameters, self._after_first, strict=True)
            self.ids = {id(p) for p, before in pairs if p.grad is not None and _fingerprint(p) == before}


def _fingerprint(parameter: torch.Tensor) -> tuple[int, torch.Tensor]:
    """PyTorch's count of a parameter's changes in place, and the sum of its bits, for which no device is waited.

    The count misses changes through `.data`, and the sum those that leave it as it was.
    """
    part = part_of(parameter.detach())
    part = torch.view_as_real(part) if part.is_complex() else part
    return parameter._version, part.view(OF_BYTES[part.element_size()]).sum()


class Snapshots:
    """Takes snapshots in one worker, one at a time."""

    def __init__(
        self,
        memory: NodeMemory,
        exchange: PartExchange | None = None,
        agree: Callable[[bool], bool] = lambda has_slot: has_slot,
    ) -> None:
        """Of a state in parts, `exchange` has them kept by neighbours, and `agree` says whether all workers copy theirs
        now, given whether this one can.
        """
        self.memory = memory
        self._exchange, self._agree = exchange, agree
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="state-copy")
        self._copying: Future[torch.cuda.Event | None] | None = None
        "Until the training waits for it: the end of a GPU's copies."
        self._watch = ChangeWatch(())
        "Of the newest copy."
        self._unsteady: set[int] = set()
        "The `id` of each tensor that has torn a copy."
        self._queue_wait: QueueWait | None = None
        self._sealing: Future[None] | None = None
        self._spent = self._charged = 0.0
        self.size = 0
        "Bytes of a snapshot."
        self.costs: deque[float] = deque(maxlen=5)
        "Seconds of training that each of the last snapshots cost."

    @property
    def spent_s(self) -> float:
        """Seconds of training that all snapshots so far have cost."""
        return self._charged + self._spent

    def take(
        self,
        manifest: Checkpoint,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        extra_state: dict[str, Any],
        beside: dict[str, Any],
        *,
        stepped: Collection[int],
        needed: bool,
        for_storage: bool,
        average: WeightAverage | None = None,
    ) -> Snapshot | None:
        """Begin to copy the state, and what lies `beside` it in memory; call `wait_for_copy` before parameters change.

        `stepped` are the ids of the parameters that only optimizer steps change. With `for_storage` the slot is kept
        until the snapshot is released. Returns None when the copy is not `needed` and no slot is free, or the copy
        before is not sealed yet.
        """
        began = time.perf_counter()
        self.wait_for_copy()
        if needed:
            self.wait_until_complete()  # then a slot is free
        elif self._sealing and not self._sealing.done():
            self._agree(False)
            return None
        if self._queue_wait:
            self._spent += self._queue_wait.seconds
            self._queue_wait = None
        if self._spent:
            self.costs.append(self._spent)
            self._charged += self._spent
            self._spent = 0.0
        source = _state_of(model, optimizer)
        changing = {id(tensor) for tensor in tensors_in(source["model"])}.difference(stepped) | self._unsteady
        source = average.exchange(source) if average else source
        structure, device = self._outline(source)
        slot = self.memory.free_slot(self.size, needed, device)
        asked = time.perf_counter()
        agreed = self._agree(slot is not None)
        began += time.perf_counter() - asked  # waiting for slower workers is no cost: the next gradients would
        if slot is None or not agreed:
            return None
        state, places = in_buffer(structure, slot.map), find_places(tensors_in(source))
        at_once: Pairs = []
        behind: Pairs = []
        watched: list[torch.Tensor] = []
        for name in ("model", "optimizer"):
            for target, tensor in zip(tensors_in(state[name]), tensors_in(source[name]), strict=True):
                pair = (target, part_of(tensor.detach()))
                if id(tensor) in changing:
                    at_once.append(pair)
                else:
                    behind.append(pair)
                    watched.append(tensor)
        for target, tensor in at_once:
            target.copy_(tensor, non_blocking=True)  # before whatever comes later in a GPU's queue
        mark = mark_queue([*at_once, *behind])
        slot.uploading, slot.sealing = for_storage, self.memory.shared
        self._watch = ChangeWatch(watched)
        self._copying = self._copies.submit(self._copy, behind, mark)
        copied = self._copies.submit(_wait_for_end, self._copying, source)
        if mark:  # one that was made at once; nobody waits for that
            self._copies.submit(self._pin, slot, mark.device)
        if slot.sealing:
            about = {name: value for name, value in asdict(manifest).items() if name != "files"}
            rest = {"structure": structure, "about": about, "places": [place and tuple(place) for place in places]}
            seal = functools.partial(self._seal, copied, self._watch, slot, manifest, rest | beside)
            self._sealing = start_thread(seal, "state-seal")
        self._spent += time.perf_counter() - began
        return Snapshot(manifest, extra_state, state, slot, copied, self._watch, places)

    def reserve(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
    ) -> None:
        """Begin to make room for the first copy, which then does not have to wait for it."""
        source = _state_of(model, optimizer)
        _, device = self._outline(average.exchange(source) if average else source)
        self.memory.reserve(self.size, device)

    def _outline(self, source: dict[str, Any]) -> tuple[Any, torch.device | None]:
        """The state to copy without its values, and the GPU that it is on, if any."""
        structure = map_tensors(source, lambda tensor: torch.empty_like(part_of(tensor), device="meta"))
        self.size = max(ALIGNMENT, size_of(structure))  # a worker may have no part of anything
        return structure, next((tensor.device for tensor in tensors_in(source) if tensor.is_cuda), None)

    def charge(self, seconds: float) -> None:
        """Add to the cost of the newest snapshot."""
        self._spent += seconds

    def wait_for_copy(self) -> None:
        """Return when the state may change: by this thread, or by what it puts into the GPU's queue from now on."""
        if self._copying:
            began = time.perf_counter()
            end = self._copying.result()
            self._copying, self._queue_wait = None, QueueWait.begin(end) if end else None
            self._unsteady |= self._watch.end()
            self._spent += time.perf_counter() - began

    def wait_until_complete(self) -> None:
        """Return when the newest copy is complete, in memory."""
        if self._sealing:
            self._sealing.result()

    def _copy(self, pairs: Pairs, mark: torch.cuda.Event | None) -> torch.cuda.Event | None:
        before = time.thread_time()
        end = copy(pairs, mark)
        self._charge_thread(before, mark is None)
        return end

    def _pin(self, slot: Slot, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.memory.pin(slot)

    def _seal(
        self, copied: Future[bool], watch: ChangeWatch, slot: Slot, manifest: Checkpoint, rest: dict[str, Any]
    ) -> None:
        on_cpu = copied.result()
        before = time.thread_time()
        file = io.BytesIO()
        torch.save(rest, file)
        self.memory.complete(slot, manifest, file.getvalue(), self._exchange, watch.changed)
        self._charge_thread(before, on_cpu)
        if self._exchange:
            self._spent += self._exchange.cost_s

    def _charge_thread(self, before: float, on_cpu: bool) -> None:
        """On a CPU, this thread's work slows the threads that train; beside a GPU it is free."""
        if on_cpu:
            self._spent += (time.thread_time() - before) / torch.get_num_threads()


def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}


def _wait_for_end(copying: Future[torch.cuda.Event | None], source: Any) -> bool:
    """Return when all is copied, and whether a CPU did it; until then, the tensors of `source` are kept."""
    if end := copying.result():
        end.synchronize()
    return end is None


# ----------------------------------------------------------------------------------------------- tensors in a slot


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nested dicts, lists and tuples, with every tensor replaced by `change(tensor)`, always in one order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def size_of(structure: Any) -> int:
    """Bytes of a slot that holds these tensors."""
    return sum(padded(tensor) for tensor in tensors_in(structure))


def in_buffer(structure: Any, buffer: Any) -> Any:
    """`structure` with tensors of the same shapes and dtypes that lie in `buffer`, each with its own storage."""
    offset = 0

    def place(like: torch.Tensor) -> torch.Tensor:
        nonlocal offset
        begin, offset = offset, offset + padded(like)
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)

    return map_tensors(structure, place)


def padded(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a slot."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
