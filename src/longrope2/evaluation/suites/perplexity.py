"""Perplexity of books by length: of one full window, and of a longer stretch through a sliding one."""

from dataclasses import replace

from longrope2.books import long_enough, read_books
from longrope2.errors import DataError, counted
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.results import digest, perplexity
from longrope2.evaluation.suite import Setup, Suite, SuiteOutcome, TextSpan, encode
from longrope2.records import Measured

NAME = "perplexity"
FULL, SLIDING = "full", "sliding"
DOCUMENTS = 10


def documents(setup: Setup) -> list[list[int]]:
    """The first tokens of this many books, in seeded order, as many as the longest length."""
    import numpy as np  # here, so that `compare` starts without it

    length, wanted = setup.lengths[0], setup.samples or DOCUMENTS
    if setup.lengths[-1] < 2:
        raise DataError("perplexity needs at least 2 tokens: the first is only read", hint="ask for a greater length")
    books = list(read_books(setup.books, held_out=True if setup.books is None else None))
    order = np.random.default_rng(setup.seed).permutation(len(books))
    found: list[list[int]] = []

    def count_tokens(text: str) -> int:
        return len(encode(setup.tokenizer, text))

    for book in long_enough((books[index] for index in order), length, count_tokens, note=setup.note):
        found.append(_first_tokens(setup, book.text, length))
        if len(found) == wanted:
            break
    if len(found) < wanted:
        setup.note(f"{counted(len(found), 'book')} of {length:,} tokens, {wanted} wanted")
    return found


def check(setup: Setup) -> None:
    """Refuse a length that no book has."""
    documents(replace(setup, samples=1))


def _first_tokens(setup: Setup, text: str, length: int) -> list[int]:
    end = 6 * length
    while True:
        ids = encode(setup.tokenizer, text[:end])
        # A margin, since the cut may fall into a word.
        if len(ids) >= length + 8 or end >= len(text):
            return ids[:length]
        end *= 2


def full(tokens: list[int], length: int) -> list[TextSpan]:
    """The first window: every token but the first, given all before it."""
    return [TextSpan(token_ids=tokens[:length], start=1)]


def sliding(tokens: list[int], length: int) -> list[TextSpan]:
    """All tokens but the first, each given at least half a window, where there is so much before it.

    Windows move on by half their length and score what is new in them (Press et al., 2021).
    """
    step = max(length // 2, 1)
    spans = [TextSpan(token_ids=tokens[:length], start=1)]
    for end in range(length + step, len(tokens) + step, step):
        window = tokens[max(0, min(end, len(tokens)) - length) : end]
        new = min(end, len(tokens)) - (end - step)
        spans.append(TextSpan(token_ids=window, start=len(window) - new))
    return spans


MODES = {FULL: full, SLIDING: sliding}


def run(setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """All lengths, on the same books."""
    from longrope2.perplexity import total

    texts = documents(setup)
    measured: list[Measured] = []
    for length in setup.lengths:
        for task in setup.tasks:
            by_text = [MODES[task](tokens, length) for tokens in texts]
            spans = [span for part in by_text for span in part]
            scores = iter(engine.scores(spans, f"perplexity {task} {length:,}"))
            whole = [total([next(scores) for _ in part]) for part in by_text]
            asked = digest([span.digest() for span in spans])
            measured.append(perplexity(whole, suite=NAME, task=task, length=length, asked=asked))
    return SuiteOutcome(measured=measured)


SUITE = Suite(
    name=NAME,
    title="Perplexity of books",
    tasks=(FULL, SLIDING),
    run=run,
    check=check,
    samples=DOCUMENTS,
    every_length=True,
    is_perplexity=True,
    scores_texts=True,
    note="of books",
    row="`full`, `sliding` | perplexity of books | all | 10 books",
)
