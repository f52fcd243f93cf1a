"""Append-only JSON lines that survive a kill: a header that says whose they are, then one entry a line."""

import os
import time
from pathlib import Path
from typing import Any

from longrope2.errors import LongRopeError
from longrope2.files import is_sealed, naming, open_to_append, parse_json, public, sealed_line, unsealed
from longrope2.records import RecordError
from longrope2.runfolder import require_same

TIME = "time"
"""The entries that say how long the ones before them took."""


class JournalError(LongRopeError):
    """The journal on disk is damaged or belongs to another job."""


class JournalFile:
    """The file of a job that resumes by running again: what is known is answered from it, the rest computed.

    With no path nothing is kept.
    """

    job: str
    """What messages call the job that it belongs to."""
    verb: str
    """How to begin another one."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        """Open or create it, and take what it has."""
        self._file = None
        header = public(header)
        self.earlier = 0.0
        """Seconds that earlier sessions worked on it, up to their last `sync`."""
        self._told, self._has_news = time.monotonic(), False
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # First of all: what is behind a link is not even read, let alone cut at its last whole line.
            # Line-buffered: each line is handed to the system at once and survives a kill.
            self._file = open_to_append(path, buffering=1)
            self._read(path, header)
        except OSError as error:
            raise JournalError(
                f"{path}: cannot be read or written ({error.strerror})", hint=f"{self.verb} into another folder"
            ) from error
        if path.stat().st_size == 0:
            self._write({"type": "header", **header})

    def take(self, entry: dict[str, Any]) -> None:
        """Called for each entry found; KeyError, TypeError, ValueError and RecordError mean that it is damaged."""
        raise NotImplementedError

    def append(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self._write(entry)
        self._has_news = True

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            with naming(Path(self._file.name)):
                self._file.write(sealed_line(entry))

    def sync(self) -> None:
        """Make sure that everything is on disk, where it survives a power cut too, and the time that it took."""
        if self._file is not None:
            if self._has_news:  # a session that finds all of it done leaves the file as it is
                now = time.monotonic()
                self._write({"type": TIME, "seconds": now - self._told})
                self._told, self._has_news = now, False
            with naming(Path(self._file.name)):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync, and write no more."""
        self.sync()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, header: dict[str, Any]) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        header_line = sealed_line({"type": "header", **header}).encode()
        if not whole and not header_line.startswith(content):
            raise self._damage(path, 1, "not what this program has begun to write")
        # By the line feed alone: a name in the header may hold other characters that Python ends lines at.
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
            try:
                if number == 1 and not is_sealed(line) and isinstance(old := parse_json(line), dict):
                    self._check_header(path, old, header)  # of an earlier version, which it says itself
                entry = parse_json(unsealed(line))
                kind = entry["type"]
                if number == 1:
                    self._check_header(path, entry, header)
                elif kind == TIME:
                    self.earlier += float(entry["seconds"])
                elif isinstance(kind, str):
                    self.take(entry)
            except (KeyError, TypeError, ValueError, RecordError) as error:  # also what is no JSON or no UTF-8
                raise self._damage(path, number, error) from error

        if whole < len(content):  # a kill in the middle of a write: that line was never finished
            assert self._file is not None
            self._file.truncate(whole)

    def _damage(self, path: Path, number: int, reason: object) -> JournalError:
        mending = "delete that line (it will be computed again)"
        if number == 1:
            mending = "delete the file (that line said whose the others are, so all are computed again)"
        return JournalError(
            f"{path}: line {number} is damaged ({reason})", hint=f"{mending}, or {self.verb} into another folder"
        )

    def _check_header(self, path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
        require_same(
            {key: value for key, value in found.items() if key != "type"},
            expected,
            f"{path} belongs to another {self.job}",
            hint=f"{self.verb} into another folder, or delete this one",
            error=JournalError,
        )
