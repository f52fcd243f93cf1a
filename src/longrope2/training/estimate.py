"""Memory and time of a run before it starts, from the model's shape and rates measured once.

The shape is read from the model's configuration alone: sizes, names of parameters, and work per token.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from longrope2.console import duration
from longrope2.data.config import PlanConfig
from longrope2.data.plan import Plan, read_plan
from longrope2.errors import LongRopeError, counted
from longrope2.families import SLIDING_ATTENTION, head_dim
from longrope2.models import ModelInfo, decoder_layers, describe, num_kv_heads, skeleton
from longrope2.options import broken_limits, wrong_types
from longrope2.perplexity import LOGIT_ROWS
from longrope2.pieces import MLP_ROWS
from longrope2.records import Table
from longrope2.training.config import (
    LEVELS,
    Also,
    EstimateConfig,
    Level,
    LongRowMask,
    MemoryLevel,
    TrainConfig,
    cannot_start,
)
from longrope2.training.four_bit import BYTES as FOUR_BIT_BYTES
from longrope2.training.host import RESERVED
from longrope2.training.optimizer import BLOCK
from longrope2.training.trainable import is_matrix, learning_beside, linear_layers, matching

GIB = 1 << 30
FULL, HALF = 4, 2  # bytes of float32 and bfloat16
OVERHEAD = 1.05
"""Norms, the optimizer and launches, on top of matrix products and attention."""
FLASH_BACKWARD = 2.5
"""Work of attention's backward pass in forward passes: it computes scores again."""
SMALL = 2048
"""Hidden size below which matrices are too small for the rates here."""
SOME_LORA = 16
"""The rank that is tried where full training does not fit."""
MOST_DOUBLINGS = 8


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that decide what training costs."""

    parameters: int
    trained: int
    """Parameters that learn; with LoRA the additions, and what learns beside them."""
    trained_at_once: int
    """Those of the largest layer, or of what is outside of layers: their gradients are whole for a moment."""
    matrices: int
    """Weights that each token is multiplied with: no input embedding, of experts only those a token meets."""
    layer: int
    """Parameters of the largest layer."""
    outside: int
    """Parameters outside of the layers: embeddings, head, last norm."""
    windows: tuple[int | None, ...]
    """For each layer how far it looks back; None: all the way."""
    hidden: int
    inner: int
    """Width of the MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    linear: int = 0
    """Weights with low-rank additions beside them; what learns then stays float32 whatever the rest is."""

    @property
    def width(self) -> int:
        """All query heads side by side."""
        return self.heads * self.head_dim

    @property
    def trained_share(self) -> float:
        """The share of the weights whose gradient has to be computed."""
        return min(self.trained / self.parameters, 1.0)

    def linear_flops(self, tokens: int) -> float:
        """One pass through the matrices: a forward, the gradient of inputs, or that of all weights."""
        return 2.0 * self.matrices * tokens

    def attention_flops(self, tokens: int, attended: int) -> float:
        """One forward pass through attention; `attended` counts pairs of query and key in a layer without a window."""
        pairs = sum(attended if window is None else min(attended, tokens * window) for window in self.windows)
        return 4.0 * self.width * pairs

    def step_flops(self, tokens: int, attended: int) -> float:
        """What forward and backward need at least: nothing counted that is computed again."""
        return self.linear_flops(tokens) * (2 + self.trained_share) + 3 * self.attention_flops(tokens, attended)


