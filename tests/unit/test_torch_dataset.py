"""Tests for PyTorch Datasets returned by a task: rows as columns, and rejected datasets."""

from __future__ import annotations

import importlib
import pickle
import random
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from sunspot.data.dataset_rows import to_columns
from sunspot.data.source import EmptySource, read_rows, rows_in
from sunspot.data.task_rows import open_rows_of_task
from sunspot.data.torch_dataset import DatasetSource, build_splits, find_splits, open_datasets
from sunspot.errors import ConflictError, DataError, SettingsError
from sunspot.plan import make_plan
from sunspot.settings import Settings
from sunspot.tasks import load_task
from tests.harness.datasets import everything, refusal
from tests.harness.documentation import find_patched
from tests.harness.loop import losses_of_ranks

Pair = namedtuple("Pair", ["left", "right"])

PICTURE = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))


class Rows(Dataset[Any]):
    """A Dataset that creates each item from its number with a function."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        return self._make(number)


def numbered(number: int) -> tuple[torch.Tensor, int]:
    return torch.tensor([number, -number], dtype=torch.float32), number % 3


Opener = Callable[..., tuple[DatasetSource, "DatasetSource | None"]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Return a function that opens the result of a task's `build_dataset`."""

    def open_it(returned: Any, **settings: Any) -> tuple[DatasetSource, DatasetSource | None]:
        module = ModuleType("task_with_rows")
        module.build_dataset = returned if callable(returned) else lambda _: returned  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "task_with_rows", module)
        return open_datasets(Settings(task="task_with_rows", **settings))

    return open_it


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ((torch.ones(2), 3), {"input": ("float32", [1, 1]), "label": ("int64", 3)}),
        ((PICTURE, True), {"image": ("uint8", [np.arange(12).reshape(3, 4).tolist()]), "label": ("bool", True)}),
        (torch.full((1, 1, 2), 7, dtype=torch.uint8), {"image": ("uint8", [[[7, 7]]])}),
        (np.float16(0.5), {"input": ("float16", 0.5)}),
        ((0.1,), {"input": ("float64", 0.1)}),
        ({"x": [[1, 2]], "label": 2.5}, {"x": ("int64", [[1, 2]]), "label": ("float64", 2.5)}),
        (Pair(1, torch.tensor(2.0, requires_grad=True)), {"left": ("int64", 1), "right": ("float32", 2)}),
    ],
)
def test_dataset_items_become_columns_with_the_same_values(item: Any, expected: dict[str, tuple[str, Any]]) -> None:
    found = to_columns(item, "row 0")
    assert {name: (value.dtype.name, value.tolist()) for name, value in found.items()} == expected


def test_color_images_become_channels_first() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert np.array_equal(to_columns(Image.fromarray(pixels), "row 0")["image"], pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"text": "a sunny day"}, ["row 5: text is text", "tokenize it"]),
        ((torch.ones(2), None), ["row 5: label is None", "only numbers"]),
        ({"box": {"x": 1}}, ["row 5: box is a dict"]),
        ((1, 2, 3), ["row 5 is a tuple of 3 values; return a dict"]),
        ([1, 2], ["row 5 is a list of 2 values"]),
        ({}, ["row 5 is an empty dict"]),
        ({"row": 1}, ["row 5 has a column 'row'"]),
        ({1: 1}, ["row 5 has a column 1"]),
        ({"x": [[1], [2, 3]]}, ["row 5: x is a list, which is not numeric"]),
        (PICTURE.convert("RGBA"), ["row 5: the input is an image of mode RGBA", "convert it to L or RGB"]),
        (np.ones(2, np.uint16), ["row 5: the input is a ndarray of uint16"]),
        (torch.ones(2, dtype=torch.bfloat16), ["row 5: the input is a Tensor", "BFloat16"]),
        (2**70, ["row 5: the input is an int of object"]),
    ],
)
def test_errors_about_invalid_items_name_the_row(item: Any, says: list[str]) -> None:
    with refusal(DataError, *says):
        to_columns(item, "row 5")


