"""How large a haystack may be: RULER's search, draw by draw.

Every probe of the search draws from the random numbers of the samples, so it is part of what makes them.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from longrope2.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# NVIDIA's generator draws again without end where its smallest haystack does not fit. Here luck is tried so often;
# then the haystack becomes smaller still, so that there are samples of every length that has room for them.
REDRAWS = 10


@dataclass(frozen=True)
class Draft:
    """A prompt, not yet known to fit."""

    input: str
    answer_prefix: str
    outputs: list[str]

    @property
    def prompt(self) -> str:
        """All that the model reads."""
        return self.input + self.answer_prefix


class Maker(ABC):
    """Makes prompts of one task. Sizes are in words, lines or documents of the haystack."""

    step: int  # by which a haystack that is too large shrinks; the search starts from it
    trial_lacks = 0  # tokens of a sample that a trial does not have

    @abstractmethod
    def least(self, index: int) -> int:
        """The size below which there is no sample."""

    @abstractmethod
    def draw(self, size: int, index: int) -> Draft:
        """The prompt of a sample; apart from questions, all are drawn one after another, whatever their index."""

    def possible(self, size: int) -> bool:
        """Whether there is enough to make a prompt of this size."""
        return True

    def trial(self, size: int) -> Draft:
        """A prompt for the size search."""
        return self.draw(size, 0)

    def upper_bound(self, length: int, count_tokens: Callable[[str], int]) -> int:
        """A size that is surely too large: three times what a small prompt makes likely."""
        return int((length / (count_tokens(self.trial(self.step).prompt) / self.step)) * 3)


def fitting(
    maker: Maker, count_tokens: Callable[[str], int], *, length: int, new_tokens: int, count: int
) -> Iterator[tuple[Draft, int]]:
    """Drafts of at most `length` tokens with the answer, and their lengths."""
    size = _largest(maker, count_tokens, length, new_tokens)
    for index in range(count):
        used, least, redraws = size, maker.least(index), 0
        while True:
            draft = maker.draw(used, index)
            tokens = count_tokens(draft.prompt) + new_tokens
            if tokens <= length:
                break
            if used > maker.step:
                used = max(least, used - maker.step)
            elif redraws < REDRAWS:
                redraws += 1
            elif used > least:
                used = max(least, used * 3 // 4)
            else:
                raise DataError(
                    f"a sample takes at least {tokens:,} tokens (with {new_tokens} for the answer), {length:,} given",
                    hint="ask for a greater length or omit the task",
                )
        yield draft, tokens


def _largest(maker: Maker, count_tokens: Callable[[str], int], length: int, new_tokens: int) -> int:
    """The largest size whose trial fits, by bisection."""
    low, high = maker.step, max(maker.upper_bound(length, count_tokens), 2 * maker.step)
    largest, besides = maker.step, maker.trial_lacks + new_tokens
    while low <= high:
        middle = (low + high) // 2
        if maker.possible(middle) and count_tokens(maker.trial(middle).prompt) + besides <= length:
            largest, low = middle, middle + 1
        else:
            high = middle - 1
    return largest


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
        """What distinguishes one tokenizer from another."""
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
