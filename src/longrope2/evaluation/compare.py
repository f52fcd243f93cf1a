"""`longrope2 compare`: several evaluations side by side, methods as rows, in the layout of the paper's tables."""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longrope2.console import say, show_json, show_table, warn
from longrope2.errors import DataError, LongRopeError, MissingExtraError
from longrope2.evaluation.paired import differences
from longrope2.evaluation.results import AVERAGE, RESULTS, SCORE, grid_misfit, values_misfit
from longrope2.evaluation.suites import chosen
from longrope2.evaluation.table import CAPTION, HEADS, TITLES, Score, Table, cell, suites_of
from longrope2.figures import draw_by_length, draw_heatmaps, length_label
from longrope2.files import write_json, write_text
from longrope2.shapes import misfit

BY_LENGTH = ("ruler", "niah", "passkey", "perplexity")
RUN = {"name": str, "model": str, "factors": dict | None, "notes": [str], "scores": [SCORE], "grids": dict}
"""What is read of it."""
MOST_LISTED = 3
"""Tasks that a caption names before it only counts them."""


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
    tables = [table for suite in _all_suites(runs) for table in _tables(suite, by_name, base, differing=differing)]
    apart = {} if against is None else _differences(runs, names, against)
    for suite in suites_of([score for scores in apart.values() for score in scores]):
        tables += _tables(suite, apart, None, against)
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
        "markdown": "\n".join(table.markdown() for table in tables) + _remarks(names, runs),
    }


def run_compare(
    places: Sequence[Path | str], output: Path | None, *, base: str | None, against: str | None, as_json: bool
) -> None:
    """`longrope2 compare`."""
    result = compare(places, base=base, against=against)
    if output is not None:
        write_json(output / "compare.json", result)
        write_text(output / "compare.md", result["markdown"])
        drawn = draw_figures(result["scores"], result["grids"], output)
        say(f"wrote {', '.join(['compare.md', 'compare.json', *drawn])} into {output}")
    if as_json:
        show_json(result)
        return
    for table in result["tables"]:
        show_table(**table)


def retention(by_name: Mapping[str, Sequence[Score]], base: str | None) -> dict[str, float]:
    """Mean short score over the base model's, in percent, on the tasks that both have."""
    if base is None:
        return {}
    originals = _short(by_name[base])
    found = {}
    for name, scores in by_name.items():
        common = {task: score for task, score in _short(scores).items() if task in originals}
        whole = sum(originals[task] for task in common)
        if whole:  # of a model that has nothing right, nothing can be kept
            found[name] = 100 * sum(common.values()) / whole
    return found


def _short(scores: Sequence[Score]) -> dict[str, float]:
    return {score["task"]: score["score"] for score in scores if score["suite"] == "short" and score["task"] != AVERAGE}


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
    """Raise ValueError for what is no result of an evaluation; names the unknown suites."""
    problems = [misfit(result, RUN)]
    if problems == [None]:
        problems += [grid_misfit(grid) for grid in result["grids"].values()]
        problems.append(values_misfit(result.setdefault("values", {})))  # which older releases did not write
        problems += [_gap(score) for score in result["scores"]]
    if found := next(filter(None, problems), None):
        raise ValueError(found)
    return sorted({score["suite"] for score in result["scores"]} - set(TITLES))


def _gap(score: Score) -> str | None:
    """A value that only some suites may leave out."""
    if score["length"] is None and score["suite"] in BY_LENGTH:
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


def _all_suites(runs: Sequence[dict[str, Any]]) -> list[str]:
    return suites_of([score for run in runs for score in run["scores"]])


def _tables(
    suite: str,
    by_name: Mapping[str, Sequence[Score]],
    base: str | None,
    against: str | None = None,
    *,
    differing: Container[str] = (),
) -> list[Table]:
    """Of scores; with `against` of differences to the row of that name. `differing`: where rows differ in questions."""
    own = {name: [score for score in scores if score["suite"] == suite] for name, scores in by_name.items()}
    own = {name: scores for name, scores in own.items() if scores}
    title, caption, suffix = TITLES[suite], "95% intervals" if suite == "perplexity" else CAPTION, ""
    if against is not None:
        unit = "percent" if suite == "perplexity" else "points"
        caption = f"{unit} more than {against}, question by question, with 95% intervals"
        suffix = f", against {against}"
    if suite == "perplexity":
        tasks = dict.fromkeys(score["task"] for scores in own.values() for score in scores)
        return [_by_length(f"{title}, {task} windows{suffix}", own, task, caption, differing) for task in tasks]
    if suite in BY_LENGTH:
        return [_by_length(title + suffix, own, None, caption)]
    return [_by_task(title + suffix, own, base if suite == "short" else None, caption)]


