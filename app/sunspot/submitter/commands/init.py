"""`sunspot init`: writes a first task and its settings, and prints the commands to check it and train it."""

import argparse
import shlex
import shutil
import sys
from importlib.resources import files
from pathlib import Path

from sunspot.errors import SettingsError, StorageError
from sunspot.settings import PREFIX
from sunspot.settings.file import FILE, as_variables, read_settings_file
from sunspot.submitter.printing import print_json, print_text

KINDS = {
    "images": "classify images",
    "text": "classify texts",
    "table": "classify table rows",
    "loop": "your own training loop",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = ", ".join(f"{kind} ({what})" for kind, what in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=[*KINDS], help=about)
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", default=".", help="the folder to write to; default: the current folder"
    )


def run(args: argparse.Namespace) -> None:
    """Write the files for one kind of task. Raises `SettingsError` if a file already exists."""
    folder = Path(args.folder)
    every = sorted(files("sunspot.templates").iterdir(), key=lambda file: file.name)
    templates = [file for file in every if file.name.startswith(f"my_{args.kind}.")]
    targets = {folder / (FILE if file.name.endswith(".toml") else file.name): file for file in templates}
    existing = ", ".join(str(path) for path in targets if path.exists())
    if existing:
        raise SettingsError(f"nothing was written, because the files would overwrite {existing}; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, file in targets.items():
            with path.open("xb") as sink:
                sink.write(file.read_bytes())
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    command = "sunspot" if shutil.which("sunspot") else str(Path(sys.executable).with_name("sunspot"))
    run = f"my-{args.kind}"
    dataset = as_variables(read_settings_file(folder / FILE))[f"{PREFIX}DATASET"]
    verbs = ("check", "train", f"report {run}", f"predict {run} --dataset {dataset} --output predictions")
    commands = [f"{shlex.quote(command)} {words}" for words in verbs]
    if args.json:
        print_json({"files": [str(path) for path in targets], "commands": commands})
        return
    print_text(f"wrote {', '.join(map(str, targets))}")
    for line in [*([f"cd {shlex.quote(args.folder)}"] if args.folder != "." else []), *commands]:
        print_text(f"  {line}")
