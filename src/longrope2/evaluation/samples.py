"""What an evaluation is made of: a prompt, its right answers, and how an answer is scored."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longrope2.books import read_jsonl
from longrope2.errors import DataError
from longrope2.shapes import misfit

Scorer = Callable[[str, Sequence[str]], float]
"""(prediction, references) → a score from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question to a model."""

    suite: str
    task: str
    length: int
    """Tokens of the prompt and its answer together, at most."""
    index: int
    prompt: str | tuple[int, ...]
    """Text, or tokens where the length has to be exact."""
    references: tuple[str, ...]
    max_new_tokens: int
    score: Scorer | None = field(compare=False)
    """None where another program scores the answers."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    details: Mapping[str, Any] = field(default_factory=dict)
    may_be_cut: bool = False
    """Whether prompt and answer may take more than `length`, so that the window ends the answer unless told not to."""

    @property
    def key(self) -> str:
        """Its place, for people."""
        return f"{self.suite}/{self.task}/{self.length}/{self.index}"

    def digest(self) -> str:
        """What the answer depends on: the prompt and where it ends."""
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return digest("answer", prompt, self.max_new_tokens, self.stop)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens to continue greedily."""

    token_ids: Sequence[int]
    max_new_tokens: int
    stop: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens to score: those from `start` on, given what stands before them."""

    token_ids: Sequence[int]
    start: int

    def digest(self) -> str:
        """What the likelihood depends on."""
        return digest("likelihood", list(self.token_ids), self.start)


def prompt_tokens(tokenizer: Any, samples: Sequence[Sample]) -> list[list[int]]:
    """Prompts as the model gets them; texts all at once, since a tokenizer takes many on many cores."""
    texts = [sample.prompt for sample in samples if isinstance(sample.prompt, str)]
    encoded = iter(tokenizer(texts, verbose=False).input_ids if texts else ())
    return [next(encoded) if isinstance(sample.prompt, str) else list(sample.prompt) for sample in samples]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Text to tokens, opened as the tokenizer opens any; its warning about long ones is not wanted here."""
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids


def digest(*parts: Any) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(ends)] if ends else text


def truncate_middle(tokenizer: Any, prompt: str, most: int) -> str:
    """At most so many tokens of a prompt: its two ends, which hold instruction and question."""
    ids = encode(tokenizer, prompt)
    half = most // 2
    while len(ids) > most:
        if half < 1:
            raise DataError(
                f"{max(most, 0)} tokens have no room for a prompt of {len(ids):,}", hint="ask for a greater length"
            )
        ends = (ids[:half], ids[-half:])
        shortened = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
        count = len(encode(tokenizer, shortened))
        if count <= most:
            return shortened
        half -= max(1, (count - most) // 2)  # at the seam, words may take more tokens than they did
    return prompt


def most_that_fit(count_tokens: Callable[[int], int], most: int, tokens: int) -> int:
    """The most parts, from 1 to `most`, with at most so many tokens.

    Parts take nearly the same number of tokens each, so a few counts suffice.
    """
    few = min(most, 32)
    least = count_tokens(1)
    each = max((count_tokens(few) - least) / max(few - 1, 1), 1.0)
    parts = min(most, max(int((tokens - least) / each) + 1, 1))
    while parts > 1 and (found := count_tokens(parts)) > tokens:
        parts = max(1, min(parts - 1, parts - int((found - tokens) / each)))
    while parts < most and count_tokens(parts + 1) <= tokens:
        parts += 1
    if least > tokens:
        raise DataError(
            "the shortest prompt and its answer do not fit", hint=f"ask for a length greater by {least - tokens}"
        )
    return parts


def read_rows(path: Path, shape: dict[str, Any], *, source: str) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl or .jsonl.gz file; an error names the line and how it differs from the shape."""
    if not path.is_file():
        raise DataError(f"{path}: no such file", hint=source)
    empty = True
    for where, row in read_jsonl(path, hint=source):
        empty = False
        if problem := misfit(row, shape):
            raise DataError(f"{where}: {problem}", hint=source)
        yield row
    if empty:
        raise DataError(f"{path}: no rows", hint=source)
