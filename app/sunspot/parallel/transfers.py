"""Sends tensors from worker to worker with gloo. If a worker is lost, its transfers fail at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

END, ANSWER, FIRST = range(3)
"""Tags of the message after the last tensor, of the answer to this message, and of the first tensor."""


def transfer(
    group: dist.ProcessGroup,
    sent: Mapping[int, Sequence[torch.Tensor]],
    received: Mapping[int, Sequence[torch.Tensor]],
    limit_s: float,
) -> None:
    """Send the tensors in `sent` to other ranks, and receive the tensors in `received` from other ranks.

    The keys are ranks in `group`. A sender and its receiver must list tensors of the same sizes, in the same order.
    Raises `RuntimeError` if one of the other ranks is lost, or if the transfer takes longer than `limit_s` seconds
    per tensor.

    If a connection ends while a tensor is on its way, gloo (torch 2.15) keeps waiting for the rest of the tensor,
    because `Pair::signalException` ends only the operations that have not begun. Each rank therefore first waits for a
    small message that follows the tensors. While a tensor is on its way, gloo has not started receiving the message,
    so the wait for the message fails as soon as the connection ends.
    """
    work: list[Any] = []
    ends: list[Any] = []
    answers: list[Any] = []
    for rank, tensors in sent.items():
        own = [(tag, tensor) for tag, tensor in enumerate(tensors, FIRST) if tensor.numel()]
        work += [dist.isend(tensor, group=group, group_dst=rank, tag=tag) for tag, tensor in own]
        work.append(dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=END))
        answers.append(dist.irecv(torch.zeros(1), group=group, group_src=rank, tag=ANSWER))
    for rank, tensors in received.items():
        targets = [(tag, tensor) for tag, tensor in enumerate(tensors, FIRST) if tensor.numel()]
        work += [dist.irecv(tensor, group=group, group_src=rank, tag=tag) for tag, tensor in targets]
        ends.append(dist.irecv(torch.zeros(1), group=group, group_src=rank, tag=END))
    limit = timedelta(seconds=limit_s * max([1, *map(len, sent.values()), *map(len, received.values())]))
    for end in ends:
        end.wait(limit)
    work += [dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=ANSWER) for rank in received]
    for each in [*answers, *work]:
        each.wait(limit)
