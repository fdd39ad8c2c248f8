"""Reads and writes a run's objects, enforcing size limits and a schema for each.

Objects in storage can be damaged, or written by another version or program. If a damaged object defines the run
(attempts, manifests, `run.json`, audit), reading it raises a `DamageError` with the object's name. If it only informs
users (status, metrics, events, failures, submissions, predictions, search results, tracking), it is skipped with a
warning, and training continues.
"""

import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge, Le, Lt, Predicate

from sunspot.errors import DamageError, NotFoundError, OutsideStorageError
from sunspot.log import warn_once
from sunspot.run import Run, to_json
from sunspot.run.size_limits import MAX_OBJECT_BYTES, spend
from sunspot.storage.base import Storage

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Record = TypeVar("Record")

MAX_NUMBER = 10**15
"""Largest allowed count or measurement. Sums of such numbers stay far below the limits of 64-bit integers."""

MAX_TIMESTAMP = 253_402_300_799
"""The last second of the year 9999, after which Python has no dates."""

CHECKPOINT = re.compile(r"step-[0-9]{8,15}-attempt-[0-9]{4,9}(-[0-9a-f]{8})?")
"""Pattern for checkpoint names."""

RUN = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""Pattern for run names, including the number that a trial's name ends with."""

Count = Annotated[int, Ge(0), Le(MAX_NUMBER)]
"""A number of steps, rows or bytes."""

SmallCount = Annotated[int, Ge(0), Le(10**6)]
"""A count that is small enough to iterate over, such as a number of processes."""

FiniteFloat = Annotated[float, Ge(-MAX_NUMBER), Le(MAX_NUMBER)]
"""A finite number, such as a duration, a fraction or a rate."""

Timestamp = Annotated[float, Ge(0), Le(MAX_TIMESTAMP)]
"""Seconds since the epoch."""

Int64 = Annotated[int, Ge(-(2**63)), Lt(2**63)]

CheckpointName = Annotated[str, Predicate(CHECKPOINT.fullmatch)]

RunName = Annotated[str, Predicate(RUN.fullmatch)]

DIGEST = "sha256"
"""The field that holds an object's checksum, the SHA-256 of all other fields."""

FORMAT, FORMAT_NUMBER = "format", 1
"""The field that holds the file format of an object with a checksum, and its value."""


def read(run: Run, schema: type[Record], *parts: str) -> Record:
    """Read an object of the run as `schema`. Raises `NotFoundError`, `StorageError` or `DamageError`."""
    key = run.key(*parts)
    return parse(schema, read_content(run.storage, key), run.storage.locate(key))


def read_verified(run: Run, schema: type[Record], *parts: str) -> Record:
    """Read an object that `with_checksum` encoded. Raises the same errors as `read`."""
    key = run.key(*parts)
    return parse_verified(schema, read_content(run.storage, key), run.storage.locate(key))


def read_content(storage: Storage, key: str, most: int = MAX_OBJECT_BYTES) -> bytes:
    """Return the bytes of an object.

    Raises `DamageError` if there are more than `most` bytes, or if the object is a link that points outside the
    storage path.
    """
    try:
        with storage.open(key) as stream:
            content = stream.read(most + 1)
    except OutsideStorageError as error:
        raise DamageError(str(error)) from error
    spend(len(content))
    if len(content) > most:
        raise DamageError(f"{storage.locate(key)} cannot be used: it is larger than {most >> 20} MiB")
    return content


def parse(schema: Any, content: bytes, place: str) -> Any:
    """Parse JSON as the type `schema`, such as a dataclass.

    Values are not converted to other types, and unknown fields are ignored. Raises `DamageError` with `place` in its
    message if the content does not match the schema.
    """
    from pydantic import ValidationError

    try:
        return adapter(schema).validate_json(content, strict=True)
    except ValidationError as error:
        raise DamageError(f"{place} cannot be used: {_describe(error)}") from error


def parse_verified(schema: Any, content: bytes, place: str) -> Any:
    """Parse an object that `with_checksum` encoded. Raises `DamageError` if the checksum is missing or wrong."""
    record = parse(dict[str, Any], content, place)
    if DIGEST not in record:
        raise DamageError(f"{place} cannot be used: it has no checksum")
    if record.pop(DIGEST) != digest(record):
        raise DamageError(f"{place} cannot be used: it was changed after it was written")
    return parse(schema, content, place)


def is_count(value: Any) -> bool:
    """Return True if a value is a valid `Count`."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_timestamp(value: Any) -> bool:
    """Return True if a value is a valid `Timestamp`."""
    return type(value) in (int, float) and 0 <= value <= MAX_TIMESTAMP


def with_checksum(record: dict[str, Any]) -> bytes:
    """Return a record as JSON, with its file format and checksum added."""
    record = {**record, FORMAT: FORMAT_NUMBER}
    return to_json({**record, DIGEST: digest(record)})


def digest(record: dict[str, Any]) -> str:
    """Return the SHA-256 of a record as hexadecimal digits."""
    return hashlib.sha256(to_json(record)).hexdigest()


def read_or_default(read: Callable[[], Record], default: Record, damaged: list[str] | None = None) -> Record:
    """Return the result of `read`. If the object is damaged, call `report_damage`, and return `default`."""
    try:
        return read()
    except DamageError as error:
        report_damage(str(error), damaged)
        return default


def read_if_usable(load: Callable[[], Record]) -> Record | None:
    """Return the result of `load`, or None if the object does not exist or is damaged. Damage is logged."""
    return read_if_exists(lambda: read_or_default(load, None))


def read_if_exists(load: Callable[[], Record]) -> Record | None:
    """Return the result of `load`, or None if the object does not exist."""
    try:
        return load()
    except NotFoundError:
        return None


def report_damage(text: str, damaged: list[str] | None = None) -> None:
    """Add a message about damage to `damaged`, or log it as a warning if `damaged` is None."""
    if damaged is None:
        warn_once(log, f"{text}; left out")
    else:
        damaged.append(text)


def adapter(schema: Any) -> "TypeAdapter[Any]":
    """Return the pydantic adapter for `schema`."""
    with _building:  # the first call takes milliseconds, and the many threads of a listing share it
        return _build(schema)


def as_event(schema: type[Record], event: Any) -> Record | None:
    """Return one of a run's events as an instance of `schema`, or None if it is malformed."""
    try:
        return adapter(schema).validate_python(event)
    except ValueError:
        return None


_building = threading.Lock()


@functools.cache
def _build(schema: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # slow to import, and not needed for help

    return TypeAdapter(schema)


def _describe(error: Any) -> str:
    """Return the first error in a pydantic `ValidationError` as text."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    return f"{field}: {fault['msg']}" if field else str(fault["msg"])
