"""`longrope2 compare --leaderboard`: for each base and length methods by measures, and how sure their order is.

Rows that differ only in the seed of their training are one line, whose scores are means over seeds. Two lines are
compared question by question, each question by its mean over seeds. So p-values say how sure an order is on other
questions; what another training would change is shown by the spread between seeds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean

from longrope2.errors import DataError, LongRopeError, chosen
from longrope2.evaluation.compare import EVALUATE, read_results, split_name
from longrope2.evaluation.results import AVERAGE, RESULTS
from longrope2.evaluation.suite import Suite
from longrope2.evaluation.suites import SUITES, suites_of
from longrope2.evaluation.table import retention
from longrope2.figures import length_label
from longrope2.files import write_text
from longrope2.intervals import holm, paired, paired_p, rank_correlation, student, student_p
from longrope2.records import (
    Leaderboard,
    LeaderboardRecord,
    LeaderboardRow,
    PairedDifference,
    RankCorrelation,
    Standing,
    Table,
    Values,
)

SIGNIFICANT = 0.05
TIED, UNKNOWN = " ≈", " †"
REFERENCE = "ruler"
"""What every other measure is ranked against."""
WITHIN_REACH = 20.0
"""Percent that the original must have in a task of RULER, in its own window, for the second average."""
Apart = tuple[float, float, float, float]
"""A difference, the ends of its 95% interval, and its p-value."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A column."""

    title: str
    suite: str
    length: int | None
    tasks: tuple[str, ...]
    """Each counts the same."""

    @property
    def is_perplexity(self) -> bool:
        """Whether lower is better, and differences are of logarithms."""
        return SUITES[self.suite].is_perplexity

    def of(self, run: LeaderboardRow) -> float | None:
        """The score of a run; None where it lacks a task."""
        found = {each.task: each.score for each in run.scores if (each.suite, each.length) == (self.suite, self.length)}
        scores = [score for task in self.tasks if (score := found.get(task)) is not None]
        return sum(scores) / len(scores) if len(scores) == len(self.tasks) else None

    def better(self, score: float) -> float:
        """A number that is larger for the better of two scores."""
        return -score if self.is_perplexity else score


@dataclass(frozen=True)
class Line:
    """A method, in as many seeds as there are."""

    name: str
    runs: tuple[LeaderboardRow, ...]

    @cached_property
    def values(self) -> dict[str, Values]:
        """Of each place at which all seeds were asked the same, the mean over seeds of each question's value."""
        found = {}
        for place, first in self.runs[0].values.items():
            seeds = [run.values.get(place) for run in self.runs]
            same = [values for values in seeds if values is not None and values.asked == first.asked]
            if len(same) == len(self.runs):
                rows = zip(*(values.values for values in same), strict=True)
                found[place] = Values(asked=first.asked, values=tuple(_mean(row) for row in rows))
        return found

    def scores(self, measure: Measure) -> tuple[float, ...]:
        """One for each seed that has the measure."""
        return tuple(score for run in self.runs if (score := measure.of(run)) is not None)

    def pairs(self, other: "Line", measure: Measure) -> list[list[float]] | None:
        """By task, the difference in each question; None where the questions were others, or an answer is missing."""
        tasks = []
        for task in measure.tasks:
            place = f"{measure.suite}/{task}/{measure.length}"
            ours, theirs = self.values.get(place), other.values.get(place)
            if ours is None or theirs is None or ours.asked != theirs.asked:
                return None
            both = zip(ours.values, theirs.values, strict=True)
            pairs = [one - two for one, two in both if one is not None and two is not None]
            if len(pairs) < len(ours.values):
                return None
            tasks.append(pairs)
        return tasks


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def compared(one: Line, other: Line, measure: Measure) -> Apart | None:
    """How much more one line has than another: points, or percent of a perplexity; None where nothing can be paired."""
    tasks = one.pairs(other, measure)
    if tasks is None:
        return None
    if not measure.is_perplexity:
        mean, low, high = (100 * value for value in paired(tasks))
        return mean, low, high, paired_p(tasks)
    (logarithms,) = tasks
    ends, p = student(logarithms), student_p(logarithms)
    if ends is None or p is None:
        return None
    mean, low, high = (100 * math.expm1(value) for value in (sum(logarithms) / len(logarithms), *ends))
    return mean, low, high, p


