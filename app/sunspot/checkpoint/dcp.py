"""Writes a downloaded checkpoint in the format of torch.distributed.checkpoint (DCP)."""

import warnings
from pathlib import Path

from sunspot.checkpoint.files import unpack
from sunspot.checkpoint.pieces import METADATA


def write_dcp(directory: Path) -> None:
    """Write the state in a directory's `model.pt` and `optimizer.pt` to the same directory in DCP's format.

    Tensors get the names that they have in sharded checkpoints: `model.NAME` and `optimizer.state.PARAMETER.NAME`. If
    the checkpoint is sharded, it is already in DCP's format, and nothing is written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # imported lazily, because it takes seconds
    from torch.distributed.checkpoint.state_dict_saver import save

    if (directory / METADATA).exists() and not (directory / "optimizer.pt").exists():
        return
    model, optimizer, extra_state = (
        unpack(str(directory / f"{name}.pt")) for name in ("model", "optimizer", "extra_state")
    )
    # Checkpoints of older versions do not contain the names of the optimizer's parameters.
    names = dict(enumerate(extra_state.get("parameters", ())))
    state = {names.get(number) or str(number): values for number, values in optimizer["state"].items()}
    groups = [
        {**group, "params": [names.get(each) or str(each) for each in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    whole = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about a single process and existing files
        save(whole, storage_writer=FileSystemWriter(directory), no_dist=True)
