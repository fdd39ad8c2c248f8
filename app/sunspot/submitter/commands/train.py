"""`sunspot train`: trains on this machine, with settings from sunspot.toml, the environment and the command line.

`sunspot tune` uses this module to start a search.
"""

import argparse
import os
import signal
import subprocess
import sys

from sunspot.submitter.commands.arguments import add_settings_and_words, given_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_and_words(parser)
    parser.add_argument("--run", metavar="NAME", help="name of the run; default: SUNSPOT_RUN_NAME")


def run(args: argparse.Namespace) -> None:
    """Replace this process with `python -m sunspot.train`."""
    become("sunspot.train", args)


def become(module: str, args: argparse.Namespace) -> None:
    """Replace this process with `python -m MODULE`. With `--json`, run it as a subprocess and print the outcome."""
    from sunspot.settings import with_place
    from sunspot.submitter.local_training import refuse_without_training, training_environment

    refuse_without_training()
    environment = training_environment(with_place(given_settings(args), args.run, args.storage))
    command = (sys.executable, "-m", module)
    if args.json:
        raise SystemExit(train_and_print(command, environment))
    os.execve(command[0], command, environment)


def train_and_print(command: tuple[str, ...], environment: dict[str, str]) -> int:
    """Train with stdout redirected to stderr, print the outcome as JSON, and return the training's exit code."""
    from sunspot.machine.stop_signals import end_signals
    from sunspot.run import open_run
    from sunspot.run.seen import look
    from sunspot.settings.search_space import load_common
    from sunspot.submitter.printing import print_json

    settings, _, _ = load_common(environment)
    training = subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, **environment})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes, and the child saves
    for number in end_signals():
        signal.signal(number, lambda number, _: training.send_signal(number))
    code = training.wait()
    seen = look(open_run(settings.storage_path, settings.run_name))
    state, reason = seen.judge() if seen.exists else (None, "it never began")
    step = seen.status.step if seen.status else 0
    print_json({"run": seen.run.name, "state": state, "reason": reason, "step": step, "exit_code": code})
    return code
