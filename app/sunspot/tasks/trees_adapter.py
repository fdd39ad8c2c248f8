"""Adapts gradient-boosted trees to the functions of any other task (`sunspot.tasks.Task`): XGBoost's and LightGBM's.

The trees are a PyTorch module whose state is the library's own model, as bytes. A step is a round, which sees all rows
and adds a tree (with classes, one for each). Both libraries are imported only where a model of theirs is made.
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
"""Parameters that follow from the data, the settings and the workers, and so cannot be given."""

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
"""Keeps the logarithm of a probability finite."""

ADDRESSES = re.compile(r"^\[(?:machines|local_listen_port): .*\]\n", re.MULTILINE)
"""The lines of LightGBM's file that say where this group's workers were."""

MAX_FEATURES_SHOWN = 20
"""Most features that the report lists."""


class Trees(torch.nn.Module, ABC):
    """The trees of all rounds so far. Their scores are those before softmax, [B, classes]; without classes values, [B].

    `options` are the library's own parameters.
    """

    def __init__(self, library: str, options: Mapping[str, Any], settings: Settings, source: Source) -> None:
        """Raises `SettingsError` if the library is not installed or refuses the options."""
        super().__init__()
        task = f"{PREFIX}TASK={settings.task}"
        if taken := [name for name in SET_HERE[library] if name in options]:
            raise SettingsError(
                f"{task}: {library} is given {', '.join(taken)}, which follow from the data, the settings and the "
                "workers; leave them out"
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
        """Return the factor on each new tree."""
        return float(self._options.get("eta", self._options.get("learning_rate", DEFAULT_RATES[self.library])))

    @abstractmethod
    def _check(self) -> None:
        """Raise what the library does for its options."""

    @abstractmethod
    def begin(self, batch: Batch, world_size: int) -> None:
        """Take the rows that this worker has in every round."""

    @abstractmethod
    def boost(self) -> torch.Tensor:
        """Add a round, with all other workers, and return this worker's rows' scores."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Count the rounds so far."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the library's own file, as it would save it; empty before the first round."""

    @abstractmethod
    def from_bytes(self, content: bytes) -> None:
        """Go on from such a file."""

    @abstractmethod
    def _score(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of rows, float32 [B, features]."""

    @abstractmethod
    def importance(self) -> dict[int, float]:
        """Return the gain of each used feature over all trees, by the feature's number."""

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
            raise RuntimeError(f"no model of {self.library}: {shorten(error)}") from error


class XGBoostTrees(Trees):
    """XGBoost's Booster."""

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
        before = {"model_file": bytearray(content)} if (content := self.to_bytes()) else {}
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
    """LightGBM's Booster."""

    _booster: Any = None
    _rows: Any = None
    "The rows of every round; None before training."
    _grows = False
    "Whether the Booster has the rows."

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
        if world_size > 1:  # XGBoost knows the others already, from around the training function
            from ray.train.lightgbm import get_network_params

            self._options |= {"tree_learner": "data", **get_network_params()}

    def boost(self) -> torch.Tensor:
        if self._grows:
            self._booster.update()
        else:  # what there is becomes the beginning of a Booster with the rows
            self._booster = self._library.train(
                self._options, self._rows, 1, init_model=self._booster, keep_training_booster=True
            )
            self._grows = True
        outputs: list[np.ndarray] = []

        def keep(output: np.ndarray, rows: Any) -> tuple[str, float, bool]:
            outputs.append(output)
            return "", 0.0, True

        self._booster.eval_train(keep)
        # With classes, the output is their probabilities.
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
    """A task module that defines `build_trees(settings, source) -> Trees`."""

    full_batch = True
    "Every step sees all rows, each on the same worker in all rounds of a group."

    def __init__(self, module: ModuleType, settings: Settings) -> None:
        """Raises `SettingsError` for settings that trees have no use for."""
        self._module = module
        refuse_unread(settings, UNREAD_SETTINGS)

    def __getattr__(self, name: str) -> Any:
        """Return `find_sources`, if the module has it."""
        return getattr(self._module, name)

    def find_library(self, settings: Settings, source: Source) -> str:
        """Return the name of the library, which has a trainer of Ray's."""
        return self.build_model(settings, source).library

    def build_model(self, settings: Settings, source: Source) -> Trees:
        return self._module.build_trees(settings, source)

    def build_optimizer(self, model: Trees, settings: Settings) -> torch.optim.Optimizer:
        return build_empty_optimizer(model.learning_rate)

    def train(self, run: TrainingRun) -> None:
        """Boost from the run's first round to the last, or until the run is stopped."""
        trees = run.model
        for number, batch in enumerate(run.batches()):
            if not run.weight:
                raise SettingsError(
                    f"{PREFIX}NUM_WORKERS={run.settings.num_workers}: the data have too few rows for {run.world_size} "
                    "workers, and trees need some on each; start fewer"
                )
            if number == 0:
                trees.begin(batch, run.world_size)
            run.optimizer.step()  # waits for the copy of the state: from here on the trees change
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
        """Return the features that gained most, for the report."""
        gains = sorted(model.importance().items(), key=lambda feature: -feature[1])
        names, whole = names_of(rows), sum(gain for _, gain in gains)
        table = [{"feature": names[number], "share": gain / whole} for number, gain in gains[:MAX_FEATURES_SHOWN]]
        return {"Features by gain": table}


def rate(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Batch]:
    """Return the loss of each row, [B]: its log loss, and the accuracy; without classes its squared error."""
    if scores.ndim == 1:
        return (scores - labels).square(), {}
    return functional.cross_entropy(scores, labels, reduction="none"), {"accuracy": scores.argmax(1) == labels}


def without_stack(error: Exception) -> Exception:
    """Return an error without the stack that XGBoost puts into its text."""
    return type(error)(re.split(r"\s*Stack trace:", str(error))[0])


def names_of(batch: Batch) -> list[str]:
    """Name each feature by its column, with its place there if it has several."""
    names = list[str]()
    for name, column in model_inputs(batch).items():
        size = math.prod(column.shape[1:])
        names += [f"{name}[{place}]" for place in range(size)] if column.ndim > 1 else [name]
    return names


def features_of(batch: Batch) -> np.ndarray:
    """Put all columns but `row` and `label` side by side: float32 [B, features]."""
    columns = list(model_inputs(batch).values())
    sizes = [math.prod(column.shape[1:]) for column in columns]
    flat = [column.reshape(len(column), size).float() for column, size in zip(columns, sizes, strict=True)]
    return torch.cat(flat, dim=1).numpy()
