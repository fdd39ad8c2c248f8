"""Trains the worker groups of finetune_ranks.py and trainer_ranks.py: `python -m tests.harness.hugging_face FOLDER`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import REPOSITORY, skip_without

ADAPTERS, TRAINERS = "adapters", "trainers"
"""Folders of the runs of finetune_ranks.py and of trainer_ranks.py."""


@pytest.fixture(scope="session")
def hugging_face_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the finished runs. One process trains all of them, because its imports take many seconds."""
    skip_without("peft", "hf")
    folder = tmp_path_factory.mktemp("hugging-face")
    subprocess.run([sys.executable, "-m", "tests.harness.hugging_face", str(folder)], cwd=REPOSITORY, check=True)
    return folder


def main(root: Path) -> None:
    from tests.harness import finetune_ranks, trainer_ranks  # every pytest process imports this module

    for name, ranks in ((ADAPTERS, finetune_ranks), (TRAINERS, trainer_ranks)):
        (root / name).mkdir()
        ranks.main(str(root / name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
