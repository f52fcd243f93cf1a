"""Results as tables: of one evaluation by task, and of several as the paper lays them out, methods as rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrope2.evaluation.paired import PERCENT, POINTS
from longrope2.evaluation.results import AVERAGE
from longrope2.figures import length_label

Score = Mapping[str, Any]
"""One entry of `scores` in results.json."""
# Column heads of the paper.
TITLES = {
    "ruler": "RULER",
    "niah": "Needle in a Haystack",
    "passkey": "Pass key",
    "perplexity": "Perplexity of books",
    "infinitebench": "∞Bench",
    "longbench": "LongBench",
    "loft": "LOFT",
    "short": "Short tasks",
}
HEADS = {
    AVERAGE: "Avg.",
    "kv_retrieval": "KV retrieval",
    "longbook_choice_eng": "En.MC",
    "triviaqa": "TriviaQA",
    "trec": "TREC",
    "lcc": "LCC",
    "repobench-p": "RepoBench-P",
    "arguana": "ArguAna",
    "fever": "FEVER",
    "hotpotqa": "HotPotQA",
    "msmarco": "MS MARCO",
    "nq": "NQ",
    "quora": "Quora",
    "scifact": "SciFact",
    "mmlu": "MMLU",
    "mmlu_pro": "MMLU-Pro",
    "hellaswag": "HellaSwag",
    "truthfulqa_mc2": "TruthfulQA",
    "gsm8k": "GSM8K",
}
CAPTION = "percent with 95% intervals"
PLACES = {"perplexity": 3, PERCENT: 2}


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a table is, before it is shown or written."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""

    def markdown(self) -> str:
        """As text with pipes."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        table = "\n".join(f"| {' | '.join(map(_in_a_cell, cells))} |" for cells in lines)
        return f"**{self.title}**\n\n{table}\n" + (f"\n{self.caption}\n" if self.caption else "")


def _in_a_cell(text: str) -> str:
    """A name may hold what markdown ends a cell or a row at."""
    return " ".join(text.replace("|", "\\|").split("\n"))


def cell(score: Score | None) -> str:
    """A number with its interval."""
    if score is None:
        return "-"
    places = PLACES.get(score["metric"], 1)
    sign = "+" if score["metric"] in (POINTS, PERCENT) else ""
    value = "overflow" if score["score"] is None else f"{score['score']:{sign}.{places}f}"
    if score["low"] is None or score["high"] is None:
        return value
    to = " to " if sign else "–"  # a dash would read as a minus
    return f"{value} ({score['low']:{sign}.{places}f}{to}{score['high']:{sign}.{places}f})"


def suites_of(scores: Iterable[Score]) -> list[str]:
    """The suites, in the order of TITLES."""
    present = {score["suite"] for score in scores}
    return [suite for suite in TITLES if suite in present]


def run_tables(scores: Sequence[Score]) -> list[Table]:
    """One evaluation: tasks as rows, lengths as columns."""
    tables = []
    for suite in suites_of(scores):
        own = [score for score in scores if score["suite"] == suite]
        lengths = sorted({score["length"] for score in own if score["length"] is not None})
        heads = [length_label(length) for length in lengths] or ["score"]
        rows = []
        for task in dict.fromkeys(score["task"] for score in own):
            found = {score["length"]: score for score in own if score["task"] == task}
            cells = [cell(found.get(length)) for length in (lengths or [None])]
            rows.append([HEADS.get(task, task), _counts(found.values()), *cells])
        caption = "95% intervals" if suite == "perplexity" else CAPTION
        tables.append(Table(title=TITLES[suite], columns=["task", "samples", *heads], rows=rows, caption=caption))
    return tables


def _counts(scores: Iterable[Score]) -> str:
    counts = sorted({score["samples"] for score in scores})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
