"""Reads numbers from CSV cells, and finds integers that a float dtype cannot represent exactly."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sunspot.errors import DataError
from sunspot.formatting import brief

INTEGER = r"^[+-]?[0-9]+$"
"""A pattern for CSV cells that contain integers."""

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""A pattern for CSV cells that contain numbers."""

BOOLEANS = {"1": ["true", "True", "TRUE"], "0": ["false", "False", "FALSE"]}
"""The words that Arrow reads as booleans in CSV, keyed by the digit that replaces them."""

INT64 = np.iinfo(np.int64)


def read_numbers(cells: pa.ChunkedArray, dtype: str, make_error: Callable[[int, str], DataError]) -> pa.ChunkedArray:
    """Return CSV cells as int64 if `dtype` is an integer type, otherwise as float64. Booleans become 1 and 0.

    For an invalid cell, raises the error returned by `make_error(index, fault)`.
    """
    is_integer = np.dtype(dtype).kind in "iu"
    kind = pa.int64() if is_integer else pa.float64()
    try:
        if is_integer and pc.any(pc.match_substring_regex(cells, "[xX]")).as_py():
            raise pa.ArrowInvalid("Arrow would read 0x10 as 16")
        numbers = cells.cast(kind)
    except pa.ArrowInvalid:
        numbers = _tidy(cells, dtype, is_integer, make_error).cast(kind)
    if not is_integer:
        _refuse_inexact_cells(cells, numbers.to_numpy(), dtype, make_error)
    return numbers


def find_inexact(numbers: np.ndarray, dtype: str) -> int | None:
    """Return the index of the first integer that a float `dtype` cannot represent exactly, or None.

    A float can represent an integer exactly if the integer's bits, without trailing zeros, fit into the mantissa.
    """
    most = _most_exact(dtype)
    if not numbers.size or np.iinfo(numbers.dtype).max <= most or (numbers.max() <= most and numbers.min() >= -most):
        return None
    lowest_bits = numbers & -numbers
    odd = numbers // np.where(lowest_bits == 0, 1, lowest_bits)
    changed = np.flatnonzero((odd > most) | (odd < -most))
    return int(changed[0]) if len(changed) else None


def describe_inexact(number: object, dtype: str) -> str:
    """Return an error message, with the fix, for an integer that a float `dtype` cannot represent exactly."""
    wider = "int64" if dtype == "float64" else "float64 or int64"
    return (
        f"has the value {number}, but {dtype} represents integers exactly only up to {_most_exact(dtype)}; declare the "
        f"column as {wider}, and shift or scale the values in the task"
    )


def _most_exact(dtype: str) -> int:
    return int(2 ** (np.finfo(dtype).nmant + 1))


def _tidy(
    cells: pa.ChunkedArray, dtype: str, is_integer: bool, make_error: Callable[[int, str], DataError]
) -> pa.ChunkedArray:
    """Rewrite cells so that Arrow can cast them to numbers.

    Strips spaces and a leading '+', and replaces booleans with 1 and 0. If a cell is not a valid number, raises the
    error that `make_error` returns.
    """
    tidy = pc.replace_substring_regex(pc.utf8_trim_whitespace(cells.combine_chunks()), r"^\+", "")
    for digit, words in BOOLEANS.items():
        tidy = pc.if_else(pc.is_in(tidy, pa.array(words)), digit, tidy)
    fits = pc.match_substring_regex(tidy, INTEGER if is_integer else NUMBER)
    if not pc.all(fits).as_py():
        index = fits.index(False).as_py()
        cell = cells[index].as_py()
        comma = "; write numbers with a decimal point and without thousands separators" if "," in cell else ""
        expected = f"{dtype} needs {'an integer' if is_integer else 'a number'}"
        raise make_error(index, f"is {repr(brief(cell)) if cell.strip() else 'empty'}, but {expected}{comma}")
    if is_integer:
        for index in np.flatnonzero(pc.match_substring_regex(tidy, "[0-9]{19}")):
            if not INT64.min <= int(tidy[index].as_py()) <= INT64.max:
                raise make_error(int(index), f"is {brief(cells[index].as_py())}, which is too large for {dtype}")
    return pa.chunked_array([tidy])


def _refuse_inexact_cells(
    cells: pa.ChunkedArray, numbers: np.ndarray, dtype: str, make_error: Callable[[int, str], DataError]
) -> None:
    """Raise an error for the first integer cell that a float `dtype` cannot represent exactly."""
    large = np.flatnonzero(np.abs(numbers) >= _most_exact(dtype))
    if not len(large):
        return
    with np.errstate(over="ignore"):
        held = numbers[large].astype(dtype)
    chosen = pc.utf8_trim_whitespace(cells.take(large))
    digits = np.asarray(pc.match_substring_regex(chosen, INTEGER)) & np.isfinite(held)
    for place in np.flatnonzero(digits):
        cell = chosen[place].as_py()
        if int(cell) != int(held[place]):
            raise make_error(int(large[place]), describe_inexact(cell, dtype))
