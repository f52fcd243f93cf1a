"""BABILong (Kuratov et al., 2024): the facts of a bAbI story hidden in a book, and a question that needs them.

The form of a prompt is the published one: instruction, examples, what an answer looks like, context, question. The
words are our own. So are the stories, which `babi` makes by bAbI's rules, and the books. As published, facts keep their
order and stand between sentences of at least ten tokens, each anywhere with the same chance.
"""

import os
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, count
from typing import Any

from longrope2.books import Book, read_books
from longrope2.errors import DataError
from longrope2.evaluation.babi import ROOMS, Story, make_story
from longrope2.evaluation.suite import Sample, Setup, Suite, chat_frame, encode

NAME = "babilong"
TASKS = ("qa1", "qa2", "qa3")
COUNT, NEW_TOKENS = 100, 20
LEAST_SENTENCE = 10
"""Tokens; shorter ones are passed over."""
SENTENCE_BREAK = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)]))\s+")
PROMPT = "{instruction}\n\n{examples}\n\n{form}\n\n<context>\n{context}\n</context>\n\nQuestion: {question}"
CARRIED = (
    "Somewhere in a long text I have hidden facts about people who walk about, take things and leave them. Answer the "
    "question by these facts alone. A thing that somebody holds goes wherever that person goes. A thing that was left "
    "stays where it was left."
)
INSTRUCTIONS = {
    "qa1": "Somewhere in a long text I have hidden facts about where people went. Answer the question by these facts "
    "alone. If somebody has been in several places, the last one counts.",
    "qa2": CARRIED,
    "qa3": CARRIED,
}
EXAMPLES = {
    "qa1": (
        ("Peter went to the attic. Anna moved to the cellar. Peter travelled to the stable. Where is Peter?",
         "Peter is now in the stable."),
        ("Laura journeyed to the porch. Peter went back to the attic. Where is Laura?", "Laura is now in the porch."),
    ),
    "qa2": (
        ("Anna went to the cellar. Anna got the lamp there. Anna moved to the porch. Where is the lamp?",
         "The lamp is in the porch."),
        ("Peter took the rope. Peter travelled to the attic. Peter left the rope. Peter went to the stable. "
         "Where is the rope?", "The rope is in the attic."),
    ),
    "qa3": (
        ("Laura picked up the lamp. Laura moved to the cellar. Peter went to the attic. Laura went to the porch. "
         "Where was the lamp before the porch?", "Before the porch the lamp was in the cellar."),
        ("Peter journeyed to the stable. Peter grabbed the rope there. Peter went back to the attic. Peter put down "
         "the rope. Where was the rope before the attic?", "Before the attic the rope was in the stable."),
    ),
}  # fmt: skip
FORMS = {
    "qa1": "Give your answer in this form and add nothing to it: 'person' is now in the 'place'.",
    "qa2": "Give your answer in this form and add nothing to it: The 'thing' is in the 'place'.",
    "qa3": "Give your answer in this form and add nothing to it: Before the 'place' the 'thing' was in the 'place'.",
}


def only_room(prediction: str, references: Sequence[str], *, question: str) -> float:
    """1 if the first sentence names the right room and no other; those in the question do not count."""
    first = prediction.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    named = {room for room in ROOMS if room in first and room not in question.lower()}
    return float(named == {references[0]})


def babilong_samples(setup: Setup, task: str, length: int) -> list[Sample]:
    """Samples of one task and length."""
    books = list(read_books(setup.books, held_out=True if setup.books is None else None))
    make = partial(_sample, setup, task, length, books)
    # Nearly all the time goes into counting tokens, which does not hold Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(make, count(), _stories(setup, task)))


def _sample(
    setup: Setup, task: str, length: int, books: Sequence[Book], index: int, told: tuple[Story, Callable[[str], str]]
) -> Sample:
    """One story in as much of a book as there is room for."""
    story, prompt = told
    rng = random.Random(f"{setup.seed} {task} {length} {index}")  # noqa: S311
    room = length - NEW_TOKENS - _tokens(setup.tokenizer, prompt(" ".join(story.facts)))
    if room < 0:
        raise _too_short(length, length - room)
    places = sorted(rng.random() for _ in story.facts)
    sentences, sizes = _background(setup, books, rng, room)
    used = bisect_right(list(accumulate(sizes)), room)

    def text() -> str:
        return prompt(" ".join(hidden(story.facts, places, sentences[:used])))

    # Side by side, sentences may take a few tokens more.
    while (over := _tokens(setup.tokenizer, text()) + NEW_TOKENS - length) > 0:
        while over > 0:
            used -= 1
            over -= sizes[used]
    return Sample(
        suite=NAME,
        task=task,
        length=length,
        index=index,
        prompt=text(),
        references=(story.answer,),
        max_new_tokens=NEW_TOKENS,
        score=partial(only_room, question=story.question),
        stop=(".",),  # what follows the first sentence does not count
        details={"facts": len(story.facts), "first": round(places[0], 4), "last": round(places[-1], 4)},
    )


