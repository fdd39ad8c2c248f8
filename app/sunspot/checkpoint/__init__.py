"""Saves the training state in shared memory and in storage while training continues, and reads it back.

Every worker calls `CheckpointManager.save` (manager.py). Four threads then work together until the manifest is written:

training thread   `save` gathers the consumed rows (ledger.py) and calls `Snapshots.take` (snapshot.py). `take` gets a
                  slot in shared memory (`NodeMemory.free_slot`, memory.py), copies the tensors that the next forward
                  pass can change, and leaves the rest to the copy thread. Before the next optimizer step,
                  `wait_for_copy` waits for the copy thread. On a GPU, only the device's queue waits.
copy thread       `Snapshots._copy` copies the tensors to the slot.
seal thread       `NodeMemory.complete` writes the sidecar and the marker (memory_files.py). From then on, a restart can
                  resume from this copy. Under FSDP, where each rank has a part (shard) of the state,
                  `PartExchange.complete` (part_exchange.py) also sends this part to the next node.
commit thread     `CheckpointCommitter` (commit.py) runs on rank 0, or under FSDP on every rank, and commits the newest
                  snapshot. It checks that this process may still commit (`ensure_committer`). A `SnapshotWriter`
                  uploads and verifies the files (`WholeStateWriter` in files.py, or under FSDP `ShardWriter` in
                  parts.py). The committer checks again that it may commit, and writes the manifest. From then on, the
                  checkpoint exists. Finally, the committer deletes expired checkpoints and releases the slot. A process
                  that outlives its group completes its commit while the next group trains.

To resume, node_state.py reads a copy from the node's memory, or a checkpoint from storage, once for all workers of the
node.
"""

from sunspot.checkpoint.commit import CheckpointCommitter
from sunspot.checkpoint.manager import CheckpointManager, versions
from sunspot.checkpoint.memory import NodeMemory
from sunspot.checkpoint.snapshot import SavedObjects

__all__ = ["CheckpointCommitter", "CheckpointManager", "NodeMemory", "SavedObjects", "versions"]
