"""Tests of a task's arguments: an ordinary dictionary that records which keys the task has read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from sunspot.settings import Settings
from sunspot.settings.task_arguments import TaskArguments

GIVEN = {"hiden": 32, "width": 64}


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda given: given.get("hidden", 8) + given["width"], "the task has not read hiden; did you mean hidden?"),
        (lambda given: given["width"], "the task has not read hiden; it reads width"),
        (lambda given: "hiden" in given, "the task has not read width; it reads hiden"),
        (lambda given: None, "the task has not read hiden, width; it reads no arguments"),
        (lambda given: {"depth": 1, **given}, ""),
        (lambda given: dict(**given), ""),
        (lambda given: {"depth": 1} | given, ""),
        (lambda given: given | {"depth": 1}, ""),
        (lambda given: dict(given), ""),
        (lambda given: given.copy(), ""),
        (lambda given: [value for _, value in given.items()], ""),
        (json.dumps, ""),
    ],
)
def test_unread_task_arguments_are_listed(read: Callable[[Any], object], said: str) -> None:
    given = TaskArguments(GIVEN)
    read(given)
    assert given.describe_unread() == said


def test_arguments_that_were_read_before_pickling_count_as_read() -> None:
    settings = Settings(task_args=GIVEN)
    assert settings.task_args["width"] == 64
    sent = pickle.loads(pickle.dumps(settings.model_copy(update={"epochs": 3})))
    assert sent.task_args.get("hidden") is None
    assert sent.task_args.describe_unread() == "the task has not read hiden; did you mean hidden?"


def test_reading_the_settings_does_not_mark_task_arguments_as_read() -> None:
    settings = Settings(task_args=GIVEN)
    assert json.loads(settings.environment()["SUNSPOT_TASK_ARGS"]) == GIVEN == settings.task_args
    assert settings.task_args.describe_unread() == "the task has not read hiden, width; it reads no arguments"
