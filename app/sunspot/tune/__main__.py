"""The entry point `python -m sunspot.tune`."""

from sunspot.command_line import CommandParser
from sunspot.errors import run_and_exit
from sunspot.log import print_logs
from sunspot.ray_internals.job import end_for_good
from sunspot.settings import SETTING_NAMES
from sunspot.tune.search import main

DESCRIPTION = """\
Train several runs with settings drawn from a search space, and keep the checkpoint of the best run.
Settings with an expression as their value form the search space: SUNSPOT_LEARNING_RATE=loguniform(1e-4,1e-2)"""

if __name__ == "__main__":
    print_logs()
    CommandParser("python -m sunspot.tune", DESCRIPTION, SETTING_NAMES).parse_args()
    run_and_exit(
        end_for_good(main), "interrupted: the trials' checkpoints are safe; the same command resumes the search"
    )
