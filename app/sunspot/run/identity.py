"""The identity of a run: its rows, their order, and the settings that define its steps.

An identity cannot change, except that a new row order can be accepted with ACCEPT.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from sunspot.errors import ConflictError
from sunspot.run import Run
from sunspot.run.objects import Count, read_if_exists, read_verified, with_checksum

log = logging.getLogger(__name__)

FILE = "run.json"


@dataclass(frozen=True)
class SourceRows:
    """A source of a mixture (`sunspot.settings.mixture`)."""

    name: str
    rows: Count
    weight: Count


@dataclass(frozen=True)
class Rows:
    """The identity of a run's rows and of their order."""

    data: str
    "The fingerprint of the rows (`sunspot.data.source.Source`)."
    rows: Count
    steps_per_epoch: Count
    order: str
    "The checksum of the row order (`sunspot.data.order.Order`)."
    shuffled_by: str
    "The library that shuffled the rows, such as `NumPy 2.1.0`."
    sources: tuple[SourceRows, ...] = ()
    "The sources of a mixture, in the order of their row IDs. Empty for a single dataset."


@dataclass(frozen=True)
class Identity:
    """The settings and rows that a run began with. Only the row order can be replaced later."""

    settings: dict[str, str]
    "Values of the identity settings, keyed by environment variable."
    rows: Rows | None = None
    "The run's rows, or None for a search, because only its trials have rows."


def read_identity(run: Run) -> Identity:
    """Return the identity of a run.

    Raises `NotFoundError` if the run has not begun, and `DamageError` if its identity is damaged.
    """
    return read_verified(run, Identity, FILE)


def record_identity(run: Run, environment: Mapping[str, str], names: Iterable[str], rows: Rows | None = None) -> None:
    """Record the identity of a run: `rows`, and the settings `names` with their values in `environment`.

    Raises `ConflictError` with a diff if the run began with a different identity, and `DamageError` if the recorded
    identity is damaged. If ACCEPT accepts a new row order, the recorded order is replaced.
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
        log.warning(f"from now on, the rows have a different order ({change})")
        run.storage.write(run.key(FILE), with_checksum(asdict(replace(identity, rows=rows))))
        return
    raise ConflictError(
        f"{run.location}: the rows are now shuffled differently than when the run began ({change}), so the rest of "
        f"the epoch would repeat some rows and skip others. Continue with {begun.shuffled_by}, or accept the new order "
        f"with {PREFIX}ACCEPT={name}"
    )


def refuse_other_settings(run: Run, environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise `ConflictError` if a setting has different values in `environment` and in the run's identity.

    The compared settings are those in the identity and those listed in `names`. If the identity lacks a setting, the
    run began with a version without this setting, so the setting counts as having its default value. Does nothing if
    the run has not begun.
    """
    from sunspot.settings import Settings, differences

    identity = read_if_exists(lambda: read_identity(run))
    if identity is None:
        return
    kept = dict.fromkeys([*identity.settings, *_variables(names)])
    given = {name: environment[name] for name in kept if name in environment}
    defaults = Settings().environment()
    begun = {name: defaults[name] for name in kept if name in defaults} | identity.settings
    refuse_changes(run, differences(begun, given))


def refuse_changes(run: Run, changed: list[str]) -> None:
    """Raise `ConflictError` if `changed`, the result of `settings.differences`, is not empty."""
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConflictError(
            f"{run.location} was started with different settings:\n{lines}\n"
            "Continuing would mix two runs: a run cannot continue with a different task, or with different data, "
            "mixture weights, seeds or batch sizes. Restore the settings, or choose another SUNSPOT_RUN_NAME (the new "
            f"run can begin with this run's model: SUNSPOT_INIT_FROM=run:{run.name})"
        )


def _variables(names: Iterable[str]) -> list[str]:
    from sunspot.settings import PREFIX

    return [PREFIX + name.upper() for name in names]
