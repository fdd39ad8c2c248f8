"""Texts that a checkpoint's model answers prompts with, in this process: on its GPU, or on its CPU."""

from typing import Any

from sunspot.errors import SettingsError
from sunspot.predict.classifier import choose_device, open_checkpoint, restore_model
from sunspot.settings import PREFIX, Settings
from sunspot.tasks import load_task


def answer_prompts(settings: Settings, run: str, checkpoint: str, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Answer prompts; returns the JSON document: the checkpoint, and each answer, of at most so many tokens.

    Raises like `open_checkpoint`, `SettingsError` for a task without `answer`, and `ConflictError` if the weights do
    not fit the model that the task builds.
    """
    loaded = open_checkpoint(run, checkpoint, settings.storage_path)
    answer = getattr(load_task(loaded.settings), "answer", None)
    if answer is None:
        raise SettingsError(
            f"{PREFIX}TASK={loaded.settings.task}: defines no answer(model, prompts, tokens) -> texts, so its models "
            "answer no prompts; sunspot.tasks.finetune does"
        )
    texts = answer(restore_model(loaded).to(choose_device(settings.use_gpu)).eval(), prompts, tokens)
    return {
        "checkpoint": loaded.checkpoint.name,
        "step": loaded.checkpoint.step,
        "warnings": list(loaded.warnings),
        "answers": [{"prompt": prompt, "answer": text} for prompt, text in zip(prompts, texts, strict=True)],
    }
