"""Tests of your own code without an image: the included files, the archive's name, and unpacking on a node."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sunspot import code_archive
from sunspot.client import submit
from sunspot.code_archive import CODE, fetch, find_code, set_up_process
from sunspot.errors import DamageError, SettingsError
from sunspot.run import Run, open_run
from sunspot.run.history import read_events
from sunspot.run.status import RunState
from sunspot.storage.local import LocalStorage
from sunspot.submitter import code_files
from sunspot.submitter.code_files import pack
from sunspot.submitter.garbage import find_removals
from sunspot.submitter.manifest.render import JobRequest, render, settings_of
from tests.harness.constants import SetConstants
from tests.harness.kubernetes import FakeCluster
from tests.harness.runs import commit, start
from tests.unit.test_submit import Command, end, only_job
from tests.unit.test_submit import sunspot as sunspot

DAY = 24 * 3600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a user's repository."""
    folder = tmp_path / "mine"
    write(folder, {"my_task.py": "HIDDEN = 1\n", "layers/__init__.py": "", "run.sh": "#!/bin/sh\n", "gone.py": ""})
    (folder / "run.sh").chmod(0o755)
    write(folder, {".gitignore": "*.bin\n/data\n", "weights.bin": "ignored", "data/rows.csv": "1"})
    git(folder, "init", "-q")
    git(folder, "add", ".")
    write(folder, {"new.py": "", "ключ.py": ""})
    (folder / "gone.py").unlink()
    return folder


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a node's folder for temporary files, and restore `sys.path` at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def commit_all(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "-c", "user.name=me", "-c", "user.email=me@here", "commit", "-qm", "mine")


def keep(content: bytes, place: Path) -> str:
    """Store an archive and return its reference, in the form that a job has."""
    place.mkdir(exist_ok=True)
    (place / "code.tar").write_bytes(content)
    return f"{place}/code.tar@sha256:{hashlib.sha256(content).hexdigest()}"


# ------------------------------------------------------------------------------------------------------------ packing


def test_files_that_git_tracks_or_does_not_ignore_are_included(folder: Path) -> None:
    write(folder, {"inner/deep.py": "", "inner/.gitignore": "left\n", "inner/left": ""})
    git(folder / "inner", "init", "-q")
    commit_all(folder / "inner")
    (folder / "same.py").symlink_to("my_task.py")
    every = {".gitignore", "my_task.py", "layers/__init__.py", "run.sh", "new.py", "ключ.py", "same.py"}
    assert pack(folder).names == every | {"inner/deep.py", "inner/.gitignore"}
    assert pack(folder / "layers").names == {"__init__.py"}


def test_without_git_all_code_is_included(tmp_path: Path) -> None:
    write(tmp_path, {"my_task.py": "", "lib/data/reader.py": "", "data/rows": "", "runs/a": "", ".venv/bin/python": ""})
    write(tmp_path, {"lib/__pycache__/x.pyc": "", "conf/model.yaml": ""})
    assert pack(tmp_path).names == {"my_task.py", "lib/data/reader.py", "conf/model.yaml"}


LEFT_BEHIND = ("evil.py.bak", "my_task.py~", ".my_task.py.swp", "#my_task.py#", ".DS_Store", "sub/__pycache__/a.pyc")


@pytest.mark.parametrize("in_git", [True, False])
def test_editor_backups_do_not_change_the_archive(in_git: bool, folder: Path) -> None:
    if not in_git:
        shutil.rmtree(folder / ".git")
    before = pack(folder)
    write(folder, dict.fromkeys(LEFT_BEHIND, "x"))
    (folder / ".#my_task.py").symlink_to("me@host.1")  # like an Emacs lock file
    assert pack(folder).sha256 == before.sha256


