"""`make bench`: every benchmark beside its yardstick, in one table.

MNIST comes from SUNSPOT_DATA_ROOT (downloaded once by torchvision). S3 is the server at AWS_ENDPOINT_URL, by default
one on this machine. To run one benchmark: python -m scripts.bench ingest

python -m scripts.bench ways prints tables of several ways each; or, as in python -m scripts.bench ways stalls, some.

python -m scripts.bench scale prints another table: what grows with workers, rows, time and bytes; or, as in
python -m scripts.bench scale data history, some subjects of it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import ray

from scripts import object_stores
from scripts.bench import checkpoint, ingest, memory_rows, step, submitter
from scripts.bench.scale import Subject, consensus, data, history, print_table, transfer
from scripts.bench.ways import Ways, print_ways
from sunspot.ray_session import RAY_ENVIRONMENT


@dataclass
class Benchmark:
    """A yardstick and the product, in the same unit, measured in pairs."""

    title: str
    yardstick: str
    unit: str
    higher_is_better: bool
    goal: float
    "The least improvement: yardstick over product if lower is better, else product over yardstick."
    measure: Callable[[], list[tuple[float, float]]]
    "Pairs of (yardstick, product)."


BENCHMARKS = {
    "step": Benchmark(
        "step of the training loop", "torchrun DDP, an idle Ray beside it", "ms", False, 1 / 1.03, step.measure
    ),
    "copies": Benchmark(
        "step with copies of the state in memory", "the same without", "ms", False, 1 / 1.03, step.measure_copies
    ),
    "checkpoint": Benchmark(
        "training thread stalled by a checkpoint of 200 MB to S3",
        "dcp.async_save with a process, to disk",
        "ms",
        False,
        1,
        checkpoint.measure,
    ),
    "ingest": Benchmark(
        "rows of Parquet in S3 into batches, LOADER=ray", "batched Ray Data", "rows/s", True, 1, ingest.measure
    ),
    "memory_rows": Benchmark(
        "rows in memory, into batches", "DataLoader over torchvision's MNIST", "rows/s", True, 20, memory_rows.measure
    ),
    "help": Benchmark("sunspot --help", "python -c pass", "ms", False, 1 / 12, submitter.measure_help),
    "render": Benchmark("sunspot render", "python -c pass", "ms", False, 1 / 30, submitter.measure_render),
    "checkpoints": Benchmark(
        f"sunspot checkpoints ls, {submitter.CHECKPOINTS:,} in S3",
        "the pages of the listing alone",
        "ms",
        False,
        1 / 2,
        submitter.measure_checkpoints,
    ),
    "runs": Benchmark(
        f"sunspot list, {submitter.RUNS:,} runs in S3",
        "the pages of the listing alone",
        "ms",
        False,
        1 / 2,
        submitter.measure_runs,
    ),
}


WAYS = {
    "stalls": Ways("training thread stalled by a checkpoint of 200 MB", ("ms",), checkpoint.measure_ways),
    "readers": Ways("rows of S3 into batches", ("rows/s",), ingest.measure_ways),
    "loops": Ways("step of ResNet-18, two cores", ("ms",), step.measure_ways),
}

SCALE: dict[str, Subject] = {"data": data, "consensus": consensus, "history": history, "transfer": transfer}


def main(names: list[str]) -> None:
    """Measure the named benchmarks, or all, and print the table."""
    if names[:1] == ["scale"]:
        print_table({name: SCALE[name] for name in names[1:] or SCALE})
        return
    os.environ.update(RAY_ENVIRONMENT)
    with object_stores.s3_bucket(checkpoint.BUCKET):
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        if names[:1] == ["ways"]:
            for name in names[1:] or WAYS:
                print_ways(WAYS[name])
            return
        print(
            "| what | Sunspot | yardstick | | better by (median, range) | goal |\n|---|---|---|---|---|---|", flush=True
        )
        for name in names or BENCHMARKS:
            print(line_of(BENCHMARKS[name]), flush=True)
        ray.shutdown()


def line_of(benchmark: Benchmark) -> str:
    """Measure, and format the result as a line of the table."""
    print(f"measuring: {benchmark.title}", file=sys.stderr)
    pairs = benchmark.measure()
    ratios = [ours / theirs if benchmark.higher_is_better else theirs / ours for theirs, ours in pairs]
    cells = [
        benchmark.title,
        f"{median(ours for _, ours in pairs):,.1f} {benchmark.unit}",
        benchmark.yardstick,
        f"{median(theirs for theirs, _ in pairs):,.1f} {benchmark.unit}",
        f"{median(ratios):.3g}x ({min(ratios):.3g} to {max(ratios):.3g}, {len(pairs)} pairs)",
        f"{benchmark.goal:.3g}x",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
