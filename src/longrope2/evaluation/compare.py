"""`longrope2 compare`: several evaluations side by side, methods as rows, in the layout of the paper's tables."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from longrope2.console import say, warn
from longrope2.errors import DataError, LongRopeError, MissingExtraError, all_problems, chosen
from longrope2.evaluation.results import AVERAGE, RESULTS
from longrope2.evaluation.suites import SUITES, suites_of
from longrope2.evaluation.table import PERCENT, POINTS, ByName, retention, suite_tables
from longrope2.figures import draw_by_length, draw_heatmaps
from longrope2.files import write_text
from longrope2.intervals import LARGEST_NLL, paired, student
from longrope2.records import ComparedRun, ComparisonRecord, Grid, Measured, RecordError, Results, Values

AnyResults = TypeVar("AnyResults", bound=Results)
AllValues = Mapping[str, Values]
"""By place."""
PLACE = re.compile(r"(?P<suite>[^/]+)/(?P<task>.+)/(?P<length>\d+|None)")
EVALUATE = "give the folder of a finished `longrope2 evaluate`, or evaluate again into that folder"


def compare(places: Sequence[Path | str], *, base: str | None = None, against: str | None = None) -> ComparisonRecord:
    """Read finished evaluations and put them side by side; `base` names the row that retention refers to.

    A place is the folder of an evaluation or its file; NAME=PLACE gives the row another name. With `against`, further
    tables have the difference of each row to that one, question by question.
    """
    runs, listed = {}, []
    for name, folder in map(split_name, places):
        run = _read(folder / RESULTS if folder.is_dir() else folder)
        name = name or run.name
        listed.append(ComparedRun(name=name, folder=str(folder), model=run.model, factors=run.factors, notes=run.notes))
        runs[name] = run
    _refuse_twice([run.name for run in listed])
    base = _base(runs, base)
    by_name = {name: run.scores for name, run in runs.items()}
    differing = _asked_otherwise(runs.values())
    suites = suites_of(score for scores in by_name.values() for score in scores)
    tables = [table for suite in suites for table in suite_tables(suite, by_name, base, differing=differing)]
    apart = {} if against is None else _differences(runs, against)
    for suite in suites_of(score for scores in apart.values() for score in scores):
        tables += suite_tables(suite, apart, None, against)
    remarks = [f"- {run.name}: {note}\n" for run in listed for note in run.notes]
    return ComparisonRecord(
        runs=tuple(listed),
        base=base,
        retention=retention(by_name, base),
        scores=by_name,
        against=against,
        differences=apart,
        grids={name: run.grids for name, run in runs.items() if run.grids},
        tables=tuple(tables),
        markdown="\n".join([table.markdown() for table in tables])
        + ("\nNotes\n\n" + "".join(remarks) if remarks else ""),
    )


def write_comparison(result: ComparisonRecord, output: Path) -> None:
    """Write a comparison as markdown and JSON, and draw its figures."""
    result.save(output / "compare.json")
    write_text(output / "compare.md", result.markdown)
    drawn = draw_figures(result.scores, result.grids, output)
    say(f"wrote {', '.join(['compare.md', 'compare.json', *drawn])} into {output}")


def split_name(place: Path | str) -> tuple[str, Path]:
    """The name given to a run, if any, and where it is; a path that holds = and exists is a path."""
    name, equals, rest = str(place).partition("=")
    return (name, Path(rest)) if equals and not Path(place).exists() else ("", Path(place))


def _read(path: Path) -> Results:
    try:
        found = read_results(Results, path, hint=EVALUATE)
    except FileNotFoundError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", hint=EVALUATE) from error
    if unknown := sorted({score.suite for score in found.scores} - set(SUITES)):
        warn(f"{path}: left out, since this release has no such suite: {', '.join(unknown)}")
    return found


def read_results(kind: type[AnyResults], path: Path, *, hint: str) -> AnyResults:
    """Results as `Record.load` reads them, with all that their suites should have."""
    found = kind.load(path, hint=hint)
    if problems := [*filter(None, map(_gap, found.scores)), *_out_of_range(found.values)]:
        raise RecordError(all_problems(f"{path}: damaged", problems), hint=hint)
    return found


def _gap(score: Measured) -> str | None:
    """A value that only some suites may leave out."""
    if score.length is None and score.suite in SUITES and SUITES[score.suite].every_length:
        return f"a length is missing ({score.place})"
    lacking = None in (score.score, score.low, score.high) and score.metric != "perplexity"
    return f"a score is missing ({score.place})" if lacking else None


def _out_of_range(values: AllValues) -> Iterator[str]:
    for place, found in values.items():
        most = LARGEST_NLL if _is_perplexity(place.partition("/")[0]) else 1
        if any(value is not None and not 0 <= value <= most for value in found.values):
            yield f"values.{place} must lie from 0 to {most}"


def _refuse_twice(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LongRopeError(
            f"several evaluations are named {', '.join(twice)}",
            hint="give each its own: longrope2 compare NAME=FOLDER …",
        )


def _base(runs: Mapping[str, Results], base: str | None) -> str | None:
    if base is not None:
        return chosen("run", [base], runs)[0]
    plain = [name for name, run in runs.items() if run.factors is None]
    return plain[0] if len(plain) == 1 else None


def _differences(runs: Mapping[str, Results], against: str) -> dict[str, tuple[Measured, ...]]:
    """How much more each row has than one of them, on what both were asked."""
    theirs = runs[chosen("run", [against], runs)[0]].values
    found = {name: tuple(differences(run.values, theirs)) for name, run in runs.items() if name != against}
    if not any(found.values()):
        raise LongRopeError(
            f"no other row was asked the questions of {against}, or questions were not recorded",
            hint="evaluate all with the same suites, lengths, samples and seed, by this release",
        )
    for name in (name for name, own in found.items() if not own):
        warn(f"{name} is not compared with {against}: different questions, or questions that were not recorded")
    return found


def _asked_otherwise(runs: Iterable[Results]) -> set[str]:
    """The places, as in `values`, at which rows are not of the same questions or texts."""
    asked = defaultdict(set)
    for run in runs:
        for place, found in run.values.items():
            asked[place].add(found.asked)
    return {place for place, hashes in asked.items() if len(hashes) > 1}


def _is_perplexity(suite: str) -> bool:
    return suite in SUITES and SUITES[suite].is_perplexity


def differences(ours: AllValues, theirs: AllValues) -> list[Measured]:
    """How much more we have than they, wherever both were asked the same."""
    by_window: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(dict)
    for place, found in ours.items():
        named, pairs = PLACE.fullmatch(place), _pairs(found, theirs.get(place))
        if named and pairs:
            by_window[named["suite"], named["length"]][named["task"]] = pairs
    apart: list[Measured] = []
    for (suite, length), tasks in by_window.items():
        window = None if length == "None" else int(length)
        if _is_perplexity(suite):
            apart += [_percent(pairs, suite=suite, task=task, length=window) for task, pairs in tasks.items()]
            continue
        apart += [_points([pairs], suite=suite, task=task, length=window) for task, pairs in tasks.items()]
        if len(tasks) > 1:
            apart.append(_points(list(tasks.values()), suite=suite, task=AVERAGE, length=window))
    return apart


def _pairs(ours: Values, theirs: Values | None) -> list[float]:
    """The difference for each sample; none where the questions were others, or a value is missing."""
    if theirs is None or theirs.asked != ours.asked or len(theirs.values) != len(ours.values):
        return []
    pairs = zip(ours.values, theirs.values, strict=True)
    found = [one - other for one, other in pairs if one is not None and other is not None]
    return found if len(found) == len(ours.values) else []


def _points(tasks: Sequence[Sequence[float]], **place: Any) -> Measured:
    mean, low, high = (100 * value for value in paired(tasks))
    return Measured(metric=POINTS, score=mean, samples=sum(map(len, tasks)), low=low, high=high, **place)


def _percent(logarithms: Sequence[float], **place: Any) -> Measured:
    """Of a ratio of perplexities: the mean over documents of the difference of their logarithms."""
    ends = student(logarithms)
    low, high = (None, None) if ends is None else map(_in_percent, ends)
    mean, samples = _in_percent(sum(logarithms) / len(logarithms)), len(logarithms)
    return Measured(metric=PERCENT, score=mean, samples=samples, low=low, high=high, **place)


def _in_percent(logarithm: float) -> float | None:
    return 100 * math.expm1(logarithm) if logarithm < LARGEST_NLL else None


def draw_figures(scores: ByName, grids: Mapping[str, Mapping[str, Grid]], output: Path) -> list[str]:
    """Draw what there is to draw, methods by name; the names of the files."""
    drawn = []
    try:
        for suite in SUITES.values():
            file = f"{suite.name}.png"
            of_suite = {name: [each for each in own if each.suite == suite.name] for name, own in scores.items()}
            averages = {
                name: own for name, found in of_suite.items() if (own := [s for s in found if s.task == AVERAGE])
            }
            own_grids = {name: own[suite.name] for name, own in grids.items() if suite.name in own}
            if suite.figure and averages:
                draw_by_length(averages, output / file, label=suite.figure)
                drawn.append(file)
            elif suite.has_grid and own_grids:
                draw_heatmaps(own_grids, output / file)
                drawn.append(file)
    except MissingExtraError as error:
        warn(str(error))
    return drawn
