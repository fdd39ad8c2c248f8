"""Trees with slow rounds."""

from __future__ import annotations

import time

import torch

from sunspot.data.source import Source
from sunspot.settings import Settings
from sunspot.tasks.tree_models import Trees
from sunspot.tasks.trees import build_trees as build


def build_trees(settings: Settings, source: Source) -> Trees:
    settings = settings.model_copy(update={"task_args": dict(settings.task_args)})
    pause_s = settings.task_args.pop("pause_s", 0.0)
    trees = build(settings, source)
    boost = trees.boost

    def boost_slowly() -> torch.Tensor:
        time.sleep(pause_s)
        return boost()

    trees.boost = boost_slowly
    return trees
