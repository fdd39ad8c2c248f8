"""The commands and examples of the README and of docs/, as they stand there."""

from __future__ import annotations

import re

from tests.harness import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
"""In the order in which their commands are run: docs/data.md trains what docs/monitoring.md deletes."""

TEXT = "\n".join(page.read_text() for page in PAGES)


def find_commands(fence: str) -> list[str]:
    """The lines of all blocks that begin with this fence, each once."""
    blocks = re.findall(rf"^```{fence}\n(.*?)^```$", TEXT, re.S | re.M)
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines()))


def find_example(fence: str, first_line: str) -> str:
    """The one block that begins so."""
    [block] = re.findall(rf"^```{fence}\n{re.escape(first_line)}\n(.*?)^```$", TEXT, re.S | re.M)
    return str(block)


def find_patched(name: str) -> str:
    """The file that the diff which begins with its name makes of a script."""
    [block] = re.findall(rf"^```diff\n # {re.escape(name)}\n(.*?)^```$", TEXT, re.S | re.M)
    return "".join(f"{line[1:]}\n" for line in block.splitlines() if not line.startswith("-"))
