"""Arguments of `sunspot predict` and `python -m sunspot.predict`."""

import argparse
from pathlib import Path

from sunspot.errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except --storage and --json."""
    parser.add_argument("run", metavar="RUN", help="a run's name, or the path or URL of a checkpoint directory")
    parser.add_argument(
        "file", metavar="FILE", nargs="*", help="a PNG, JPEG or .npy file (uint8 [C, H, W] or [B, C, H, W])"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        default="newest",
        help="the checkpoint: newest (default), best, its name, or the path of its directory",
    )
    parser.add_argument(
        "--task",
        metavar="MODULE",
        default="",
        help="the module (or file) of your own task; it is imported (default: SUNSPOT_TASK, or TASK in sunspot.toml; "
        "Sunspot's own tasks do not need this option)",
    )
    parser.add_argument(
        "--dataset",
        metavar="PATH",
        help="make predictions for all rows of this dataset, in any form that SUNSPOT_DATASET accepts",
    )
    parser.add_argument("--split", choices=["train", "test"], help="split of the dataset (default: test, if it exists)")
    parser.add_argument("--output", metavar="DIR", help="folder or bucket URL for the predictions of --dataset")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt to answer; this option can be repeated"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=64, help="maximum number of tokens in an answer (default: 64)"
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=0,
        help="number of workers for --dataset (default: as many as the Ray cluster has room for)",
    )


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise `SettingsError` for invalid combinations of arguments, before torch is imported."""
    if bool(arguments.dataset) != bool(arguments.output):
        raise SettingsError("--dataset and --output must be used together")
    if [bool(arguments.dataset), bool(arguments.file), bool(arguments.prompt)].count(True) != 1:
        raise SettingsError("specify either files, or --dataset with --output, or --prompt")
    missing = [file for file in arguments.file if not Path(file).exists()]
    if missing:
        raise SettingsError(f"{missing[0]} does not exist; check the path")
    if arguments.tokens < 1:
        raise SettingsError(f"--tokens must be a positive integer, not {arguments.tokens}")
    if arguments.workers < 0:
        raise SettingsError(
            f"--workers must be an integer >= 0, not {arguments.workers}; 0 starts as many workers as Ray has room for"
        )
