"""`sunspot checkpoints get`: downloads and verifies a checkpoint, or resumes an interrupted download."""

import argparse
import hashlib
import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sunspot.errors import DamageError, NotFoundError, SettingsError, StorageError
from sunspot.formatting import as_bytes, plural
from sunspot.run import Run
from sunspot.run.checkpoints import MANIFEST, Checkpoint, choose, find_faults_in_listing, list_directories
from sunspot.storage.base import CHUNK
from sunspot.submitter.commands.arguments import add_run
from sunspot.submitter.local_training import refuse_without_training
from sunspot.submitter.printing import print_json, print_text, progress_note, warn
from sunspot.submitter.runs import find_run

FILES_AT_ONCE = 4

TRIES = 4
"""Maximum number of attempts to download a file."""

PART = ".part"
"""Suffix of an unfinished file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="newest",
        help="a name from `sunspot checkpoints ls`, newest or best; default: newest",
    )
    parser.add_argument(
        "--format",
        choices=("sunspot", "dcp"),
        default="sunspot",
        help="dcp also writes the state in the format of torch.distributed.checkpoint; default: sunspot",
    )
    parser.add_argument("--output", metavar="DIR", help="the directory to write to; default: the checkpoint's name")


def run(args: argparse.Namespace) -> None:
    """Download a checkpoint. Complete files are kept, partial files are resumed, and the manifest is written last."""
    if args.format == "dcp":
        refuse_without_training("--format dcp")
    run = find_run(args.run, args.storage)
    checkpoint, notes = choose(run, args.name)
    for note in notes:
        warn(note)
    faults = find_faults_in_listing(checkpoint, list_directories(run).get(checkpoint.name, {}))
    if faults:
        raise DamageError(f"{checkpoint.name}: {'; '.join(faults)}")
    directory = Path(args.output or checkpoint.name).absolute()
    try:
        with progress_note(f"downloading {checkpoint.name}, {as_bytes(checkpoint.bytes)}"):
            manifest = _begin(run, checkpoint, directory)
            kept = Download(run, checkpoint, directory).fetch_all()
            os.replace(manifest, directory / MANIFEST)
        if args.format == "dcp":
            with progress_note("writing the files of torch.distributed.checkpoint"):
                # Imported through importlib, because the module needs torch.
                importlib.import_module("sunspot.checkpoint.dcp").write_dcp(directory)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise StorageError(f"{error.filename or 'the directory'}: {why}") from error
    if args.json:
        record = {name: getattr(checkpoint, name) for name in ("name", "step", "bytes")}
        print_json({**record, "directory": str(directory), "files": sorted(checkpoint.files), "kept": kept})
    else:
        were_there = f", {len(kept)} of which existed already" if kept else ""
        files = f"{plural(len(checkpoint.files), 'file')}{were_there}"
        print_text(f"{directory}: {files}, {as_bytes(checkpoint.bytes)}, all verified")


def _begin(run: Run, checkpoint: Checkpoint, directory: Path) -> Path:
    """Create the directory, and store the checkpoint's manifest in it under a temporary name, as a marker.

    Returns the marker's path.
    """
    content = run.storage.read(run.key("checkpoints", checkpoint.name, MANIFEST))
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / (MANIFEST + PART)
    known = [path.read_bytes() for path in (mark, directory / MANIFEST) if path.is_file()]
    if any(directory.iterdir()) and content not in known:
        what = f"{directory} contains files that do not belong to a download of {checkpoint.name}"
        raise SettingsError(f"{what}; choose another --output")
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise SettingsError(f"{path} is neither a file nor a folder; choose another --output")
    mark.write_bytes(content)
    return mark


class Download:
    """Downloads and verifies the files of a checkpoint, a few at a time."""

    def __init__(self, run: Run, checkpoint: Checkpoint, directory: Path) -> None:
        self._run = run
        self._checkpoint = checkpoint
        self._directory = directory
        self._given_up = threading.Event()

    def fetch_all(self) -> list[str]:
        """Fetch all files, and return those that already existed. Partial files are kept if a download fails."""
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="get") as pool:
            fetched = {file: pool.submit(self._fetch, file, self._target(file)) for file in self._checkpoint.files}
            try:
                return [file for file, was_there in fetched.items() if was_there.result()]
            except BaseException:
                self._given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _target(self, file: str) -> Path:
        path = (self._directory / file).resolve()
        if not path.is_relative_to(self._directory.resolve()) or path.name == MANIFEST:
            raise DamageError(f"{MANIFEST} lists {file}, which is not a valid name for a checkpoint file")
        return path

    def _fetch(self, file: str, target: Path) -> bool:
        """Fetch one file. Returns True if it already existed."""
        run, name = self._run, self._checkpoint.name
        key = run.key("checkpoints", name, file)
        expected = self._checkpoint.files[file]
        wanted = (expected["size"], expected["sha256"])
        if target.is_file() and (target.stat().st_size, _hash(target).hexdigest()) == wanted:
            return True
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + PART)
        failure: Exception | None = None
        for _ in range(TRIES):
            try:
                began, size, sha256 = self._continue(key, part, expected["size"])
            except NotFoundError as error:
                if run.storage.exists(run.key("checkpoints", name, MANIFEST)):
                    raise DamageError(f"{name}: {file} is missing") from error
                raise NotFoundError(f"{name} was deleted during the download") from error
            except StorageError as error:
                failure = error
                continue
            if self._given_up.is_set():
                return False
            if (size, sha256) == wanted:
                os.replace(part, target)
                return False
            part.unlink()
            came = f"received {size} bytes with SHA-256 {sha256[:12]}..., expected {wanted[0]} with {wanted[1][:12]}..."
            failure = DamageError(f"{run.storage.locate(key)}: {came}")
            if not began:  # an earlier part might belong to another file, so retry without it
                break
        assert failure
        raise failure

    def _continue(self, key: str, part: Path, size: int) -> tuple[int, int, str]:
        """Fetch the rest of `part`. Returns its old size, its new size, and the SHA-256 of its content."""
        began = part.stat().st_size if part.is_file() else 0
        if began > size:
            part.unlink()
            began = 0
        sha = _hash(part) if began else hashlib.sha256()
        now = began
        with open(part, "ab") as sink:
            if now < size:
                with self._run.storage.open(key, began) as source:
                    while not self._given_up.is_set() and (chunk := source.read(CHUNK)):
                        sink.write(chunk)
                        sha.update(chunk)
                        now += len(chunk)
        return began, now, sha.hexdigest()


def _hash(path: Path) -> Any:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256")
