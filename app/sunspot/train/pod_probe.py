"""`python -m sunspot.train.pod_probe`: what `sunspot doctor --from-pods` runs in a pod like the run's."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from sunspot.command_line import CommandParser
from sunspot.errors import run_and_exit
from sunspot.log import print_logs
from sunspot.settings import load_settings
from sunspot.storage.prove import probe_path
from sunspot.train.gpu import try_gpus


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the storage of the settings, and the GPUs; prints one JSON document."""
    parser = CommandParser("sunspot.train.pod_probe", "Try the storage of the settings, and GPUs.", ("storage_path",))
    parser.add_argument("--gpus", type=int, default=0, metavar="NUMBER", help="compute on so many GPUs")
    parser.add_argument("--output", metavar="FILE", help="write the result there too")
    words = parser.parse(arguments)
    print_logs("stderr")
    checks = [*probe_path(load_settings().storage_path), *([try_gpus(words.gpus)] if words.gpus else [])]
    text = json.dumps([asdict(check) for check in checks])
    print(text)
    if words.output:
        with open(words.output, "w", encoding="utf-8") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
