"""Every file that we write as a typed record: what it holds, how it is saved, loaded and refused. Needs no torch."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, cast

from longrope2.errors import DataError, all_problems
from longrope2.files import CHECKSUM, checksum, public, read_bounded, write_json

if TYPE_CHECKING:
    from pydantic import ValidationError

SearchPart = Literal["in sample", "held out"]
"""The documents that were searched on, and those that were not."""
IN_SAMPLE: SearchPart = "in sample"
HELD_OUT: SearchPart = "held out"
SEARCHED = "searched"
"""What a search found, among the methods measured."""
RowKind = Literal["short", "long"]
AGAIN = "run the same command again: what is damaged is made again"
Kind = TypeVar("Kind")


class RecordError(DataError):
    """A file is damaged, or is not what it should be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON file with a format and a version. Fields are plain values, dataclasses, and tuples and dicts of them."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    UNMARKED: ClassVar[bool] = False
    """Whether files without a format are read, too: earlier releases wrote them so, with the same keys."""
    FIRST_LINE: ClassVar[bool] = False
    """Whether it is the first of many lines."""

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        content: dict[str, Any] = as_json(self)
        return content

    def save(self, path: Path) -> None:
        """Write the file, atomically, with a checksum and without the folders of this machine."""
        write_json(path, self.sealed())

    def sealed(self) -> dict[str, Any]:
        """The content of the file with its checksum."""
        content = public(self.to_json())
        return {**content, CHECKSUM: checksum(content)}

    @classmethod
    def load(cls, path: Path, *, hint: str = AGAIN) -> Self:
        """Read the file; FileNotFoundError where there is none, RecordError with every problem where it is damaged."""
        try:
            text = read_bounded(path, first_line=cls.FIRST_LINE)
        except FileNotFoundError:
            raise
        except ValueError as error:
            raise RecordError(f"{path}: damaged: {error}", hint=hint) from error
        except OSError as error:
            raise RecordError(f"{path}: cannot be read ({error.strerror})", hint="check its permissions") from error
        content = parse(dict[str, Any], text, f"{path}: damaged", hint=hint)
        found = content.pop("format", None), content.pop("version", None)
        if found != (cls.FORMAT, cls.VERSION) and not (cls.UNMARKED and found[0] is None):
            raise RecordError(
                f"{path}: format {found[0]!r}, version {found[1]!r}; expected {cls.FORMAT!r}, {cls.VERSION}", hint=hint
            )
        # Earlier releases wrote no checksum; damage hardly removes one whole.
        expected = content.pop(CHECKSUM, None)
        marked = {name: mark for name, mark in zip(("format", "version"), found, strict=True) if mark is not None}
        record = parse(cls, content, f"{path}: damaged", hint=hint)
        if expected is not None and checksum(marked | content) != expected:
            raise RecordError(f"{path}: damaged: its content is not what its checksum says", hint=hint)
        return record


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRun:
    """How a stage was run."""

    config: dict[str, Any]
    versions: dict[str, str]
    processes: int
    device: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table as it is shown, or written."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""

    def markdown(self) -> str:
        """As text with pipes."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        # A name may hold what markdown ends a cell or a row at.
        cells = [[" ".join(text.replace("|", "\\|").split("\n")) for text in line] for line in lines]
        table = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        return f"**{self.title}**\n\n{table}\n" + (f"\n{self.caption}\n" if self.caption else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The perplexity of some documents."""

    perplexity: float | None
    """Of all answers together; None where it overflows."""
    low: float | None
    high: float | None
    """Its 95% interval over documents; None where one document cannot say."""
    exact: int
    """Answers in which the model's first choice was right at every token …"""
    answers: int
    """… and how many there were."""
    documents: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchScore(Measurement):
    """A method on the documents searched on, or on others."""

    method: str
    """A closed form, or `searched`."""
    part: SearchPart


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalistScore(Measurement):
    """A finalist on the documents that choose the winner."""

    genome: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowScore(Measurement):
    """The unchanged model inside its own window."""

    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchIteration:
    """The best after an iteration; iteration 0 is the first population of a length."""

    length: int
    iteration: int
    perplexity: float | None
    critical_dimension: int
    evaluations: int
    exhaustive_evaluations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchRecord(Record, StageRun):
    """search.json."""

    FORMAT: ClassVar[str] = "longrope2.search"
    VERSION: ClassVar[int] = 3

    model: str
    revision: str
    weights: str
    """A fingerprint of them."""
    dtype: str
    documents: str
    """A digest of all documents."""
    stages: tuple[int, ...]
    """Lengths, one after another."""
    critical_dimension: int | None
    best: dict[str, Any]
    chance: float | None
    """The perplexity of guessing digits; None without needles."""
    scores: tuple[SearchScore, ...]
    finalists: tuple[FinalistScore, ...]
    own_window: tuple[WindowScore, ...]
    convergence: tuple[SearchIteration, ...]
    document_evaluations: int
    exhaustive_evaluations: int
    """What the same candidates would have cost without racing."""
    resumed_evaluations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marks:
    """The tokens that open and close a document, and the one that fills up a row."""

    bos: int | None
    """Opens every piece of a document, so that a row begins as a prompt does; None: nothing opens it."""
    eos: int | None
    """Closes a document where it really ends, never where it was cut."""
    pad: int
    """Never attended to by a document and never a label."""

    def __post_init__(self) -> None:
        if min(self.bos or 0, self.eos or 0, self.pad) < 0:
            raise ValueError(f"no token is below 0, got {self}")

    def size(self, num_tokens: int, *, ends: bool) -> int:
        """The tokens that a piece of `num_tokens` takes in a row."""
        return (self.bos is not None) + num_tokens + (ends and self.eos is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceShare:
    """What became of a source's documents in a plan."""

    source: str
    corpus_documents: int
    corpus_tokens: int
    placed: int
    placed_tokens: int
    truncated: int
    truncated_tokens: int
    unused: int
    unused_tokens: int
    dropped: dict[str, dict[Literal["documents", "tokens"], int]]
    """By the reason."""
    most_uses: int
    """Of one document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketShare:
    """A bucket's part of a plan."""

    bucket: str
    kind: RowKind
    quota_share: float
    share: float
    rows: int
    rows_wanted: int
    tokens: int
    padding: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellShare:
    """What a source gave to a bucket."""

    source: str
    bucket: str
    kind: RowKind
    documents: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composition:
    """What a plan is made of."""

    rows: int
    target_length: int
    tokens: int
    document_tokens: int
    mark_tokens: int
    """BOS and EOS."""
    padding: int
    padding_share: float
    buckets: tuple[BucketShare, ...]
    sources: tuple[SourceShare, ...]
    cells: tuple[CellShare, ...]
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanHeader(Record):
    """The first line of a plan."""

    FORMAT: ClassVar[str] = "longrope2-plan"
    FIRST_LINE: ClassVar[bool] = True

    rows: int
    config: dict[str, Any]
    sources: tuple[dict[str, Any], ...]
    corpus_keys: tuple[str, ...]
    """The tokenised form of each source, by its key in the cache."""
    tokenizer: str
    """A fingerprint of it."""
    marks: Marks
    versions: dict[str, str]
    report: Composition
    fingerprint: str | None = None
    """Of the rows; earlier releases wrote none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanLine:
    """A further line of a plan: a row. Kind and bucket in words, since people read plans."""

    kind: RowKind
    bucket: str
    padding: int
    spans: tuple[tuple[int, int, int, int], ...]
    """Source, document, first token and the one after the last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusRecord(Record):
    """KEY.json: what was written beside the Arrow file of a tokenised source once that was complete."""

    FORMAT: ClassVar[str] = "longrope2-corpus"

    source: str
    documents: int
    tokens: int
    bytes: int
    crc32: int
    tokenizer: str
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthCount:
    """The documents of a shard, or of a source, in a range of lengths."""

    up_to: int | None
    """Most tokens of such a document, BOS and EOS included; None: those longer than every other range."""
    documents: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of a dataset, and what it was made of."""

    shard: str
    """The name of the files, without the suffix."""
    source: str
    first: str
    last: str
    """The first and the last input file."""
    input_bytes: int
    documents: int
    tokens: int
    bytes: int
    digest: str
    lengths_digest: str
    lengths: tuple[LengthCount, ...]
    left_out: int
    """Documents that sampling or their length has left out."""
    skipped: int
    """Files and lines that could not be read."""
    damaged: tuple[str, ...]
    """The first hundred of them, each with the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRecord(Record, Shard):
    """NUMBER.json: written beside the Arrow file of a shard and its lengths once both are complete."""

    FORMAT: ClassVar[str] = "longrope2-shard"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetRecord(Record):
    """dataset.json: what a dataset is made of; without shards until all of them are complete."""

    FORMAT: ClassVar[str] = "longrope2-dataset"

    tokenizer: str
    """A fingerprint of it."""
    config: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    """Of each source, by name: files, bytes and a digest of their names, sizes and versions."""
    versions: dict[str, str]
    shards: tuple[Shard, ...] = ()

    @property
    def key(self) -> str:
        """By which a plan knows the tokens, wherever they lie."""
        return checksum([self.tokenizer, [[shard.digest, shard.lengths_digest] for shard in self.shards]])[5:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLine:
    """A line of log.jsonl: a step. A kind of row that the step had none of has no loss."""

    step: int
    loss: float
    loss_short: float | None = None
    loss_long: float | None = None
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    memory_gib: float | None = None

    @property
    def losses(self) -> dict[str, float]:
        """Of all rows, and of each kind."""
        found = {"loss": self.loss, "loss_short": self.loss_short, "loss_long": self.loss_long}
        return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleTrial:
    """Needles of one length and depth that were tried while training."""

    length: int
    depth: float
    documents: int
    nll: float | None
    """Per answer token; None where it is not finite."""
    exact: float
    """The share of documents that were answered right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleLine:
    """A line of log.jsonl: needles tried after a step."""

    step: int
    needles: tuple[NeedleTrial, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(Record):
    """run.json: what a training was begun with."""

    FORMAT: ClassVar[str] = "longrope2.training-run"
    UNMARKED: ClassVar[bool] = True

    identity: dict[str, Any]
    """What must be the same for a run to go on."""
    config: dict[str, Any]
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """checkpoint.json, beside the shards."""

    FORMAT: ClassVar[str] = "longrope2.checkpoint"
    UNMARKED: ClassVar[bool] = True

    step: int
    config: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """Their checksums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRecord(Record, StageRun):
    """training.json: what was done with what, and what came of it."""

    FORMAT: ClassVar[str] = "longrope2.training"

    model: dict[str, Any]
    factors: dict[str, Any]
    plan: dict[str, Any]
    steps: int
    tokens: int
    losses: dict[Literal["first", "last"], dict[str, float]]
    """Of the first and the last step, where any was logged."""
    needles: dict[Literal["first", "last"], NeedleLine]
    """The first and the last trial, where needles were tried."""

    def __post_init__(self) -> None:
        for name, ends in (("losses", self.losses), ("needles", self.needles)):
            if len(ends) == 1:
                raise ValueError(f"{name} must have first and last, or nothing, got {', '.join(ends)} alone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """manifest.json: digests of the files of a finished model."""

    FORMAT: ClassVar[str] = "longrope2.manifest"

    files: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredDocument:
    """The answer of one needle document."""

    depth: float
    nll: float
    """Nats per answer token."""
    exact: bool
    """Whether every token of the answer was right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredSide:
    """One RoPE at one length."""

    nll: float
    nll_error: float
    """One standard error over the documents."""
    exact: float
    """The share of exact answers."""
    worst: float
    """The same, at the depth where it is least."""
    by_document: tuple[MeasuredDocument, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLength:
    """Both RoPEs at one length, on the same documents."""

    length: int
    gain: float
    """The answer's NLL under the original RoPE less that under the long one."""
    gain_error: float
    original: MeasuredSide
    long: MeasuredSide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A switch length, the measured lengths that are as good, and the lengths at which each RoPE is good."""

    switch_length: int
    as_good_from: int
    as_good_to: int
    """Every measured length between these is as good, within the error."""
    original_stops: int | None
    """Where the original RoPE stops retrieving."""
    long_better_from: int | None

    def in_words(self) -> str:
        """The recommendation and what it rests on."""
        lines = [
            "the original RoPE retrieves at every measured length"
            if self.original_stops is None
            else f"the original RoPE stops retrieving at {self.original_stops:,} tokens",
            "the long RoPE is not better at the longest measured length"
            if self.long_better_from is None
            else f"the long RoPE is better from {self.long_better_from:,} tokens on",
            f"recommended switch length: {self.switch_length:,}",
        ]
        low, high = self.as_good_from, self.as_good_to
        if low != high:
            lines[-1] += f" (of the measured lengths, those from {low:,} to {high:,} are as good within the error)"
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationRecord(Record, Recommendation):
    """calibration.json: what was measured, and the switch length that follows."""

    FORMAT: ClassVar[str] = "longrope2.calibration"

    method: str
    original_length: int
    target_length: int
    model: str
    revision: str
    dtype: str
    config: dict[str, Any]
    versions: dict[str, str]
    points: tuple[MeasuredLength, ...]
    factors: dict[str, Any]

    @property
    def within_window(self) -> int:
        """The switch length to train with: beyond the trained window the original RoPE was never learned."""
        return min(self.switch_length, self.original_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The samples behind a number, one by one: what two models made of the same questions can be paired."""

    asked: str
    """A hash of the questions."""
    values: tuple[float | None, ...]
    """Scores from 0 to 1, or documents' mean negative log-likelihoods; None where the perplexity overflows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A mean of scores in percent, with its 95% interval."""

    score: float
    samples: int
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Scores by length and depth, for a heatmap."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cells: tuple[tuple[Cell, ...], ...]
    """A row for each depth, a cell for each length."""

    def __post_init__(self) -> None:
        if not self.lengths or [len(row) for row in self.cells] != [len(self.lengths)] * (len(self.depths) or 1):
            raise ValueError("there must be a row of cells for each depth, and in it a cell for each length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of a table."""

    suite: str
    task: str
    length: int | None
    """None where the suite has one length of its own."""
    metric: str
    score: float | None
    """In percent, except a perplexity; None where that overflows."""
    samples: int
    low: float | None
    high: float | None
    """The ends of the 95% interval; None for a single document."""
    each: Values | None = dataclasses.field(default=None, repr=False)
    """None for an average, and in a file, where `values` has them by place."""

    @property
    def place(self) -> str:
        """Where it belongs, in one word."""
        return f"{self.suite}/{self.task}/{self.length}"

    @property
    def percent(self) -> Cell:
        """The same without its place; only a perplexity has none."""
        assert self.score is not None and self.low is not None and self.high is not None  # noqa: PT018
        return Cell(score=self.score, samples=self.samples, low=self.low, high=self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results(Record):
    """A file that `longrope2 compare` reads: results.json, or one with these of its keys."""

    FORMAT: ClassVar[str] = "longrope2.results"
    UNMARKED: ClassVar[bool] = True
    EXTRA: ClassVar[str] = "ignore"

    name: str
    model: str
    factors: dict[str, Any] | None
    """What rescales the model; None for an original one."""
    notes: tuple[str, ...]
    """What a reader of the numbers must know."""
    scores: tuple[Measured, ...]
    grids: dict[str, Grid]
    """By suite."""
    values: dict[str, Values] = dataclasses.field(default_factory=dict)
    """By place."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Results, StageRun):
    """results.json."""

    EXTRA: ClassVar[str] = "forbid"

    revision: str
    weights: str
    """A fingerprint of them."""
    backend: str
    window: int
    dtype: str | None = None
    switch_length: int | None = None
    factors_digest: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A row of a comparison."""

    name: str
    folder: str
    model: str
    factors: dict[str, Any] | None
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonRecord(Record):
    """compare.json."""

    FORMAT: ClassVar[str] = "longrope2.comparison"

    runs: tuple[ComparedRun, ...]
    base: str | None
    """The row that retention refers to."""
    retention: dict[str, float]
    scores: dict[str, tuple[Measured, ...]]
    against: str | None
    """The row that differences refer to."""
    differences: dict[str, tuple[Measured, ...]]
    grids: dict[str, dict[str, Grid]]
    tables: tuple[Table, ...]
    markdown: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaderboardRow(Results):
    """A row of a leaderboard, as recipes/leaderboard writes it: results, and where they belong."""

    table: str | None = None
    """The leaderboard; None: that of its model and target length."""
    seed: int = 0
    """Of its training; rows that differ in nothing else are one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A line of a leaderboard in one measure."""

    score: float
    """The mean over seeds: percent, or a perplexity."""
    seeds: tuple[float, ...]
    best: bool
    tied: bool | None
    """Whether the best is not significantly better; None where both were not asked the same questions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much more a line has than the one compared with, on the same questions."""

    score: float
    """Points, or percent of a perplexity."""
    low: float
    high: float
    p: float
    corrected_p: float
    """By Holm, over all cells of the table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """How alike a measure and RULER order the lines; +1 is the same order, whatever better means for each."""

    rows: int
    spearman: float
    p: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """One table at one length."""

    table: str
    model: str
    length: int
    standings: dict[str, dict[str, Standing]]
    """By line and measure."""
    retention: dict[str, float]
    """Percent of the original's short scores, by line."""
    differences: dict[str, dict[str, PairedDifference]]
    correlations: dict[str, RankCorrelation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaderboardRecord(Record):
    """leaderboard.json."""

    FORMAT: ClassVar[str] = "longrope2.leaderboard"

    against: str | None
    boards: tuple[Leaderboard, ...]
    tables: tuple[Table, ...]
    markdown: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What an engine made of an export, or of anyone's config."""

    engine: str
    mode: str
    max_error: float | None
    verdict: Literal["right", "WRONG", "FAILED", "known limit", "not checked"]
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether this must not be; engines that are not installed and known limits do not count."""
        return self.verdict in ("WRONG", "FAILED")


def findings_table(title: str, findings: Sequence[Finding], error: str = "max error") -> Table:
    """One row for each engine and mode, and the notes below."""
    rows = [[f.engine, f.mode, "-" if f.max_error is None else f"{f.max_error:.1e}", f.verdict] for f in findings]
    notes = [f"{f.engine if f.mode == '-' else f'{f.engine}, {f.mode}'}: {f.note}" for f in findings if f.note]
    return Table(title=title, columns=["engine", "mode", error, "verdict"], rows=rows, caption="\n".join(notes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyRecord(Record):
    """verify.json."""

    FORMAT: ClassVar[str] = "longrope2.verify"

    exports: dict[str, tuple[Finding, ...]]
    """By place."""

    @property
    def wrong(self) -> list[str]:
        """What must not be, a line each."""
        return [
            f"{place} in {finding.engine}, {finding.mode}: {finding.verdict}. {finding.note}".strip()
            for place, findings in self.exports.items()
            for finding in findings
            if finding.is_wrong
        ]

    @property
    def verdict(self) -> str:
        """In a few words."""
        checked = [
            finding for findings in self.exports.values() for finding in findings if finding.max_error is not None
        ]
        engines = ", ".join(dict.fromkeys(finding.engine for finding in checked))
        if self.wrong:
            return f"WRONG: {self.wrong[0]}" + (f" (and {len(self.wrong) - 1} more)" if len(self.wrong) > 1 else "")
        return f"right in {engines}" if engines else "no engine was asked"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step of an extension: from what it was made, and whether it is done."""

    state: Literal["running", "done"]
    fingerprint: str
    """Of its inputs."""
    inputs: dict[str, Any]
    started: datetime
    sessions: int
    seconds: float
    """Of all sessions, but for those that were killed."""
    outputs: dict[str, str] | None = None
    """Digests by file or folder; None until it is done."""

    @property
    def is_done(self) -> bool:
        """Whether its outputs are there."""
        return self.state == "done"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord(Record):
    """pipeline.json, the ledger of an extension."""

    FORMAT: ClassVar[str] = "longrope2.pipeline"

    model: str
    revision: str | None
    original_length: int | None = None
    target_length: int
    recipe: dict[str, Any]
    versions: dict[str, str]
    planned: tuple[str, ...]
    """Names of all steps."""
    expected: dict[str, str] = dataclasses.field(default_factory=dict)
    """The fingerprints of their inputs by the last command's options."""
    steps: dict[str, StepRecord]

    def __post_init__(self) -> None:
        methods = self.recipe.get("methods")
        if not isinstance(methods, list | tuple) or not all(isinstance(name, str) for name in methods):
            raise ValueError(f"recipe.methods must be a list of names, got {methods!r}")

    @property
    def current(self) -> dict[str, StepRecord]:
        """Steps but for those of other options than the last command's, in the stages that it knew of."""
        stages = {name.partition("/")[0] for name in self.expected}
        return {
            name: entry
            for name, entry in self.steps.items()
            if self.expected.get(name) == entry.fingerprint or name.partition("/")[0] not in stages
        }


def parse(kind: type[Kind], content: Any, source: str, *, hint: str = AGAIN) -> Kind:
    """A typed value from JSON text (bytes) or from plain values that JSON holds; RecordError names every problem."""
    from pydantic import ValidationError

    text = content if isinstance(content, bytes) else json.dumps(content)
    try:
        found: Kind = _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        raise RecordError(all_problems(source, _in_words(error)), hint=hint) from error
    return found


def as_json(value: Any) -> Any:
    """A value as a JSON file gives it back; a field that is None by default is left out where it is None."""
    if dataclasses.is_dataclass(value):
        marks = {"format": value.FORMAT, "version": value.VERSION} if isinstance(value, Record) else {}
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return marks | {
            field.name: as_json(item) for field, item in fields if item is not None or field.default is not None
        }
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # JSON has neither NaN nor infinity; 1 is not true, and "1" is not a number.
    config = ConfigDict(strict=True, extra=getattr(kind, "EXTRA", "forbid"), allow_inf_nan=False)
    if dataclasses.is_dataclass(kind):
        setattr(kind, "__pydantic_config__", config)  # noqa: B010
        return TypeAdapter(kind)
    return TypeAdapter(kind, config=config)


def _in_words(error: "ValidationError") -> list[str]:
    """Each problem as place, problem and value."""
    found = []
    for problem in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, problem["loc"]))
        match problem["type"]:
            case "missing":
                found.append(f"{place} is missing")
            case "unexpected_keyword_argument" | "extra_forbidden":
                found.append(f"unknown key {place!r}")
            case "value_error":
                message = str(problem["msg"]).removeprefix("Value error, ")
                found.append(f"{place}: {message}" if place else message)
            case "json_invalid":
                found.append(f"{problem['msg'][0].lower()}{problem['msg'][1:]}")
            case _:
                wanted = problem["msg"].removeprefix("Input should be ")
                found.append(f"{place or 'the whole'} must be {wanted}, got {str(problem['input'])[:40]!r}")
    return found
