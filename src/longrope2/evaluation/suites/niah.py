"""Needles in a haystack: numbers hidden in a book, at every length and depth: one, four with a key each, four with one.

`niah` has the paper's wording, which the search looks for, too. The others have wordings that share nothing with it or
with the questions of training: what they measure is finding, and not knowing a sentence.
"""

import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from longrope2 import needles
from longrope2.books import Book, read_books
from longrope2.errors import DataError
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.results import cell, digest
from longrope2.evaluation.suite import Sample, Setup, Suite, SuiteOutcome, answered, by_task, chat_frame, encode
from longrope2.files import bytes_digest
from longrope2.needles import (
    MOST_NEEDLES,
    PAPER_TEMPLATE,
    NeedleDocument,
    NeedleTemplate,
    make_needles,
)
from longrope2.records import Grid, Measured, Record

DEPTHS = tuple(tenth / 10 for tenth in range(11))
APART = tuple(DEPTHS[3 * turn % len(DEPTHS)] for turn in range(len(DEPTHS)))
"""The same in an order in which neighbours are far from each other, for documents with several needles."""
RUNS = 10
# What a model may say before, between and after the numbers.
SPARE_TOKENS = 16
TOGETHER = 4
"""Sentences of a kind in one document, as in RULER."""
INSTRUCTION = "Study this passage closely, since details matter later."
HELD_OUT = (
    NeedleTemplate(
        instruction=INSTRUCTION,
        needle="When {key} sailed, its ledger listed {value} crates.",
        question="How many crates did its ledger list when {key} sailed?",
        answer_prefix="When {key} sailed, crates listed came to",
    ),
    NeedleTemplate(
        instruction=INSTRUCTION,
        needle="Visitors near {key} should phone {value} after dusk.",
        question="Whom should visitors near {key} phone after dusk?",
        answer_prefix="Visitors near {key} should phone",
    ),
    NeedleTemplate(
        instruction=INSTRUCTION,
        needle="A parcel labelled {value} left {key} by train.",
        question="How was each parcel labelled which left {key} by train?",
        answer_prefix="Any parcel which left {key} by train was labelled",
    ),
    NeedleTemplate(
        instruction=INSTRUCTION,
        needle="Astronomers catalogued {key} under entry {value}, to nobody's surprise.",
        question="Under which entry did astronomers catalogue {key}?",
        answer_prefix="Astronomers catalogued {key} under entry",
    ),
)
HELD_OUT_MANY = tuple(
    NeedleTemplate(instruction=INSTRUCTION, needle=template.needle, question=question, answer_prefix=prefix)
    for template, (question, prefix) in zip(
        HELD_OUT,
        (
            ("Which crate counts did its ledger list whenever {key} sailed?", "Whenever {key} sailed, crates came to"),
            ("Whom could visitors near {key} phone after dusk?", "Visitors near {key} could phone either"),
            ("How were parcels labelled which left {key} by train?", "Parcels which left {key} by train were labelled"),
            ("Under which entries did astronomers catalogue {key}?", "Astronomers catalogued {key} under entries"),
        ),
        strict=True,
    )
)
"""The same for several numbers, of which a question asks for all."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a suite hides and asks for."""

    name: str
    title: str
    note: str
    row: str
    """Of the table in the docs: what is hidden, how it is scored."""
    templates: tuple[NeedleTemplate, ...] = HELD_OUT
    keys: int = 1
    """Needles in a document, each asked for by itself."""
    values: int = 1
    """Numbers with the same key, of which a question asks for all."""
    metric: str = "number found"
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class KeptDocuments(Record):
    """Documents of one length, which take seconds to minutes to make."""

    FORMAT: ClassVar[str] = "longrope2-needle-documents"

    documents: tuple[NeedleDocument, ...]
    """Without their tokens."""
    tokens: str
    """Of one document after another: 32 bits each, compressed, in base64."""
    notes: tuple[str, ...]
    """What was said while they were made."""

    @classmethod
    def of(cls, documents: Sequence[NeedleDocument], notes: Sequence[str]) -> "KeptDocuments":
        """Those to keep."""
        import numpy as np

        tokens = np.array([token for document in documents for token in document.token_ids], dtype="<i4")
        return cls(
            documents=tuple(replace(document, token_ids=()) for document in documents),
            tokens=b64encode(zlib.compress(tokens.tobytes(), level=1)).decode(),
            notes=tuple(notes),
        )

    def whole(self) -> list[NeedleDocument]:
        """With their tokens."""
        import numpy as np

        tokens = np.frombuffer(zlib.decompress(b64decode(self.tokens)), dtype="<i4")
        ends = list(accumulate((document.needles[-1].answer[1] for document in self.documents), initial=0))
        return [
            replace(document, token_ids=tuple(tokens[start:end].tolist()))
            for document, (start, end) in zip(self.documents, pairwise(ends), strict=True)
        ]


