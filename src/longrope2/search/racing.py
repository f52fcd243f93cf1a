"""Racing: stop scoring a candidate as soon as more documents cannot, or will hardly, make it the best.

A candidate is compared with a reference (the best one known, scored on all documents) on the documents both have seen.
Some documents separate candidates far better than others, so those come first, and what a candidate would have on
the others is estimated in proportion. Documents with the needle at other depths may disagree on who is best, so that
no candidate is judged before a document of every depth. Three modes:

`off`          every candidate is scored on every document: the paper's schedule.
`exact`        dropped once its sum alone exceeds what the last parent has on all documents: certain, as NLL ≥ 0.
`statistical`  also stopped unless its estimated total, less `confidence` standard errors, is below the best one's;
               with less than 0 it has to promise more than that. It then ranks by that estimate, which is all that
               choosing parents needs.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from longrope2.search.config import Mode

Task = tuple[str, int]
"""A candidate's key and a document's index."""

LEFT_BY_RACING: dict[Mode, float] = {"statistical": 0.25, "exact": 0.8, "off": 1.0}
"""The share of evaluations that it leaves over, about (0.16 to 0.25 and, exact, up to all on SmolLM2)."""
NEIGHBOURS = 16
"""How many candidates of a similar slope are pooled to know how single documents scatter around it."""
SCOUTS = 3
"""How many of the first candidates find out which documents separate best."""
LEAST_SCALE = 0.1
"""Least scale of a document, relative to the average one: the few candidates seen so far may agree on it by chance."""


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

    def scales(self, reference: str) -> list[float]:
        """How far complete candidates lie from the reference on each document, relative to the average document."""
        own = self.table[reference]
        others = [row for key, row in self.table.items() if self.is_complete(key) and math.isfinite(self.total(key))]
        apart = [sum(abs(row[document] - own[document]) for row in others) for document in range(self.num_documents)]
        mean = sum(apart) / self.num_documents
        if not 0 < mean < math.inf:
            return [1.0] * self.num_documents
        return [max(value / mean, LEAST_SCALE) for value in apart]

    def slope(self, key: str, reference: str, scales: Sequence[float]) -> float:
        """How far a candidate lies from the reference, in units of the scales: least squares over what it has seen."""
        own, row = self.table[reference], self.table[key]
        seen = sum(scales[document] ** 2 for document in row)
        return sum(scales[document] * (nll - own[document]) for document, nll in row.items()) / seen

    def estimate(self, key: str, reference: str, scales: Sequence[float]) -> float:
        """The total a candidate would have on all documents, judged by those it has seen."""
        row, own = self.table[key], self.table[reference]
        if self.is_complete(key):
            return self.total(key)
        if math.isinf(self.total(reference)):  # nothing to compare with: its own documents must do
            return self.num_documents * self.total(key) / len(row)
        slope = self.slope(key, reference, scales)
        unseen = [document for document in range(self.num_documents) if document not in row]
        return self.total(key) + sum(max(own[document] + slope * scales[document], 0.0) for document in unseen)

    def estimates(self) -> dict[str, float]:
        """The total of every candidate, estimated where it was not scored on all documents."""
        reference = self.best()
        assert reference is not None
        scales = self.scales(reference)
        return {key: self.estimate(key, reference, scales) for key in self.table}

    def ranking(self) -> list[str]:
        """All candidates, best first; of equal ones those that are known for certain."""
        estimates = self.estimates()
        return sorted(estimates, key=lambda key: (estimates[key], not self.is_complete(key)))


@dataclass(frozen=True, kw_only=True)
class Race:
    """Decides, document by document, which candidates continue."""

    mode: Mode
    num_parents: int
    confidence: float = 1.0
    """How many standard errors below its estimate a candidate is still thought possible to end."""
    kinds: Sequence[Hashable] = ()
    """What kind each document is of, such as the depth of its needle; none: all are alike."""

    def run(
        self,
        candidates: Sequence[str],
        scores: Scores,
        order: Sequence[int],
        evaluate: Callable[[Sequence[Task]], Sequence[float]],
    ) -> None:
        """Score candidates until each one is settled; `order` decides where no document is known to separate better."""

        def score(tasks: Sequence[Task]) -> None:
            missing = [(key, document) for key, document in tasks if document not in scores.table.get(key, {})]
            for (key, document), nll in zip(missing, evaluate(missing), strict=True):
                scores.add(key, document, nll)

        running = list(candidates)
        if self.mode != "off":
            order = self._telling_first(running, scores, order, score)
        for block in self._blocks(order):
            score([(key, document) for key in running for document in block])
            if self.mode != "off":
                running = self._still_open(running, scores)

    def _blocks(self, order: Sequence[int]) -> list[list[int]]:
        """Documents that are scored before anyone is judged: the next one of every kind."""
        kinds: dict[Hashable, list[int]] = {}
        for document in order:
            kinds.setdefault(self.kinds[document] if self.kinds else None, []).append(document)
        return [[d for d in block if d is not None] for block in zip_longest(*kinds.values())]

    def _telling_first(
        self, candidates: Sequence[str], scores: Scores, order: Sequence[int], score: Callable[[Sequence[Task]], None]
    ) -> list[int]:
        """The documents by how well they separate candidates.

        With nothing known yet, a few scouts are scored on all documents to find out, and the best two on the first
        block follow, so that there is a good reference before anyone is stopped.
        """
        is_first = scores.best() is None
        if is_first:
            scouts = candidates[:: max(len(candidates) // SCOUTS, 1)][:SCOUTS]
            score([(key, document) for key in scouts for document in order])
        reference = scores.best()
        assert reference is not None
        scales = scores.scales(reference)
        order = sorted(order, key=lambda document: -scales[document])
        if is_first:
            first = self._blocks(order)[0]
            score([(key, document) for key in candidates for document in first])
            leaders = sorted(candidates, key=lambda key: sum(scores.table[key][document] for document in first))[:2]
            score([(key, document) for key in leaders for document in order])
        return order

    def _still_open(self, running: list[str], scores: Scores) -> list[str]:
        limit = self._entry_limit(scores)
        possible = [key for key in running if not scores.is_complete(key) and scores.total(key) < limit]
        if self.mode == "exact":
            return possible
        reference = scores.best()
        assert reference is not None
        scales = scores.scales(reference)
        slopes = self._slopes(reference, scores, scales)
        return [key for key in possible if self._may_be_best(key, reference, scores, scales, slopes)]

    def _entry_limit(self, scores: Scores) -> float:
        """The total of the last parent among complete candidates: a candidate that already has more is out."""
        totals = sorted(scores.total(key) for key in scores.table if scores.is_complete(key))
        return totals[self.num_parents - 1] if len(totals) >= self.num_parents else math.inf

    def _may_be_best(
        self,
        key: str,
        reference: str,
        scores: Scores,
        scales: Sequence[float],
        slopes: Sequence[tuple[float, float, int]],
    ) -> bool:
        estimate = scores.estimate(key, reference, scales)
        if math.isinf(estimate):
            return False
        margin = 0.0
        if self.confidence:  # zero times an unknown, infinite spread is NaN
            row = scores.table[key]
            unseen = [document for document in range(scores.num_documents) if document not in row]
            # The variance of the estimate, in units of spread²: each unseen document scatters around the slope by
            # itself, and an error of the slope, which was fitted to the documents seen, moves all of them together.
            own = len(unseen)
            shared = sum(scales[d] for d in unseen) ** 2 / sum(scales[d] ** 2 for d in row)
            spread = self._spread(scores.slope(key, reference, scales), slopes)
            margin = self.confidence * spread * math.sqrt(own + shared)
        return estimate - margin < scores.total(reference)

    @staticmethod
    def _slopes(reference: str, scores: Scores, scales: Sequence[float]) -> list[tuple[float, float, int]]:
        """For each candidate with two documents or more: slope, squared residuals, degrees of freedom."""
        own, found = scores.table[reference], []
        for key, row in scores.table.items():
            if key == reference or len(row) < 2:
                continue
            slope = scores.slope(key, reference, scales)
            if math.isfinite(slope):
                residuals = [nll - own[document] - slope * scales[document] for document, nll in row.items()]
                found.append((slope, sum(residual**2 for residual in residuals), len(row) - 1))
        return found

    @staticmethod
    def _spread(slope: float, slopes: Sequence[tuple[float, float, int]]) -> float:
        """How far single documents lie from slope times scale: a standard deviation, pooled over similar candidates.

        A candidate's own few documents would not show it; those as good or bad as it scatter alike.
        """
        near = sorted(slopes, key=lambda other: abs(other[0] - slope))[:NEIGHBOURS]
        freedom = sum(degrees for _, _, degrees in near)
        return math.sqrt(sum(squares for _, squares, _ in near) / freedom) if freedom else math.inf
