"""What a run may never change, as `run.json` keeps it: the settings that give its steps their meaning, and its data."""

from collections.abc import Iterable, Mapping

from app.errors import ConflictError, NotFoundError
from app.run import Run, to_json
from app.settings import PREFIX, differences


def keep_identity(
    run: Run,
    environment: Mapping[str, str],
    names: Iterable[str],
    data: str = "",
    rows: int = 0,
    steps_per_epoch: int = 0,
) -> None:
    """Record what a run may never change; raise `ConflictError`, with a diff, when it was begun with other values.

    `environment` has all settings by variable, of which the run keeps those called `names`; `data` identifies the rows.
    """
    identity = {variable: environment[variable] for variable in _variables(names)}
    record = {"settings": identity, "data": data, "rows": rows, "steps_per_epoch": steps_per_epoch}
    if run.storage.create(run.key("run.json"), to_json(record)):
        return
    refuse_other_settings(run, environment, names)
    begun = run.read_json("run.json")
    if begun["data"] != data:
        where = f"the data behind {environment[PREFIX + 'DATASET']}"
        refuse_changes(run, [f"{where}: {begun['rows']} rows -> {rows} rows, or other files"])


def refuse_other_settings(run: Run, environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise `ConflictError` when the run was begun with other values of these settings, or keeps more of them."""
    try:
        begun = run.read_json("run.json")["settings"]
    except NotFoundError:
        return
    kept = dict.fromkeys([*begun, *_variables(names)])
    refuse_changes(run, differences(begun, {name: environment[name] for name in kept if name in environment}))


def refuse_changes(run: Run, changed: list[str]) -> None:
    """Raise `ConflictError` when anything has changed; a line each (`settings.differences`)."""
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ConflictError(
            f"{run.location} was begun with other settings, and going on would mix two runs:\n{lines}\n"
            f"set them back, or choose another {PREFIX}RUN_NAME"
        )


def _variables(names: Iterable[str]) -> list[str]:
    return [PREFIX + name.upper() for name in names]
