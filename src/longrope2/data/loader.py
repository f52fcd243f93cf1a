"""Rows of token ids from a plan, and which row comes when."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longrope2.data.corpus import Corpus
from longrope2.data.dataset import reopen
from longrope2.data.plan import Plan
from longrope2.errors import DataError
from longrope2.records import RowKind

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, ready for the model; every array is of exactly the target length unless it says otherwise."""

    index: int
    kind: RowKind
    bucket: str
    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    """From 0 at each document in a short row; over the whole row in a long one."""
    document_starts: NDArray[np.int32]
    """Where each piece of a document begins, then where the last one ends; padding comes after that."""
    cu_seqlens: NDArray[np.int32]
    """Borders that attention must not cross: of documents and padding if short, the row's two ends if long."""
    label_mask: NDArray[np.bool_]
    """True where the next token is of the same document, so that predicting it is to be learned."""

    def labels(self, ignored: int = IGNORED_LABEL) -> NDArray[np.int64]:
        """The token to predict at each place, already shifted; `ignored` where there is none."""
        return np.where(self.label_mask, np.roll(self.token_ids, -1), ignored)


class RowLoader:
    """Builds the rows of a plan; cheap to make, and safe to make in every process."""

    def __init__(self, plan: Plan, corpora: Sequence[Corpus]) -> None:
        self.plan = plan
        self._corpora = tuple(corpora)
        found = tuple(corpus.key for corpus in corpora)
        if found != plan.corpus_keys:
            raise DataError(
                f"the tokenised sources are not those of the plan: {list(found)}, {list(plan.corpus_keys)} expected",
                hint="open the loader from the plan and its cache folder",
            )

    @classmethod
    def open(cls, plan: Plan, cache: Path | None = None) -> "RowLoader":
        """A loader that finds the tokenised sources of a plan in the cache."""
        return cls(plan, [reopen(key, cache) for key in plan.corpus_keys])

    def __len__(self) -> int:
        return len(self.plan)

    def check(self) -> None:
        """Refuse a plan with a row that cannot be built from the tokenised sources."""
        marks, spans = self.plan.marks, self.plan.spans.astype(np.int64)
        lengths = np.zeros(len(spans), dtype=np.int64)  # of the document of each span; 0: there is none
        for number, corpus in enumerate(self._corpora):
            known = np.flatnonzero((spans[:, 0] == number) & (spans[:, 1] < corpus.num_documents))
            lengths[known] = corpus.lengths[spans[known, 1]]
        start, stop = spans[:, 2], spans[:, 3]
        sizes = stop - start + (marks.bos is not None) + (stop == lengths) * (marks.eos is not None)
        row_of_span = np.repeat(np.arange(len(self)), np.diff(self.plan.first_span))
        totals = np.bincount(row_of_span, weights=sizes, minlength=len(self)) + self.plan.padding
        wrong = [*row_of_span[stop > lengths], *np.flatnonzero(totals != self.plan.config.target_length)]
        if wrong:
            self.row(int(min(wrong)))  # says what is wrong with it

    def prepare(self, indices: Sequence[int]) -> None:
        """Bring the documents of some rows here, in the background; what fails is reported when a row is asked for."""
        if all(corpus.is_local for corpus in self._corpora):
            return
        spans = [span for index in indices for span in self.plan.row(index).spans]

        def fetch() -> None:
            with suppress(Exception):
                for span in spans:
                    self._corpora[span.source].fetch(span.document)

        self._background.submit(fetch)

    @cached_property
    def _background(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "rows")

    def row(self, index: int) -> Row:
        """Row number `index` of the plan."""
        planned = self.plan.row(index)
        length, marks = self.plan.config.target_length, self.plan.marks
        token_ids = np.full(length, marks.pad, dtype=np.int64)
        starts = [0]
        at = 0
        for span in planned.spans:
            corpus = self._corpora[span.source]
            if span.document >= corpus.num_documents or span.stop > corpus.lengths[span.document]:
                raise DataError(f"row {index} refers to {span}, which is not in the corpus", hint="plan again")
            tokens = corpus.tokens(span.document)
            ends = span.stop == len(tokens)
            end = at + marks.size(span.stop - span.start, ends=ends)
            if end > length:
                raise DataError(f"row {index} is longer than {length:,} tokens", hint="plan again")
            if marks.bos is not None:
                token_ids[at] = marks.bos
                at += 1
            token_ids[at : at + span.stop - span.start] = tokens[span.start : span.stop]
            if ends and marks.eos is not None:
                token_ids[end - 1] = marks.eos
            at = end
            starts.append(end)
        if at + planned.padding != length:
            raise DataError(f"row {index} has {at + planned.padding:,} tokens, not {length:,}", hint="plan again")
        label_mask = np.arange(length) < at
        label_mask[np.array(starts[1:], dtype=np.int64) - 1] = False
        is_short = planned.kind == "short"
        borders = sorted({*starts, length}) if is_short else [0, length]
        return Row(
            index=index,
            kind=planned.kind,
            bucket=self.plan.config.buckets[planned.bucket].label,
            token_ids=token_ids,
            position_ids=_positions(borders),
            document_starts=np.array(starts, dtype=np.int32),
            cu_seqlens=np.array(borders, dtype=np.int32),
            label_mask=label_mask,
        )


def order_of_rows(buckets: NDArray[np.int32], *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch takes the rows of a plan, given the bucket of each.

    Random within a bucket, and each bucket spread evenly: small steps, too, then hold short and long rows as the plan
    mixes them.
    """
    rng = np.random.default_rng([seed, epoch])
    shuffled = rng.permutation(len(buckets))
    places = np.empty(len(buckets))
    for bucket in np.unique(buckets):
        rows = shuffled[buckets[shuffled] == bucket]
        places[rows] = (np.arange(len(rows)) + rng.uniform()) / len(rows)
    return np.argsort(places, kind="stable")


def _positions(borders: Sequence[int]) -> NDArray[np.int64]:
    """Counting from 0 at each border."""
    starts = np.array(borders[:-1], dtype=np.int64)
    return np.arange(borders[-1]) - np.repeat(starts, np.diff(borders))
