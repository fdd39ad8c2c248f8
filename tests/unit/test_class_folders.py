"""Tests for folders of images: which files are read, the class of each image, and notes about other files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sunspot.data import table
from sunspot.data.class_folders import find_classes
from sunspot.data.columns import Column
from sunspot.data.convert import convert_image_folder
from sunspot.data.dataset_files import list_all
from sunspot.data.image_sources import find_sources
from sunspot.data.source import ModelData, PredictionSettings, notes_on, rows_in
from sunspot.data.table import TableSource, open_table
from sunspot.errors import DataError
from sunspot.plan import make_plan
from sunspot.settings import Settings
from sunspot.storage import open_storage
from sunspot.tasks import Task
from tests.harness.constants import SetConstants
from tests.harness.datasets import everything, random_images, refusal
from tests.unit.test_table import png

FORMATS_BY_SUFFIX = {".jfif": "JPEG", ".jpg": "JPEG", ".gif": "GIF"}


def put_files(folder: Path, *names: str) -> str:
    """Write images, other files and, for names that end with "/", empty folders."""
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = path.suffix.lower()
        if suffix in (".png", ".jpg", ".gif", ".jfif"):
            Image.new("RGB", (5, 4)).save(path, FORMATS_BY_SUFFIX.get(suffix, "PNG"))
        else:
            path.write_bytes(b"no image")
    return str(folder)


def open_rows(location: str, test_dataset: str = "") -> tuple[TableSource, TableSource | None]:
    train, test = find_sources(Settings(dataset=location, test_dataset=test_dataset))
    assert isinstance(train, TableSource)
    assert test is None or isinstance(test, TableSource)
    return train, test


def test_class_names_that_differ_only_in_unicode_form_are_rejected(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9/a.png", "cafe\u0301/b.png"
    with pytest.raises(DataError, match="the same text in different Unicode forms"):
        open_rows(put_files(tmp_path / "one", composed, decomposed, "tea/a.png"))
    with pytest.raises(DataError, match="the same text in different Unicode forms"):
        open_rows(put_files(tmp_path / "two", f"train/{composed}", "train/tea/a.png", f"test/{decomposed}"))


@pytest.mark.parametrize(
    ("files", "classes", "rows"),
    [
        (["cat/a.gif", "cat/b.JPG", "dog/a.jfif"], ("cat", "dog"), 3),
        (["_back_/a.png", "cat/_01.png", "cat/.02.png"], ("_back_", "cat"), 3),
        (["_1/a.png", "_2/a.png"], ("_1", "_2"), 2),
        (["cat/a.png", "dog/a.png", "__MACOSX/cat/._a.png", "cat/.DS_Store", "cat/Thumbs.db"], ("cat", "dog"), 2),
        (["train/cat/a.png", "train/dog/a.png", "README.md"], ("cat", "dog"), 2),
        (["Training/cat/a.png", "Training/dog/a.png"], ("cat", "dog"), 2),
        (["train/a.png", "bus/a.png", "car/a.png"], ("bus", "car", "train"), 3),
        (["train_station/a.png", "test_tube/a.png"], ("test_tube", "train_station"), 2),
        (["cat/indoors/a.png", "cat/b.png", "dog/indoors/a.png"], ("cat", "dog"), 3),
    ],
)
def test_each_image_becomes_a_row_of_its_class(
    tmp_path: Path, files: list[str], classes: tuple[str, ...], rows: int
) -> None:
    train, test = open_rows(put_files(tmp_path, *files))
    assert (train.class_names, rows_in(train), test) == (classes, rows, None)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ["cat/a.heic", "cat/b.heic", "dog/a.png"],
            ["the class folders cat/ (2 .heic files) contain no readable images", ".png"],
        ),
        (["cat/a.png", "dog/a.png", "owl/"], ["the class folders owl/ (empty) contain no readable images"]),
        (
            ["train/cat/a.png", "train/dog/a.png", "train/owl/a.txt"],
            ["the class folders train/owl/ (1 .txt file) contain no readable images"],
        ),
        (
            ["images/cat/a.png", "images/dog/a.png"],
            ["same class, images", "set SUNSPOT_DATASET to", "/images, which contains"],
        ),
        (["a/b/cat/a.png", "a/b/dog/a.png"], ["same class, a", "/a/b, which contains"]),
        (
            ["train/cat/a.png", "train/dog/a.png", "more/a.png"],
            ["but more/ next to it also contains images", "set SUNSPOT_DATASET to", "/train"],
        ),
        (["train/cat/a.png", "Validation/cat/a.png"], ["train/ and Validation/", "TEST_DATASET"]),
        (["training_set/cat/a.png", "test_set/cat/a.png"], ["training_set/ and test_set/", "TEST_DATASET"]),
        (["seg_train/a/a.png", "seg_test/a/a.png", "seg_pred/a.png"], ["seg_train/ and seg_test/", "TEST_DATASET"]),
        (
            ["up/train/cat/a.png", "up/test/cat/a.png"],
            ["/up contains train/ and test/", "set SUNSPOT_DATASET to", "/up/train and"],
        ),
        (["train/a.png", "test1/a.png"], ["train/ and test1/"]),
        (["a.png", "b.png"], ["no folders of images (a.png is outside them)"]),
        ([".git/a.png"], ["contains no folders of images", "1 file in hidden folders, such as .git/a.png"]),
    ],
)
def test_errors_about_class_folders_include_the_fix(tmp_path: Path, files: list[str], said: list[str]) -> None:
    location = put_files(tmp_path, *files)
    with refusal(DataError, *said):
        open_rows(location)


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("Train", "TEST"), ("training", "testing"), ("Training", "test")]
)
def test_folders_named_train_and_test_are_matched_case_insensitively(tmp_path: Path, train: str, test: str) -> None:
    location = put_files(tmp_path, f"{train}/cat/a.png", f"{train}/dog/a.png", f"{test}/cat/a.png")
    rows, held_out = open_rows(location)
    assert held_out
    assert (rows_in(rows), rows_in(held_out), held_out.class_names) == (2, 1, ("cat", "dog"))
    assert notes_on(rows, held_out) == []


def test_a_note_mentions_an_unread_validation_folder(tmp_path: Path) -> None:
    location = put_files(tmp_path, "train/cat/a.png", "train/dog/a.png", "test/cat/a.png", "val/dog/a.png")
    rows, held_out = open_rows(location)
    assert notes_on(rows, held_out) == [
        f"{location}: val/ not read; to use it instead of test/, set SUNSPOT_TEST_DATASET"
    ]
    rows, held_out = open_rows(location, f"{location}/val")
    assert held_out
    assert held_out.where(0, 0) == f"{location}/val/dog/a.png"
    assert notes_on(rows, held_out) == []


@pytest.mark.parametrize(
    "names", [["train-0.parquet", "test-0.parquet"], ["data/Training/0.parquet", "data/val.parquet"]]
)
def test_a_folder_that_mixes_training_and_held_out_files_is_rejected(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [0.5, 1.5]}), tmp_path / name)
    with refusal(DataError, "both would be used for training", "TEST_DATASET"):
        open_table(Settings(dataset=str(tmp_path)), {"x": Column()})


def predicting_task() -> Task:
    return Task(SimpleNamespace(predict=lambda model, batch: None), Settings())


def test_the_plan_says_how_many_files_were_not_read(tmp_path: Path) -> None:
    files = ["cat/a.png", "dog/a.png", *(f"cat/{number}.heic" for number in range(8)), "dog/n.txt", "b.png"]
    location = put_files(tmp_path, *files, ".thumbs/a.png", "dog/.ipynb_checkpoints/a.png", "cat/0001")
    (tmp_path / "cat" / "c.png").symlink_to("nowhere")
    task = predicting_task()
    [data, note, steps] = make_plan(Settings(dataset=location), task).reasons
    assert "2 training rows" in data
    assert "put them into test/ next to train/, set SUNSPOT_TEST_DATASET, or hold out" in data
    assert note == (
        f"{location}: not read: 8 .heic files, such as cat/0.heic; 2 files in hidden folders, such as "
        ".thumbs/a.png; 1 .txt file, such as dog/n.txt; 1 broken link or similar, such as cat/c.png; 1 file without "
        "suffix, such as cat/0001; 1 other file"
    )
    assert steps.startswith("steps: ")


def test_a_note_explains_the_class_of_nested_images(tmp_path: Path) -> None:
    location = put_files(tmp_path, "cat/indoors/a.png", "dog/b.png")
    assert open_rows(location)[0].notes == (
        f"{location}: images in nested folders get the class of the outermost folder; for example, cat/indoors/a.png "
        "has the class cat",
    )


def test_a_single_class_is_rejected_only_if_the_task_predicts_classes(tmp_path: Path) -> None:
    settings = Settings(dataset=put_files(tmp_path, "images/a.png", "images/b.png"))
    with refusal(DataError, "one class, images", "a separate folder", "omit `label`"):
        make_plan(settings, predicting_task())
    assert rows_in(make_plan(settings, Task(SimpleNamespace(), settings)).source) == 2


def test_the_folders_of_images_to_predict_need_not_be_named_after_classes(tmp_path: Path) -> None:
    location = put_files(tmp_path, "new/today/a.png", "new/yesterday/a.png", "empty/", "old/a.heic")
    model = ModelData((3, 4, 5), 2, ("cat", "dog"), scales=True)
    train, _ = find_sources(PredictionSettings.of(Settings(dataset=location), model))
    assert rows_in(train) == 2
    assert "1 .heic file" in notes_on(train)[0]


def test_links_are_followed_but_cycles_are_rejected(tmp_path: Path) -> None:
    location = put_files(tmp_path / "data", "cat/a.png", "dog/a.png")
    put_files(tmp_path / "elsewhere", "b.png")
    (tmp_path / "data" / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    assert rows_in(open_rows(location)[0]) == 3
    (tmp_path / "data" / "dog" / "up").symlink_to("..")
    with refusal(DataError, "/dog/up/dog is a link to one of its own parent folders"):
        open_rows(location)


def test_image_names_must_be_valid_utf_8(tmp_path: Path) -> None:
    location = put_files(tmp_path, "cat/a.png", "dog/a.png")
    os.rename(tmp_path / "cat", os.fsencode(tmp_path) + b"/c\xe4t")
    with refusal(DataError, r"c\udce4t: the name is not valid UTF-8; change it"):
        open_rows(location)


def test_errors_about_invalid_images_name_the_paths(tmp_path: Path) -> None:
    location = put_files(tmp_path, "cat/a.png", "dog/a.png")
    (tmp_path / "dog" / "b.png").touch()
    with pytest.raises(DataError) as error:
        open_rows(location)
    assert str(error.value).startswith(f"{location}/dog/b.png is not a PNG, JPEG")
    assert str(error.value).endswith("the file is empty")
    (tmp_path / "cat" / "c.png").write_bytes(b"no image")
    with refusal(DataError, "/cat/c.png is not a PNG", "(and 1 other image cannot be read)"):
        open_rows(location)


def test_the_shape_accounts_for_exif_orientation(tmp_path: Path) -> None:
    content = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 12)).save(content, "JPEG", exif=exif)
    for name in ("cat/a.jpg", "dog/a.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content.getvalue())
    assert open_rows(str(tmp_path))[0].shape == (3, 8, 12)
    pq.write_table(pa.table({"image": [content.getvalue()], "label": [0]}), tmp_path / "a.parquet")
    rows, _ = open_rows(str(tmp_path / "a.parquet"))
    assert everything(rows)["image"].shape == (1, 3, 8, 12)


def test_image_folders_in_a_bucket_are_read_like_local_folders(tmp_path: Path, s3_bucket: str) -> None:
    put_files(tmp_path, "cat/_1.png", "cat/a.heic", "dog/a.GIF", "dog/.DS_Store", ".trash/a.png")
    there, here = f"s3://{s3_bucket}/pictures", str(tmp_path)
    bucket = open_storage(there)
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            bucket.write(f"{path.relative_to(tmp_path)}", path.read_bytes())
    found, local = (find_classes(location, list_all(location)) for location in (there, here))
    assert found.pictures == local.pictures
    assert found.unread == local.unread
    train, _ = open_rows(there)
    assert (train.class_names, train.fingerprint) == (("cat", "dog"), open_rows(here)[0].fingerprint)
    bucket.write("owl/a.heic", b"")
    with refusal(DataError, f"{there}: the class folders owl/ (1 .heic file) contain no readable images"):
        open_rows(there)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ["train/cat/a.png", "train/dog/a.heic", "Test/cat/a.png"],
            ["/train: the class folders dog/"],
        ),
        (["a/cat/a.png", "a/dog/a.png"], ["same class, a"]),
        (["training_set/cat/a.png", "test_set/cat/a.png"], ["training_set/ and test_set/"]),
    ],
)
def test_convert_rejects_the_same_folders_as_training(tmp_path: Path, files: list[str], said: list[str]) -> None:
    root = put_files(tmp_path / "root", *files)
    with refusal(DataError, *said):
        convert_image_folder(root, 8, str(tmp_path / "out"))


def test_convert_lists_the_files_that_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = put_files(tmp_path / "root", "Train/cat/a.png", "Train/cat/a.heic", "TEST/cat/b.png", "val/cat/c.png")
    assert convert_image_folder(root, 8, str(tmp_path / "out")) == {"train": 1, "test": 1}
    assert "1 .heic file, such as cat/a.heic" in caplog.text
    assert "val is not converted, because TEST/ contains the held-out rows" in caplog.text


def test_the_fingerprint_depends_on_how_images_are_decoded(tmp_path: Path, set_constants: SetConstants) -> None:
    folders = put_files(tmp_path / "folders", "cat/a.png", "dog/a.png")
    for name, images in (("encoded", [png(4, 5)]), ("numbers", random_images(1, 4, 5).tolist())):
        pq.write_table(pa.table({"image": images, "label": [0]}), tmp_path / f"{name}.parquet")
    places = [folders, str(tmp_path / "encoded.parquet"), str(tmp_path / "numbers.parquet")]
    before = [open_rows(place)[0].fingerprint for place in places]
    set_constants(table, PICTURE_DECODING=b"another decoding")
    after = [open_rows(place)[0].fingerprint for place in places]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]
