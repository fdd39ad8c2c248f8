"""Adapter for tasks that train with a Trainer from transformers or TRL.

Only this file and transformers_loop.py use the Trainer, and they are imported only for tasks that define
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
from sunspot.errors import ConflictError
from sunspot.settings import PREFIX, Settings
from sunspot.tasks.defaults import unread_without_defaults
from sunspot.tasks.pretrained import ADAPTER, PretrainedModel
from sunspot.tasks.task import LOOP_FUNCTIONS, RATE_FUNCTIONS, Task

IN_ARGUMENTS = (
    "has a Trainer, which ignores this setting; unset it, and see max_grad_norm, torch_compile, bf16 and "
    "gradient_checkpointing among its own arguments"
)

UNREAD_SETTINGS = {
    **unread_without_defaults(("build_optimizer", "schedule")),
    **dict.fromkeys(
        ("clip_norm", "compile", "graph", "gradient_precision", "loader", "parallel", "recompute"), IN_ARGUMENTS
    ),
    "test_share": "has a Trainer; return a dict of train and test from build_dataset",
}
"""Reasons, keyed by the settings that a Trainer ignores."""

UNCALLED = {
    **dict.fromkeys(LOOP_FUNCTIONS, "its Trainer loops over the rows that build_dataset returns"),
    **dict.fromkeys(RATE_FUNCTIONS, "its Trainer builds the optimizer and its scheduler from its arguments"),
    "compute_metrics": "its Trainer evaluates held-out rows",
}
"""Reasons, keyed by the functions that are never called."""

REFUSED = (
    *("auto_find_batch_size", "deepspeed", "enable_jit_checkpoint", "fp16", "fsdp", "load_best_model_at_end"),
    *("parallelism_config", "push_to_hub", "sync_ref_model"),
)
"""Arguments that conflict with Sunspot's checkpoints, because they shard the state, add state that the checkpoints do
not contain, or save checkpoints of their own."""

ROW_METHODS = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples", "_prepare_inputs", "train")
"""Methods that a Trainer overrides if it chooses a step's rows itself, like Trainers that generate text (GRPO)."""


class TrainedModel(PretrainedModel):
    """The model of a Trainer, together with the Trainer itself."""

    def __init__(self, trainer: Trainer, task: str) -> None:
        adapted = hasattr(trainer.model, "peft_config")
        sha256 = hash_frozen(trainer.model) if adapted else ""
        super().__init__(trainer.model, f"{PREFIX}TASK={task}: the base of its model", sha256)
        self.trainer = trainer
        self.train()  # the Trainer does so in each pass
        # The Trainer's own loaders choose the columns of a row, and collate rows into a batch.
        self._loaders = [trainer.get_train_dataloader()]
        if trainer.eval_dataset is not None:
            self._loaders.append(trainer.get_eval_dataloader())

    def collate(self, batch: Batch) -> Any:
        """Return the rows whose ids are in `batch`, collated for the Trainer."""
        loader, ids = self._loaders[int(batch[HELD_OUT][0])], batch["row"].tolist()
        fetch = getattr(loader.dataset, "__getitems__", None)
        return loader.collate_fn(fetch(ids) if fetch else [loader.dataset[row] for row in ids])


