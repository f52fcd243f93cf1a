"""Every file that we write as a typed record: what it holds, how it is saved, loaded and refused. Needs no torch."""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, cast

from longrope2.errors import LongRopeError, all_problems
from longrope2.files import write_json

if TYPE_CHECKING:
    from pydantic import ValidationError

SearchPart = Literal["in sample", "held out"]
"""The documents that were searched on, and those that were not."""
IN_SAMPLE: SearchPart = "in sample"
HELD_OUT: SearchPart = "held out"
SEARCHED = "searched"
"""What a search found, among the methods measured."""
AGAIN = "run the same command again: what is damaged is made again"
Kind = TypeVar("Kind")


class RecordError(LongRopeError):
    """A file is damaged, or is not what it should be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON file with a format and a version. Fields are plain values, dataclasses, and tuples and dicts of them."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {"format": self.FORMAT, "version": self.VERSION, **as_json(dataclasses.asdict(self))}

    def save(self, path: Path) -> None:
        """Write the file, atomically."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path, *, hint: str = AGAIN) -> Self:
        """Read the file; FileNotFoundError where there is none, RecordError with every problem where it is damaged."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RecordError(f"{path}: cannot be read ({error.strerror})", hint="check its permissions") from error
        content = parse(dict[str, Any], text, f"{path}: damaged", hint=hint)
        found = content.pop("format", None), content.pop("version", None)
        if found != (cls.FORMAT, cls.VERSION):
            raise RecordError(
                f"{path}: format {found[0]!r}, version {found[1]!r}; expected {cls.FORMAT!r}, {cls.VERSION}",
                hint="another release wrote it: use that one, or another folder",
            )
        return parse(cls, content, f"{path}: damaged", hint=hint)


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
class SearchRecord(Record):
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
    config: dict[str, Any]
    versions: dict[str, str]
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
    seconds: float
    resumed_evaluations: int
    processes: int
    device: str


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
class TrainingRecord(Record):
    """training.json: what was done with what, and what came of it."""

    FORMAT: ClassVar[str] = "longrope2.training"

    model: dict[str, Any]
    factors: dict[str, Any]
    plan: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    processes: int
    device: str
    steps: int
    tokens: int
    seconds: float
    losses: dict[Literal["first", "last"], dict[str, float]]
    """Of the first and the last step, where any was logged."""
    needles: dict[Literal["first", "last"], NeedleLine]
    """The first and the last trial, where needles were tried."""

    def __post_init__(self) -> None:
        for name, ends in (("losses", self.losses), ("needles", self.needles)):
            if len(ends) == 1:
                raise ValueError(f"{name} must have first and last, or nothing, got {', '.join(ends)} alone")


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


def parse(kind: type[Kind], content: bytes | Mapping[str, Any], source: str, *, hint: str = AGAIN) -> Kind:
    """A typed value from JSON text or from plain values that JSON holds; RecordError names every problem."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    text = content if isinstance(content, bytes) else to_json(content)
    try:
        found: Kind = _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        raise RecordError(all_problems(source, _in_words(error)), hint=hint) from error
    return found


def as_json(value: Any) -> Any:
    """A value as a JSON file gives it back."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else value


def schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a record, or of any dataclass of plain values."""
    found: dict[str, Any] = _adapter(cast(Any, kind)).json_schema()
    return found


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # JSON has neither NaN nor infinity; 1 is not true, and "1" is not a number.
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
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
                found.append(str(problem["msg"]).removeprefix("Value error, "))
            case "json_invalid":
                found.append(f"{problem['msg'][0].lower()}{problem['msg'][1:]}")
            case _:
                wanted = problem["msg"].removeprefix("Input should be ")
                found.append(f"{place or 'the whole'} must be {wanted}, got {str(problem['input'])[:40]!r}")
    return found
