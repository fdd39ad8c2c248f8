"""`sunspot check`: checks that a task trains, evaluates, saves and restores, in one process and in seconds."""

import argparse
import contextlib
import importlib
import sys
from dataclasses import asdict
from typing import Any

from sunspot.errors import SettingsError, SunspotError
from sunspot.extras import how_to_install
from sunspot.settings import with_place
from sunspot.submitter.commands.arguments import add_settings_and_words, given_settings
from sunspot.submitter.local_training import settings_in, training_environment
from sunspot.submitter.printing import print_json, print_text
from sunspot.task_file import import_as_module_run

add_arguments = add_settings_and_words


def run(args: argparse.Namespace) -> None:
    """Print what was checked, or raise the task's error. With `--json`, print a document even if the task fails."""
    environment = training_environment(with_place(given_settings(args), None, args.storage))
    import_as_module_run(environment)
    settings = settings_in(environment)
    try:
        # Imported through importlib, because it imports torch, which need not be installed.
        library: Any = importlib.import_module("sunspot.train.task_check")
    except ModuleNotFoundError as error:
        missing = error.name or "torch"  # if torch is absent, Ray raises an error without a name
        raise SettingsError(f"a task needs {missing}, which is not installed; {how_to_install('train')}") from error
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the output of the task
            checked = library.check(settings)
    except SunspotError as error:
        if args.json:
            print_json({"task": settings.task, "passed": False, "error": str(error)})
        raise
    if args.json:
        kept = {name: value for name, value in asdict(checked).items() if name not in ("batch", "learning_rates")}
        print_json({"passed": True, **kept})
    else:
        for line in checked.describe():
            print_text(line)
