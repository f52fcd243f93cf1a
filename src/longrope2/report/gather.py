"""What a run has left on disk so far, as records; what is not there yet is None or empty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from longrope2 import ledger
from longrope2.console import warn
from longrope2.errors import FactorsError, LongRopeError
from longrope2.evaluation.compare import read_results
from longrope2.evaluation.results import RESULTS
from longrope2.factors import RescaleFactors
from longrope2.records import (
    CalibrationRecord,
    EvaluationRecord,
    Grid,
    Measured,
    PlanHeader,
    Record,
    RunRecord,
    SearchRecord,
    StepLine,
    StepRecord,
    TrainingRecord,
    VerifyRecord,
    parse,
)
from longrope2.training.log import read_steps

AGAIN = "delete it and run `longrope2 extend` again as before, which makes it again"
AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """An exported folder or file."""

    place: str
    bytes: int
    factors: RescaleFactors | None
    """Its own."""
    family: str


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything the report and the summary are made of; what other options gave is not part of it."""

    book: RunRecord
    steps: dict[str, StepRecord]
    search: SearchRecord | None
    factors: RescaleFactors | None
    calibration: CalibrationRecord | None
    plan: PlanHeader | None
    log: list[StepLine]
    training: TrainingRecord | None
    evaluations: dict[str, EvaluationRecord]
    """By step, the base first."""
    verified: VerifyRecord | None
    exports: list[ExportedModel]

    @property
    def original_length(self) -> int | None:
        """The trained window."""
        return self.factors.original_length if self.factors else self.book.original_length

    @property
    def scores(self) -> dict[str, list[Measured]]:
        """By method."""
        found: dict[str, list[Measured]] = {}
        for step, result in self.evaluations.items():
            found.setdefault(step.split("/")[1], []).extend(result.scores)
        return found

    @property
    def grids(self) -> dict[str, Grid]:
        """Of needles, by method."""
        found: dict[str, Grid] = {}
        for step, result in self.evaluations.items():
            if "niah" in result.grids:
                method = step.split("/")[1]
                found[method] = _joined(found.get(method), result.grids["niah"])
        return found


def gather(folder: Path) -> RunData:
    """Read a run's folder."""
    book = ledger.require_ledger(folder)
    steps = book.current
    finished = [name for name, entry in steps.items() if entry.is_done]
    searched, trained = "search" in steps, "train" in steps
    training = _record(TrainingRecord, folder / ledger.TRAINING_RECORD) if trained else None
    return RunData(
        book=book,
        steps=steps,
        search=_record(SearchRecord, folder / ledger.SEARCH) if searched else None,
        factors=_factors(folder / ledger.FACTORS) if searched else None,
        calibration=_record(CalibrationRecord, folder / ledger.CALIBRATION) if "calibrate" in steps else None,
        plan=_record(PlanHeader, folder / ledger.PLAN) if "data" in steps else None,
        log=_log(folder / ledger.TRAINING_LOG, training) if trained else [],
        training=training,
        evaluations=_evaluations(folder, book.recipe["methods"], finished),
        verified=_record(VerifyRecord, folder / ledger.VERIFIED) if "verify" in steps else None,
        exports=[_export(folder, place) for place in book.steps["export"].outputs or ()]
        if "export" in finished
        else [],
    )


def _record(kind: type[AnyRecord], path: Path) -> AnyRecord | None:
    try:
        return kind.load(path, hint=AGAIN)
    except FileNotFoundError:
        return None


def _log(path: Path, training: TrainingRecord | None) -> list[StepLine]:
    log = read_steps(path)
    last = training.steps if training else max((line.step for line in log), default=0)
    if (lost := last - len(log)) > 0:
        warn(f"{path} lacks {lost:,} of {last:,} steps: the figures show the others")
    return log


def _factors(path: Path) -> RescaleFactors | None:
    try:
        return RescaleFactors.load(path) if path.exists() else None
    except FactorsError as error:
        raise LongRopeError(error.message, hint=AGAIN) from error


def _evaluations(folder: Path, methods: Sequence[str], finished: Sequence[str]) -> dict[str, EvaluationRecord]:
    order = [ledger.BASE, *methods, ledger.SEARCHED, ledger.AFTER_TRAINING, ledger.EXPORTED]
    steps = [step for method in order for step in finished if step.startswith(f"{ledger.EVALUATE}/{method}/")]
    paths = {step: folder / step / RESULTS for step in steps}
    return {step: read_results(EvaluationRecord, path, hint=AGAIN) for step, path in paths.items() if path.exists()}


def _joined(before: Grid | None, grid: Grid) -> Grid:
    """Needle grids of two tables as one; where both have a length, the later counts."""
    if before is None or before.depths != grid.depths:
        return grid
    by_length = {
        length: column
        for each in (before, grid)
        for length, column in zip(each.lengths, zip(*each.cells, strict=True), strict=True)
    }
    lengths = tuple(sorted(by_length))
    return replace(grid, lengths=lengths, cells=tuple(zip(*(by_length[length] for length in lengths), strict=True)))


def _export(folder: Path, place: str) -> ExportedModel:
    path = folder / place
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    config = path / "config.json"
    text = config.read_bytes() if config.is_file() else b"{}"
    return ExportedModel(
        place=place,
        bytes=sum(file.stat().st_size for file in files if file.exists()),
        factors=_factors(path / "factors.json"),
        family=str(parse(dict[str, Any], text, f"{config}: damaged", hint=AGAIN).get("model_type", "")),
    )