def test_tracked_backup_files_are_included_and_untracked_files_are_listed(folder: Path) -> None:
    write(folder, {"kept.bak": "data"})
    git(folder, "add", "kept.bak")
    archive = pack(folder)
    assert "kept.bak" in archive.names
    assert archive.untracked == ("new.py", "ключ.py")
    assert str(archive).endswith("; not tracked by git: new.py, ключ.py")
    commit_all(folder)
    assert pack(folder).untracked == ()


def test_the_same_files_always_produce_the_same_archive(folder: Path, tmp_path: Path) -> None:
    first = pack(folder)
    copy = tmp_path / "copy"
    for name in sorted(first.names, reverse=True):
        write(copy, {name: (folder / name).read_text()})
        shutil.copymode(folder / name, copy / name)
        os.utime(copy / name, (0, 0))
    assert pack(copy).content == first.content
    with tarfile.open(fileobj=io.BytesIO(first.content)) as archive:
        assert {(m.mtime, m.uid, m.uname) for m in archive} == {(0, 0, "")}
        assert {m.name: m.mode for m in archive}["run.sh"] == 0o755
    write(folder, {"my_task.py": "HIDDEN = 2\n"})
    assert pack(folder).sha256 != first.sha256
    write(folder, {"my_task.py": "HIDDEN = 1\n"})
    assert pack(folder).sha256 == first.sha256


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.pt", "model.pt is 12 MB, but a file may be at most 10 MB"),
        (".env", ".env seems to contain secrets"),
        ("keys/id_ed25519", "keys/id_ed25519 seems to contain secrets"),
        ("gcp/service-account-1.json", "gcp/service-account-1.json seems to contain secrets"),
        ("harmless.txt -> weights.pem", "harmless.txt seems to contain secrets"),
        ("out -> ../other", "out is a link to ../other, which is not a file in this folder"),
        ("lost -> nowhere", "lost is a link to nowhere"),
        ("below -> layers", "below is a link to layers"),
        ("a\nb.py", r"'a\nb.py': the name contains unprintable characters"),
        ("pipe", "pipe cannot be read or is not a regular file"),
    ],
)
def test_files_that_cannot_be_packed_are_reported_with_a_fix(name: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write(folder, {"my_task.py": "", "layers/__init__.py": "", ".env.example": ""})
    write(tmp_path, {"other/x.py": "", "weights.pem": ""})
    name, arrow, target = name.partition(" -> ")
    (folder / name).parent.mkdir(exist_ok=True)
    if arrow:
        (folder / name).symlink_to(tmp_path / target if target.endswith(".pem") else target)
    elif name == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(b"\0" * (12_000_000 if name == "model.pt" else 1))
    with pytest.raises(SettingsError) as refused:
        pack(folder)
    assert f"1 problem with the code in {folder}:\n  {said}" in str(refused.value)
    assert "git init" in str(refused.value)
    git(folder, "init", "-q")
    if name not in ("a\nb.py", "pipe"):  # git does not list pipes
        write(folder, {".gitignore": f"{name}\n"})
        assert "my_task.py" in pack(folder).names


SECRET_FILES = """
    .env .env.local prod.env .envrc .secrets secrets.yaml secret.yml secrets.json db-secrets.toml
    .streamlit/secrets.toml prod.tfvars a.auto.tfvars.json terraform.tfstate terraform.tfstate.backup
    .terraformrc .netrc _netrc .pgpass .my.cnf .htpasswd .pypirc .npmrc .git-credentials .dockercfg
    .docker/config.json .config/gh/hosts.yml .vault-token .huggingface/token .cache/huggingface/token .s3cfg
    .boto .databrickscfg .config/rclone/rclone.conf .kaggle/kaggle.json .azure/msal_token_cache.json kubeconfig
    kubeconfig.yaml kubeconfig-prod.yml prod.kubeconfig .kube/config .aws/credentials credentials.json
    application_default_credentials.json .cargo/credentials.toml rootkey_credentials.csv gha-creds-0a1b2c.json
    client_secret_1.apps.googleusercontent.com.json service-account.json my-service-account-key.json id_rsa
    id_ed25519 id_ed25519_sk server.key cert.pem a.p12 a.jks a.kdbx a.keytab putty.ppk vpn.ovpn .bash_history
"""
"""Paths at which programs commonly store credentials."""

CODE_FILES = """
    secrets.py secrets_manager.py credentials.py test_secrets.py token.py tokenizer.json tokenizer_config.json
    key.py .env.example .env.d/settings.py docs/service-account.md service_account_docs/config.json
    kubeconfig.py kubeconfig_test.py config.json docker/config.json hosts.yml id_rsa.pub boto.py main.tf
    variables.tf secretary.json environment.yml
"""
"""Paths of files with ordinary code and names similar to those in SECRET_FILES."""


def test_files_that_commonly_contain_secrets_are_rejected_by_path(tmp_path: Path, set_constants: SetConstants) -> None:
    set_constants(code_files, MAX_NAMED=100)
    write(tmp_path, dict.fromkeys(CODE_FILES.split(), "x = 1\n"))
    assert pack(tmp_path).names == set(CODE_FILES.split())
    write(tmp_path, dict.fromkeys(SECRET_FILES.split(), "x = 1\n"))
    with pytest.raises(SettingsError) as refused:
        pack(tmp_path)
    refusals = {line.strip().partition(" seems to contain secrets")[0] for line in str(refused.value).splitlines()}
    assert refusals >= set(SECRET_FILES.split())
    assert not refusals & set(CODE_FILES.split())


def test_the_error_for_a_credential_in_a_file_includes_the_line(tmp_path: Path) -> None:
    token = "hf_" + "kJxQmZpLvBnTwRyHdFsGcAuEkJxQmZpLvB"
    write(tmp_path, {"my_task.py": f"import os\n\nTOKEN = '{token}'\n", "test_task.py": "TOKEN = 'hf_fake'\n"})
    with pytest.raises(SettingsError) as refused:
        pack(tmp_path)
    assert "1 problem" in str(refused.value)
    assert "my_task.py, line 3 contains a Hugging Face token; read it from an env" in str(refused.value)
    assert token not in str(refused.value)
    write(tmp_path, {"my_task.py": f"TOKEN = '{token}'  # pragma: allowlist secret\n"})
    assert pack(tmp_path).names == {"my_task.py", "test_task.py"}


def test_only_the_beginning_of_text_files_is_searched_for_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    token = "hf_" + "kJxQmZpLvBnTwRyHdFsGcAuEkJxQmZpLvB"
    searched: list[str] = []
    monkeypatch.setattr(code_files, "find_credential", searched.append)
    set_constants(code_files, SCANNED_BYTES=100)
    write(tmp_path, {"long.csv": "1,2\n" * 100 + token, "weights.bin": f"\0{token}"})
    pack(tmp_path)
    assert sorted(map(len, searched)) == [0, 100]
    set_constants(code_files, MAX_BYTES=10)
    with pytest.raises(SettingsError, match="check that this is your code"):
        pack(tmp_path)
    assert len(searched) == 2, "what is too large to be code is not read"


def test_a_folder_without_code_is_rejected(tmp_path: Path, set_constants: SetConstants) -> None:
    with pytest.raises(SettingsError, match=r"the code folder .* does not exist"):
        pack(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="the folder is empty, or git ignores all"):
        pack(tmp_path)
    set_constants(code_files, MAX_FILES=3)
    write(tmp_path, {f"{number}.py": "x" * 50 for number in range(4)})
    with pytest.raises(SettingsError, match="4 files of 200 bytes, but at most 3 and 100 MB"):
        pack(tmp_path)
    write(tmp_path, {".git": "gitdir: nowhere"})
    with pytest.raises(SettingsError, match=r"git cannot list the files in the code folder .*not a git"):
        pack(tmp_path)


# -------------------------------------------------------------------------------------------------------- on the node


def test_code_is_unpacked_once_per_node_and_comes_first_on_sys_path(
    folder: Path, tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch_slowly(reference: str) -> bytes:
        fetched.append(reference)
        time.sleep(0.05)
        return fetch(reference)

    fetched: list[str] = []
    monkeypatch.setattr(code_archive, "fetch", fetch_slowly)
    reference = keep(pack(folder).content, tmp_path / "storage")
    threads = [threading.Thread(target=find_code, args=(reference,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == [reference]
    shutil.rmtree(tmp_path / "storage")
    found = Path(find_code(reference))
    assert sys.path[0] == str(found)
    assert sys.path.count(str(found)) == 1
    assert {path.name for path in found.parent.iterdir()} == {found.name, f"{found.name}.lock"}
    assert importlib.import_module("my_task").HIDDEN == 1
    assert os.access(found / "run.sh", os.X_OK)
    del sys.modules["my_task"]
    assert find_code("") == ""


def test_code_that_does_not_match_its_recorded_hash_is_not_run(
    folder: Path, tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    reference = keep(pack(folder).content, tmp_path / "storage")
    tampered = (tmp_path / "storage/code.tar").read_bytes().replace(b"HIDDEN = 1", b"HIDDEN = 9")
    (tmp_path / "storage/code.tar").write_bytes(tampered)
    with pytest.raises(DamageError, match=f"has a different SHA-256, {hashlib.sha256(tampered).hexdigest()}"):
        find_code(reference)
    (tmp_path / "storage/code.tar").unlink()
    with pytest.raises(
        SettingsError, match="the archive does not exist or was deleted; `sunspot submit --code FOLDER`"
    ):
        find_code(reference)
    monkeypatch.setenv(CODE, reference)
    set_up_process()  # Ray would keep restarting a process that fails here
    assert "the archive does not exist" in warned[0]
    assert not [path for path in node.rglob("*") if path.suffix == ".py"]


@pytest.mark.parametrize(
    "member",
    [
        {"name": "/etc/harm"},
        {"name": "../harm"},
        {"name": "a/../../harm"},
        {"name": "harm", "type": tarfile.SYMTYPE, "linkname": "/etc"},
        {"name": "harm", "type": tarfile.LNKTYPE, "linkname": "../harm"},
        {"name": "harm", "type": tarfile.FIFOTYPE},
        {"name": "harm", "size": 1001},
        {"name": "a/" * 2000 + "harm"},
        {},
    ],
    ids=str,
)
def test_no_part_of_an_unsafe_archive_is_unpacked(
    member: dict[str, Any], tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch, set_constants: SetConstants
) -> None:
    set_constants(code_archive, MAX_BYTES=1000)
    content = io.BytesIO(b"no archive")
    if member:
        with tarfile.open(fileobj=content, mode="w") as archive:
            made = tarfile.TarInfo()
            for field, value in member.items():
                setattr(made, field, value)
            archive.addfile(made, io.BytesIO(b"x" * made.size))
    monkeypatch.setattr(code_archive, "fetch", lambda reference: content.getvalue())
    with pytest.raises(DamageError, match="not an uncompressed tar archive of code"):
        find_code(f"s3://bucket/code.tar@sha256:{'a' * 64}")
    assert not [path for path in tmp_path.rglob("*") if path.name == "harm"]
    assert [path.suffix for path in (node / f"sunspot-{os.getuid()}" / "code").iterdir()] == [".lock"]


def test_an_archive_from_git_archive_is_accepted(folder: Path, tmp_path: Path, node: Path) -> None:
    commit_all(folder)
    git(folder, "archive", "-o", str(tmp_path / "code.tar"), "HEAD")
    found = find_code(keep((tmp_path / "code.tar").read_bytes(), tmp_path / "storage"))
    assert (Path(found) / "layers/__init__.py").exists()


def test_the_code_folder_is_made_private_if_other_users_can_write_to_it(
    node: Path, folder: Path, tmp_path: Path
) -> None:
    home = node / f"sunspot-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    find_code(keep(pack(folder).content, tmp_path / "storage"))
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_not_trusted(node: Path, folder: Path, tmp_path: Path) -> None:
    (node / f"sunspot-{os.getuid()}").symlink_to("/proc/1/root" if os.getuid() else tmp_path)
    if os.getuid() == 0:
        os.chown(node / "sunspot-0", 12345, 12345, follow_symlinks=False)
    with pytest.raises(SettingsError, match="belongs to another user"):
        find_code(keep(pack(folder).content, tmp_path / "storage"))


# ------------------------------------------------------------------------------------------------------------ the job


def code_of(cluster: FakeCluster) -> str:
    return settings_of(cluster.jobs[only_job(cluster)])[CODE]


def test_submitting_edited_code_creates_a_new_job_that_takes_over_the_run(
    cluster: FakeCluster, sunspot: Command, folder: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    options = ("--code", ".", "--set", "TASK=my_task", "--set", 'TASK_ARGS={"a": "layers", "b": "data"}')
    assert sunspot.submit(*options, "--dry-run") == 0
    assert sunspot.run.storage.list("") == []
    names = set()
    for edit in range(3):
        write(folder, {"my_task.py": f"HIDDEN = {edit}\n"})
        assert sunspot.submit(*options) == 0, sunspot.err
        assert f"code: 6 files of {folder}" in sunspot.err
        assert "b='data' is a file on this machine" in sunspot.err, "which is not packed"
        assert sunspot.err.count("is a file on this machine") == 1
        names.add(only_job(cluster))
        assert (Path(find_code(code_of(cluster))) / "my_task.py").read_text() == f"HIDDEN = {edit}\n"
        if edit == 1:
            cluster.set_status(only_job(cluster), "Running", "RUNNING")
            assert sunspot.submit(*options, "--json") == 0
            assert sunspot.json["action"] == "attached", "the same code is the same job"
            write(folder, {"my_task.py": "HIDDEN = 9\n"})
            assert sunspot.submit(*options) == 6
            assert f"{CODE}: {code_of(cluster)} -> s3://" in sunspot.err
        end(cluster, sunspot.run, RunState.FAILED)
    assert len(names) == 3
    assert len(sunspot.run.storage.list(sunspot.run.key("code"))) == 3


def test_the_code_folder_can_be_set_in_the_profile_or_with_the_python_api(
    cluster: FakeCluster, s3_bucket: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: kind\ncode: {folder}\n")
    storage = f"s3://{s3_bucket}/runs"
    submit("run", str(tmp_path / "mine.yaml"), storage=storage)
    named = code_of(cluster)
    sha256 = pack(folder).sha256
    assert named == f"{storage}/run/code/{sha256}.tar@sha256:{sha256}"
    write(folder, {"my_task.py": "HIDDEN = 2\n"})
    end(cluster, open_run(storage, "run"), RunState.FAILED)
    submit("run", code=str(folder), storage=storage)
    assert code_of(cluster) != named


def test_render_accepts_code_in_an_archive_but_not_in_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = f"s3://bucket/code.tar@sha256:{'a' * 64}"
    for request in (JobRequest(code=named), JobRequest(code=named, cluster="mine")):
        rendered = render(request)
        assert settings_of(rendered.manifest)[CODE] == named
        assert rendered.name != render(JobRequest(cluster=request.cluster)).name
        assert {value.name: value.source for value in rendered.derived}[CODE] == "given"
    for given in (str(folder), f"code.tar@sha256:{'a' * 64}", "s3://bucket/code.tar"):
        with pytest.raises(SettingsError, match=r"is not an archive; .*git archive.*`sunspot submit`"):
            render(JobRequest(code=given))
    with pytest.raises(SettingsError, match=r"SUNSPOT_CODE=\.: set it to nothing: `sunspot submit --code FOLDER` sets"):
        render(JobRequest(settings={"CODE": "."}))
    monkeypatch.setenv(CODE, named)
    with pytest.raises(SettingsError, match=f"{CODE}={named} cannot be set; unset it, and use --code"):
        render(JobRequest())


def test_a_task_that_is_not_in_the_code_is_reported(cluster: FakeCluster, sunspot: Command, folder: Path) -> None:
    assert sunspot.submit("--code", str(folder / "nowhere")) == 2
    assert sunspot.err.startswith(f"error: the code folder {folder}/nowhere does not exist")
    assert sunspot.submit("--code", str(folder), "--set", "TASK=other.task") == 0
    assert "SUNSPOT_TASK=other.task: the code does not contain other.py, so pods have it only if" in sunspot.err
    assert "includes no code" not in sunspot.err
    end(cluster, sunspot.run, RunState.FAILED)
    assert sunspot("delete", "run", "--yes") == 0, sunspot.err
    assert "code" in sunspot.out
    assert sunspot.run.storage.list("") == []


@pytest.mark.parametrize("verb", ["render", "submit"])
def test_a_task_without_code_is_reported(verb: str, cluster: FakeCluster, sunspot: Command) -> None:
    here = [*("--storage", "s3://bucket/runs"), "--dry-run"] if verb == "submit" else []
    warned = "only if the image does; include the code with `sunspot submit --code FOLDER` or `make submit CODE=FOLDER`"
    for task, top in [("mine", "mine"), ("mine.task", "mine"), ("choice(mine,sunspot.tasks.gan)", "mine")]:
        assert sunspot(verb, "--run", "run", "--set", f"TASK={task}", *here) == 0, sunspot.err
        assert sunspot.err.count(f"the job includes no code, so pods have {top}.py {warned}") == 1
    named = f"s3://bucket/code.tar@sha256:{'a' * 64}"
    for words in (["--set", "TASK=sunspot.tasks.gan"], ["--set", "TASK=mine", "--code", named], []):
        assert sunspot(verb, "--run", "run", *words, *here) == 0, sunspot.err
        assert "includes no code" not in sunspot.err


# ----------------------------------------------------------------------------------------------------------- the run


def test_code_that_is_no_longer_used_is_deleted(tmp_path: Path) -> None:
    run = Run(LocalStorage(str(tmp_path)), "run")
    for name in ("a", "b"):
        run.storage.write(run.key("code", f"{name * 64}.tar"), b"12345")
    named = {name: f"s3://bucket/runs/run/code/{name * 64}.tar@sha256:{name * 64}" for name in "ab"}
    for name in ("a", "b", "b"):
        attempt = start(run, "job", settings={CODE: named[name]})
    commit(run, attempt, 2)
    later = run.storage.list("run")[0].modified + 2 * DAY
    assert list(find_removals(run, None, later - 2 * DAY)) == [], "it may be about to be named"
    [removal] = find_removals(run, None, later)
    assert (removal.name, removal.bytes) == (run.key("code", f"{'a' * 64}.tar"), 5)
    removal.remove()
    assert [entry.key for entry in run.storage.list("run/code")] == [f"run/code/{'b' * 64}.tar"]


def test_changed_code_is_recorded_as_an_event(tmp_path: Path) -> None:
    run = Run(LocalStorage(str(tmp_path)), "run")
    named = {name: {CODE: f"s3://bucket/code.tar@sha256:{name * 64}"} for name in "ab"}
    for settings in ({}, named["a"], named["a"], named["b"], {}):
        start(run, "job", settings=settings)
    said = [event["detail"].partition(", with other code: ")[2] for event in read_events(run)]
    a, b = "a" * 12, "b" * 12
    assert said == ["", f"the image's -> {a}", "", f"{a} -> {b}", f"{b} -> the image's"]
