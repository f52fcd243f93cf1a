"""The ledger of an extension: which steps are done, from what, and where in the run's folder their results lie."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from longrope2.errors import LongRopeError
from longrope2.files import atomic_path, file_digest, fingerprint
from longrope2.records import RecordError, RunRecord, StepRecord
from longrope2.runfolder import RunFolder

LEDGER = "pipeline.json"
STAGES = ("search", "calibrate", "data", "train", "evaluate", "export", "verify", "report")
TRAINING = ("data", "train")
"""The stages that need texts to train on."""
FACTORS = "search/factors.json"
SEARCH = "search/search.json"
HISTORY = "search/history.jsonl"
CALIBRATION = "calibrate/calibration.json"
CALIBRATED = "calibrate/factors.json"
"""Those of the search, with the switch that was measured."""
PLAN = "data/plan.jsonl"
RECALL_DOCUMENTS = "data/recall.jsonl"
TRAIN = "train"
TRAINED = "train/model"
TRAINING_LOG = "train/log.jsonl"
TRAINING_RECORD = "train/model/training.json"
EVALUATE = "evaluate"
EXPORT = "export"
VERIFIED = "verify/verify.json"
PAGE = "report/index.html"
BASE, SEARCHED, AFTER_TRAINING, EXPORTED = "base", "longrope2-factors-only", "longrope2", "longrope2-exported"
"""What evaluations are called besides the closed forms; the last one only where the export has another RoPE."""
RUNNING: Literal["running"] = "running"
DONE: Literal["done"] = "done"
AGAIN = "run `longrope2 extend` again as before: it makes the file again, and steps find what they have done"
run_folder = partial(RunFolder, command="extend", verb="at work", marks=(LEDGER,), lock=".lock")
DAMAGED = "pipeline.json.damaged"
"""Where a ledger goes that cannot be read."""


class Ledger:
    """pipeline.json: written before a step starts and after it ends, so that a kill leaves no doubt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._record = read_ledger(folder)
        except RecordError:
            self._record = None  # steps know what they have done themselves

    @property
    def steps(self) -> Mapping[str, StepRecord]:
        """Entry by step."""
        return {} if self._record is None else self._record.steps

    def describe(self, **facts: Any) -> None:
        """Keep what holds for the whole run: model, recipe, versions."""
        if self._record is None:
            self._record = RunRecord(**facts, steps={})
        else:
            self._record = replace(self._record, **facts)
        self._record.save(self.folder / LEDGER)

    def start(self, step: str, inputs: Mapping[str, Any]) -> None:
        """A step begins, or resumes with the same inputs."""
        before = self.steps.get(step)
        resumed = before is not None and before.fingerprint == fingerprint(inputs) and not before.is_done
        self._write(
            step,
            StepRecord(
                state=RUNNING,
                fingerprint=fingerprint(inputs),
                inputs=dict(inputs),
                started=datetime.now(UTC).replace(microsecond=0),
                sessions=before.sessions + 1 if before and resumed else 1,
                seconds=before.seconds if before and resumed else 0.0,
            ),
        )

    def pause(self, step: str, seconds: float) -> None:
        """A step was interrupted in a way that left time to say so."""
        entry = self._begun(step)
        self._write(step, replace(entry, seconds=entry.seconds + seconds))

    def finish(self, step: str, outputs: Mapping[str, str], seconds: float) -> float:
        """A step has ended well; returns the seconds of all its sessions, but for those that were killed."""
        entry = self._begun(step)
        done = replace(entry, state=DONE, seconds=entry.seconds + seconds, outputs=dict(outputs))
        self._write(step, done)
        return done.seconds

    def is_done(self, step: str, wanted: str) -> bool:
        """Whether a step has ended with these inputs."""
        entry = self.steps.get(step)
        return entry is not None and entry.is_done and entry.fingerprint == wanted

    def damaged(self, step: str) -> list[str]:
        """The outputs of a finished step that are missing or not as they were."""
        outputs = self.steps[step].outputs or {}
        return [name for name, digest in outputs.items() if output_digest(self.folder / name) != digest]

    def _begun(self, step: str) -> StepRecord:
        """The entry of a step that is running."""
        if step not in self.steps:
            raise LongRopeError(
                f"{self.folder / LEDGER}: removed, or damaged, while {step} was at work",
                hint="run the same command again: steps find what is left of what they have done",
            )
        return self.steps[step]

    def _write(self, step: str, entry: StepRecord) -> None:
        assert self._record is not None, "a run is described before its steps begin"
        self._record = replace(self._record, steps={**self._record.steps, step: entry})
        self._record.save(self.folder / LEDGER)


def read_ledger(folder: Path) -> RunRecord | None:
    """A run's ledger; None where there is none, RecordError where it is damaged."""
    if folder.is_file():
        raise LongRopeError(f"{folder}: a file, a folder is needed", hint="give the folder of a run")
    try:
        return RunRecord.load(folder / LEDGER, hint=AGAIN)
    except FileNotFoundError:
        return None


def require_ledger(folder: Path) -> RunRecord:
    """A run's ledger, which must be there."""
    found = read_ledger(folder)
    if found is None:
        raise LongRopeError(f"{folder}: no run of `longrope2 extend` there", hint="give the folder named with -o")
    return found


def keep_damaged(folder: Path) -> Path | None:
    """Copy a ledger that is about to be made again, since its content is lost; None where it is not."""
    try:
        read_ledger(folder)
    except RecordError:
        with atomic_path(folder / DAMAGED) as copy:
            shutil.copyfile(folder / LEDGER, copy)
        return folder / DAMAGED
    return None


def output_digest(path: Path) -> str | None:
    """What identifies the content of a file or folder; None if there is nothing."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return fingerprint([[file.relative_to(path).as_posix(), file_digest(file)] for file in inside])
    return file_digest(path) if path.is_file() else None


def age(entry: StepRecord) -> float:
    """Seconds since a step was started."""
    return time.time() - entry.started.timestamp()
