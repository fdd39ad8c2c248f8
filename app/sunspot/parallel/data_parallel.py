"""DistributedDataParallel (DDP) for models that do not use all parameters in every backward pass.

DDP averages gradients in buckets, and sends a bucket once all of its parameters have a gradient. If a rank does not use
a parameter, such as an expert without rows, DDP never completes the averaging. It only raises an error in the next
forward pass, after the optimizer has taken a step with gradients that differ between ranks. Here, each backward pass
completes the averaging, and the gradients are those of a single process with all rows
(docs/decisions/0012-parameters-without-a-gradient.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sunspot.errors import SettingsError

WAITING_FOR = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")
"""Matches the parameter numbers in torch's error about unfinished averaging (torch 2.9 to 2.15)."""


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose buffers do not change their outputs in training mode."""


class Passes:
    """The state of a model's forward and backward passes, which decides when gradients are averaged.

    These values are not attributes of the model, because setting an attribute of a module takes 3 us.
    """

    def __init__(self) -> None:
        self.number = 0
        "The number of forward passes."
        self.fresh = False
        "True if a forward pass has begun since the last backward pass."
        self.ends = False
        "True if `_end_backward` is scheduled for the end of the current backward pass."
        self.counts: list[int | None] = []
        "The result of `_count_changes` after the last backward pass."

    def begin(self) -> None:
        """Record that a forward pass has begun."""
        self.number += 1
        self.fresh, self.ends = True, False


class DataParallel(DistributedDataParallel):
    """A wrapper that averages a model's gradients over the workers at the end of each backward pass.

    Afterwards, every rank has a gradient for each parameter that any rank has used. If no rank has used a parameter,
    the parameter has no gradient, so that the optimizer does not change it.
    """

    def __init__(self, module: nn.Module, name: str = "", in_own_loop: bool = True, **options: Any) -> None:
        """Wrap a model. `options` are those of DDP, and `name` must be unique among the task's models.

        Set `in_own_loop` if the task has its own training loop. A hook then completes the averaging in each backward
        pass. Otherwise, Sunspot calls `complete` after each step's last backward pass, which saves the hook's 20 us.
        """
        # DDP incorrectly averages all buckets after one with a sparse gradient (torch 2.15, gloo).
        sparse = find_sparse(module)
        if sparse:
            if not {each for each in module.parameters() if each.requires_grad} - sparse.keys():
                raise SettingsError(
                    "all parameters of the model have sparse gradients; create the embeddings with sparse=False"
                )
            ignored = [name for name, each in module.named_parameters() if each in sparse]
            self._set_params_and_buffers_to_ignore_for_model(module, ignored)
        super().__init__(module, gradient_as_bucket_view=True, **options)
        self._norms = find_norms(module)
        "The batch norms, if no other modules have buffers and DDP does not send the buffers before each pass."
        self.broadcast_buffers = not self._norms
        if options.get("init_sync", True):
            for parameter in sparse:
                dist.broadcast(parameter.detach(), 0, self.process_group)
        parameters = [each for name, each in module.named_parameters() if name not in self.parameters_to_ignore]
        self._averaged = [each for each in parameters if each.requires_grad]
        "The parameters that DDP averages, in DDP's order."
        self._others = [*sparse, *(each for each in parameters if not each.requires_grad)]
        "The parameters that DDP ignores, which are frozen at first or have sparse gradients."
        self._usage = UsageBoard(self.process_group, name)
        self._in_own_loop = in_own_loop
        self._passes = Passes()
        self._unused_before: list[nn.Parameter] | None = None
        "The parameters that had no gradient before the first pass over uncounted rows, or None while rows count."

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the model's output. A backward pass through the output averages the gradients."""
        if not all(norm.training for norm in self._norms):
            self._norms, self.broadcast_buffers = [], True
        output = super().forward(*inputs, **options)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._passes.begin()
            if not self._in_own_loop and self._unused_before is not None:
                self._announce(self._unused_before)
            for tensor in find_tensors(output) if self._in_own_loop else ():
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._end_with_backward)
        return output

    def count_rows(self, counted: bool) -> None:
        """Set whether later passes mark parameters as used. Passes over rows with weight 0 must not do so."""
        if not counted:
            if self._unused_before is None:
                self._unused_before = [each for each in self._averaged if each.grad is None]
        elif self._unused_before is not None:
            for parameter in self._unused_before:
                parameter.grad = None
            self._unused_before = None

    def complete(self) -> None:
        """Complete the averaging after a backward pass if DDP is still waiting for parameters without a gradient."""
        if self._in_own_loop:
            self._complete_pass()
        elif self._passes.fresh:
            self._end_backward()

    def _complete_pass(self) -> None:
        waiting = self._find_waiting()
        if waiting:
            self._announce(each for each in self._averaged if each.grad is None)
            mark_ready([self._averaged[index] for index in waiting])
            if self._find_waiting():
                raise RuntimeError("DDP has not averaged all gradients of a backward pass")
        if self._usage.announced:
            if self._averaged[0].is_cuda:  # before that, another rank might not have announced its unused parameters
                torch.cuda.synchronize(self._averaged[0].device)
            for index in self._usage.find_unused():
                self._averaged[index].grad = None

    def _find_waiting(self) -> list[int]:
        """Return the indices of the parameters whose gradients DDP is still waiting for.

        The list is empty if DDP has averaged all gradients.
        """
        try:
            self._check_reducer_finalized()  # torch has no public API for this (2.15)
        except RuntimeError as error:
            named = WAITING_FOR.search(str(error))
            if named is None:
                raise
            return [int(index) for index in named[1].split()]
        return []

    def _announce(self, unused: Iterable[nn.Parameter]) -> None:
        numbers = {parameter: number for number, parameter in enumerate(self._averaged)}
        self._usage.announce(self._passes.number, {numbers[each] for each in unused})

    def _end_with_backward(self, _: torch.Tensor) -> None:
        """Schedule one call of `_end_backward` for the end of the current backward pass, after DDP's own callback.

        This hook runs once for each output that a rank's loss uses. Because `_end_backward` is scheduled only once, all
        ranks join the same collectives, even if their losses use different numbers of outputs.
        """
        if self._passes.ends:
            return
        self._passes.ends = True
        if self._unused_before is not None:
            self._announce(self._unused_before)
        engine: Any = torch.autograd.Variable._execution_engine  # private, but also used by DDP and FSDP (2.15)
        queue = engine.queue_callback
        queue(lambda: queue(self._end_backward))

    def _end_backward(self) -> None:
        passes = self._passes
        again = not passes.fresh and passes.counts != self._count_changes()
        passes.fresh = passes.ends = False
        self._complete_pass()
        others = [each for each in self._others if each.requires_grad]
        if again or others:  # DDP averages only once per forward pass
            average([*self._averaged, *others] if again else others, self.process_group)
        if self._in_own_loop:  # in other loops, this is called only after a forward pass, and needs no counts
            passes.counts = self._count_changes()

    def _count_changes(self) -> list[int | None]:
        """Return PyTorch's version counter of each gradient, with None for missing gradients."""
        return [None if (gradient := each.grad) is None else gradient._version for each in self._averaged]


