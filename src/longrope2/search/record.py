"""The record of a finished search, search.json: making it and showing it."""

import math
from collections.abc import Sequence
from pathlib import Path

from longrope2.console import warn
from longrope2.errors import MissingExtraError
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_convergence, draw_factors
from longrope2.intervals import student
from longrope2.methods import rescale
from longrope2.perplexity import Score, total
from longrope2.records import HELD_OUT, IN_SAMPLE, SEARCHED, Measurement, SearchIteration, SearchRecord, Table
from longrope2.search.evolution import Outcome

FACTORS, RECORD = "factors.json", "search.json"


def measurement(scores: Sequence[Score], answers: int) -> Measurement:
    """The perplexity of some documents with its 95% interval over documents; `answers` is how many they ask for."""
    whole = total(scores)
    interval = student([score.nll / score.num_tokens for score in scores])
    low, high = (None, None) if interval is None else (perplexity(max(end, 0.0), 1) for end in interval)
    return Measurement(
        perplexity=perplexity(whole.nll, whole.num_tokens),
        low=low,
        high=high,
        exact=whole.exact,
        answers=answers,
        documents=len(scores),
    )


def iterations(stages: Sequence[tuple[int, int]], outcomes: Sequence[Outcome]) -> tuple[SearchIteration, ...]:
    """How the search went, at each length; stages are a length and the tokens scored in all of its documents."""
    return tuple(
        SearchIteration(
            length=length,
            iteration=progress.iteration,
            perplexity=perplexity(progress.best_nll, tokens),
            critical_dimension=progress.best.critical_dimension,
            evaluations=progress.evaluations,
            exhaustive_evaluations=progress.exhaustive_evaluations,
        )
        for (length, tokens), outcome in zip(stages, outcomes, strict=True)
        for progress in outcome.history
    )


def write_search(output: Path, factors: RescaleFactors, record: SearchRecord) -> None:
    """Write the factors, the record, and figures of both where matplotlib is installed."""
    factors.save(output / FACTORS)
    record.save(output / RECORD)
    try:
        draw_convergence(record.convergence, output / "convergence.png")
        named = {name: rescale(name, factors.spec, factors.target_length) for name in ("pi", "ntk", "yarn")}
        draw_factors({**named, factors.method: factors}, output / "factors.png")
    except MissingExtraError as error:
        warn(str(error))


def search_table(output: Path, factors: RescaleFactors, record: SearchRecord) -> Table:
    """What was found, beside every closed form."""
    scores = {(row.method, row.part): row for row in record.scores}
    parts = [part for part in (IN_SAMPLE, HELD_OUT) if (SEARCHED, part) in scores]

    def order(name: str) -> tuple[bool, float]:
        value = scores[name, parts[-1]].perplexity
        return name != SEARCHED, math.inf if value is None else value

    needle = record.chance is not None
    rows = []
    for name in sorted(dict.fromkeys(name for name, _ in scores), key=order):
        found = name == SEARCHED
        row = [f"{factors.method} (searched)" if found else name, f"{(found and factors.critical_dimension) or '-'}"]
        for part in parts:
            row += [_with_interval(scores.get((name, part))), *([_exact(scores.get((name, part)))] if needle else [])]
        rows.append(row)
    counts = ", ".join(f"{scores[SEARCHED, part].documents} {part}" for part in parts)
    guess = f"; guessing digits has {record.chance:.3g}" if needle else ""
    return Table(
        title=f"{record.config['objective']} perplexity at {factors.target_length:,} tokens, "
        f"documents: {counts}{guess}",
        columns=["method", "d_rcd", *(column for part in parts for column in (part, *(["exact"] if needle else [])))],
        rows=rows,
        caption=f"{record.document_evaluations:,} document evaluations of "
        f"{record.exhaustive_evaluations:,} without racing; factors in {output / FACTORS}",
    )


def perplexity(nll: float, tokens: int) -> float | None:
    """None where it overflows: JSON has no infinity."""
    value = Score(nll, tokens, exact=0).perplexity
    return value if math.isfinite(value) else None


def shown(value: float | None) -> str:
    """A perplexity for people."""
    return "overflow" if value is None else f"{value:.3f}" if value < 10 else f"{value:.4g}"


def _with_interval(found: Measurement | None) -> str:
    if found is None:
        return "-"
    if found.low is None:
        return shown(found.perplexity)
    return f"{shown(found.perplexity)} ({shown(found.low)}–{shown(found.high)})"


def _exact(found: Measurement | None) -> str:
    return "-" if found is None else f"{found.exact}/{found.answers}"