def found_numbers(prediction: str, references: Sequence[str]) -> float:
    """The share of numbers that stand in the answer: RULER's rule, which does not ask for stopping in time."""
    return sum(value in prediction for value in references) / len(references)


def niah_samples(kind: Kind, setup: Setup, length: int) -> list[Sample]:
    """Samples of one length: every depth in turn, `samples` times; those of one document one after the other."""
    documents = _documents(kind, setup, length, (setup.samples or RUNS) * len(DEPTHS))
    questions = [(document, number) for document in documents for number in range(kind.keys)]
    return [_sample(kind, setup, length, index, *question) for index, question in enumerate(questions)]


def _documents(kind: Kind, setup: Setup, length: int, count: int) -> list[NeedleDocument]:
    """From the cache, or made and kept there: rows of a comparison ask the same of every model."""
    from longrope2.data.corpus import tokenizer_fingerprint  # with numpy, which suites are described without

    books = list(_books(setup))
    facts = [KeptDocuments.FORMAT, setup.seed, _around(kind, setup.tokenizer, setup.chat), *map(asdict, kind.templates)]
    facts += [kind.keys, kind.values, tokenizer_fingerprint(setup.tokenizer)]
    facts += [[book.title, bytes_digest(book.text.encode())] for book in books]
    path = setup.cache / f"{kind.name}-{length}x{count}-{digest(facts)}.json"
    try:
        kept = KeptDocuments.load(path, hint="delete the file; it will be made again")
    except FileNotFoundError:
        notes: list[str] = []
        kept = KeptDocuments.of(_make(kind, setup, books, length, count, notes.append), notes)
        kept.save(path)
    for note in kept.notes:
        setup.note(note)
    return kept.whole()


def _books(setup: Setup) -> Iterator[Book]:
    return read_books(setup.books, held_out=True if setup.books is None else None)


def _make(
    kind: Kind, setup: Setup, books: Iterable[Book], length: int, count: int, note: Callable[[str], None]
) -> list[NeedleDocument]:
    around = _around(kind, setup.tokenizer, setup.chat)
    return make_needles(
        setup.tokenizer,
        books,
        length=length - around,
        count=count,
        seed=setup.seed,
        depth=APART if kind.keys > 1 else DEPTHS,
        template=kind.templates,
        keys=kind.keys,
        together=False,
        more_values=kind.values - 1,
        note=note,
        around=around,
    )


def _sample(kind: Kind, setup: Setup, length: int, index: int, document: NeedleDocument, number: int) -> Sample:
    needle = document.needles[number]
    turn = (index - number) // len(DEPTHS)  # the document's, as `make_needles` takes them
    prompt = document.prompt_ids(number)
    answer_tokens = max(end - start for start, end in (each.answer for each in document.needles))
    return Sample(
        suite=kind.name,
        task=kind.name,
        length=length,
        index=index,
        prompt=_chat(setup, prompt, needle.key, kind.templates[turn % len(kind.templates)]) if setup.chat else prompt,
        references=(needle.value, *document.more_values),
        max_new_tokens=answer_tokens + _spare_tokens(kind, setup.tokenizer),
        score=found_numbers,
        stop=("\n",),
        details={"depth": needle.wanted_depth, "placed_at": round(needle.depth, 4), "key": needle.key},
    )


