"""The `sunspot` command: its subcommands and their common options.

The module `submitter/commands/NAME.py` implements `sunspot NAME`. Its `add_arguments` declares the arguments, and its
`run` runs the subcommand. The module is imported only when the subcommand is used, which keeps `--help` and usage
errors fast.
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
    "demo": "train on this machine without a cluster for two minutes, kill a worker, and prove that no row was lost",
    "init": "write a first task and its settings, and print the commands to run",
    "check": "check in seconds, on this machine, that a task trains, evaluates, saves and restores",
    "train": "train on this machine, with settings from sunspot.toml and the environment; the exit code is the outcome",
    "predict": "make predictions for files, a dataset or prompts with a run's model",
    "tune": "search for the best settings on this machine: train one run per trial, and keep the best checkpoint",
    "render": "print the manifest that submit would apply; no cluster is needed",
    "submit": "check the cluster and storage, and apply the manifest that render prints",
    "status": "show a run's state, from the cluster and storage",
    "wait": "show progress until the run ends; the exit code is the outcome",
    "stop": "let the run save and stop, then remove its cluster",
    "move": "move a live run to another place of its profile without repeating a step",
    "resume": "continue a stopped run: start its RayJob again",
    "scale": "change the number of workers of a live elastic run",
    "list": "list all runs, most recently updated first",
    "ui": "serve a live web page of all runs, from storage alone",
    "logs": "print the output of the driver or of one rank, from storage, with a few seconds' delay",
    "checkpoints": "list, verify, download or remove a run's checkpoints",
    "checkpoints ls": "list and verify the checkpoints",
    "checkpoints verify": "verify one checkpoint or all of them; the exit code is 7 if a checkpoint is damaged",
    "checkpoints get": "download a checkpoint; after an interruption, the same command resumes the download",
    "checkpoints gc": "show checkpoints and uploads that are no longer needed; --yes removes them",
    "events": "list a run's incidents and worker starts, and their cost",
    "metrics": "print a run's metric history",
    "cost": "show what runs and losses cost and what spot nodes save; if no prices are set, show node hours",
    "report": "write everything about a run into one HTML file",
    "audit": "prove which rows each epoch consumed, and verify checkpoints and receipts; the exit code is 7 on failure",
    "chaos": "inject faults into a live run, then audit it",
    "doctor": "explain why a run is pending, slow, stuck or failed, and what to do",
    "profile": "record a few steps of a live run with torch.profiler, and show where the traces are and what they cost",
    "dashboard": "forward a run's Ray dashboard to a port of this machine",
    "delete": "show everything that belongs to a run, ask for confirmation, and delete it",
    "completion": "print a shell script that completes subcommands, options and runs",
}
"""Help text of each subcommand, in the order of `--help`. `checkpoints` is a group of subcommands."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the subcommand that `words` or the command line specifies, and exit."""

    def program() -> int:
        if os.name == "nt":  # checked before importing modules that Windows does not have
            windows = "sunspot needs Linux or macOS, and this is Windows"
            raise SettingsError(f"{windows}; use WSL (`wsl --install`)")
        arguments = make_parser(load=False).parse_args(words)
        from sunspot.log import print_logs  # not needed for --help

        print_logs("stderr")
        arguments.begin(arguments)
        return 0

    run_and_exit(program)


def make_parser(load: bool = True) -> CommandParser:
    """Return the command's parser. Without `load`, a subcommand's module is imported only when it is used."""
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
    """Import the module of a subcommand and add its arguments, along with the common ones."""
    module = importlib.import_module(f"sunspot.submitter.commands.{verb.replace(' ', '.')}")
    module.add_arguments(parser)
    parser.add_argument("--storage", metavar="PATH", help="location of runs; default: SUNSPOT_STORAGE_PATH, or ./runs")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and everything else on stderr")
    parser.set_defaults(begin=module.run)


if __name__ == "__main__":
    main()
