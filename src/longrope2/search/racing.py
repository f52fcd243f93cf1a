"""Racing: stop scoring a candidate as soon as more documents cannot, or very probably cannot, matter.

Documents differ far more from one another than candidates do on one document, so a candidate is compared with a
reference (the best one known, scored on all documents) on the documents both have seen. Three modes:

`off`          every candidate is scored on every document: the paper's schedule.
`exact`        dropped once its sum alone exceeds what the last parent has on all documents: certain, as NLL ≥ 0.
`statistical`  also stopped once it is very probably not the new best. It then ranks by its estimated total, which
               is all that choosing parents needs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["off", "exact", "statistical"]
Task = tuple[str, int]
"""A candidate's key and a document's index."""

NEIGHBOURS = 16
"""How many similar candidates tell how much a difference varies between documents."""


@dataclass
class Scores:
    """Sum of NLL by candidate and document, and the estimates made from them."""

    num_documents: int
    table: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, key: str, document: int, nll: float) -> None:
        """Keep one evaluation."""
        self.table.setdefault(key, {})[document] = nll

    def is_complete(self, key: str) -> bool:
        """Whether a candidate was scored on every document."""
        return len(self.table.get(key, ())) == self.num_documents

    def total(self, key: str) -> float:
        """The sum over the documents seen so far."""
        return sum(self.table[key].values())

    def best(self) -> str | None:
        """The best complete candidate; ties go to the one scored first."""
        complete = [key for key in self.table if self.is_complete(key)]
        return min(complete, key=self.total, default=None)

    def differences(self, key: str, reference: str) -> list[float]:
        """A candidate's NLL less the reference's, for each document it has seen."""
        baseline = self.table[reference]
        return [nll - baseline[document] for document, nll in self.table[key].items()]

    def estimate(self, key: str, reference: str) -> float:
        """The total a candidate would have on all documents, judged by those it has seen."""
        if self.is_complete(key):
            return self.total(key)
        if math.isinf(self.total(reference)):  # nothing to compare with: its own documents must do
            return self.num_documents * self.total(key) / len(self.table[key])
        differences = self.differences(key, reference)
        return self.total(reference) + self.num_documents * sum(differences) / len(differences)

    def ranking(self) -> list[str]:
        """All candidates, best first."""
        reference = self.best()
        assert reference is not None
        return sorted(self.table, key=lambda key: self.estimate(key, reference))


@dataclass(frozen=True, kw_only=True)
class Race:
    """Decides, document by document, who goes on."""

    mode: Mode
    num_parents: int
    confidence: float = 0.5
    """How many standard errors below its estimate a candidate is still thought possible to end."""

    def run(
        self,
        candidates: Sequence[str],
        scores: Scores,
        order: Sequence[int],
        evaluate: Callable[[Sequence[Task]], Sequence[float]],
    ) -> None:
        """Score candidates on documents in the given order until each one is settled."""
        running = list(candidates)
        if scores.best() is None and self.mode != "off":
            self._find_reference(running, scores, order, evaluate)
        for document in order:
            tasks = [(key, document) for key in running if document not in scores.table.get(key, {})]
            for (key, _), nll in zip(tasks, evaluate(tasks), strict=True):
                scores.add(key, document, nll)
            if self.mode != "off":
                running = self._still_open(running, scores)

    @staticmethod
    def _find_reference(
        candidates: list[str],
        scores: Scores,
        order: Sequence[int],
        evaluate: Callable[[Sequence[Task]], Sequence[float]],
    ) -> None:
        """With nothing to compare with yet, the best two on the first document are scored on all of them.

        The best is the first reference; how much the second differs from it on each document is the first sign of
        how far one document can be trusted.
        """

        def score(tasks: list[Task]) -> None:
            for (key, document), nll in zip(tasks, evaluate(tasks), strict=True):
                scores.add(key, document, nll)

        score([(key, order[0]) for key in candidates])
        leaders = sorted(candidates, key=scores.total)[:2]
        score([(key, document) for key in leaders for document in order[1:]])

    def _still_open(self, running: list[str], scores: Scores) -> list[str]:
        limit = self._entry_limit(scores)
        possible = [key for key in running if not scores.is_complete(key) and scores.total(key) < limit]
        if self.mode == "exact":
            return possible
        reference = scores.best()
        assert reference is not None
        return [key for key in possible if self._may_be_best(key, reference, scores)]

    def _entry_limit(self, scores: Scores) -> float:
        """The total of the last parent among complete candidates: whoever has more already stays out."""
        totals = sorted(scores.total(key) for key in scores.table if scores.is_complete(key))
        return totals[self.num_parents - 1] if len(totals) >= self.num_parents else math.inf

    def _may_be_best(self, key: str, reference: str, scores: Scores) -> bool:
        seen, n = len(scores.table[key]), scores.num_documents
        estimate = scores.estimate(key, reference)
        if math.isinf(estimate):
            return False
        margin = 0.0
        if self.confidence:  # zero times an unknown, infinite spread is no number
            # The error of predicting the mean of n documents from `seen` of them, as a total.
            error = self._spread(key, reference, scores) * n * math.sqrt(1 / seen - 1 / n)
            margin = self.confidence * error
        return estimate - margin < scores.total(reference)

    def _spread(self, key: str, reference: str, scores: Scores) -> float:
        """The standard deviation of differences between documents, pooled over similar candidates."""
        own = scores.differences(key, reference)
        level = sum(own) / len(own)
        others = []
        for other in scores.table:
            if other == reference or len(scores.table[other]) < 2:
                continue
            differences = scores.differences(other, reference)
            mean = sum(differences) / len(differences)
            if math.isfinite(mean):
                others.append((abs(mean - level), sum((d - mean) ** 2 for d in differences), len(differences) - 1))
        others.sort()
        squares = sum(square for _, square, _ in others[:NEIGHBOURS])
        freedom = sum(degrees for _, _, degrees in others[:NEIGHBOURS])
        return math.sqrt(squares / freedom) if freedom else math.inf
