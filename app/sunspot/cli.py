"""The command `sunspot`: its verbs, the options that all of them take, and the way from an error to an exit code.

`sunspot VERB` is `submitter/commands/VERB.py`: `add_arguments` declares what it takes, `run` does it. A verb's module
is imported only when that verb is used, so help and wrong usage answer at once.
"""

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from sunspot import __version__
from sunspot.errors import SettingsError, run_and_exit
from sunspot.spelling import NO_OTHER_NAMES, OTHER_CHECKPOINT_VERBS, OTHER_VERBS, find_meant

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
    """Do what the command line says, and end the process."""

    def program() -> int:
        if os.name == "nt":  # before anything is imported that is not there
            windows = "this is Windows, and sunspot needs Linux or macOS"
            raise SettingsError(f"{windows}; in WSL (`wsl --install`) all of it works")
        arguments = make_parser(load=False).parse_args(words)
        from sunspot.log import print_logs  # help does without

        print_logs("stderr")
        arguments.begin(arguments)
        return 0

    run_and_exit(program)


def make_parser(load: bool = True) -> argparse.ArgumentParser:
    """Make the parser of the whole command. Without `load`, a verb gets its arguments when it is used, not at once."""
    parser = _Parser("sunspot", description="Ray Train on Kubernetes spot GPUs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(parser=parser)
    groups = {"": parser.add_verbs(OTHER_VERBS)}
    for verb, about in VERBS.items():
        group, _, name = verb.rpartition(" ")
        child: _Parser = groups[group].add_parser(name, help=about, description=about, allow_abbrev=False)
        if any(other.startswith(f"{verb} ") for other in VERBS):
            groups[verb] = child.add_verbs(OTHER_CHECKPOINT_VERBS)
        else:
            child.verb = verb
            if load:
                child.load()
    return parser


class _Parser(argparse.ArgumentParser):
    """Loads its verb when it is used, and answers a misspelt verb or option with the nearest right one."""

    verb = ""
    "The verb whose arguments are not here yet."
    verbs: Any = None
    "The action that chooses among the verbs of a group."
    other_verbs: Mapping[str, str] = NO_OTHER_NAMES
    "The names that other programs have for the verbs of a group."

    def add_verbs(self, other_verbs: Mapping[str, str]) -> Any:
        self.other_verbs = other_verbs
        self.verbs = self.add_subparsers(title="verbs", metavar="VERB", required=True)
        return self.verbs

    def load(self) -> None:
        """Import the verb, and add its arguments and those that every verb takes."""
        module = importlib.import_module(f"sunspot.submitter.commands.{self.verb.replace(' ', '.')}")
        module.add_arguments(self)
        self.add_argument(
            "--storage", metavar="PATH", help="where runs are kept; default: SUNSPOT_STORAGE_PATH, or runs"
        )
        self.add_argument("--json", action="store_true", help="JSON on stdout, everything else on stderr")
        self.set_defaults(begin=module.run)
        self.verb = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        if self.verb:
            self.load()
        if self.verbs:
            if words and not words[0].startswith("-"):
                self._check(words[:1], "verb", self.verbs.choices, self.other_verbs)
            return super().parse_known_args(words, namespace)
        before = itertools.takewhile(lambda word: word != "--", words)
        options = [word.partition("=")[0] for word in before if word.startswith("--")]
        self._check(options, "option", self._option_string_actions)
        parsed, unknown = super().parse_known_args(self._positional_first(words), namespace)
        if unknown and "=" in unknown[0] and "--set" in self._option_string_actions:
            raise SettingsError(f"{unknown[0]}: write --set {unknown[0]}")
        self._check(unknown, "argument")
        return parsed, unknown

    def _positional_first(self, words: list[str]) -> list[str]:
        """Move positional arguments before the options, because argparse takes repeatable ones in one place only."""
        positional: list[str] = []
        options: list[str] = []
        takes_value = False
        for number, word in enumerate(words):
            if word == "--":
                return [*positional, *options, *words[number:]]
            (options if takes_value or word.startswith("-") else positional).append(word)
            action = None if takes_value else self._option_string_actions.get(word)
            takes_value = action is not None and action.nargs is None
        return positional + options

    def _check(
        self,
        words: Iterable[str],
        what: str,
        known: Iterable[str] = (),
        other_names: Mapping[str, str] = NO_OTHER_NAMES,
    ) -> None:
        """Raise `SettingsError` for the first word that is not known, with the name that is meant."""
        for word in words:
            if word not in known:
                meant = find_meant(word, known, other_names)
                hint = f"did you mean {meant}?" if meant else f"`{self.prog} --help` lists what there is"
                raise SettingsError(f"{word}: no such {what}; {hint}")


if __name__ == "__main__":
    main()
