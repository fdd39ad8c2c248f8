"""Pretrained models of Hugging Face in a directory, a bucket or the hub: fetched, checked, and told apart by a hash.

Checkpoints hold all of one; or of one that peft adapts, what trains, and the hash of its base.
"""

import hashlib
import json
from collections.abc import Mapping
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
from sunspot.private_folder import private_folder
from sunspot.settings import PREFIX
from sunspot.storage import open_storage

SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Files of a model that are taken: its configuration, weights and tokenizer. Pickled weights are none of them."""

EXTRA_STATE = "_extra_state"
"""PyTorch's name for what a module adds to its state_dict: here, the hash of the base."""

ADAPTER = "adapter_model.safetensors"

READ_AT_ONCE = 2
"""Weight files hashed at once: SHA-256 takes a core for each."""


@dataclass(frozen=True)
class Base:
    """A model whose files are on this machine."""

    location: str
    "The location as it was given."
    folder: Path

    @cached_property
    def weights(self) -> list[Path]:
        """Its files of weights."""
        return sorted(self.folder.glob("*.safetensors"))

    @cached_property
    def sha256(self) -> str:
        """Digest of its configuration and its weights; each byte is read."""
        files = [self.folder / "config.json", *self.weights]
        digests = dict(zip((file.name for file in files), map_parallel(_digest, files, READ_AT_ONCE), strict=True))
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return json.loads((self.folder / "config.json").read_bytes())

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return what a checkpoint takes over from it, so that it is a whole model."""
        names = [file.name for file in self.folder.iterdir() if file.suffix in SUFFIXES and file not in self.weights]
        left = ("config.json", "adapter_config.json")
        kept = sorted(name for name in names if name not in left and not name.endswith(".safetensors.index.json"))
        return {name: (self.folder / name).read_bytes() for name in kept}


@lru_cache(maxsize=2)
def open_base(location: str) -> Base:
    """Open the model at a path, a URL or a name of the hub, fetched once for each machine; raises `SettingsError`."""
    if not location or not isinstance(location, str):
        raise refuse_base(location, "names no model")
    path = Path(location).expanduser()
    if "://" in location:
        folder = _download(location)
    elif path.is_dir():
        folder = path.resolve()
    else:
        try:
            folder = Path(snapshot_download(location, allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]))
        except Exception as error:  # of names, networks and access, all kinds
            problem = f"no directory, and not fetched from the hub: {type(error).__name__}: {shorten(error)}"
            raise refuse_base(location, problem) from error
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise refuse_base(location, f"it has no {name}")
    base = Base(location, folder)
    if not base.weights:
        raise refuse_base(location, "it has no *.safetensors")
    try:
        assert isinstance(base.config, dict)
    except (ValueError, AssertionError) as error:
        raise refuse_base(location, "its config.json is no JSON object") from error
    return base


def refuse_base(location: str, problem: str) -> SettingsError:
    """Return the error of a base that is no use."""
    return SettingsError(
        f"{PREFIX}TASK_ARGS: base={location!r}: {problem}; give the path or URL of a directory with config.json, "
        "tokenizer.json and *.safetensors as transformers saves them, or the name of a model on the hub where that can "
        "be reached"
    )


def _download(location: str) -> Path:
    """Copy a directory of a bucket; another listing gets another copy."""
    storage = open_storage(location)
    entries = [entry for entry in storage.list("") if "/" not in entry.key and entry.key.endswith(SUFFIXES)]
    if not entries:
        raise refuse_base(location, "nothing is there")
    listing = json.dumps([[location, *entry] for entry in entries])
    folder = private_folder() / "bases" / hashlib.sha256(listing.encode()).hexdigest()
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # workers of one machine ask at once
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
    """A pretrained model, of which checkpoints hold what trains, and of a base that does not, the hash."""

    def __init__(self, model: Any, base: str, sha256: str) -> None:
        """`base` names what does not train, for messages, and `sha256` is its hash; empty where all trains."""
        super().__init__()
        self.model, self.sha256 = model, sha256
        self._base = base

    @property
    def adapted(self) -> bool:
        """Whether peft adapts it."""
        return bool(self.sha256)

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(self.sha256), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        found = bytes(state.tolist()).hex()
        if found != self.sha256:
            raise ConflictError(
                f"{self._base} has SHA-256 {self.sha256[:12]}..., but the adapter was trained on {found[:12]}...; "
                "give the base it was trained on, as it was then"
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # two overloads there
        """Return the state_dict that transformers knows, of a model that trains as a whole; else what trains."""
        if not self.adapted:
            return self.model.state_dict(*args, **kwargs)
        state = super().state_dict(*args, **kwargs)
        kept = {name for name, parameter in self.named_parameters() if parameter.requires_grad} | {EXTRA_STATE}
        return {name: value for name, value in state.items() if name in kept}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if not self.adapted:
            return self.model.load_state_dict(state_dict, strict, assign)
        if missing := sorted(self.state_dict().keys() ^ state_dict.keys()):
            raise RuntimeError(f"{len(missing)} weights are only in one of the two, such as {missing[0]}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def adapter_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """Return what makes a checkpoint with this state_dict a directory of peft's; nothing where all trains."""
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
    """Return what JSON has for a value of peft's that it does not know: a set of names, or one of an enumeration."""
    return sorted(value) if isinstance(value, set) else str(value)
