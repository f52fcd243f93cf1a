"""What a plan is made of: tokens per source, bucket and kind of row, and what was left out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from longrope2.data.config import PlanConfig, Source
from longrope2.data.corpus import Corpus
from longrope2.data.packing import Draw, Packed, Pieces
from longrope2.errors import counted
from longrope2.records import BucketShare, CellShare, Composition, Marks, SourceShare, Table

Placed = NDArray[np.int64]
"""Pieces that stand in rows: a source's part of `Packed.pieces`."""
SOURCE, DOCUMENT, START, STOP, SIZE, TOKENS = range(6)
PADDING_WARNING = 0.01
SHARE_TOLERANCE = 0.9
"""A source that gets less than this part of its share, for want of documents, is warned of."""


def composition(
    config: PlanConfig,
    sources: Sequence[Source],
    corpora: Sequence[Corpus],
    pieces: Sequence[Pieces],
    draws: Sequence[Draw],
    packed: Sequence[Packed],
    wanted: Sequence[int],
    marks: Marks,
) -> Composition:
    """The numbers behind a plan.

    Tokens of the rows are those of documents, their BOS and EOS, and padding. Without repetition the tokens of a
    source are placed, truncated, unused or dropped, each exactly once.
    """
    rows = sum(map(len, packed))
    total = rows * config.target_length
    # For each bucket and then each source.
    placed = [[each.pieces[each.pieces[:, SOURCE] == number] for number in range(len(sources))] for each in packed]
    cells = [
        CellShare(
            source=source.label,
            bucket=bucket.label,
            kind=config.kind(index),
            documents=len(placed[index][number]),
            tokens=int(placed[index][number][:, TOKENS].sum()),
        )
        for number, source in enumerate(sources)
        for index, bucket in enumerate(config.buckets)
    ]
    buckets = [_bucket(config, number, packed[number], wanted[number], total) for number in range(len(packed))]
    entries = [
        _source(source, corpora[number], pieces[number], np.concatenate([bucket[number] for bucket in placed]))
        for number, source in enumerate(sources)
    ]
    padding = sum(bucket.padding for bucket in buckets)
    report = Composition(
        rows=rows,
        target_length=config.target_length,
        tokens=total,
        document_tokens=sum(cell.tokens for cell in cells),
        mark_tokens=_mark_tokens(corpora, packed, marks),
        padding=padding,
        padding_share=padding / total if total else 0.0,
        buckets=tuple(buckets),
        sources=tuple(entries),
        cells=tuple(cells),
    )
    rest = [
        {number: draw.available[number] - int(lists[number][:, SIZE].sum()) for number in draw.available}
        for draw, lists in zip(draws, placed, strict=True)
    ]
    return replace(report, warnings=tuple(_warnings(sources, rest, report)))


def composition_tables(report: Composition) -> tuple[Table, Table]:
    """A composition by source, and by bucket."""
    labels = [bucket.bucket for bucket in report.buckets]
    by_cell = {(cell.source, cell.bucket): cell for cell in report.cells}
    by_source = Table(
        title=f"{counted(report.rows, 'row')} of {report.target_length:,} tokens: {report.tokens:,} tokens, "
        f"{report.padding_share:.2%} padding, {report.mark_tokens:,} BOS and EOS",
        columns=["tokens from", *labels, "all", "documents", "truncated", "dropped", "unused"],
        rows=[
            [
                entry.source,
                *(f"{by_cell[entry.source, label].tokens:,}" for label in labels),
                f"{entry.placed_tokens:,}",
                f"{entry.placed:,}",
                f"{entry.truncated_tokens:,}",
                f"{sum(drop['tokens'] for drop in entry.dropped.values()):,}",
                f"{entry.unused_tokens:,}",
            ]
            for entry in report.sources
        ],
        caption="documents are counted as placed, everything else in tokens\n",
    )
    by_bucket = Table(
        title="buckets by document length in tokens",
        columns=["bucket", "rows as", "quota", "share", "rows", "wanted", "tokens", "padding"],
        rows=[
            [
                bucket.bucket,
                bucket.kind,
                f"{bucket.quota_share:.1%}",
                f"{bucket.share:.1%}",
                f"{bucket.rows:,}",
                f"{bucket.rows_wanted:,}",
                f"{bucket.tokens:,}",
                f"{bucket.padding:,}",
            ]
            for bucket in report.buckets
        ],
    )
    return by_source, by_bucket


