"""Packs the user's code into an archive. The same files always produce the same bytes.

The archive contains all files that git does not ignore. A file that is too large or contains a secret is an error. Such
a file is not silently omitted, because the code might need it.
"""

import functools
import hashlib
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sunspot.code_archive import FOLDER, MAX_BYTES, MAX_FILES
from sunspot.credentials import find_credential
from sunspot.errors import SettingsError, shorten
from sunspot.formatting import as_bytes, plural

MAX_FILE = 10_000_000
"""Maximum size of a file in bytes. Larger files are rarely code."""

MAX_NAMED = 10
"""Maximum number of files in an error message."""

LEFT_OUT = {".git", ".venv", "venv", "__pycache__", ".ipynb_checkpoints", "node_modules"}
"""Folders that are never code, used only outside git repositories."""

WRITTEN = {"data", "runs"}
"""Top-level folders that training writes. Deeper folders with these names can be code."""

LEFT_BEHIND = re.compile(
    r"(.*/)?([^/]*~|[^/]*\.(bak|orig|rej|py[co])|\.[^/]*\.sw[a-p]|\.#[^/]*|#[^/]*#|\.DS_Store|Thumbs\.db|desktop\.ini)"
)
"""Pattern of files left by editors, `patch`, Python and file managers. They are included only if git tracks them."""

