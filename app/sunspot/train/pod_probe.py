"""`python -m sunspot.train.pod_probe`: runs the checks of `sunspot doctor --from-pods` inside a pod."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from sunspot.command_line import CommandParser
from sunspot.errors import run_and_exit
from sunspot.log import print_logs
from sunspot.settings import load_settings
from sunspot.storage.prove import Result, probe_path
from sunspot.train.gpu import try_gpus


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the storage, the GPUs, and the network to another pod. Print the results as one JSON document."""
    description = "Check the storage in the settings, the GPUs, and the network."
    parser = CommandParser("python -m sunspot.train.pod_probe", description, ("storage_path",))
    parser.add_argument("--gpus", type=int, default=0, metavar="NUMBER", help="compute on this number of GPUs")
    parser.add_argument("--meeting", metavar="NAME", help="time an all-reduce with the pod that is given the same name")
    parser.add_argument("--rank", type=int, choices=(0, 1), default=0, help="rank of this pod among the two")
    parser.add_argument("--output", metavar="FILE", help="also write the result to this file")
    words = parser.parse_args(arguments)
    print_logs("stderr")
    path = load_settings().storage_path
    checks = [*probe_path(path), *([try_gpus(words.gpus)] if words.gpus else [])]
    if words.meeting and not any(check.result is Result.FAILED for check in checks):
        from sunspot.train.all_reduce import try_all_reduce  # imported here because torch takes seconds

        checks.append(try_all_reduce(path, words.meeting, words.rank, words.gpus))
    text = json.dumps([asdict(check) for check in checks])
    print(text)
    if words.output:
        with open(words.output, "w", encoding="utf-8") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
