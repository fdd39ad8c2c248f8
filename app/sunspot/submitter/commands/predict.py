"""`sunspot predict`: makes predictions with a run's model, like `python -m sunspot.predict`."""

import argparse
import importlib
import os
from typing import Any

from sunspot.predict.command_arguments import add_arguments as add_arguments


def run(args: argparse.Namespace) -> None:
    """Make predictions in this process. Raises `SettingsError` if torch or Ray is not installed."""
    from sunspot.submitter.local_training import refuse_without_training
    from sunspot.task_file import import_as_module_run

    refuse_without_training("predicting")
    import_as_module_run(os.environ)
    library: Any = importlib.import_module("sunspot.predict.__main__")  # by name, because it needs torch
    library.predict(args)
