"""The journal of a search: every evaluation as one line, so that nothing is computed or lost twice."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrope2.journal import JournalError, JournalFile
from longrope2.perplexity import Score
from longrope2.records import as_json, parse
from longrope2.search.space import Genome

FORMAT = 2
"""Of the journal. The first one had no generations, and candidates that the moves of today do not make."""


@dataclass
class Known:
    """What a journal holds; the same on every process."""

    scores: dict[tuple[str, int], Score]
    """By candidate and document."""
    generations: dict[tuple[int, int], list[Genome]]
    """The candidates of a stage and iteration."""


class Journal(JournalFile):
    """Evaluations and candidates of a search, on disk."""

    job = verb = "search"

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.known = Known({}, {})
        self._reported: set[tuple[int, int]] = set()
        super().__init__(path, {"format": FORMAT, **header})
        self.resumed = len(self.known.scores)
        """Evaluations that were found on disk."""

    def record(self, key: str, document: int, score: Score) -> None:
        """Keep an evaluation."""
        self.known.scores[key, document] = score
        nll = score.nll if math.isfinite(score.nll) else None
        found = {"nll": nll, "tokens": score.num_tokens, "exact": score.exact}
        self.append({"type": "evaluation", "key": key, "document": document, **found})

    def generation(self, stage: int, iteration: int, make: Callable[[], list[Genome]]) -> list[Genome]:
        """The candidates of an iteration: those that were made before a kill, or new ones.

        A surrogate's choice among near equals depends on rounding, which may be another on another machine.
        """
        if (stage, iteration) not in self.known.generations:
            made = make()
            self.known.generations[stage, iteration] = made
            self.append({"type": "generation", "stage": stage, "iteration": iteration, "genomes": as_json(made)})
        return self.known.generations[stage, iteration]

    def report(self, stage: int, iteration: int, **details: Any) -> None:
        """Keep how an iteration ended, for those who watch; a resumed run does not repeat it."""
        if (stage, iteration) not in self._reported:
            self._reported.add((stage, iteration))
            self.append({"type": "iteration", "stage": stage, "iteration": iteration, **details})

    def take(self, entry: dict[str, Any]) -> None:
        """Know what was found on disk."""
        if entry["type"] == "evaluation":
            nll = math.inf if entry["nll"] is None else float(entry["nll"])
            score = Score(nll, int(entry["tokens"]), int(entry["exact"]))
            self.known.scores[str(entry["key"]), int(entry["document"])] = score
        elif entry["type"] == "generation":
            place = int(entry["stage"]), int(entry["iteration"])
            self.known.generations[place] = parse(list[Genome], entry["genomes"], "genomes")
        elif entry["type"] == "iteration":
            self._reported.add((int(entry["stage"]), int(entry["iteration"])))

    def _check_header(self, path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
        if found.get("format") != FORMAT:
            raise JournalError(
                f"{path}: the journal of another version of the search (format {found.get('format', 1)}, "
                f"this one writes {FORMAT}), which this version cannot continue",
                hint=f"{self.verb} into another folder, or delete this one",
            )
        super()._check_header(path, found, expected)
