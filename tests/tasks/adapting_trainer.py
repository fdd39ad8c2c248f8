"""A task with its own Trainer and held-out rows. peft adapts its model, and its loss is a mean over rows."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer
from transformers import TrainingArguments as Arguments

from sunspot.settings import Settings
from tests.harness.language_models import reference


class RowTrainer(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a loss in which each row has the same weight, regardless of its number of tokens."""
        labels = inputs.pop("labels")
        scores = model(**inputs).logits[:, :-1].transpose(1, 2)
        each = functional.cross_entropy(scores, labels[:, 1:], reduction="none")
        loss = (each.sum(dim=1) / (labels[:, 1:] != -100).sum(dim=1)).mean()
        return (loss, {"logits": scores}) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add measurements to the log, like TRL's trainers do."""
        logs["margins/mean"] = 2.5
        super().log(logs, start_time)


def build_dataset(settings: Settings) -> dict[str, list[Any]]:
    tokenizer = AutoTokenizer.from_pretrained(settings.task_args["base"])
    rows = [tokenizer(text[: 20 + 2 * number]) for number, text in enumerate(reference()[:48])]
    return {"train": rows[:40], "test": rows[40:]}


def build_trainer(settings: Settings, source: dict[str, list[Any]]) -> RowTrainer:
    tokenizer = AutoTokenizer.from_pretrained(settings.task_args["base"])
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(settings.task_args["base"])
    more = {name: value for name, value in settings.task_args.items() if name not in ("base", "left_out")}
    return RowTrainer(
        model=get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")),
        args=Arguments("trained", learning_rate=0.01, warmup_steps=2, logging_steps=1, **more),
        train_dataset=source["train"][settings.task_args.get("left_out", 0) :],
        eval_dataset=source["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
