"""Tells users how to install a missing package."""

from pathlib import Path

CLONE = (Path(__file__).parents[2] / "Makefile").is_file()
"""True if this is a clone of the repository, in which make installs packages."""


def how_to_install(extra: str) -> str:
    """Return the part of a message that says how to install an extra of sunspot-train."""
    if CLONE:
        return "`make .venv/train` installs it" if extra == "train" else f"add EXTRAS={extra} to `make train`"
    image = "" if extra == "train" else "; `make image EXTRAS=1` adds it to an image"
    return f"`pip install 'sunspot-train[{extra}]'` installs it{image}"
