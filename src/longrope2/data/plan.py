"""The plan: row by row, which spans of which documents stand where; one JSON line each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrope2.data.buckets import Bucket, PlanConfig, RowKind
from longrope2.data.marks import Marks
from longrope2.data.sources import Source
from longrope2.errors import DataError
from longrope2.files import atomic_path, package_versions

FORMAT = "longrope2-plan"
FORMAT_VERSION = 1


class Span(NamedTuple):
    """Tokens `start` to `stop` of a document; BOS comes before them, EOS after them if the document ends."""

    source: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One row of a plan."""

    kind: RowKind
    bucket: int
    """Its number among the plan's buckets."""
    padding: int
    """Tokens at the end that belong to no document."""
    spans: tuple[Span, ...]


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
    """One `Span` per line, as an array: a plan of 10 billion tokens has millions."""
    report: dict[str, Any]
    """The composition at the time of planning, with warnings."""

    def __len__(self) -> int:
        return len(self.bucket_of_row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.header() == other.header() and list(self) == list(other)

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
            spans=tuple(Span(*span) for span in spans),
        )

    def header(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "rows": len(self),
            "config": asdict(self.config),
            "sources": [asdict(source) for source in self.sources],
            "corpus_keys": list(self.corpus_keys),
            "tokenizer": self.tokenizer,
            "marks": asdict(self.marks),
            "versions": package_versions("numpy", "tokenizers", "transformers"),
            "report": self.report,
        }

    def save(self, path: Path) -> None:
        """Write the plan: a header line, then a line for each row."""
        with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self.header(), ensure_ascii=False, allow_nan=False) + "\n")
            for row in self:
                # Kind and bucket in words too: people read plans.
                line = {
                    "kind": row.kind,
                    "bucket": self.config.buckets[row.bucket].label,
                    "padding": row.padding,
                    "spans": row.spans,
                }
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_plan(path: Path) -> Plan:
    """Read a plan back; a file that is no plan, of another version, cut off or damaged is refused."""
    try:
        with path.open("rb") as lines:
            header = _header(path, next(lines, b""))
            return _read_rows(path, header, lines)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror})", hint="`longrope2 data plan` makes a plan"
        ) from error


def _header(path: Path, line: bytes) -> dict[str, Any]:
    hint = "`longrope2 data plan` makes a plan"
    try:
        header = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}: not a plan (line 1 is not JSON)", hint=hint) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{path}: not a plan (line 1 does not say '{FORMAT}')", hint=hint)
    if header.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: a plan of version {header.get('version')}, version {FORMAT_VERSION} expected",
            hint="plan again with this version of longrope2",
        )
    return header


def _read_rows(path: Path, header: dict[str, Any], lines: Iterator[bytes]) -> Plan:
    hint = "copy the plan again, or plan again with the same seed: the plan will be the same"
    try:
        settings = dict(header["config"])
        buckets = tuple(Bucket(**bucket) for bucket in settings.pop("buckets"))
        config = PlanConfig(buckets=buckets, **settings)
        sources = tuple(Source.from_dict(source) for source in header["sources"])
        marks = _checked_marks(header["marks"])
        corpus_keys, tokenizer = tuple(map(str, header["corpus_keys"])), str(header["tokenizer"])
        num_rows, report = int(header["rows"]), dict(header["report"])
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise DataError(f"{path}: the header in line 1 is damaged ({error})", hint=hint) from error
    numbers = {bucket.label: number for number, bucket in enumerate(config.buckets)}
    of_row: list[int] = []
    padding: list[int] = []
    spans: list[NDArray[np.int32]] = []
    for number, line in enumerate(lines, start=2):
        try:
            row = json.loads(line)
            of_row.append(numbers[row["bucket"]])
            padding.append(_checked_padding(row["padding"], config))
            spans.append(_checked_spans(row["spans"], len(sources)))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path}: line {number} is damaged ({error})", hint=hint) from error
    if len(of_row) != num_rows:
        raise DataError(f"{path}: {len(of_row):,} rows, the header speaks of {num_rows:,}", hint=hint)
    return build_plan(
        config=config,
        sources=sources,
        corpus_keys=corpus_keys,
        tokenizer=tokenizer,
        marks=marks,
        buckets=of_row,
        padding=padding,
        spans=spans,
        report=report,
    )


def _checked_marks(values: dict[str, Any]) -> Marks:
    if not all(isinstance(mark, int) and mark >= 0 for mark in values.values() if mark is not None):
        raise ValueError(f"marks of {values}")
    return Marks(**values)


def _checked_padding(value: int, config: PlanConfig) -> int:
    if not 0 <= value < config.target_length:
        raise ValueError(f"padding of {value}")
    return value


def _checked_spans(values: list[list[int]], num_sources: int) -> NDArray[np.int32]:
    spans = np.array(values, dtype=np.int32)
    if spans.ndim != 2 or spans.shape[1] != 4:
        raise ValueError("spans of four numbers expected")
    if (spans < 0).any() or (spans[:, 0] >= num_sources).any() or (spans[:, 2] >= spans[:, 3]).any():
        raise ValueError("a span out of range")
    return spans


def build_plan(
    *, buckets: Sequence[int], padding: Sequence[int], spans: Sequence[NDArray[np.int32]], **parts: Any
) -> Plan:
    """A plan from the bucket, padding and spans of each row."""
    return Plan(
        bucket_of_row=np.array(buckets, dtype=np.int32),
        padding=np.array(padding, dtype=np.int32),
        first_span=np.cumsum([0, *map(len, spans)], dtype=np.int64),
        spans=np.concatenate([np.empty((0, 4), dtype=np.int32), *spans]),
        **parts,
    )