def test_rows_are_read_by_number(opened: Opener) -> None:
    source, test = opened(Rows(2500, numbered))
    assert test is None
    assert source.row_groups == (1024, 1024, 452)
    assert (source.shape, source.classes) == ((2,), 0)
    found = everything(source)
    assert found["input"][:, 0].tolist() == list(range(2500))
    assert found["label"].tolist() == [number % 3 for number in range(2500)]
    assert source.read(1, np.array([5, 0]))["input"][:, 1].tolist() == [-1029, -1024]
    assert read_rows(source, 1023, 1026)["row"].tolist() == [1023, 1024, 1025]
    assert source.where(2, 7) == "row 2055 of the training rows of task_with_rows.build_dataset"


def test_large_rows_are_read_in_small_row_groups(opened: Opener) -> None:
    source, _ = opened(Rows(40, lambda _: torch.zeros(1 << 20)))
    assert source.row_groups == (4,) * 10


@pytest.mark.parametrize("kind", ["pair", "random_split", "dict"])
def test_two_datasets_become_training_and_held_out_rows(kind: str, opened: Opener) -> None:
    rows = Rows(10, numbered)
    returned = {
        "pair": (rows, Rows(4, numbered)),
        "random_split": lambda _: random_split(rows, [6, 4]),
        "dict": {"test": [numbered(number) for number in range(4)], "train": rows, "validation": rows},
    }[kind]
    train, test = opened(returned)
    assert test
    assert (rows_in(train), rows_in(test)) == (6 if kind == "random_split" else 10, 4)
    assert test.where(0, 1) == "row 1 of the held-out rows of task_with_rows.build_dataset"
    notes = ("build_dataset: validation not used; return held-out rows under the key 'test'",)
    assert train.notes == (notes if kind == "dict" else ())
    assert test.notes == ()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (
            Stream(),
            "a Stream, which does not return rows by number.*return a map-style Dataset, with __len__ and __getitem__",
        ),
        ((number for number in range(3)), "a generator, which does not return rows by number"),
        (None, "a NoneType, which does not return rows by number"),
        (DataLoader(TensorDataset(torch.ones(2))), "a DataLoader; return its dataset"),
        (EmptySource((1,), 2), "an EmptySource, which is a Source; return it from find_sources"),
        ((1, 2, 3), "3 datasets; return two, the training rows and the held-out rows"),
        ({"training": [1]}, "a dict with training; use the key 'train' for the training rows"),
        ([], "a list without rows; return at least one row"),
        (([1], Stream()), "a Stream, which does not return rows by number"),
    ],
)
def test_the_build_dataset_function_must_return_datasets(returned: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=f"SUNSPOT_TASK=mine: build_dataset returned {says}"):
        find_splits(returned, "mine")


def test_the_error_for_a_mismatched_row_includes_the_row_number(opened: Opener) -> None:
    longer, _ = opened(Rows(200, lambda number: torch.ones(2 + (number == 1))))
    with refusal(DataError, "row 1 of the training rows of task_with_rows", "[3]", "[2] in row 0", "crop, pad"):
        longer.read(0)
    other, _ = opened(Rows(200, lambda number: {"x" if number != 1 else "y": 1}))
    with refusal(DataError, "row 1 of", "the columns are y, but row 0 has x"):
        other.read(0)
    whole, _ = opened(Rows(200, lambda number: 1 if number != 1 else 1.5))
    with refusal(DataError, "row 1 of", "input is float64 [], but it is int64 [] in row 0"):
        whole.read(0)
    with refusal(
        DataError,
        "held-out rows with the columns input float32 [2], label int64 []",
        "training rows with input float32 [2]",
    ):
        opened(([torch.ones(2)], Rows(3, numbered)))


