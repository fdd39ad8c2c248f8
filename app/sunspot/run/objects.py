"""How the objects of a run are read: within limits, and only in the form that each of them must have.

Whatever lies in storage may be damaged, of another version, or not ours at all. Of the truth about a run (attempts,
manifests, `run.json`, audit) a damaged object is refused with a `DamageError` that names it. News (status, metrics,
events, failures, submissions, predictions, search results, tracking) is left out with a warning, and training goes on.
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

Form = TypeVar("Form")

MAX_NUMBER = 10**15
"""Highest count and largest measure: sums and products of them stay far below what floats and 64 bits hold."""

LAST_MOMENT = 253_402_300_799
"""The end of the year 9999, after which there are no dates."""

CHECKPOINT = re.compile(r"step-[0-9]{8,15}-attempt-[0-9]{4,9}(-[0-9a-f]{8})?")
"""The name of a checkpoint."""

RUN = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""The name of a run, with room for the number of a trial."""

Count = Annotated[int, Ge(0), Le(MAX_NUMBER)]
"""A number of steps, rows or bytes."""

Workers = Annotated[int, Ge(0), Le(10**6)]
"""A number of processes: few enough to iterate over."""

Measure = Annotated[float, Ge(-MAX_NUMBER), Le(MAX_NUMBER)]
"""A finite number: seconds, a share, rows per second."""

Moment = Annotated[float, Ge(0), Le(LAST_MOMENT)]
"""Seconds since the epoch."""

Int64 = Annotated[int, Ge(-(2**63)), Lt(2**63)]


CheckpointName = Annotated[str, Predicate(CHECKPOINT.fullmatch)]

RunName = Annotated[str, Predicate(RUN.fullmatch)]

DIGEST = "sha256"
"""Field of an object with a checksum: the SHA-256 of all others."""

FORMAT, FORMAT_NUMBER = "format", 1
"""Field of an object with a checksum: the format of the run's files."""


def read(run: Run, form: type[Form], *parts: str) -> Form:
    """Return the object at `parts` of the run, in its `form`. Raises `NotFoundError`, `StorageError`, `DamageError`."""
    key = run.key(*parts)
    return parse(form, read_content(run.storage, key), run.storage.locate(key))


def read_verified(run: Run, form: type[Form], *parts: str) -> Form:
    """Read what `with_checksum` wrote; raises like `read`."""
    key = run.key(*parts)
    return parse_verified(form, read_content(run.storage, key), run.storage.locate(key))


def read_content(storage: Storage, key: str, most: int = MAX_OBJECT_BYTES) -> bytes:
    """Return the bytes of an object, at most `most`.

    Raises `DamageError` if the object is larger, or if it is a link that leads out of the storage path.
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


def parse(form: Any, content: bytes, place: str) -> Any:
    """Parse JSON as its `form`, a dataclass or another type; raises `DamageError`, which names the `place`.

    Types are taken literally, and fields that the form does not know are left out.
    """
    from pydantic import ValidationError

    try:
        return adapter(form).validate_json(content, strict=True)
    except ValidationError as error:
        raise DamageError(f"{place} cannot be used: {_describe(error)}") from error


def parse_verified(form: Any, content: bytes, place: str) -> Any:
    """Parse what `with_checksum` wrote; raises like `parse`."""
    record = parse(dict[str, Any], content, place)
    if DIGEST not in record:
        raise DamageError(f"{place} cannot be used: it has no checksum")
    if record.pop(DIGEST) != digest(record):
        raise DamageError(f"{place} cannot be used: it was changed after it was written")
    return parse(form, content, place)


def is_count(value: Any) -> bool:
    """Return whether it is a `Count`."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_moment(value: Any) -> bool:
    """Return whether it is a `Moment`."""
    return type(value) in (int, float) and 0 <= value <= LAST_MOMENT


def with_checksum(record: dict[str, Any]) -> bytes:
    """Return an object that must not change, as it is written: with its format and its own SHA-256."""
    record = {**record, FORMAT: FORMAT_NUMBER}
    return to_json({**record, DIGEST: digest(record)})


def digest(record: dict[str, Any]) -> str:
    """Return the SHA-256 of a record, in hex."""
    return hashlib.sha256(to_json(record)).hexdigest()


def read_or_default(read: Callable[[], Form], otherwise: Form, damaged: list[str] | None = None) -> Form:
    """Return what `read` returns, or `otherwise` when that is damaged, which `report_damage` tells."""
    try:
        return read()
    except DamageError as error:
        report_damage(str(error), damaged)
        return otherwise


def read_if_usable(load: Callable[[], Form]) -> Form | None:
    """Return what `load` returns; None when that is not there, or damaged, which is warned of."""
    return read_if_exists(lambda: read_or_default(load, None))


def read_if_exists(load: Callable[[], Form]) -> Form | None:
    """Return what `load` returns; None when that is not there."""
    try:
        return load()
    except NotFoundError:
        return None


def report_damage(text: str, damaged: list[str] | None = None) -> None:
    """Add what cannot be used to `damaged`, or else warn of it."""
    if damaged is None:
        warn_once(log, f"{text}; left out")
    else:
        damaged.append(text)


def adapter(form: Any) -> "TypeAdapter[Any]":
    """Return what checks and makes values of a form."""
    with _building:  # takes milliseconds the first time, which the many threads of a listing need not all spend
        return _build(form)


def as_event(form: type[Form], event: Any) -> Form | None:
    """Return an event of a run in its `form`; None when it is malformed."""
    try:
        return adapter(form).validate_python(event)
    except ValueError:
        return None


_building = threading.Lock()


@functools.cache
def _build(form: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # slow to import, and help does without

    return TypeAdapter(form)


def _describe(error: Any) -> str:
    """Return the first fault that pydantic found."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    return f"{field}: {fault['msg']}" if field else str(fault["msg"])