SECRET = re.compile(
    r"""
    (.*/)?(
        # settings of a shell or a program, which can include passwords; `.env.example` is for people to copy
        \.env(\.(?!example$|sample$|template$|dist$)[^/]+)? | \.envrc | [^/]*\.env
      | ([._-]|[^/]*[._-])?secrets?\.(ya?ml|json|toml|ini|cfg|conf) | \.secrets
      | [^/]*\.tfvars(\.json)? | [^/]*\.tfstate(\.backup)? | \.terraformrc
        # logins
      | [._]netrc | \.pgpass | \.my\.cnf | \.mylogin\.cnf | \.htpasswd | \.pypirc | \.npmrc | \.git-credentials
      | \.dockercfg | \.dockerconfigjson | \.docker/config\.json | gh/hosts\.yml | \.vault-token | \.?huggingface/token
      | \.s3cfg | \.boto | \.databrickscfg | \.?rclone\.conf | \.?kaggle\.json | \.azure/[^/]*\.json
        # identities in a cluster or a cloud
      | ([^/]*[._-])?kubeconfig([_-][^/.]*)?(\.ya?ml|\.json|\.conf)? | \.kube/config
      | ([^/]*[._-])?credentials(\.json|\.toml|\.csv|\.tfrc\.json)? | gha-creds-[^/]*\.json | client_secret[^/]*\.json
      | ([^/]*[._-])?service[._-]?account([._-][^/]*)?\.json
        # keys
      | id_(rsa|dsa|ecdsa|ed25519)(_sk)? | [^/]*\.(pem|key|p12|pfx|pkcs12|jks|jceks|keystore|keytab|kdbx?|ppk|ovpn)
        # histories of shells
      | \.(bash|zsh|python|psql|mysql)_history
    )
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Pattern of paths of files that contain passwords or keys."""

SCANNED_BYTES = 1_000_000
"""Number of bytes at the start of each file that are searched for credentials. Source files are smaller."""

TEXT_BYTES = 8000
"""Number of bytes at the start of a file that contain no zero byte if the file is text, as in Git."""


@dataclass(frozen=True)
class CodeArchive:
    """A packed folder."""

    folder: Path
    names: frozenset[str]
    "Paths of the packed files, relative to the folder."
    content: bytes
    untracked: tuple[str, ...] = ()
    "Packed files that git does not track, or empty if the folder is not in a repository."

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def name(self) -> str:
        """The archive's storage key, relative to the run."""
        return f"{FOLDER}/{self.sha256}.tar"

    def url(self, storage_path: str, run: str) -> str:
        """Return the value of the setting CODE for this archive."""
        return f"{storage_path.rstrip('/')}/{run}/{self.name}@sha256:{self.sha256}"

    def holds(self, path: str) -> bool:
        """Return True if the archive contains a file or folder with this relative path."""
        name = os.path.normpath(path)
        return name in self.names or any(each.startswith(f"{name}/") for each in self.names)

    def __str__(self) -> str:
        size = as_bytes(len(self.content))
        shown = ", ".join(self.untracked[:MAX_NAMED])
        more = len(self.untracked) - MAX_NAMED
        untracked = f"; not tracked by git: {shown}{f' and {more} more' if more > 0 else ''}" if shown else ""
        return f"{plural(len(self.names), 'file')} of {self.folder}, {size}, sha256:{self.sha256[:12]}{untracked}"


def pack(folder: Path) -> CodeArchive:
    """Pack a folder. Raises `SettingsError` with a list of the files that cannot be packed, if there are any.

    Files are searched for credentials only if there are no other problems.
    """
    if not folder.is_dir():
        raise SettingsError(f"the code folder {folder} does not exist; pass your code's folder, such as --code .")
    found = dict(islice(list_files(folder), 2 * MAX_FILES))
    names = sorted(found)
    problems = list(filter(None, (_find_problem(folder, name) for name in names)))
    size = sum((folder / name).stat().st_size for name in names) if not problems else 0
    if len(names) > MAX_FILES or size > MAX_BYTES:
        what = f"{len(names)} files of {as_bytes(size)}" if size else f"{len(names)} files or more"
        problems.append(
            f"{what}, but at most {MAX_FILES} and {as_bytes(MAX_BYTES)} are allowed; check that this is your code"
        )
    if not names:
        problems.append("the folder is empty, or git ignores all of its files")
    if not problems:  # the files have at most MAX_BYTES together
        problems = list(filter(None, (_find_credential(folder, name) for name in names)))
    if problems:
        lines = "\n".join(f"  {line}" for line in problems[:MAX_NAMED])
        ignore = "" if _in_git(folder) else "run `git init` in this folder, and then "
        raise SettingsError(
            f"{plural(len(problems), 'problem')} with the code in {folder}:\n{lines}\nto exclude a file, "
            f"{ignore}list it in .gitignore (and `git rm --cached` it if git tracks it), or pass a folder without "
            "it, such as --code src"
        )
    untracked = tuple(name for name in names if not found[name]) if _in_git(folder) else ()
    return CodeArchive(folder, frozenset(names), _pack(folder, names), untracked)


def list_files(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield each file to include and whether git tracks it.

    In a git repository, the files that git does not ignore are included, even those in submodules. Elsewhere, all files
    are included except those in the folders named in LEFT_OUT and WRITTEN. Untracked files that match LEFT_BEHIND are
    omitted.
    """
    if not _in_git(folder):
        for place, folders, files in os.walk(folder):
            here = Path(place).relative_to(folder)
            left_out = LEFT_OUT if here.parts else LEFT_OUT | WRITTEN
            folders[:] = [name for name in folders if name not in left_out]
            links = [name for name in folders if Path(place, name).is_symlink()]  # links are rejected later
            names = ((here / name).as_posix() for name in files + links)
            yield from ((name, False) for name in names if not LEFT_BEHIND.fullmatch(name))
        return
    for name in _ask_git(folder, "--cached"):
        yield from ((each, True) for each in _list_below(folder, name))
    for name in _ask_git(folder, "--others", "--exclude-standard"):
        if not LEFT_BEHIND.fullmatch(name):
            yield from ((each, False) for each in _list_below(folder, name))


def _ask_git(folder: Path, *options: str) -> list[str]:
    """Return the output of `git ls-files` as a list. Raises `SettingsError` with git's message if git fails."""
    command = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = os.fsdecode(error.stderr).strip() if isinstance(error, subprocess.CalledProcessError) else shorten(error)
        raise SettingsError(f"git cannot list the files in the code folder {folder}: {said}") from error
    return list(filter(None, os.fsdecode(listed).split("\0")))


def _list_below(folder: Path, name: str) -> Iterator[str]:
    """Yield `name`, a path from git's list. For a submodule, yield its files instead. Deleted files are omitted."""
    path = folder / name
    if path.is_dir() and not path.is_symlink():  # a submodule, or another repository
        if (path / ".git").exists():
            yield from (f"{name.rstrip('/')}/{below}" for below, _ in list_files(path))
    elif os.path.lexists(path):
        yield name


def _in_git(folder: Path) -> bool:
    place = folder.resolve()
    return any((above / ".git").exists() for above in (place, *place.parents))


def _find_problem(folder: Path, name: str) -> str:
    """Return the reason why a file cannot be packed, or an empty string."""
    path = folder / name
    if not name.isprintable():
        return f"{name!r}: the name contains unprintable characters; rename the file"
    if SECRET.fullmatch(name) or SECRET.fullmatch(path.resolve().as_posix()):
        return f"{name} seems to contain secrets; pods get secrets from a Secret instead (env_secrets in a profile)"
    if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(folder.resolve())):
        return f"{name} is a link to {os.readlink(path)}, which is not a file in this folder; replace it with the file"
    if not path.is_file() or not os.access(path, os.R_OK):
        return f"{name} cannot be read or is not a regular file"
    size = path.stat().st_size
    if size > MAX_FILE:
        return f"{name} is {as_bytes(size)}, but a file may be at most {as_bytes(MAX_FILE)}; put data into a bucket"
    return ""


def _find_credential(folder: Path, name: str) -> str:
    """Describe the first credential in a file, or return an empty string."""
    found = find_credential(_read_text(folder / name))
    if found is None:
        return ""
    return (
        f"{name}, line {found.line} contains {found.form}; read it from an environment variable that pods get from a "
        "Secret (env_secrets in a profile), or add the comment `pragma: allowlist secret` if it is made up"
    )


def _read_text(path: Path) -> str:
    """Read the start of a file. Returns an empty string if the file is not text."""
    with path.open("rb") as file:
        content = file.read(SCANNED_BYTES)
    return "" if b"\0" in content[:TEXT_BYTES] else content.decode(errors="replace")


def _pack(folder: Path, names: list[str]) -> bytes:
    """Return the archive's content, which does not depend on the time, the machine or the user."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            content = (folder / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if os.access(folder / name, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
