"""Tests of the README and docs/: links work, generated pages are current, and names exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from scripts.docs import pages
from sunspot.cli import main, make_parser
from sunspot.settings import FIELDS, PREFIX, SETTING_NAMES
from tests.harness import REPOSITORY
from tests.harness.documentation import find_commands, find_example

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]
TREES = ("app", "scripts", "k8s", "docker", "tests", "docs", "requirements")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates from a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_in_the_docs_are_not_broken(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path) if path else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


@pytest.mark.parametrize("page", pages().items(), ids=lambda page: page[0].name)
def test_generated_pages_are_up_to_date(page: tuple[Path, str]) -> None:
    path, text = page
    assert path.read_text() == text, "generate it again: .venv/bin/python -m scripts.docs"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_modules_and_functions_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(rf"`((?:{'|'.join(TREES)})/[\w./-]*)`", text):
        assert (REPOSITORY / name).exists(), name
    for name in re.findall(r"`((?:sunspot(?!\.toml)|scripts|tests)(?:\.\w+)+)`", text):
        path = REPOSITORY / ("app" if name.startswith("sunspot") else "") / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name
    for name, function in re.findall(r"`([\w/]+\.py):([\w.]+)`", text):
        [file] = [path for path in (REPOSITORY / name, REPOSITORY / "app" / "sunspot" / name) if path.exists()]
        *owner, last = function.split(".")
        assert all(f"class {cls}" in file.read_text() for cls in owner), f"{name}:{function}"
        assert re.search(rf"(def|class) {last}\b", file.read_text()), f"{name}:{function}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_named_in_the_docs_exist(page: Path) -> None:
    for name in re.findall(rf"{PREFIX}([A-Z_]*[A-Z])\b", page.read_text()):
        assert name.lower() in FIELDS, name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_in_the_docs_use_setting_names_without_the_prefix(page: Path) -> None:
    own = {"VAR", *" ".join(re.findall(r"OWN = (.*)", (REPOSITORY / "Makefile").read_text())).split()}
    for command in re.findall(r"\bmake (?:train|tune|submit|render)\b[^`\n]*|--set [^`\s]+", page.read_text()):
        for name in re.findall(r"(?<= )([A-Z_]+)=", command):
            assert name in own or name.lower() in SETTING_NAMES, command


def test_no_page_names_a_repository_that_does_not_exist() -> None:
    for page in PAGES:
        assert "github.com/sunspot-train" not in page.read_text(), page


@pytest.mark.parametrize("cloud", ["gke", "eks", "aks"])
def test_the_documented_profile_and_commands_for_each_cloud_are_valid(
    cloud: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / f"{cloud}.yaml"
    profile.write_text(find_example("yaml", f"# {cloud}.yaml"))
    assert profile.read_text().count("\n") <= 5
    with pytest.raises(SystemExit) as ended:
        main(["render", "--profile", str(profile), "--run", "digits"])
    assert (ended.value.code, capsys.readouterr().err) == (0, "")
    commands = [shlex.split(line) for line in find_commands("sh clouds") if line.startswith(".venv/bin/sunspot ")]
    assert {words[1] for words in commands} >= {"doctor", "wait"}
    for words in commands:
        make_parser().parse_args(words[1:])


def test_messages_quoted_in_the_docs_exist_in_the_source() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "app").rglob("*.py"))
    table = (REPOSITORY / "docs/troubleshooting.md").read_text().partition("## Common messages")[2]
    messages = re.findall(r"^- `([^`]+)`: ", table, re.M)
    assert len(messages) >= 10
    for message in messages:
        for part in filter(None, message.removeprefix(PREFIX).removeprefix("warning: ").split("...")):
            assert part.rstrip("?") in sources, message


def test_functions_named_in_the_elastic_package_docstring_exist() -> None:
    page = ast.get_docstring(ast.parse((REPOSITORY / "app/sunspot/elastic/__init__.py").read_text())) or ""
    steps = re.split(r"^ *\d+\. ", page, flags=re.M)[1:]
    assert len(steps) == 9 + 13
    sources = "".join(path.read_text() for path in (REPOSITORY / "app").rglob("*.py"))
    for names in re.findall(r"\b\w+(?:\.\w+)+", "".join(steps)):
        *_, last = names.split(".")
        assert re.search(rf"(def|class) {last}\b|^    {last}: ", sources, re.M), names


EXAMPLES = {"my_task.py", "buggy.py"}
"""Files that docstrings name as examples of a user's files."""


def test_files_named_in_docstrings_exist() -> None:
    files = [path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("*/**/*.py")]
    for path in sorted((REPOSITORY / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for name in re.findall(r"(?<![\w/.*])(?:[a-z_]+/)*[a-z_]+\.py\b", ast.get_docstring(node) or ""):
                    of_ray = name.startswith("ray/")
                    exists = any(f"/{file}".endswith(f"/{name}") for file in files)
                    assert of_ray or exists or Path(name).name in EXAMPLES, (path, name)


def test_the_architecture_page_lists_every_package() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    for package in (REPOSITORY / "app/sunspot").glob("*/__init__.py"):
        assert f"`{package.parent.name}/" in page, package


def test_the_index_lists_every_page() -> None:
    index = (REPOSITORY / "docs/README.md").read_text()
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_images_in_the_docs_are_small() -> None:
    for picture in (REPOSITORY / "docs/images").iterdir():
        assert picture.stat().st_size < 200_000, picture.name
