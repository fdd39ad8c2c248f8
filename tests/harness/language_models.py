"""Creates small pretrained models, and texts for fine-tuning them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch


def reference() -> list[str]:
    """Return the articles of Python's built-in language reference."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def write_base(folder: Path, seed: int = 0, vocabulary: int = 300, **sizes: Any) -> str:
    """Write a Llama with about ten thousand random weights and a tokenizer trained on the reference."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(reference()[:10], trainer)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, **ids, **{**small, **sizes})
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    return str(folder)


def write_texts(folder: Path, rows: int = 40, letters: int = 300, **columns: Any) -> str:
    """Write a table with the beginnings of articles (`text`) and classes (`label`) that mark long articles."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text[: letters * (1 + number % 2)] for number, text in enumerate(reference()[:rows])]
    labels = [number % 2 for number in range(len(texts))]
    table = pa.table({"text": texts, "label": labels} | columns)
    pq.write_table(table, folder / "part.parquet", row_group_size=8)
    return str(folder)