def _bucket(config: PlanConfig, number: int, packed: Packed, wanted: int, total: int) -> BucketShare:
    bucket = config.buckets[number]
    tokens = len(packed) * config.target_length
    return BucketShare(
        bucket=bucket.label,
        kind=config.kind(number),
        quota_share=bucket.quota / sum(other.quota for other in config.buckets),
        share=tokens / total if total else 0.0,
        rows=len(packed),
        rows_wanted=wanted,
        tokens=tokens,
        padding=int(packed.padding.sum()),
    )


def _source(source: Source, corpus: Corpus, pieces: Pieces, placed: Placed) -> SourceShare:
    lost = placed[:, STOP] - placed[:, START] - placed[:, TOKENS]
    distinct, uses = np.unique(placed[:, [DOCUMENT, START, STOP]], axis=0, return_counts=True)
    kept = pieces.bucket >= 0
    return SourceShare(
        source=source.label,
        corpus_documents=corpus.num_documents,
        corpus_tokens=corpus.num_tokens,
        placed=len(placed),
        placed_tokens=int(placed[:, TOKENS].sum()),
        truncated=int((lost > 0).sum()),
        truncated_tokens=int(lost.sum()),
        unused=int(kept.sum()) - len(distinct),
        unused_tokens=int((pieces.stop - pieces.start)[kept].sum()) - int((distinct[:, 2] - distinct[:, 1]).sum()),
        dropped={reason: {"documents": count, "tokens": tokens} for reason, (count, tokens) in pieces.dropped.items()},
        most_uses=int(uses.max(initial=0)),
    )


def _mark_tokens(corpora: Sequence[Corpus], packed: Sequence[Packed], marks: Marks) -> int:
    total = 0
    for spans in (row for bucket in packed for row in bucket.spans):
        for number in np.unique(spans[:, 0]):
            own = spans[spans[:, 0] == number]
            ends = int((own[:, 3] == corpora[number].lengths[own[:, 1]]).sum())
            total += marks.size(0, ends=True) * ends + marks.size(0, ends=False) * (len(own) - ends)
    return total


def _warnings(sources: Sequence[Source], rest: Sequence[dict[int, int]], report: Composition) -> list[str]:
    """What to warn of; `rest` has the tokens of each source that a bucket did not use."""
    cells = {(cell.source, cell.bucket): cell.tokens for cell in report.cells}
    found = []
    for unused, bucket in zip(rest, report.buckets, strict=True):
        label = bucket.bucket
        able = [number for number, source in enumerate(sources) if not source.buckets or label in source.buckets]
        weights = sum(sources[number].weight for number in able)
        placed = sum(cells[source.label, label] for source in sources)
        for number in able if placed else ():
            source = sources[number]
            share, due = cells[source.label, label] / placed, source.weight / weights
            if number not in unused:
                found.append(f"source {source.label} has no document in bucket {label}; the others take its {due:.0%}")
            elif unused[number] < report.target_length and share < SHARE_TOLERANCE * due:
                found.append(
                    f"source {source.label} ran out of documents in bucket {label}: {share:.0%} of its tokens, "
                    f"{due:.0%} by weight"
                )
    for entry in report.sources:
        if entry.most_uses > 1:
            found.append(f"source {entry.source}: documents repeat, some up to {entry.most_uses} times")
    if report.padding_share > PADDING_WARNING:
        found.append(f"{report.padding_share:.1%} of the tokens are padding: there are too few documents to fit")
    return found
