"""Fine-tunes pretrained language models from Hugging Face, with or without LoRA (extra `hf`).

TASK_ARGS:
  `base`      path or URL of the model's directory, or its name on the hub (docs/finetune.md)
  `head`      "text" (default) predicts the next token; "classes" predicts a text's class (column `label`)
  `column`    name of the text column ("text")
  `context`   number of tokens in a row (512); texts are packed into rows, or truncated if `head` is "classes"
  `rank`      rank of LoRA's matrices; 0 (default) trains all weights
  `alpha`     LoRA's scale (twice the rank)
  `targets`   layers that LoRA adapts: "all-linear" (default) or a list of names

Without LoRA, the weights are float32, and PRECISION=bf16 rounds them when they are used. With LoRA and PRECISION=bf16,
the frozen weights of the base are bfloat16, and the trained weights stay float32.
"""

import json
import math
import warnings
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn
from torch.nn import functional

from sunspot.data.columns import Column
from sunspot.data.packing import open_packed
from sunspot.data.source import Batch, ModelData, Source
from sunspot.data.table import open_table
from sunspot.data.tokens import Tokenizer, load_tokenizer
from sunspot.errors import SettingsError, shorten
from sunspot.parallel.sharding import build_without_values
from sunspot.settings import PREFIX, Settings
from sunspot.tasks.pretrained import (
    ADAPTER,
    Base,
    PretrainedModel,
    WeightPositions,
    base_error,
    find_values,
    open_base,
    read_values,
    replace_parameters,
)
from sunspot.tasks.texts import by_loss

