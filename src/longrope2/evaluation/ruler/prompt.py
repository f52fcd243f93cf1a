"""How a prompt is framed and measured: plain or as a chat, in tokens of the model's tokenizer."""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenCounter:
    """Counts tokens; light to send to another process, which then needs neither transformers nor torch."""

    definition: str | None  # a fast tokenizer as JSON
    tokenizer: Any = field(default=None, compare=False)  # any other

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "TokenCounter":
        """The counter of a model's tokenizer."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return cls(None, tokenizer) if backend is None else cls(backend.to_str())

    def __call__(self, text: str) -> int:
        """The number of tokens of a text, without those that the tokenizer puts around it."""
        if self.definition is None:
            return len(self.tokenizer.tokenize(text))
        # The fast form keeps no offsets, which saves a third of the time.
        return len(_fast_tokenizer(self.definition).encode_batch_fast([text], add_special_tokens=False)[0])

    @property
    def fingerprint(self) -> str:
        """What tells one tokenizer from another."""
        if self.definition is not None:
            return hashlib.sha256(self.definition.encode()).hexdigest()
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(f"{type(self.tokenizer).__name__} {vocabulary}".encode()).hexdigest()


@lru_cache(maxsize=1)
def _fast_tokenizer(definition: str) -> Any:
    """Built once for all tasks of a process."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
