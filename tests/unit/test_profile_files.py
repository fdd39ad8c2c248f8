"""Tests that malformed profiles are rejected immediately with one message."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sunspot.errors import SettingsError
from sunspot.submitter.manifest.profile import load_profile


@pytest.mark.parametrize(
    "text",
    [
        "labels: &a {x: *a}",
        "notice_s: *nothing",
        "notice_s: 2001-99-99",
        "notice_s: !!timestamp abc",
        "notice_s: !!python/object/apply:os.system [exit 1]",
        "notice_s: !!int ''",
        "notice_s: !!binary '%'",
        "? [a]\n: 1",
        f"notice_s: {'9' * 5000}",
        "a: b: c",
        "\x00",
        "--- 1\n--- 2",
        "",
        "[]",
        "1: 2",
        "extends: [a]",
        "#" * 2_000_000,
        "labels: {x: '\\e[31m\u009b'}",
        'extends: "\\0"',
        "extends: /dev/zero",
        "extends: /dev/stdin",
        "extends: .",
        "extends: ./fifo",
        "extends: ./mine.yaml",
        "extends: ./x/../mine.yaml",
        f"extends: {'a' * 100_000}",
        f"extends: ./{'a' * 5000}",
    ],
    ids=lambda text: text[:20].encode("unicode_escape").decode(),
)
def test_a_malformed_profile_is_rejected_immediately(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(SettingsError) as refused:
        load_profile(str(path), {})
    assert time.monotonic() - began < 5
    assert len(str(refused.value)) < 2000
    assert "\x1b" not in str(refused.value)


def test_profiles_can_use_yaml_anchors(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("head: {cpu: 2, node_selector: &pool {pool: a}}\nworker: {node_selector: *pool}\n")
    profile = load_profile(str(path), {})
    assert profile.worker
    assert profile.worker.node_selector == {"pool": "a"}
