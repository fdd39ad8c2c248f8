"""Loads a checkpoint's model in this process, to predict rows or answer prompts."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sunspot.checkpoint.files import load_state, load_weights
from sunspot.checkpoint.parts import is_sharded, load_model
from sunspot.data.images import read_images
from sunspot.data.order import largest_pass
from sunspot.data.source import EmptySource, ModelData, model_inputs
from sunspot.errors import DamageError, NotFoundError, SettingsError, shorten
from sunspot.formatting import kind_of
from sunspot.predict.forward import forward_rows
from sunspot.ray_session import enter_folder
from sunspot.run import Run, open_run
from sunspot.run.checkpoints import Checkpoint, CheckpointDirectory, choose, find_faults, open_directory
from sunspot.run.overview import describe_absence
from sunspot.settings import PREFIX, Settings, recorded_settings
from sunspot.settings.file import find_task
from sunspot.tasks import load_predict, load_task

log = logging.getLogger(__name__)

Images = np.ndarray | torch.Tensor | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Images as an array or tensor, uint8 [C, H, W] or [B, C, H, W], or as one or more files (data/images.py)."""


OWN_TASKS = "sunspot.tasks."
"""Module prefix of Sunspot's own tasks."""


class ModelCheckpoint(NamedTuple):
    """A verified checkpoint, with the settings and the data description that it contains."""

    run: Run
    checkpoint: Checkpoint
    settings: Settings
    "The run's settings when the checkpoint was written."
    data: ModelData
    "The record of the data on which the model was trained."
    warnings: tuple[str, ...]
    "Warnings about newer checkpoints that were skipped."

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments that a `Classifier` in any process needs to open this checkpoint."""
        if isinstance(self.run, CheckpointDirectory):
            return {"run": self.run.location, "task": self.settings.task}
        storage = self.run.storage.locate("")
        return {
            "run": self.run.name,
            "checkpoint": self.checkpoint.name,
            "storage": storage,
            "task": self.settings.task,
        }


class Classifier:
    """A verified checkpoint's model in evaluation mode, on this process's GPU or CPU."""

    def __init__(
        self,
        run: str,
        checkpoint: str = "newest",
        storage: str = "runs",
        use_gpu: str = "auto",
        folder: str = "",
        task: str = "",
    ) -> None:
        """Load the checkpoint that `open_checkpoint` finds. `use_gpu` is a value of USE_GPU.

        If `folder` is set, change to it first, because a Ray process does not start in its caller's folder. Raises
        `SettingsError` if the task has no `predict`, and `ConflictError` if the weights do not fit the task's model.
        """
        enter_folder(folder)
        loaded = open_checkpoint(run, checkpoint, storage, task)
        self.name = loaded.checkpoint.name
        self.step = loaded.checkpoint.step
        self.metrics = loaded.checkpoint.metrics
        self.data = loaded.data
        self.shape = self.data.shape
        self.classes = self.data.classes
        self.class_names = self.data.class_names
        self._settings = loaded.settings
        self.warnings = loaded.warnings
        self._predict = load_predict(self._settings)
        self._device = choose_device(use_gpu)
        self._model = restore_model(loaded).to(self._device).eval()

    def describe(self) -> dict[str, Any]:
        """Return a description of the model as a dict.

        The keys are the checkpoint's `name`, `step` and `metrics`, the `shape` [C, H, W] of an image, the number of
        `classes`, their `class_names` (if any), the `device`, and `warnings` about skipped checkpoints.
        """
        names = ("name", "step", "metrics", "shape", "classes", "class_names", "warnings")
        return {**{name: getattr(self, name) for name in names}, "device": str(self._device)}

    def predict(self, images: Images) -> tuple[np.ndarray, np.ndarray]:
        """Return the most probable class of each image, int64 [B], and all probabilities, float32 [B, classes].

        A single image counts as a batch of one. The model runs in the run's precision, on batches that are no larger
        than those of the run. Raises `SettingsError` if the images do not fit the model.
        """
        return self.predict_rows({"image": self._as_batch(images).numpy()})

    @torch.inference_mode()
    def predict_rows(self, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Predict rows with the task's columns, and return the same arrays as `predict`.

        If there are no classes, return the model's output and an empty array [B, 0].
        """
        run = self._settings
        largest = largest_pass(run.global_batch_size, run.num_workers.most, run.micro_batch_size)
        # Arrays from Ray's object store are read-only, which torch warns about, so they are copied.
        batch = {name: torch.from_numpy(column.copy()) for name, column in model_inputs(rows).items()}
        count = len(next(iter(batch.values())))
        passes = []
        for first in range(0, count, largest):
            part = {name: column[first : first + largest].to(self._device) for name, column in batch.items()}
            passes.append(forward_rows(self._predict, self._model, part, run, self.classes))
        scores = torch.cat(passes).float()
        if not self.classes:
            return scores.cpu().numpy(), np.empty((count, 0), np.float32)
        return scores.argmax(dim=1).cpu().numpy(), scores.softmax(dim=1).cpu().numpy()

    def _as_batch(self, images: Images) -> torch.Tensor:
        """Return images as uint8 [B, C, H, W]. Raises `SettingsError` if they do not fit the model."""
        if isinstance(images, (str, os.PathLike)):
            images = [images]
        if isinstance(images, Sequence) and images:
            images = np.concatenate([read_images(Path(file), self.shape, self.data.scales) for file in images])
        if not isinstance(images, (np.ndarray, torch.Tensor)):
            raise SettingsError(f"images must be an array, a tensor or file names, not {type(images).__name__}")
        shape = list(images.shape)
        dtype = str(images.dtype).removeprefix("torch.")
        if dtype != "uint8" or len(shape) not in (3, 4) or tuple(shape[-3:]) != self.shape or not shape[0]:
            taken = ", ".join(str(length) for length in self.shape)
            raise SettingsError(
                f"the images are {dtype} {shape}, but the model needs uint8 [{taken}] for one image (channels, height, "
                f"width), or uint8 [B, {taken}] for several, with pixels from 0 to 255"
            )
        batch = torch.from_numpy(images.copy()) if isinstance(images, np.ndarray) else images
        return batch.reshape(-1, *self.shape)


