"""What a run may never change: the settings that give its steps their meaning, its rows, and their order."""

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
    """What identifies a run's rows, and the order in which it visits them."""

    data: str
    "Fingerprint of the rows (`sunspot.data.source.Source`)."
    rows: Count
    steps_per_epoch: Count
    order: str
    "Checksum of their order (`sunspot.data.order.Order`)."
    shuffled_by: str
    "What made that order, for people: NumPy and its version."


@dataclass(frozen=True)
class Identity:
    """What a run was begun with, and may never change."""

    settings: dict[str, str]
    "By variable."
    rows: Rows | None = None
    "None for a search, whose trials have rows."


def read_identity(run: Run) -> Identity:
    """Return what the run was begun with; raises `NotFoundError` before its driver has begun, and `DamageError`."""
    return read_verified(run, Identity, FILE)


def record_identity(run: Run, environment: Mapping[str, str], names: Iterable[str], rows: Rows | None = None) -> None:
    """Record what a run may never change; raise `ConflictError`, with a diff, when it was begun with other values.

    `environment` has all settings by variable, of which the run keeps those called `names`; a search has no `rows`.
    Another order of the rows is recorded in place of the old one when ACCEPT names it. Raises `DamageError`.
    """
    settings = {variable: environment[variable] for variable in _variables(names)}
    if run.storage.create(run.key(FILE), with_checksum(asdict(Identity(settings, rows)))):
        return
    refuse_other_settings(run, environment, names)
    if rows:
        _keep_rows(run, read_identity(run), rows, environment)


def _keep_rows(run: Run, identity: Identity, rows: Rows, environment: Mapping[str, str]) -> None:
    from sunspot.settings import PREFIX, accepts  # pydantic: slow to import, and most verbs do without

    begun = identity.rows
    if begun is None:
        return
    if begun.data != rows.data:
        where = f"the data behind {environment[PREFIX + 'DATASET']}"
        refuse_changes(run, [f"{where}: {begun.rows} rows -> {rows.rows} rows, or other content"])
    if begun.order == rows.order:
        return
    change = f"{begun.shuffled_by} -> {rows.shuffled_by}"
    if accepts(environment, name := f"order-{rows.order}"):
        log.warning(f"the rows come in another order from here on ({change})")
        run.storage.write(run.key(FILE), with_checksum(asdict(replace(identity, rows=rows))))
        return
    raise ConflictError(
        f"{run.location}: its seed gives another order of the rows than when it was begun ({change}), so an epoch that "
        f"goes on would repeat some rows and leave out others. Go on with {begun.shuffled_by}, or accept that for "
        f"the epoch under way with {PREFIX}ACCEPT={name}"
    )


def refuse_other_settings(run: Run, environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise `ConflictError` when the run was begun with other values of these settings, or keeps more of them."""
    from sunspot.settings import differences

    identity = read_if_exists(lambda: read_identity(run))
    if identity is None:
        return
    kept = dict.fromkeys([*identity.settings, *_variables(names)])
    given = {name: environment[name] for name in kept if name in environment}
    refuse_changes(run, differences(identity.settings, given))


def refuse_changes(run: Run, changed: list[str]) -> None:
    """Raise `ConflictError` when anything has changed; a line each (`settings.differences`)."""
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConflictError(
            f"{run.location} was begun with other settings, and going on would mix two runs:\n{lines}\n"
            "set them back, or choose another SUNSPOT_RUN_NAME"
        )


def _variables(names: Iterable[str]) -> list[str]:
    from sunspot.settings import PREFIX

    return [PREFIX + name.upper() for name in names]
