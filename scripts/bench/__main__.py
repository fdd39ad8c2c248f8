"""`make bench`: print a table with all benchmarks and their yardsticks.

MNIST is read from SUNSPOT_DATA_ROOT, to which torchvision downloads it once. S3 is the server at AWS_ENDPOINT_URL, by
default a server on this machine. `python -m scripts.bench ingest` runs a single benchmark.

`python -m scripts.bench ways` prints a table of all ways for each benchmark that has more than two ways.
`python -m scripts.bench ways step` does this only for the named benchmarks.

`python -m scripts.bench scale` prints a table of figures that grow with workers, rows, time and bytes.
`python -m scripts.bench scale data history` measures only the named subjects.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

from scripts import object_stores
from scripts.bench import Benchmark, Figure, checkpoint, ingest, memory_rows, overhead, step, submitter
from scripts.bench.scale import data, decider, history, transfer

BENCHMARKS = {
    "step": Benchmark("step of ResNet-18, 128 rows, two cores", "ms", 1 / 1.03, step.measure),
    "overhead": Benchmark("training thread in a step of one small layer", "us", 1 / 1.3, overhead.measure),
    "overhead_of_two": Benchmark("the same with two workers, the slower one", "us", 1 / 1.25, overhead.measure_two),
    "copies": Benchmark("step with copies of the state in memory", "ms", 1 / 1.03, step.measure_copies),
    "checkpoint": Benchmark("training thread stalled by a checkpoint of 200 MB", "ms", 1, checkpoint.measure),
    "ingest": Benchmark("rows of Parquet in S3 into batches", "rows/s", 1, ingest.measure),
    "memory_rows": Benchmark("rows in memory into batches", "rows/s", 20, memory_rows.measure),
    "help": Benchmark("sunspot --help", "ms", 1 / 12, submitter.measure_help),
    "render": Benchmark("sunspot render", "ms", 1 / 30, submitter.measure_render),
    "checkpoints": Benchmark(
        f"sunspot checkpoints ls, {submitter.CHECKPOINTS:,} in S3", "ms", 1 / 2, submitter.measure_checkpoints
    ),
    "runs": Benchmark(f"sunspot list, {submitter.RUNS:,} runs in S3", "ms", 1 / 2, submitter.measure_runs),
}

WAYS = ("ingest", "step", "overhead", "overhead_of_two", "checkpoint")

SCALE: dict[str, Callable[[], Iterator[Figure]]] = {
    "data": data.measure,
    "decider": decider.measure,
    "history": history.measure,
    "transfer": transfer.measure,
}


def main(names: list[str]) -> None:
    """Measure the named benchmarks, or all of them, and print the table."""
    if names[:1] == ["scale"]:
        print("| what | at | Sunspot |\n|---|---|---|")
        for name in names[1:] or SCALE:
            began = time.perf_counter()
            for what, at, value, unit in SCALE[name]():
                print(f"| {what} | {at} | {value:,.4g} {unit} |", flush=True)
            print(f"{name}: measured in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return
    with object_stores.s3_bucket(checkpoint.BUCKET):
        if names[:1] == ["ways"]:
            for name in names[1:] or WAYS:
                print_ways(BENCHMARKS[name])
            return
        print("| what | Sunspot | yardstick | | better by (median, range) | goal |\n|---|---|---|---|---|---|")
        for name in names or BENCHMARKS:
            print_pair(BENCHMARKS[name])


def print_pair(benchmark: Benchmark) -> None:
    """Measure Sunspot and its yardstick, and print a line of the table."""
    print(f"measuring: {benchmark.title}", file=sys.stderr)
    (_, ours), (yardstick, theirs) = benchmark.measure(2).items()
    better = zip(ours, theirs, strict=True) if benchmark.higher_is_better else zip(theirs, ours, strict=True)
    ratios = [more / less for more, less in better]
    cells = [
        benchmark.title,
        f"{median(ours):,.1f} {benchmark.unit}",
        yardstick,
        f"{median(theirs):,.1f} {benchmark.unit}",
        f"{median(ratios):.3g}x ({min(ratios):.3g} to {max(ratios):.3g}, {len(ratios)} pairs)",
        f"{benchmark.goal:.3g}x",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def print_ways(benchmark: Benchmark) -> None:
    """Measure all ways, and print a table with the median and the range of each."""
    print(f"\n| {benchmark.title} | {benchmark.unit} | turns |\n|---|---|---|")
    for name, values in benchmark.measure(sys.maxsize).items():
        middle, least, most = (
            f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in (median(values), min(values), max(values))
        )
        print(f"| {name} | {middle} ({least} to {most}) | {len(values)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
