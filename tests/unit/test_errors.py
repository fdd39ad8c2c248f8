"""Tests of errors: they hide credentials, make foreign text safe, and end a process with an exit code."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from sunspot.credentials import is_credential
from sunspot.errors import ConflictError, EndAtOnceError, SunspotError, shorten
from sunspot.storage import open_storage
from tests.harness import REPOSITORY
from tests.harness.constants import SetConstants

CANARY = "canary0123456789"


@pytest.mark.parametrize(
    "text",
    [
        f"Invalid header value b'{CANARY}\\n'",
        f'Could not connect to the endpoint URL: "http://user:{CANARY}@host:9000/bucket"',
        f"http://user:pa@{CANARY}@host",
        f"AWS4-HMAC-SHA256 Credential=AKIA/20261122/us-east-1/s3, SignedHeaders=host, Signature={CANARY}",
        f"https://bucket/key?X-Amz-Credential=AKIA&X-Amz-Signature={CANARY}&x=1",
        f"https://bucket/key?X-Amz-Security-Token={CANARY}",
        f"https://account.blob.core.windows.net/a?sv=2025-01-05&sig={CANARY}",
        f"{{'Authorization': 'Basic {CANARY}'}}",
        f"401 for Bearer {CANARY}",
    ],
)
def test_secrets_are_hidden_in_errors(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "header value" in text:
        monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY + "\n")
    assert CANARY not in str(SunspotError(text))
    assert CANARY not in shorten(ValueError(text))
    assert "***" in str(SunspotError(text))


@pytest.mark.parametrize("quoted", ["a/b+c\\=secret", "a%2Fb%2Bc%5C%3Dsecret", "a/b+c\\\\=secret"])
def test_a_secret_is_hidden_however_it_is_quoted(quoted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a/b+c\\=secret")
    assert str(SunspotError(f"refused: {quoted}")) == "refused: ***"


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "aws_secret_access_key", "PGPASSWORD", "AZURE_STORAGE_CONNECTION_STRING"),
        *("MYSQL_PWD", "GITHUB_PAT", "SMTP_PASS", "REDIS_PASSWD", "GPG_PASSPHRASE", "NPM_AUTH", "AZURE_STORAGE_SAS"),
        *("SENTRY_DSN", "SLACK_WEBHOOK_URL", "TEAMS_WEBHOOK", "ADMIN_PW", "DOCKER_CREDS"),
    ],
)
def test_a_secret_variable_is_recognized_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_credential(name, CANARY)
    assert is_credential("PLAIN", "hf_kJxQmZpLvBnTwRyH" + "dFsGcAuEkJxQmZpLvB"), "by the form of its value"
    monkeypatch.setenv(name, CANARY)
    assert str(SunspotError(f"refused: {CANARY}")) == "refused: ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("PWD", "/home/me/project"),
            ("OLDPWD", "/home/me/project"),
            ("MAX_TOKENS", "10000000"),
            ("TOKENIZER", "bytes"),
        ),
        *(("AUTHOR", "Somebody"), ("KEY_DIM", "64"), ("BYPASS", "10.0.0.0/8"), ("SSH_AUTH_SOCK", "/tmp/agent.1")),
        *(
            ("GIT_AUTHOR_NAME", "Somebody"),
            ("PATH", "/usr/bin:/bin"),
            ("SPAT", "somewhere"),
            ("RAY_AUTH_MODE", "disabled"),
        ),
        *(("DISABLE_AUTH", "true"), ("USE_TOKEN", "0"), ("PASSES", "two passes"), ("XSAS", "somewhere")),
    ],
)
def test_an_ordinary_variable_is_not_a_secret(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_credential(name, value)
    monkeypatch.setenv(name, value)
    assert str(SunspotError(f"refused: {value}")) == f"refused: {value}"


def test_ordinary_words_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "run")  # too short to distinguish from an ordinary word
    for text in (
        "no run run in s3://bucket/runs",
        "git@host:/path",
        "/mnt//a/b@c: not found",
        "the signature is wrong",
    ):
        assert str(SunspotError(text)) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_SESSION_TOKEN", f"{CANARY}\n"), ("AWS_SECRET_ACCESS_KEY", f"{CANARY} "), ("AWS_ACCESS_KEY_ID", "AKIA\n")],
)
def test_an_error_about_a_credential_with_a_newline_hides_its_value(
    name: str, value: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    try:
        open_storage(f"s3://{s3_bucket}").read("run.json")
    except SunspotError as error:
        said = str(error)
        assert CANARY not in said
        assert "Signature=***" in said or "Signature=" not in said
        if "cannot read" in said:
            assert f"{name} has surrounding white space" in said


def test_a_password_in_the_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{CANARY}@127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    set_constants("sunspot.storage.bucket", REQUEST_TRIES=1)
    with pytest.raises(SunspotError) as refused:
        open_storage("s3://bucket").read("run.json")
    assert CANARY not in str(refused.value)
    assert "check AWS_ENDPOINT_URL" in str(refused.value)


def test_secrets_are_hidden_in_the_traceback_of_a_bug() -> None:
    program = f"""
import os
os.environ["WANDB_API_KEY"] = "{CANARY}"
from sunspot.errors import run_and_exit
def fail():
    raise KeyError(os.environ["WANDB_API_KEY"], "\\x1b]0;title\\x07")
run_and_exit(fail)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "KeyError" in ended.stderr
    assert CANARY not in ended.stderr
    assert "\x1b" not in ended.stderr


def test_a_deleted_working_directory_is_reported() -> None:
    program = """
import os, tempfile
from pathlib import Path
from sunspot.errors import run_and_exit
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
run_and_exit(lambda: print(Path("runs").absolute()))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    told = "error: the working directory was deleted; change to another one\n"
    assert (ended.returncode, ended.stderr) == (2, told)


def test_a_second_interrupt_ends_the_process_without_waiting_for_threads_or_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = """
import threading, time
from sunspot.errors import EndAtOnceError, run_and_exit
def fail():
    threading.Thread(target=time.sleep, args=[60]).start()
    raise EndAtOnceError
run_and_exit(fail, "interrupted: it goes on from there")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (130, "interrupted: it goes on from there\n")
    ray = pytest.importorskip("ray")
    from sunspot.ray_session import ray_session

    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda name=name, **_: shut.append(name))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    shut: list[str] = []
    with pytest.raises(EndAtOnceError), ray_session():
        raise EndAtOnceError
    assert shut == ["init"], "a thread that waits for Ray would crash"
    with pytest.raises(KeyboardInterrupt), ray_session():
        raise KeyboardInterrupt
    assert shut == ["init", "init", "shutdown"]


def test_an_error_is_safe_for_a_terminal_and_can_be_pickled() -> None:
    error = ConflictError("begun by \x1b[31mred\x1b[0m \x1b]0;title\x07 \udcff and\rmore")
    assert str(error) == "begun by red \\x1b]0;title\\x07 \\udcff and\nmore"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (ConflictError, str(error))
