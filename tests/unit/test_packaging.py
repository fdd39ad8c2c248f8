"""What stands in several places and must agree: the version, the version of Ray, the digests of workflow actions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sunspot import __version__
from tests.harness import REPOSITORY

NAME_THE_IMAGE = ["Makefile", "README.md", "docker/Dockerfile", "docs", "k8s", "scripts", "tests/unit/golden"]


def lines(names: list[str], pattern: str) -> Iterator[tuple[Path, str]]:
    """Every match of the pattern in those files, and in the text files of those folders."""
    for name in names:
        path = REPOSITORY / name
        texts = [file for file in sorted(path.rglob("*")) if file.suffix in (".md", ".py", ".txt", ".yaml")]
        for file in [path] if path.is_file() else texts:
            for match in re.findall(pattern, file.read_text(encoding="utf-8")):
                yield file.relative_to(REPOSITORY), match


def test_every_image_is_of_this_version() -> None:
    found = list(lines(NAME_THE_IMAGE, r"\bsunspot:([0-9]+(?:\.[0-9]+)+)"))
    assert {str(path) for path, _ in found} >= {"k8s/rayjob.yaml", "k8s/raycluster.yaml", "scripts/stock.yaml"}
    assert [item for item in found if item[1] != __version__] == []


def test_make_builds_the_image_of_this_version() -> None:
    done = subprocess.run(["make", "-n", "image"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert f"--build-arg VERSION={__version__} " in done.stdout
    assert f"-t sunspot:{__version__} " in done.stdout


def test_the_changelog_begins_with_this_version_or_what_follows_it() -> None:
    headings = re.findall(r"^## \[(\S+)\]", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == __version__


def test_ray_is_locked_at_the_version_that_its_internals_were_checked_with() -> None:
    pattern = r"(?m)^ray==(\S+)"
    ((_, version),) = lines(["requirements/ray.in"], pattern)
    locked = list(lines(["requirements"], pattern))
    assert {path.name for path, _ in locked} == {"dev.txt", "image-extras.txt", "image.txt", "train.txt"}
    assert {found for _, found in locked} == {version}
    assert {found for _, found in lines(["k8s"], r"rayVersion: (\S+)")} == {version}


def test_workflows_name_actions_by_digest() -> None:
    actions = list(lines([".github/workflows"], r"uses: (.+)"))
    assert actions
    assert [use for _, use in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[0-9.]+", use)] == []