@pytest.mark.parametrize("together", [False, True])
def test_errors_in_the_dataset_name_the_row_and_line(together: bool, opened: Opener) -> None:
    def fail(number: int) -> Any:
        if number == 3:
            raise FileNotFoundError("3.png")
        return numbered(number)

    rows = Rows(500, fail)
    source, _ = opened(random_split(rows, [500])[0] if together else rows)
    line = fail.__code__.co_firstlineno + 2
    with pytest.raises(DataError, match=rf"row \d+ of .* cannot be read: FileNotFoundError: 3\.png, at .*\.py:{line}"):
        everything(source)


@pytest.mark.parametrize("draw", [lambda: torch.rand(2), lambda: np.random.rand(2), lambda: random.random()])
def test_randomly_changing_rows_are_rejected(draw: Callable[[], Any], opened: Opener) -> None:
    with pytest.raises(SettingsError, match=r"row 0 of .* has a different input each time it is read.*augment_row"):
        opened(Rows(20, lambda _: draw()))


def test_rows_with_nan_do_not_count_as_random(opened: Opener) -> None:
    source, _ = opened(Rows(4, lambda number: torch.tensor([number, float("nan")])))
    assert np.isnan(everything(source)["input"][:, 1]).all()


def test_a_random_split_without_a_generator_is_reproducible(opened: Opener) -> None:
    rows = Rows(100, numbered)
    halves = []
    for seed in (0, 0, 1):
        torch.rand(3)
        opened(lambda _: random_split(rows, [50, 50]), seed=seed)
        halves.append([*build_splits(Settings(task="task_with_rows", seed=seed)).train.indices])
    assert halves[0] == halves[1] != halves[2]


