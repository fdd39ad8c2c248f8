"""Class labels: non-negative integers, or class names. The names are numbered in sorted order."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from sunspot.data.columns import Column, ColumnOrigin, first_true
from sunspot.data.fingerprint import digest, digest_array
from sunspot.data.numeric import NUMBER
from sunspot.data.source import ModelData
from sunspot.data.table_files import TableFile
from sunspot.errors import DataError
from sunspot.formatting import brief, some_of

LABEL = "label"
"""Name of the column with class labels. Values that are neither integers nor text are ordinary numbers."""

MAX_LABEL = 2**31 - 1
"""Largest allowed label. A larger label is a mistake, because no model has that many classes."""

CLASS_NAMES = b"classes"
"""Metadata key of the class names that `sunspot.data.convert` writes, a JSON list in label order."""

HUGGINGFACE = b"huggingface"
"""Metadata key of the features that `datasets` stores, including class names."""


class ClassLabels(NamedTuple):
    """The classes defined by the labels of one file or of all files."""

    classes: int
    "The number of classes."
    names: tuple[str, ...]
    "The labels themselves if they are text, otherwise the class names in the file's metadata. They are not sorted."
    text: bool
    "True if the labels are text."
    digest: str = ""
    numbers: frozenset[int] = frozenset()
    "The labels that occur, if they are numbers."
    as_text: "ClassLabels | None" = None
    "The same labels as names, if they are numbers in CSV. They are used if another file has names."


NO_LABELS = ClassLabels(0, (), False, digest_array(np.empty(0, np.int64)))

CLASS_NUMBER = r"^(0|[1-9][0-9]*)$"
"""A pattern for CSV labels that are class numbers."""

CODE = r"^0[0-9]+$"
"""A pattern for CSV labels with leading zeros. They are names, because a number would lose the zeros."""

MISSING = pa.csv.ConvertOptions().null_values
"""Words for a missing value in a column of numbers."""


@dataclass(frozen=True)
class TextLabels(Column):
    """A column of class names that is read as class numbers."""

    names: tuple[str, ...] = ()

    def read(self, values: pa.ChunkedArray, origin: ColumnOrigin) -> dict[str, np.ndarray]:
        """Return the class numbers. Raises `DataError` for text that is not a known class."""
        numbers = pc.index_in(values.cast(pa.string()), pa.array(self.names, pa.string()))
        if numbers.null_count:
            row = first_true(pc.is_null(numbers))
            raise origin.error(row, f"{brief(str(values[row]))} is not one of the classes in the training data")
        return {"": numbers.to_numpy().astype(self.dtype)}


def read_labels(column: Column, values: pa.ChunkedArray, file: TableFile, to_predict: bool) -> ClassLabels:
    """Return a file's class labels. If `to_predict` is set, labels can be missing.

    Raises `DataError` for the first invalid label.
    """
    if column.decode:
        numbers = column.read(values, ColumnOrigin(LABEL, file, np.arange(len(values))))[""]
    elif not file.has_types:
        return _read_label_cells(values, file, to_predict)
    elif to_predict and pc.any(pc.is_null(values, nan_is_null=True)).as_py():
        return ClassLabels(0, ("",), True)
    elif values.null_count:
        row = first_true(pc.is_null(values))
        raise DataError(f"{file.name_row(row)}: label is null; it must be text or a non-negative integer")
    elif is_text(values.type):
        return _read_names(values.cast(pa.string()).combine_chunks().dictionary_encode(), file, to_predict)
    elif not pa.types.is_integer(values.type):
        raise DataError(
            f"{file.name_row(0)}: label is {brief(str(values.type))} ({brief(str(values[0]))}); it must be text or a "
            "non-negative integer (if the task predicts numbers instead of classes, declare label as float32)"
        )
    else:
        numbers = values.to_numpy()
    bad = (numbers < 0) | (numbers > MAX_LABEL)
    if bad.any():
        row = first_true(bad)
        raise _refuse_number(file, row, numbers[row])
    classes = int(numbers.max()) + 1
    names = _stored_names(file.schema, column.of or LABEL)
    if 0 < len(names) < classes:
        raise DataError(
            f"{file.path} contains the label {classes - 1}, but its metadata has names for only {len(names)} classes"
        )
    content = digest_array(numbers.astype(np.int64, copy=False))
    occurring = frozenset(pc.unique(pa.array(numbers)).to_pylist())
    return ClassLabels(max(classes, len(names)), names, False, content, occurring)


def _read_names(labels: pa.DictionaryArray, file: TableFile, to_predict: bool) -> ClassLabels:
    names = tuple(labels.dictionary.to_pylist())
    if "" in names and not to_predict:
        row = first_true(pc.equal(labels.indices, names.index("")))
        raise DataError(f"{file.name_row(row)}: label is empty; it must be text or a non-negative integer")
    content = digest(digest_array(labels.indices.to_numpy()).encode(), json.dumps(names).encode())
    return ClassLabels(len(names), names, True, content)


def _read_label_cells(cells: pa.ChunkedArray, file: TableFile, to_predict: bool) -> ClassLabels:
    """Return a CSV file's labels: class numbers if all cells are non-negative integers, otherwise names.

    Raises `DataError` if all cells are numbers or missing, but some are not valid class numbers.
    """
    labels = cells.combine_chunks().dictionary_encode()
    distinct = pc.utf8_trim_whitespace(labels.dictionary)
    are_classes = np.asarray(pc.match_substring_regex(distinct, CLASS_NUMBER))
    are_numbers = np.asarray(pc.match_substring_regex(distinct, NUMBER))
    are_missing = np.asarray(pc.is_in(distinct, pa.array(MISSING)))
    has_codes = pc.any(pc.match_substring_regex(distinct, CODE)).as_py()
    if has_codes or not (are_numbers | are_missing).all():
        return _read_names(labels, file, to_predict)
    if are_missing.any() and to_predict:
        return ClassLabels(0, ("",), True)
    if not are_classes.all():
        row = first_true(np.isin(labels.indices.to_numpy(), np.flatnonzero(~are_classes)))
        raise DataError(
            f"{file.name_row(row)}: label is {brief(cells[row].as_py().strip()) or 'empty'}; it must be text or a "
            "non-negative integer (if the task predicts numbers instead of classes, declare label as float32)"
        )
    each = [int(label) for label in distinct.to_pylist()]
    if max(each) > MAX_LABEL:
        index = next(index for index, number in enumerate(each) if number > MAX_LABEL)
        raise _refuse_number(file, first_true(pc.equal(labels.indices, index)), each[index])
    content = digest_array(np.array(each, np.int64)[labels.indices.to_numpy()])
    return ClassLabels(max(each) + 1, (), False, content, frozenset(each), _read_names(labels, file, to_predict))


def _refuse_number(file: TableFile, row: int, number: int) -> DataError:
    return DataError(f"{file.name_row(row)}: label is {number}; it must be an integer from 0 to {MAX_LABEL}")


def merge_labels(
    files: list[ClassLabels], location: str, as_names: bool = False, model: ModelData | None = None
) -> ClassLabels:
    """Merge the labels of a dataset's files. Raises `DataError` if they are inconsistent.

    Names are numbered in sorted order. If `model` is given, it will predict classes for these rows. Names are then
    mapped to the model's class numbers. If the model does not know all of the names, the result has no labels. Numbers
    in CSV files are read as names if `as_names` is set, if another file has names, or if all labels are class names of
    the model.
    """
    if not files:
        return NO_LABELS
    texts = [file.as_text or file for file in files]
    are_classes_of_model = model is not None and {n for file in texts for n in file.names} <= set(model.class_names)
    if as_names or are_classes_of_model or any(file.text for file in files):
        files = texts
    if not any(file.text for file in files):
        known = max((file.names for file in files), key=len)
        other = next((file.names for file in files if file.names != known[: len(file.names)]), None)
        if other:
            raise DataError(
                f"{location}: the classes are {some_of(known)} in some files, but {some_of(other)} in others; use the "
                "same class numbers in all files"
            )
        occurring = frozenset[int]().union(*(file.numbers for file in files))
        return ClassLabels(max(file.classes for file in files), known, False, numbers=occurring)
    if not all(file.text for file in files):
        raise DataError(
            f"{location}: labels are text in some files and numbers in others; use the same type in all files"
        )
    names = {name for file in files for name in file.names}
    if model is None:
        refuse_lookalikes(names, location)
        known = tuple(sorted(names))
    else:
        known = model.class_names if names <= set(model.class_names) else ()
    return ClassLabels(len(known), known, True)


def refuse_lookalikes(names: Iterable[str], location: str) -> None:
    """Raise `DataError` if two class names are the same text in different Unicode forms.

    macOS decomposes accented letters in file names, but most other programs compose them.
    """
    seen: dict[str, str] = {}
    for name in sorted(names):
        other = seen.setdefault(normalize("NFC", name), name)
        if other != name:
            raise DataError(
                f"{location}: the classes {name!r} ({name!a}) and {other!r} ({other!a}) are the same text in "
                "different Unicode forms; convert both to NFC"
            )


def is_text(stored: pa.DataType) -> bool:
    """Return True for text and booleans, because labels of these Arrow types are class names."""
    return any(test(stored) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean))


def _stored_names(schema: pa.Schema, name: str) -> tuple[str, ...]:
    """Return the class names from a file's metadata, or an empty tuple."""
    metadata = schema.metadata or {}
    try:
        if CLASS_NAMES in metadata:
            return tuple(map(str, json.loads(metadata[CLASS_NAMES])))
        return tuple(map(str, json.loads(metadata[HUGGINGFACE])["info"]["features"][name]["names"]))
    except (ValueError, KeyError, TypeError):
        return ()
