"""Measures the subjects one after the other. If a subject fails, the others are still measured."""

import argparse
import importlib
import logging
import os
import platform
import sys
import traceback
import warnings
from pathlib import Path

import torch

from scripts.bench.gpu import no_ray
from scripts.bench.gpu.session import Session

SUBJECTS = {"digits": 170, "gpt2": 220, "checkpoints": 60, "product": 100}
"""Modules of this package, in the order of measurement, with the maximum number of seconds for each."""


def main() -> int:
    """Measure the subjects, and return 1 if a subject failed."""
    parser = argparse.ArgumentParser("bench-gpu", description=__doc__)
    parser.add_argument("subjects", nargs="*", choices=[*SUBJECTS, []], help="subjects to measure; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=560, help="time limit for all subjects; default: %(default)s")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    session = Session(device, arguments.seconds, Path(os.environ.get("OUT", "bench-gpu")))
    name = torch.cuda.get_device_name() if session.on_gpu else platform.processor() or platform.machine()
    session.say(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}")
    failed = False
    for subject in arguments.subjects or SUBJECTS:
        session.begin(subject, SUBJECTS[subject])
        try:
            importlib.import_module(f"scripts.bench.gpu.{subject}").measure(session)
        except Exception as error:
            traceback.print_exc()
            session.say(f"{subject} failed: {error!r}")
            failed = True
    session.say(f"\n{session.elapsed_s:.0f} s in all; results in {session.folder}")
    return int(failed)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # PyTorch's own checkpoints warn
    no_ray.install()
    sys.exit(main())
