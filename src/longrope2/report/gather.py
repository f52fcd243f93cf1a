"""What a run has left on disk so far, read into plain values; what is not there yet is None or empty."""

import json
from pathlib import Path
from typing import Any

from longrope2 import ledger
from longrope2.errors import FactorsError, LongRopeError
from longrope2.evaluation.results import RESULTS, SCORE, grid_misfit
from longrope2.factors import RescaleFactors
from longrope2.records import Record, RunRecord, SearchRecord, TrainingRecord
from longrope2.shapes import misfit
from longrope2.training.log import read_log, steps_in

AGAIN = "run `longrope2 extend` again as before: what is damaged is made anew"
RUN_ON = {"device": str, "processes": int}
PLAN = {"rows": int, "config": {"seed": int}, "report": dict}
RESULT = {**RUN_ON, "scores": [SCORE], "grids": dict, "seconds": float, "config": dict, "notes": list}
VERIFIED = {...: [{"engine": str, "mode": str, "max_error": float | None, "verdict": str, "note": str}]}
"""What the page relies on in each file."""


def gather(folder: Path) -> dict[str, Any]:
    """Everything the report and the summary are made of; what other options gave is not part of it."""
    book = ledger.require_ledger(folder)
    steps, methods = book.current, book.recipe["methods"]
    finished = [name for name, entry in steps.items() if entry.is_done]
    searched, trained = "search" in steps, "train" in steps
    factors = _factors(folder / ledger.FACTORS) if searched else None
    scores, grids, evaluations = _evaluations(folder, methods, finished)
    log = read_log(folder / ledger.TRAINING_LOG) if trained and (folder / ledger.TRAINING_LOG).is_file() else []
    return {
        "name": folder.absolute().name,
        "model": book.model,
        "revision": book.revision,
        "original_length": factors["original_length"] if factors else book.original_length,
        "target_length": book.target_length,
        "recipe": book.recipe,
        "versions": book.versions,
        "steps": steps,
        "outdated": [name for name in book.steps if name not in steps],
        "search": _record(SearchRecord, folder / ledger.SEARCH) if searched else None,
        "factors": factors,
        "plan": _plan(folder / ledger.PLAN) if "data" in steps else None,
        "log": steps_in(log),
        "training": _record(TrainingRecord, folder / ledger.TRAINING_RECORD) if trained else None,
        "scores": scores,
        "grids": grids,
        "evaluations": evaluations,
        "verified": _json(folder / ledger.VERIFIED, VERIFIED) if "verify" in steps else None,
        "exports": _exports(folder, finished, book),
    }


def _record(kind: type[Record], path: Path) -> dict[str, Any] | None:
    try:
        return kind.load(path, hint=AGAIN).to_json()
    except FileNotFoundError:
        return None


def _json(path: Path, shape: Any) -> dict[str, Any] | None:
    try:
        return _shaped(path, path.read_bytes(), shape)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LongRopeError(f"{path}: cannot be read ({error.strerror})", hint=AGAIN) from error


def _shaped(path: Path, text: bytes, shape: Any) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(text.decode("utf-8"))
    except ValueError as error:  # also what is no UTF-8
        raise LongRopeError(f"{path}: damaged ({error})", hint=AGAIN) from error
    if problem := misfit(content, shape):
        raise LongRopeError(f"{path}: damaged ({problem})", hint=AGAIN)
    return content


def _factors(path: Path) -> dict[str, Any] | None:
    content = _json(path, {})
    if content is None:
        return None
    try:
        return RescaleFactors.from_json(content, source=str(path)).to_json()
    except FactorsError as error:
        raise LongRopeError(error.message, hint=AGAIN) from error


def _plan(path: Path) -> dict[str, Any] | None:
    """The composition in a plan's first line."""
    try:
        with path.open("rb") as lines:
            header = _shaped(path, lines.readline(), PLAN)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LongRopeError(f"{path}: cannot be read ({error.strerror})", hint=AGAIN) from error
    return {"rows": header["rows"], "seed": header["config"]["seed"], **header["report"]}


def _evaluations(
    folder: Path, methods: list[str], finished: list[str]
) -> tuple[dict[str, list[Any]], dict[str, Any], dict[str, Any]]:
    """Scores, needle grids and other facts of finished evaluations, by method, the base first."""
    order = [ledger.BASE, *methods, ledger.SEARCHED, ledger.AFTER_TRAINING]
    scores: dict[str, list[Any]] = {}
    grids: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for method in order:
        for step in finished:
            if step.startswith(f"{ledger.EVALUATE}/{method}/"):
                path = folder / step / RESULTS
                result = _json(path, RESULT)
                if result is None:
                    continue
                if "niah" in result["grids"] and (problem := grid_misfit(result["grids"]["niah"])):
                    raise LongRopeError(f"{path}: damaged (grids.niah: {problem})", hint=AGAIN)
                scores.setdefault(method, []).extend(result["scores"])
                if "niah" in result["grids"]:
                    grids[method] = _joined(grids.get(method), result["grids"]["niah"])
                facts[step] = {name: result[name] for name in ("device", "processes", "seconds", "config", "notes")}
    return scores, grids, facts


def _joined(before: dict[str, Any] | None, grid: dict[str, Any]) -> dict[str, Any]:
    """Needle grids of two tables as one; where both have a length, the later counts."""
    if before is None or before["depths"] != grid["depths"]:
        return grid
    by_length = {
        length: column
        for each in (before, grid)
        for length, column in zip(each["lengths"], zip(*each["cells"], strict=True), strict=True)
    }
    lengths = sorted(by_length)
    rows = zip(*(by_length[length] for length in lengths), strict=True)
    return {"lengths": lengths, "depths": grid["depths"], "cells": [list(row) for row in rows]}


def _exports(folder: Path, finished: list[str], book: RunRecord) -> list[dict[str, Any]]:
    if "export" not in finished:
        return []
    found = []
    for place in book.steps["export"].outputs or ():
        path = folder / place
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files if file.exists())
        own = _factors(path / "factors.json") if path.is_dir() else None
        config = _json(path / "config.json", {"model_type": str}) if path.is_dir() else None
        family = (config or {}).get("model_type", "")
        found.append({"place": place, "bytes": size, "factors": own, "family": family})
    return found
