"""Adapts a Trainer of transformers, or one of TRL's, to the functions of any other task (`sunspot.tasks.Task`).

Only this file and train/transformers.py know the Trainer; both are imported only for a task that defines
`build_trainer`.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import PrinterCallback, ProgressCallback, Trainer, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from sunspot.data.source import HELD_OUT, Batch, RowNumbers, Source, number_rows, rows_in
from sunspot.data.torch_dataset import find_splits
from sunspot.errors import ConflictError, SettingsError
from sunspot.settings import PREFIX, Settings
from sunspot.tasks.defaults import refuse_unread, unread_without_defaults
from sunspot.tasks.pretrained import ADAPTER, PretrainedModel

IN_ARGUMENTS = (
    "has a Trainer, which does not read it; leave it out, and see max_grad_norm, torch_compile and bf16 among its own "
    "arguments"
)

UNREAD_SETTINGS = {
    **unread_without_defaults(("build_optimizer", "schedule")),
    **dict.fromkeys(("clip_norm", "compile", "gradient_precision", "loader", "parallel"), IN_ARGUMENTS),
    "test_share": "has a Trainer; return a dict of train and test from build_dataset",
}
"""Reason for refusing each setting that a Trainer does not read."""

REFUSED = (
    *("auto_find_batch_size", "deepspeed", "enable_jit_checkpoint", "fp16", "fsdp", "load_best_model_at_end"),
    *("parallelism_config", "push_to_hub", "sync_ref_model"),
)
"""Arguments that shard what a checkpoint of ours holds whole, change what it does not hold, or want others."""

ROW_METHODS = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples", "_prepare_inputs", "train")
"""Methods by which a Trainer chooses the rows of a step itself, as those that generate text do (GRPO)."""


class TrainedModel(PretrainedModel):
    """The model of a Trainer, with the Trainer."""

    def __init__(self, trainer: Trainer, task: str) -> None:
        adapted = hasattr(trainer.model, "peft_config")
        sha256 = hash_frozen(trainer.model) if adapted else ""
        super().__init__(trainer.model, f"{PREFIX}TASK={task}: the base of its model", sha256)
        self.trainer = trainer
        self.train()  # as the Trainer puts all of it in each pass
        # The Trainer's own say which columns of a row it takes, and how rows become a batch.
        self._loaders = [trainer.get_train_dataloader()]
        if trainer.eval_dataset is not None:
            self._loaders.append(trainer.get_eval_dataloader())

    def collate(self, batch: Batch) -> Any:
        """Return the rows of a batch of ids, as the Trainer computes with them."""
        loader, ids = self._loaders[int(batch[HELD_OUT][0])], batch["row"].tolist()
        fetch = getattr(loader.dataset, "__getitems__", None)
        return loader.collate_fn(fetch(ids) if fetch else [loader.dataset[row] for row in ids])


class TrainerTask:
    """A task module that defines `build_dataset(settings)` and `build_trainer(settings, source) -> Trainer`.

    The first returns rows, anything with a length and rows by number, or a dict of `train` and `test`, the held-out
    ones; the second is given what it returns.
    """

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Raises `SettingsError` for a module without `build_dataset`, and for settings that a Trainer ignores."""
        self._module, self._settings = module, settings
        if not hasattr(module, "build_dataset"):
            raise self._error("has build_trainer without build_dataset(settings), which returns the rows; define both")
        mixed_precision = {"precision": IN_ARGUMENTS} if settings.precision == "bf16" else {}
        refuse_unread(settings, UNREAD_SETTINGS | mixed_precision)

    def __getattr__(self, name: str) -> Any:
        """Return `build_trainer`, and `answer`, if the module has it."""
        return getattr(self._module, name)

    def find_sources(self, settings: Settings) -> tuple[RowNumbers, RowNumbers | None]:
        """Number the rows of `build_dataset`."""
        return self._number(self._module.build_dataset(settings))

    def build_model(self, settings: Settings, source: Source) -> TrainedModel:
        """Build the Trainer with the rows as they are here; raises `SettingsError` if it does what is not supported.

        Raises `ConflictError` for other rows than the driver's.
        """
        dataset = self._module.build_dataset(settings)
        here, held_out = self._number(dataset)
        if source.row_groups and source.fingerprint != here.fingerprint:
            raise ConflictError(
                f"{PREFIX}TASK={settings.task}: its build_dataset returns other rows here than on the driver; give "
                "what splits or shuffles them a seed, and all nodes the same files"
            )
        if not torch.cuda.is_available():
            os.environ["ACCELERATE_USE_CPU"] = "true"  # else Accelerate takes each worker without a GPU for a run
        set_seed(settings.seed)  # numbering may have drawn
        trainer = self._module.build_trainer(settings, dataset)
        if not isinstance(trainer, Trainer):
            raise self._error(f"build_trainer returned a {type(trainer).__name__}; return a transformers.Trainer")
        self._refuse(trainer, [rows_in(here), rows_in(held_out) if held_out else 0])
        silence(trainer)
        model = TrainedModel(trainer, settings.task)
        if model.adapted and settings.weights != "pt":
            raise self._error(f"each checkpoint of peft has its weights as {ADAPTER}; set {PREFIX}WEIGHTS to pt")
        return model

    def build_optimizer(self, model: TrainedModel, settings: Settings) -> torch.optim.Optimizer:
        """Build the Trainer's own."""
        return model.trainer.create_optimizer()

    def begin_schedule(self, scheduler: LRScheduler, step: int) -> None:
        """Bring a new scheduler to its state after `step` optimizer steps; checkpoints do not store it."""
        with warnings.catch_warnings():
            # Of stepping before the optimizer, intended here.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
            for _ in range(step):
                scheduler.step()

    def loss(self, model: TrainedModel, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return the loss of held-out rows, and what the Trainer logs of them; each row gets the batch's mean."""
        trainer, rows = model.trainer, len(batch["row"])
        with trainer.accelerator.autocast():
            loss, _, _ = trainer.prediction_step(trainer.model, model.collate(batch), prediction_loss_only=True)
        if loss is None:
            raise self._error("its Trainer computes no loss of held-out rows; name their labels in label_names")
        logs: dict[str, float] = {}
        trainer.log(logs)  # one of TRL's adds what it has measured
        del trainer.state.log_history[-1:]
        return loss.expand(rows), {name: loss.new_full((rows,), value) for name, value in measured(logs).items()}

    def checkpoint_files(self, model: TrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """Return what makes a checkpoint a directory of peft's, or with WEIGHTS=safetensors of transformers'."""
        config = None if model.adapted else getattr(model.model, "config", None)
        with tempfile.TemporaryDirectory() as folder:
            for part in filter(None, (config, model.trainer.processing_class)):
                part.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        return files | model.adapter_files(state)

    def _number(self, dataset: Any) -> tuple[RowNumbers, RowNumbers | None]:
        splits = find_splits(dataset, self._settings.task)
        set_seed(self._settings.seed)  # for rows that change at random
        return number_rows(splits.train), number_rows(splits.test, held_out=True) if splits.test is not None else None

    def _refuse(self, trainer: Trainer, rows: list[int]) -> None:
        """Raise `SettingsError` for a Trainer that would train on others than these training and held-out rows."""
        name, args = type(trainer).__name__, trainer.args
        if own := [each for each in ROW_METHODS if getattr(type(trainer), each) is not getattr(Trainer, each)]:
            raise self._error(f"its {name} chooses rows itself ({own[0]}), which no other number of workers can repeat")
        if given := [f"{each}={value!r}" for each in REFUSED if (value := getattr(args, each, None))]:
            raise self._error(
                f"{given[0]} among its arguments; leave it out: sharding, loss scales and what else it "
                "keeps or saves itself would be in no checkpoint"
            )
        if "lomo" in args.optim or "layerwise" in args.optim:
            raise self._error(f"optim={args.optim.value!r} changes weights within the backward pass; choose another")
        plateau = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        if plateau or isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
            raise self._error(
                "its scheduler follows a metric; learning rates must be a function of the step: choose another"
            )
        if trainer.compute_metrics or trainer.model_init:
            raise self._error(
                "compute_metrics and model_init are never called; leave them out: held-out rows are "
                "measured by the loss, and build_trainer makes the model"
            )
        for kind, dataset, there in zip(
            ("train", "eval"), (trainer.train_dataset, trainer.eval_dataset), rows, strict=True
        ):
            if count(dataset) != there:
                raise self._error(
                    f"its {name} has {max(0, count(dataset))} rows as {kind}_dataset, and build_dataset returned "
                    f"{there}; give it these, and pack or leave out rows in build_dataset"
                )

    def _error(self, text: str) -> SettingsError:
        return SettingsError(f"{PREFIX}TASK={self._settings.task}: {text}")


def silence(trainer: Trainer) -> None:
    """Turn off what Sunspot does: saving, evaluating, reporting; and count a step's tokens over all workers."""
    args = trainer.args
    args.save_strategy, args.eval_strategy, args.eval_on_start = SaveStrategy.NO, IntervalStrategy.NO, False
    args.average_tokens_across_devices = True
    for callback in (ProgressCallback, PrinterCallback, *get_reporting_integration_callbacks(args.report_to)):
        trainer.remove_callback(callback)


def measured(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a Trainer's log that its record of the history does not have anyway."""
    known = ("epoch", "learning_rate", "loss", "num_input_tokens_seen", "num_tokens")
    numbers = {name.removeprefix("eval_"): value for name, value in logs.items() if isinstance(value, (int, float))}
    return {name.replace("/", "_"): float(value) for name, value in numbers.items() if name not in known}


def count(dataset: Any) -> int:
    """Count the rows of a dataset: 0 for none, -1 for one that does not know."""
    try:
        return 0 if dataset is None else len(dataset)
    except TypeError:
        return -1


def hash_frozen(model: torch.nn.Module) -> str:
    """Return a SHA-256 of what does not train, by the sums of its bits: the same on every device."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    sums = [(name, [*each.shape], int(each.view(bits[each.element_size()]).sum())) for name, each in frozen.items()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()
