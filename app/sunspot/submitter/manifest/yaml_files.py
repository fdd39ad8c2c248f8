"""YAML of profiles and manifests: reads it, and writes it the same on every machine."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from sunspot.errors import SettingsError, shorten
from sunspot.settings import cut

MAX_BYTES = 1 << 20
"""Of one file."""


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
    """Parse every document in the text; raises `ValueError` for what is no YAML."""
    import yaml

    try:
        return list(yaml.load_all(content, _make_loader()))
    except Exception as error:  # the parser's own, and those of dates, numbers and so on that are none
        raise ValueError(shorten(error)) from error


def _make_loader() -> Any:
    """Make a safe loader for which 010 and 1:30 are text: in YAML 1.1 they are 8 and 90, and nobody means that."""
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
    """Read all bytes of a regular file: a device would never end, and a FIFO not even begin."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"more than {MAX_BYTES} bytes")
    return content


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
