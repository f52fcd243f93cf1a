"""Results as tables: of one evaluation by task, and of several as the paper lays them out, methods as rows."""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain

from longrope2.evaluation.results import AVERAGE
from longrope2.evaluation.suite import Suite
from longrope2.evaluation.suites import SUITES, suites_of
from longrope2.figures import length_label
from longrope2.records import Measured, Table

ByName = Mapping[str, Sequence[Measured]]
"""Scores of each method."""
POINTS, PERCENT = "points more", "percent more"
"""The metrics of a difference: of two scores, and of two perplexities."""
PLACES = {"perplexity": 3, PERCENT: 2}
MOST_LISTED = 3
"""Tasks that a caption names before it only counts them."""


def cell(score: Measured | None) -> str:
    """A number with its interval."""
    if score is None:
        return "-"
    places = PLACES.get(score.metric, 1)
    sign = "+" if score.metric in (POINTS, PERCENT) else ""
    value = "overflow" if score.score is None else f"{score.score:{sign}.{places}f}"
    if score.low is None or score.high is None:
        return value
    to = " to " if sign else "–"  # a dash would read as a minus
    return f"{value} ({score.low:{sign}.{places}f}{to}{score.high:{sign}.{places}f})"


def run_tables(name: str, scores: Sequence[Measured]) -> list[Table]:
    """One evaluation, of that name: tasks as rows, lengths as columns."""
    tables = []
    for suite in suites_of(scores):
        own = [score for score in scores if score.suite == suite.name]
        lengths = _lengths(own)
        heads = [length_label(length) for length in lengths] or ["score"]
        rows = []
        for task in dict.fromkeys(score.task for score in own):
            found = {score.length: score for score in own if score.task == task}
            cells = [cell(found.get(length)) for length in lengths] or [cell(found[None])]
            rows.append([_head(suite, task), _counts(found.values()), *cells])
        columns = ["task", "samples", *heads]
        tables.append(Table(title=f"{name}: {suite.title}", columns=columns, rows=rows, caption=_unit(suite)))
    return tables


def _lengths(scores: Iterable[Measured]) -> list[int]:
    return sorted({score.length for score in scores if score.length is not None})


def _counts(scores: Iterable[Measured], to: str = "–") -> str:
    counts = sorted({score.samples for score in scores})
    return to.join(map(str, dict.fromkeys((counts[0], counts[-1]))))


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
) -> list[Table]:
    """Of scores; with `against` of differences to the row of that name. `differing`: where rows differ in questions."""
    own = {name: [score for score in scores if score.suite == suite.name] for name, scores in by_name.items()}
    own = {name: scores for name, scores in own.items() if scores}
    title, caption, suffix = suite.title, _unit(suite), ""
    if against is not None:
        unit = "percent" if suite.is_perplexity else "points"
        caption = f"{unit} more than {against}, question by question, with 95% intervals"
        suffix = f", against {against}"
    if suite.is_perplexity:
        tasks = dict.fromkeys(score.task for scores in own.values() for score in scores)
        return [
            _by_length(
                f"{title}, {task} windows{suffix}" if len(suite.tasks) > 1 else title + suffix,
                own,
                task,
                caption,
                _other_texts(suite, task, own, differing),
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


def _kept(scores: Sequence[Measured]) -> dict[str, float]:
    keeping = [suite.name for suite in SUITES.values() if suite.is_retention]
    return {s.task: s.percent.score for s in scores if s.suite in keeping and s.task != AVERAGE}


def _by_length(title: str, own: ByName, task: str | None, caption: str, remark: str) -> Table:
    """A row for each method, a column for each length."""
    lengths = _lengths(chain(*own.values()))
    rows: list[list[str]] = []
    shown: list[Measured] = []
    for name, scores in own.items():
        found = overall(scores, task)
        shown += found.values()
        rows.append([name, *(cell(found.get(length)) for length in lengths)])
    columns = ["Method", *map(length_label, lengths)]
    return Table(title=title, columns=columns, rows=rows, caption=_caption(caption, shown) + remark)


def overall(scores: Iterable[Measured], task: str | None = None) -> dict[int | None, Measured]:
    """The score of a task by length; without a task the average, or the first there is."""
    found: dict[int | None, Measured] = {}
    for score in scores:
        if score.task == (AVERAGE if task is None else task) or (task is None and score.length not in found):
            found[score.length] = score
    return found


def _by_task(suite: Suite, title: str, own: ByName, base: str | None, caption: str) -> Table:
    """A row for each method, a column for each task, the average first."""
    tasks = list(dict.fromkeys(score.task for scores in own.values() for score in scores))
    tasks.sort(key=lambda task: task != AVERAGE)
    kept = retention(own, base) if base in own else {}
    rows = []
    for name, scores in own.items():
        found = {score.task: score for score in scores}
        row = [name, *(cell(found.get(task)) for task in tasks)]
        rows.append([*row, f"{kept[name]:.1f}%" if name in kept else "-"] if kept else row)
    averaged = {name: scores for name, scores in own.items() if any(score.task == AVERAGE for score in scores)}
    return Table(
        title=title,
        columns=["Method", *(_head(suite, task) for task in tasks), *(["Retention"] if kept else [])],
        rows=rows,
        caption=_caption(caption, [score for scores in own.values() for score in scores]) + _other_tasks(averaged),
    )


def _caption(caption: str, scores: Iterable[Measured]) -> str:
    return f"{caption}; samples in a number: {_counts(scores, ' to ')}"


def _other_tasks(own: ByName) -> str:
    """What must be said where the numbers of a column stand for different tasks."""
    tasks = {name: sorted({s.task for s in scores if s.task != AVERAGE}) for name, scores in own.items()}
    if len({tuple(found) for found in tasks.values()}) < 2:
        return ""
    listed = (f"{name}: {', '.join(t) if len(t) <= MOST_LISTED else f'{len(t)} tasks'}" for name, t in tasks.items())
    return f"; rows are not of the same tasks ({'; '.join(listed)})"


def _other_texts(suite: Suite, task: str, own: ByName, differing: Container[str]) -> str:
    """What must be said of perplexities: the longest length of a row decides on its books, and how far they slide."""
    lengths = _lengths(chain(*own.values()))
    found = [length_label(length) for length in lengths if f"{suite.name}/{task}/{length}" in differing]
    return f"; rows are not of the same texts at {', '.join(found)}" if found else ""
