"""The journal of a search: every evaluation as one line, so that nothing is computed or lost twice."""

import math
from pathlib import Path
from typing import Any

from longrope2.journal import JournalFile


class Journal(JournalFile):
    """Evaluations and notes of a search, on disk."""

    job = verb = "search"

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.known: dict[tuple[str, int], float] = {}
        """NLL by candidate and document."""
        self._noted: set[str] = set()
        super().__init__(path, header)
        self.resumed = len(self.known)
        """Evaluations that were found on disk."""

    def record(self, key: str, document: int, nll: float, **details: Any) -> None:
        """Keep an evaluation."""
        self.known[key, document] = nll
        stored = nll if math.isfinite(nll) else None
        self.append({"type": "evaluation", "key": key, "document": document, "nll": stored, **details})

    def note(self, kind: str, identity: str, **details: Any) -> None:
        """Keep a fact once, such as the genes of a candidate; a resumed run does not repeat it."""
        if f"{kind}:{identity}" not in self._noted:
            self._noted.add(f"{kind}:{identity}")
            self.append({"type": kind, "id": identity, **details})

    def take(self, entry: dict[str, Any]) -> None:
        """Know what was found on disk."""
        if entry["type"] == "evaluation":
            nll = math.inf if entry["nll"] is None else float(entry["nll"])
            self.known[str(entry["key"]), int(entry["document"])] = nll
        else:
            self._noted.add(f"{entry['type']}:{entry['id']}")
