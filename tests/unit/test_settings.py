"""Tests of settings: all problems are reported together, each with its variable and fix, and without importing
torch."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunspot.cli import VERBS, make_parser
from sunspot.errors import SettingsError
from sunspot.settings import (
    FIELDS,
    PREFIX,
    JobContext,
    Settings,
    WorkerRange,
    describe_settings,
    differences,
    load_settings,
)
from sunspot.spelling import OTHER_CHECKPOINT_VERBS, OTHER_SETTINGS, OTHER_VERBS, SUBMIT_OPTIONS
from sunspot.submitter.manifest.render import JobRequest, render
from tests.harness import REPOSITORY

CONTRACT = {
    "TASK": "sunspot.tasks.mnist",
    "RUN_NAME": "mnist",
    "TASK_ARGS": "{}",
    "INIT_FROM": "",
    "STORAGE_PATH": "runs",
    "DATASET": "sample",
    "TEST_DATASET": "",
    "DATA_ROOT": "data",
    "LOADER": "torch",
    "NUM_WORKERS": "2",
    "USE_GPU": "auto",
    "EPOCHS": "2",
    "MAX_STEPS": "0",
    "GLOBAL_BATCH_SIZE": "128",
    "MICRO_BATCH_SIZE": "0",
    "LEARNING_RATE": "0.001",
    "SEED": "0",
    "PRECISION": "fp32",
    "PARALLEL": "ddp",
    "CHECKPOINT_EVERY_STEPS": "0",
    "CHECKPOINT_EVERY_S": "60.0",
    "CHECKPOINTS_TO_KEEP": "3",
    "CHECKPOINT_METRIC": "loss",
    "CHECKPOINT_ORDER": "min",
    "MAX_FAILURES": "3",
    "AUDIT": "false",
    "WARMUP_STEPS": "0",
    "SCHEDULE": "linear",
    "CLIP_NORM": "0.0",
    "WEIGHT_DECAY": "0.0",
    "COMPILE": "off",
}


def test_the_defaults_of_the_settings_have_not_changed() -> None:
    environment = load_settings().environment()
    assert {name: environment[PREFIX + name] for name in CONTRACT} == CONTRACT


def test_all_invalid_settings_are_reported_at_once_without_importing_torch_or_ray() -> None:
    wrong = {
        "SUNSPOT_EPOCHS": "two",
        "SUNSPOT_NUM_WORKERS": "8..2",
        "SUNSPOT_TASK_ARGS": "[1]",
        "SUNSPOT_LERNING_RATE": "0.1",
    }
    check = (
        "import sys, runpy\n"
        "try: runpy.run_module('sunspot.train', run_name='__main__')\n"
        "finally: print('imported', sorted({'torch', 'ray', 'numpy', 'pyarrow'} & sys.modules.keys()))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", check], env={**os.environ, **wrong}, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert answer.returncode == 2
    assert "4 problems" in answer.stderr
    for line in (
        "SUNSPOT_EPOCHS=two: set it to an integer >= 1",
        "SUNSPOT_NUM_WORKERS=8..2: set it to an integer >= 1, such as 4, or a range, such as 2..8",
        'SUNSPOT_TASK_ARGS=[1]: set it to a JSON object, e.g. {"width": 64}',
        "SUNSPOT_LERNING_RATE: no such setting; did you mean SUNSPOT_LEARNING_RATE?",
    ):
        assert line in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == "imported []\n"


def test_settings_reserved_for_manifests_are_validated_but_not_listed_for_users() -> None:
    settings = load_settings({"EPOCHS": "3", "NOTICE_S": "30", "PRICES": '{"head": {"price": 1}}', "JOB_ID": "one"})
    assert (settings.epochs, settings.job.notice_s, settings.job.prices["head"].price) == (3, 30, 1.0)
    assert load_settings(settings.environment()) == settings
    with pytest.raises(SettingsError, match="3 problems in the settings") as refused:
        load_settings({"EPOCHS": "two", "NODES_TIMEOUT_S": "0", "NODE_GROUPS": '[{"name": "a"}]'})
    for line in (
        "SUNSPOT_EPOCHS=two: ",
        "SUNSPOT_NODES_TIMEOUT_S=0: set it to seconds above 0",
        "SUNSPOT_NODE_GROUPS=",
    ):
        assert line in str(refused.value)
    listed = {setting.variable for setting in describe_settings()}
    assert listed == {PREFIX + name for name in map(str.upper, FIELDS.keys() - JobContext.model_fields.keys())}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("EPOCS", "did you mean SUNSPOT_EPOCHS?"),
        ("lr", "did you mean SUNSPOT_LEARNING_RATE?"),
        ("BATCH_SIZE", "did you mean SUNSPOT_GLOBAL_BATCH_SIZE?"),
        ("DEVICE", "did you mean SUNSPOT_USE_GPU?"),
        ("EARLY", "did you mean SUNSPOT_EARLY_STOP_EVALUATIONS?"),
        ("QUEUE", "it is an option of `sunspot submit`: --queue"),
        ("XYZZY", "`python -m sunspot.train --help` lists all settings"),
    ],
)
def test_the_error_for_an_unknown_setting_contains_a_hint(name: str, hint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({name: "1"})
    assert str(refused.value).endswith(f"\n  SUNSPOT_{name.upper()}: no such setting; {hint}")


@pytest.mark.parametrize("file", ["my_task.py", "tasks/my_task.py"])
def test_the_error_for_a_task_given_as_a_file_path_suggests_its_module(file: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"TASK": file})
    assert str(refused.value).endswith(f"SUNSPOT_TASK={file}: set it to a module, without .py: SUNSPOT_TASK=my_task")


BARE = re.compile(rf"(?<![\w.])(?:{'|'.join(name.upper() for name in FIELDS)})(?!\w)")

TYPED_BARE = {
    "file.py",
    "profile.py",
    "arguments.py",
    "command_arguments.py",
    "task_file.py",
    "absent_code.py",
}
"""Files with messages that quote settings as users type them where no prefix is needed."""


def find_bare_names(tree: ast.Module) -> Iterator[str]:
    """Yield a module's strings that name a setting without the prefix. Docstrings are exempt."""
    nodes = [*ast.walk(tree)]
    documentation = {
        id(node.value)
        for owner in nodes
        if isinstance(owner, (ast.Module, ast.ClassDef, ast.FunctionDef))
        for node in owner.body
        if isinstance(node, ast.Expr)
    }
    prefixed = set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            prefixed |= {id(after) for before, after in pairwise(node.values) if isinstance(before, ast.FormattedValue)}
        if isinstance(node, ast.BinOp):
            prefixed.add(id(node.right))
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
            continue
        text = BARE.sub("", node.value, count=1) if BARE.match(node.value) and id(node) in prefixed else node.value
        if BARE.search(text) and not BARE.fullmatch(text):
            yield f"line {node.lineno}: {text}"