for package in ("peft", "tokenizers", "transformers"):  # fail in the driver if the extra is missing, not in a worker
    if not find_spec(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

HEADS = {"text": "AutoModelForCausalLM", "classes": "AutoModelForSequenceClassification"}

ROWS_AT_ONCE = 4
"""Batch size for the report. With 512 tokens per row and a vocabulary of 32,000, the scores take 0.26 GB."""

WRITTEN, WRITTEN_TOKENS = 3, 32
"""The number of sample completions in the report, and the number of tokens in each."""


class Arguments(BaseModel):
    """The arguments in TASK_ARGS."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    base: str = ""
    head: Literal["text", "classes"] = "text"
    column: str = "text"
    context: int = Field(512, ge=2)
    rank: int = Field(0, ge=0)
    alpha: int = Field(0, ge=0)
    targets: Literal["all-linear"] | Annotated[list[Any], Field(min_length=1)] = "all-linear"


class FineTuned(PretrainedModel):
    """A pretrained language model together with its base, arguments and data."""

    def __init__(self, model: Any, base: Base, arguments: Arguments, data: ModelData) -> None:
        sha256 = base.sha256 if arguments.rank > 0 else ""  # only for LoRA, because hashing reads the whole base
        super().__init__(model, f"{PREFIX}TASK_ARGS: base={base.location!r}", sha256)
        self.base = base
        self.arguments = arguments
        self.data = data
        self.config = model.config
        self.positions: WeightPositions = {}
        "Positions of the values that `load_pretrained` reads. The parameters are on the meta device until then."

    def forward(self, tokens: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token, [B, T, vocabulary], or of the classes, [B, classes].

        `tokens` is an int64 tensor of shape [B, T].
        """
        if "attention_mask" in more:  # a classifier uses the last token that is not padding
            tokens = tokens.masked_fill(more["attention_mask"] == 0, self.config.pad_token_id)
        return self.model(input_ids=tokens, use_cache=False, return_dict=False, **more)[0]


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    arguments = read_arguments(settings)
    base = open_base(arguments.base)
    content = (base.folder / "tokenizer.json").read_bytes()
    load_tokenizer(content)  # report a damaged tokenizer before any problem of a row
    if arguments.head == "classes":
        decode = Tokenizer(content)
        tokens = Column("int32", longest=arguments.context, cut=True, decode=decode, of=arguments.column)
        return open_table(settings, {"tokens": tokens, "label": Column("int64")})
    decode = Tokenizer(content, end=_first(base.config.get("eos_token_id")))
    return open_packed(settings, {"tokens": Column("int32", decode=decode, of=arguments.column)}, arguments.context)


def build_model(settings: Settings, source: Source) -> nn.Module:
    arguments = read_arguments(settings)
    base, lora = open_base(arguments.base), arguments.rank > 0
    if lora and settings.weights != "pt":
        raise SettingsError(
            f"{PREFIX}WEIGHTS={settings.weights}: with LoRA, checkpoints store the weights in {ADAPTER}; set "
            f"{PREFIX}WEIGHTS to pt"
        )
    dtype = torch.bfloat16 if lora and settings.precision == "bf16" else torch.float32
    model = _build_empty(base, arguments, dtype) if settings.parallel != "ddp" else None
    positions = (find_values(base, model) if model else None) or {}
    if model is None or not positions:  # a classifier's new head has no values in the files
        model = _load(base, arguments, source.classes, dtype)
    own = dict(model.named_parameters())
    values = {own[name]: position for name, position in positions.items()}
    if lora and values:
        # peft moves its own weights to the base's device, so they would lose their initial values on the meta device.
        values = replace_parameters(
            model, values, lambda weight: torch.empty((), dtype=weight.dtype).expand(weight.shape)
        )
        model = _adapt(model, base, arguments)
        values = replace_parameters(model, values, lambda weight: weight.new_empty(weight.shape, device="meta"))
    elif lora:
        model = _adapt(model, base, arguments)
    tuned = FineTuned(model, base, arguments, ModelData.of(source))
    tuned.positions = {name: values[each] for name, each in tuned.named_parameters() if each in values}
    return tuned


def load_pretrained(model: FineTuned) -> None:
    """Read the base's weights, unless `build_model` has loaded them.

    If the model is sharded, reads only this worker's shards.
    """
    read_values(model, model.positions)


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the cross-entropy of each text's class, or the mean cross-entropy of each row's tokens, in nats.

    The mean excludes each text's first token, because no earlier token predicts it.
    """
    tokens, there = batch["tokens"].long(), find_tokens(batch)
    if "label" in batch:
        scores = model(tokens, attention_mask=there.long())
        correct = scores.argmax(dim=1) == batch["label"]
        return functional.cross_entropy(scores.float(), batch["label"], reduction="none"), {"accuracy": correct}
    position = batch[
        "position"
    ].long()  # positions restart at 0 with each text in a row, so that a text attends only to itself
    scores, targets = model(tokens, position_ids=position)[:, :-1], tokens[:, 1:]
    counted = (there & (position > 0))[:, 1:].float()
    each = functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    count = counted.sum(dim=1).clamp(min=1)
    right = (scores.argmax(dim=2) == targets) * counted
    return (each * counted).sum(dim=1) / count, {"accuracy": right.sum(dim=1) / count}


def find_tokens(batch: Batch) -> torch.Tensor:
    """Return a mask of the tokens that are not padding, bool [B, T]."""
    tokens, lengths = batch["tokens"], batch["tokens_length"]
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def predict(model: FineTuned, batch: Batch) -> torch.Tensor:
    """Return the class scores of each text, float [B, classes]. Raises `SettingsError` if `head` is "text"."""
    if model.arguments.head != "classes":
        raise SettingsError("a language model cannot classify rows; use --prompt to pass it some text")
    return model(batch["tokens"].long(), attention_mask=find_tokens(batch).long())


@torch.inference_mode()
def show(model: FineTuned, rows: Batch) -> dict[str, Any]:
    """Return the rows with the lowest and the highest loss, for the report.

    For a language model, also return the perplexity and some sample completions.
    """
    decode = load_tokenizer((model.base.folder / "tokenizer.json").read_bytes()).decode
    starts = range(0, len(rows["tokens"]), ROWS_AT_ONCE)
    parts = [{name: column[start : start + ROWS_AT_ONCE] for name, column in rows.items()} for start in starts]
    losses = torch.cat([loss(model, part)[0] for part in parts])
    tokens = [row[:length] for row, length in zip(rows["tokens"].tolist(), rows["tokens_length"].tolist(), strict=True)]
    texts = [decode(row) for row in tokens]
    if "label" in rows:
        labels = [model.data.name(label) for label in rows["label"].tolist()]
        return {"Texts by their loss": by_loss(losses, text=texts, label=labels)}
    beginnings = [decode(row[: len(row) // 2]) for row in tokens[:WRITTEN]]
    written = answer(model, beginnings, WRITTEN_TOKENS)
    return {
        f"Perplexity of {len(losses)} held-out texts": math.exp(losses.mean()),
        "Texts by their loss": by_loss(losses, text=texts),
        "Continued texts": [{"text": text, "goes on": on} for text, on in zip(beginnings, written, strict=True)],
    }


def checkpoint_files(model: FineTuned, state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the files that other libraries need to load a checkpoint.

    With LoRA, these are the files for peft. Without LoRA, these are the files that transformers needs in addition to
    the weights. Transformers can load the weights only if WEIGHTS is safetensors.
    """
    if not model.adapted:
        return {"config.json": model.config.to_json_string().encode(), **model.base.tokenizer_files()}
    named = {"location": model.base.location, "sha256": model.sha256}
    return {**model.adapter_files(state), "base.json": json.dumps(named, indent=2).encode()}


@torch.inference_mode()
def answer(model: FineTuned, prompts: list[str], tokens: int) -> list[str]:
    """Return the class of each prompt, or its greedy continuation of at most `tokens` tokens."""
    tokenizer = load_tokenizer((model.base.folder / "tokenizer.json").read_bytes())
    device = next(model.parameters()).device
    answers = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        if not ids.numel():
            raise SettingsError(f"the prompt {prompt!r} contains no tokens; use a longer prompt")
        if model.arguments.head == "classes":
            shares = model(ids).float().softmax(dim=1)[0]
            answers.append(f"{model.data.name(int(shares.argmax()))} ({float(shares.max()):.4f})")
        else:
            mask = torch.ones_like(ids)
            written = model.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
            answers.append(tokenizer.decode(written[0, ids.shape[1] :].tolist()))
    return answers


def read_arguments(settings: Settings) -> Arguments:
    """Return TASK_ARGS with defaults. Raises `SettingsError` if an argument is invalid."""
    try:
        given = Arguments(**settings.task_args)
    except ValidationError as error:
        names = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors())
        wrong = ", ".join(f"{name}={settings.task_args[name]!r}" for name in names)
        raise SettingsError(
            f"{PREFIX}TASK_ARGS: {wrong}; sunspot.tasks.finetune takes base and column (strings), head (text or "
            "classes), context (at least 2), rank and alpha (at least 0), and targets (all-linear or a list)"
        ) from error
    return given.model_copy(update={"alpha": given.alpha or 2 * given.rank})


