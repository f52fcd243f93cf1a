"""Needles while a model trains: whether it finds them at the target length, and still in its own window."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from longrope2.attention import exchanging
from longrope2.books import read_books
from longrope2.distributed import World
from longrope2.errors import DataError
from longrope2.factors import RescaleFactors
from longrope2.models import decoder_layers
from longrope2.needles import NeedleDocument, make_needles
from longrope2.perplexity import Score, scoring
from longrope2.records import NeedleLine, NeedleTrial
from longrope2.training.mixed import MixedWindowModel

DEPTHS = (0.0, 0.5, 1.0)


class Retrieval:
    """Scores needle documents every N steps, and leaves the training state as it was."""

    def __init__(
        self,
        factors: RescaleFactors,
        documents: Sequence[NeedleDocument],
        here: World,
        *,
        every: int,
        note: Callable[[NeedleLine], None],
    ) -> None:
        self._factors = factors
        self._documents = documents
        self._here = here
        self._every = every
        self._note = note

    def __call__(self, mixed: MixedWindowModel, step: int) -> None:
        """To be called on all processes at once: each scores some of the documents, whole."""
        if step % self._every:
            return
        # Documents are not shared between processes here, even where rows are.
        with _resting(mixed), exchanging(None):
            own = _as_forward(mixed, partial(self._own_scores, mixed.model))
        parts = self._here.gather_all(own)
        scores = [parts[k % len(parts)][k // len(parts)] for k in range(len(self._documents))]
        self._note(NeedleLine(step=step, needles=tuple(trials(self._documents, scores))))

    def _own_scores(self, model: Any) -> list[Score]:
        count, processes = len(self._documents), self._here.num_processes
        scores = []
        with scoring(model, self._factors) as scorer:
            # Every forward pass gathers weights from all processes, so all must take equally many turns; one that
            # has no document left scores the last one again, and the result is not used.
            for turn in range(-(-count // processes)):
                document = self._documents[min(turn * processes + self._here.process, count - 1)]
                scores += scorer(self._factors, [document])
        return scores


@contextmanager
def _resting(mixed: MixedWindowModel) -> Iterator[None]:
    """No training, and no compiled layers: scoring changes how they run."""
    layers = decoder_layers(mixed.model)
    compiled = [layer._compiled_call_impl for layer in layers]
    mixed.eval()
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer._compiled_call_impl = call
        mixed.train()


def _as_forward(mixed: Any, work: Callable[[], list[Score]]) -> list[Score]:
    """Run `work` as if it were a forward pass of the sharded model.

    FSDP gathers weights only around methods it knows as forward passes, so the work becomes such a method for once.
    """
    mixed.score_needles = lambda _: work()
    try:
        register_fsdp_forward_method(mixed, "score_needles")
        # FSDP moves arguments to its GPU, and fails where there are none.
        scores: list[Score] = mixed.score_needles(None)
    finally:
        del mixed.score_needles
        if isinstance(mixed, FSDPModule):
            mixed.reshard()
    return scores


def needle_documents(
    tokenizer: Any,
    factors: RescaleFactors,
    *,
    count: int,
    books: str | None,
    seed: int,
    note: Callable[[str], None],
) -> list[NeedleDocument]:
    """`count` documents of the target length and as many of the original window, at several depths."""
    documents = []
    for length in (factors.target_length, factors.original_length):
        shelf = read_books(books, held_out=True)
        try:
            documents += make_needles(tokenizer, shelf, length=length, count=count, seed=seed, depth=DEPTHS, note=note)
        except DataError as error:
            if length == factors.target_length:
                raise
            note(f"no needle tests in the original window: {error.message}")
    return documents


def trials(documents: Sequence[NeedleDocument], scores: Sequence[Score]) -> Iterator[NeedleTrial]:
    """For each length and depth: nats for an answer's token, and the share of answers right in every token."""
    groups: dict[tuple[int, float], list[Score]] = {}
    for document, score in zip(documents, scores, strict=True):
        depth = min(DEPTHS, key=lambda wanted: abs(wanted - document.needle.depth))
        groups.setdefault((len(document.token_ids), depth), []).append(score)
    for (length, depth), group in groups.items():
        mean = sum(score.nll for score in group) / sum(score.num_tokens for score in group)
        nll, exact = mean if math.isfinite(mean) else None, sum(score.exact for score in group) / len(group)
        yield NeedleTrial(length=length, depth=depth, documents=len(group), nll=nll, exact=exact)
