"""Makes predictions for images or datasets, or answers prompts (`sunspot predict` and `python -m sunspot.predict`)."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sunspot.code_archive import find_code
from sunspot.command_line import CommandParser
from sunspot.errors import SettingsError, run_and_exit
from sunspot.formatting import columns, plural, visible
from sunspot.log import print_logs
from sunspot.predict.command_arguments import add_arguments, check_arguments
from sunspot.settings import load_settings
from sunspot.settings.file import find_task

if TYPE_CHECKING:
    from sunspot.predict.classifier import Classifier

DESCRIPTION = """\
Make predictions for images or a dataset with a run's model, or answer prompts with a language model.

python -m sunspot.predict mnist digit.png more.npy                     print a line for each image
python -m sunspot.predict mnist --dataset mnist --output predictions   write Parquet; resumes if killed
python -m sunspot.predict lora --prompt "The with statement"           print a continuation, or a class"""


def main(words: Sequence[str] | None = None) -> int:
    """Run `python -m sunspot.predict`."""
    parser = CommandParser(
        "python -m sunspot.predict", DESCRIPTION, ("storage_path", "test_dataset", "data_root", "use_gpu")
    )
    add_arguments(parser)
    parser.add_argument("--storage", help="storage path of the runs (default: SUNSPOT_STORAGE_PATH)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    arguments = parser.parse_args(words)
    print_logs("stderr")
    predict(arguments)
    return 0


def predict(arguments: argparse.Namespace) -> None:
    """Print predictions for files or a dataset, or answers to prompts, as text or as one JSON document (--json)."""
    check_arguments(arguments)
    task = find_task(arguments.task)
    given = {"STORAGE_PATH": arguments.storage, "DATASET": arguments.dataset, "TASK": task}
    settings = load_settings({name: value for name, value in given.items() if value})

    from sunspot.plan import with_absolute_paths

    settings = with_absolute_paths(settings)
    find_code(settings.job.code)
    show: Callable[[dict[str, Any]], Iterator[str]]
    chosen = (arguments.run, arguments.checkpoint, settings.storage_path)
    if arguments.prompt:
        from sunspot.predict.classifier import answer_prompts, open_checkpoint

        show = show_answers
        model = open_checkpoint(*chosen, task)
        result = answer_prompts(model, arguments.prompt, arguments.tokens, settings.use_gpu)
    elif arguments.output:
        from sunspot.predict.batch import predict_dataset
        from sunspot.predict.classifier import open_checkpoint

        show = show_summary
        model = open_checkpoint(*chosen, task)
        result = predict_dataset(settings, model, arguments.split, arguments.output, arguments.workers)
    else:
        from sunspot.predict.classifier import Classifier

        show = show_table
        classifier = Classifier(*chosen, settings.use_gpu, task=task)
        result = predict_files(classifier, [Path(file) for file in arguments.file])
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(show(result)))


def predict_files(model: "Classifier", files: list[Path]) -> dict[str, Any]:
    """Return a JSON document with the checkpoint and each image's class and probabilities."""
    import numpy as np

    from sunspot.data.images import read_images
    from sunspot.predict.classifier import print_warnings

    print_warnings(model.warnings)
    if len(model.shape) != 3:
        raise SettingsError(
            f"{model.name}: the model does not predict images; use --dataset and --output to predict rows"
        )
    images = [read_images(file, model.shape, model.data.scales) for file in files]
    predictions, probabilities = model.predict(np.concatenate(images))
    places = [(file, index) for file, batch in zip(files, images, strict=True) for index in range(len(batch))]
    return {
        "checkpoint": model.name,
        "step": model.step,
        "images": [
            {
                "file": str(file),
                "index": index,
                "prediction": int(predicted),
                "class": model.data.name(int(predicted)),
                "probability": float(row[predicted]),
                "probabilities": [float(value) for value in row],
            }
            for (file, index), predicted, row in zip(places, predictions, probabilities, strict=True)
        ],
    }


def show_table(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each image. The line includes the image's index if its file contains several images."""
    counts = Counter(image["file"] for image in result["images"])
    rows = [["file", "prediction", "probability"]]
    for image in result["images"]:
        name = image["file"] + (f"[{image['index']}]" if counts[image["file"]] > 1 else "")
        rows.append([name, image["class"], f"{image['probability']:.4f}"])
    yield from map(visible, columns(rows))


def show_summary(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines with the number of rows, the accuracy and the location of the predictions."""
    yield f"{result['checkpoint']}: {result['rows']} rows of {result['dataset']} ({result['split']})"
    if result["accuracy"] is not None:
        yield f"  accuracy: {result['accuracy']:.4f}"
    kept = f", {result['kept']} of them from before" if result["kept"] else ""
    yield f"  predictions: {plural(result['parts'], 'file')} in {result['output']}{kept}"


def show_answers(result: dict[str, Any]) -> Iterator[str]:
    """Yield each prompt and its answer."""
    for each in result["answers"]:
        yield visible(f"{each['prompt']}: {each['answer']}")


if __name__ == "__main__":
    run_and_exit(main)
