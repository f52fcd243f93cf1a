"""What an extension would take, stage by stage, before it starts: from the model's shape and this machine's speed.

Rough by intent: it separates minutes from days and says whether a disk is large enough. Reads only the configuration.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longrope2 import ledger
from longrope2.calibration.config import CalibrationConfig
from longrope2.collection import fitting_names
from longrope2.console import roughly
from longrope2.data.plan import read_plan
from longrope2.errors import LongRopeError, counted
from longrope2.evaluation.config import EvaluationConfig, lengths_for
from longrope2.evaluation.suites import SUITES
from longrope2.export.config import ExportTable, VerifyConfig
from longrope2.export.engines import verifiable
from longrope2.export.verify import FORWARDS, is_installed
from longrope2.methods import METHODS, rescale
from longrope2.models import skeleton
from longrope2.pipeline.extend import Extension
from longrope2.pipeline.stages import DATA_PATHS, Setting, Step
from longrope2.records import Table
from longrope2.rope import RopeSpec
from longrope2.search.config import SearchConfig
from longrope2.search.evolution import FINALISTS
from longrope2.search.racing import LEFT_BY_RACING
from longrope2.training.config import MemoryLevel, train_config
from longrope2.training.estimate import (
    FLASH_BACKWARD,
    GIB,
    GPUS,
    Gpu,
    ModelShape,
    Work,
    assumed_work,
    estimate,
    known_gpu,
    planned_work,
    shape_of,
)

STATE_BYTES = 12
"""Of a trained parameter in a checkpoint: the float32 weight and Adam's two moments."""
PRECISION_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "q8_0": 1.07}
ACTIVATION_WIDTHS = 20
"""What a forward without gradients holds at once for each token, in hidden widths (seen with an 8B model)."""
COPY_RATE = 5e8
"""Bytes a second to read, convert and write weights."""
DECODING = 1.3
"""Evaluations: reading prompts, and the answers."""
OVERHEAD_SECONDS = {
    "search": 10.0,
    "calibrate": 10.0,
    "data": 20.0,
    "train": 10.0,
    "evaluate": 5.0,
    "verify": 15.0,
    "report": 5.0,
}
TOO_LONG = 86_400.0
"""Seconds from which on a forecast says what else to do."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What does the work."""

    name: str
    matmul: float
    """FLOP/s of matrix products, and of attention below."""
    attention: tuple[float, float]
    """Forward and backward."""
    bytes_per_value: int
    on_gpu: bool


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a step takes; None where that is not known yet."""

    seconds: float | None
    memory: float | None = None
    """Bytes, of a GPU where there is one."""
    disk: float | None = 0.0
    note: str = ""


def this_machine(head_dim: int) -> Machine:
    """The GPU from what is known of it, anything else by trying."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    known = known_gpu(name) if on_gpu else None
    if known:
        return gpu_machine(name, known, head_dim)
    rate = _measured_rate(torch.device(device), dtype)
    # Half of what matrix products reach is what attention came to on the CPU this was tried on.
    return Machine(
        name=name, matmul=rate, attention=(rate / 2, rate / 2), bytes_per_value=dtype.itemsize, on_gpu=on_gpu
    )


def gpu_machine(name: str, known: Gpu, head_dim: int) -> Machine:
    """A GPU, from what is known of its kind."""
    forward, backward = (rate * 1e12 for rate in known.attention_rates(head_dim))
    return Machine(name=name, matmul=known.matmul * 1e12, attention=(forward, backward), bytes_per_value=2, on_gpu=True)