def shape_of(
    model: Any, info: ModelInfo, *, freeze: Sequence[str] = (), lora: int | None = None, also: Sequence[Also] = ()
) -> ModelShape:
    """The shape of a model, live or on the meta device, before anything is added to it."""
    config = model.config.get_text_config()
    stack = decoder_layers(model)
    layers = [_count(layer) for layer in stack]
    total = _count(model)
    frozen = matching(model, freeze)
    learns = learning_beside(model, also) if lora else {name for name, _ in model.named_parameters()} - frozen
    learning = Counter({name: model.get_parameter(name).numel() for name in learns})
    if lora:
        found = linear_layers(model).items()
        learning.update({name: lora * (layer.in_features + layer.out_features) for name, layer in found})
    parts: Counter[str] = Counter()
    prefix = next(name for name, module in model.named_modules() if module is stack[0]).removesuffix("0")
    for name, count in learning.items():
        inside = name.removeprefix(prefix)
        parts["" if inside == name else inside.partition(".")[0]] += count
    reading = info.reading
    windows = tuple(reading.sliding_window if kind == SLIDING_ATTENTION else None for kind in reading.layer_types)
    return ModelShape(
        parameters=total,
        trained=learning.total(),
        trained_at_once=max(parts.values(), default=0),
        matrices=_matrices(model, config),
        layer=max(layers),
        outside=total - sum(layers),
        windows=windows,
        hidden=config.hidden_size,
        inner=_inner(config, stack[-1]),
        heads=config.num_attention_heads,
        kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        vocabulary=config.vocab_size,
        linear=sum(layer.weight.numel() for layer in linear_layers(model).values()) if lora else 0,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(model: Any, config: Any) -> int:
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    named = dict(model.named_parameters())
    flat = sum(p.numel() for name, p in named.items() if p.ndim == 2 and is_matrix(name, p))
    matrices = flat - (0 if tied else embedding.numel())
    # Experts lie in one tensor, [experts, rows, columns]; a convolution of each channel has one row.
    chosen = _experts_of_token(config)
    tensors = [p for p in named.values() if p.ndim == 3]
    return matrices + sum(p.numel() if p.shape[1] == 1 else p.numel() // len(p) * max(chosen, 1) for p in tensors)


def _experts_of_token(config: Any) -> int:
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def _inner(config: Any, layer: nn.Module) -> int:
    """The widest MLP a token goes through; where a config does not say it in one number, the widest matrix."""
    chosen, width = _experts_of_token(config), getattr(config, "intermediate_size", None)
    if chosen:
        width = getattr(config, "moe_intermediate_size", None) or width
    if not isinstance(width, int):
        return max(max(p.shape) for p in layer.parameters() if p.ndim == 2)
    return width * max(chosen, 1)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What one GPU can do in bfloat16, in TFLOP/s."""

    memory: float
    """GiB."""
    peak: float
    matmul: float
    attention: tuple[float, float]
    """Causal attention at long rows, forward and backward, with heads of less than 128 dimensions."""
    wide_attention: tuple[float, float]
    """The same with heads of 128 and more."""

    def attention_rates(self, head_dim: int) -> tuple[float, float]:
        """Forward and backward."""
        return self.wide_attention if head_dim >= 128 else self.attention


_HOPPER: dict[str, Any] = {"peak": 989, "matmul": 790, "attention": (460, 425), "wide_attention": (577, 531)}
GPUS: Mapping[str, Gpu] = {
    # Measured at 128k tokens with cuDNN attention; an H100 has the same cores.
    "h200": Gpu(memory=139, **_HOPPER),
    "h100": Gpu(memory=79, **_HOPPER),
    # Published rates of FlashAttention-2, and the same share of the peak for matrices as measured on Hopper.
    "a100": Gpu(memory=79, peak=312, matmul=250, attention=(190, 165), wide_attention=(200, 175)),
}


def known_gpu(device_name: str) -> Gpu | None:
    """The entry for a device as its driver names it."""
    return next((gpu for name, gpu in GPUS.items() if name in device_name.lower()), None)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to go through, in one step on average."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows per step."""
    attended: int
    """Pairs of query and key in a step, in a layer without a window."""
    steps: int | None
    """None: not known."""
    assumption: str = ""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.rows


def planned_work(plan: Plan, *, rows: int, steps: int | None, long_row_mask: LongRowMask) -> Work:
    """From a plan: its documents decide how much attention there is."""
    length = plan.config.target_length
    sizes = (plan.spans[:, 3] - plan.spans[:, 2]).astype(np.float64)
    row_of_span = np.repeat(np.arange(len(plan)), np.diff(plan.first_span))
    apart = np.bincount(row_of_span, weights=sizes**2 / 2, minlength=len(plan))
    if long_row_mask == "full":
        kinds = np.array([plan.config.kind(bucket) == "long" for bucket in range(len(plan.config.buckets))])
        apart[kinds[plan.bucket_of_row]] = length**2 / 2
    return Work(length=length, rows=rows, attended=int(apart.mean() * rows), steps=steps)


def assumed_work(*, original_length: int, target_length: int, rows: int, steps: int | None) -> Work:
    """Without a plan: the paper's mix."""
    buckets = PlanConfig(target_length=target_length, original_length=original_length).buckets
    short = sum(b.quota for b in buckets if b.up_to <= original_length) / sum(b.quota for b in buckets)
    document = original_length // 2
    attended = target_length * (short * document / 2 + (1 - short) * target_length / 2)
    return Work(
        length=target_length,
        rows=rows,
        attended=int(attended * rows),
        steps=steps,
        assumption=f"{short:.0%} short rows of documents of {document:,} tokens, the rest long rows",
    )


def estimate_run(
    model: str,
    config: TrainConfig,
    wanted: EstimateConfig,
    *,
    plan: Path | None = None,
    original_length: int | None = None,
) -> dict[str, Any]:
    """What a run with these options would take; no weights are read."""
    if problems := [*config.problems(), *wrong_types(wanted), *broken_limits(wanted)]:
        raise cannot_start(problems)
    info = describe(model, original_length=original_length)
    planned = read_plan(plan) if plan else None
    if wanted.gpus % config.sequence_parallel:
        raise LongRopeError(
            f"{wanted.gpus} GPUs cannot form groups of {config.sequence_parallel}", hint="choose another --gpus"
        )
    run = config.resolved(len(planned) if planned else None, groups=wanted.gpus // config.sequence_parallel)
    run.check()
    if planned is not None:
        work = planned_work(planned, rows=run.batch_rows, steps=run.steps, long_row_mask=config.long_row_mask)
    elif wanted.target_length is not None:
        work = assumed_work(
            original_length=info.rope.original_length,
            target_length=wanted.target_length,
            rows=run.batch_rows,
            steps=config.steps,
        )
    else:
        raise LongRopeError("the length of the rows is missing", hint="give --plan FILE or --target-length N")
    shape = shape_of(skeleton(info), info, freeze=config.freeze, lora=config.lora, also=config.also)
    options: dict[str, Any] = {
        "gpus": wanted.gpus,
        "gpu": wanted.gpu,
        "sequence_parallel": config.sequence_parallel,
        "recompute": config.recompute is not False,  # the default on GPUs
        "compiled": config.compiled,
    }
    levels = possible_levels(config)
    result = _first_that_fits(shape, work, options, levels)
    if not result["fits"]:
        smaller = None if config.lora else shape_of(skeleton(info), info, lora=SOME_LORA)
        shortest = info.rope.original_length + 1
        others = possible_levels(replace(config, memory="auto"))
        result["would_fit"] = list(_fitting(shape, work, options, levels, others, smaller, shortest=shortest))
    return result


def possible_levels(config: TrainConfig) -> list[MemoryLevel]:
    """What `--memory` leaves to choose from, the cheapest first."""
    if config.memory != "auto":
        return [config.memory]
    return [name for name in LEVELS if not replace(config, memory=name).problems()]


def _first_that_fits(
    shape: ModelShape, work: Work, options: Mapping[str, Any], levels: Sequence[MemoryLevel]
) -> dict[str, Any]:
    """The estimate of the first level that fits, or of the last one."""
    results = (estimate(shape, work, **options, memory=level) for level in levels)
    return next(result for result in results if result["fits"] or result["memory"] == levels[-1])


def _fitting(
    shape: ModelShape,
    work: Work,
    options: Mapping[str, Any],
    levels: Sequence[MemoryLevel],
    others: Sequence[MemoryLevel],
    smaller: ModelShape | None,
    *,
    shortest: int,
) -> Iterator[str]:
    """Changes of which each alone makes a run fit; `others` are the levels of memory that could be asked for."""

    def fits(
        shape: ModelShape = shape, work: Work = work, *, levels: Sequence[MemoryLevel] = levels, **changes: Any
    ) -> bool:
        return bool(_first_that_fits(shape, work, {**options, **changes}, levels)["fits"])

    if not options["recompute"] and fits(recompute=True):
        yield "--recompute"
    elif enough := [level for level in others if fits(levels=[level])]:
        yield f"--memory {enough[0]}"
    if smaller is not None and fits(smaller):
        yield f"--lora {SOME_LORA}"
    gpus, together = options["gpus"], options["sequence_parallel"]
    more = [gpus << shift for shift in range(1, MOST_DOUBLINGS)]
    if found := [number for number in more if fits(gpus=number)]:
        yield f"--gpus {found[0]}"
    # The processes that share a row must be a part of all.
    sharing = [number for number in (together << shift for shift in range(1, MOST_DOUBLINGS)) if number <= gpus]
    if found := [number for number in sharing if gpus % number == 0 and fits(sequence_parallel=number)]:
        yield f"--sequence-parallel {found[0]}"
    elif found := [number for number in more if fits(gpus=number, sequence_parallel=number)]:
        yield f"--gpus {found[0]} --sequence-parallel {found[0]}"
    lengths = [work.length >> shift for shift in range(1, MOST_DOUBLINGS)]
    if found := [length for length in lengths if length >= shortest and fits(work=replace(work, length=length))]:
        yield f"rows of {found[0]:,} tokens"


def estimate(
    shape: ModelShape,
    work: Work,
    *,
    gpus: int,
    gpu: str,
    sequence_parallel: int = 1,
    recompute: bool = True,
    compiled: bool = False,
    memory: MemoryLevel = "plain",
) -> dict[str, Any]:
    """Memory of each GPU in GiB and the time a run takes, with what was assumed."""
    chip, level, tokens = GPUS[gpu], LEVELS[memory], work.length // sequence_parallel
    accumulates = work.rows * sequence_parallel > gpus
    held = memory_of(shape, tokens, gpus, level, recompute=recompute, compiled=compiled, accumulates=accumulates)
    total, available = sum(held.values()) / GIB, chip.memory * RESERVED
    passes = 2 + shape.trained_share + recompute  # forward, gradients of inputs and of weights, forward again
    forward_rate, backward_rate = chip.attention_rates(shape.head_dim)
    attention = shape.attention_flops(work.tokens, work.attended)
    seconds = shape.linear_flops(work.tokens) * passes / (chip.matmul * 1e12)
    again = recompute and not level.keeps_attention
    seconds += (1 + again) * attention / (forward_rate * 1e12) + FLASH_BACKWARD * attention / (backward_rate * 1e12)
    seconds *= OVERHEAD / gpus
    return {
        "parameters": shape.parameters,
        "trained_parameters": shape.trained,
        "gpus": gpus,
        "gpu": gpu,
        "sequence_parallel": sequence_parallel,
        "length": work.length,
        "batch_rows": work.rows,
        "tokens_per_step": work.tokens,
        "memory": memory,
        "memory_gib": {name: size / GIB for name, size in held.items()},
        "memory_total_gib": total,
        "memory_available_gib": available,
        "host_memory_gib": sum(host_memory_of(shape, tokens, gpus, level).values()) / GIB,
        "fits": total <= available,
        "seconds_per_step": seconds,
        "tokens_per_second": work.tokens / seconds,
        "model_flops_utilisation": shape.step_flops(work.tokens, work.attended) / (seconds * gpus * chip.peak * 1e12),
        "steps": work.steps,
        "seconds": None if work.steps is None else seconds * work.steps,
        "gpu_hours": None if work.steps is None else seconds * work.steps * gpus / 3600,
        "assumptions": _assumptions(shape, work, chip, gpus, level, recompute=recompute),
    }


def memory_of(
    shape: ModelShape,
    tokens: int,
    gpus: int,
    level: Level,
    *,
    recompute: bool = True,
    compiled: bool = False,
    accumulates: bool = True,
    host: float = math.inf,
) -> dict[str, float]:
    """Bytes on each GPU; `tokens` is its part of a row, and it may have several rows in a step or one.

    Layer inputs for which `host` bytes of host memory are too few stay on the GPU.
    """
    kv_width = shape.kv_heads * shape.head_dim
    # All that one layer does, norms in float32, which fused ones do not keep; the sum is what SmolLM2 was measured at.
    around, inside = (4, 3) if compiled else (8, 4)
    at_once = min(tokens, MLP_ROWS) if level.frugal else tokens
    whole = tokens * HALF * (around * shape.hidden + 3 * shape.width + 3 * kv_width)
    whole += at_once * HALF * inside * shape.inner
    inputs = HALF * tokens * shape.hidden
    attention = tokens * (HALF * shape.width + FULL * shape.heads)
    kept: float = len(shape.windows) * (inputs + attention if recompute else whole)
    if level.frugal:
        in_host = host_memory_of(shape, tokens, gpus, level, host=host)["layer inputs (bfloat16)"]
        kept = len(shape.windows) * (inputs + (attention if level.keeps_attention else 0)) - in_host
    if not accumulates and not shape.linear:
        # No gradient is there before layers begin to give up what they kept; then one takes the place of the other.
        kept = max(kept - (HALF if level.compact else FULL) * shape.trained / gpus, 0)
    if level.frugal:
        kept += 2 * inputs  # back from the host: the one at work, and the one that comes next
    states = {} if level.states_in_host else _states(shape, level)
    return {
        **{name: size / gpus for name, size in (_weights(shape, level) | states).items()},
        "bfloat16 weights and gradients in use": HALF * (shape.outside + 2 * shape.layer)
        + (HALF + FULL) * shape.trained_at_once,
        "activations that layers keep": kept,
        "activations of the layer at work": whole,  # gradients take the place of values that are done with
        "a piece of the logits": LOGIT_ROWS * shape.vocabulary * 2 * (HALF + FULL) + 2 * HALF * tokens * shape.hidden,
    }


def host_memory_of(
    shape: ModelShape, tokens: int, gpus: int, level: Level, *, host: float = math.inf
) -> dict[str, float]:
    """Bytes in host memory for each GPU, of which layer inputs take what is left of `host`."""
    held = {name: size / gpus for name, size in _states(shape, level).items()} if level.states_in_host else {}
    if level.frugal:
        wanted = len(shape.windows) * HALF * tokens * shape.hidden
        held["layer inputs (bfloat16)"] = min(wanted, max(host - sum(held.values()), 0))
    return held


def _weights(shape: ModelShape, level: Level) -> dict[str, float]:
    if shape.linear:
        linear = (FOUR_BIT_BYTES if level.four_bit else HALF) * shape.linear
        return {
            f"frozen linear layers ({'4 bits' if level.four_bit else 'bfloat16'})": linear,
            "other frozen weights (bfloat16)": HALF * (shape.parameters - shape.linear),
            "what learns, and its gradients (float32)": 2 * FULL * shape.trained,
        }
    if not level.compact:
        return {
            "master weights (float32)": FULL * shape.parameters,
            "gradients (float32)": FULL * shape.trained,
        }
    return {"weights (bfloat16)": HALF * shape.parameters, "gradients (bfloat16)": HALF * shape.trained}


def _states(shape: ModelShape, level: Level) -> dict[str, float]:
    if not level.compact or shape.linear:
        return {"Adam moments (float32)": 2 * FULL * shape.trained}
    return {
        "lower halves of weights (16 bits)": HALF * shape.trained,
        "Adam moments (8 bits)": 2 * (1 + FULL / BLOCK) * shape.trained,
    }


def _assumptions(shape: ModelShape, work: Work, chip: Gpu, gpus: int, level: Level, *, recompute: bool) -> list[str]:
    kept = "all they did"
    if recompute:
        kept = f"their input{' and what attention gave' if level.keeps_attention else ''}, and compute the rest again"
    found = [
        f"layers keep {kept}",
        f"matrix products at {chip.matmul:g} of {chip.peak:g} TFLOP/s",
    ]
    if level.frugal:
        found.append("what moves to host memory and back hides behind computation")
    if shape.hidden < SMALL:
        found.append("matrices as small as these reach about 60% of that, which is not counted")
    if gpus > 1:
        found.append("communication hides behind computation; expect 10 to 30% less where it does not")
    return [*found, *([work.assumption] if work.assumption else [])]


def estimate_tables(result: Mapping[str, Any]) -> tuple[Table, Table]:
    """The memory and the time of an estimate."""
    memory = [[name, f"{size:,.1f}"] for name, size in result["memory_gib"].items()]
    verdict = "fits" if result["fits"] else f"does NOT fit; {_way_out(result)}"
    held = Table(
        title=f"memory of each of {result['gpus']} × {result['gpu']}, rows of {result['length']:,} tokens, "
        f"{result['parameters'] / 1e9:,.2f}B parameters ({result['trained_parameters'] / 1e9:,.3f}B trained)",
        columns=["what", "GiB"],
        rows=[*memory, ["together", f"{result['memory_total_gib']:,.1f}"]],
        caption=f"{result['memory_available_gib']:,.0f} GiB can be used: {verdict}{_beside(result)}",
    )
    rows = [
        ["seconds a step", f"{result['seconds_per_step']:,.1f}"],
        ["tokens/s", f"{result['tokens_per_second']:,.0f}"],
        ["tokens/s of each GPU", f"{result['tokens_per_second'] / result['gpus']:,.0f}"],
        ["model FLOPs utilisation", f"{result['model_flops_utilisation']:.0%}"],
    ]
    if result["steps"] is not None:
        rows += [
            [counted(result["steps"], "step"), duration(result["seconds"])],
            ["GPU hours", f"{result['gpu_hours']:,.1f}"],
        ]
    assumed = "assumed: " + "; ".join(result["assumptions"])
    return held, Table(
        title=f"time, {counted(result['batch_rows'], 'row')} a step",
        columns=["what", "value"],
        rows=rows,
        caption=assumed,
    )


def _beside(result: Mapping[str, Any]) -> str:
    """What a level other than the plain one takes besides."""
    if result["memory"] == "plain":
        return ""
    host = f" and {result['host_memory_gib']:,.1f} GiB of host memory for each GPU" if result["host_memory_gib"] else ""
    return f"; this is with --memory {result['memory']}{host}"


def _way_out(result: Mapping[str, Any]) -> str:
    changes = result["would_fit"]
    return f"it would with {' or '.join(changes)}" if changes else "nor with any one other option"
