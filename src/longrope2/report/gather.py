"""What a run has left on disk so far, read into plain values; what is not there yet is None or empty."""

import json
from pathlib import Path
from typing import Any

from longrope2 import ledger
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.methods import rescale
from longrope2.training.progress import read_log


def gather(folder: Path) -> dict[str, Any]:
    """Everything the report and the summary are made of."""
    book = ledger.read_ledger(folder)
    if book is None:
        raise LongRopeError(f"{folder}: no run of `longrope2 extend` there", hint="give the folder named with -o")
    finished = [name for name, entry in book["steps"].items() if entry["state"] == ledger.DONE]
    factors = _json(folder / ledger.FACTORS)
    scores, grids, evaluations = _evaluations(folder, book["recipe"]["methods"], finished)
    log = read_log(folder / ledger.TRAINING_LOG)
    return {
        "name": folder.absolute().name,
        "model": book["model"],
        "revision": book["revision"],
        "target_length": book["target_length"],
        "recipe": book["recipe"],
        "versions": book["versions"],
        "steps": book["steps"],
        "search": _json(folder / ledger.SEARCH),
        "factors": factors,
        "closed_forms": _closed_forms(factors, book["recipe"]["methods"]),
        "plan": _plan(folder / ledger.PLAN),
        "log": [line for line in log if "loss" in line],
        "needles_while_training": [line for line in log if "needles" in line],
        "training": _json(folder / ledger.TRAINING_RECORD),
        "scores": scores,
        "grids": grids,
        "evaluations": evaluations,
        "verified": _json(folder / ledger.VERIFIED),
        "exports": _exports(folder, finished, book),
    }


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LongRopeError(f"{path}: cannot be read ({error})", hint="run `longrope2 extend` again") from error
    return content


def _closed_forms(factors: dict[str, Any] | None, methods: list[str]) -> dict[str, list[float]]:
    if factors is None:
        return {}
    spec = RescaleFactors.from_json(factors).spec
    return {name: list(rescale(name, spec, factors["target_length"]).long) for name in methods}


def _plan(path: Path) -> dict[str, Any] | None:
    """The composition in a plan's first line."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as lines:
        header = json.loads(lines.readline())
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
                result = _json(folder / step / "results.json")
                if result is None:
                    continue
                scores.setdefault(method, []).extend(result["scores"])
                grids |= {method: result["grids"]["niah"]} if "niah" in result["grids"] else {}
                facts[step] = {name: result[name] for name in ("device", "processes", "seconds", "config", "notes")}
    return scores, grids, facts


def _exports(folder: Path, finished: list[str], book: dict[str, Any]) -> list[dict[str, Any]]:
    if "export" not in finished:
        return []
    found = []
    for place in book["steps"]["export"]["outputs"]:
        path = folder / place
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files if file.exists())
        own, config = (_json(path / name) if path.is_dir() else None for name in ("factors.json", "config.json"))
        family = (config or {}).get("model_type", "")
        found.append({"place": place, "bytes": size, "factors": own, "family": family})
    return found
