"""YAML of profiles and manifests: reads it, and writes it the same on every machine."""

import json
import re
from pathlib import Path
from typing import Any

from sunspot.errors import SettingsError, shorten
from sunspot.settings import cut


def read_yaml(path: Path) -> Any:
    """Parse one YAML document; raises `SettingsError` when it cannot be read or parsed."""
    documents = read_documents(path)
    if len(documents) > 1:
        raise SettingsError(f"{cut(path)}: {len(documents)} YAML documents; keep one")
    return documents[0] if documents else None


def read_documents(path: Path) -> list[Any]:
    """Parse every YAML document of a file; raises `SettingsError` when it cannot be read or parsed."""
    try:
        if path.exists() and not path.is_file():  # a device would never end, and a FIFO not even begin
            raise OSError("not a regular file")
        content = path.read_bytes()
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