def leaderboards(places: Sequence[Path | str], *, against: str | None = None) -> LeaderboardRecord:
    """A table for each leaderboard that the rows belong to, and each length that it was measured at, longest first.

    A place is a row's file, the folder of an evaluation, or a folder of rows' files. With `against`, further tables
    have the differences from the line of that name.
    """
    boards, tables = [], []
    by_table = _grouped(places)
    if against is not None and not any(line.name == against for lines in by_table.values() for line in lines):
        chosen("run", [against], sorted({line.name for lines in by_table.values() for line in lines}))
    for table, lines in by_table.items():
        reference = next((line for line in lines if line.name == against), None)
        for length in _lengths(lines):
            measures = _measures(lines, length)
            board = _board(table, lines, length, measures, reference)
            boards.append(board)
            tables += _tables(board, measures, against)
    return LeaderboardRecord(
        against=against,
        boards=tuple(boards),
        tables=tuple(tables),
        markdown="\n".join(table.markdown() for table in tables),
    )


def write_leaderboards(result: LeaderboardRecord, output: Path) -> None:
    """Write leaderboards as markdown and JSON."""
    result.save(output / "leaderboard.json")
    write_text(output / "leaderboard.md", result.markdown)


def _grouped(places: Sequence[Path | str]) -> dict[str, list[Line]]:
    """Lines by leaderboard, in the order of the rows."""
    found: dict[str, dict[str, list[LeaderboardRow]]] = defaultdict(lambda: defaultdict(list))
    for name, place in map(split_name, places):
        for path in _files(place):
            row = read_results(LeaderboardRow, path, hint=EVALUATE)
            found[row.table or _table_of(row)][name or row.name].append(row)
    for table, lines in found.items():
        for name, runs in lines.items():
            if len({run.seed for run in runs}) < len(runs):
                raise LongRopeError(
                    f"{table}: several rows named {name} have the same seed",
                    hint="give each its own name: longrope2 compare --leaderboard NAME=FILE …",
                )
    return {table: [Line(name, tuple(runs)) for name, runs in lines.items()] for table, lines in found.items()}


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        if not place.exists():
            raise DataError(f"{place}: no such file or folder", hint=EVALUATE)
        return [place]
    if (place / RESULTS).exists():
        return [place / RESULTS]
    if rows := sorted(place.glob("*.json")):
        return rows
    raise DataError(f"{place}: holds no rows", hint=EVALUATE)


def _table_of(row: LeaderboardRow) -> str:
    target = (row.factors or {}).get("target_length")
    return f"{row.model}, {length_label(target)}" if isinstance(target, int) else row.model


def _lengths(lines: Iterable[Line]) -> list[int]:
    found = {score.length for line in lines for run in line.runs for score in run.scores if score.length is not None}
    return sorted(found, reverse=True)


def _original(lines: Iterable[Line]) -> Line | None:
    """The model as it is, if it is among them."""
    plain = [line for line in lines if line.runs[0].factors is None]
    return plain[0] if len(plain) == 1 else None


def _measures(lines: Sequence[Line], length: int) -> list[Measure]:
    """The columns at a length; what has no length of its own stands in the table of the longest."""
    found = []
    longest = length == _lengths(lines)[0]
    for suite in suites_of(score for line in lines for run in line.runs for score in run.scores):
        own = [score for line in lines for run in line.runs for score in run.scores if score.suite == suite.name]
        for place in [length, *([None] if longest else [])]:
            tasks = tuple(dict.fromkeys(s.task for s in own if s.length == place and s.task != AVERAGE))
            if not tasks:
                continue
            if suite.is_perplexity or suite.is_retention:
                found += [_measure(suite, place, (task,), _title(suite, task)) for task in tasks]
            else:
                found.append(_measure(suite, place, tasks, suite.title))
                reached = _within_reach(lines, tasks) if suite.name == REFERENCE else ()
                if reached and reached != tasks:
                    title = f"{suite.title}, {len(reached)} of {len(tasks)} tasks"
                    found.append(_measure(suite, place, reached, title))
    return found


