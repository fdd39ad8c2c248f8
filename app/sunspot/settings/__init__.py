"""The settings of a run: their definitions, a search over them, and the file `sunspot.toml`.

`definitions.py` has one field for each setting, which is read from an environment variable (`fields.py`).
`job_context.py` has the environment variables that only a job's manifest sets. `file.py` reads settings from
`sunspot.toml`. `task_arguments.py` reads `SUNSPOT_TASK_ARGS`. `worker_range.py` defines the allowed numbers of
workers. `search_space.py` parses a search space, and draws the values of each trial.
"""

from sunspot.settings.definitions import (
    BUCKET_URLS,
    FIELDS,
    IDENTITY,
    PREFIX,
    READING_SHARE,
    RUN_NAME_LENGTH,
    SETTING_NAMES,
    Settings,
    accepts,
    cut,
    describe_settings,
    differences,
    load_settings,
    recorded_settings,
    refuse,
    setting_text,
    takes,
    variable_of,
    with_place,
)
from sunspot.settings.fields import parse_json
from sunspot.settings.job_context import HEAD, JobContext, NodeGroup, NodePrice
from sunspot.settings.worker_range import WorkerRange, choose_shard_degree, parse_workers

__all__ = [
    "BUCKET_URLS",
    "FIELDS",
    "HEAD",
    "IDENTITY",
    "PREFIX",
    "READING_SHARE",
    "RUN_NAME_LENGTH",
    "SETTING_NAMES",
    "JobContext",
    "NodeGroup",
    "NodePrice",
    "Settings",
    "WorkerRange",
    "accepts",
    "choose_shard_degree",
    "cut",
    "describe_settings",
    "differences",
    "load_settings",
    "parse_json",
    "parse_workers",
    "recorded_settings",
    "refuse",
    "setting_text",
    "takes",
    "variable_of",
    "with_place",
]
