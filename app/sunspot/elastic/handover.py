"""Hands the state of survivors to the workers that lack it: newcomers, and who was a step behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from sunspot.checkpoint.snapshot import SavedObjects
from sunspot.checkpoint.tensors import in_buffer, map_tensors, size_of, tensors_in
from sunspot.elastic.copies import Holders
from sunspot.elastic.restore import TrainingState
from sunspot.parallel.collectives import WorkerPlace, gather_objects
from sunspot.run.attempts import IN_PLACE

SEND_LIMIT_S = 120
"""How long one tensor may be on its way; the loss of either side ends that sooner."""


@dataclass(frozen=True)
class Position:
    """What goes with the tensors of a state that is in use."""

    metrics: dict[str, Any]
    "Those that a checkpoint of it would have."
    taken: float
    "When its last step had been taken, in seconds since the epoch."
    ledger: Sequence[Any]
    "Windows of consumed rows that may not be in storage yet."


def hand_over(
    place: WorkerPlace, holders: Holders, saved: SavedObjects | None, position: Position | None, total_steps: int
) -> TrainingState:
    """Return the state to go on from, on all workers of the group, which call this together.

    Holders have it already, with what is `saved` and its `position`, and so get no tensors. The others receive these
    from the first holder.
    """
    assert place.group
    source, rank = holders.ranks[0], place.rank
    state = saved.with_average(saved.state()) if saved and rank == source else None
    structure = map_tensors(state, lambda tensor: torch.empty_like(tensor, device="meta"))
    structure, sent = gather_objects((structure, position) if rank == source else None, place.group)[source]
    position = position if rank in holders.ranks and position else cast(Position, sent)
    known = TrainingState(
        evaluated=holders.evaluated,
        metrics=position.metrics,
        taken=position.taken,
        tier=IN_PLACE,
        total_steps=total_steps,
        ledger=tuple(position.ledger),
    )
    lacking = [other for other in range(place.world_size) if other not in holders.ranks]
    work: list[Any] = []
    if rank == source:
        own = [tensor.detach().cpu().contiguous() for tensor in tensors_in(state)]
        sends = [(tag, tensor, other) for tag, tensor in enumerate(own) if tensor.numel() for other in lacking]
        work = [dist.isend(tensor, other, place.group, tag) for tag, tensor, other in sends]
    elif rank in lacking:
        received = in_buffer(structure, bytearray(max(1, size_of(structure))))
        targets = [(tag, tensor) for tag, tensor in enumerate(tensors_in(received)) if tensor.numel()]
        work = [dist.irecv(tensor, source, place.group, tag) for tag, tensor in targets]
        known = TrainingState(**{**vars(known), **received})
    for each in work:
        each.wait(timedelta(seconds=SEND_LIMIT_S))
    return known
