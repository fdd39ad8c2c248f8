"""Adapts the gradient-boosted trees of XGBoost and LightGBM to the functions of a task (`sunspot.tasks.Task`).

The trees become a PyTorch module whose state is the library's own model, as bytes. A step is a round, which sees all
rows and adds a tree, or a tree for each class. Either library is imported only when a model of it is built.
"""

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from sunspot.data.source import Batch, Source, model_inputs
from sunspot.errors import SettingsError, shorten
from sunspot.extras import how_to_install
from sunspot.settings import PREFIX, Settings
from sunspot.tasks import TrainingRun
from sunspot.tasks.defaults import build_empty_optimizer, refuse_unread

SET_HERE = {
    "xgboost": ("objective", "num_class", "seed", "nthread"),
    "lightgbm": ("objective", "num_class", "seed", "num_threads", "metric", "tree_learner", "machines"),
}
"""Parameters that follow from the data, the settings and the workers, so that a task may not set them."""

DEFAULT_RATES = {"xgboost": 0.3, "lightgbm": 0.1}
"""Each library's default learning rate."""

UNREAD_SETTINGS = dict.fromkeys(
    (
        *("global_batch_size", "micro_batch_size", "learning_rate", "weight_decay", "clip_norm", "schedule"),
        *("warmup_steps", "precision", "parallel", "compile", "loader", "ema"),
    ),
    f"boosts trees, which do not read it; leave it out (their library's own parameters are in {PREFIX}TASK_ARGS)",
)
"""Reason for refusing each setting that trees do not read."""

MIN_PROBABILITY = 1e-30
"""Smallest probability to take the logarithm of, so that it is finite."""

ADDRESSES = re.compile(r"^\[(?:machines|local_listen_port): .*\]\n", re.MULTILINE)
"""Lines in LightGBM's file that hold the addresses of this group's workers."""

MAX_FEATURES_SHOWN = 20
"""Largest number of features that the report lists."""


