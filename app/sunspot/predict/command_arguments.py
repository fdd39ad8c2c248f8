"""Arguments of `sunspot predict` and `python -m sunspot.predict`."""

import argparse
from pathlib import Path

from sunspot.errors import SettingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except --storage and --json."""
    parser.add_argument("run", metavar="RUN", help="a run's name, or the path or URL of a checkpoint directory")
    parser.add_argument("file", metavar="FILE", nargs="*", help="PNG, JPEG, or .npy: uint8 [C, H, W] or [B, C, H, W]")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        default="newest",
        help="newest (default), best, a name, or the path of a directory",
    )
    parser.add_argument(
        "--task",
        metavar="MODULE",
        default="",
        help="your own task module that the run trained, or its file, which is imported (default: SUNSPOT_TASK, or "
        "TASK in sunspot.toml; not needed for Sunspot's own tasks)",
    )
    parser.add_argument(
        "--dataset", metavar="PATH", help="predict all rows of this dataset, given like SUNSPOT_DATASET"
    )
    parser.add_argument(
        "--split", choices=["train", "test"], help="split of the dataset (default: test if there is one)"
    )
    parser.add_argument("--output", metavar="DIR", help="folder or bucket URL for the predictions of --dataset")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to answer; can be repeated")
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=64, help="largest number of tokens in an answer (default: 64)"
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        default=0,
        help="number of model workers for --dataset (default: as many as fit in Ray)",
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
            f"--workers must be an integer >= 0, not {arguments.workers}; 0 uses as many workers as fit in Ray"
        )
