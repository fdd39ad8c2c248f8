"""Tests of the installed package: source distribution, wheel, a new environment, and another working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sunspot import __version__
from sunspot.submitter.manifest.profile import load_profile, manifests
from tests.harness import GOLDEN, REPOSITORY
from tests.harness.manifests import ON_A_CLOUD

SOURCES = ["app", "k8s", "pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"]

BUILD = """if True:
    import os, pathlib, shutil, sys
    from setuptools import build_meta
    folder = pathlib.Path(sys.argv[1])
    archive = build_meta.build_sdist(folder)
    shutil.unpack_archive(folder / archive, folder)
    os.chdir(folder / archive.removesuffix(".tar.gz"))
    build_meta.build_wheel(folder)
"""
"""Code that builds like `python -m build`, but without downloads. The wheel is built from the source distribution."""


PROFILES = sorted(path.stem for path in (REPOSITORY / "k8s" / "profiles").glob("*.yaml"))


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the wheel built from the source distribution, without downloads.

    The dependencies come from the environment of the tests, which is after the new one on the path. Its editable
    install of the repository is not visible, because Python only reads the .pth files of the first directory.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, source)
    run(sys.executable, "-c", BUILD, folder, cwd=source)
    run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    python = folder / "environment" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    (packages,) = (folder / "environment" / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "environment"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_renders_from_any_directory(environment: Path, profile: str, tmp_path: Path) -> None:
    named = ON_A_CLOUD if load_profile(profile, {}).cloud else ()
    printed = run(environment / "bin" / "sunspot", "render", "--profile", profile, *named, cwd=tmp_path)
    assert printed == (GOLDEN / f"{profile}.yaml").read_text()


def test_the_wheel_contains_all_files_of_the_package(environment: Path, tmp_path: Path) -> None:
    program = """if True:
        import json, pathlib, sunspot, sunspot.submitter.manifest.profile as profile
        package = pathlib.Path(sunspot.__file__).parent
        files = [path for path in package.rglob("*.*") if path.suffix not in (".py", ".pyc")]
        names = sorted(str(path.relative_to(package)) for path in files if "k8s" not in path.parts)
        print(json.dumps([str(package), str(profile.manifests()), names]))
    """
    package, k8s, files = json.loads(run(environment / "bin" / "python", "-c", program, cwd=tmp_path))
    assert Path(package).is_relative_to(environment)
    assert Path(k8s).is_relative_to(environment)
    source = REPOSITORY / "app" / "sunspot"
    assert files == sorted(
        str(path.relative_to(source)) for path in source.rglob("*.*") if path.suffix not in (".py", ".pyc")
    )
    here, there = ({path.relative_to(k) for path in k.rglob("*.*")} for k in (manifests(), Path(k8s)))
    assert here == there


def test_the_wheel_contains_the_version_and_the_license(environment: Path, tmp_path: Path) -> None:
    assert run(environment / "bin" / "sunspot", "--version", cwd=tmp_path) == f"sunspot {__version__}\n"
    (information,) = environment.glob("lib/python3*/site-packages/sunspot_train-*.dist-info")
    assert information.name == f"sunspot_train-{__version__}.dist-info"
    assert {path.name for path in (information / "licenses").iterdir()} == {"LICENSE", "NOTICE"}
    assert (information / "top_level.txt").read_text().split() == ["sunspot"]
