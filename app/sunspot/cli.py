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
    "demo": "train here, kill a worker in the middle, and prove that no row was lost: two minutes, no cluster",
    "init": "write a task to begin with, its settings, and the commands to type",
    "check": "whether a task trains, evaluates, saves and restores: here, in seconds",
    "train": "train here, with the settings of sunspot.toml below the environment; the exit code says how",
    "predict": "predict files, a dataset or prompts with a run's model",
    "tune": "train a run for each of several settings, here, and keep the best one's checkpoint",
    "render": "print the manifest that submit would apply; no cluster needed",
    "submit": "check everything, then have the cluster run what render prints",
    "status": "where the run stands: cluster and storage in one view",
    "wait": "progress until the run ends; the exit code says how",
    "stop": "have the run save and stand still, then remove its cluster",
    "resume": "let a stopped run go on: submit again what was submitted last",
    "list": "all runs, the one that was written last first",
    "ui": "a live page over all runs, from storage alone",
    "logs": "what the driver printed, or one rank: from storage, a few seconds behind",
    "checkpoints": "the run's checkpoints",
    "checkpoints ls": "list them, each verified",
    "checkpoints verify": "verify all or one; exit code 7 if any is damaged",
    "checkpoints get": "download one; interrupted, the same command goes on",
    "checkpoints gc": "show what is of no use any more; --yes removes it",
    "events": "what happened to the run besides training, and what it cost",
    "metrics": "the run's metric history",
    "cost": "what runs cost, what their losses cost, and what spot nodes saved; node hours without a price",
    "report": "write all there is to see of the run into one HTML file",
    "audit": "prove which rows each epoch consumed, checkpoints and receipts; exit code 7 for a fault",
    "chaos": "reclaim and kill parts of a live run on purpose, then audit it",
    "doctor": "why a run is pending, slow, stuck or failed, and what to do",
    "dashboard": "the run's Ray dashboard on a port of this machine",
    "delete": "show all there is of a run, ask, and remove it",
    "completion": "print the script by which a shell completes verbs, options and runs",
}
"""In the order of the help; `checkpoints` has verbs of its own."""


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
