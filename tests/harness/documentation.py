"""Finds the commands and examples in the README and in docs/."""

from __future__ import annotations

import re

from tests.harness import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
"""Pages in the order in which tests run their commands. docs/monitoring.md deletes a run created in docs/data.md."""

TEXT = "\n".join(page.read_text() for page in PAGES)


def find_commands(fence: str) -> list[str]:
    """Return the lines of all blocks that begin with this fence, without duplicates."""
    blocks = re.findall(rf"^```{fence}\n(.*?)^```$", TEXT, re.S | re.M)
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines()))


def find_example(fence: str, first_line: str) -> str:
    """Return the only block that begins with this text."""
    [block] = re.findall(rf"^```{fence}\n{re.escape(first_line)}\n(.*?)^```$", TEXT, re.S | re.M)
    return str(block)


def find_patched(name: str) -> str:
    """Apply the diff that begins with a file's name to a script, and return the result."""
    [block] = re.findall(rf"^```diff\n # {re.escape(name)}\n(.*?)^```$", TEXT, re.S | re.M)
    return "".join(f"{line[1:]}\n" for line in block.splitlines() if not line.startswith("-"))
