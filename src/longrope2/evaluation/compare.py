"""`longrope2 compare`: several evaluations side by side, methods as rows, in the layout of the paper's tables."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longrope2.console import say, warn
from longrope2.errors import DataError, LongRopeError, MissingExtraError, chosen
from longrope2.evaluation.results import AVERAGE, RESULTS, SCORE, Measured, grid_misfit
from longrope2.evaluation.suites import SUITES, suites_of
from longrope2.evaluation.table import PERCENT, POINTS, ByName, ScoreRow, markdown, retention, suite_tables
from longrope2.figures import draw_by_length, draw_heatmaps
from longrope2.files import write_json, write_text
from longrope2.intervals import LARGEST_NLL, paired, student
from longrope2.shapes import misfit

RUN = {"name": str, "model": str, "factors": dict | None, "notes": [str], "scores": [SCORE], "grids": dict}
"""What is read of it."""
VALUES = {...: {"asked": str, "values": [float | None]}}
"""The shape of `values` in results.json, by suite/task/length: see `Values`."""
AllValues = Mapping[str, Mapping[str, Any]]
"""`values` of results.json."""
PLACE = re.compile(r"(?P<suite>[^/]+)/(?P<task>.+)/(?P<length>\d+|None)")


def compare(places: Sequence[Path | str], *, base: str | None = None, against: str | None = None) -> dict[str, Any]:
    """Read finished evaluations and put them side by side; `base` names the row that retention refers to.

    A place is the folder of an evaluation or its file; NAME=PLACE gives the row another name. With `against`, further
    tables have the difference of each row to that one, question by question.
    """
    labelled = [_split(place) for place in places]
    runs = [_read(folder) | ({"name": label} if label else {}) for label, folder in labelled]
    names = _names(runs)
    base = _base(runs, names, base)
    by_name = {name: run["scores"] for name, run in zip(names, runs, strict=True)}
    differing = _asked_otherwise(runs)
    suites = suites_of(score for scores in by_name.values() for score in scores)
    tables = [table for suite in suites for table in suite_tables(suite, by_name, base, differing=differing)]
    apart = {} if against is None else _differences(runs, names, against)
    for suite in suites_of(score for scores in apart.values() for score in scores):
        tables += suite_tables(suite, apart, None, against)
    return {
        "runs": [
            {"name": name, "folder": str(folder), **{key: run[key] for key in ("model", "factors", "notes")}}
            for name, (_, folder), run in zip(names, labelled, runs, strict=True)
        ],
        "base": base,
        "retention": retention(by_name, base),
        "scores": by_name,
        "against": against,
        "differences": apart,
        "grids": {name: run["grids"] for name, run in zip(names, runs, strict=True) if run["grids"]},
        "tables": [asdict(table) for table in tables],
        "markdown": "\n".join(map(markdown, tables)) + _remarks(names, runs),
    }


def write_comparison(result: Mapping[str, Any], output: Path) -> None:
    """Write a comparison as markdown and JSON, and draw its figures."""
    write_json(output / "compare.json", result)
    write_text(output / "compare.md", result["markdown"])
    drawn = draw_figures(result["scores"], result["grids"], output)
    say(f"wrote {', '.join(['compare.md', 'compare.json', *drawn])} into {output}")


def _split(place: Path | str) -> tuple[str, Path]:
    """The name given to a run, if any, and where it is; a path that holds = and exists is a path."""
    name, equals, rest = str(place).partition("=")
    return (name, Path(rest)) if equals and not Path(place).exists() else ("", Path(place))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RESULTS if folder.is_dir() else folder
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        unknown = _check(result)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror})", hint="give the folder of a finished `longrope2 evaluate`"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path}: not the results of an evaluation ({error})", hint="evaluate again into that folder"
        ) from error
    if unknown:
        warn(f"{path}: left out, since this release has no such suite: {', '.join(unknown)}")
    return result


def _check(result: Any) -> list[str]:
    """Raise ValueError for anything but the results of an evaluation; returns the names of unknown suites."""
    problems = [misfit(result, RUN)]
    if problems == [None]:
        problems += [grid_misfit(grid) for grid in result["grids"].values()]
        problems.append(_values_misfit(result.setdefault("values", {})))  # which older releases did not write
        problems += [_gap(score) for score in result["scores"]]
    if found := next(filter(None, problems), None):
        raise ValueError(found)
    return sorted({score["suite"] for score in result["scores"]} - set(SUITES))


def _gap(score: ScoreRow) -> str | None:
    """A value that only some suites may leave out."""
    if score["length"] is None and score["suite"] in SUITES and SUITES[score["suite"]].every_length:
        return "a length is missing"
    overflows = score["metric"] == "perplexity"
    return "a score is missing" if score["score"] is None and not overflows else None


def _names(runs: Sequence[dict[str, Any]]) -> list[str]:
    names = [str(run["name"]) for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LongRopeError(
            f"several evaluations are named {', '.join(twice)}",
            hint="give each its own: longrope2 compare NAME=FOLDER …",
        )
    return names


def _base(runs: Sequence[dict[str, Any]], names: Sequence[str], base: str | None) -> str | None:
    if base is not None:
        return chosen("run", [base], names)[0]
    plain = [name for name, run in zip(names, runs, strict=True) if run["factors"] is None]
    return plain[0] if len(plain) == 1 else None


def _differences(runs: Sequence[dict[str, Any]], names: Sequence[str], against: str) -> dict[str, Sequence[ScoreRow]]:
    """How much more each row has than one of them, on what both were asked."""
    theirs = runs[names.index(chosen("run", [against], names)[0])]["values"]
    found: dict[str, Sequence[ScoreRow]] = {
        name: [apart.to_json() for apart in differences(run["values"], theirs)]
        for name, run in zip(names, runs, strict=True)
        if name != against
    }
    if not any(found.values()):
        raise LongRopeError(
            f"no other row was asked the questions of {against}, or questions were not recorded",
            hint="evaluate all with the same suites, lengths, samples and seed, by this release",
        )
    for name in (name for name, own in found.items() if not own):
        warn(f"{name} is not compared with {against}: different questions, or questions that were not recorded")
    return found


def _asked_otherwise(runs: Sequence[dict[str, Any]]) -> set[str]:
    """The places, as in `values`, at which rows are not of the same questions or texts."""
    asked: dict[str, set[str]] = {}
    for run in runs:
        for place, found in run["values"].items():
            asked.setdefault(place, set()).add(found["asked"])
    return {place for place, hashes in asked.items() if len(hashes) > 1}


def _remarks(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> str:
    remarks = [f"- {name}: {note}\n" for name, run in zip(names, runs, strict=True) for note in run["notes"]]
    return "\nNotes\n\n" + "".join(remarks) if remarks else ""


def _values_misfit(values: Any) -> str | None:
    """What is wrong with `values` that were read from a file; None if nothing is."""
    if problem := misfit(values, VALUES, "values"):
        return problem
    for place, found in values.items():
        most = LARGEST_NLL if _is_perplexity(place.partition("/")[0]) else 1
        if any(value is not None and not 0 <= value <= most for value in found["values"]):
            return f"values.{place} must lie from 0 to {most}"
    return None


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
            apart += [_percent(suite, task, window, pairs) for task, pairs in tasks.items()]
            continue
        apart += [_points(suite, task, window, [pairs]) for task, pairs in tasks.items()]
        if len(tasks) > 1:
            apart.append(_points(suite, AVERAGE, window, list(tasks.values())))
    return apart


def _pairs(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> list[float]:
    """The difference for each sample; none where the questions were others, or a value is missing."""
    if theirs is None or theirs["asked"] != ours["asked"] or len(theirs["values"]) != len(ours["values"]):
        return []
    pairs = list(zip(ours["values"], theirs["values"], strict=True))
    return [] if any(None in pair for pair in pairs) else [one - other for one, other in pairs]


def _points(suite: str, task: str, length: int | None, tasks: Sequence[Sequence[float]]) -> Measured:
    mean, low, high = (100 * value for value in paired(tasks))
    samples = sum(map(len, tasks))
    return Measured(
        suite=suite, task=task, length=length, metric=POINTS, score=mean, samples=samples, low=low, high=high
    )


def _percent(suite: str, task: str, length: int | None, logarithms: Sequence[float]) -> Measured:
    """Of a ratio of perplexities: the mean over documents of the difference of their logarithms."""
    ends = student(logarithms)
    low, high = (None, None) if ends is None else map(_in_percent, ends)
    return Measured(
        suite=suite,
        task=task,
        length=length,
        metric=PERCENT,
        score=_in_percent(sum(logarithms) / len(logarithms)),
        samples=len(logarithms),
        low=low,
        high=high,
    )


def _in_percent(logarithm: float) -> float | None:
    return 100 * math.expm1(logarithm) if logarithm < LARGEST_NLL else None


def draw_figures(scores: ByName, grids: Mapping[str, Mapping[str, Any]], output: Path) -> list[str]:
    """Draw what there is to draw, methods by name; the names of the files."""
    drawn = []
    try:
        for suite in SUITES.values():
            file = f"{suite.name}.png"
            averages = {
                name: [score for score in own if score["suite"] == suite.name and score["task"] == AVERAGE]
                for name, own in scores.items()
            }
            averages = {name: own for name, own in averages.items() if own}
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