def open_checkpoint(run: str, checkpoint: str, storage: str, task: str = "") -> ModelCheckpoint:
    """Open a `run`'s `checkpoint` ('newest', 'best' or a name) below `storage`, or the checkpoint in a directory.

    A directory is a path or URL with a '/', passed as `run` or `checkpoint`. All files must match the size and SHA-256
    in the manifest before anything is unpickled. Only tensors and plain values are unpickled.

    Raises `SettingsError` unless the checkpoint's task is one of Sunspot's own tasks or the user's `task`, because
    loading the model imports the checkpoint's task. If `task` is empty, `find_task` finds the user's task. Raises
    `NotFoundError`, `StorageError` or `DamageError` if the checkpoint is missing, unreadable or damaged.
    """
    warnings: list[str] = []
    location = next((place for place in (checkpoint, run) if "/" in place), None)
    if location:
        place, chosen = open_directory(location)
    else:
        place = open_run(storage, run)
        try:
            chosen, warnings = choose(place, checkpoint)
        except NotFoundError as error:
            raise NotFoundError(describe_absence(place) or str(error)) from error
    where = place.storage.locate(place.key("checkpoints", chosen.name)).rstrip("/")
    faults = find_faults(place, chosen)
    needed = ["extra_state.pt"] if is_sharded(chosen) else ["model.pt", "extra_state.pt"]
    faults += [f"the manifest does not list {file}" for file in needed if file not in chosen.files]
    if faults:
        raise DamageError(f"{where} is damaged: {'; '.join(faults)}")
    extra = load_state(place, chosen, "extra_state.pt")
    try:
        if not isinstance(extra, dict):
            raise TypeError(kind_of(extra))
        data = ModelData.from_record(extra["data"])
        settings = recorded_settings(extra["settings"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        kind = f"{type(error).__name__}: {shorten(error)}"
        raise DamageError(
            f"{where}/extra_state.pt cannot be used: it does not describe the model's data and settings ({kind})"
        ) from error
    refuse_foreign_task(settings.task, task, where)
    return ModelCheckpoint(place, chosen, settings, data, tuple(warnings))


def refuse_foreign_task(task: str, own: str, where: str) -> None:
    """Raise `SettingsError` if a run's `task` is neither one of Sunspot's tasks nor the user's `own` task.

    If `own` is empty, `find_task` finds the user's task. Importing a module executes it, and anyone who can write to
    the run's storage could name any module as the run's task.
    """
    if task.startswith(OWN_TASKS):
        return
    own = find_task(own)
    if task != own:
        yours = f"SUNSPOT_TASK is {own}" if own else "SUNSPOT_TASK is not set"
        raise SettingsError(
            f"{where}: the run's task is {task}, but {yours}. Importing a module executes it; if you trust this "
            f"module, use --task {task}, SUNSPOT_TASK={task}, or in Python task={task!r}"
        )


def restore_model(loaded: ModelCheckpoint) -> torch.nn.Module:
    """Build a checkpoint's model on the CPU. Raises `ConflictError` if the weights do not fit the model."""
    settings = loaded.settings.model_copy(update={"parallel": "ddp"})  # this process needs the whole model
    model = load_task(settings).build_model(settings, EmptySource(**vars(loaded.data)))
    load_weights(model, load_model(loaded.run, loaded.checkpoint), loaded.checkpoint.name)
    return model


def answer_prompts(loaded: ModelCheckpoint, prompts: list[str], tokens: int, use_gpu: str) -> dict[str, Any]:
    """Return a JSON document with the checkpoint and the model's answers, each of at most `tokens` tokens.

    Raises whatever `restore_model` raises, and `SettingsError` if the task has no `answer`.
    """
    answer = load_task(loaded.settings).answer
    if answer is None:
        raise SettingsError(
            f"{PREFIX}TASK={loaded.settings.task} does not define answer(model, prompts, tokens) -> texts, so its "
            "models cannot answer prompts; define this function, or use a model that was trained with "
            "sunspot.tasks.finetune"
        )
    texts = answer(restore_model(loaded).to(choose_device(use_gpu)).eval(), prompts, tokens)
    return {
        "checkpoint": loaded.checkpoint.name,
        "step": loaded.checkpoint.step,
        "warnings": list(loaded.warnings),
        "answers": [{"prompt": prompt, "answer": text} for prompt, text in zip(prompts, texts, strict=True)],
    }


def choose_device(use_gpu: str) -> torch.device:
    """Return this process's GPU, or the CPU if there is no GPU or USE_GPU is 'false'.

    Raises `SettingsError` if USE_GPU is 'true' but there is no GPU.
    """
    if use_gpu != "false" and torch.cuda.is_available():
        return torch.device("cuda")
    if use_gpu == "true":
        raise SettingsError("SUNSPOT_USE_GPU=true, but this process has no GPU; set it to auto")
    return torch.device("cpu")


def print_warnings(texts: Iterable[str]) -> None:
    """Log each warning on stderr."""
    for text in texts:
        log.warning(text)
