"""The mesh that tells FSDP2 which shard a process holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the mesh of a group. Its dimension is named after this process's rank in the group.

    Torch 2.15 considers two meshes equal if they have the same ranks and the same names, and then uses the first of
    them for the tensors of both. Without the rank in the name, a process that gets another rank would keep the position
    of its first rank: it would train the right shard, but save it as another one.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"rank_{dist.get_rank(group)}",))
