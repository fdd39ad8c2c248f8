"""Runs the subjects one after the other. If a subject fails or lacks a package, the others still run."""

import argparse
import importlib
import logging
import os
import platform
import sys
import time
import traceback
import warnings

import torch

SUBJECTS = ("checkpoints", "steps")
"""Modules of this package to run. The longest comes last."""


def main() -> int:
    """Measure the subjects, and return 1 if a subject failed."""
    parser = argparse.ArgumentParser("bench-gpu", description=__doc__)
    parser.add_argument("subjects", nargs="*", choices=[*SUBJECTS, []], help="subjects to measure; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    began, failed = time.monotonic(), False
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}", flush=True)
    for subject in arguments.subjects or SUBJECTS:
        print(f"\n{subject} ({time.monotonic() - began:.0f} s)", flush=True)
        try:
            importlib.import_module(f"scripts.bench.gpu.{subject}").measure(torch.device(arguments.device))
        except Exception:  # keep measuring the other subjects
            traceback.print_exc(file=sys.stdout)
            failed = True
    print(f"\n{time.monotonic() - began:.0f} s in all", flush=True)
    return int(failed)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # PyTorch's own checkpoints warn
    sys.exit(main())
