"""Converts text to token ids with the tokenizer.json of a Hugging Face model (extra `hf`)."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from sunspot.errors import DataError, shorten
from sunspot.extras import how_to_install


@dataclass(frozen=True)
class Tokenizer:
    """A `Column.decode` for text. It holds the file's content, so no node needs the file."""

    content: bytes
    "Content of tokenizer.json."
    end: int | None = None
    "Token id appended to each text, if any."

    @cached_property
    def fingerprint(self) -> str:
        """Text that identifies the resulting tokens."""
        return f"tokens of {hashlib.sha256(self.content).hexdigest()[:16]}, end {self.end}"

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise DataError(f"is {type(text).__name__}; a tokenizer takes text")
        ids: list[int] = load_tokenizer(self.content).encode(text).ids
        return ids if self.end is None else [*ids, self.end]


@lru_cache(maxsize=2)
def load_tokenizer(content: bytes) -> Any:
    """Load a `tokenizers.Tokenizer`, once in each process; raises `DataError`."""
    try:
        from tokenizers import Tokenizer as Tokens

        tokens = Tokens.from_str(content.decode())
    except ModuleNotFoundError as error:
        raise DataError(f"a tokenizer is needed, and {error.name} is not installed; {how_to_install('hf')}") from error
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"tokenizer.json cannot be used: {shorten(error)}") from error
    tokens.no_padding()  # the file may turn on both
    tokens.no_truncation()
    return tokens
