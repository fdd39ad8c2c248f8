"""The mesh that tells FSDP2 which shard a process holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the mesh of a group. Its dimension is named after this process's rank in the group.

    If two meshes have the same ranks and names, torch 2.15 considers the meshes equal, and uses the first one for the
    tensors of both. Without the rank in the name, a process whose rank changes would still have the position of its old
    rank in the mesh. It would train the right shard, but save it as the shard of its old rank.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"rank_{dist.get_rank(group)}",))
