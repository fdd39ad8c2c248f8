"""Tests of foreign text on terminals and pages."""

from __future__ import annotations

import unicodedata

import pytest

from sunspot.formatting import visible
from sunspot.report.html import text

JOINERS = "\u200c\u200d"
"""Joiners that Persian text and emoji need."""

SHOWN_SIGNS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Format characters that are visible."""


def hidden() -> list[str]:
    """Return all characters that Unicode classifies as controls, formats, surrogates, or line separators."""
    every = map(chr, range(0x110000))
    kinds = [each for each in every if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    scripts = "".join(map(chr, [*range(0x13430, 0x13440), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B)]))
    return [each for each in kinds if each not in JOINERS + SHOWN_SIGNS + scripts + "\t\n\r"]


def test_characters_that_hide_text_or_change_its_direction_never_reach_a_terminal_or_a_page() -> None:
    for each in hidden():
        escaped = each.encode("unicode_escape").decode()
        assert visible(f"a{each}b") == f"a{escaped}b"
        assert text(f"a{each}b") == "a\ufffdb"


@pytest.mark.parametrize(
    "shown", ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f468\u200d\U0001f680", "a\tb\nc", "\u2192"]
)
def test_visible_text_is_not_changed(shown: str) -> None:
    assert visible(shown) == text(shown) == shown
