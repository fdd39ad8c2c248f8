"""Parses the command lines of `sunspot` and of `python -m sunspot...`."""

import argparse
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from sunspot.spelling import NO_OTHER_NAMES, OTHER_SETTINGS, find_meant


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests a correction for a misspelled subcommand, option or setting.

    Its `--help` also lists the `settings` that the command reads.
    """

    deferred: Callable[[Any], None] | None = None
    "Function that adds this parser's arguments when it is used, so that `--help` does not import every subcommand."
    verbs: Any = None
    "Action that selects a subcommand."
    other_verbs: Mapping[str, str] = NO_OTHER_NAMES
    "Subcommands, keyed by their names in other programs."

    def __init__(self, prog: str, description: str | None = None, settings: Iterable[str] = (), **options: Any) -> None:
        self._variables: dict[str, str] = {}
        names = list(settings)
        if names:
            from sunspot.settings import describe_settings  # not needed for `sunspot --help`

            described = describe_settings(names)
            self._variables = {name: setting.variable for name, setting in zip(names, described, strict=True)}
            lines = [f"  {setting.variable}={setting.default}\n{_indent(setting.meaning)}" for setting in described]
            options["epilog"] = "\n".join(["settings, as environment variables with their defaults:", *lines])
            options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, **options)

    def add_verbs(self, other_verbs: Mapping[str, str]) -> Any:
        """Prepare this parser for subcommands, and return the action to which they are added.

        `other_verbs` maps names from other programs, such as `ls`, to this parser's subcommands.
        """
        self.other_verbs = other_verbs
        self.verbs = self.add_subparsers(title="commands", metavar="COMMAND", required=True)
        return self.verbs

    def add_deferred_arguments(self) -> None:
        """Call `deferred`, which adds this parser's arguments. Later calls do nothing."""
        if self.deferred:
            self.deferred(self)
            self.deferred = None

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the words of a command line. If a word is unknown, the process exits with code 2."""
        words = list(sys.argv[1:] if args is None else args)
        self.add_deferred_arguments()
        if self.verbs:
            if words and not words[0].startswith("-") and words[0] not in self.verbs.choices:
                self._refuse("command", words[0], find_meant(words[0], self.verbs.choices, self.other_verbs))
            return super().parse_known_args(words, namespace)
        # Check for misspelled options first, because argparse would report missing arguments instead.
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if word.startswith("--") and option not in self._option_string_actions:
                self._refuse("option", option, self._find_meant(option))
        parsed, unknown = super().parse_known_args(self._positional_first(words), namespace)
        if unknown and "=" in unknown[0] and "--set" in self._option_string_actions:
            self.exit(2, f"error: {unknown[0]}: write --set {unknown[0]}\n")
        if unknown:
            self._refuse("argument", unknown[0], self._find_meant(unknown[0]))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message and exit, as `run_and_exit` does for a `SettingsError`."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")

    def _refuse(self, kind: str, word: str, meant: str) -> NoReturn:
        hint = f"did you mean {meant}?" if meant else f"see `{self.prog} --help`"
        self.exit(2, f"error: {word}: no such {kind}; {hint}\n")

    def _find_meant(self, word: str) -> str:
        """Return the option or environment variable that the user probably meant by `word`, or an empty string."""
        known = {name: f"the environment variable {variable}" for name, variable in self._variables.items()}
        if word.startswith("-"):
            options = [option for option in self._option_string_actions if option.startswith("--")]
            known |= {option.strip("-").replace("-", "_"): option for option in options}
        other_names = {name.lower(): setting.lower() for name, setting in OTHER_SETTINGS.items()}
        name = word.partition("=")[0].strip("-").replace("-", "_").lower().removeprefix("sunspot_")
        return known.get(find_meant(name, known, other_names), "")

    def _positional_first(self, words: Sequence[str]) -> list[str]:
        """Move positional arguments to the front, because argparse accepts a list of them only before options."""
        positional: list[str] = []
        options: list[str] = []
        takes_value = False
        for number, word in enumerate(words):
            if word == "--":
                return [*positional, *options, *words[number:]]
            (options if takes_value or word.startswith("-") else positional).append(word)
            action = None if takes_value else self._option_string_actions.get(word)
            takes_value = action is not None and action.nargs in (None, argparse.OPTIONAL)
        return positional + options


def _indent(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
