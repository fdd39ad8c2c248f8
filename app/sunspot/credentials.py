"""Recognizes credentials, as secret scanners do.

A credential is recognized by its form, or by the name of the variable or argument that contains it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

URL_PASSWORD = re.compile(r"//[^\s/@]*:[^\s/@]+@")
"""Pattern of a password in a URL."""

CREDENTIAL = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CONNECTION_STRING)$"
    r"|[A-Z0-9]_(PASS|PW|PWD|PAT|AUTH|SAS|DSN|CREDS|WEBHOOK|WEBHOOK_URL)$"
)
"""Pattern of environment variables that contain a secret. The shell's PWD and OLDPWD do not match."""

NO_SECRETS = {"0", "1", "true", "false", "yes", "no", "on", "off"}
"""Values of switches such as DISABLE_AUTH."""

ARGUMENT = r"""(^|_)(
        PASSWORD | PASSWD | PASSPHRASE | PWD | SECRET | DSN | SAS | CONNECTION_STRING | WEBHOOK(_URL)?
      | (ACCESS|ACCOUNT|ADMIN|API|AUTH|CLIENT|DATABASE|DB|ENCRYPTION|LICENSE|MASTER|PRIVATE|SECRET|SERVICE|SIGNING
         |SSH|STORAGE|SUBSCRIPTION)_?KEYS?
      | (ACCESS|API|AUTH|BEARER|BOT|GITHUB|GITLAB|HF|HUB|HUGGINGFACE|HUGGING_FACE|JWT|PERSONAL|REFRESH|SAS|SECRET
         |SECURITY|SERVICE|SESSION|USER|WANDB)_?TOKENS?
      | (ADMIN|DATABASE|DB|LDAP|MYSQL|PROXY|REDIS|SMTP|USER)_PASS
      | (ADO|AZURE|GIT|GITHUB|GITLAB)_PAT
    )$ | ^TOKEN$"""
"""Names of arguments that contain a credential, as a verbose regular expression. Similar names such as `pad_token` or
`image_key` must not match. Like the patterns in FORMS, it is compiled on first use, because most commands import this
module."""

ALLOWED_LINE = re.compile(r"pragma: allowlist secret|gitleaks:allow")
"""Comments that make detect-secrets and gitleaks accept a line."""

MAX_LINE = 1000
"""Number of characters after the start of a credential in which ALLOWED_LINE is searched."""

PLACEHOLDER = re.compile(
    r"EXAMPLE|FAKE|DUMMY|PLACEHOLDER|REDACTED|CHANGE_?ME|YOUR|12345678|ABCDEFGH|(.)\1{5}", re.IGNORECASE
)
"""Pattern of made-up credentials, such as those in tests and documentation."""

MIN_ENTROPY_BITS = 3.0
"""Minimum entropy of a credential, in bits per character. gitleaks uses the same limit for most tokens."""


class Form(NamedTuple):
    """A kind of credential that can be recognized by its text."""

    name: str
    marker: str
    "Text that every such credential contains. Searching for it is fast."
    pattern: str
    "Regular expression of the credential."