def test_messages_and_help_name_settings_by_their_environment_variables() -> None:
    for path in sorted((REPOSITORY / "app").rglob("*.py")):
        text = path.read_text()
        if path.name not in TYPED_BARE and BARE.search(text):
            assert [*find_bare_names(ast.parse(text))] == [], path
    described = [f"{setting.meaning} {setting.takes}" for setting in describe_settings()]
    assert [text for text in described if BARE.search(text)] == []


def test_names_used_by_other_programs_are_mapped_to_existing_settings_and_commands() -> None:
    settings = {name.upper() for name in FIELDS}
    assert {*OTHER_SETTINGS.values()} <= settings
    assert not (OTHER_SETTINGS.keys() | {*SUBMIT_OPTIONS}) & settings
    assert {*OTHER_VERBS.values()} <= {*VERBS, "--help", "--version"}
    assert {f"checkpoints {verb}" for verb in OTHER_CHECKPOINT_VERBS.values()} <= {*VERBS}
    assert not OTHER_VERBS.keys() & VERBS.keys()
    submit: Any = make_parser().verbs.choices["submit"]
    assert {f"--{name.lower()}" for name in SUBMIT_OPTIONS} <= submit._option_string_actions.keys()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RUN_NAME", "Mnist"),
        ("RUN_NAME", "a" * 39),
        ("RUN_NAME", "ends-"),
        ("STORAGE_PATH", "gcs://bucket"),
        ("STORAGE_PATH", "s3://"),
        ("NUM_WORKERS", "0"),
        ("NUM_WORKERS", "2.."),
        ("GLOBAL_BATCH_SIZE", "1"),
        ("LEARNING_RATE", "nan"),
        ("LEARNING_RATE", "0"),
        ("WARMUP_STEPS", "1.5"),
        ("WARMUP_STEPS", "nan"),
        ("CHECKPOINT_EVERY_S", "-1"),
        ("CHECKPOINTS_TO_KEEP", "0"),
        ("RESOURCES_PER_WORKER", "CPU=1"),
        ("SEED", "-1"),
        ("TASK", "my task"),
        ("USE_GPU", "maybe"),
        ("AUDIT", "perhaps"),
        ("TEST_DATASET", "rows.parquet"),
    ],
)
def test_an_error_about_a_setting_shows_the_invalid_value(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match="1 problem in the settings") as refused:
        load_settings({variable: value})
    assert f"SUNSPOT_{variable}={value}: " in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("TASK_ARGS", '{"api_key": "canary"}', "seems to contain a credential, because of the name api_key"),
        (
            "TASK_ARGS",
            '{"hub": {"auth_token": "canary"}}',
            "seems to contain a credential, because of the name hub.auth_token",
        ),
        ("TASK_ARGS", '{"login": "hf_canary' + "kJ3xQ9mZ2pL7vB4nT8wR5yH6dF1s" + '"}', "contains a Hugging Face token"),
        ("TASK_ARGS", '{"db": "mysql://me:canary@host/db"}', "contains a password in a URL"),
        ("INIT_FROM", "https://me:canary@host/weights.pt", "contains a password in a URL"),
        ("STORAGE_PATH", "s3://key:canary@bucket/runs", "contains a password in a URL"),
        ("DATASET", "s3://key:canary@bucket/rows", "contains a password in a URL"),
        ("LABELS", '{"api_key": "canary"}', "seems to contain a credential, because of the name api_key"),
    ],
)
def test_a_setting_that_contains_a_credential_is_rejected(variable: str, value: str, told: str) -> None:
    """Check local training and `render`, which read the settings through the same function as `submit`."""
    with pytest.raises(SettingsError, match="1 problem in the settings") as refused:
        load_settings({variable: value})
    assert f"SUNSPOT_{variable} {told}; settings are stored with the run" in str(refused.value)
    assert "env_secrets in a profile" in str(refused.value)
    assert "canary" not in str(refused.value)
    with pytest.raises(SettingsError, match=told):
        render(JobRequest(settings={"STORAGE_PATH": "s3://bucket/runs", variable: value}))