class Trees(torch.nn.Module, ABC):
    """Trees of all rounds so far. Outputs are scores before softmax, [B, classes], or values, [B], without classes."""

    def __init__(self, library: str, options: Mapping[str, Any], settings: Settings, source: Source) -> None:
        """Prepare the library. `options` are its own parameters.

        Raises `SettingsError` if the library is not installed or refuses the options.
        """
        super().__init__()
        task = f"{PREFIX}TASK={settings.task}"
        taken = [name for name in SET_HERE[library] if name in options]
        if taken:
            raise SettingsError(
                f"{task}: its options for {library} contain {', '.join(taken)}, which follow from the data, the "
                "settings and the workers; leave them out"
            )
        try:
            self._library = importlib.import_module(library)
        except ModuleNotFoundError as error:
            raise SettingsError(f"{task}: {error.name} is not installed; {how_to_install('trees')}") from error
        self.library, self.classes = library, source.classes
        self._options = {**options, "seed": settings.seed}
        try:
            self._check()
        except Exception as error:
            refused = f"{library} refuses {dict(options)}: {shorten(without_stack(error))}"
            raise SettingsError(f"{task}: {refused}") from error

    @property
    def learning_rate(self) -> float:
        """Factor on each new tree."""
        return float(self._options.get("eta", self._options.get("learning_rate", DEFAULT_RATES[self.library])))

    @abstractmethod
    def _check(self) -> None:
        """Complete the options and train on made-up rows, so that the library raises an error if they are wrong."""

    @abstractmethod
    def begin(self, batch: Batch, world_size: int) -> None:
        """Set the rows that this worker uses in every round."""

    @abstractmethod
    def boost(self) -> torch.Tensor:
        """Add a round together with all other workers, and return the scores of this worker's rows."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Number of rounds so far."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the content of the library's own model file, or nothing before the first round."""

    @abstractmethod
    def from_bytes(self, content: bytes) -> None:
        """Continue from the content of a model file."""

    @abstractmethod
    def _score(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of rows, given as float32 [B, features]."""

    @abstractmethod
    def importance(self) -> dict[int, float]:
        """Return the gain of each used feature over all trees, by the number of the feature."""

    def forward(self, batch: Batch) -> torch.Tensor:
        if not self.rounds:
            rows = len(next(iter(batch.values())))
            return torch.zeros((rows, self.classes) if self.classes else rows)
        return torch.from_numpy(np.ascontiguousarray(self._score(features_of(batch)), np.float32))

    def get_extra_state(self) -> torch.Tensor:
        """Return the library's file as uint8 [bytes]."""
        return torch.frombuffer(bytearray(self.to_bytes() or b"\0"), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        content = state.numpy().tobytes()
        if content == b"\0":
            return
        try:
            self.from_bytes(content)
        except Exception as error:
            raise RuntimeError(f"not a model of {self.library}: {shorten(error)}") from error


class XGBoostTrees(Trees):
    """Trees of XGBoost's Booster."""

    _booster: Any = None
    _matrix: Any = None

    def _check(self) -> None:
        kind = {"objective": "multi:softprob" if self.classes else "reg:squarederror"}
        classes = {"num_class": self.classes} if self.classes else {}
        self._options |= {**kind, **classes, "nthread": torch.get_num_threads()}
        matrix = self._library.DMatrix(np.zeros((4, 2), np.float32), label=np.zeros(4))
        self._library.train(self._options, matrix, 1)

    def begin(self, batch: Batch, world_size: int) -> None:
        self._matrix = self._library.DMatrix(features_of(batch), label=batch["label"].numpy())
        content = self.to_bytes()
        before = {"model_file": bytearray(content)} if content else {}
        self._booster = self._library.Booster(self._options, [self._matrix], **before)

    def boost(self) -> torch.Tensor:
        self._booster.update(self._matrix, self.rounds)
        return torch.from_numpy(self._booster.predict(self._matrix, output_margin=True))

    @property
    def rounds(self) -> int:
        return int(self._booster.num_boosted_rounds()) if self._booster else 0

    def to_bytes(self) -> bytes:
        return bytes(self._booster.save_raw("ubj")) if self.rounds else b""

    def from_bytes(self, content: bytes) -> None:
        self._booster = self._library.Booster(self._options, model_file=bytearray(content))

    def _score(self, features: np.ndarray) -> np.ndarray:
        return self._booster.inplace_predict(features, predict_type="margin")

    def importance(self) -> dict[int, float]:
        gains = self._booster.get_score(importance_type="total_gain")
        return {int(name.removeprefix("f")): float(np.sum(gain)) for name, gain in gains.items()}


class LightGBMTrees(Trees):
    """Trees of LightGBM's Booster."""

    _booster: Any = None
    _rows: Any = None
    "Rows of every round; None before training."
    _grows = False
    "True if the Booster has the rows, so that it can add trees."

    def _check(self) -> None:
        kind = {"objective": "multiclass", "num_class": self.classes} if self.classes else {"objective": "regression"}
        threads = {"num_threads": torch.get_num_threads(), "force_row_wise": True, "deterministic": True}
        self._options = {"verbosity": -1, **threads, **self._options, **kind, "metric": "None"}
        labels = np.arange(40) % (self.classes or 40)
        self._library.train(self._options, self._dataset(np.zeros((40, 2), np.float32), labels), 1)

    def _dataset(self, features: np.ndarray, labels: np.ndarray) -> Any:
        return self._library.Dataset(features, label=labels, params={"verbosity": -1, "pre_partition": True})

    def begin(self, batch: Batch, world_size: int) -> None:
        self._rows, self._grows = self._dataset(features_of(batch), batch["label"].numpy()), False
        if world_size > 1:  # for XGBoost, Ray's trainer has already connected the workers
            from ray.train.lightgbm import get_network_params

            self._options |= {"tree_learner": "data", **get_network_params()}

    def boost(self) -> torch.Tensor:
        if self._grows:
            self._booster.update()
        else:  # the existing trees become the beginning of a Booster with the rows
            self._booster = self._library.train(
                self._options, self._rows, 1, init_model=self._booster, keep_training_booster=True
            )
            self._grows = True
        outputs: list[np.ndarray] = []

        def keep(output: np.ndarray, rows: Any) -> tuple[str, float, bool]:
            outputs.append(output)
            return "", 0.0, True

        self._booster.eval_train(keep)
        # For a task with classes, the outputs are probabilities.
        scores = np.log(np.maximum(outputs[0], MIN_PROBABILITY)) if self.classes else outputs[0]
        return torch.from_numpy(scores.astype(np.float32))

    @property
    def rounds(self) -> int:
        return int(self._booster.current_iteration()) if self._booster else 0

    def to_bytes(self) -> bytes:
        text = self._booster.model_to_string(importance_type="gain") if self._booster else ""
        return ADDRESSES.sub("", text).encode()

    def from_bytes(self, content: bytes) -> None:
        self._booster, self._grows = self._library.Booster(model_str=content.decode()), False

    def _score(self, features: np.ndarray) -> np.ndarray:
        return self._booster.predict(features, raw_score=True)

    def importance(self) -> dict[int, float]:
        gains = self._booster.feature_importance("gain")
        return {int(number): float(gains[number]) for number in np.flatnonzero(gains)}


KINDS: dict[str, type[Trees]] = {"xgboost": XGBoostTrees, "lightgbm": LightGBMTrees}


class TreesTask:
    """Adapter for a task that defines `build_trees(settings, source) -> Trees`."""

    full_batch = True
    "True because every step sees all rows. A row stays on the same worker in all rounds of a group."

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Adapt the module of a task. Raises `SettingsError` for settings that trees do not read."""
        self._module = module
        refuse_unread(settings, UNREAD_SETTINGS)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the task's module, such as `find_sources`."""
        return getattr(self._module, name)

    def find_library(self, settings: Settings, source: Source) -> str:
        """Return the name of the library in Ray Train."""
        return self.build_model(settings, source).library

    def build_model(self, settings: Settings, source: Source) -> Trees:
        return self._module.build_trees(settings, source)

    def build_optimizer(self, model: Trees, settings: Settings) -> torch.optim.Optimizer:
        return build_empty_optimizer(model.learning_rate)

    def train(self, run: TrainingRun) -> None:
        """Add rounds until the run ends or is stopped."""
        trees = run.model
        for number, batch in enumerate(run.batches()):
            if not run.weight:
                raise SettingsError(
                    f"{PREFIX}NUM_WORKERS={run.settings.num_workers}: the data have too few rows for {run.world_size} "
                    "workers, and trees need rows on each worker; start fewer workers"
                )
            if number == 0:
                trees.begin(batch, run.world_size)
            run.optimizer.step()  # waits until the state has been copied, because the trees change from here on
            losses, metrics = rate(trees.boost(), batch["label"])
            run.log({"loss": losses, **metrics})
            run.step()

    def schedule(self, step: int, total_steps: int) -> float:
        return 1.0

    def loss(self, model: Trees, batch: Batch) -> tuple[torch.Tensor, Batch]:
        return rate(model(batch), batch["label"])

    def predict(self, model: Trees, batch: Batch) -> torch.Tensor:
        return model(batch)

    def show(self, model: Trees, rows: Batch) -> dict[str, Any]:
        """Return a table of the features with the largest gain, for the report."""
        gains = sorted(model.importance().items(), key=lambda feature: -feature[1])
        names = names_of(rows)
        total = sum(gain for _, gain in gains)
        table = [{"feature": names[number], "share": gain / total} for number, gain in gains[:MAX_FEATURES_SHOWN]]
        return {"Features by gain": table}


def rate(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Batch]:
    """Return the log loss of each row, [B], and the accuracy. Without classes, return only the squared error."""
    if scores.ndim == 1:
        return (scores - labels).square(), {}
    return functional.cross_entropy(scores, labels, reduction="none"), {"accuracy": scores.argmax(1) == labels}


def without_stack(error: Exception) -> Exception:
    """Return an error without the stack trace that XGBoost puts into its text."""
    return type(error)(re.split(r"\s*Stack trace:", str(error))[0])


def names_of(batch: Batch) -> list[str]:
    """Return the name of each feature: its column, and the index if the column has several features."""
    names = list[str]()
    for name, column in model_inputs(batch).items():
        size = math.prod(column.shape[1:])
        names += [f"{name}[{place}]" for place in range(size)] if column.ndim > 1 else [name]
    return names


def features_of(batch: Batch) -> np.ndarray:
    """Return all columns except `row` and `label` side by side, float32 [B, features]."""
    columns = list(model_inputs(batch).values())
    sizes = [math.prod(column.shape[1:]) for column in columns]
    flat = [column.reshape(len(column), size).float() for column, size in zip(columns, sizes, strict=True)]
    return torch.cat(flat, dim=1).numpy()