def _load(base: Base, arguments: Arguments, classes: int, dtype: torch.dtype) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # missing weights are checked below
    more = {"num_labels": classes} if arguments.head == "classes" else {}
    try:
        model, loaded = getattr(transformers, HEADS[arguments.head]).from_pretrained(
            base.folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **more
        )
    except Exception as error:  # damaged files and files from other programs raise all kinds of errors
        raise base_error(base.location, f"transformers cannot load the model: {shorten(error)}") from error
    if arguments.head == "text" and loaded["missing_keys"]:  # only a classifier's head may start from random weights
        raise base_error(base.location, f"the weights lack {min(loaded['missing_keys'])}")
    return _prepare(model)


def _prepare(model: Any) -> Any:
    """Put a model in training mode and set its padding token. Return the model."""
    if model is not None:
        model.train()  # transformers returns a loaded model in evaluation mode
        if model.config.pad_token_id is None:
            model.config.pad_token_id = _first(model.config.eos_token_id) or 0
    return model


def _build_empty(base: Base, arguments: Arguments, dtype: torch.dtype) -> Any:
    """Build the base model with its parameters on the meta device. Return None if that is impossible."""
    import transformers

    if arguments.head != "text":
        return None
    config = transformers.AutoConfig.from_pretrained(base.folder, local_files_only=True)
    kind = getattr(transformers, HEADS[arguments.head])
    return _prepare(build_without_values(lambda: kind.from_config(config, dtype=dtype)))


def _adapt(model: Any, base: Base, arguments: Arguments) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        r=arguments.rank,
        lora_alpha=arguments.alpha,
        target_modules=arguments.targets,
        task_type=TaskType.CAUSAL_LM if arguments.head == "text" else TaskType.SEQ_CLS,
    )
    model.name_or_path = base.location  # adapter_config.json must not contain the path of this machine's copy
    try:
        with warnings.catch_warnings(
            action="ignore", category=FutureWarning
        ):  # peft uses a deprecated transformers API
            return get_peft_model(model, config)
    except ValueError as error:
        raise SettingsError(f"{PREFIX}TASK_ARGS: targets={arguments.targets!r}: {error}") from error


def _first(ids: Any) -> int | None:
    """Return the first of several token IDs, or a single ID unchanged."""
    return ids[0] if isinstance(ids, list) and ids else ids