def _measure(suite: Suite, length: int | None, tasks: tuple[str, ...], title: str) -> Measure:
    return Measure(title=title, suite=suite.name, length=length, tasks=tasks)


def _title(suite: Suite, task: str) -> str:
    if not suite.is_perplexity:
        return suite.heads.get(task, task)
    return f"{suite.title}, {task} windows" if len(suite.tasks) > 1 else suite.title


def _within_reach(lines: Sequence[Line], tasks: Iterable[str]) -> tuple[str, ...]:
    """The tasks of RULER that the original can do at the longest length within its window."""
    original = _original(lines)
    windows = {(run.factors or {}).get("original_length") for line in lines for run in line.runs if run.factors}
    if original is None or len(windows) != 1:
        return ()
    window = windows.pop()
    own = [score for run in original.runs for score in run.scores if score.suite == REFERENCE]
    longest = max((s.length for s in own if s.length is not None and s.length <= (window or 0)), default=None)
    able = {s.task for s in own if s.length == longest and (s.score or 0) > WITHIN_REACH}
    return tuple(task for task in tasks if task in able) if longest else ()


def _board(
    table: str, lines: Sequence[Line], length: int, measures: Sequence[Measure], reference: Line | None
) -> Leaderboard:
    """The original first, then lines by their mean rank over the measures that they have."""
    original = _original(lines)
    found: dict[str, dict[str, Standing]] = {line.name: {} for line in lines}
    ranks: dict[str, list[int]] = {line.name: [] for line in lines}
    for measure in measures:
        ranked = _ranked(lines, measure)
        scores = [measure.better(standing.score) for standing in ranked.values()]
        for name, standing in ranked.items():
            found[name][measure.title] = standing
            ranks[name].append(sum(score > measure.better(standing.score) for score in scores))
    lines = sorted(lines, key=lambda line: (line is not original, fmean(ranks[line.name] or [math.inf])))
    standings = {line.name: found[line.name] for line in lines}
    short = any(SUITES[measure.suite].is_retention for measure in measures)
    return Leaderboard(
        table=table,
        model=lines[0].runs[0].model,
        length=length,
        standings=standings,
        retention=_retention(lines, original) if short and original else {},
        differences={} if reference is None else _differences(lines, measures, reference),
        correlations=_correlations([line for line in lines if line is not original], measures),
    )


def _retention(lines: Sequence[Line], original: Line) -> dict[str, float]:
    """Of the original's short scores, in percent: the mean over seeds."""
    found = {}
    for line in lines:
        both = ({"": original.runs[0].scores, line.name: run.scores} for run in line.runs)
        kept = [own[line.name] for each in both if line.name in (own := retention(each, ""))]
        if kept:
            found[line.name] = sum(kept) / len(kept)
    return found


def _ranked(lines: Sequence[Line], measure: Measure) -> dict[str, Standing]:
    """Where each line stands: the best, and those that it does not beat, with Holm's correction over all pairs."""
    scores = {line.name: found for line in lines if (found := line.scores(measure))}
    if not scores:
        return {}
    means = {name: sum(found) / len(found) for name, found in scores.items()}
    best = max(means, key=lambda name: measure.better(means[name]))
    known = [line for line in lines if line.name in scores]
    apart = {
        frozenset((one.name, other.name)): difference[3]
        for one, other in combinations(known, 2)
        if (difference := compared(one, other, measure)) is not None
    }
    corrected = dict(zip(apart, holm(list(apart.values())), strict=True))
    standings = {}
    for name, mean in means.items():
        p = corrected.get(frozenset((name, best)))
        tied = None if p is None and name != best else name != best and (p or 0) >= SIGNIFICANT
        standings[name] = Standing(score=mean, seeds=scores[name], best=mean == means[best], tied=tied)
    return standings


def _differences(
    lines: Sequence[Line], measures: Sequence[Measure], reference: Line
) -> dict[str, dict[str, PairedDifference]]:
    """From one line, with Holm's correction over all of them."""
    cells = [
        (line.name, measure.title, found)
        for line in lines
        if line is not reference
        for measure in measures
        if (found := compared(line, reference, measure)) is not None
    ]
    corrected = holm([found[3] for *_, found in cells])
    apart: dict[str, dict[str, PairedDifference]] = {}
    for (name, title, (score, low, high, p)), corrected_p in zip(cells, corrected, strict=True):
        difference = PairedDifference(score=score, low=low, high=high, p=p, corrected_p=corrected_p)
        apart.setdefault(name, {})[title] = difference
    return apart


