"""`python -m sunspot.baseline`: train in plain PyTorch, for comparison."""

from collections.abc import Sequence

from sunspot.command_line import CommandParser
from sunspot.errors import SettingsError, run_and_exit
from sunspot.settings import PREFIX, Settings, load_settings
from sunspot.storage.local import local_path

READS = ["run_name", "storage_path", "epochs", "global_batch_size", "learning_rate", "seed"]
"""Settings that the baseline reads."""


def main(words: Sequence[str] | None = None) -> int:
    """Read the settings, train, and print the output folder."""
    CommandParser(
        "python -m sunspot.baseline", "Train ResNet-18 on the bundled digits in plain PyTorch, on one device.", READS
    ).parse_args(words)
    settings = load_settings()
    defaults = Settings().environment()
    for variable, value in settings.environment().items():
        if variable.removeprefix(PREFIX).lower() not in READS and value != defaults[variable]:
            raise SettingsError(f"{variable} is not read by the baseline; unset it, or use `python -m sunspot.train`")
    if "://" in settings.storage_path:
        raise SettingsError(f"{PREFIX}STORAGE_PATH={settings.storage_path} is a bucket; set it to a local folder")

    import torch

    from sunspot.baseline.train import load_digits, save, train

    torch.manual_seed(settings.seed)
    training, test = load_digits()
    model, history = train(training, test, settings.epochs, settings.global_batch_size, settings.learning_rate)
    folder = local_path(settings.storage_path) / f"{settings.run_name}-baseline"
    save(folder, model, history)
    print(f"results in {folder}")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
