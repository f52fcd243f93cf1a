"""How large a haystack may be: RULER's search, draw by draw.

Every probe of the search draws from the random numbers of the samples, so it is part of what makes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from longrope2.errors import DataError

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
                    hint="ask for a greater length or leave the task out",
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