def _chat(setup: Setup, prompt: Sequence[int], key: str, template: NeedleTemplate) -> str:
    """The document as the user's turn; the assistant has begun with the answer prefix."""
    text = setup.tokenizer.decode(prompt, skip_special_tokens=True)
    prefix = template.answer_prefix.replace("{key}", key)
    place = text.rfind(prefix)
    if place < 0:
        raise DataError("the tokenizer does not reproduce the question of a needle document", hint="omit --chat")
    return chat_frame(setup.tokenizer)(text[:place].rstrip()) + prefix


def _spare_tokens(kind: Kind, tokenizer: Any) -> int:
    """Of an answer, beside its first number."""
    return SPARE_TOKENS + (kind.values - 1) * len(encode(tokenizer, " and 1234567,"))


def _around(kind: Kind, tokenizer: Any, chat: bool) -> int:
    """What a sample may have beside its document."""
    spare = _spare_tokens(kind, tokenizer)
    if not chat:
        return spare
    # Decoding and encoding again may also differ by a token here and there.
    return spare + SPARE_TOKENS + len(encode(tokenizer, chat_frame(tokenizer)("")))


def check(kind: Kind, setup: Setup) -> None:
    """Refuse a length that has no room for its sentences and an answer, and one that no book has."""
    around = _around(kind, setup.tokenizer, setup.chat)
    needles.check_length(
        setup.tokenizer,
        setup.lengths[-1] - around,
        around=around,
        templates=kind.templates,
        keys=kind.keys,
        more_values=kind.values - 1,
    )
    _make(kind, setup, _books(setup), setup.lengths[0], 1, setup.note)


def run(kind: Kind, setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """All lengths; the grid has a cell for each length and depth. A document counts once, however much it is asked."""
    measured: list[Measured] = []
    scores_by_length = {}
    for length in setup.lengths:
        samples = engine.here.main_first(partial(niah_samples, kind, setup, length))
        scores = answered(samples, engine, f"{kind.name} {length:,}")
        measured += by_task(samples, scores, {kind.name: kind.metric}, together=kind.keys)
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


def _suite(kind: Kind) -> Suite:
    return Suite(
        name=kind.name,
        title=kind.title,
        tasks=(kind.name,),
        run=partial(run, kind),
        check=partial(check, kind),
        most_samples=MOST_NEEDLES // len(DEPTHS) // kind.keys,
        samples=RUNS,
        cells=len(DEPTHS),
        every_length=True,
        has_grid=True,
        summary=kind.summary,
        note=kind.note,
        row=f"{kind.row} | all | {RUNS if kind.keys == 1 else RUNS * kind.keys} a depth",
    )


PAPER = Kind(
    name="niah",
    title="Needle in a Haystack",
    note="needle in a haystack",
    row="a number in a book at depths 0, 0.1, … 1 | the whole number occurs in the answer (RULER's rule)",
    templates=(PAPER_TEMPLATE,),
    summary="needles",
)
WORDINGS = Kind(
    name="niah_wordings",
    title="Needles in other wordings",
    note="in wordings of no training",
    row="the same in four wordings that neither search nor training has | the same",
)
MULTIKEY = Kind(
    name="niah_multikey",
    title="Needles with four keys",
    note="one of four",
    row="four such sentences with keys of their own, each asked for by itself | the same",
    keys=TOGETHER,
)
MULTIVALUE = Kind(
    name="niah_multivalue",
    title="Needles with four values",
    note="all of four",
    row="four such sentences with one key, all asked for | share of numbers in the answer",
    templates=HELD_OUT_MANY,
    values=TOGETHER,
    metric="numbers found",
)
SUITES = tuple(_suite(kind) for kind in (PAPER, WORDINGS, MULTIKEY, MULTIVALUE))