class TrainerTask(Task):
    """Adapter for a task that defines `build_dataset(settings)` and `build_trainer(settings, dataset) -> Trainer`.

    `build_dataset` returns a map-style dataset, or a dict with the datasets `train` and `test` (the held-out rows). The
    result is passed to `build_trainer`.
    """

    uncalled = UNCALLED

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Create the adapter for a task's module.

        Raises `SettingsError` if the module does not define `build_dataset`, or if a setting that a Trainer ignores is
        set.
        """
        mixed_precision = {"precision": IN_ARGUMENTS} if settings.precision == "bf16" else {}
        super().__init__(module, settings, UNREAD_SETTINGS | mixed_precision)
        if not self.build_dataset:
            raise self.error(
                "the module defines build_trainer, but not build_dataset(settings), which returns the rows; define both"
            )

    def library_loop(self, worker: Any) -> None:
        from sunspot.adapters.transformers_loop import train

        train(worker, self)

    def find_sources(self, settings: Settings) -> tuple[RowNumbers, RowNumbers | None]:
        """Return sources for the datasets from `build_dataset`. The sources contain only row numbers."""
        return self._number(self.module.build_dataset(settings))

    def build_model(self, settings: Settings, source: Source) -> TrainedModel:
        """Build the Trainer with the rows on this machine, and return its model.

        Raises `SettingsError` if the Trainer uses unsupported features, and `ConflictError` if the rows differ from
        those on the driver.
        """
        dataset = self.module.build_dataset(settings)
        here, held_out = self._number(dataset)
        if source.row_groups and source.fingerprint != here.fingerprint:
            raise ConflictError(
                f"{PREFIX}TASK={settings.task}: build_dataset returned different rows here than on the driver; seed "
                "any splitting or shuffling, and use the same files on all nodes"
            )
        if not torch.cuda.is_available():
            os.environ["ACCELERATE_USE_CPU"] = (
                "true"  # otherwise, Accelerate treats each worker without a GPU as a separate run
            )
        set_seed(settings.seed)  # reading the rows may have drawn random numbers
        trainer = self.module.build_trainer(settings, dataset)
        if not isinstance(trainer, Trainer):
            raise self.error(f"build_trainer's result has type {type(trainer).__name__}; return a transformers.Trainer")
        self._refuse(trainer, [rows_in(here), rows_in(held_out) if held_out else 0])
        silence(trainer)
        model = TrainedModel(trainer, settings.task)
        if model.adapted and settings.weights != "pt":
            raise self.error(f"{PREFIX}WEIGHTS has no effect with peft, which always saves {ADAPTER}; set it to pt")
        return model

    def build_optimizer(self, model: TrainedModel, settings: Settings) -> torch.optim.Optimizer:
        """Build the Trainer's own optimizer."""
        return model.trainer.create_optimizer()

    def begin_schedule(self, scheduler: LRScheduler, step: int) -> None:
        """Advance a new scheduler to its state after `step` optimizer steps. Checkpoints do not store this state."""
        with warnings.catch_warnings():
            # The scheduler steps before the optimizer on purpose.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step")
            for _ in range(step):
                scheduler.step()

    def loss(self, model: TrainedModel, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """Return the mean loss of held-out rows and the values that the Trainer logs, each repeated for every row."""
        trainer, rows = model.trainer, len(batch["row"])
        with trainer.accelerator.autocast():
            loss, _, _ = trainer.prediction_step(trainer.model, model.collate(batch), prediction_loss_only=True)
        if loss is None:
            raise self.error("the Trainer computes no loss for held-out rows; list their label columns in label_names")
        logs: dict[str, float] = {}
        trainer.log(logs)  # TRL's Trainers add their own metrics here
        del trainer.state.log_history[-1:]
        return loss.expand(rows), {name: loss.new_full((rows,), value) for name, value in measured(logs).items()}

    def checkpoint_files(self, model: TrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """Return the files needed to load a checkpoint with peft, or with transformers if WEIGHTS is safetensors."""
        config = None if model.adapted else getattr(model.model, "config", None)
        with tempfile.TemporaryDirectory() as folder:
            for part in filter(None, (config, model.trainer.processing_class)):
                part.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        return files | model.adapter_files(state)

    def _number(self, dataset: Any) -> tuple[RowNumbers, RowNumbers | None]:
        splits = find_splits(dataset, self.settings.task)
        set_seed(self.settings.seed)  # rows can be augmented at random
        return number_rows(splits.train), number_rows(splits.test, held_out=True) if splits.test is not None else None

    def _refuse(self, trainer: Trainer, rows: list[int]) -> None:
        """Raise `SettingsError` if the Trainer uses unsupported features, or if its numbers of rows differ from `rows`.

        `rows` contains the number of training rows and the number of held-out rows.
        """
        name, args = type(trainer).__name__, trainer.args
        own = [each for each in ROW_METHODS if getattr(type(trainer), each) is not getattr(Trainer, each)]
        if own:
            raise self.error(
                f"the {name} chooses rows itself ({own[0]}), so a different number of workers would train on different "
                f"rows; use a Trainer that does not override {own[0]}"
            )
        given = [f"{each}={value!r}" for each in REFUSED if (value := getattr(args, each, None))]
        if given:
            raise self.error(
                f"the Trainer's arguments contain {given[0]}; remove this argument, because the Trainer would keep "
                "state, such as shards or loss scales, that checkpoints lack"
            )
        if "lomo" in args.optim or "layerwise" in args.optim:
            raise self.error(
                f"optim={args.optim.value!r} changes weights in the backward pass; choose another optimizer"
            )
        plateau = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        if plateau or isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
            raise self.error(
                "the Trainer's scheduler follows a metric, but a run can resume from any step, so the learning rate "
                "must depend only on the step; choose another scheduler"
            )
        if trainer.compute_metrics or trainer.model_init:
            raise self.error(
                "the Trainer's arguments compute_metrics and model_init would never be called, because Sunspot "
                "computes only the loss of held-out rows, and gets the model from build_trainer; remove these arguments"
            )
        for kind, dataset, there in zip(
            ("train", "eval"), (trainer.train_dataset, trainer.eval_dataset), rows, strict=True
        ):
            if count(dataset) != there:
                raise self.error(
                    f"the {name}'s {kind}_dataset has {max(0, count(dataset))} rows, but build_dataset returned "
                    f"{there}; pass exactly these rows to the {name}, and pack or filter rows in build_dataset"
                )


def silence(trainer: Trainer) -> None:
    """Disable a Trainer's own saving, evaluation and reports, and make it count tokens over all workers."""
    args = trainer.args
    args.save_strategy = SaveStrategy.NO
    args.eval_strategy = IntervalStrategy.NO
    args.eval_on_start = False
    args.average_tokens_across_devices = True
    for callback in (ProgressCallback, PrinterCallback, *get_reporting_integration_callbacks(args.report_to)):
        trainer.remove_callback(callback)


def measured(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a Trainer's log, except those that Sunspot records itself."""
    known = ("epoch", "learning_rate", "loss", "num_input_tokens_seen", "num_tokens")
    numbers = {name.removeprefix("eval_"): value for name, value in logs.items() if isinstance(value, (int, float))}
    return {name.replace("/", "_"): float(value) for name, value in numbers.items() if name not in known}


def count(dataset: Any) -> int:
    """Return the number of rows in a dataset, 0 if it is None, or -1 if it has no length."""
    try:
        return 0 if dataset is None else len(dataset)
    except TypeError:
        return -1


def hash_frozen(model: torch.nn.Module) -> str:
    """Return a SHA-256 hash of the frozen weights, computed from integer sums, which are the same on all devices."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    sums = [(name, [*each.shape], int(each.view(bits[each.element_size()]).sum())) for name, each in frozen.items()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()
