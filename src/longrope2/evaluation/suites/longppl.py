"""LongPPL (Fang et al., 2024): the perplexity of those tokens of books that only a long context makes predictable.

A judge reads each book twice: with all that stands before a token, and with a short context alone. A token is a key
token if the long context makes it far more likely (LSD > 2 nats) and likely at all (LCL > -2 nats). The model that is
measured is then scored on the key tokens, given everything before them. Which tokens these are depends on the judge
alone, so they are found once and kept with the samples.

As in the authors' code, tokens that stand side by side share the beginning of their short context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from longrope2.console import ProgressLine
from longrope2.errors import DataError, counted
from longrope2.evaluation.engine import SCORED_TOKENS, EvaluationEngine, plan_scores
from longrope2.evaluation.results import digest, perplexity
from longrope2.evaluation.suite import Setup, Suite, SuiteOutcome, TextSpan
from longrope2.evaluation.suites.perplexity import DOCUMENTS, documents, sliding
from longrope2.records import Measured, Record

if TYPE_CHECKING:
    from longrope2.evaluation.backend import TorchBackend
    from longrope2.models import ModelInfo

NAME = "longppl"
LEAST_GAIN = 2.0
"""Nats by which the long context must beat the short one: α of the paper."""
MOST_LOSS = 2.0
"""Nats that a token may cost given the long context: -β of the paper."""
SHORT, STEP = 4096, 1024
"""The least tokens of a short context, and how many tokens share its beginning, at the paper's 32k and beyond."""
SHARE = 8
"""A text of fewer tokens has a short context of one in this many, which is the paper's share at 32k."""
LEAST_LENGTH = 4 * SHARE


@dataclass(frozen=True, kw_only=True)
class KeyTokens(Record):
    """What a judge found in a text."""

    FORMAT: ClassVar[str] = "longrope2-key-tokens"

    places: tuple[int, ...]


