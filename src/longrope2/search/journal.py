"""The journal of a search: every evaluation as one line, so that nothing is computed or lost twice."""

import json
import math
import os
from pathlib import Path
from typing import Any

from longrope2.errors import LongRopeError, all_problems


class JournalError(LongRopeError):
    """The journal on disk is damaged or belongs to another search."""


class Journal:
    """Append-only JSON lines: a header that says whose it is, then evaluations and notes.

    A search resumes by running again from its seed: what the journal knows is answered from it, and the rest is
    computed. With no path nothing is kept.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._path = path
        self.known: dict[tuple[str, int], float] = {}
        """NLL by candidate and document."""
        self._noted: set[str] = set()
        self.resumed = 0
        """Evaluations that were found on disk."""
        self._file = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                self._read(path, header)
            # Line-buffered: each line is handed to the system at once and survives a kill.
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise JournalError(f"{path}: cannot be read or written ({error.strerror})") from error
        if path.stat().st_size == 0:
            self._append({"type": "header", **header})

    def record(self, key: str, document: int, nll: float, **details: Any) -> None:
        """Keep an evaluation."""
        self.known[key, document] = nll
        stored = nll if math.isfinite(nll) else None
        self._append({"type": "evaluation", "key": key, "document": document, "nll": stored, **details})

    def note(self, kind: str, identity: str, **details: Any) -> None:
        """Keep a fact once, such as the genes of a candidate; a resumed run does not repeat it."""
        if f"{kind}:{identity}" not in self._noted:
            self._noted.add(f"{kind}:{identity}")
            self._append({"type": kind, "id": identity, **details})

    def close(self) -> None:
        """Make sure that everything is on disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def _read(self, path: Path, header: dict[str, Any]) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # a kill in the middle of a write: that line was never finished
            with path.open("r+b") as file:
                file.truncate(whole)
        # By the line feed alone: a name in the header may hold other characters that Python ends lines at.
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
            try:
                entry = json.loads(line.decode("utf-8"))
                kind = entry["type"]
                if number == 1:
                    self._check_header(path, entry, header)
                elif kind == "evaluation":
                    nll = math.inf if entry["nll"] is None else float(entry["nll"])
                    self.known[str(entry["key"]), int(entry["document"])] = nll
                else:
                    self._noted.add(f"{kind}:{entry['id']}")
            except (KeyError, TypeError, ValueError) as error:  # also what is no JSON or no UTF-8
                raise JournalError(
                    f"{path}: line {number} is damaged",
                    hint="delete that line (it will be computed again), or search into another folder",
                ) from error
        self.resumed = len(self.known)

    @staticmethod
    def _check_header(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
        expected = _flat(json.loads(json.dumps(expected)))
        found = _flat({key: value for key, value in found.items() if key != "type"})
        differences = [
            f"{key}: {found.get(key)!r} on disk, {expected.get(key)!r} now"
            for key in sorted(set(found) | set(expected))
            if found.get(key) != expected.get(key)
        ]
        if differences:
            raise JournalError(
                all_problems(f"{path} belongs to another search", differences),
                hint="search into another folder, or delete this one",
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted names, so that a difference can be named."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
