"""Opens pretrained Hugging Face models in a directory, in a bucket or on the hub, and identifies them by a hash.

If peft adapts the model, a checkpoint holds only the trained weights and the hash of the pretrained model. Otherwise,
it holds all weights.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from torch import nn

from sunspot.background import map_parallel
from sunspot.errors import ConflictError, SettingsError, shorten
from sunspot.formatting import plural
from sunspot.machine.private_folder import private_folder
from sunspot.parallel.sharding import find_slices, part_of
from sunspot.settings import PREFIX
from sunspot.storage import open_storage

SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Suffixes of the files to fetch. Pickled weights are excluded."""

EXTRA_STATE = "_extra_state"
"""Key of the extra state in a PyTorch state_dict. Here, the extra state is the hash of the base."""

ADAPTER = "adapter_model.safetensors"

READ_AT_ONCE = 2
"""Number of weight files to fetch or hash in parallel. Hashing a file occupies a core."""


@dataclass(frozen=True)
class Base:
    """A pretrained model on this machine's disk."""

    location: str
    "The location given by the user."
    folder: Path

    @cached_property
    def weights(self) -> list[Path]:
        """The files that contain the weights."""
        return sorted(self.folder.glob("*.safetensors"))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the configuration and the weights. Computing it reads all weight files."""
        files = [self.folder / "config.json", *self.weights]
        digests = dict(zip((file.name for file in files), map_parallel(_digest, files, READ_AT_ONCE), strict=True))
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        return json.loads((self.folder / "config.json").read_bytes())

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the files, such as the tokenizer's, that a checkpoint needs in addition to its weights."""
        names = [file.name for file in self.folder.iterdir() if file.suffix in SUFFIXES and file not in self.weights]
        omitted = ("config.json", "adapter_config.json")
        kept = sorted(name for name in names if name not in omitted and not name.endswith(".safetensors.index.json"))
        return {name: (self.folder / name).read_bytes() for name in kept}


@lru_cache(maxsize=2)
def open_base(location: str) -> Base:
    """Return the model with this path, URL or name on the hub. Each machine fetches a model once.

    Raises `SettingsError` if the model cannot be fetched or is incomplete.
    """
    if not location or not isinstance(location, str):
        raise base_error(location, "the value must be a non-empty string")
    path = Path(location).expanduser()
    if "://" in location:
        folder = _download(location)
    elif path.is_dir():
        folder = path.resolve()
    else:
        try:
            folder = Path(snapshot_download(location, allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]))
        except Exception as error:  # wrong names, network failures and denied access raise all kinds of errors
            problem = (
                f"there is no such directory, and the hub did not provide it: {type(error).__name__}: {shorten(error)}"
            )
            raise base_error(location, problem) from error
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise base_error(location, f"it contains no {name}")
    base = Base(location, folder)
    if not base.weights:
        raise base_error(location, "it contains no *.safetensors files")
    try:
        assert isinstance(base.config, dict)
    except (ValueError, AssertionError) as error:
        raise base_error(location, "its config.json is not a JSON object") from error
    return base


def base_error(location: str, problem: str) -> SettingsError:
    """Return the error for a base that cannot be used."""
    return SettingsError(
        f"{PREFIX}TASK_ARGS: base={location!r}: {problem}; set base to the path or URL of a directory with "
        "config.json, tokenizer.json and *.safetensors as transformers saves them, or to the name of a model on the "
        "hub if it can be reached"
    )


WeightPositions = Mapping[str, tuple[Path, str]]
"""A mapping from the name of each parameter of a model to the file with its values, and to their name in this file."""


def find_values(base: Base, model: nn.Module) -> WeightPositions | None:
    """Return the positions of a model's parameters in the base's files, or None if a parameter is missing there."""
    from safetensors import safe_open

    shapes: dict[str, tuple[Path, list[int]]] = {}
    for path in base.weights:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: (path, file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    aliases: dict[nn.Parameter, list[str]] = {}  # tied weights can be stored under any of their names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    found = {
        names[0]: (shapes[name][0], name)
        for parameter, names in aliases.items()
        for name in names
        if name in shapes and shapes[name][1] == list(parameter.shape)
    }
    return found if len(found) == len(aliases) else None