def test_pickling_a_source_does_not_pickle_the_dataset(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(1 << 20)
    source, _ = opened(Rows(3000, lambda number: large[number]))
    content = pickle.dumps(source)
    assert len(content) < 20_000
    again = pickle.loads(content)
    assert again.read(2, np.array([1]))["input"].tolist() == [0]
    opened(Rows(10, numbered))  # from now on, this process builds another dataset
    assert sys.modules["task_with_rows"]
    monkeypatch.setattr(sys.modules["task_with_rows"], "build_dataset", lambda _: Rows(3000, lambda n: large[n] + 1))
    with pytest.raises(ConflictError, match="build_dataset returned different rows here than on the driver; seed any"):
        source.read(0)


def test_the_fingerprint_changes_with_the_rows(opened: Opener) -> None:
    prints = [
        opened(Rows(count, lambda number, more=more: torch.tensor([number + more])))[0].fingerprint
        for count, more in ((5, 0), (5, 0), (6, 0), (5, 1))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert prints[0].partition("-")[0] == prints[3].partition("-")[0] != prints[2].partition("-")[0]


class Named(Rows):
    classes = ("cat", "dog")


def test_class_names_come_from_the_dataset(opened: Opener) -> None:
    named = Named(4, lambda number: (PICTURE, number % 2))
    for dataset in (named, random_split(random_split(named, [4])[0], [4])[0]):
        source, _ = opened(dataset)
        assert (source.classes, source.class_names, source.shape) == (2, ("cat", "dog"), (1, 3, 4))
    wrong, _ = opened(Named(4, lambda number: (PICTURE, number)))
    with refusal(
        DataError, "row 2 of", "label 2 is out of range, because the Dataset declares 2 classes", "from 0 to 1"
    ):
        wrong.read(0)


class LikeHuggingFace:
    """Rows like those of `datasets.Dataset`: they are fetched together, and the features include the class names."""

    features = {"x": None, "label": SimpleNamespace(names=["no", "yes"])}  # noqa: RUF012

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> dict[str, Any]:
        raise AssertionError("rows are fetched together")

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [{"x": torch.tensor([number, 0.5]), "label": number % 2} for number in numbers]


def test_hugging_face_rows_are_fetched_in_batches_and_have_class_names(opened: Opener) -> None:
    train, test = opened({"train": LikeHuggingFace(), "test": LikeHuggingFace()})
    assert test
    assert train.class_names == test.class_names == ("no", "yes")
    assert everything(train)["x"][:, 0].tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------------ in a task


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Settings]:
    """Return a function that writes a task and returns settings for it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str, **settings: Any) -> Settings:
        name = f"rows_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(f"from tests.tasks.tiny import build_model, loss\n{text}\n")
        return Settings(task=name, **settings)

    return write


def test_the_test_share_setting_holds_out_rows_of_a_dataset(task: Callable[..., Settings]) -> None:
    settings = task("def build_dataset(settings): return [float(each) for each in range(40)]", test_share=0.25)
    plan = make_plan(settings, load_task(settings))
    assert plan.test
    assert (plan.steps.rows, rows_in(plan.test)) == (30, 10)
    numbers = [everything(source)["input"].tolist() for source in (plan.source, plan.test)]
    assert sorted(numbers[0] + numbers[1]) == list(range(40))
    without = settings.model_copy(update={"test_share": 0.0})
    told = "return train and test from build_dataset, or hold out a tenth of the rows with SUNSPOT_TEST_SHARE=0.1"
    assert told in make_plan(without, load_task(without)).reasons[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("return [1, 2]", "find_sources returned an int; return a tuple of two"),
        ("return None", "find_sources returned a NoneType; return a tuple of two"),
        (
            "from tests.unit.test_torch_dataset import Rows; return Rows(3, abs), None",
            "a Rows; return a tuple of two.*build_dataset",
        ),
        (
            "from sunspot.data.source import EmptySource; return EmptySource((1,), 2)",
            "one Source; return a tuple of two",
        ),
    ],
)
def test_the_find_sources_function_must_return_two_sources(text: str, says: str, task: Callable[..., Settings]) -> None:
    settings = task(f"def find_sources(settings): {text}")
    with pytest.raises(SettingsError, match=rf"SUNSPOT_TASK={settings.task}: .*{says}"):
        open_rows_of_task(settings, load_task(settings))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def build_dataset(settings): ...\ndef find_sources(settings): ...", "both build_dataset and find_sources"),
        ("def build_dataset(): ...", r"build_dataset\(\), defined at .*, is called as build_dataset\(settings\)"),
        ("def compute_metrics(scores, rows): ...", "needs the scores from predict"),
        ("def compute_metrics(scores): ...\nfrom tests.tasks.tiny import predict", r"compute_metrics\(scores, rows\)"),
        (
            "from tests.tasks.tiny import predict\ndel loss\n"
            "def train(run): ...\ndef compute_metrics(scores, rows): ...",
            "compute_metrics would never be called, because held-out rows cannot be evaluated without loss",
        ),
    ],
)
def test_tasks_with_conflicting_functions_are_rejected(text: str, says: str, task: Callable[..., Settings]) -> None:
    settings = task(text)
    with pytest.raises(SettingsError, match=re.compile(f"SUNSPOT_TASK={settings.task}: .*{says}", re.DOTALL)):
        load_task(settings)


def test_the_dataset_example_trains_like_the_plain_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_dataset.py").write_text(find_patched("my_dataset.py"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = Settings(task="my_dataset", global_batch_size=64, max_steps=12)
    train, test = open_datasets(settings)
    assert test
    assert (rows_in(train), rows_in(test), train.classes) == (5400, 600, 3)

    example = importlib.import_module("my_dataset")
    torch.manual_seed(0)
    model = example.build_model(settings, train)
    optimizer = example.build_optimizer(model, settings)
    scheduler = example.build_scheduler(optimizer, settings, 12)
    losses = []
    for step in range(12):
        rows = read_rows(train, 64 * step, 64 * step + 64)
        scores = model(torch.from_numpy(rows["input"]))
        loss = functional.cross_entropy(scores, torch.from_numpy(rows["label"]))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    for workers in (1, 3):
        found = losses_of_ranks(tmp_path / str(workers), workers, **settings.model_dump(exclude_unset=True))
        assert found == pytest.approx(losses, rel=1e-5)
