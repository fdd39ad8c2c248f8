"""The command `sunspot`: its verbs, and the options that all of them take.

`sunspot VERB` is `submitter/commands/VERB.py`: `add_arguments` declares its arguments, and `run` runs it. The module is
imported only when the verb is used, so help and wrong usage answer at once.
"""

import functools
import importlib
import os
from collections.abc import Sequence
from typing import NoReturn

from sunspot import __version__
from sunspot.command_line import CommandParser
from sunspot.errors import SettingsError, run_and_exit
from sunspot.spelling import OTHER_CHECKPOINT_VERBS, OTHER_VERBS

VERBS = {
    "demo": "train on this machine, kill a worker, and prove that no row was lost: two minutes, no cluster",
    "init": "write a first task and its settings, and print the commands to run",
    "check": "check that a task trains, evaluates, saves and restores: on this machine, in seconds",
    "train": "train on this machine, with settings from sunspot.toml and the environment; the exit code is the outcome",
    "predict": "predict files, a dataset or prompts with a run's model",
    "tune": "train a run for each of several settings on this machine, and keep the best checkpoint",
    "render": "print the manifest that submit would apply; no cluster needed",
    "submit": "check the cluster and storage, and apply the manifest that render prints",
    "status": "show the state of a run, from cluster and storage together",
    "wait": "show progress until the run ends; the exit code is the outcome",
    "stop": "let the run save and stop, then remove its cluster",
    "resume": "continue a stopped run: apply the last submitted manifest again",
    "list": "list all runs, the most recently written first",
    "ui": "serve a live page of all runs, from storage alone",
    "logs": "print the output of the driver or of one rank, from storage and a few seconds late",
    "checkpoints": "list, verify, download or remove a run's checkpoints",
    "checkpoints ls": "list and verify the checkpoints",
    "checkpoints verify": "verify one checkpoint or all of them; exit code 7 if any is damaged",
    "checkpoints get": "download a checkpoint; after an interruption, the same command continues",
    "checkpoints gc": "show checkpoints and uploads that are no longer needed; --yes removes them",
    "events": "list a run's incidents and worker starts, and their cost",
    "metrics": "print a run's metric history",
    "cost": "show the cost of runs and of their losses, and the savings of spot nodes; node hours without a price",
    "report": "write everything about a run into one HTML file",
    "audit": "prove which rows each epoch consumed, and check checkpoints and receipts; exit code 7 for a fault",
    "chaos": "reclaim and kill parts of a live run on purpose, then audit it",
    "doctor": "explain why a run is pending, slow, stuck or failed, and what to do",
    "dashboard": "forward a run's Ray dashboard to a port of this machine",
    "delete": "show everything that belongs to a run, ask for confirmation, and delete it",
    "completion": "print the shell script that completes verbs, options and runs",
}
"""Help text of each verb, in the order of the help. `checkpoints` is a group with its own verbs."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the verb on the command line, and end the process."""

    def program() -> int:
        if os.name == "nt":  # before the import of modules that Windows does not have
            windows = "this is Windows, and sunspot needs Linux or macOS"
            raise SettingsError(f"{windows}; in WSL (`wsl --install`) all of it works")
        arguments = make_parser(load=False).parse_args(words)
        from sunspot.log import print_logs  # help does not need it

        print_logs("stderr")
        arguments.begin(arguments)
        return 0

    run_and_exit(program)


def make_parser(load: bool = True) -> CommandParser:
    """Make the parser of the command. Without `load`, a verb is imported when it is used, and not at once."""
    parser = CommandParser("sunspot", "Ray Train on Kubernetes spot GPUs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(parser=parser)
    groups = {"": parser.add_verbs(OTHER_VERBS)}
    for verb, about in VERBS.items():
        group, _, name = verb.rpartition(" ")
        child: CommandParser = groups[group].add_parser(name, help=about, description=about)
        if any(other.startswith(f"{verb} ") for other in VERBS):
            groups[verb] = child.add_verbs(OTHER_CHECKPOINT_VERBS)
        else:
            child.deferred = functools.partial(_add_arguments, verb)
            if load:
                child.add_deferred_arguments()
    return parser


def _add_arguments(verb: str, parser: CommandParser) -> None:
    """Import a verb, and add its arguments and those that every verb takes."""
    module = importlib.import_module(f"sunspot.submitter.commands.{verb.replace(' ', '.')}")
    module.add_arguments(parser)
    parser.add_argument("--storage", metavar="PATH", help="where runs are kept; default: SUNSPOT_STORAGE_PATH, or runs")
    parser.add_argument("--json", action="store_true", help="JSON on stdout, everything else on stderr")
    parser.set_defaults(begin=module.run)


if __name__ == "__main__":
    main()
