"""Gradient-boosted trees of XGBoost and LightGBM as PyTorch modules, which sunspot/adapters/boosted_trees.py trains.

A module's state is the content of the library's own model file. A library is imported when one of its models is built.
"""

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sunspot.data.source import Batch, Source, model_inputs
from sunspot.errors import SettingsError, shorten
from sunspot.extras import how_to_install
from sunspot.settings import PREFIX, Settings

SET_HERE = {
    "xgboost": ("objective", "num_class", "seed", "nthread"),
    "lightgbm": ("objective", "num_class", "seed", "num_threads", "metric", "tree_learner", "machines"),
}
"""Parameters that tasks must not set, because the data, the settings and the workers determine them."""

DEFAULT_RATES = {"xgboost": 0.3, "lightgbm": 0.1}
"""Each library's default learning rate."""

MIN_PROBABILITY = 1e-30
"""Lower bound of probabilities, which keeps their logarithms finite."""

ADDRESSES = re.compile(r"^\[(?:machines|local_listen_port): .*\]\n", re.MULTILINE)
"""Lines in a LightGBM model file that contain the addresses of the group's workers."""


class Trees(torch.nn.Module, ABC):
    """A model of gradient-boosted trees, which grows by one round of trees at a time.

    The outputs are scores before softmax, [B, classes], or predicted values, [B], for a task without classes.
    """

    def __init__(self, library: str, options: Mapping[str, Any], settings: Settings, source: Source) -> None:
        """Import and check the library. `options` are the library's own parameters.

        Raises `SettingsError` if the library is not installed or rejects the options.
        """
        super().__init__()
        task = f"{PREFIX}TASK={settings.task}"
        taken = [name for name in SET_HERE[library] if name in options]
        if taken:
            raise SettingsError(
                f"{task}: the options for {library} contain {', '.join(taken)}, which Sunspot sets itself according to "
                "the data, the settings and the workers; remove them"
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
            refused = f"{library} rejects {dict(options)}: {shorten(without_stack(error))}"
            raise SettingsError(f"{task}: {refused}") from error

    @property
    def learning_rate(self) -> float:
        """The factor applied to each new tree."""
        return float(self._options.get("eta", self._options.get("learning_rate", DEFAULT_RATES[self.library])))

    @abstractmethod
    def _check(self) -> None:
        """Complete the options and check them by training on artificial rows."""

    @abstractmethod
    def begin(self, batch: Batch, world_size: int) -> None:
        """Set this worker's training rows, which are the same in every round."""

    @abstractmethod
    def boost(self) -> torch.Tensor:
        """Train one round together with all other workers, and return the scores of this worker's rows."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """The number of rounds so far."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the content of the library's model file, which is empty before the first round."""

    @abstractmethod
    def from_bytes(self, content: bytes) -> None:
        """Load the content of a model file."""

    @abstractmethod
    def _score(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of rows. `features` is float32 [B, features]."""

    @abstractmethod
    def importance(self) -> dict[int, float]:
        """Return the total gain of each used feature, keyed by the feature's index."""

    def forward(self, batch: Batch) -> torch.Tensor:
        if not self.rounds:
            rows = len(next(iter(batch.values())))
            return torch.zeros((rows, self.classes) if self.classes else rows)
        return torch.from_numpy(np.ascontiguousarray(self._score(features_of(batch)), np.float32))

    def get_extra_state(self) -> torch.Tensor:
        """Return the content of the library's model file as a uint8 tensor."""
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
    """The trees of an XGBoost Booster."""

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
    """The trees of a LightGBM Booster."""

    _booster: Any = None
    _rows: Any = None
    "The rows used in every round, or None before training."
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
        else:  # create a Booster with the rows that begins with the existing trees
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


def without_stack(error: Exception) -> Exception:
    """Return an error without the stack trace that XGBoost puts into its text."""
    return type(error)(re.split(r"\s*Stack trace:", str(error))[0])


def features_of(batch: Batch) -> np.ndarray:
    """Return all columns except `row` and `label` as one float32 array [B, features]."""
    columns = list(model_inputs(batch).values())
    sizes = [math.prod(column.shape[1:]) for column in columns]
    flat = [column.reshape(len(column), size).float() for column, size in zip(columns, sizes, strict=True)]
    return torch.cat(flat, dim=1).numpy()
