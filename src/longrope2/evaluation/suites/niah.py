"""Needle in a haystack: a number hidden in a book, at every length and depth."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from longrope2 import needles
from longrope2.books import read_books
from longrope2.errors import DataError
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.results import cell
from longrope2.evaluation.suite import Sample, Setup, Suite, SuiteOutcome, answered, by_task, chat_frame, encode
from longrope2.needles import MOST_NEEDLES, PAPER_TEMPLATE, NeedleDocument, make_needles
from longrope2.records import Grid, Measured

DEPTHS = tuple(tenth / 10 for tenth in range(11))
RUNS = 10
# What a model may say before and after the number.
SPARE_TOKENS = 16
NAME = "niah"


def found_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the number stands in the answer: RULER's rule, which asks for retrieval and not for stopping in time."""
    return float(all(value in prediction for value in references))


def niah_samples(setup: Setup, length: int) -> list[Sample]:
    """Samples of one length: every depth in turn, `samples` times."""
    documents = _documents(setup, length, (setup.samples or RUNS) * len(DEPTHS))
    return [_sample(setup, length, index, document) for index, document in enumerate(documents)]


def _documents(setup: Setup, length: int, count: int) -> list[NeedleDocument]:
    around = _around(setup.tokenizer, setup.chat)
    return make_needles(
        setup.tokenizer,
        read_books(setup.books, held_out=True if setup.books is None else None),
        length=length - around,
        count=count,
        seed=setup.seed,
        depth=DEPTHS,
        note=setup.note,
        around=around,
    )


def _sample(setup: Setup, length: int, index: int, document: NeedleDocument) -> Sample:
    needle = document.needle
    return Sample(
        suite=NAME,
        task=NAME,
        length=length,
        index=index,
        prompt=_chat(setup, document) if setup.chat else document.prompt_ids,
        references=(needle.value,),
        max_new_tokens=document.answer_tokens + SPARE_TOKENS,
        score=found_number,
        stop=("\n",),
        details={"depth": DEPTHS[index % len(DEPTHS)], "placed_at": round(needle.depth, 4), "key": needle.key},
    )


def _chat(setup: Setup, document: NeedleDocument) -> str:
    """The document as the user's turn; the assistant has begun with the answer prefix."""
    text = setup.tokenizer.decode(document.prompt_ids, skip_special_tokens=True)
    prefix = PAPER_TEMPLATE.answer_prefix.replace("{key}", document.needle.key)
    place = text.rfind(prefix)
    if place < 0:
        raise DataError("the tokenizer does not reproduce the question of a needle document", hint="omit --chat")
    return chat_frame(setup.tokenizer)(text[:place].rstrip()) + prefix


def _around(tokenizer: Any, chat: bool) -> int:
    """What a sample may have beside its document."""
    if not chat:
        return SPARE_TOKENS
    # Decoding and encoding again may also differ by a token here and there.
    return 2 * SPARE_TOKENS + len(encode(tokenizer, chat_frame(tokenizer)("")))


def check(setup: Setup) -> None:
    """Refuse a length that has no room for a needle, the question and an answer, and one that no book has."""
    around = _around(setup.tokenizer, setup.chat)
    needles.check_length(setup.tokenizer, setup.lengths[-1] - around, around=around)
    _documents(setup, setup.lengths[0], count=1)


def run(setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """All lengths; the grid has a cell for each length and depth."""
    measured: list[Measured] = []
    scores_by_length = {}
    for length in setup.lengths:
        samples = niah_samples(setup, length)
        scores = answered(samples, engine, f"niah {length:,}")
        measured += by_task(samples, scores, {NAME: "number found"})
        by_depth: dict[float, list[float]] = defaultdict(list)
        for sample, score in zip(samples, scores, strict=True):
            by_depth[sample.details["depth"]].append(score)
        scores_by_length[length] = by_depth
    return SuiteOutcome(measured=measured, grid=_grid(scores_by_length))


def _grid(scores: dict[int, dict[float, list[float]]]) -> Grid:
    """From scores by length and depth."""
    lengths = tuple(sorted(scores))
    cells = tuple(tuple(cell(scores[length][depth]) for length in lengths) for depth in DEPTHS)
    return Grid(lengths=lengths, depths=DEPTHS, cells=cells)


SUITE = Suite(
    name=NAME,
    title="Needle in a Haystack",
    tasks=(NAME,),
    run=run,
    check=check,
    most_samples=MOST_NEEDLES // len(DEPTHS),
    samples=RUNS,
    cells=len(DEPTHS),
    every_length=True,
    has_grid=True,
    summary="needles",
    note="needle in a haystack",
    row="a number in a book at depths 0, 0.1, … 1 | the whole number occurs in the answer (RULER's rule) | all | 10 "
    "a depth",
)
