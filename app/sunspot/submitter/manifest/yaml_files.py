"""Reads the YAML of profiles and manifests, and writes YAML that is the same on every machine."""

import json
import re
from pathlib import Path
from typing import Any

from sunspot.errors import SettingsError, shorten
from sunspot.settings import cut


def read_yaml(path: Path) -> Any:
    """Parse a file with a single YAML document. Raises `SettingsError` if the file cannot be read or parsed."""
    documents = read_documents(path)
    if len(documents) > 1:
        raise SettingsError(f"{cut(path)} contains {len(documents)} YAML documents; keep only one")
    return documents[0] if documents else None


def read_documents(path: Path) -> list[Any]:
    """Parse all YAML documents in a file. Raises `SettingsError` if the file cannot be read or parsed."""
    try:
        if path.exists() and not path.is_file():  # a device has no end, and opening a FIFO can block
            raise OSError("not a regular file")
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SettingsError(f"{cut(path)}: {getattr(error, 'strerror', '') or shorten(error)}") from error
    try:
        return parse_yaml(content)
    except ValueError as error:
        raise SettingsError(f"{cut(path)} is not valid YAML: {shorten(error)}") from error


def parse_yaml(content: str | bytes) -> list[Any]:
    """Parse all YAML documents in a string. Raises `ValueError` if the string is not valid YAML."""
    import yaml

    try:
        return list(yaml.load_all(content, _make_loader()))
    except Exception as error:  # malformed dates and numbers raise errors outside YAMLError
        raise ValueError(shorten(error)) from error


def _make_loader() -> Any:
    """Return a safe loader that reads 010 and 1:30 as text. YAML 1.1 would read them as the numbers 8 and 90."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # chosen at run time
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, shape) for tag, shape in rules if not tag.endswith(":int")]
        for first, rules in Loader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)\Z"), list("-+0123456789"))
    return Loader


def to_yaml(value: Any) -> str:
    """Return `value` as YAML, with its keys in their original order. The result is the same on every machine."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # chosen at run time
        pass

    def represent(dumper: Any, text: str) -> Any:
        bare = re.match(r"[A-Za-z/].", text) or re.fullmatch(r"\d+(m|[KMGTP]i)", text)
        # Quote other text, because PyYAML would leave 1e-3 and y bare, and Go reads them as a number and as true.
        style = "|" if "\n" in text else None if bare else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    plain = json.loads(json.dumps(value))  # without a copy, an object that occurs twice would become an alias
    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, width=2**30, allow_unicode=True))
