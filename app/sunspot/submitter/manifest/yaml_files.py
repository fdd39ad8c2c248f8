"""YAML as profiles and manifests have it: read within limits, and written the same on every machine."""

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sunspot.errors import SettingsError, shorten
from sunspot.settings import cut

MAX_BYTES, MAX_VALUES, DEEPEST = 1 << 20, 20_000, 50
"""Of one file: its size, its values with every alias written out, and the levels that they are nested in."""


def read_yaml(path: Path) -> Any:
    """Parse one YAML document; raises `SettingsError` when it cannot be read or parsed."""
    documents = read_documents(path)
    if len(documents) > 1:
        raise SettingsError(f"{cut(path)}: {len(documents)} YAML documents; keep one")
    return documents[0] if documents else None


def read_documents(path: Path) -> list[Any]:
    """Parse every YAML document of a file; raises `SettingsError` when it cannot be read or parsed."""
    try:
        content = _read_file(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SettingsError(f"{cut(path)}: {getattr(error, 'strerror', '') or shorten(error)}") from error
    try:
        return parse_yaml(content)
    except ValueError as error:
        raise SettingsError(f"{cut(path)}: no YAML: {shorten(error)}") from error


def parse_yaml(content: str | bytes) -> list[Any]:
    """Every document in the text; raises `ValueError` for what is no YAML, or exceeds the limits."""
    import yaml

    loader = _make_loader()
    try:
        # First by its events: building values, the parser would recurse until the interpreter's stack is full.
        _check_limits(yaml.parse(content, loader))
        return list(yaml.load_all(content, loader))
    except Exception as error:  # the parser's own, and those of dates, numbers and so on that are none
        raise ValueError(shorten(error)) from error


def _make_loader() -> Any:
    """A safe loader for which 010 and 1:30 are text: YAML 1.1 has them for 8 and 90, and nobody means that."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen when run
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, shape) for tag, shape in rules if not tag.endswith(":int")]
        for first, rules in Loader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)\Z"), list("-+0123456789"))
    return Loader


def _read_file(path: Path) -> bytes:
    """All bytes of a regular file: a device would never end, and a FIFO not even begin."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"more than {MAX_BYTES} bytes")
    return content


def _check_limits(events: Iterable[Any]) -> None:
    """Raise `ValueError` for values that are nested too deep, or too many once every alias is written out."""
    from yaml import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

    sizes: dict[str | None, int] = {}
    "The values behind each anchor that is complete."
    open_ones: list[tuple[str | None, int]] = []
    "Each collection that is not: its anchor, and the values before it."
    values = 0
    for event in events:
        if isinstance(event, AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor} stands within what it names, or before it")
            values += sizes[event.anchor]
        elif isinstance(event, ScalarEvent):
            values += 1
            sizes[event.anchor] = 1
        elif isinstance(event, CollectionStartEvent):
            open_ones.append((event.anchor, values))
            values += 1
        elif isinstance(event, CollectionEndEvent):
            anchor, before = open_ones.pop()
            sizes[anchor] = values - before
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if len(open_ones) > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")


def to_yaml(value: Any) -> str:
    """YAML in the order of `value`, the same on every machine."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # chosen when run
        pass

    def represent(dumper: Any, text: str) -> Any:
        bare = re.match(r"[A-Za-z/].", text) or re.fullmatch(r"\d+(m|[KMGTP]i)", text)
        # The rest in quotes: PyYAML leaves 1e-3 and y bare, which Go reads as a number and as true.
        style = "|" if "\n" in text else None if bare else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    plain = json.loads(json.dumps(value))  # otherwise an object in two places becomes an alias
    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, width=2**30, allow_unicode=True))