def replace_parameters(
    model: nn.Module, values: Mapping[nn.Parameter, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[nn.Parameter, Any]:
    """Replace each parameter in `values` with the result of `change`. Return `values`, keyed by the new parameters."""
    new = {each: nn.Parameter(change(each.detach()), requires_grad=each.requires_grad) for each in values}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in new:
                setattr(module, name, new[parameter])
    return {new[each]: value for each, value in values.items()}


def read_values(model: nn.Module, positions: WeightPositions) -> None:
    """Read a model's parameters from safetensors files, but only this worker's shard of each sharded parameter."""
    from safetensors import safe_open

    own = dict(model.named_parameters())
    parameters = [own[name].detach() for name in positions]
    for (path, name), parameter, place in zip(positions.values(), parameters, find_slices(parameters), strict=True):
        part = part_of(parameter)
        if part.numel():
            begins = place.offset if place else (0,) * part.ndim
            rows = tuple(slice(begin, begin + length) for begin, length in zip(begins, part.shape, strict=True))
            with safe_open(path, framework="pt") as file:  # closed after each tensor, to unmap its pages
                part.copy_(file.get_slice(name)[rows])


def _download(location: str) -> Path:
    """Copy a directory from a bucket, unless an up-to-date copy exists, and return the path of the copy."""
    storage = open_storage(location)
    entries = [entry for entry in storage.list("") if "/" not in entry.key and entry.key.endswith(SUFFIXES)]
    if not entries:
        raise base_error(location, "it has no files")
    listing = json.dumps([[location, *entry] for entry in entries])
    folder = private_folder() / "bases" / hashlib.sha256(listing.encode()).hexdigest()
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # all workers of a machine do this at the same time
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            partial.mkdir(exist_ok=True)

            def fetch(key: str) -> None:
                with (partial / key).open("wb") as file:
                    for chunk in storage.chunks(key):
                        file.write(chunk)

            map_parallel(fetch, [entry.key for entry in entries], READ_AT_ONCE)
            partial.rename(folder)
    return folder


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class PretrainedModel(nn.Module):
    """A pretrained model. Its checkpoints hold the trained weights and, if the base is frozen, the hash of the base."""

    def __init__(self, model: Any, base: str, sha256: str) -> None:
        """Wrap a model. `base` is the name by which messages refer to the frozen base.

        `sha256` is the base's hash, or an empty string if all weights are trained.
        """
        super().__init__()
        self.model, self.sha256 = model, sha256
        self._base = base

    @property
    def adapted(self) -> bool:
        """True if peft adapts the model."""
        return bool(self.sha256)

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(self.sha256), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        found = bytes(state.tolist()).hex()
        if found != self.sha256:
            raise ConflictError(
                f"{self._base} has SHA-256 {self.sha256[:12]}..., but the adapter was trained on {found[:12]}...; "
                "use the same base as the adapter"
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # two overloads there
        """Return all weights, or only the trained weights if peft adapts the model."""
        if not self.adapted:
            return self.model.state_dict(*args, **kwargs)
        state = super().state_dict(*args, **kwargs)
        kept = {name for name, parameter in self.named_parameters() if parameter.requires_grad} | {EXTRA_STATE}
        return {name: value for name, value in state.items() if name in kept}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if not self.adapted:
            return self.model.load_state_dict(state_dict, strict, assign)
        different = sorted(self.state_dict().keys() ^ state_dict.keys())
        if different:
            raise RuntimeError(
                f"the state_dict and the model differ in the names of {plural(len(different), 'weight')}, such as "
                f"{different[0]}"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def adapter_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """Return the files that peft needs to load a checkpoint with this state_dict.

        Returns an empty dict if all weights are trained.
        """
        if not self.adapted:
            return {}
        from peft import get_peft_model_state_dict
        from safetensors.torch import save

        own = {name.removeprefix("model."): value for name, value in state.items() if name != EXTRA_STATE}
        weights = get_peft_model_state_dict(self.model, state_dict=own, save_embedding_layers=False)
        config = self.model.peft_config["default"].to_dict() | {"inference_mode": True}
        return {
            ADAPTER: save({name: value.clone() for name, value in weights.items()}, metadata={"format": "pt"}),
            "adapter_config.json": json.dumps(config, indent=2, default=_plain).encode(),
        }


def _plain(value: Any) -> Any:
    """Convert a set to a sorted list and any other value to a string, for JSON."""
    return sorted(value) if isinstance(value, set) else str(value)
