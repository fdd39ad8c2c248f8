"""`sunspot completion`: prints a shell script that completes subcommands, options and runs."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sunspot.run.objects import RUN
from sunspot.submitter.printing import print_text

LINE = "_SUNSPOT_LINE"
"""Environment variable with the command line up to the cursor. If it is set, the command prints completions."""

SCRIPTS = {
    "bash": """\
_sunspot() {
  local IFS=$'\\n'
  COMPREPLY=($(_SUNSPOT_LINE="${COMP_LINE:0:COMP_POINT}" sunspot completion bash 2> /dev/null))
}
complete -o default -F _sunspot sunspot""",
    "zsh": """\
_sunspot() {
  compadd -- ${(f)"$(_SUNSPOT_LINE="${words[1,CURRENT]}" sunspot completion zsh 2> /dev/null)"} || _files
}
compdef _sunspot sunspot""",
    "fish": """\
complete -c sunspot -a '(env _SUNSPOT_LINE=(commandline -cp | string collect) sunspot completion fish 2> /dev/null)'""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"one of {', '.join(SCRIPTS)}; in bash, run: source <(sunspot completion bash)"
    parser.add_argument("shell", metavar="SHELL", choices=[*SCRIPTS], help=about)


def run(args: argparse.Namespace) -> None:
    """Print the shell script, or the completions if the script calls this command."""
    line = os.environ.get(LINE)
    if line is None:
        print_text(SCRIPTS[args.shell])
    else:
        print_text("\n".join(find_candidates(args.parser, line)))


def find_candidates(parser: Any, line: str) -> list[str]:
    """Return the possible completions of the last word of a command line."""
    words = line.split()[1:]
    last = words.pop() if words and not line[-1].isspace() else ""
    while parser.verbs and words and words[0] in parser.verbs.choices:
        parser = parser.verbs.choices[words.pop(0)]
    return [text for text in _list_all(parser, words, last) if text.startswith(last)]


def _list_all(parser: Any, words: list[str], last: str) -> Iterator[str]:
    if parser.verbs:
        yield from parser.verbs.choices
        return
    parser.add_deferred_arguments()
    options = parser._option_string_actions
    if last.startswith("-"):
        yield from (option for option in options if option.startswith("--"))
        return
    if words and words[-1] in options and options[words[-1]].nargs != 0:
        return  # the shell completes files for an option's value
    for action in parser._get_positional_actions():
        if action.choices:
            yield from action.choices
        elif action.dest == "run":
            yield from _list_runs(words)


def _list_runs(words: list[str]) -> Iterator[str]:
    """Yield the runs in a local folder. Listing a bucket would take too long."""
    storage = os.environ.get("SUNSPOT_STORAGE_PATH") or "runs"
    if "--storage" in words[:-1]:
        storage = words[words.index("--storage") + 1]
    folder = Path(storage)
    if folder.is_dir():
        # Skip other names, because bash would insert a name such as `x;rm` without quotes.
        yield from sorted(path.name for path in folder.iterdir() if RUN.fullmatch(path.name) and path.is_dir())
