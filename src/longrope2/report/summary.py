"""The table that says whether it worked: methods as rows, scores by length, and what is kept in the original window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrope2 import ledger
from longrope2.evaluation.results import AVERAGE
from longrope2.evaluation.suites import SUITES, summarised
from longrope2.evaluation.table import retention
from longrope2.figures import length_label

NAMES = {
    ledger.BASE: "original",
    ledger.SEARCHED: "LongRoPE2, factors only",
    ledger.AFTER_TRAINING: "LongRoPE2, trained",
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
Score = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The table, and the same as values."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str
    methods: dict[str, dict[str, Any]]
    """For each method: `by_length`, `short_perplexity`, `perplexity_retention`, `short_retention` where measured."""
    note: str = ""
    """A note on the whole run; empty for most."""

    def to_json(self) -> dict[str, Any]:
        """As values."""
        return {"title": self.title, "methods": self.methods}


def label(method: str) -> str:
    """A method as people call it."""
    return NAMES.get(method, method)


def summarise(data: Mapping[str, Any]) -> Summary:
    """The summary of a gathered run; empty rows where nothing was evaluated."""
    scores: Mapping[str, Sequence[Score]] = data["scores"]
    original = data["original_length"] or 0
    methods: dict[str, dict[str, Any]] = {name: {} for name in scores}
    for name, own in scores.items():
        by_suite = {
            suite.name: {str(s["length"]): s["score"] for s in overall(own, suite.name)} for suite in summarised()
        }
        methods[name]["by_length"] = {suite: values for suite, values in by_suite.items() if values}
        methods[name]["short_perplexity"] = short_perplexity(own, original)
    base = methods.get(ledger.BASE, {}).get("short_perplexity")
    kept = retention(scores, ledger.BASE) if ledger.BASE in scores else {}
    for name, found in methods.items():
        own_perplexity = found["short_perplexity"]
        found["perplexity_retention"] = 100 * (base / own_perplexity) if base and own_perplexity else None
        found["short_retention"] = kept.get(name)
    return _table(data, methods)


def overall(scores: Sequence[Score], suite: str) -> list[Score]:
    """The scores that stand for a suite, by length: the averages, or those of its only task."""
    own = [score for score in scores if score["suite"] == suite]
    averages = [score for score in own if score["task"] == AVERAGE]
    return sorted(averages or own, key=lambda score: score["length"])


def short_perplexity(scores: Sequence[Score], original_length: int) -> float | None:
    """Of books within the original window: the longest length measured, by a sliding window if there is one."""
    own = [s for s in scores if s["suite"] == "perplexity" and s["length"] <= original_length and s["score"]]
    best = max(own, key=lambda s: (s["length"], s["task"] == "sliding"), default=None)
    return None if best is None else best["score"]


def _table(data: Mapping[str, Any], methods: dict[str, dict[str, Any]]) -> Summary:
    places = list(
        dict.fromkeys(
            (suite, length)
            for found in methods.values()
            for suite, values in found["by_length"].items()
            for length in values
        )
    )
    extra = {"short_perplexity": "short PPL", "perplexity_retention": "kept", "short_retention": "short tasks kept"}
    shown = [name for name in extra if any(found[name] is not None for found in methods.values())]
    rows = []
    for name, found in methods.items():
        row = [label(name)]
        row += [_percent(found["by_length"].get(suite, {}).get(length)) for suite, length in places]
        for key in shown:
            row.append(_number(found[key]) if key == "short_perplexity" else _percent(found[key]))
        rows.append(row)
    suites = ", ".join(dict.fromkeys(SUITES[suite].title for suite, _ in places))
    caption = f"{suites}: share of right answers by length" if suites else ""
    if "short_perplexity" in shown:
        caption += "; short PPL: perplexity of books within the original window; kept: the original's over the method's"
    return Summary(
        title=f"{data['model']}, {_extension(data)} tokens",
        columns=["", *(f"{SUITES[suite].summary} {length_label(int(length))}" for suite, length in places),
                 *(extra[name] for name in shown)],
        rows=rows,
        caption=caption.strip("; "),
        methods=methods,
        note="" if data["recipe"].get("source") else UNTRAINED,
    )  # fmt: skip


def _extension(data: Mapping[str, Any]) -> str:
    lengths = (data["original_length"], data["target_length"])
    return " → ".join(f"{length:,}" for length in lengths if length is not None)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
