"""A process group of this process alone: collectives work, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest


@pytest.fixture
def group(tmp_path: Path) -> Iterator[object]:
    import torch.distributed as dist  # here, as most tests need no torch

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    assert dist.group.WORLD
    yield dist.group.WORLD
    dist.destroy_process_group()
