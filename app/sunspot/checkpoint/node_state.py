"""A state on its way to the workers of a node: one of them reads and verifies it, and all map its pages.

So a restore reads each byte once for a node, and takes the memory of one state beside the workers' own.
"""

import zlib
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from sunspot.checkpoint.files import load_checked
from sunspot.checkpoint.neighbours import CHUNK, TIMEOUT_S
from sunspot.checkpoint.sharded import is_sharded
from sunspot.checkpoint.slots import LoadedSnapshot, MemorySnapshot, as_bytes
from sunspot.parallel.collectives import gather_objects, run_on_all_ranks
from sunspot.run import Run
from sunspot.run.checkpoints import FILES_AT_ONCE, Checkpoint, compare_bytes
from sunspot.shared_pages import Pages, map_pages
from sunspot.storage.base import map_parallel

STATES = ("model.pt", "optimizer.pt")
"""The files that a worker group loads; others are only verified."""


class NodeState:
    """One rank's hold on the state in its node's memory. All workers of `group` make one together."""

    def __init__(self, run: Run, group: dist.ProcessGroup | None, nodes: list[str]) -> None:
        """`nodes` identify the machine of each rank; `group` None: a worker alone."""
        self._run, self._group = run, group
        self._rank, self._world_size = dist.get_rank(group) if group else 0, len(nodes)
        self._readers = sorted({nodes.index(node) for node in nodes})
        "The lowest rank of each node, which reads for all of its ranks."
        self._reader = nodes.index(nodes[self._rank])
        self._files: dict[str, Pages] = {}

    @property
    def reads(self) -> bool:
        """Whether this rank reads for its node."""
        return self._rank == self._reader

    def read(self, checkpoint: Checkpoint) -> list[str]:
        """Do this rank's share in reading a checkpoint on each node, and return what is damaged, a line per fault.

        Of one in parts, each rank verifies some files, as it will load others, or pieces of them, once models are
        sharded.
        """
        self.close()
        if absent := [file for file in STATES if file not in checkpoint.files and not is_sharded(checkpoint)]:
            return [f"its manifest lists no {file}" for file in absent]
        if is_sharded(checkpoint):
            mine = sorted(checkpoint.files)[self._rank :: self._world_size]
        else:
            mine = sorted(checkpoint.files) if self.reads else []

        def read(file: str) -> list[str]:
            if file not in STATES or is_sharded(checkpoint):
                return compare_bytes(self._run, checkpoint, file)
            pages = self._files[file] = Pages()
            return compare_bytes(self._run, checkpoint, file, pages.write)

        return [fault for faults in map_parallel(read, mine, FILES_AT_ONCE) for fault in faults]

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The `model` and `optimizer` that were read, on the CPU; their tensors are pages that the node's ranks share.

        All workers call this together. Raises `ConflictError` for a file that cannot be loaded, whole as it is.
        """
        paths = gather_objects({file: pages.path for file, pages in self._files.items()}, self._group)[self._reader]

        def load(file: str) -> Any:
            return load_checked(self._run, checkpoint, file, paths[file])

        states = run_on_all_ranks(self._group, lambda: {file.removesuffix(".pt"): load(file) for file in STATES})
        self.close()
        return states

    def share(self, chosen: MemorySnapshot, rank: int, found: LoadedSnapshot | None) -> LoadedSnapshot:
        """The `chosen` snapshot on every rank, its tensors in pages that the node's ranks share.

        Readers that did not find it get it from `rank`. All workers call this together.
        """
        mine = found.held if found else None
        same = mine is not None and (mine.attempt, mine.step, mine.crc32) == (chosen.attempt, chosen.step, chosen.crc32)
        pages = found.pages if found and same else Pages(chosen.size if self.reads else 0)
        rest = [found.rest if found and same else {}]
        have = gather_objects(same, self._group)
        lacking = [reader for reader in self._readers if not have[reader]]
        if lacking:
            # Only they and `rank` take part; all of the group have to make it.
            limit = timedelta(seconds=TIMEOUT_S)
            group = cast(dist.ProcessGroup, dist.new_group(sorted({rank, *lacking}), limit, "gloo"))
            if self._rank in (rank, *lacking):
                received = map_pages(pages.path, chosen.size, shared=True)
                for message in received.split(CHUNK):  # a node that freezes is waited for no longer than the limit
                    dist.broadcast(message, rank, group=group)
                if not same and zlib.crc32(as_bytes(received)) != chosen.crc32:
                    raise RuntimeError("the copy of the state that came from another node is not what was marked there")
        if self._group:
            dist.broadcast_object_list(rest, rank, group=self._group)
        paths = gather_objects(pages.path, self._group)
        data = map_pages(paths[self._reader], chosen.size)
        gather_objects(None, self._group)  # all have mapped them
        pages.close()
        return LoadedSnapshot(chosen, data, rest[0], pages)

    def close(self) -> None:
        """Let go of files that were read."""
        for pages in self._files.values():
            pages.close()
        self._files = {}