FORMS = (
    Form(
        "a private key",
        "PRIVATE KEY",
        r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[A-Za-z-]{1,20}: [^\n]{1,100}\n|\\[nr]|[\s\"'+,\\]){1,60}[A-Za-z0-9+/=]{40}",
    ),
    Form("a PuTTY private key", "PuTTY-User-Key-File", r"PuTTY-User-Key-File-\d+: \S"),
    *(
        Form("an AWS access key", marker, rf"(?<![A-Za-z0-9]){marker}[A-Z2-7]{{16}}(?![A-Za-z0-9])")
        for marker in ("AKIA", "ASIA")
    ),
    Form(
        "an AWS secret key",
        "secret_access_key",
        r"secret_access_key[\"']?\s{0,9}[=:]\s{0,9}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    ),
    *(
        Form("a GitHub token", f"gh{kind}_", rf"(?<!\w)gh{kind}_[A-Za-z0-9]{{36,255}}(?!\w)")
        for kind in ("p", "o", "u", "s", "r")
    ),
    Form("a GitHub token", "github_pat_", r"(?<!\w)github_pat_\w{22,255}"),
    Form("a GitLab token", "glpat-", r"(?<!\w)glpat-[\w-]{20,255}"),
    Form("a Hugging Face token", "hf_", r"(?<!\w)hf_[A-Za-z0-9]{30,255}(?!\w)"),
    Form("an OpenAI or Anthropic token", "sk-", r"(?<![\w-])sk-(?:(?:ant|or|proj|svcacct)-[\w-]{20}|[A-Za-z0-9]{32})"),
    Form("a Google API key", "AIza", r"(?<!\w)AIza[\w-]{35}(?![\w-])"),
    Form("a Google client secret", "GOCSPX-", r"GOCSPX-[\w-]{28}"),
    Form("a Slack token", "xox", r"(?<!\w)xox[abeprs]-[\w-]{10,255}"),
    Form("a Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w+/B\w+/\w{20,99}"),
    Form("a Stripe key", "k_live_", r"(?<!\w)[rs]k_live_[A-Za-z0-9]{20,99}"),
    Form("an npm token", "npm_", r"(?<!\w)npm_[A-Za-z0-9]{36}(?!\w)"),
    Form("a PyPI token", "pypi-AgE", r"pypi-AgE[\w-]{50}"),
    Form("a Vault token", "hvs.", r"(?<!\w)hvs\.[\w-]{24}"),
    Form("a Databricks token", "dapi", r"(?<!\w)dapi[0-9a-f]{32}(?!\w)"),
    Form("an Azure account key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/]{80}"),
    Form("an Azure signature", "sig=", r"[?&]sig=[A-Za-z0-9%/+]{43}"),
    Form(
        "a registry login",
        '"auths"',
        r'"auths"\s{0,99}:\s{0,99}\{[^}]{0,999}"auth"\s{0,99}:\s{0,99}"[A-Za-z0-9+/=]{8}',
    ),
    Form("a Kubernetes key", "client-key-data", r"client-key-data[\"']?:\s{0,9}[\"']?[A-Za-z0-9+/=]{40}"),
)
"""Known forms of credentials, as documented by their issuers and used by gitleaks and GitHub's secret scanning."""


class FoundCredential(NamedTuple):
    """A credential found in a text."""

    form: str
    line: int
    "Line number, starting at 1."


def is_credential(name: str, value: str) -> bool:
    """Return True if an environment variable contains a secret, judging by its name or its value's form."""
    named = CREDENTIAL.search(name.upper()) and value.lower() not in NO_SECRETS
    return bool(value and (named or URL_PASSWORD.search(value) or find_credential(value)))


def find_credential(text: str) -> FoundCredential | None:
    """Return the first credential of a known form in a text.

    Credentials that look like placeholders, and lines that are marked as safe, are ignored.
    """
    found = [match for form in FORMS if form.marker in text for match in _matches(form, text)]
    if not found:
        return None
    begin, name = min(found)
    return FoundCredential(name, text.count("\n", 0, begin) + 1)


def _matches(form: Form, text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(form.pattern, text):
        credential = match[0]
        made_up = _entropy_bits(credential) < MIN_ENTROPY_BITS or PLACEHOLDER.search(credential)
        rest_of_line = text[match.start() : match.start() + MAX_LINE].partition("\n")[0]
        if not made_up and not ALLOWED_LINE.search(rest_of_line):
            yield match.start(), form.name
            return


def _entropy_bits(text: str) -> float:
    """Return a text's entropy, in bits per character."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def find_credential_arguments(value: Any, name: str = "") -> Iterator[str]:
    """Search a JSON value for arguments whose names indicate credentials, and yield the paths of these arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from find_credential_arguments(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from find_credential_arguments(item, name)
    elif isinstance(value, str) and value and is_credential_argument(name.rpartition(".")[2]):
        yield name


def is_credential_argument(name: str) -> bool:
    """Return True if an argument of this name contains a credential. The name's case does not matter."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-\s]", "_", name)
    return bool(re.search(ARGUMENT, words.upper(), re.VERBOSE))