def _correlations(lines: Sequence[Line], measures: Sequence[Measure]) -> dict[str, RankCorrelation]:
    """Of every measure with RULER, over the lines that have both."""
    reference = next((measure for measure in measures if measure.suite == REFERENCE), None)
    if reference is None:
        return {}
    found = {}
    for measure in (measure for measure in measures if measure.suite != REFERENCE):
        both = [(line.scores(measure), line.scores(reference)) for line in lines]
        pairs = [(_mean(one), _mean(two)) for one, two in both if one and two]
        known = [(measure.better(one), two) for one, two in pairs if one is not None and two is not None]
        ranked = rank_correlation([one for one, _ in known], [two for _, two in known])
        if ranked is not None:
            spearman, p, low, high = ranked
            found[measure.title] = RankCorrelation(rows=len(known), spearman=spearman, p=p, low=low, high=high)
    return found


def _tables(board: Leaderboard, measures: Sequence[Measure], against: str | None) -> list[Table]:
    """As people read it."""
    head = f"{board.table}, measured at {length_label(board.length)}"
    titles = [measure.title for measure in measures]
    places = {measure.title: 3 if measure.is_perplexity else 1 for measure in measures}
    rows = [
        [
            name,
            *(_cell(own.get(title), places[title]) for title in titles),
            *([f"{board.retention[name]:.1f}" if name in board.retention else "-"] if board.retention else []),
        ]
        for name, own in board.standings.items()
    ]
    marks = {
        "**": "bold: the best",
        TIED: "≈: the best is not significantly better, question by question (p ≥ 0.05 after Holm's correction over "
        "all pairs of the column)",
        UNKNOWN: "†: not asked the questions of the best",
        "±": "±: half the range between seeds of training",
    }
    shown = "".join(text for row in rows for text in row[1:])
    lower = [title for title, number in places.items() if number == 3]
    captions = ["ordered by the mean rank over all measures"] if len(rows) > 2 else []
    captions += [text for mark, text in marks.items() if mark in shown]
    captions += [f"lower is better: {', '.join(lower)}"] if lower else []
    columns = ["Method", *titles, *(["Retention"] if board.retention else [])]
    tables = [Table(title=head, columns=columns, rows=rows, caption="; ".join(captions))]
    if board.differences:
        tables.append(
            Table(
                title=f"{head}, against {against}",
                columns=["Method", *titles],
                rows=[
                    [name, *(_difference(own.get(title)) for title in titles)]
                    for name, own in board.differences.items()
                ],
                caption="points more (percent more of a perplexity), question by question; p after Holm's correction "
                "over all cells of this table; bold: p < 0.05",
            )
        )
    if board.correlations:
        tables.append(
            Table(
                title=f"{head}, which measures order the methods as RULER does",
                columns=["Measure", "methods", "Spearman", "95% interval", "p"],
                rows=[
                    [title, str(c.rows), f"{c.spearman:+.2f}", f"{c.low:+.2f} to {c.high:+.2f}", f"{c.p:.2g}"]
                    for title, c in board.correlations.items()
                ],
                caption="rank correlation over methods, without the original; +1: the same order, better for better",
            )
        )
    return tables


def _cell(standing: Standing | None, places: int) -> str:
    if standing is None:
        return "-"
    text = f"{standing.score:.{places}f}"
    if len(standing.seeds) > 1:
        text += f" ±{(max(standing.seeds) - min(standing.seeds)) / 2:.{places}f}"
    if standing.best:
        return f"**{text}**"
    return text + (UNKNOWN if standing.tied is None else TIED if standing.tied else "")


def _difference(found: PairedDifference | None) -> str:
    if found is None:
        return "-"
    p = "p < 0.001" if found.corrected_p < 0.001 else f"p {found.corrected_p:.3f}"
    text = f"{found.score:+.1f}, {p}"
    return f"**{text}**" if found.corrected_p < SIGNIFICANT else text