def short_context(length: int, window: int) -> tuple[int, int]:
    """The least tokens of a short context, and how many tokens share one, for a judge with this window."""
    short = min(SHORT, min(length, window) // SHARE)
    return short, short * STEP // SHORT


def short_spans(tokens: Sequence[int], short: int, step: int) -> list[TextSpan]:
    """All tokens but the first `short`, each given at least as many, in windows that move by `step`."""
    return [
        TextSpan(token_ids=tokens[begin : begin + short + step], start=short)
        for begin in range(0, len(tokens) - short, step)
    ]


def key_places(judge: "TorchBackend", tokens: Sequence[int]) -> tuple[int, ...]:
    """Where the key tokens of a text stand.

    A text longer than the judge's window is judged through one that slides by half its length: a long context then has
    at least half a window.
    """
    short, step = short_context(len(tokens), judge.window)
    long = _losses(judge, sliding(list(tokens), min(len(tokens), judge.window)))  # from the second token on
    brief = _losses(judge, short_spans(tokens, short, step))
    pairs = enumerate(zip(long[short - 1 :], brief, strict=True), start=short)
    return tuple(place for place, (far, near) in pairs if near - far > LEAST_GAIN and far < MOST_LOSS)


def _losses(judge: "TorchBackend", spans: Sequence[TextSpan]) -> list[float]:
    """Of all tokens that the spans score, in their order."""
    found: list[list[float]] = [[] for _ in spans]
    for batch in plan_scores(spans, SCORED_TOKENS):
        for index, losses in zip(batch, judge.losses([spans[index] for index in batch]), strict=True):
            found[index] = losses
    return list(chain(*found))


class _Judged:
    """Key tokens by text: read from the cache, or found by the judge, which is loaded when it is first needed."""

    def __init__(self, setup: Setup, engine: EvaluationEngine) -> None:
        from longrope2.models import describe, weights_fingerprint

        self._info: ModelInfo = describe(str(setup.judge))
        self._cache, self._here = setup.cache, engine.here
        self._judge: TorchBackend | None = None
        device, reading = engine.here.device(), self._info.reading
        # What it finds at the thresholds depends on rounding, and that on the device.
        self._identity = [weights_fingerprint(self._info), self._info.revision, reading.window, device.type]
        self.window = reading.window

    def keys(self, texts: Sequence[Sequence[int]], label: str) -> list[tuple[int, ...]]:
        """The places of key tokens in each text, the same on every process."""
        paths = [self._path(text) for text in texts]
        known = self._here.gather([_read(path) for path in paths] if self._here.is_main else None)[0]
        missing = [index for index, places in enumerate(known) if places is None]
        line = ProgressLine(len(missing), f"{label}: texts judged") if missing and self._here.is_main else None
        for begin in range(0, len(missing), self._here.size):
            turn = missing[begin : begin + self._here.size]
            mine = self._find(texts[turn[self._here.rank]]) if self._here.rank < len(turn) else ()
            for index, places in zip(turn, self._here.gather(mine), strict=False):
                known[index] = places
                if self._here.is_main:
                    KeyTokens(places=places).save(paths[index])
            if line is not None:
                line.update(begin + len(turn))
        return known

    def _path(self, text: Sequence[int]) -> Path:
        rules = [LEAST_GAIN, MOST_LOSS, *short_context(len(text), self.window)]
        return self._cache / f"{NAME}-{len(text)}-{digest(self._identity, rules, list(text))}.json"

    def _find(self, text: Sequence[int]) -> tuple[int, ...]:
        if self._judge is None:
            from longrope2.evaluation.backend import torch_backend

            self._judge, _ = torch_backend(self._info, window=self.window, device=self._here.device())
        return key_places(self._judge, text)


def _read(path: Path) -> tuple[int, ...] | None:
    try:
        return KeyTokens.load(path, hint="delete the file; it will be made again").places
    except FileNotFoundError:
        return None


def check(setup: Setup) -> None:
    """Refuse lengths without room for two contexts, one that no book has, and a judge with other tokens."""
    from longrope2.models import describe, load_tokenizer

    if setup.lengths[-1] < LEAST_LENGTH:
        raise DataError(
            f"{NAME} needs at least {LEAST_LENGTH} tokens, got {setup.lengths[-1]}", hint="ask for a greater length"
        )
    (ids,) = documents(replace(setup, samples=1))
    info = describe(str(setup.judge))
    info.refuse_weights()
    if load_tokenizer(info).convert_ids_to_tokens(ids) != setup.tokenizer.convert_ids_to_tokens(ids):
        raise DataError(
            f"{info.name} has other tokens than the model that is measured, so it cannot judge them",
            hint="name a --judge of the same tokenizer: the model before it was extended, or a larger one of its kind",
        )


def run(setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """All lengths, on the same books."""
    texts, judged = documents(setup), _Judged(setup, engine)
    measured: list[Measured] = []
    notes: list[str] = []
    for length in setup.lengths:
        label = f"{NAME} {length:,}"
        cut = [text[:length] for text in texts]
        keys = judged.keys(cut, label)
        spans = [
            TextSpan(token_ids=text, start=places[0], only=places)
            for text, places in zip(cut, keys, strict=True)
            if places
        ]
        notes.append(_note(setup, length, judged.window, keys))
        if spans:
            asked = digest([span.digest() for span in spans])
            scores = engine.scores(spans, label)
            measured.append(perplexity(scores, suite=NAME, task=NAME, length=length, asked=asked))
    for note in notes:
        setup.note(note)
    return SuiteOutcome(measured=measured, notes=notes)


def _note(setup: Setup, length: int, window: int, keys: Sequence[Sequence[Any]]) -> str:
    short, _ = short_context(length, window)
    count, without = sum(map(len, keys)), sum(not places for places in keys)
    lost = f"; {counted(without, 'book')} without any" if without else ""
    judge = Path(str(setup.judge)).name
    return (
        f"{NAME} at {length:,}: {counted(count, 'key token')} in {counted(len(keys), 'book')}{lost}; "
        f"judged by {judge}, up to {min(length, window):,} tokens of context against {short:,}"
    )


SUITE = Suite(
    name=NAME,
    title="LongPPL of books",
    tasks=(NAME,),
    run=run,
    check=check,
    samples=DOCUMENTS,
    every_length=True,
    is_perplexity=True,
    scores_texts=True,
    note="perplexity where a long context matters",
    row="key tokens of books, found by `--judge` | perplexity on these alone | all | 10 books",
)
