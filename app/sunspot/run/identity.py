"""The identity of a run: the settings that define its steps, its rows and their order, which may never change."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from sunspot.errors import ConflictError
from sunspot.run import Run
from sunspot.run.objects import Count, read_if_exists, read_verified, with_checksum

log = logging.getLogger(__name__)

FILE = "run.json"


@dataclass(frozen=True)
class Rows:
    """The identity of a run's rows, and of the order in which the run visits them."""

    data: str
    "Fingerprint of the rows (`sunspot.data.source.Source`)."
    rows: Count
    steps_per_epoch: Count
    order: str
    "Checksum of the order of the rows (`sunspot.data.order.Order`)."
    shuffled_by: str
    "Library that made the order, as readable text: NumPy and its version."


@dataclass(frozen=True)
class Identity:
    """The settings and rows with which a run was begun, and which it may never change."""

    settings: dict[str, str]
    "Values of the identity settings, by environment variable."
    rows: Rows | None = None
    "Rows of the run. None for a search, because only its trials have rows."


def read_identity(run: Run) -> Identity:
    """Return the identity of a run. Raises `NotFoundError` before its driver has begun, and `DamageError`."""
    return read_verified(run, Identity, FILE)


def record_identity(run: Run, environment: Mapping[str, str], names: Iterable[str], rows: Rows | None = None) -> None:
    """Record the identity of a run. Raises `ConflictError` with a diff if the run was begun with another one.

    `environment` has all settings by variable. The settings called `names` belong to the identity. A search has no
    `rows`. If ACCEPT names another order of the rows, that order replaces the recorded one. Raises `DamageError`.
    """
    settings = {variable: environment[variable] for variable in _variables(names)}
    if run.storage.create(run.key(FILE), with_checksum(asdict(Identity(settings, rows)))):
        return
    refuse_other_settings(run, environment, names)
    if rows:
        _keep_rows(run, read_identity(run), rows, environment)


def _keep_rows(run: Run, identity: Identity, rows: Rows, environment: Mapping[str, str]) -> None:
    from sunspot.settings import PREFIX, accepts  # pydantic is slow to import, and most verbs do not need it

    begun = identity.rows
    if begun is None:
        return
    if begun.data != rows.data:
        where = f"the data behind {environment[PREFIX + 'DATASET']}"
        refuse_changes(run, [f"{where}: {begun.rows} rows -> {rows.rows} rows, or other content"])
    if begun.order == rows.order:
        return
    change = f"{begun.shuffled_by} -> {rows.shuffled_by}"
    name = f"order-{rows.order}"
    if accepts(environment, name):
        log.warning(f"from here on, the rows come in another order ({change})")
        run.storage.write(run.key(FILE), with_checksum(asdict(replace(identity, rows=rows))))
        return
    raise ConflictError(
        f"{run.location}: its seed now gives another order of the rows than at its beginning ({change}), so the rest "
        f"of the epoch would repeat some rows and leave out others. Continue with {begun.shuffled_by}, or accept the "
        f"new order with {PREFIX}ACCEPT={name}"
    )


def refuse_other_settings(run: Run, environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise `ConflictError` if the run was begun with other values of these settings, or with other settings."""
    from sunspot.settings import differences

    identity = read_if_exists(lambda: read_identity(run))
    if identity is None:
        return
    kept = dict.fromkeys([*identity.settings, *_variables(names)])
    given = {name: environment[name] for name in kept if name in environment}
    refuse_changes(run, differences(identity.settings, given))


def refuse_changes(run: Run, changed: list[str]) -> None:
    """Raise `ConflictError` if there is a line on a changed setting (`settings.differences`)."""
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConflictError(
            f"{run.location} was begun with other settings, and continuing would mix two runs:\n{lines}\n"
            "restore the settings, or choose another SUNSPOT_RUN_NAME"
        )


def _variables(names: Iterable[str]) -> list[str]:
    from sunspot.settings import PREFIX

    return [PREFIX + name.upper() for name in names]
