"""The audit records which rows each optimizer step consumed, in Parquet files (see COLUMNS).

An attempt's files are the segments of a stream (streams.py). Each segment covers a range of steps. Each commit writes
one segment, and small segments are merged. A digest in each file name ties the content to the attempt and its steps.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sunspot.errors import DamageError, shorten
from sunspot.run import Run
from sunspot.run.attempts import Span
from sunspot.run.size_limits import MAX_AUDIT_ROWS
from sunspot.run.streams import Segment, StreamWriter, list_all, read_segment, read_segments, tidy, without_merged_parts

if TYPE_CHECKING:
    import pyarrow

FOLDER = "audit"

DIGITS = 16

NAME = re.compile(
    r"(?P<stream>attempt-(?P<attempt>[0-9]{4,9})(-[0-9a-f]{8})?)/(?P<first>[0-9]{8,15})-(?P<last>[0-9]{8,15})"
    rf"-(?P<digest>[0-9a-f]{{{DIGITS}}})\.parquet"
)
"""Pattern for the paths of files in `audit/`."""

COLUMNS = {"step": "int32", "rank": "int32", "row": "int64"}


class AuditWriter:
    """Writes the rows that an attempt's steps consumed, in step order."""

    def __init__(self, run: Run, attempt: str) -> None:
        """Create a writer. `attempt` is the attempt's label (`Attempt.label`)."""
        self._segments = StreamWriter(
            run.storage, lambda first, last, content: _key(run, attempt, first, last, content), _join
        )

    def write(self, first: int, last: int, consumed: pyarrow.Table) -> None:
        """Write the rows consumed by steps `first` to `last`. Raises `StorageError`."""
        self._segments.write(first, last, _to_parquet(consumed))

    def merge(self) -> None:
        """Merge small files. Storage errors are ignored, because the next call merges the same files."""
        self._segments.merge()


def tidy_audit(run: Run, before: int) -> None:
    """Merge the small files of attempts older than attempt `before`. Raises `StorageError`."""

    def read(segment: Segment) -> bytes:
        content = read_segment(run.storage, segment)
        _parse(run, segment, content)  # otherwise, merging would give damaged content a valid digest
        return content

    older = [segment for segment in list_audit(run) if segment.attempt < before]
    tidy(run.storage, older, lambda *segment: _key(run, *segment), _join, read)


def list_audit(run: Run) -> list[Segment]:
    """Return all audit files, including those that were merged into others."""
    return list_all(run.storage, run.key(FOLDER), NAME)


def read_audit(run: Run, spans: Sequence[Span]) -> list[pyarrow.Table]:
    """Return the rows consumed by the steps in `spans`. Raises `DamageError` if a file is damaged.

    The rows of each step are returned once. A file can extend past the end of its attempt's span, because a commit also
    writes the rows of steps that were taken during the commit. A file can also repeat steps of an earlier file, if
    storage reported a successful write as failed.
    """
    import pyarrow.compute as pc

    bounds = {span.label: (span.after, span.upto) for span in spans}

    def find() -> list[Segment]:
        segments = without_merged_parts(list_audit(run))
        return [segment for segment in segments if _counted(segment, bounds)]

    tables = []
    for segment, content, _ in read_segments(run.storage, run.key(FOLDER), find):
        if isinstance(content, DamageError):
            raise content
        counted = _counted(segment, bounds)
        if counted is None:
            continue
        table = _parse(run, segment, content)
        first, last = counted
        if counted != (segment.first, segment.last):
            table = table.filter((pc.field("step") >= first) & (pc.field("step") <= last))
        tables.append(table)
        bounds[segment.stream] = (last, bounds[segment.stream][1])
    return tables


def _counted(segment: Segment, bounds: Mapping[str, tuple[int, int | None]]) -> tuple[int, int] | None:
    """Return the first and last steps to read from a segment, or None if no step is to be read.

    `bounds` maps each stream to the range of steps that are still to be read. The first bound is exclusive. The second
    is inclusive, or None if there is no limit.
    """
    if segment.stream not in bounds:
        return None
    after, upto = bounds[segment.stream]
    first = max(segment.first, after + 1)
    last = segment.last if upto is None else min(segment.last, upto)
    return (first, last) if first <= last else None


def _parse(run: Run, segment: Segment, content: bytes) -> pyarrow.Table:
    """Return the rows in a segment. Raises `DamageError` if its content does not match its name."""
    import pyarrow.compute
    import pyarrow.parquet

    place = run.storage.locate(segment.entry.key)
    name = NAME.search(segment.entry.key)
    assert name
    try:
        if name["digest"] != _digest(segment.stream, segment.first, segment.last, content):
            raise DamageError(f"{place} cannot be used: it was changed after it was written")
        rows = pyarrow.parquet.read_metadata(io.BytesIO(content)).num_rows
        if rows > MAX_AUDIT_ROWS:
            raise DamageError(f"{place} cannot be used: it has {rows:,} rows, but the limit is {MAX_AUDIT_ROWS:,}")
        table = pyarrow.parquet.read_table(io.BytesIO(content), columns=[*COLUMNS])
        table = table.cast(pyarrow.schema(list(COLUMNS.items())))
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise DamageError(f"{place} cannot be read: {shorten(error)}") from error
    steps = pyarrow.compute.min_max(table["step"]).as_py()
    if any(column.null_count for column in table.columns):
        raise DamageError(f"{place} cannot be used: it contains null values")
    if len(table) and not segment.first <= steps["min"] <= steps["max"] <= segment.last:
        raise DamageError(
            f"{place} cannot be used: it contains steps {steps['min']} to {steps['max']}, but its name says "
            f"{segment.first} to {segment.last}"
        )
    return table


def _to_parquet(consumed: pyarrow.Table) -> bytes:
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(consumed, buffer, compression="zstd")
    return buffer.getvalue()


def _join(contents: Sequence[bytes]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    return _to_parquet(pyarrow.concat_tables(pyarrow.parquet.read_table(io.BytesIO(each)) for each in contents))


def _key(run: Run, attempt: str, first: int, last: int, content: bytes) -> str:
    digest = _digest(attempt, first, last, content)
    return run.key(FOLDER, attempt, f"{first:08d}-{last:08d}-{digest}.parquet")


def _digest(attempt: str, first: int, last: int, content: bytes) -> str:
    """Return the digest for a file's name, computed from its content, attempt and steps."""
    return hashlib.sha256(f"{attempt}/{first:08d}-{last:08d}\n".encode() + content).hexdigest()[:DIGITS]
