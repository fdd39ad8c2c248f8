"""Tests of values that must agree in several places: the versions of Sunspot and Ray, and action digests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sunspot import __version__, extras, storage
from sunspot.adapters import ADAPTERS
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants

NAME_THE_IMAGE = ["Makefile", "README.md", "docker/Dockerfile", "docs", "k8s", "scripts", "tests/unit/golden"]


def lines(names: list[str], pattern: str) -> Iterator[tuple[Path, str]]:
    """Return every match of the pattern in these files, and in these folders' text files."""
    for name in names:
        path = REPOSITORY / name
        texts = [file for file in sorted(path.rglob("*")) if file.suffix in (".md", ".py", ".txt", ".yaml")]
        for file in [path] if path.is_file() else texts:
            for match in re.findall(pattern, file.read_text(encoding="utf-8")):
                yield file.relative_to(REPOSITORY), match


def test_every_image_reference_has_the_current_version() -> None:
    found = list(lines(NAME_THE_IMAGE, r"\b(?:sunspot(?:-head|-submitter)?:|newTag: )([0-9]+(?:\.[0-9]+)+)"))
    assert {str(path) for path, _ in found} >= {"k8s/rayjob.yaml", "k8s/raycluster.yaml", "scripts/stock.yaml"}
    assert [item for item in found if item[1] != __version__] == []


def test_the_makefile_builds_the_image_with_the_current_version() -> None:
    done = subprocess.run(["make", "-n", "image"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"--build-arg VERSION={__version__} " in done.stdout
    assert f"-t sunspot:{__version__} " in done.stdout


def make(*words: str) -> str:
    """Return the commands that make would run, with the environment already installed."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "-n", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True, env=plain)
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("target", ["train", "tune"])
def test_variables_given_to_make_become_settings_with_or_without_the_prefix(target: str) -> None:
    done = make(target, "EPOCHS=3", "SUNSPOT_SEED=1", "RUN=x", "TASK_ARGS={'a': 1}", "EXTRAS=trees,hf")
    given = done.partition("exec env ")[2].rpartition(" .venv/bin/")[0]
    assert sorted(shlex.split(given)) == [
        *("SUNSPOT_EPOCHS=3", "SUNSPOT_RUN=x", "SUNSPOT_SEED=1", "SUNSPOT_TASK_ARGS={'a': 1}")
    ]
    assert " -r pyproject.toml --extra trees --extra hf -c requirements/dev.txt" in done


def test_the_demo_target_of_the_makefile_accepts_a_storage_path() -> None:
    assert make("demo", "STORAGE_PATH=there").endswith("exec env SUNSPOT_STORAGE_PATH='there' .venv/bin/sunspot demo")


def test_arguments_of_a_make_target_are_not_passed_as_settings() -> None:
    done = make("submit", "RUN=x", "PROFILE=kind", "EPOCHS=3")
    assert done.endswith("SUNSPOT_EPOCHS='3' .venv/bin/sunspot submit --profile 'kind' --run 'x'")
    done = make("submit", "RUN=x", "TASK=my_task", "CODE=my code", "QUEUE=team")
    assert done.endswith(
        "SUNSPOT_TASK='my_task' .venv/bin/sunspot submit --profile 'kind' --run 'x' --code 'my code' --queue 'team'"
    )


def test_the_makefile_ignores_environment_variables_called_code_and_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE", "1")
    monkeypatch.setenv("QUEUE", "2")
    assert make("submit", "RUN=x").endswith(".venv/bin/sunspot submit --profile 'kind' --run 'x'")


@pytest.mark.parametrize(("clone", "said"), [(True, "EXTRAS=trees"), (False, "pip install 'sunspot-train[trees]'")])
def test_the_error_for_a_missing_extra_includes_the_command_that_installs_it(
    clone: bool, said: str, set_constants: SetConstants
) -> None:
    assert extras.CLONE, "the tests run in a clone"
    set_constants(extras, CLONE=clone)
    assert said in extras.how_to_install("trees")


def test_every_extra_that_a_message_names_exists() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {found for _, found in lines(["app"], r"how_to_install\([\"'](\w+)[\"']\)")}
    named |= {
        *(extra for _, _, extra in storage.BACKENDS.values() if extra),
        *(adapter.extra for adapter in ADAPTERS.values()),
    }
    assert {"train", "trees", "gcs", "azure", "hf"} <= named <= declared.keys()


def test_the_changelog_lists_unreleased_changes_before_this_version() -> None:
    headings = re.findall(r"^## \[(\S+)\]", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == __version__


def test_ray_is_locked_at_the_version_whose_internals_were_checked() -> None:
    pattern = r"(?m)^ray==(\S+)"
    ((_, version),) = lines(["requirements/ray.in"], pattern)
    locked = list(lines(["requirements"], pattern))
    assert {path.name for path, _ in locked} == {"dev.txt", "image-extras.txt", "image.txt", "train.txt"}
    assert {found for _, found in locked} == {version}
    assert {found for _, found in lines(["k8s"], r"rayVersion: (\S+)")} == {version}


def test_workflows_pin_actions_by_digest() -> None:
    actions = list(lines([".github/workflows"], r"uses: (.+)"))
    assert actions
    assert [use for _, use in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[0-9.]+", use)] == []


def test_a_released_image_is_scanned_before_it_is_signed_and_tagged() -> None:
    steps = yaml.safe_load((REPOSITORY / ".github/workflows/release.yaml").read_text())["jobs"]["image"]["steps"]
    used = [step.get("uses", "").partition("@")[0] for step in steps]
    push, scan, sign = (
        used.index(name)
        for name in ("docker/build-push-action", "anchore/scan-action", "actions/attest-build-provenance")
    )
    [tag] = [number for number, step in enumerate(steps) if "imagetools create" in step.get("run", "")]
    assert push < scan < sign < tag
    assert "tags" not in steps[push]["with"]
    assert "push-by-digest=true" in steps[push]["with"]["outputs"]
    assert steps[tag]["env"]["DIGEST"] == "${{ steps.push.outputs.digest }}"
    assert steps[scan]["with"]["image"].endswith("@${{ steps.push.outputs.digest }}")
    assert "continue-on-error" not in steps[scan]
    assert steps[scan]["with"].get("fail-build", True) is True
