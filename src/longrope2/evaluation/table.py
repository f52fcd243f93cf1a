"""Results as tables: of one evaluation by task, and of several as the paper lays them out, methods as rows."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from longrope2.console import ConsoleTable
from longrope2.evaluation.results import AVERAGE
from longrope2.evaluation.suite import Suite
from longrope2.evaluation.suites import SUITES, suites_of
from longrope2.figures import length_label

ScoreRow = Mapping[str, Any]
"""One entry of `scores` in results.json."""
ByName = Mapping[str, Sequence[ScoreRow]]
"""Scores of each method."""
POINTS, PERCENT = "points more", "percent more"
"""The metrics of a difference: of two scores, and of two perplexities."""
PLACES = {"perplexity": 3, PERCENT: 2}
MOST_LISTED = 3
"""Tasks that a caption names before it only counts them."""


def markdown(table: ConsoleTable) -> str:
    """A table as text with pipes."""
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    text = "\n".join(f"| {' | '.join(map(_in_a_cell, cells))} |" for cells in lines)
    return f"**{table.title}**\n\n{text}\n" + (f"\n{table.caption}\n" if table.caption else "")


def _in_a_cell(text: str) -> str:
    """A name may hold what markdown ends a cell or a row at."""
    return " ".join(text.replace("|", "\\|").split("\n"))


def cell(score: ScoreRow | None) -> str:
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


def run_tables(name: str, scores: Sequence[ScoreRow]) -> list[ConsoleTable]:
    """One evaluation, of that name: tasks as rows, lengths as columns."""
    tables = []
    for suite in suites_of(scores):
        own = [score for score in scores if score["suite"] == suite.name]
        lengths = sorted({score["length"] for score in own if score["length"] is not None})
        heads = [length_label(length) for length in lengths] or ["score"]
        rows = []
        for task in dict.fromkeys(score["task"] for score in own):
            found = {score["length"]: score for score in own if score["task"] == task}
            cells = [cell(found.get(length)) for length in (lengths or [None])]
            rows.append([_head(suite, task), _counts(found.values()), *cells])
        columns = ["task", "samples", *heads]
        tables.append(ConsoleTable(f"{name}: {suite.title}", columns, rows, _unit(suite)))
    return tables


def _counts(scores: Iterable[ScoreRow]) -> str:
    counts = sorted({score["samples"] for score in scores})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"


def _head(suite: Suite, task: str) -> str:
    return "Avg." if task == AVERAGE else suite.heads.get(task, task)


def _unit(suite: Suite) -> str:
    return "95% intervals" if suite.is_perplexity else "percent with 95% intervals"


def suite_tables(
    suite: Suite,
    by_name: ByName,
    base: str | None,
    against: str | None = None,
    *,
    differing: Container[str] = (),
) -> list[ConsoleTable]:
    """Of scores; with `against` of differences to the row of that name. `differing`: where rows differ in questions."""
    own = {name: [score for score in scores if score["suite"] == suite.name] for name, scores in by_name.items()}
    own = {name: scores for name, scores in own.items() if scores}
    title, caption, suffix = suite.title, _unit(suite), ""
    if against is not None:
        unit = "percent" if suite.is_perplexity else "points"
        caption = f"{unit} more than {against}, question by question, with 95% intervals"
        suffix = f", against {against}"
    if suite.is_perplexity:
        tasks = dict.fromkeys(score["task"] for scores in own.values() for score in scores)
        return [
            _by_length(
                f"{title}, {task} windows{suffix}", own, task, caption, _other_texts(suite, task, own, differing)
            )
            for task in tasks
        ]
    if suite.every_length:
        return [_by_length(title + suffix, own, None, caption, _other_tasks(own))]
    return [_by_task(suite, title + suffix, own, base if suite.is_retention else None, caption)]


def retention(by_name: ByName, base: str | None) -> dict[str, float]:
    """Mean short score over the base model's, in percent, on the tasks that both have."""
    if base is None:
        return {}
    originals = _kept(by_name[base])
    found = {}
    for name, scores in by_name.items():
        common = {task: score for task, score in _kept(scores).items() if task in originals}
        whole = sum(originals[task] for task in common)
        if whole:  # of a model that has nothing right, nothing can be kept
            found[name] = 100 * sum(common.values()) / whole
    return found


def _kept(scores: Sequence[ScoreRow]) -> dict[str, float]:
    keeping = [suite.name for suite in SUITES.values() if suite.is_retention]
    return {s["task"]: s["score"] for s in scores if s["suite"] in keeping and s["task"] != AVERAGE}


def _by_length(title: str, own: ByName, task: str | None, caption: str, remark: str) -> ConsoleTable:
    """A row for each method, a column for each length."""
    lengths = sorted({score["length"] for scores in own.values() for score in scores})
    rows: list[list[str]] = []
    shown: list[ScoreRow] = []
    for name, scores in own.items():
        found = [_overall([s for s in scores if s["length"] == length], task) for length in lengths]
        shown += [score for score in found if score is not None]
        rows.append([name, *map(cell, found)])
    columns = ["Method", *map(length_label, lengths)]
    return ConsoleTable(title, columns, rows, _caption(caption, shown) + remark)


def _overall(scores: Sequence[ScoreRow], task: str | None) -> ScoreRow | None:
    """The score of a task; without one the average, or the only task there is."""
    wanted = [score for score in scores if score["task"] == (AVERAGE if task is None else task)]
    return wanted[0] if wanted else (scores[0] if scores and task is None else None)


def _by_task(suite: Suite, title: str, own: ByName, base: str | None, caption: str) -> ConsoleTable:
    """A row for each method, a column for each task, the average first."""
    tasks = list(dict.fromkeys(score["task"] for scores in own.values() for score in scores))
    tasks.sort(key=lambda task: task != AVERAGE)
    kept = retention(own, base) if base in own else {}
    rows = []
    for name, scores in own.items():
        found = {score["task"]: score for score in scores}
        row = [name, *(cell(found.get(task)) for task in tasks)]
        rows.append([*row, f"{kept[name]:.1f}%" if name in kept else "-"] if kept else row)
    averaged = {name: scores for name, scores in own.items() if any(score["task"] == AVERAGE for score in scores)}
    return ConsoleTable(
        title=title,
        columns=["Method", *(_head(suite, task) for task in tasks), *(["Retention"] if kept else [])],
        rows=rows,
        caption=_caption(caption, [score for scores in own.values() for score in scores]) + _other_tasks(averaged),
    )


def _caption(caption: str, scores: Sequence[ScoreRow]) -> str:
    counts = sorted({score["samples"] for score in scores})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{caption}; samples in a number: {samples}"


def _other_tasks(own: ByName) -> str:
    """What must be said where the numbers of a column stand for different tasks."""
    tasks = {name: sorted({s["task"] for s in scores if s["task"] != AVERAGE}) for name, scores in own.items()}
    if len({tuple(found) for found in tasks.values()}) < 2:
        return ""
    listed = (f"{name}: {', '.join(t) if len(t) <= MOST_LISTED else f'{len(t)} tasks'}" for name, t in tasks.items())
    return f"; rows are not of the same tasks ({'; '.join(listed)})"


def _other_texts(suite: Suite, task: str, own: ByName, differing: Container[str]) -> str:
    """What must be said of perplexities: the longest length of a row decides on its books, and how far they slide."""
    lengths = sorted({score["length"] for scores in own.values() for score in scores})
    found = [length_label(length) for length in lengths if f"{suite.name}/{task}/{length}" in differing]
    return f"; rows are not of the same texts at {', '.join(found)}" if found else ""