class UsageBoard:
    """Finds the parameters that no rank has used, through the process group's store.

    A rank with unused parameters announces them before it sends its last gradients, so all announcements are complete
    once gradients are averaged. No rank has to wait for another.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group, self._name = group, name
        self._store = group.get_group_store()
        self._unused: set[int] | None = None
        self._passes: list[int] = []
        "The pass numbers of this rank's two newest announcements."

    @property
    def announced(self) -> bool:
        """True if this rank has announced parameters, but has not read the other ranks' announcements yet."""
        return self._unused is not None

    def announce(self, number: int, unused: set[int]) -> None:
        """Announce the parameters that this rank has not used in pass `number`. Only the first call per pass counts."""
        self._unused = unused if self._unused is None else self._unused
        if number in self._passes:
            return
        for old in self._passes[:-1]:  # all ranks have read it, because gradients have been averaged since
            self._store.delete_key(self._key(old, self._group.rank()))
            self._store.delete_key(self._key(old, "ranks"))
        self._passes = [*self._passes[-1:], number]
        self._store.set(self._key(number, self._group.rank()), ",".join(map(str, unused)))
        self._store.add(self._key(number, "ranks"), 1)

    def find_unused(self) -> set[int]:
        """Return the indices of the parameters that no rank used. Call this after gradients are averaged."""
        unused, self._unused = self._unused or set(), None
        ranks, number = range(self._group.size()), self._passes[-1]
        if self._store.add(self._key(number, "ranks"), 0) < len(ranks):
            return set()
        for text in self._store.multi_get([self._key(number, rank) for rank in ranks]):
            unused &= {int(index) for index in text.decode().split(",") if index}
        return unused

    def _key(self, number: int, what: int | str) -> str:
        return f"unused/{self._name}/{number}/{what}"


def mark_ready(parameters: list[nn.Parameter]) -> None:
    """Run a backward pass that adds zeros to the parameters' gradients, which are created if they are missing."""
    frozen = [each for each in parameters if not each.requires_grad]
    for parameter in frozen:  # DDP waits for it, because it was trainable when DDP was created
        parameter.requires_grad_(True)
    try:
        zeros = [each.new_zeros(()).expand_as(each) for each in parameters]  # zeros that use no memory
        torch.autograd.backward(parameters, zeros)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def average(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over the ranks, one parameter at a time. All ranks must call this together."""
    here = [0 if each.grad is None else 2 if each.grad.is_sparse else 1 for each in parameters]
    kinds = torch.tensor(here, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(kinds, dist.ReduceOp.MAX, group)
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        if kind:
            if parameter.grad is None:
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if kind == 2 else zeros
            parameter.grad = parameter.grad / group.size()
            dist.all_reduce(parameter.grad, group=group)


def find_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms of a model, or an empty list if any other module has buffers.

    By default, DDP sends rank 0's buffers before each pass. `DataParallel` turns this off if only batch norms have
    buffers, because they do not use their buffers in training mode. `sync_buffers` sends the buffers before they are
    used or saved.
    """
    having = [each for each in module.modules() if each._buffers]
    return having if all(type(each) in BATCH_NORMS for each in having) else []


def find_sparse(module: nn.Module) -> dict[Any, None]:
    """Return the weights of embeddings with sparse gradients, in the same order on all ranks."""
    embeddings = [each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    return dict.fromkeys(each.weight for each in embeddings if each.sparse)


def find_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's output. Nested containers are searched as in DDP."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from find_tensors(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from find_tensors(item)
    elif is_dataclass(output):
        yield from find_tensors([getattr(output, field.name) for field in fields(output)])
