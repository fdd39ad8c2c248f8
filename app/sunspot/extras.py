"""What to type to install a package that is not there."""

from pathlib import Path

CLONE = (Path(__file__).parents[2] / "Makefile").is_file()
"""Whether this is a clone of the repository, where make installs."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of sunspot-train, for a message."""
    if CLONE:
        return "`make .venv/train` installs it" if extra == "train" else f"add EXTRAS={extra} to `make train`"
    image = "" if extra == "train" else "; an image has it by `make image EXTRAS=1`"
    return f"`pip install 'sunspot-train[{extra}]'` installs it{image}"
