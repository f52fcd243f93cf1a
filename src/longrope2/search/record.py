"""The record of a finished search, search.json: making it, reading it back, and showing it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longrope2.console import show_json, show_table, warn
from longrope2.errors import MissingExtraError
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_convergence, draw_factors
from longrope2.files import write_json
from longrope2.intervals import student
from longrope2.methods import rescale
from longrope2.perplexity import Score, total
from longrope2.search.evolution import Outcome

FACTORS, RECORD = "factors.json", "search.json"
SEARCHED = "searched"
"""What was found, among the methods measured."""
IN_SAMPLE, HELD_OUT = "in sample", "held out"
"""The documents that were searched on, and those that were not."""


def measurement(scores: Sequence[Score]) -> dict[str, Any]:
    """The perplexity of some documents with its 95% interval over documents, and how many were answered exactly."""
    whole = total(scores)
    interval = student([score.nll / score.num_tokens for score in scores])
    low, high = (None, None) if interval is None else (perplexity(max(end, 0.0), 1) for end in interval)
    return {
        "perplexity": perplexity(whole.nll, whole.num_tokens),
        "low": low,
        "high": high,
        "exact": sum(score.exact for score in scores),
        "documents": len(scores),
    }


def outcome_record(stages: Sequence[tuple[int, int]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How the search went, at each length; stages are a length and the tokens scored in all of its documents."""
    convergence = [
        {
            "length": length,
            "iteration": progress.iteration,
            "perplexity": perplexity(progress.best_nll, tokens),
            "critical_dimension": progress.best.critical_dimension,
            "evaluations": progress.evaluations,
            "exhaustive_evaluations": progress.exhaustive_evaluations,
        }
        for (length, tokens), outcome in zip(stages, outcomes, strict=True)
        for progress in outcome.history
    ]
    ends = [outcome.history[-1] for outcome in outcomes]
    return {
        "convergence": convergence,
        "document_evaluations": sum(end.evaluations for end in ends),
        "exhaustive_evaluations": sum(end.exhaustive_evaluations for end in ends),
    }


def write_record(output: Path, factors: RescaleFactors, record: dict[str, Any]) -> None:
    """Write the factors, the record, and figures of both where matplotlib is installed."""
    factors.save(output / FACTORS)
    write_json(output / RECORD, record)
    try:
        draw_convergence(record["convergence"], output / "convergence.png")
        named = {name: rescale(name, factors.spec, factors.target_length) for name in ("pi", "ntk", "yarn")}
        draw_factors({**named, factors.method: factors}, output / "factors.png")
    except MissingExtraError as error:
        warn(str(error))


def search_result(output: Path) -> dict[str, Any]:
    """What a finished search wrote into search.json."""
    result: dict[str, Any] = json.loads((output / RECORD).read_text(encoding="utf-8"))
    return result


def show_record(output: Path, factors: RescaleFactors, *, as_json: bool) -> None:
    """Print the record in a search's folder: what was found beside every closed form."""
    result = search_result(output)
    if as_json:
        show_json(result)
        return
    scores = {(row["method"], row["part"]): row for row in result["scores"]}
    parts = [part for part in (IN_SAMPLE, HELD_OUT) if (SEARCHED, part) in scores]

    def order(name: str) -> tuple[bool, float]:
        value = scores[name, parts[-1]]["perplexity"]
        return name != SEARCHED, math.inf if value is None else value

    needle = result["chance"] is not None
    rows = []
    for name in sorted(dict.fromkeys(name for name, _ in scores), key=order):
        found = name == SEARCHED
        row = [f"{factors.method} (searched)" if found else name, f"{(found and factors.critical_dimension) or '-'}"]
        for part in parts:
            row += [_with_interval(scores.get((name, part))), *([_exact(scores.get((name, part)))] if needle else [])]
        rows.append(row)
    counts = ", ".join(f"{scores[SEARCHED, part]['documents']} {part}" for part in parts)
    guess = f"; guessing digits has {result['chance']:.3g}" if needle else ""
    show_table(
        f"{result['config']['objective']} perplexity at {factors.target_length:,} tokens, documents: {counts}{guess}",
        ["method", "d_rcd", *(column for part in parts for column in (part, *(["exact"] if needle else [])))],
        rows,
        caption=f"{result['document_evaluations']:,} document evaluations of "
        f"{result['exhaustive_evaluations']:,} without racing; factors in {output / FACTORS}",
    )


def perplexity(nll: float, tokens: int) -> float | None:
    """None where it overflows: JSON has no infinity."""
    value = Score(nll, tokens, exact=False).perplexity
    return value if math.isfinite(value) else None


def shown(value: float | None) -> str:
    """A perplexity for people."""
    return "overflow" if value is None else f"{value:.3f}" if value < 10 else f"{value:.4g}"


def _with_interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["low"] is None:
        return shown(found["perplexity"])
    return f"{shown(found['perplexity'])} ({shown(found['low'])}–{shown(found['high'])})"


def _exact(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['exact']}/{found['documents']}"
