"""The record of a finished search, search.json: making it, reading it back, and showing it."""

import json
import math
from pathlib import Path
from typing import Any

from longrope2.console import show_json, show_table, warn
from longrope2.errors import MissingExtraError
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_convergence, draw_factors
from longrope2.files import write_json
from longrope2.methods import rescale
from longrope2.perplexity import Score
from longrope2.search.evolution import Outcome, Progress

FACTORS, RECORD = "factors.json", "search.json"


def outcome_record(outcome: Outcome, tokens: int) -> dict[str, Any]:
    """What the search itself came to; `tokens` are those scored in all documents together."""
    last = outcome.history[-1]
    return {
        "perplexity": perplexity(last.best_nll, tokens),
        "critical_dimension": last.best.critical_dimension or None,
        "best": last.best.to_json(),
        "scored_tokens": tokens,
        "convergence": [_convergence(progress, tokens) for progress in outcome.history],
        "document_evaluations": last.evaluations,
        "exhaustive_evaluations": last.exhaustive_evaluations,
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
    rows = sorted(result["closed_form_perplexity"].items(), key=lambda row: row[1] or math.inf)
    unseen = result["held_out_perplexity"]
    show_table(
        f"{result['config']['objective']} perplexity at {factors.target_length:,} tokens, "
        f"{result['config']['documents']} documents",
        ["method", "perplexity", "d_rcd", *(["held out"] if unseen else [])],
        [
            [
                f"{factors.method} (searched)",
                shown(result["perplexity"]),
                f"{factors.critical_dimension or '-'}",
                *([shown(unseen["searched"])] if unseen else []),
            ],
            *([name, shown(value), "-", *([shown(unseen[name])] if unseen else [])] for name, value in rows),
        ],
        caption=f"{result['document_evaluations']:,} document evaluations of "
        f"{result['exhaustive_evaluations']:,} without racing; factors in {output / FACTORS}",
    )


def perplexity(nll: float, tokens: int) -> float | None:
    """None where it overflows: JSON has no infinity."""
    value = Score(nll, tokens, exact=False).perplexity
    return value if math.isfinite(value) else None


def shown(value: float | None) -> str:
    """A perplexity for people."""
    return "overflow" if value is None else f"{value:.4f}"


def _convergence(progress: Progress, tokens: int) -> dict[str, Any]:
    return {
        "iteration": progress.iteration,
        "perplexity": perplexity(progress.best_nll, tokens),
        "critical_dimension": progress.best.critical_dimension,
        "evaluations": progress.evaluations,
        "exhaustive_evaluations": progress.exhaustive_evaluations,
    }
