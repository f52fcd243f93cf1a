"""The record of a finished run: what was done with what, and what came of it."""

import json
from pathlib import Path
from typing import Any

import torch

from longrope2.console import show_json, show_table, warn
from longrope2.distributed import World
from longrope2.shapes import misfit
from longrope2.training.job import Job, versions
from longrope2.training.product import NEEDLES, RECORD
from longrope2.training.progress import LOG, losses_in, read_log, steps_in


def make_record(job: Job, output: Path, here: World) -> dict[str, Any]:
    """What goes into the model's folder, from the job and the log of all its steps."""
    log = read_log(output / LOG)
    steps = steps_in(log)
    if (lost := job.config.steps - len(steps)) > 0:
        warn(
            f"{output / LOG} lacks {lost} of {job.config.steps} steps: tokens, seconds and losses in {RECORD} "
            "are those of the others; the weights are not touched by that"
        )
    needles = [line for line in log if misfit(line, NEEDLES) is None]
    factors, plan = job.factors, job.plan
    return {
        "format": "longrope2.training",
        "version": 1,
        "model": {"name": job.info.name, "revision": job.info.revision, "weights": job.identity["weights"]},
        "factors": {
            "fingerprint": job.identity["factors"],
            "method": factors.method,
            "original_length": factors.original_length,
            "target_length": factors.target_length,
        },
        "plan": {
            "fingerprint": job.identity["plan"],
            "rows": len(plan),
            "row_length": plan.config.target_length,
            "seed": plan.config.seed,
            "sources": [source.label for source in plan.sources],
        },
        "config": job.config.to_json(),
        "versions": versions(),
        "processes": here.num_processes,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "steps": job.config.steps,
        "tokens": sum(line["tokens"] for line in steps),
        "seconds": sum(line["seconds"] for line in steps),
        "losses": {"first": losses_in(steps[0]), "last": losses_in(steps[-1])} if steps else {},
        "needles": {"first": needles[0], "last": needles[-1]} if needles else {},
    }


def show_record(folder: Path, *, as_json: bool) -> None:
    """Print the record in a model's folder."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    if as_json:
        show_json(record)
        return
    rows = []
    if record["losses"]:
        first, last = record["losses"]["first"], record["losses"]["last"]
        # A step need not have rows of both kinds.
        rows += [
            [name, *(f"{end[name]:.4f}" if name in end else "-" for end in (first, last))] for name in first | last
        ]
    if record["needles"]:
        first, last = ({_name(r): r["exact"] for r in record["needles"][end]["needles"]} for end in ("first", "last"))
        rows += [[name, f"{first[name]:.0%}" if name in first else "-", f"{last[name]:.0%}"] for name in last]
    show_table(
        f"{record['steps']:,} steps, {record['tokens']:,} tokens, {record['seconds']:,.0f} s",
        ["", "first", "last"],
        rows,
        caption=f"the model is in {folder}",
    )


def _name(needles: dict[str, Any]) -> str:
    return f"needles found at {needles['length']:,} tokens, depth {needles['depth']:g}"