def _differences(runs: Sequence[dict[str, Any]], names: Sequence[str], against: str) -> dict[str, Sequence[Score]]:
    """How much more each row has than one of them, on what both were asked."""
    theirs = runs[names.index(chosen("run", [against], names)[0])]["values"]
    found: dict[str, Sequence[Score]] = {
        name: [apart.to_json() for apart in differences(run["values"], theirs)]
        for name, run in zip(names, runs, strict=True)
        if name != against
    }
    if not any(found.values()):
        raise LongRopeError(
            f"no other row was asked what {against} was asked, or they do not say",
            hint="evaluate all with the same suites, lengths, samples and seed, by this release",
        )
    for name in (name for name, own in found.items() if not own):
        warn(f"{name} is not compared with {against}: it was asked something else, or does not say what")
    return found


def _by_length(
    title: str, own: Mapping[str, Sequence[Score]], task: str | None, caption: str, differing: Container[str] = ()
) -> Table:
    """A row for each method, a column for each length."""
    lengths = sorted({score["length"] for scores in own.values() for score in scores})
    rows: list[list[str]] = []
    shown: list[Score] = []
    for name, scores in own.items():
        found = [_overall([s for s in scores if s["length"] == length], task) for length in lengths]
        shown += [score for score in found if score is not None]
        rows.append([name, *map(cell, found)])
    told = _caption(caption, shown)
    told += _other_tasks(own) if task is None else _other_texts(task, lengths, differing)
    return Table(title=title, columns=["Method", *map(length_label, lengths)], rows=rows, caption=told)


def _overall(scores: Sequence[Score], task: str | None) -> Score | None:
    """The score of a task; without one the average, or the only task there is."""
    wanted = [score for score in scores if score["task"] == (AVERAGE if task is None else task)]
    return wanted[0] if wanted else (scores[0] if scores and task is None else None)


def _by_task(title: str, own: Mapping[str, Sequence[Score]], base: str | None, caption: str) -> Table:
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
    return Table(
        title=title,
        columns=["Method", *(HEADS.get(task, task) for task in tasks), *(["Retention"] if kept else [])],
        rows=rows,
        caption=_caption(caption, [score for scores in own.values() for score in scores]) + _other_tasks(averaged),
    )


def _caption(caption: str, scores: Sequence[Score]) -> str:
    counts = sorted({score["samples"] for score in scores})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{caption}; samples in a number: {samples}"


def _other_tasks(own: Mapping[str, Sequence[Score]]) -> str:
    """What must be said where the numbers of a column stand for different tasks."""
    tasks = {name: sorted({s["task"] for s in scores if s["task"] != AVERAGE}) for name, scores in own.items()}
    if len({tuple(found) for found in tasks.values()}) < 2:
        return ""
    listed = (f"{name}: {', '.join(t) if len(t) <= MOST_LISTED else f'{len(t)} tasks'}" for name, t in tasks.items())
    return f"; rows are not of the same tasks ({'; '.join(listed)})"


def _asked_otherwise(runs: Sequence[dict[str, Any]]) -> set[str]:
    """The places, as in `values`, at which rows are not of the same questions or texts."""
    asked: dict[str, set[str]] = {}
    for run in runs:
        for place, found in run["values"].items():
            asked.setdefault(place, set()).add(found["asked"])
    return {place for place, hashes in asked.items() if len(hashes) > 1}


def _other_texts(task: str, lengths: Sequence[int], differing: Container[str]) -> str:
    """What must be said of perplexities: the longest length of a row decides on its books, and how far they slide."""
    found = [length_label(length) for length in lengths if f"perplexity/{task}/{length}" in differing]
    return f"; rows are not of the same texts at {', '.join(found)}" if found else ""


def _remarks(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> str:
    remarks = [f"- {name}: {note}\n" for name, run in zip(names, runs, strict=True) for note in run["notes"]]
    return "\nNotes\n\n" + "".join(remarks) if remarks else ""


def draw_figures(
    scores: Mapping[str, Sequence[Score]], grids: Mapping[str, Mapping[str, Any]], output: Path
) -> list[str]:
    """Draw what there is to draw, methods by name; the names of the files."""
    drawn = []
    try:
        ruler = {
            name: [score for score in own if score["suite"] == "ruler" and score["task"] == AVERAGE]
            for name, own in scores.items()
        }
        ruler = {name: own for name, own in ruler.items() if own}
        if ruler:
            draw_by_length(ruler, output / "ruler.png", label="RULER, mean over tasks (%)")
            drawn.append("ruler.png")
        needles = {name: own["niah"] for name, own in grids.items() if "niah" in own}
        if needles:
            draw_heatmaps(needles, output / "niah.png")
            drawn.append("niah.png")
    except MissingExtraError as error:
        warn(str(error))
    return drawn
