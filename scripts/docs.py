"""`python -m scripts.docs`: write the pages of docs/ that are generated from definitions. A test checks them.

docs/settings.md is generated from app/sunspot/settings.py, docs/cli.md from the parser of `sunspot`, and the keys in
docs/profiles.md from app/sunspot/submitter/manifest/profile.py.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from sunspot.cli import make_parser
from sunspot.settings import IDENTITY, PREFIX, describe_settings
from sunspot.submitter.manifest.profile import (
    DataWorkers,
    Head,
    Machine,
    PricedMachine,
    Profile,
    SecretKey,
    Spot,
    Worker,
    WorkerGroup,
)

REPOSITORY = Path(__file__).resolve().parents[1]

DOCS = REPOSITORY / "docs"

MARK = "<!-- From here on written by `python -m scripts.docs`. -->\n"

KEPT = "**kept**"
"""Mark of a setting that may not change until a run's last step."""

BY_MANIFEST = "Set by the manifest: "
"""Beginning of the meaning of a setting that users do not set themselves."""

CONTEXT, NAMESPACE = "--context NAME", "--namespace NAME"

SECTIONS: dict[str, tuple[type[BaseModel], str]] = {
    "The file": (Profile, ""),
    "Every pod": (Machine, "The keys of `head`, `worker`, `workers` and `data_workers`."),
    "Prices": (PricedMachine, "The keys of `head`, `worker` and `workers`."),
    "`head`": (Head, "The pod of the head: all keys of every pod, prices, and"),
    "`worker`": (Worker, "A training pod: all keys of every pod, prices, and"),
    "`workers`": (WorkerGroup, "A group of training pods: all keys of `worker`, and"),
    "`data_workers`": (DataWorkers, "CPU pods for Ray Data (`LOADER=ray`): all keys of every pod, and"),
    "`spot`": (Spot, "How spot nodes are known: workers go to them, the head never."),
    "`env_secrets`": (SecretKey, "Each variable's value in a Secret."),
}


def main() -> None:
    """Write the pages."""
    for page, text in pages().items():
        page.write_text(text)
        print(f"wrote {page}")


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    profiles = DOCS / "profiles.md"
    by_hand, mark, _ = profiles.read_text().partition(MARK)
    return {
        DOCS / "settings.md": settings_page(),
        DOCS / "cli.md": commands_page(),
        profiles: by_hand + mark + "\n".join(_profile_sections()),
    }


def settings_page() -> str:
    """Return the page of the settings: the variable, default, meaning and allowed values of each."""
    kept = {PREFIX + name.upper() for name in IDENTITY}
    described = describe_settings()
    by_manifest = [
        f"`{setting.variable.removeprefix(PREFIX)}`" for setting in described if setting.meaning.startswith(BY_MANIFEST)
    ]
    lines = [
        f"- `{setting.variable}` ({setting.default or 'empty'}{f', {KEPT}' if setting.variable in kept else ''}): "
        f"{setting.meaning} *{setting.takes}*".replace(PREFIX, "")
        for setting in described
        if not setting.meaning.startswith(BY_MANIFEST)
    ]
    return f"""# Settings

Written by `python -m scripts.docs` from `app/sunspot/settings.py`.

A setting is an environment variable with the prefix `{PREFIX}`, or a word after make or after `sunspot train`,
`check` and `tune` (`sunspot train EPOCHS=3`), or `--set EPOCHS=3` of these, of `submit` and of `render`, or a key below
`settings` in a [profile](profiles.md). Only the environment needs the prefix. All wrong names and values are refused at
once, each with its fix (exit code 2). A run keeps its settings marked {KEPT} to its last step: a change is refused
(exit code 6). All others may change between starts.

`sunspot train`, `check` and `tune`, and so `make train` and `make tune`, also read `sunspot.toml` in the folder where
they are called, by the same keys. The environment goes before that file, and the command line before both;
`python -m sunspot.train`, as in a cluster's job, does not read it. These verbs take the path of a task's file, too
(`sunspot train tasks/my_task.py`): it stands for `TASK=my_task`, with the file's folder on `PYTHONPATH`.

```toml
TASK = "my_task"
EPOCHS = 3
TASK_ARGS = {{hidden = 32}}
```

Secrets are never settings: credentials come from each service's own usual environment. A setting that holds a token, a
key or a password in a URL is refused, because settings are stored with the run.

Each with its default, what it means, and what it takes. Messages and help name settings with the prefix, which is
right everywhere:

{chr(10).join(lines)}

A manifest sets the rest itself (`python -m sunspot.train --help` explains them): {", ".join(by_manifest)}.
"""


