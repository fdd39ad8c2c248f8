"""Adds the manifests of k8s/ to the wheel, as sunspot/submitter/k8s; all else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithManifests(build_py):
    """An editable install reads k8s/ beside the package, so nothing is copied for it."""

    def run(self) -> None:
        if not self.editable_mode:
            rmtree(self.build_lib, ignore_errors=True)  # or modules of an earlier build would travel, too
        super().run()
        if not self.editable_mode:
            copytree("k8s", Path(self.build_lib, "sunspot", "submitter", "k8s"), dirs_exist_ok=True)

    def get_source_files(self) -> list[str]:
        """What the source distribution holds besides the metadata."""
        return [*super().get_source_files(), *(str(path) for path in Path("k8s").rglob("*") if path.is_file())]


setup(cmdclass={"build_py": BuildWithManifests})
