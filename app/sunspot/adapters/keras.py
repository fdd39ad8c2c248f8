"""Adapter for tasks that train a Keras model on TensorFlow.

The adapter has its own training loop, and does not call the model's `fit`. It wraps the model in a PyTorch module that
has no parameters. The module's extra state contains the Keras variables.

Only this file imports Keras, and this file is imported only for tasks that define `build_keras`.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # otherwise, TensorFlow prints a page of text about its kernels

import keras
import numpy as np
import tensorflow as tf
import torch

from sunspot.data.source import Batch, Source, model_inputs
from sunspot.formatting import kind_of
from sunspot.settings import PREFIX, Settings
from sunspot.tasks.defaults import build_empty_optimizer, learning_rate_factor
from sunspot.tasks.task import RATE_FUNCTIONS, Task, TrainingRun

# torch imports Triton with its first optimizer. Both TensorFlow and Triton contain LLVM. If Triton is loaded second,
# their options clash and the process aborts (TensorFlow 2.21, torch 2.15). Nothing here needs Triton.
sys.modules.setdefault("triton", None)  # type: ignore[arg-type]

UNREAD_SETTINGS = dict.fromkeys(
    (
        *("micro_batch_size", "weight_decay", "clip_norm", "precision", "gradient_precision", "parallel", "recompute"),
        *("compile", "graph", "ema", "weights"),
    ),
    "has a Keras model, which ignores this setting; unset it",
)
"""Reasons, keyed by the settings that Keras ignores."""

UNCALLED = dict.fromkeys(RATE_FUNCTIONS, "its Keras model has its own optimizer, and settings scale the learning rate")
"""Reasons, keyed by the functions that are never called."""


class KerasModule(torch.nn.Module):
    """A compiled Keras model with its optimizer, as a PyTorch module.

    Its outputs are logits, [B, classes], or values, [B]. Gradients are summed over all workers.
    """

    def __init__(self, build: Callable[[], keras.Model]) -> None:
        super().__init__()
        self._strategy = join_workers()
        with self._strategy.scope():
            self.keras = build()
            self.keras.optimizer.build(self.keras.trainable_variables)
        self.built_rate = self.keras.optimizer.get_config()["learning_rate"]
        "Learning rate of the optimizer as built: a number, or a dict that describes a schedule."
        self._loss = keras.losses.get(self.keras.loss)
        if isinstance(self._loss, keras.losses.Loss):
            self._loss.reduction = "none"
        self._score = tf.function(self.keras, reduce_retracing=True)
        self._learn = tf.function(lambda *batch: self._strategy.run(self._take_step, batch), reduce_retracing=True)

    def take_step(self, batch: Batch, learning_rate: float, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Take an optimizer step together with all workers. Return each row's loss, [B], and the outputs.

        The gradient of the summed losses is multiplied by `weight`.
        """
        self.keras.optimizer.learning_rate = learning_rate
        losses, outputs = self._learn(inputs_of(batch), batch["label"].numpy(force=True), np.float32(weight))
        return to_torch(losses), to_torch(outputs)

    def _take_step(self, inputs: Any, labels: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        model = self.keras
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            losses = self._loss(labels, outputs)
            # Losses that layers add, such as regularization, are summed over the workers, too.
            total = tf.reduce_sum(losses) * weight + sum(model.losses) / self._strategy.num_replicas_in_sync
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(total, variables), variables)
        return losses, outputs

    def forward(self, batch: Batch) -> torch.Tensor:
        return to_torch(self._score(inputs_of(batch)))

    def losses(self, batch: Batch, outputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row, [B]."""
        return to_torch(self._loss(batch["label"].numpy(force=True), outputs.numpy()))

    def get_extra_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the variables of the model and of the optimizer, in Keras's order."""
        return {kind: [to_torch(each.value) for each in variables] for kind, variables in self._variables().items()}

    def set_extra_state(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for kind, variables in self._variables().items():
            if [tuple(each.shape) for each in state[kind]] != [tuple(each.shape) for each in variables]:
                raise RuntimeError(f"the {kind}'s variables differ in shape from those in the state")
            for variable, value in zip(variables, state[kind], strict=True):
                variable.assign(value.numpy(force=True))

    def _variables(self) -> dict[str, list[Any]]:
        return {"model": self.keras.variables, "optimizer": self.keras.optimizer.variables}


class KerasTask(Task):
    """Adapter for a task that defines `build_keras(settings, source)`, which returns a compiled `keras.Model`."""

    uncalled = UNCALLED

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Create the adapter for a task's module. Raises `SettingsError` if a setting that Keras ignores is set."""
        super().__init__(module, settings, UNREAD_SETTINGS)
        self.schedule = functools.partial(learning_rate_factor, settings)

    def find_ray_trainer(self, settings: Settings, source: Source) -> str:
        return "ray.train.tensorflow:TensorflowTrainer"

    def build_model(self, settings: Settings, source: Source) -> KerasModule:
        """Build the same Keras model on all workers. Raises `SettingsError` if it is not a compiled `keras.Model`."""
        keras.utils.set_random_seed(settings.seed)

        def build() -> keras.Model:
            model = self.module.build_keras(settings, source)
            if not isinstance(model, keras.Model) or not model.built or not model.compiled:
                raise self.error(
                    f"build_keras returned {kind_of(model)}; return a keras.Model with an input shape, and "
                    "call its compile(optimizer, loss) first"
                )
            return model

        return KerasModule(build)

    def build_optimizer(self, model: KerasModule, settings: Settings) -> torch.optim.Optimizer:
        """Build an optimizer that only holds the peak learning rate.

        The peak is LEARNING_RATE if it is set, or else the Keras optimizer's own learning rate. Raises `SettingsError`
        if the Keras optimizer has a schedule.
        """
        own = model.built_rate
        if not isinstance(own, float):
            raise self.error(
                "the Keras model's optimizer has a learning rate schedule "
                f"({type(model.keras.optimizer).__name__} with {own.get('class_name')}), but {PREFIX}SCHEDULE and "
                f"{PREFIX}WARMUP_STEPS set each step's learning rate; give the optimizer a fixed learning rate"
            )
        given = settings.learning_rate != Settings.model_fields["learning_rate"].default
        rounded = float(f"{own:.7g}")  # Keras stores it in float32
        return build_empty_optimizer(settings.learning_rate if given else rounded)

    def train(self, run: TrainingRun) -> None:
        """Train until the run ends or is stopped."""
        for batch in run.batches():
            learning_rate = run.optimizer.param_groups[0]["lr"]
            run.optimizer.step()  # wait until a checkpoint has copied the state, because the variables change below
            losses, outputs = run.model.take_step(batch, learning_rate, run.weight / run.world_size)
            run.log({"loss": losses, **rate(outputs, batch)})
            run.step()

    def loss(self, model: KerasModule, batch: Batch) -> tuple[torch.Tensor, Batch]:
        outputs = model(batch)
        return model.losses(batch, outputs), rate(outputs, batch)

    def predict(self, model: KerasModule, batch: Batch) -> torch.Tensor:
        return model(batch)

    def checkpoint_files(self, model: KerasModule, state: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the model as a file that `keras.models.load_model` can load."""
        copy = keras.models.clone_model(model.keras)
        for variable, value in zip(copy.variables, state["_extra_state"]["model"], strict=True):
            variable.assign(value.numpy())
        with tempfile.TemporaryDirectory() as folder:
            copy.save(Path(folder, "model.keras"))
            return {"model.keras": Path(folder, "model.keras").read_bytes()}


@functools.cache
def join_workers() -> tf.distribute.Strategy:
    """Return the TensorFlow strategy for the workers of Ray's TensorflowTrainer, or for a single process."""
    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    tf.config.experimental.enable_op_determinism()
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def inputs_of(batch: Batch) -> Any:
    """Return the model's inputs, which are all columns except `row` and `label`.

    The result is an array, or a dict of arrays if there are several columns. Images are [B, H, W, C], as in Keras.
    """
    columns = {name: column.numpy(force=True) for name, column in model_inputs(batch).items()}
    if "image" in columns:
        columns["image"] = columns["image"].transpose(0, 2, 3, 1)
    return columns if len(columns) > 1 else next(iter(columns.values()))


def rate(outputs: torch.Tensor, batch: Batch) -> Batch:
    """Return the accuracy of each row, or an empty dict for a task without classes."""
    return {"accuracy": outputs.argmax(1) == batch["label"].cpu()} if outputs.ndim > 1 else {}


def to_torch(tensor: tf.Tensor) -> torch.Tensor:
    """Return a copy of a TensorFlow tensor as a torch tensor."""
    return torch.tensor(np.asarray(tensor))
