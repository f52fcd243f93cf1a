"""The plan: row by row, which spans of which documents stand where; one JSON line each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrope2.console import say, warn
from longrope2.data.composition import composition
from longrope2.data.config import Bucket, Mix, PlanConfig, Source, mix_of, read_mix
from longrope2.data.corpus import Corpus, default_cache, document_marks, tokenizer_fingerprint
from longrope2.data.dataset import corpus_of
from longrope2.data.packing import (
    DocumentSpan,
    Draw,
    Packed,
    Pieces,
    PlanRow,
    apportion,
    fill,
    make_pieces,
    pack,
    rows_within,
)
from longrope2.errors import DataError, LongRopeError, counted
from longrope2.files import atomic_path, bounded_lines, bytes_digest, check_writable, checksum, package_versions
from longrope2.models import ModelInfo, describe, load_tokenizer
from longrope2.options import build
from longrope2.records import Composition, Marks, PlanHeader, PlanLine, parse

MAKE = "`longrope2 data plan` makes a plan"
MOST_REPETITIONS = 10_000
"""Of a document in a plan: nobody learns from more, and a plan of them would never end."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole plan; equal to another one if and only if both give the same rows from the same documents."""

    config: PlanConfig
    sources: tuple[Source, ...]
    corpus_keys: tuple[str, ...]
    """The tokenised form of each source, by its key in the cache."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    marks: Marks
    bucket_of_row: NDArray[np.int32]
    padding: NDArray[np.int32]
    """Of each row."""
    first_span: NDArray[np.int64]
    """Row i holds the spans from first_span[i] to before first_span[i + 1]."""
    spans: NDArray[np.int32]
    """One `DocumentSpan` per line, as an array: a plan of 10 billion tokens has millions."""
    report: Composition
    """The composition at the time of planning, with warnings."""

    def __len__(self) -> int:
        return len(self.bucket_of_row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.header().sealed() == other.header().sealed()

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[PlanRow]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> PlanRow:
        """Row number `index`."""
        if not 0 <= index < len(self):
            raise DataError(f"row {index} asked for, the plan has rows 0 to {len(self) - 1}")
        bucket = int(self.bucket_of_row[index])
        spans = self.spans[self.first_span[index] : self.first_span[index + 1]].tolist()
        return PlanRow(
            kind=self.config.kind(bucket),
            bucket=bucket,
            padding=int(self.padding[index]),
            spans=tuple(DocumentSpan(*span) for span in spans),
        )

    def header(self) -> PlanHeader:
        """The first line of the file."""
        return PlanHeader(
            rows=len(self),
            config=self.config.to_json(),
            sources=tuple(asdict(source) for source in self.sources),
            corpus_keys=self.corpus_keys,
            tokenizer=self.tokenizer,
            marks=self.marks,
            versions=package_versions("numpy", "tokenizers", "transformers"),
            report=self.report,
            fingerprint=self.fingerprint,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of its rows and of what they are made from, wherever the files of that lie."""
        made_from = [self.config.to_json(), self.corpus_keys, self.tokenizer, asdict(self.marks)]
        arrays = [self.bucket_of_row, self.padding, self.first_span, self.spans]
        return checksum([made_from, [bytes_digest(np.ascontiguousarray(array)) for array in arrays]])

    def save(self, path: Path) -> None:
        """Write the plan, a line for each row after the header."""
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            file.writelines(self._lines())

    def _lines(self) -> Iterator[bytes]:
        yield json.dumps(self.header().sealed(), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        for row in self:
            label = self.config.buckets[row.bucket].label
            line = PlanLine(kind=row.kind, bucket=label, padding=row.padding, spans=row.spans)
            yield json.dumps(vars(line), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def plan_documents(
    model: str, output: Path, *, config: Path | None = None, cache: Path | None = None, **options: Any
) -> Plan:
    """Plan and write the plan; an option that is None leaves that of the file `config`, or the default."""
    settings = read_mix(config) if config else {}
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if given.keys() & {"tokens", "rows"}:
        # Two ways to say one thing: the option replaces whichever the file chose.
        settings = {name: value for name, value in settings.items() if name not in ("tokens", "rows")}
    settings |= given
    info = describe(model, original_length=settings.get("original_length"))
    return write_plan(info, mix_of(settings, original_length=info.rope.original_length), output, cache)


def write_plan(info: ModelInfo, mix: Mix, output: Path, cache: Path | None = None) -> Plan:
    """Tokenise the sources of a mix, or find them in the cache, and write a plan of their documents."""
    # Before any is tokenised, which takes long.
    mix.check()
    check_writable(output)
    tokenizer = load_tokenizer(info)
    marks = document_marks(tokenizer)
    cache = cache or default_cache()
    corpora = [corpus_of(source, tokenizer, cache) for source in mix.sources]
    plan = make_plan(mix, corpora, marks=marks, tokenizer=tokenizer_fingerprint(tokenizer))
    plan.save(output)
    for warning in plan.report.warnings:
        warn(warning)
    say(f"wrote {output}: {counted(len(plan), 'row')}; tokenised sources in {cache}")
    return plan


def make_plan(
    mix: Mix,
    corpora: Sequence[Corpus],
    *,
    marks: Marks,
    tokenizer: str = "",
) -> Plan:
    """Choose and pack documents; the same configuration, sources and seed give the same plan."""
    mix.check()
    config, sources = mix.plan, mix.sources
    pieces = [
        make_pieces(source, corpus.lengths, marks, config) for source, corpus in zip(sources, corpora, strict=True)
    ]
    _check_any_piece(pieces, config)
    draws, packed, wanted, warnings = _fill(config, sources, pieces, marks)
    spans = [row for bucket in packed for row in bucket.spans]
    if not spans:
        have = sum(sum(draw.available.values()) for draw in draws)
        raise DataError(
            f"not one row of {config.target_length:,} tokens could be filled: the documents have {have:,}",
            hint="add documents, or use --repeat to use them more than once",
        )
    # The last number keeps this stream apart from those that draw documents.
    order = np.random.default_rng([config.seed, len(config.buckets), 0, 0]).permutation(len(spans))
    report = composition(config, sources, corpora, pieces, draws, packed, wanted, marks)
    return build_plan(
        config=config,
        sources=sources,
        corpus_keys=tuple(corpus.key for corpus in corpora),
        tokenizer=tokenizer,
        marks=marks,
        buckets=np.repeat(np.arange(len(packed)), [len(bucket) for bucket in packed])[order],
        padding=np.concatenate([bucket.padding for bucket in packed])[order],
        spans=[spans[index] for index in order],
        report=replace(report, warnings=(*warnings, *report.warnings)),
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
        # A first round without limits counts how many rows each bucket has; the real one repeats its beginning.
        fills = [fill(Draw(number, sources, pieces, config), number, marks, config) for number in numbers]
        have = [sum(1 for _ in rows) for rows in fills]
        serving = [number for number in numbers if have[number]]
        wanted = [0] * len(quotas)
        if serving:
            rows = rows_within([have[n] for n in serving], [quotas[n] for n in serving])
            for number, share in zip(serving, apportion(rows, [quotas[n] for n in serving]), strict=True):
                wanted[number] = share
        warnings = _limits(config, have, wanted, [_cut(bucket, sources, pieces) for bucket in config.buckets])
    draws = [Draw(number, sources, pieces, config) for number in numbers]
    if config.repeat:
        _check_repetition(config, sources, draws, wanted)
    packed = [pack(draws[number], number, wanted[number], marks, config) for number in numbers]
    for number, bucket in enumerate(config.buckets):
        rows, available = len(packed[number]), sum(draws[number].available.values())
        if rows < wanted[number]:
            warnings.append(
                f"bucket {bucket.label}: {rows:,} of {wanted[number]:,} rows; its documents have {available:,} "
                f"tokens, {wanted[number] * config.target_length:,} are needed "
                f"(add documents of that length, or use --repeat{_cut(bucket, sources, pieces)})"
            )
    return draws, packed, wanted, warnings


def _check_repetition(
    config: PlanConfig, sources: Sequence[Source], draws: Sequence[Draw], wanted: Sequence[int]
) -> None:
    """Refuse a plan that would go through the same few documents without end."""
    for draw, rows in zip(draws, wanted, strict=True):
        weights = sum(sources[number].weight for number in draw.available)
        for number, tokens in draw.available.items():
            times = rows * config.target_length * sources[number].weight / weights / tokens
            if times > MOST_REPETITIONS:
                raise DataError(
                    f"source {sources[number].label}: its {tokens:,} tokens would be repeated {times:,.0f} times, "
                    f"at most {MOST_REPETITIONS:,} are allowed",
                    hint="add documents, or ask for fewer or shorter rows",
                )


def _cut(bucket: Bucket, sources: Sequence[Source], pieces: Sequence[Pieces]) -> str:
    """Advice for a bucket with too few documents, where whole texts of a source are longer than it takes."""
    uncut = [entry.size for entry, source in zip(pieces, sources, strict=True) if not source.cut]
    if not any((sizes > bucket.up_to).any() for sizes in uncut):
        return ""
    return f"; cut = [{(bucket.above + bucket.up_to) // 2}] in the table of a source cuts longer texts"


def _limits(config: PlanConfig, have: Sequence[int], wanted: Sequence[int], advice: Sequence[str]) -> list[str]:
    """Which bucket is empty, and which one keeps a plan of one epoch small."""
    labels = [bucket.label for bucket in config.buckets]
    warnings = [
        f"bucket {label}: its documents do not fill one row, so the plan is without it{text}"
        for label, rows, text in zip(labels, have, advice, strict=True)
        if rows == 0
    ]
    spare = {label: h - w for label, h, w in zip(labels, have, wanted, strict=True) if h}
    scarce = min(spare, key=lambda label: spare[label], default=None)
    unused = sum(spare.values())
    if scarce is not None and unused > sum(wanted) / 4:
        warnings.append(
            f"bucket {scarce} has the fewest documents for its quota: {counted(sum(wanted), 'row')} planned, "
            f"{unused:,} more could be filled from the other buckets"
        )
    return warnings


def _check_any_piece(pieces: Sequence[Pieces], config: PlanConfig) -> None:
    if any((entry.bucket >= 0).any() for entry in pieces):
        return
    sizes = np.concatenate([entry.size for entry in pieces])
    ranges = ", ".join(f"{bucket.above + 1:,} to {bucket.up_to:,}" for bucket in config.buckets)
    raise DataError(
        f"no document in any bucket: {counted(len(sizes), 'document')} of {sizes.min():,} to {sizes.max():,} tokens, "
        f"the buckets take {ranges}",
        hint="choose other buckets, or cut the texts of a source (cut = … in its table)",
    )


def read_plan(path: Path) -> Plan:
    """Read a plan back; a file that is not a plan, has another version, or is cut off or damaged is refused."""
    try:
        header = PlanHeader.load(path, hint=MAKE)
        with path.open("rb") as file:
            lines = bounded_lines(file)
            next(lines)
            return _read_rows(path, header, lines)
    except ValueError as error:
        raise DataError(f"{path}: {error}", hint=MAKE) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", hint=MAKE) from error


def _read_rows(path: Path, header: PlanHeader, lines: Iterator[bytes]) -> Plan:
    hint = "copy the plan again, or plan again with the same seed: the plan will be the same"
    try:
        settings = dict(header.config)
        buckets = tuple(Bucket(**bucket) for bucket in settings.pop("buckets"))
        config = PlanConfig(buckets=buckets, **settings)
        sources = tuple(build(Source, "source", source) for source in header.sources)
        if problems := [problem for source in sources for problem in source.problems()]:
            raise ValueError("; ".join(problems))
    except (KeyError, TypeError, ValueError, LongRopeError) as error:
        raise DataError(f"{path}: the header in line 1 is damaged ({error})", hint=hint) from error
    numbers = {bucket.label: number for number, bucket in enumerate(config.buckets)}
    of_row: list[int] = []
    padding: list[int] = []
    spans: list[NDArray[np.int32]] = []
    for number, line in enumerate(lines, start=2):
        damaged = f"{path}: line {number} is damaged"
        row = parse(PlanLine, line, damaged, hint=hint)
        try:
            of_row.append(numbers[row.bucket])
            spans.append(_checked_spans(row, config, len(sources)))
            padding.append(row.padding)
        except (KeyError, ValueError, OverflowError) as error:
            raise DataError(f"{damaged} ({error})", hint=hint) from error
    if len(of_row) != header.rows:
        raise DataError(f"{path}: {len(of_row):,} rows, but the header says {header.rows:,}", hint=hint)
    plan = build_plan(
        config=config,
        sources=sources,
        corpus_keys=header.corpus_keys,
        tokenizer=header.tokenizer,
        marks=header.marks,
        buckets=of_row,
        padding=padding,
        spans=spans,
        report=header.report,
    )
    if header.fingerprint is not None and plan.fingerprint != header.fingerprint:
        raise DataError(f"{path}: damaged, its rows are not those that were written", hint=hint)
    return plan


def _checked_spans(row: PlanLine, config: PlanConfig, num_sources: int) -> NDArray[np.int32]:
    spans = np.array(row.spans, dtype=np.int32)
    if not 0 <= row.padding < config.target_length:
        raise ValueError(f"padding of {row.padding}")
    if not len(spans) or (spans < 0).any() or (spans[:, 0] >= num_sources).any() or (spans[:, 2] >= spans[:, 3]).any():
        raise ValueError("no spans, or one out of range")
    return spans


def build_plan(
    *,
    buckets: Sequence[int] | NDArray[np.int64],
    padding: Sequence[int] | NDArray[np.int32],
    spans: Sequence[NDArray[np.int32]],
    **parts: Any,
) -> Plan:
    """A plan from the bucket, padding and spans of each row."""
    return Plan(
        bucket_of_row=np.array(buckets, dtype=np.int32),
        padding=np.array(padding, dtype=np.int32),
        first_span=np.cumsum([0, *map(len, spans)], dtype=np.int64),
        spans=np.concatenate([np.empty((0, 4), dtype=np.int32), *spans]),
        **parts,
    )
