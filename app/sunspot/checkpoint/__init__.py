"""Saves the training state: copies in shared memory, committed to storage behind the training, and read back.

The way from `CheckpointManager.save` (manager.py, in every worker) to a manifest, by thread:

training thread   `save` gathers the rows consumed (ledger.py) and calls `Snapshots.take` (snapshot.py). That gets a
                  slot in shared memory (`NodeMemory.free_slot`, memory.py), copies at once what may change in the next
                  forward pass, and leaves the rest to the copy thread. `wait_for_copy`, before the next optimizer step,
                  waits for that; on a GPU the device's queue waits.
copy thread       `Snapshots._copy` copies the tensors to the slot.
seal thread       `NodeMemory.complete` writes the sidecar and the marker: from here on a restart may go on from this
                  copy. Under FSDP `PartExchange.complete` (replicas.py) also sends the part to the next node.
commit thread     `CheckpointCommitter` (commit.py), on rank 0, or under FSDP on every rank, begins with the newest
                  snapshot. It checks that this process may still commit (`ensure_committer`), has a `SnapshotWriter`
                  upload and verify its files (`WholeState` in files.py; under FSDP `ShardWriter` in parts.py), checks
                  again, and writes the manifest: now the checkpoint exists. Then it deletes what has expired, and
                  releases the slot. A process that outlives its group completes its commit while the next group trains.

The way back: node_state.py reads what a node has in memory, or a checkpoint, for all workers of the node.
"""

from sunspot.checkpoint.commit import CheckpointCommitter
from sunspot.checkpoint.manager import CheckpointManager, versions
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.snapshot import SavedObjects

__all__ = ["CheckpointCommitter", "CheckpointManager", "NodeMemory", "SavedObjects", "versions"]