def test_arguments_without_credentials_are_accepted() -> None:
    arguments = {
        "max_tokens": 512,
        "tokenizer": "byte",
        "author": "me",
        "key_dim": 64,
        "bypass": "yes",
        "pad_token": "<p>",
    }
    assert load_settings({"TASK_ARGS": json.dumps(arguments)}).task_args == arguments
    for name, place in (("STORAGE_PATH", "az://runs/a"), ("DATASET", "/data/a@b:c"), ("INIT_FROM", "s3://b/a@sha:1")):
        assert load_settings({name: place}).model_dump()[name.lower()] == place


def test_overrides_take_precedence_over_the_environment_with_or_without_the_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SUNSPOT_EPOCHS", "5")
    monkeypatch.setenv("SUNSPOT_SEED", "")
    assert load_settings().epochs == 5
    assert load_settings().seed == 0, "an empty variable is an unset one"
    assert load_settings({"EPOCHS": "6", "SUNSPOT_SEED": "7"}).environment().items() >= {
        ("SUNSPOT_EPOCHS", "6"),
        ("SUNSPOT_SEED", "7"),
    }


@given(st.integers(1, 99), st.integers(0, 99), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3))
def test_settings_survive_a_round_trip_through_the_environment(
    least: int, more: int, task_args: dict[str, int]
) -> None:
    settings = Settings(num_workers=WorkerRange(least, least + more), task_args=task_args, audit=True)
    assert load_settings(settings.environment()) == settings


def test_comparing_settings_lists_the_changed_values() -> None:
    assert differences({"A": "1", "B": "2"}, {"A": "1", "B": "3", "C": "4"}) == ["B: 2 -> 3", "C: (unset) -> 4"]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' * 100 + "1" + "}" * 100, '{"a": ' + "9" * 5000]
)
def test_json_nested_too_deeply_or_with_too_many_digits_is_rejected(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"TASK_ARGS": text})
    assert "SUNSPOT_TASK_ARGS={" in str(refused.value) or "SUNSPOT_TASK_ARGS=[" in str(refused.value)
    assert "set it to a JSON object" in str(refused.value)
    assert len(str(refused.value)) < 500, "a wrong value is cut"


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", "A", "x" * 39])
def test_the_init_from_setting_rejects_an_invalid_run_name(name: str) -> None:
    assert load_settings({"INIT_FROM": "run:other-1"}).init_from == "run:other-1"
    with pytest.raises(SettingsError, match="set it to run:NAME"):
        load_settings({"INIT_FROM": f"run:{name}"})


def test_undecodable_bytes_in_a_setting_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUNSPOT_TASK", os.fsdecode(b"sunspot.\xff"))
    told = r"SUNSPOT_TASK=sunspot\.\\udcff: it contains bytes that are not valid in this process's encoding, utf-8; "
    with pytest.raises(SettingsError, match=told):
        load_settings()


TRAINING = (
    *("global_batch_size", "micro_batch_size", "learning_rate", "schedule", "warmup_steps", "weight_decay"),
    *("clip_norm", "ema", "precision", "gradient_precision", "compile", "graph", "parallel", "recompute"),
    *("loader", "weights"),
)
"""Settings of Sunspot's own training loop, which another library might ignore."""

READ_BY_ADAPTERS = {
    "boosted_trees": {"weights"},
    "keras": {"global_batch_size", "learning_rate", "loader", "schedule", "warmup_steps"},
    "lightning": {
        *("global_batch_size", "micro_batch_size", "learning_rate", "warmup_steps", "weight_decay", "clip_norm", "ema"),
        *("precision", "gradient_precision", "recompute", "loader", "weights"),
    },
    "transformers": {
        *("global_batch_size", "micro_batch_size", "learning_rate", "warmup_steps", "weight_decay", "ema", "precision"),
        "weights",
    },
}


@pytest.mark.parametrize("adapter", READ_BY_ADAPTERS)
def test_each_adapter_reads_or_rejects_every_setting_of_the_training_loop(adapter: str) -> None:
    program = ast.parse((REPOSITORY / f"app/sunspot/adapters/{adapter}.py").read_text())
    [unread] = [
        statement
        for statement in program.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "UNREAD_SETTINGS"
    ]
    words = [each.value for each in ast.walk(unread) if isinstance(each, ast.Constant)]
    assert READ_BY_ADAPTERS[adapter] == set(TRAINING) - set(words)
