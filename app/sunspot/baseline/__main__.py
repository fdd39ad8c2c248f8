"""`python -m sunspot.baseline`: train without the training program, here or as one Ray task."""

from sunspot.command_line import CommandParser
from sunspot.errors import run_and_exit
from sunspot.log import print_logs
from sunspot.settings import load_settings

READS = ["task", "run_name", "task_args", "storage_path", "dataset", "test_dataset", "data_root", "use_gpu"]
READS += ["epochs", "max_steps", "global_batch_size", "learning_rate", "seed"]
"""The settings that it reads, besides those that the task reads."""


def main() -> int:
    """Read the settings, train, and print where the results are."""
    parser = CommandParser(
        "sunspot.baseline", "Train the same task in plain PyTorch, on one device and without Ray.", READS
    )
    parser.add_argument(
        "--on-ray", action="store_true", help="run as one Ray task on a worker, with its GPU if it has one"
    )
    on_ray = parser.parse().on_ray
    settings = load_settings()
    print_logs()

    from sunspot.baseline.train import train
    from sunspot.plan import with_absolute_paths
    from sunspot.ray_session import run_as_task

    settings = with_absolute_paths(settings)
    print(f"results in {run_as_task(train, settings) if on_ray else train(settings)}")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