def hidden(facts: Sequence[str], places: Sequence[float], sentences: Sequence[str]) -> Iterator[str]:
    """Sentences with facts between them: each place, from 0 to 1, is as likely before any sentence as at the end."""
    gaps = [int(place * (len(sentences) + 1)) for place in places]
    for number, sentence in enumerate([*sentences, None]):
        yield from (fact for fact, gap in zip(facts, gaps, strict=True) if gap == number)
        if sentence is not None:
            yield sentence


def _stories(setup: Setup, task: str) -> Iterator[tuple[Story, Callable[[str], str]]]:
    """Stories, the same at every length, and what makes prompts of their contexts."""
    # The authors end the prompt with the question. A base model is shown that an answer follows, as in the examples.
    frame = chat_frame(setup.tokenizer) if setup.chat else "{}\nAnswer:".format
    examples = "\n\n".join(f"<example>\n{text}\nAnswer: {answer}\n</example>" for text, answer in EXAMPLES[task])
    parts = {"instruction": INSTRUCTIONS[task], "examples": examples, "form": FORMS[task]}
    for index in range(setup.samples or COUNT):
        story = make_story(task, random.Random(f"{setup.seed} {task} {index}"))  # noqa: S311

        def prompt(context: str, question: str = story.question) -> str:
            return frame(PROMPT.format(context=context, question=question, **parts))

        yield story, prompt


def _background(setup: Setup, books: Sequence[Book], rng: random.Random, tokens: int) -> tuple[list[str], list[int]]:
    """Sentences from somewhere in a book, and of other books if that one ends, and how many tokens each has."""
    sentences: list[str] = []
    sizes: list[int] = []
    for book in rng.sample(books, len(books)):
        start = rng.randrange(max(1, len(book.text) - 8 * tokens))
        sample = book.text[start : start + 20_000]
        # A tenth more than is needed, since some sentences are too short.
        need = int(1.1 * (tokens - sum(sizes)) * len(sample) / max(1, _tokens(setup.tokenizer, sample))) + 2000
        found = [" ".join(text.split()) for text in SENTENCE_BREAK.split(book.text[start : start + need])]
        found = found[1:-1]  # the first and the last may be cut
        if not found:
            continue
        ids = setup.tokenizer([f" {text}" for text in found], add_special_tokens=False, verbose=False).input_ids
        for text, own in zip(found, ids, strict=True):
            if len(own) >= LEAST_SENTENCE:
                sentences.append(text)
                sizes.append(len(own))
        if sum(sizes) >= tokens:
            return sentences, sizes
    raise DataError(
        f"the books have no {tokens:,} tokens in sentences for a sample of {NAME}",
        hint="give longer books or ask for a shorter length",
    )


def _tokens(tokenizer: Any, text: str) -> int:
    return len(encode(tokenizer, text))


def _too_short(length: int, least: int) -> DataError:
    return DataError(
        f"a {NAME} sample of {length} tokens has no room for its story and the answer",
        hint=f"the smallest length for these stories and this tokenizer is {least}",
    )


def check(setup: Setup) -> None:
    """Refuse a length that has no room for the longest story, and books that cannot fill the longest one."""
    least = 0
    for task in setup.tasks:
        for story, prompt in _stories(setup, task):
            least = max(least, _tokens(setup.tokenizer, prompt(" ".join(story.facts))) + NEW_TOKENS)
    if setup.lengths[-1] < least:
        raise _too_short(setup.lengths[-1], least)
    babilong_samples(setup.trial, setup.tasks[0], setup.lengths[0])


SUITE = Suite(
    name=NAME,
    title="BABILong",
    tasks=TASKS,
    make=babilong_samples,
    metrics=dict.fromkeys(TASKS, "only the right place named"),
    check=check,
    samples=COUNT,
    every_length=True,
    figure="BABILong, mean over tasks (%)",
    summary="BABILong",
    note="facts of a story in a book",
    row="`qa1`, `qa2`, `qa3`: one, two, three facts of a story hidden in a book | the right place and no other | all "
    "| 100 a task",
)
