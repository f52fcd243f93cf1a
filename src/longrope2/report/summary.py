"""The table that says whether it worked: methods as rows, scores by length, and what is kept in the original window."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longrope2 import ledger
from longrope2.evaluation.suites import SUITES, summarised
from longrope2.evaluation.table import overall, retention
from longrope2.figures import length_label
from longrope2.records import Measured, Table, as_json
from longrope2.report.gather import RunData

NAMES = {
    ledger.BASE: "original",
    ledger.SEARCHED: "LongRoPE2, factors only",
    ledger.AFTER_TRAINING: "LongRoPE2, trained",
    ledger.EXPORTED: "LongRoPE2, as exported",
    "pi": "PI",
    "ntk": "NTK",
    "yarn": "YaRN",
    "ntk-rcd": "NTK-rcd",
    "yarn-rcd": "YaRN-rcd",
}
UNTRAINED = (
    "without training: the recipe names no texts, so the stages data and train are skipped. "
    "To add them, run it again with a recipe that has a [[source]]: see docs/guide.md"
)


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """A row of the table, as values; None where it was not measured."""

    by_length: dict[str, dict[str, float]]
    """By suite."""
    short_perplexity: float | None
    perplexity_retention: float | None
    short_retention: float | None


@dataclass(frozen=True, kw_only=True)
class Summary(Table):
    """The table, and the same as values."""

    methods: dict[str, MethodSummary]
    note: str = ""
    """A note on the whole run; empty for most."""

    def to_json(self) -> dict[str, Any]:
        """As values."""
        return {"title": self.title, "methods": as_json(self.methods)}


def label(method: str) -> str:
    """A method as people call it."""
    return NAMES.get(method, method)


def summarise(data: RunData) -> Summary:
    """The summary of a gathered run; empty rows where nothing was evaluated."""
    scores, original = data.scores, data.original_length or 0
    perplexities = {name: short_perplexity(own, original) for name, own in scores.items()}
    base = perplexities.get(ledger.BASE)
    kept = retention(scores, ledger.BASE) if ledger.BASE in scores else {}
    methods = {
        name: MethodSummary(
            by_length={
                suite.name: {str(score.length): score.percent.score for score in found}
                for suite in summarised()
                if (found := by_length(own, suite.name))
            },
            short_perplexity=(perplexity := perplexities[name]),
            perplexity_retention=100 * (base / perplexity) if base and perplexity else None,
            short_retention=kept.get(name),
        )
        for name, own in scores.items()
    }
    return _table(data, methods)


def by_length(scores: Iterable[Measured], suite: str) -> list[Measured]:
    """The scores that stand for a suite, by length."""
    found = overall(score for score in scores if score.suite == suite)
    return sorted(found.values(), key=lambda score: score.length or 0)


def short_perplexity(scores: Sequence[Measured], original_length: int) -> float | None:
    """Of books within the original window: the longest length measured, by a sliding window if there is one."""
    own = [s for s in scores if s.suite == "perplexity" and (s.length or 0) <= original_length and s.score]
    best = max(own, key=lambda s: (s.length, s.task == "sliding"), default=None)
    return None if best is None else best.score


def _table(data: RunData, methods: dict[str, MethodSummary]) -> Summary:
    places = list(
        dict.fromkeys(
            (suite, length)
            for found in methods.values()
            for suite, values in found.by_length.items()
            for length in values
        )
    )
    extra = {"short_perplexity": "short PPL", "perplexity_retention": "kept", "short_retention": "short tasks kept"}
    shown = [name for name in extra if any(getattr(found, name) is not None for found in methods.values())]
    rows = []
    for name, found in methods.items():
        row = [label(name)]
        row += [_percent(found.by_length.get(suite, {}).get(length)) for suite, length in places]
        for key in shown:
            row.append((_number if key == "short_perplexity" else _percent)(getattr(found, key)))
        rows.append(row)
    suites = ", ".join(dict.fromkeys(SUITES[suite].title for suite, _ in places))
    caption = f"{suites}: share of right answers by length" if suites else ""
    if "short_perplexity" in shown:
        caption += "; short PPL: perplexity of books within the original window; kept: the original's over the method's"
    if ledger.EXPORTED in methods:
        caption += "; as exported: with the rescaled RoPE in short sequences, too, which plain transformers needs here"
    window = " → ".join(
        f"{length:,}" for length in (data.original_length, data.book.target_length) if length is not None
    )
    return Summary(
        title=f"{data.book.model}, {window} tokens",
        columns=["", *(f"{SUITES[suite].summary} {length_label(int(length))}" for suite, length in places),
                 *(extra[name] for name in shown)],
        rows=rows,
        caption=caption.strip("; "),
        methods=methods,
        note="" if data.book.recipe.get("source") else UNTRAINED,
    )  # fmt: skip


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
