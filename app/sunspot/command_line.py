"""The arguments of a `python -m sunspot...`: one way to parse, refuse and explain them."""

import argparse
import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

from sunspot.settings import PREFIX, describe_settings
from sunspot.spelling import OTHER_SETTINGS, find_meant


class CommandParser(argparse.ArgumentParser):
    """The parser of a `python -m sunspot...`, whose `--help` also lists the settings that it reads."""

    def __init__(self, module: str, description: str | None, settings: Iterable[str] = ()) -> None:
        self._settings = list(settings)
        lines = [f"  {s.variable}={s.default}\n{_indent(s.meaning)}" for s in describe_settings(self._settings)]
        super().__init__(
            f"python -m {module}",
            description=description,
            epilog="settings, environment variables with these defaults:\n" + "\n".join(lines) if lines else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse `words`, by default the command line; an unknown one ends the process with 2."""
        words = list(sys.argv[1:] if words is None else words)
        options = [word for word in itertools.takewhile(lambda word: word != "--", words) if word.startswith("--")]
        for option in options:  # first, as argparse would rather complain of what is missing
            if not any(known.startswith(option.partition("=")[0]) for known in self._option_string_actions):
                self.error(self._suggest(option))
        arguments, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(self._suggest(unknown[0]))
        return arguments

    def error(self, message: str) -> NoReturn:
        """End the process as `run_and_exit` does for a `SettingsError`."""
        self.exit(2, f"error: {message}\n")

    def _suggest(self, word: str) -> str:
        options = [option for option in self._option_string_actions if option.startswith("--")]
        known = {option.strip("-").replace("-", "_"): option for option in options}
        known |= {name: f"the environment variable {PREFIX}{name.upper()}" for name in self._settings}
        stem = word.partition("=")[0].strip("-").replace("-", "_").lower().removeprefix(PREFIX.lower())
        others = {name.lower(): meant.lower() for name, meant in OTHER_SETTINGS.items()}
        meant = known.get(find_meant(stem, known, others))
        hint = f"did you mean {meant}?" if meant else f"`{self.prog} --help` lists what there is"
        return f"{word}: no such argument; {hint}"


def _indent(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
