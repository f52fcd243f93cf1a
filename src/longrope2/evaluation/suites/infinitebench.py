"""∞Bench: key-value retrieval, made here as its authors make it, and En.MC from its file.

Wording is benchmark data. Base models get the prompts its authors wrote for a base model (YaRN-Mistral), chat models
those they wrote for a chat model.
"""

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longrope2.errors import DataError
from longrope2.evaluation.suite import (
    Published,
    Sample,
    Setup,
    Suite,
    chat_frame,
    data_folder,
    encode,
    most_that_fit,
    read_rows,
    truncate_middle,
)

NAME = "infinitebench"
KEY_VALUE, CHOICE = "kv_retrieval", "longbook_choice_eng"
PAIRS, COUNT, KEY_VALUE_TOKENS = 2500, 100, 50
KEY_VALUE_PROMPT = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    'JSON data:\n{{{pairs}}}\n\n\nKey: "{key}"\nThe value associated with the specified key is: '
)
CHOICE_TOKENS = 40
CHOICE_PROMPT = (
    "Read the book and answer the question.\n\n{context}\n\nQuestion: {question}\n"
    "A. {a}\nB. {b}\nC. {c}\nD. {d}\n\nThe letter of the correct answer is"
)
CHOICE_CHAT_PROMPT = (
    "Read the book and answer the question.\n\n{context}\n\nQuestion: {question}\n\n"
    "Only one of the following options is correct, tell me the answer using one single letter (A, B, C, or D). "
    "Don't say anything else.\nA. {a}\nB. {b}\nC. {c}\nD. {d}"
)
CHOICE_FILE = f"{CHOICE}.jsonl"
SOURCE = f"{CHOICE_FILE} is a file of huggingface.co/datasets/xinrongzhang2022/InfiniteBench; put it into --data DIR"
LETTERS = "ABCD"


@dataclass(frozen=True, kw_only=True)
class ChoiceRow(Published):
    """A line of its file."""

    context: str
    input: str
    answer: str | tuple[str, ...]
    options: tuple[str, ...]


def value_found(prediction: str, references: Sequence[str]) -> float:
    """1 if the value is one of the answer's words."""
    words = re.sub(r"[\n:\"'.,?!{}]", " ", prediction).split()
    return float(references[0] in words)


def letter_chosen(prediction: str, references: Sequence[str]) -> float:
    """1 if the first letter of the answer is the right one; failing that, what follows "answer is" and the like.

    The references are the right option's text and its letter.
    """
    answer = prediction.strip()
    if not answer:
        return 0.0
    if answer[0] in LETTERS:
        return float(answer[0] in references)
    if answer in references:
        return 1.0
    answer = re.sub(r" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", answer))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        if prefix in answer:
            return float(answer.split(prefix, 1)[1][1:].startswith(tuple(references)))
    letters = [word for word in answer.split() if word in LETTERS]
    return float(bool(letters) and letters[0] in references)


def key_value_samples(setup: Setup, length: int) -> list[Sample]:
    """2,500 pairs of random identifiers, or as many as fit; the pair asked for moves from the first to the last."""
    count = setup.samples or COUNT
    frame = chat_frame(setup.tokenizer) if setup.chat else str
    samples, pairs_that_fit = [], PAIRS
    for index in range(count):
        rng = random.Random(f"{setup.seed} {index}")  # noqa: S311
        pairs = [(_identifier(rng), _identifier(rng)) for _ in range(PAIRS)]

        def prompt(size: int, pairs: Sequence[tuple[str, str]] = pairs, index: int = index) -> str:
            body = ", ".join(f'"{key}": "{value}"' for key, value in pairs[:size])
            return frame(KEY_VALUE_PROMPT.format(pairs=body, key=pairs[index * size // count][0]))

        def tokens(size: int, prompt: Callable[[int], str] = prompt) -> int:
            return len(encode(setup.tokenizer, prompt(size)))

        size = pairs_that_fit
        if tokens(size) > length - KEY_VALUE_TOKENS:
            size = most_that_fit(tokens, size, length - KEY_VALUE_TOKENS)
        if index == 0:  # those of other samples may take a few tokens more
            pairs_that_fit = size
        asked = index * size // count
        samples.append(
            Sample(
                suite=NAME,
                task=KEY_VALUE,
                length=length,
                index=index,
                prompt=prompt(size),
                references=(pairs[asked][1],),
                max_new_tokens=KEY_VALUE_TOKENS,
                score=value_found,
                details={"pairs": size, "asked": asked},
            )
        )
    return samples


def choice_samples(setup: Setup, length: int) -> list[Sample]:
    """Questions on whole books, which are cut in their middle to fit."""
    path = data_folder(setup.data, NAME, SOURCE) / CHOICE_FILE
    frame = chat_frame(setup.tokenizer) if setup.chat else str
    most = length - CHOICE_TOKENS - len(encode(setup.tokenizer, frame("")))
    samples = []
    for index, row in enumerate(read_rows(path, ChoiceRow, source=SOURCE)):
        if index == setup.samples:
            break
        answer = row.answer if isinstance(row.answer, str) else next(iter(row.answer), None)
        if len(row.options) != len(LETTERS) or answer is None or answer not in row.options:
            raise DataError(f"{path}, sample {index + 1}: {answer!r} is not one of its options", hint=SOURCE)
        options = dict(zip("abcd", row.options, strict=True))
        template = CHOICE_CHAT_PROMPT if setup.chat else CHOICE_PROMPT
        text = template.format(context=row.context, question=row.input, **options)
        samples.append(
            Sample(
                suite=NAME,
                task=CHOICE,
                length=length,
                index=index,
                prompt=frame(truncate_middle(setup.tokenizer, text, most)),
                references=(answer, LETTERS[row.options.index(answer)]),
                max_new_tokens=CHOICE_TOKENS,
                score=letter_chosen,
            )
        )
    return samples


def _identifier(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


SUITE = Suite(
    name=NAME,
    title="∞Bench",
    tasks=(KEY_VALUE, CHOICE),
    make=lambda setup, task, length: (key_value_samples if task == KEY_VALUE else choice_samples)(setup, length),
    metrics={KEY_VALUE: "value found", CHOICE: "letter right"},
    heads={KEY_VALUE: "KV retrieval", CHOICE: "En.MC"},
    row="`kv_retrieval` (made here), `longbook_choice_eng` | its own | longest | 100; its file",
    files="`longbook_choice_eng.jsonl`",
)