def _measured_rate(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    matrix = torch.rand(size, size, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for a GPU, too
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest


def forecast(extension: Extension, gpu: str | None = None) -> dict[str, Any]:
    """Time, memory and disk of each step that has to run, and why it has to; on this machine, or on a kind of GPU."""
    setting, reasons = extension.setting, extension.reasons()
    training = {name: setting.recipe.train[name] for name in ("lora", "also", "freeze") if name in setting.recipe.train}
    shape = shape_of(skeleton(setting.info), setting.info, **training)
    machine = this_machine(shape.head_dim) if gpu is None else gpu_machine(gpu.upper(), GPUS[gpu], shape.head_dim)
    rows = []
    for step in extension.steps:
        needs = _needs(setting, step, shape, machine, reasons) if step.name in reasons else Needs(seconds=0.0)
        rows.append(
            {
                "step": step.name,
                "state": "to do" if step.name in reasons else "done",
                "reason": reasons.get(step.name, ""),
                "seconds": needs.seconds,
                "memory_gib": None if needs.memory is None else needs.memory / GIB,
                "disk_gib": None if needs.disk is None else needs.disk / GIB,
                "note": needs.note,
            }
        )
    notes = list(extension.notes)
    if sum(float(row["seconds"] or 0) for row in rows) > TOO_LONG:
        notes.append(
            "to take less time: a GPU (--dry-run --gpu h100 estimates one), a shorter --target-length, or a smaller "
            "schedule in a recipe ([search] population, iterations, documents; [[evaluate]] lengths, samples)"
        )
        ready = fitting_names(setting.info.rope, setting.recipe.target_length)
        if "search" in reasons and ready:
            notes.append(
                f"instead of a search: the collection has factors for this RoPE ({', '.join(ready)}); take them with "
                f"`longrope2 factors MODEL --from collection/{ready[0]} -o FILE`, then train or export"
            )
    return {
        "machine": machine.name,
        "matmul_tflops": machine.matmul / 1e12,
        "steps": rows,
        "notes": notes,
    }


def _needs(setting: Setting, step: Step, shape: ModelShape, machine: Machine, reasons: Mapping[str, str]) -> Needs:
    makers: dict[str, Callable[..., Needs]] = {
        "search": _search,
        "calibrate": _calibrate,
        "data": _data,
        "train": partial(_train, is_planned="data" not in reasons),
        "evaluate": _evaluate,
        "export": _export,
        "verify": _verify,
    }
    if step.stage not in makers:
        return Needs(seconds=OVERHEAD_SECONDS["report"], disk=2e6)
    return makers[step.stage](setting, step, shape, machine)


def reading_seconds(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Seconds to read one sequence."""
    attention = shape.attention_flops(tokens, tokens * tokens // 2) / machine.attention[0]
    return shape.linear_flops(tokens) / machine.matmul + attention


def _reading_memory(shape: ModelShape, machine: Machine, tokens: int) -> float:
    return machine.bytes_per_value * (shape.parameters + ACTIVATION_WIDTHS * shape.hidden * tokens)


def _search(setting: Setting, _: Step, shape: ModelShape, machine: Machine) -> Needs:
    return search_needs(setting.recipe.search_config(), setting.info.rope, shape, machine)


def search_needs(config: SearchConfig, rope: RopeSpec, shape: ModelShape, machine: Machine) -> Needs:
    """What a search takes."""
    plan, length = config.evolution, config.target_length
    children = plan.iterations * (plan.mutations + plan.crossovers)
    compared = (FINALISTS + len(METHODS) - 1) * (config.held_out or config.documents)
    most, seconds = compared, compared * reading_seconds(shape, machine, length)
    left = LEFT_BY_RACING[plan.race]
    for number, stage in enumerate(config.stages(rope)):
        # What an earlier stage has found takes the place of half of a first population.
        documents = (plan.population // (2 if number else 1) + children) * config.documents
        most += documents
        seconds += left * documents * reading_seconds(shape, machine, stage)
    return Needs(
        seconds=OVERHEAD_SECONDS["search"] + seconds,
        memory=_reading_memory(shape, machine, length),
        disk=300.0 * most,
        note=f"about {compared + round(left * (most - compared)):,} documents read"
        + (f", {most:,} without racing" if left < 1 else ""),
    )


def _calibrate(setting: Setting, _: Step, shape: ModelShape, machine: Machine) -> Needs:
    recipe = setting.recipe
    return calibration_needs(recipe.calibration_config(), setting.info.rope, recipe.target_length, shape, machine)


def calibration_needs(
    config: CalibrationConfig, rope: RopeSpec, target_length: int, shape: ModelShape, machine: Machine
) -> Needs:
    """What a calibration takes: each document is read under both RoPEs."""
    lengths = config.all_lengths(rescale("none", rope, target_length))
    read = 2 * config.documents
    return Needs(
        seconds=OVERHEAD_SECONDS["calibrate"] + read * sum(reading_seconds(shape, machine, n) for n in lengths),
        memory=_reading_memory(shape, machine, max(lengths)),
        disk=1e6,
        note=f"{read * len(lengths):,} documents read, at lengths around {rope.original_length:,}",
    )


def _data(setting: Setting, _: Step, shape: ModelShape, machine: Machine) -> Needs:
    rows = setting.recipe.plan_config(setting.info.rope.original_length).rows
    tokens = None if rows is None else rows * setting.recipe.target_length
    return Needs(
        seconds=None if tokens is None else OVERHEAD_SECONDS["data"] + tokens / 1e6,
        disk=None if tokens is None else 4.0 * tokens,
        note="as much as the sources have" if tokens is None else "at least; sources may hold more than is used",
    )


def _work(setting: Setting, *, is_planned: bool) -> Work | None:
    """The work of training, from the plan if there is one that stays; None where that is not known yet."""
    recipe, path = setting.recipe, setting.folder / ledger.PLAN
    try:
        plan = read_plan(path) if is_planned and path.exists() else None
    except LongRopeError:
        plan = None  # damaged, and made again
    original = setting.info.rope.original_length
    rows = len(plan) if plan else recipe.plan_config(original).rows
    if rows is None and "steps" not in recipe.train:
        return None
    config = train_config(**recipe.train).resolved(rows)
    batch, steps = config.batch_rows, config.steps
    if plan:
        return planned_work(plan, rows=batch, steps=steps, long_row_mask=config.long_row_mask)
    return assumed_work(original_length=original, target_length=recipe.target_length, rows=batch, steps=steps)


def _train(setting: Setting, _: Step, shape: ModelShape, machine: Machine, *, is_planned: bool) -> Needs:
    work, options = _work(setting, is_planned=is_planned), setting.recipe.train
    saved = PRECISION_BYTES[options.get("save_dtype", "bfloat16")] * shape.parameters
    disk = STATE_BYTES * shape.trained * (options.get("keep", 2) + 1) + saved
    if work is None or work.steps is None:
        return Needs(seconds=None, disk=disk, note="known once the data are planned")
    recompute = options.get("recompute", machine.on_gpu)
    parallel = options.get("sequence_parallel", 1)
    # Memory does not depend on the kind of GPU.
    stated = train_config(**options).memory
    level: MemoryLevel = "plain" if stated == "auto" else stated
    found = estimate(shape, work, gpus=1, gpu="h200", sequence_parallel=parallel, recompute=recompute, memory=level)
    memory = found["memory_gib"]
    wider = machine.bytes_per_value / 2  # counted for bfloat16
    held = sum(size * (wider if "activations" in name else 1) for name, size in memory.items())
    passes = 2 + shape.trained_share + bool(recompute)
    attention = shape.attention_flops(work.tokens, work.attended)
    forward, backward = machine.attention
    seconds = shape.linear_flops(work.tokens) * passes / machine.matmul
    seconds += attention / forward + FLASH_BACKWARD * attention / backward
    return Needs(
        seconds=OVERHEAD_SECONDS["train"] + work.steps * seconds,
        memory=held * GIB,
        disk=disk,
        note=f"{counted(work.steps, 'step')} of {work.tokens:,} tokens, on one device",
    )


def _evaluate(setting: Setting, step: Step, shape: ModelShape, machine: Machine) -> Needs:
    options = {name: value for name, value in step.options.items() if name not in DATA_PATHS}
    config = EvaluationConfig(**{**options, "beyond_window": True})
    return evaluation_needs(config, setting.recipe.target_length, shape, machine)


def evaluation_needs(config: EvaluationConfig, window: int, shape: ModelShape, machine: Machine) -> Needs:
    """What an evaluation takes, but for suites whose files decide on that."""
    lengths = lengths_for(config, window)
    seconds, prompts, unknown = 0.0, 0.0, []
    for suite in (SUITES[name] for name in dict.fromkeys(config.suites)):
        read = suite.sequences(config.samples, config.tasks_of(suite.name), lengths)
        if read is None:
            unknown.append(suite.name)
            continue
        answers = not suite.scores_texts
        prompts += answers * sum(read.values())
        reading = sum(count * reading_seconds(shape, machine, length) for length, count in read.items())
        seconds += reading * (DECODING if answers else 1)
    return Needs(
        seconds=OVERHEAD_SECONDS["evaluate"] + seconds,
        memory=_reading_memory(shape, machine, lengths[0]),
        disk=1000.0 * prompts,
        note=f"without {', '.join(unknown)}" if unknown else "",
    )


def _export(setting: Setting, _: Step, shape: ModelShape, machine: Machine) -> Needs:
    options = ExportTable(**setting.recipe.export)
    size = PRECISION_BYTES[options.dtype or "bfloat16"] * shape.parameters * len(options.formats)
    return Needs(seconds=2 + 2 * size / COPY_RATE, memory=None, disk=size)


def _verify(setting: Setting, _: Step, shape: ModelShape, machine: Machine) -> Needs:
    memory = 4.0 * shape.parameters
    asked = [engine.partition("=")[0] for engine in VerifyConfig(**setting.recipe.verify).engines]
    engines = [
        name
        for format in ExportTable(**setting.recipe.export).formats
        for name, engine in verifiable(format).items()
        if (name in asked if asked else is_installed(engine))
    ]
    each = OVERHEAD_SECONDS["verify"] + 2 * memory / COPY_RATE
    each += FORWARDS * reading_seconds(shape, machine, setting.info.rope.original_length)
    return Needs(seconds=len(engines) * each, memory=memory, note=f"in {', '.join(engines) or 'no engine'}")


def forecast_table(setting: Setting, plans: Mapping[str, Any]) -> Table:
    """A forecast, step by step."""
    rows = [
        [
            step["step"],
            step["state"],
            "?" if step["seconds"] is None else roughly(step["seconds"]),
            "-" if step["memory_gib"] is None else f"{step['memory_gib']:,.1f}",
            "?" if step["disk_gib"] is None else f"{step['disk_gib']:,.2f}",
            step["note"] if step["state"] == "to do" else "",
        ]
        for step in plans["steps"]
    ]
    known = [step["seconds"] for step in plans["steps"] if step["seconds"] is not None]
    more = "" if len(known) == len(rows) else " and what is not known yet"
    recipe = setting.recipe
    return Table(
        title=f"{recipe.model}, {setting.info.rope.original_length:,} → {recipe.target_length:,} tokens, "
        f"in {setting.folder}",
        columns=["step", "state", "time", "memory GiB", "disk GiB", "note"],
        rows=rows,
        caption=f"together about {roughly(sum(known))}{more} on one {plans['machine']} "
        f"({plans['matmul_tflops']:,.3g} TFLOP/s in matrix products); estimates",
    )
