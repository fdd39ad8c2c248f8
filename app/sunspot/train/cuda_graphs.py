"""CUDA graphs for a model's forward and backward pass (GRAPH=auto).

A step of a small model launches hundreds of short kernels, and the GPU waits for the host. A graph launches all kernels
of a pass at once. Only the model is in the graph. The loss, the averaging of gradients and the optimizer's step run as
usual, so a new group of workers needs no new graph (docs/decisions/0028-a-graph-holds-only-the-model.md).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from sunspot.parallel.data_parallel import find_tensors
from sunspot.settings import Settings

PASSES_BEFORE_CAPTURE = 3
"""Number of passes with inputs of one shape that run without a graph, because a rare shape is not worth a graph."""

MAX_GRAPHS = 4
"""Maximum number of graphs of one model. Each graph keeps the memory of a whole pass."""

TOLERANCE = 0.01
"""Largest relative difference between the results of a graph and of the same pass without it.

bf16 has a relative precision of 2^-8, and the order of sums may differ. A graph with a fault differs by far more.
"""

Key: TypeAlias = tuple[object, ...]
"""The shapes, types and devices of a pass's inputs, and whether autocast is enabled."""


def use_graphs(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Make a model run its passes as CUDA graphs, or print why this run cannot use CUDA graphs."""
    if settings.graph == "off":
        return
    reason = find_obstacle(settings, device)
    if reason:
        print(f"SUNSPOT_GRAPH={settings.graph}: CUDA graphs are not used, because {reason}")
    else:
        model.forward = GraphedForward(model)  # type: ignore[method-assign]


def find_obstacle(settings: Settings, device: torch.device) -> str:
    """Return the reason why a run cannot use graphs, or an empty string."""
    if device.type != "cuda":
        return f"the workers train on {device.type}, which has no CUDA graphs"
    if settings.parallel != "ddp":
        return f"SUNSPOT_PARALLEL={settings.parallel} exchanges parameters within a pass; only ddp can use graphs"
    if settings.compile != "off":
        return f"SUNSPOT_COMPILE={settings.compile} compiles the model; max-autotune creates its own graphs"
    if settings.recompute != "off":
        return f"SUNSPOT_RECOMPUTE={settings.recompute} runs blocks again in the backward pass"
    return ""


class GraphedForward:
    """A module's `forward`, which replays a CUDA graph if it has captured one for inputs of the same shapes.

    The following passes use no graph, because no graph can replay them: evaluations, a second forward pass before the
    backward pass of the first, passes that add to existing gradients, and passes with inputs that are not tensors. A
    model with hooks gets no graph. If a graph cannot be captured, or if its results differ from those of an ordinary
    pass, all passes with inputs of the same shapes run without a graph.
    """

    def __init__(self, module: nn.Module, make_graphed: Callable[..., Any] = torch.cuda.make_graphed_callables) -> None:
        self._module = module
        self._without_graph = module.forward
        self._make_graphed = make_graphed
        self._graphs: dict[Key, Callable[..., Any] | None] = {}
        "The graph for each key, or None if there can be no graph."
        self._seen: Counter[Key] = Counter()
        self._newest_pass: Callable[[], BackwardPass | None] = lambda: None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run one forward pass, and return the module's output."""
        if options or not self._can_replay(inputs):
            return self._without_graph(*inputs, **options)
        key = (torch.is_autocast_enabled("cuda"), *((each.shape, each.dtype, each.device) for each in inputs))
        self._seen[key] += 1
        if key not in self._graphs and self._seen[key] > PASSES_BEFORE_CAPTURE:
            self._graphs[key] = self._capture(inputs)
        graph = self._graphs.get(key)
        if not graph:
            return self._without_graph(*inputs)
        # The next replay overwrites the graph's output, so the caller gets a copy.
        output = torch.utils._pytree.tree_map(torch.clone, graph(*inputs))
        self._watch_backward(output)
        return output

    def _can_replay(self, inputs: tuple[Any, ...]) -> bool:
        first = next((each for each in self._module.parameters() if each.requires_grad), None)
        newest = self._newest_pass()
        return (
            self._module.training
            and torch.is_grad_enabled()
            and all(isinstance(each, torch.Tensor) and not each.requires_grad for each in inputs)
            # The graph's gradients stay in its own memory, so a second backward pass would overwrite the first sums.
            and first is not None
            and first.grad is None
            # A second forward pass would overwrite the values that the backward pass of the first one needs.
            and (newest is None or newest.began)
        )

    def _watch_backward(self, output: Any) -> None:
        newest = BackwardPass()
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(newest)
        self._newest_pass = weakref.ref(newest)

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> Callable[..., Any] | None:
        """Return a graph for inputs of these shapes, or None if that is impossible. Prints the outcome."""
        shapes = ", ".join("x".join(map(str, each.shape)) for each in inputs)
        if sum(graph is not None for graph in self._graphs.values()) == MAX_GRAPHS:
            problem = f"there are already {MAX_GRAPHS} graphs for other shapes"
        elif any(has_hooks(module) for module in self._module.modules()):
            problem = "the model has hooks, which a graph would not call"
        elif any(isinstance(module, nn.SyncBatchNorm) for module in self._module.modules()):
            problem = "SyncBatchNorm communicates with the other workers, which may change"
        else:
            devices = [each.device for each in inputs if each.is_cuda][:1]
            buffers = [each.clone() for each in self._module.buffers()]
            try:
                with torch.random.fork_rng(devices):
                    graph = self._make(inputs)
                problem = self._compare(graph, inputs, devices)
            except Exception as error:  # of any kind: the model is the user's, and a pass without a graph still works
                problem = f"its capture failed: {error}".partition("\n")[0]
            for buffer, before in zip(self._module.buffers(), buffers, strict=True):
                buffer.data.copy_(before)  # `buffer.copy_` would break the backward pass of an earlier forward pass
        outcome = f"not used, because {problem}" if problem else "captured"
        print(f"CUDA graph of the model for inputs of shape {shapes}: {outcome}")
        return None if problem else graph

    def _make(self, inputs: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        module = self._module
        vars(module).pop("forward")
        try:
            with torch.autocast(
                "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
            ):
                self._make_graphed(module, tuple(map(torch.clone, inputs)), allow_unused_input=True)
            return module.forward
        finally:
            module.forward = self

    def _compare(self, graph: Callable[..., Any], inputs: tuple[torch.Tensor, ...], devices: list[torch.device]) -> str:
        """Return a problem if a graph and an ordinary pass give different results, or an empty string."""
        results = []
        for forward in (self._without_graph, graph):
            with torch.random.fork_rng(devices):
                outputs = [each for each in find_tensors(forward(*inputs)) if each.requires_grad]
                trained = [each for each in self._module.parameters() if each.requires_grad]
                gradients = torch.autograd.grad(
                    outputs, trained, [torch.ones_like(each) for each in outputs], allow_unused=True
                )
                results.append([each.detach().clone() for each in (*outputs, *gradients) if each is not None])
        for value, expected in zip(*reversed(results), strict=True):
            difference = torch.linalg.vector_norm((value - expected).float())
            if not difference <= TOLERANCE * torch.linalg.vector_norm(expected.float()):
                return "its results differ from those of a pass without it"
        return ""


class BackwardPass:
    """A hook that records that a backward pass has begun. Only the forward pass's outputs keep the hook alive."""

    def __init__(self) -> None:
        self.began = False

    def __call__(self, gradient: torch.Tensor) -> None:
        """Record that the pass has begun. `gradient` is the gradient of an output."""
        self.began = True


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward or backward hooks."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
