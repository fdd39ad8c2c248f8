"""What checkpoints hold of a pretrained model of Hugging Face: all of it, or of one that peft adapts, what trains."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sunspot.errors import ConflictError

EXTRA_STATE = "_extra_state"
"""PyTorch's name for what a module adds to its state_dict: here, the hash of the base."""

ADAPTER = "adapter_model.safetensors"


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
