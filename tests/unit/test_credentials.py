"""Tests that recognize credentials by their form and by argument names, and accept text that only looks similar."""

from __future__ import annotations

import pytest

from sunspot.credentials import find_credential, find_credential_arguments

RANDOM = "kJ3xQ9mZ2pL7vB4nT8wR5yH6dF1sG0cAuE" * 4
"""Random characters from which the tests build credentials, so that this file contains none."""

HEX = "9f3a07c1e5b2846d" * 4

BASE32 = "K3TQ7MZ2PLXVB4NR"

BEGIN = "-----BEGIN "


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (f"{BEGIN}RSA PRIVATE KEY-----\n{RANDOM[:64]}\n", "a private key"),
        (
            f"{BEGIN}OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtz\n",
            "a private key",
        ),
        (f"{BEGIN}PRIVATE KEY-----\r\nMIGHAgEAMBMG{RANDOM[:52]}\r\n", "a private key"),
        (f'{{"private_key": "{BEGIN}PRIVATE KEY-----\\nMIIE{RANDOM[:60]}\\n"}}', "a private key"),
        (
            f"{BEGIN}RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A\n\n{RANDOM[:64]}",
            "a private key",
        ),
        (f"{BEGIN}PGP PRIVATE KEY BLOCK-----\n\nlQdG{RANDOM[:60]}\n", "a private key"),
        (f'KEY = ("{BEGIN}EC PRIVATE KEY-----\\n"\n    "MHcC{RANDOM[:60]}")', "a private key"),
        (f"key = 'AKIA{BASE32}'", "an AWS access key"),
        (f"aws_secret_access_key = {RANDOM[:40]}", "an AWS secret key"),
        (f"https://ghp_{RANDOM[:36]}@github.com/me/mine", "a GitHub token"),
        (f"github_pat_{RANDOM[:22]}_{RANDOM[:59]}", "a GitHub token"),
        (f"login('hf_{RANDOM[:34]}')", "a Hugging Face token"),
        (f"sk-proj-{RANDOM[:48]}", "an OpenAI or Anthropic token"),
        (f"AIza{RANDOM[:35]}", "a Google API key"),
        (f"https://hooks.slack.com/services/T0{HEX[:8]}/B0{HEX[:8]}/{RANDOM[:24]}", "a Slack webhook"),
        (f'{{"auths": {{"ghcr.io": {{"auth": "{RANDOM[:32]}"}}}}}}', "a registry login"),
        (f"    client-key-data: {RANDOM[:64]}\n", "a Kubernetes key"),
        (f"AccountName=me;AccountKey={RANDOM[:86]}==;", "an Azure account key"),
        (f"dapi{HEX[:32]}", "a Databricks token"),
    ],
)
def test_a_credential_is_recognized_by_its_form(text: str, form: str) -> None:
    found = find_credential(f"# a comment\n{text}\n")
    assert found is not None
    assert (found.form, found.line) == (form, 2)


@pytest.mark.parametrize(
    "text",
    [
        f'if "{BEGIN}PRIVATE KEY-----" in text:\n    raise SettingsError("it holds a private key")',
        f'FAKE = "{BEGIN}PRIVATE KEY-----\\nnot a key\\n-----END PRIVATE KEY-----"',
        f"{BEGIN}PUBLIC KEY-----\n{RANDOM[:64]}\n",
        "AKIAIOSFODNN7EXAMPLE",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "aws_secret_access_key = os.environ['AWS_SECRET_ACCESS_KEY']",
        'token = "ghp_' + "a" * 36 + '"',
        'token = "ghp_' + "0123456789abcdefghijklmnopqrstuvwxyz" + '"',
        r'PATTERN = re.compile(r"hf_[A-Za-z]{30,}|ghp_[A-Za-z0-9]{36}|AKIA[0-9A-Z]{16}")',
        "from transformers import hf_argument_parser_and_more_names_with_words",
        ".sk-estimator-doc-link-to-the-documentation-of-it {}",
        "the task-" + RANDOM[:40],
        f'{{"image/png": "{RANDOM}AKIA{RANDOM}"}}',
        '{"auths": {}}',
        f"login('hf_{RANDOM[:34]}')  # pragma: allowlist secret",
        f"login('hf_{RANDOM[:34]}')  # gitleaks:allow",
        "",
    ],
)
def test_text_that_only_looks_like_a_credential_is_accepted(text: str) -> None:
    assert find_credential(text) is None


def test_the_first_credential_without_an_allow_comment_is_reported() -> None:
    made_up = "AKIAIOSFODNN7EXAMPLE\n"
    assert find_credential(f"{made_up}hf_{RANDOM[:34]}\nAKIA{BASE32}\n") == ("a Hugging Face token", 2)
    assert find_credential(f"{made_up}AKIA{BASE32}\n") == ("an AWS access key", 2)


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apiKey", "API-KEY", "openai_api_key", "access_key", "secret_key", "account_key", "private_key"),
        *(
            "token",
            "hf_token",
            "use_auth_token",
            "access_token",
            "sessionToken",
            "password",
            "db_password",
            "smtp_pass",
        ),
        *("mysql_pwd", "passphrase", "secret", "client_secret", "sentry_dsn", "sas", "slack_webhook_url", "github_pat"),
        *("connection_string",),
    ],
)
def test_a_credential_argument_is_recognized_by_its_name(name: str) -> None:
    assert list(find_credential_arguments({"model": {name: "word"}, "width": 3})) == [f"model.{name}"]
    assert list(find_credential_arguments({name: ["word"]})) == [name]


@pytest.mark.parametrize(
    "name",
    [
        *("max_tokens", "tokenizer", "pad_token", "eos_token", "mask_token", "image_key", "label_key", "sort_key"),
        *("key_dim", "key", "num_keys", "author", "authors", "bypass", "compass", "forward_pass", "file_pat", "path"),
        *("keyboard", "monkey", "secretary", "api_key_variable", "passes", "tokens", "auth", "auth_mode", "sasrec"),
    ],
)
def test_an_ordinary_argument_is_not_a_credential(name: str) -> None:
    assert list(find_credential_arguments({name: "some_word_2"})) == []


def test_only_string_arguments_can_be_credentials() -> None:
    assert list(find_credential_arguments({"use_auth_token": True, "secret": "", "api_key": None, "token": 3})) == []
