"""Converts text to token ids with the tokenizer.json of a Hugging Face model (extra `hf`)."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from sunspot.errors import DataError, shorten
from sunspot.extras import how_to_install


@dataclass(frozen=True)
class Tokenizer:
    """Function that converts text to token ids, for `Column.decode`.

    It contains tokenizer.json, so other nodes do not need the file.
    """

    content: bytes
    "The content of tokenizer.json."
    end: int | None = None
    "The token ID appended to each text, if any."
    thread_safe: ClassVar[bool] = True

    @cached_property
    def fingerprint(self) -> str:
        """A string that identifies the tokenizer and the token that is appended to each text."""
        return f"tokens of {hashlib.sha256(self.content).hexdigest()[:16]}, end {self.end}"

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise DataError(f"has type {type(text).__name__}, but the tokenizer needs text")
        [encoding] = load_tokenizer(self.content).encode_batch_fast([text])  # `encode` also locates tokens in the text
        ids: list[int] = encoding.ids
        return ids if self.end is None else [*ids, self.end]


@lru_cache(maxsize=2)
def load_tokenizer(content: bytes) -> Any:
    """Return a `tokenizers.Tokenizer`, cached per process.

    Raises `DataError` if the library is missing or the content is invalid.
    """
    try:
        from tokenizers import Tokenizer as Tokens

        tokens = Tokens.from_str(content.decode())
    except ModuleNotFoundError as error:
        raise DataError(f"tokenization needs {error.name}, which is not installed; {how_to_install('hf')}") from error
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"tokenizer.json is invalid: {shorten(error)}") from error
    tokens.no_padding()  # the file can enable both
    tokens.no_truncation()
    return tokens
