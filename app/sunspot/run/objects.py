"""Reading and writing of a run's objects: within size limits, and only in the schema that each object must have.

Objects in storage may be damaged, of another version, or not ours at all. If an object that decides what a run is
(attempts, manifests, `run.json`, audit) is damaged, it is refused with a `DamageError` that names it. If an object only
informs (status, metrics, events, failures, submissions, predictions, search results, tracking), it is left out with a
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
"""Largest count and measure. Sums and products of such numbers stay far below the limits of floats and 64 bits."""

MAX_TIMESTAMP = 253_402_300_799
"""Last second of the year 9999, after which Python has no dates."""

CHECKPOINT = re.compile(r"step-[0-9]{8,15}-attempt-[0-9]{4,9}(-[0-9a-f]{8})?")
"""Pattern of the names of checkpoints."""

RUN = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""Pattern of the names of runs, with room for the number of a trial."""

Count = Annotated[int, Ge(0), Le(MAX_NUMBER)]
"""A number of steps, rows or bytes."""

SmallCount = Annotated[int, Ge(0), Le(10**6)]
"""A count that is small enough to iterate over, such as a number of processes."""

FiniteFloat = Annotated[float, Ge(-MAX_NUMBER), Le(MAX_NUMBER)]
"""A finite number: seconds, a fraction, rows per second."""

Timestamp = Annotated[float, Ge(0), Le(MAX_TIMESTAMP)]
"""Seconds since the epoch."""

Int64 = Annotated[int, Ge(-(2**63)), Lt(2**63)]

CheckpointName = Annotated[str, Predicate(CHECKPOINT.fullmatch)]

RunName = Annotated[str, Predicate(RUN.fullmatch)]

DIGEST = "sha256"
"""Field of an object with a checksum: the SHA-256 of all its other fields."""

FORMAT, FORMAT_NUMBER = "format", 1
"""Field of an object with a checksum, and its value: the format of the run's files."""


def read(run: Run, schema: type[Record], *parts: str) -> Record:
    """Read an object of the run as `schema`. Raises `NotFoundError`, `StorageError` or `DamageError`."""
    key = run.key(*parts)
    return parse(schema, read_content(run.storage, key), run.storage.locate(key))


def read_verified(run: Run, schema: type[Record], *parts: str) -> Record:
    """Read an object that was made by `with_checksum`. Raises like `read`."""
    key = run.key(*parts)
    return parse_verified(schema, read_content(run.storage, key), run.storage.locate(key))


def read_content(storage: Storage, key: str, most: int = MAX_OBJECT_BYTES) -> bytes:
    """Return the bytes of an object. Raises `DamageError` if there are more than `most`.

    A link that leads out of the storage path also raises `DamageError`.
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
    """Parse JSON as `schema`, a dataclass or another type. Raises `DamageError`, which names the `place`.

    Values are not converted to other types, and fields that the schema does not have are ignored.
    """
    from pydantic import ValidationError

    try:
        return adapter(schema).validate_json(content, strict=True)
    except ValidationError as error:
        raise DamageError(f"{place} cannot be used: {_describe(error)}") from error


def parse_verified(schema: Any, content: bytes, place: str) -> Any:
    """Parse the content of an object that was made by `with_checksum`. Raises like `parse`."""
    record = parse(dict[str, Any], content, place)
    if DIGEST not in record:
        raise DamageError(f"{place} cannot be used: it has no checksum")
    if record.pop(DIGEST) != digest(record):
        raise DamageError(f"{place} cannot be used: it was changed after it was written")
    return parse(schema, content, place)


def is_count(value: Any) -> bool:
    """Return True if a value is a `Count`."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_timestamp(value: Any) -> bool:
    """Return True if a value is a `Timestamp`."""
    return type(value) in (int, float) and 0 <= value <= MAX_TIMESTAMP


def with_checksum(record: dict[str, Any]) -> bytes:
    """Return the JSON of an object that must not change, with its format and its own SHA-256."""
    record = {**record, FORMAT: FORMAT_NUMBER}
    return to_json({**record, DIGEST: digest(record)})


def digest(record: dict[str, Any]) -> str:
    """Return the SHA-256 of a record in hexadecimal digits."""
    return hashlib.sha256(to_json(record)).hexdigest()


def read_or_default(read: Callable[[], Record], default: Record, damaged: list[str] | None = None) -> Record:
    """Return the result of `read`, or `default` if the object is damaged, which is reported (`report_damage`)."""
    try:
        return read()
    except DamageError as error:
        report_damage(str(error), damaged)
        return default


def read_if_usable(load: Callable[[], Record]) -> Record | None:
    """Return the result of `load`, or None if the object does not exist, or is damaged, which logs a warning."""
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
    """Return the adapter that validates and serializes values of `schema`."""
    with _building:  # the first call takes milliseconds, and the many threads of a listing share it
        return _build(schema)


def as_event(schema: type[Record], event: Any) -> Record | None:
    """Return an event of a run as `schema`, or None if it is malformed."""
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
    """Return the first error that pydantic found, as text."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    return f"{field}: {fault['msg']}" if field else str(fault["msg"])
