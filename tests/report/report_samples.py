"""A run's folder with made-up numbers, as `longrope2 extend` leaves it, without running anything."""

import json
import random
from pathlib import Path

from longrope2 import ledger
from longrope2.factors import RescaleFactors
from longrope2.ledger import Ledger
from longrope2.methods import rescale
from longrope2.records import (
    Composition,
    Finding,
    Marks,
    PlanHeader,
    TrainingRecord,
    TrainingSettings,
    VerifyRecord,
)
from longrope2.rope import RopeSpec

SPEC = RopeSpec(rotary_dim=64, theta=10_000.0, original_length=256)
METHODS = ("base", "pi", "yarn", ledger.SEARCHED, ledger.AFTER_TRAINING)
STEPS = 12


def found_factors() -> RescaleFactors:
    return rescale("longrope2", SPEC, 4096, critical_dimension=9, right_factors=[18.14], attention_factor=1.2)


def make_run(folder: Path, *, stages: tuple[str, ...] = ledger.STAGES, training: bool = True) -> Path:
    """A finished run, or one of which only some stages are done."""
    rng = random.Random(0)
    book = Ledger(folder)
    evaluations = [f"evaluate/{m}/{s}" for m in METHODS for s in ("niah", "perplexity")]
    steps = ["search", "data", "train", *evaluations, "export", "verify", "report"]
    recipe = {"model": "tiny", "target_length": 4096, "methods": ["pi", "yarn"], "search": {"space": "wide"},
              "source": [{"path": "books"}]}  # fmt: skip
    book.describe(
        model="tiny", revision="sha256:abc", original_length=256, target_length=4096, recipe=recipe,
        versions={"longrope2": "0.1.0", "torch": "2.11"}, planned=steps,
    )  # fmt: skip
    makers = {"search": _search, "data": _data, "train": _train, "export": _export, "verify": _verify}
    for step in steps:
        stage = step.partition("/")[0]
        if stage not in stages:
            continue
        book.start(step, {"model": {}, "options": {}, "needs": {}})
        if stage == "evaluate":
            _evaluate(folder, step, rng)
        elif stage in makers:
            makers[stage](folder, rng)
        outputs = {"export/tiny-4k": "x"} if stage == "export" else {}
        book.finish(step, outputs, rng.uniform(1, 100))
    return folder


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def _search(folder, rng):
    found_factors().save(folder / ledger.FACTORS)
    convergence = [
        {"length": length, "iteration": i, "perplexity": 1.5 / (i + 1) + 1, "critical_dimension": 9 + i % 2,
         "evaluations": 10 * i + 10, "exhaustive_evaluations": 16 * i + 16}
        for length in (2048, 4096) for i in range(5)
    ]  # fmt: skip
    scores = [
        {"method": method, "part": part, "perplexity": value, "low": 1.0, "high": 20.0, "exact": 1, "answers": 2,
         "documents": 2}
        for method, part, value in (
            ("searched", "in sample", 1.3), ("searched", "held out", 1.5), ("pi", "held out", 12.5),
            ("yarn", "held out", 1.73), ("ntk", "held out", None),
        )
    ]  # fmt: skip
    result = {
        "format": "longrope2.search", "version": 3, "model": "tiny", "revision": "sha256:abc", "dtype": "float32",
        "documents": "sha256:123", "versions": {}, "critical_dimension": 9, "best": {}, "chance": 10.0,
        "finalists": [], "own_window": [], "seconds": 5.0, "resumed_evaluations": 0,
        "weights": "sha256:def", "config": {"evolution": {"seed": 7, "iterations": 4}, "documents": 2},
        "convergence": convergence, "scores": scores, "stages": [2048, 4096],
        "document_evaluations": 50, "exhaustive_evaluations": 80, "device": "cpu", "processes": 1,
    }  # fmt: skip
    write(folder / ledger.SEARCH, result)
    lines = [{"type": "header", "config": result["config"], "stages": result["stages"]}]
    for number, entry in enumerate(convergence):
        lines.append({"type": "generation", "stage": number // 5, "iteration": number % 5, "genomes": []})
        lines.append(
            {"type": "evaluation", "key": f"c{number}", "document": 0, "nll": 8.0, "tokens": 8, "exact": False}
        )
        place = {"stage": number // 5, "iteration": number % 5}
        lines.append({"type": "iteration", **place, **{key: entry[key] for key in ("length", "perplexity")}})
    (folder / ledger.HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _data(folder, rng):
    counts = {"rows": 24, "target_length": 4096, "tokens": 24 * 4096, "document_tokens": 24 * 4096, "mark_tokens": 0}
    report = Composition(**counts, padding=0, padding_share=0.0, buckets=(), sources=(), cells=())
    marks = Marks(bos=1, eos=2, pad=2)
    header = PlanHeader(
        rows=24, config={"seed": 3}, sources=(), corpus_keys=(), tokenizer="", marks=marks, versions={}, report=report
    )
    write(folder / ledger.PLAN, header.to_json())


def _train(folder, rng):
    log = [
        {"step": n, "loss": 3 + 1 / n, "loss_short": 2.5 + 1 / n, "loss_long": 3.5 + 1 / n, "gradient_norm": 1.0,
         "learning_rate": 1e-4, "tokens": 8192, "seconds": 2.0, "tokens_per_second": 4096.0, "memory_gib": 3.25}
        for n in range(1, STEPS + 1)
    ]  # fmt: skip
    (folder / ledger.TRAIN).mkdir(parents=True, exist_ok=True)
    (folder / ledger.TRAINING_LOG).write_text("".join(json.dumps(line) + "\n" for line in log))
    TrainingSettings(identity={}, config={"train": {"steps": STEPS}}, versions={}).save(folder / "train/run.json")
    facts = {"model": {}, "factors": {}, "plan": {}, "versions": {}, "config": {"train": {"seed": 5}}}
    counts = {"processes": 1, "device": "cpu", "steps": 12, "tokens": 12, "seconds": 1.0, "losses": {}, "needles": {}}
    TrainingRecord(**facts, **counts).save(folder / ledger.TRAINING_RECORD)


def _evaluate(folder, step, rng):
    _, method, suite = step.split("/")
    lengths, depths = [256, 4096], [0.0, 0.5, 1.0]
    common = {"name": method, "model": "tiny", "factors": None, "notes": [], "device": "cpu", "processes": 1,
              "seconds": 3.0, "config": {}, "versions": {}, "revision": "r", "weights": "w", "backend": "torch",
              "window": 4096}  # fmt: skip
    if suite == "perplexity":
        value = 40.0 if method == "base" else 40.0 + 10 * rng.random()
        scores = [_score("perplexity", "sliding", 256, value), _score("perplexity", "sliding", 4096, 3 * value)]
        write(folder / step / "results.json", {**common, "scores": scores, "grids": {}})
        return
    cells = [
        [{"score": round(100 * rng.random(), 3), "samples": 2, "low": 0.0, "high": 100.0} for _ in lengths]
        for _ in depths
    ]
    scores = [
        _score("niah", "niah", length, sum(row[k]["score"] for row in cells) / len(depths))
        for k, length in enumerate(lengths)
    ]
    grid = {"lengths": lengths, "depths": depths, "cells": cells}
    write(folder / step / "results.json", {**common, "scores": scores, "grids": {"niah": grid}})


def _score(suite, task, length, value):
    return {"suite": suite, "task": task, "length": length, "metric": suite, "score": value, "samples": 6,
            "low": max(0.0, value - 5), "high": min(100.0, value + 5)}  # fmt: skip


def _export(folder, rng):
    (folder / "export/tiny-4k").mkdir(parents=True)
    found_factors().save(folder / "export/tiny-4k/factors.json")
    write(folder / "export/tiny-4k/config.json", {"model_type": "llama"})


def _verify(folder, rng):
    finding = Finding("transformers 5", "long", 1.5e-6, "right", "a <b> & c")
    VerifyRecord(exports={"export/tiny-4k": (finding,)}).save(folder / ledger.VERIFIED)
