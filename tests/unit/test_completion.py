"""Tests of shell completion: the candidates for a command line, and the scripts that request them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sunspot.cli import VERBS, make_parser
from sunspot.submitter.commands.completion import SCRIPTS, find_candidates


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sunspot checkpoints g", ["get", "gc"]),
        ("sunspot audit ", ["digits", "mnist"]),
        ("sunspot audit m", ["mnist"]),
        ("sunspot audit --storage other m", ["mine"]),
        ("sunspot audit --storage ", []),
        ("sunspot wait mnist --ti", ["--timeout"]),
        ("sunspot completion z", ["zsh"]),
        ("sunspot no-verb ", [verb for verb in VERBS if " " not in verb]),
    ],
)
def test_completions_include_subcommands_and_options_and_run_names(
    line: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/mnist", "runs/digits", "runs/m;touch x", "runs/m$(id)", "other/mine"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SUNSPOT_STORAGE_PATH", raising=False)
    assert find_candidates(make_parser(load=False), line) == offered


@pytest.mark.parametrize("shell", SCRIPTS)
def test_each_shell_can_load_its_completion_script(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "sunspot").write_text(f'#!/bin/sh\nexec {sys.executable} -m sunspot "$@"\n')
    (tmp_path / "sunspot").chmod(0o755)
    asked = {
        "bash": 'source <(sunspot completion bash); COMP_LINE="sunspot comp"; COMP_POINT=12; _sunspot; '
        'echo "${COMPREPLY[*]}"; complete -p sunspot',
        "zsh": "autoload -U compinit; compinit -u; source <(sunspot completion zsh); echo completion $_comps[sunspot]",
        "fish": "sunspot completion fish | source; complete -C 'sunspot comp'",
    }
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", asked[shell]], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[0] == "completion"
    assert "_sunspot" in done.stdout or shell == "fish"
