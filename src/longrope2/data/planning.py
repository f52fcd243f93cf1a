"""From tokenised sources to a plan: quotas, buckets that cannot be filled, and the order of the rows."""

from collections.abc import Sequence

import numpy as np

from longrope2.data.buckets import PlanConfig, apportion, rows_within
from longrope2.data.composition import composition
from longrope2.data.corpus import Corpus
from longrope2.data.drawing import Draw, Pieces, make_pieces
from longrope2.data.marks import Marks
from longrope2.data.packing import Packed, fill, pack
from longrope2.data.plan import Plan, build_plan
from longrope2.data.sources import Source
from longrope2.errors import DataError, all_problems


def make_plan(
    config: PlanConfig,
    sources: Sequence[Source],
    corpora: Sequence[Corpus],
    *,
    marks: Marks,
    tokenizer: str = "",
) -> Plan:
    """Choose and pack documents; the same configuration, sources and seed give the same plan."""
    check_sources(sources, config)
    pieces = [
        make_pieces(source, corpus.lengths, marks, config) for source, corpus in zip(sources, corpora, strict=True)
    ]
    _check_any_piece(pieces, config)
    draws, packed, wanted, warnings = _fill(config, sources, pieces, marks)
    rows = [row for bucket in packed for row in bucket.rows]
    if not rows:
        have = sum(sum(draw.available.values()) for draw in draws)
        raise DataError(
            f"not one row of {config.target_length:,} tokens could be filled: the documents have {have:,}",
            hint="add documents, or say --repeat to use them more than once",
        )
    # The last number keeps this stream apart from those that draw documents.
    order = np.random.default_rng([config.seed, len(config.buckets), 0, 0]).permutation(len(rows))
    report = composition(config, sources, corpora, pieces, draws, packed, wanted, marks)
    report["warnings"] = warnings + report["warnings"]
    return build_plan(
        config=config,
        sources=tuple(sources),
        corpus_keys=tuple(corpus.key for corpus in corpora),
        tokenizer=tokenizer,
        marks=marks,
        buckets=[rows[index].bucket for index in order],
        padding=[rows[index].padding for index in order],
        spans=[np.array(rows[index].spans, dtype=np.int32) for index in order],
        report=report,
    )


def _fill(
    config: PlanConfig, sources: Sequence[Source], pieces: Sequence[Pieces], marks: Marks
) -> tuple[list[Draw], list[Packed], list[int], list[str]]:
    """Pack every bucket: its draw, its rows, how many were wanted, and what to warn of."""
    numbers = range(len(config.buckets))
    quotas = [bucket.quota for bucket in config.buckets]
    warnings = []
    if config.rows is not None:
        wanted = apportion(config.rows, quotas)
    else:
        # A first round without limits tells how many rows each bucket has; the real one repeats its beginning.
        fills = [fill(Draw(number, sources, pieces, config), number, marks, config) for number in numbers]
        have = [sum(1 for _ in rows) for rows in fills]
        serving = [number for number in numbers if have[number]]
        wanted = [0] * len(quotas)
        if serving:
            rows = rows_within([have[n] for n in serving], [quotas[n] for n in serving])
            for number, share in zip(serving, apportion(rows, [quotas[n] for n in serving]), strict=True):
                wanted[number] = share
        warnings = _limits(config, have, wanted)
    draws = [Draw(number, sources, pieces, config) for number in numbers]
    packed = [pack(draws[number], number, wanted[number], marks, config) for number in numbers]
    for number, bucket in enumerate(config.buckets):
        rows, available = len(packed[number].rows), sum(draws[number].available.values())
        if rows < wanted[number]:
            warnings.append(
                f"bucket {bucket.label}: {rows:,} of {wanted[number]:,} rows; its documents have {available:,} "
                f"tokens, {wanted[number] * config.target_length:,} are needed "
                "(add documents of that length, or say --repeat)"
            )
    return draws, packed, wanted, warnings


def _limits(config: PlanConfig, have: Sequence[int], wanted: Sequence[int]) -> list[str]:
    """Which bucket is empty, and which one keeps a plan of one epoch small."""
    labels = [bucket.label for bucket in config.buckets]
    warnings = [
        f"bucket {label}: its documents do not fill one row, so the plan is without it"
        for label, rows in zip(labels, have, strict=True)
        if rows == 0
    ]
    spare = {label: h - w for label, h, w in zip(labels, have, wanted, strict=True) if h}
    scarce = min(spare, key=lambda label: spare[label], default=None)
    unused = sum(spare.values())
    if scarce is not None and unused > sum(wanted) / 4:
        warnings.append(
            f"bucket {scarce} has the fewest documents for its quota: {sum(wanted):,} rows planned, "
            f"{unused:,} more could be filled from the other buckets"
        )
    return warnings


def check_sources(sources: Sequence[Source], config: PlanConfig) -> None:
    """Refuse sources that are wrong in themselves, or that do not belong to the buckets; reads none of them."""
    problems = [problem for source in sources for problem in source.problems()]
    if not sources:
        problems.append("no source given")
    labels = [source.label for source in sources]
    twice = [f"two sources are called {label!r}" for label in sorted(set(labels)) if labels.count(label) > 1]
    problems += twice
    known = [bucket.label for bucket in config.buckets]
    problems += [
        f"source {source.label!r}: no bucket is called {name!r} (they are {', '.join(known)})"
        for source in sources
        for name in source.buckets
        if name not in known
    ]
    if problems:
        hint = (
            "give each source a name of its own (name = …)" if problems == twice else "docs/data.md explains each key"
        )
        raise DataError(all_problems("sources", problems), hint=hint)


def _check_any_piece(pieces: Sequence[Pieces], config: PlanConfig) -> None:
    if any((entry.bucket >= 0).any() for entry in pieces):
        return
    sizes = np.concatenate([entry.size for entry in pieces])
    ranges = ", ".join(f"{bucket.above + 1:,} to {bucket.up_to:,}" for bucket in config.buckets)
    raise DataError(
        f"no document in any bucket: {len(sizes):,} documents of {sizes.min():,} to {sizes.max():,} tokens, "
        f"the buckets take {ranges}",
        hint="choose other buckets, or cut the texts of a source (cut = … in its table)",
    )