def commands_page() -> str:
    """Return the page of the verbs with their arguments, from the parser of `sunspot`."""
    verbs = list(_verbs(make_parser()))
    common = set.intersection(*({_words(action) for action in _actions(parser)} for _, _, parser in verbs))
    shared = [action for action in _actions(verbs[0][2]) if _words(action) in common]
    with_a_cluster = {name: parser for name, _, parser in verbs if CONTEXT in map(_words, _actions(parser))}
    of_a_cluster = [action for action in _actions(with_a_cluster["list"]) if _words(action) in (CONTEXT, NAMESPACE)]
    [rendering] = [set(map(_words, _actions(parser))) for name, _, parser in verbs if name == "render"]
    lines = [
        """# Commands

Written by `python -m scripts.docs` from the parser of `sunspot`; `sunspot VERB --help` prints the same. Exit
codes are in [troubleshooting.md](troubleshooting.md#exit-codes).

Every verb also takes:
""",
        _arguments(shared),
        f"Those that ask a cluster ({', '.join(f'`{name}`' for name in with_a_cluster)}) also take:\n",
        _arguments(of_a_cluster),
    ]
    for name, about, parser in verbs:
        said = {*common, CONTEXT, NAMESPACE} if name in with_a_cluster else common
        own = [action for action in _actions(parser) if _words(action) not in said]
        run = " RUN" if "RUN" in map(_words, own) else ""
        lines += [f"## {name}{run}", "", f"{about[0].upper()}{about[1:]}.", ""]
        if name == "submit":
            lacking = sorted(rendering - set(map(_words, _actions(parser))))
            lines += [f"All options of `render` but {' and '.join(f'`{words}`' for words in lacking)}, and", ""]
            own = [action for action in own if _words(action) not in rendering]
        others = [action for action in own if _words(action) != "RUN"]
        if others:
            lines += [_arguments(others)]
    return "\n".join(lines)


def _profile_sections() -> Iterator[str]:
    for title, (model, about) in SECTIONS.items():
        [parent] = model.__bases__
        above = set(getattr(parent, "model_fields", ()))
        own = [name for name in model.model_fields if name not in above]
        documentation = _documentation(model)
        yield f"\n### {title}\n"
        if about:
            yield f"{about}\n"
        for name in own:
            takes = model.model_fields[name].description or ""
            meaning = documentation.get(name)
            yield f"- `{name}`: {meaning} *{takes}*" if meaning else f"- `{name}`: *{takes}*"
    yield ""


def _verbs(parser: argparse.ArgumentParser, above: str = "") -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield the name, the description and the parser of each verb."""
    [group] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    about = {choice.dest: choice.help or "" for choice in group._choices_actions}
    for name, verb in group.choices.items():
        if any(isinstance(action, argparse._SubParsersAction) for action in verb._actions):
            yield from _verbs(verb, f"{above}{name} ")
        else:
            yield above + name, about[name], verb


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _words(action: argparse.Action) -> str:
    """Return an argument as users type it: `-f, --follow`, `--rank N`, `RUN` or `[NAME]`."""
    value = str(action.metavar or action.dest.upper())
    if action.option_strings:
        return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    return {"?": f"[{value}]", "*": f"[{value} ...]"}.get(str(action.nargs), value)


def _arguments(actions: Sequence[argparse.Action]) -> str:
    needed = {True: " (needed)", False: ""}
    return "".join(f"- `{_words(a)}`: {a.help}{needed[a.required and bool(a.option_strings)]}\n" for a in actions)


def _documentation(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a class, including inherited fields."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if owner.__module__.startswith("sunspot."):
            body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
            for field, below in pairwise(body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(text.split())
    return found


if __name__ == "__main__":
    main()
