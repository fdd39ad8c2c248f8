"""Tests for the results of a task's `show`: their parts, the report, and invalid or damaged results."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sunspot.checkpoint import CheckpointManager, SavedObjects
from sunspot.data.source import EmptySource
from sunspot.errors import SettingsError
from sunspot.plan import make_plan
from sunspot.predict.for_report import show, to_parts
from sunspot.report import read_report, render
from sunspot.run import Run
from sunspot.run.predictions import MAX_IMAGES, MAX_ROWS, Exhibit, TaskExhibit, read_shown, write_shown
from sunspot.run.seen import look
from sunspot.settings import Settings
from sunspot.tasks import load_task
from sunspot.tasks.texts import SHOWN
from sunspot.tasks.tree_models import KINDS
from tests.harness.runs import begin, start
from tests.harness.trained import trained


def page_of(run: Run) -> str:
    return render(read_report(look(run))).decode()


def test_texts_and_numbers_and_tables_from_the_show_function_are_stored() -> None:
    table = [{"name": "a", "loss": torch.tensor(0.5)}, {"loss": math.nan, "label": 3}]
    assert to_parts({"said": "yes", "perplexity": 12.34567, "rows": table}) == [
        Exhibit("said", text="yes"),
        Exhibit("perplexity", text="12.35"),
        Exhibit("rows", columns=["name", "loss", "label"], rows=[["a", 0.5, None], [None, "nan", 3.0]]),
    ]
    [part] = to_parts({"long": [{"text": "x" * 10**6}] * 1000})
    assert (len(part.rows), len(str(part.rows[0][0]))) == (MAX_ROWS, 2000)


def test_images_become_pngs(run: Run) -> None:
    pixels = torch.randint(0, 256, (MAX_IMAGES - 8, 3, 5, 4), dtype=torch.uint8)
    parts = to_parts({"first": pixels, "second": pixels[:, :1]})
    assert [len(part.images) for part in parts] == [MAX_IMAGES - 8, 8]
    assert np.array_equal(Image.open(io.BytesIO(parts[0].images[3])), pixels[3].permute(1, 2, 0))
    assert np.array_equal(Image.open(io.BytesIO(parts[1].images[7])), pixels[7, 0])
    trained(run)
    shown = TaskExhibit("step-00000188-attempt-0002", 188, parts)
    write_shown(run, shown)
    assert read_shown(run, TaskExhibit) == shown
    assert 'alt="second: image 8"' in page_of(run)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["a"], "a value of type list; return a dict that maps titles to strings, numbers, tables or images"),
        ({"a": [1, 2]}, "a value of type list for 'a'; return a string, a number, a list of dicts, or images"),
        ({"a": None}, "a value of type NoneType for 'a'; return a string, a number, a list of dicts, or images"),
        ({"a": torch.zeros(2, 1, 4, 4)}, "show returned a value of type Tensor for 'a'; .* a uint8 tensor"),
    ],
)
def test_the_show_function_cannot_return_values_of_unsupported_types(found: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        to_parts(found)


def test_the_report_shows_predictions_and_the_results_of_the_show_function(run: Run) -> None:
    trained(run)
    before = page_of(run)
    shown = [
        Exhibit("Texts", text="<b>hello</b>\nthere"),
        Exhibit("By loss", columns=["loss"], rows=[[0.25], [1.0, "odd"]]),
    ]
    write_shown(run, TaskExhibit("step-00000188-attempt-0002", 188, shown))
    assert read_shown(run, TaskExhibit) == TaskExhibit("step-00000188-attempt-0002", 188, shown)
    page = page_of(run)
    assert "&lt;b&gt;hello&lt;/b&gt;" in page
    assert "0.25" in page
    assert "odd" not in page
    assert "hello" not in before
    assert "Confusion matrix" in page


def test_the_report_explains_missing_predictions(run: Run) -> None:
    trained(run)
    run.storage.delete(run.key("predictions.json"))
    assert "No predictions are stored" in page_of(run)
    write_shown(run, TaskExhibit("step-00000188-attempt-0002", 188, [Exhibit("Perplexity", text="7.5")]))
    assert "No predictions are stored" not in page_of(run)


def test_damaged_results_of_the_show_function_are_reported(run: Run) -> None:
    trained(run)
    run.storage.write(run.key("shown.json"), b'{"checkpoint": 3}')
    assert "What the task shows cannot be read" in page_of(run)


def test_the_show_function_of_a_language_model_returns_texts_sorted_by_loss(run: Run) -> None:
    settings = Settings(
        task="sunspot.tasks.gpt",
        task_args={"layers": 1, "width": 8, "heads": 1, "context": 16},
        run_name=run.name,
        storage_path=run.storage.locate(""),
        predict_rows=40,
    )
    task = load_task(settings)
    plan = make_plan(settings, task)
    attempt = start(begin(run), "me")
    model = task.build_model(settings, plan.source)
    saved = SavedObjects(model, task.build_optimizer(model, settings))
    checkpoints = CheckpointManager(run, attempt, plan, saved)
    checkpoints.save(1, {})
    checkpoints.close(finished=True)
    assert checkpoints.newest
    perplexity, texts = show(plan, run.name, checkpoints.newest.name, "false")
    assert perplexity.title == "Perplexity of 40 held-out texts"
    assert float(perplexity.text) == pytest.approx(256, rel=0.3)  # the model has learned nothing
    losses = [row[0] for row in texts.rows]
    assert len(losses) == 2 * SHOWN
    assert losses == sorted(losses)


@pytest.mark.parametrize("library", KINDS)
def test_a_tree_task_shows_the_gain_of_each_feature(library: str) -> None:
    pytest.importorskip(library, reason="the extra `trees` is not installed")
    settings = Settings(task="sunspot.tasks.trees", task_args={"library": library})
    task: Any = load_task(settings)
    random = np.random.default_rng(0)
    rows = {name: torch.from_numpy(random.random(200)) for name in ("age", "income")}
    rows |= {"label": (rows["age"] > 0.5).long(), "row": torch.arange(200)}
    trees = task.build_model(settings, EmptySource((2,), 2))
    trees.begin(rows, 1)
    trees.boost()
    table = task.show(trees, rows)["Features by gain"]
    assert table[0]["feature"] == "age"
    assert sum(row["share"] for row in table) == pytest.approx(1)
