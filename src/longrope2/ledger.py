"""The ledger of an extension: which steps are done, from what, and where in the run's folder their results lie."""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longrope2 import files
from longrope2.errors import LongRopeError
from longrope2.shapes import misfit

LEDGER = "pipeline.json"
FORMAT, VERSION = "longrope2.pipeline", 1
STAGES = ("search", "data", "train", "evaluate", "export", "verify", "report")
TRAINING = ("data", "train")
"""The stages that need texts to train on."""
FACTORS = "search/factors.json"
SEARCH = "search/search.json"
HISTORY = "search/history.jsonl"
PLAN = "data/plan.jsonl"
TRAIN = "train"
TRAINED = "train/model"
TRAINING_LOG = "train/log.jsonl"
TRAINING_RECORD = "train/model/training.json"
EVALUATE = "evaluate"
EXPORT = "export"
VERIFIED = "verify/verify.json"
PAGE = "report/index.html"
BASE, SEARCHED, AFTER_TRAINING = "base", "longrope2-factors-only", "longrope2"
"""What evaluations are called besides the closed forms."""
RUNNING, DONE = "running", "done"
WHOLE_HASH = 64 << 20
"""Bytes up to which a file is hashed whole; of larger ones samples must do."""
SAMPLES, SAMPLE_BYTES = 64, 1 << 14
LOCK = ".lock"
DAMAGED = "pipeline.json.damaged"
"""Where a ledger goes that cannot be read."""
SHAPE = {
    "model": str,
    "revision": str | None,
    "target_length": int,
    "recipe": {"methods": [str]},
    "versions": dict,
    "planned": [str],
    "steps": {
        ...: {"state": str, "fingerprint": str, "inputs": dict, "started": str, "sessions": int, "seconds": float}
    },
}
"""What a ledger holds once a run has begun."""
LATER = {"original_length": int, "expected": {...: str}}
"""What ledgers of earlier versions do not have."""


class DamagedLedgerError(LongRopeError):
    """There is a ledger, and its content is lost."""


class Ledger:
    """pipeline.json: written before a step starts and after it ends, so that a kill leaves no doubt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            found = read_ledger(folder)
        except DamagedLedgerError:
            found = None  # steps know what they have done themselves
        self.content = found or {"format": FORMAT, "version": VERSION, "steps": {}}

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """Entry by step."""
        entries: dict[str, dict[str, Any]] = self.content["steps"]
        return entries

    def describe(self, **facts: Any) -> None:
        """Keep what holds for the whole run: model, recipe, versions."""
        self.content |= facts
        self._write()

    def start(self, step: str, inputs: Mapping[str, Any]) -> None:
        """A step begins, or goes on from the same inputs."""
        before = self.steps.get(step, {})
        resumed = before.get("fingerprint") == fingerprint(inputs) and before["state"] == RUNNING
        self.steps[step] = {
            "state": RUNNING,
            "fingerprint": fingerprint(inputs),
            "inputs": dict(inputs),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "sessions": before["sessions"] + 1 if resumed else 1,
            "seconds": before["seconds"] if resumed else 0.0,
        }
        self._write()

    def pause(self, step: str, seconds: float) -> None:
        """A step was interrupted in a way that left time to say so."""
        self._begun(step)["seconds"] += seconds
        self._write()

    def finish(self, step: str, outputs: Mapping[str, str], seconds: float) -> float:
        """A step has ended well; returns the seconds of all its sessions, but for those that were killed."""
        entry = self._begun(step)
        entry |= {"state": DONE, "seconds": entry["seconds"] + seconds, "outputs": dict(outputs)}
        self._write()
        return float(entry["seconds"])

    def is_done(self, step: str, wanted: str) -> bool:
        """Whether a step has ended with these inputs."""
        entry = self.steps.get(step)
        return entry is not None and entry["state"] == DONE and entry["fingerprint"] == wanted

    def damaged(self, step: str) -> list[str]:
        """The outputs of a finished step that are missing or not as they were."""
        outputs = self.steps[step]["outputs"]
        return [name for name, digest in outputs.items() if output_digest(self.folder / name) != digest]

    def _begun(self, step: str) -> dict[str, Any]:
        """The entry of a step that is at work."""
        if step not in self.steps:
            raise LongRopeError(
                f"{self.folder / LEDGER}: removed, or damaged, while {step} was at work",
                hint="run the same command again: steps find what is left of what they have done",
            )
        return self.steps[step]

    def _write(self) -> None:
        files.write_json(self.folder / LEDGER, self.content)


def read_ledger(folder: Path) -> dict[str, Any] | None:
    """The content of a run's ledger; None where there is none."""
    path = folder / LEDGER
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise LongRopeError(f"{folder}: a file, a folder is needed", hint="give the folder of a run") from None
    except OSError as error:
        raise LongRopeError(f"{path}: cannot be read ({error.strerror})", hint="check its permissions") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise LongRopeError(f"{path}: not the ledger of an extension of this version", hint="use another folder")
    shape = SHAPE | {key: kind for key, kind in LATER.items() if key in content}
    problem = misfit(content, shape) or next(filter(None, map(_wrong_entry, content["steps"].values())), None)
    if problem:
        raise _damaged(path, problem)
    return content


def _wrong_entry(entry: Mapping[str, Any]) -> str | None:
    """What the shape of a step's entry cannot tell."""
    try:
        datetime.fromisoformat(entry["started"])
    except ValueError:
        return f"{entry['started']!r} is no time"
    if entry["state"] not in (RUNNING, DONE):
        return f"{entry['state']!r} is no state of a step"
    return misfit(entry, {"outputs": {...: str}}) if entry["state"] == DONE else None


def _damaged(path: Path, problem: str) -> DamagedLedgerError:
    return DamagedLedgerError(
        f"{path}: damaged ({problem})",
        hint="run `longrope2 extend` again as before: it makes the file anew, and steps find what they have done",
    )


def current_steps(book: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Entries of steps but for those of other options than the last command's, in the stages that it knew of."""
    expected: Mapping[str, str] = book.get("expected", {})
    stages = {name.partition("/")[0] for name in expected}
    return {
        name: entry
        for name, entry in book["steps"].items()
        if expected.get(name) == entry["fingerprint"] or name.partition("/")[0] not in stages
    }


def keep_damaged(folder: Path) -> Path | None:
    """Copy a ledger that is about to be made anew, since its content is lost; None where it is not."""
    try:
        read_ledger(folder)
    except DamagedLedgerError:
        return Path(shutil.copyfile(folder / LEDGER, folder / DAMAGED))
    return None


def fingerprint(value: Any) -> str:
    """A hash of plain values."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def output_digest(path: Path) -> str | None:
    """What tells the content of a file or folder from any other; None if there is nothing."""
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return fingerprint([[file.relative_to(path).as_posix(), _file_digest(file)] for file in inside])
    return _file_digest(path) if path.is_file() else None


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as content:
        if size <= WHOLE_HASH:
            return hashlib.file_digest(content, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(str(size).encode())
        for sample in range(SAMPLES):
            content.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def only_one(folder: Path) -> AbstractContextManager[None]:
    """Keep a second process out of a run's folder."""
    return files.only_one(folder, "another process is at work there", hint="wait for it to end", file=LOCK)


def is_at_work(folder: Path) -> bool:
    """Whether a process works in a run's folder right now."""
    return files.is_locked(folder / LOCK)


def age(entry: Mapping[str, Any]) -> float:
    """Seconds since a step was started."""
    return time.time() - datetime.fromisoformat(entry["started"]).timestamp()
