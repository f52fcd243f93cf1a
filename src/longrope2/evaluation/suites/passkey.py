"""Pass keys: a number of five digits in sentences that repeat, as ∞Bench has them, at any length."""

import random
import re
from collections.abc import Sequence
from typing import Any

from longrope2.errors import DataError
from longrope2.evaluation.suite import Sample, Setup, Suite, chat_frame, encode, most_that_fit

NAME = "passkey"
COUNT, NEW_TOKENS = 50, 6
# Every pass key has five digits, but not every tokenizer gives them the same number of tokens.
SPARE_TOKENS = 8
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
LINE = "The pass key is {key}. Remember it. {key} is the pass key.\n"
PROMPT = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information.\n\n{context}\n\nWhat is the pass key?"
)
ANSWER_PREFIX = "The pass key is"


def first_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the first number of the answer is the pass key."""
    numbers = re.findall(r"[0-9]+", prediction)
    return float(bool(numbers) and numbers[0] == references[0])


def passkey_samples(setup: Setup, length: int) -> list[Sample]:
    """Samples of one length; the pass key moves from the first line to the last."""
    count = setup.samples or COUNT
    least = _tokens(setup.tokenizer, 1, setup.chat)
    if length < least:
        raise DataError(
            f"a pass key sample of {length} tokens has no room for its sentences and the answer",
            hint=f"the smallest length for this tokenizer is {least}",
        )
    lines = most_that_fit(lambda parts: _tokens(setup.tokenizer, parts, setup.chat), length, length)
    samples = []
    for index in range(count):
        rng = random.Random(f"{setup.seed} {index}")  # noqa: S311
        key, depth = "".join(str(rng.randrange(10)) for _ in range(5)), index / max(count - 1, 1)
        samples.append(
            Sample(
                suite=NAME,
                task=NAME,
                length=length,
                index=index,
                prompt=_prompt(setup.tokenizer, lines, key, depth, setup.chat),
                references=(key,),
                max_new_tokens=NEW_TOKENS,
                score=first_number,
                details={"depth": round(depth, 4)},
            )
        )
    return samples


def _prompt(tokenizer: Any, lines: int, key: str, depth: float, chat: bool) -> str:
    before = round(depth * lines)
    context = NOISE * before + LINE.format(key=key) + NOISE * (lines - before)
    text = PROMPT.format(context=context)
    return (chat_frame(tokenizer)(text) if chat else text + "\n\n") + ANSWER_PREFIX


def _tokens(tokenizer: Any, lines: int, chat: bool) -> int:
    """Of prompt and answer, at most."""
    return len(encode(tokenizer, _prompt(tokenizer, lines, "00000", 0.5, chat))) + NEW_TOKENS + SPARE_TOKENS


SUITE = Suite(
    name=NAME,
    title="Pass key",
    tasks=(NAME,),
    make=lambda setup, _, length: passkey_samples(setup, length),
    metrics={NAME: "first number right"},
    samples=COUNT,
    every_length=True,
    summary="pass key",
    row="five digits in repeated sentences (∞Bench's wording) | first number of the answer | all | 50",
)
