"""`python -m sunspot.train`: trains the run that the SUNSPOT_ settings describe, starting from its newest state."""

import os
from collections.abc import Sequence

from sunspot.command_line import CommandParser
from sunspot.errors import SettingsError, run_and_exit
from sunspot.log import print_logs
from sunspot.machine.stop_signals import raise_end_signals
from sunspot.ray_internals.job import end_for_good
from sunspot.settings import PREFIX, SETTING_NAMES, load_settings
from sunspot.settings.search_space import find_dimensions
from sunspot.tracking.process import refuse_unusable
from sunspot.train.driver import train_run


def main(words: Sequence[str] | None = None) -> int:
    """Read the settings, and train the run that they describe."""
    CommandParser(
        "python -m sunspot.train",
        "Train the run that the settings describe, from its newest state.",
        SETTING_NAMES,
    ).parse_args(words)
    space = find_dimensions(os.environ)
    if space:
        given = ", ".join(f"{PREFIX}{dimension.name}={dimension.text}" for dimension in space)
        raise SettingsError(
            f"{given}: a run needs a single value for each setting; use `sunspot tune` to try several values"
        )
    settings = load_settings()
    print_logs()
    refuse_unusable(settings)
    train_run(settings)
    return 0


if __name__ == "__main__":
    if not os.environ.get(f"{PREFIX}JOB_ID"):  # on a cluster, a killed driver counts as lost and starts again
        raise_end_signals()
    run_and_exit(
        end_for_good(main),
        "interrupted: committed checkpoints are safe; the same command continues from the newest one",
    )
