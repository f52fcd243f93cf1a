"""Speed of mixed-window training on one GPU, random weights.

python benchmarks/training.py phi3-mini    # 3.8B, 128k: full fine-tuning, long and short rows
python benchmarks/training.py smollm2      # 135M, 32k: three long rows to one short, against a plain loop
python benchmarks/training.py llama3-8b    # 8B, 128k: full fine-tuning at a level of --memory, or --lora RANK
python benchmarks/training.py lengths --of phi3-mini --lengths 128k,256k,512k --memory least
python benchmarks/training.py figure       # of all lengths that were measured

With --tiny llama3-8b, and with --of tiny lengths, have a shape that runs on a CPU, to try the program.
"""

import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from common import arguments, peak_gib, report, reset_peak, synchronize
from shapes import DEVICE, SHAPES, llama3_8b, phi3_mini, smollm2, tiny_llama3
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from longrope2.distributed import World
from longrope2.families import read_config
from longrope2.figures import SERIES, figure, length_label
from longrope2.methods import rescale
from longrope2.models import describe, skeleton
from longrope2.options import parse_length
from longrope2.training.config import LEVELS, ResolvedConfig, TrainConfig
from longrope2.training.estimate import (
    GIB,
    OVERHEAD,
    ModelShape,
    Work,
    estimate,
    host_memory_of,
    memory_of,
    shape_of,
)  # fmt: skip
from longrope2.training.four_bit import freeze_in_four_bits
from longrope2.training.loop import make_optimizer, room_for_inputs, train_step
from longrope2.training.mixed import Batch, MixedWindowModel, mixed_window
from longrope2.training.parallel import shard
from longrope2.training.trainable import add_lora

TITLES = {"llama3-8b": "LLaMA-3-8B", "phi3-mini": "Phi-3-mini", "smollm2": "SmolLM2-135M"}
ALONE = World(process=0, num_processes=1, local_process=0)
CONFIG = TrainConfig(steps=100).resolved()
KERNELS = [SDPBackend.CUDNN_ATTENTION if DEVICE == "cuda" else SDPBackend.MATH]
PIECE = 4096
Loss = Callable[[nn.Module, Tensor], Tensor]


def row(length: int, vocabulary: int, *, document: int | None = None) -> Batch:
    """A long row, or a short one of documents of one size."""
    tokens = torch.randint(3, vocabulary, (1, length), device=DEVICE)
    ends = list(range(0, length + 1, document or length))
    labels = tokens.roll(-1, 1)
    labels[:, [end - 1 for end in ends[1:]]] = -100
    return Batch(
        tokens=tokens,
        positions=(torch.arange(length, device=DEVICE) % (document or length))[None],
        labels=labels,
        long_rows=torch.tensor([document is None], device=DEVICE),
        boundaries=[ends],
    )


@contextmanager
def trainable(
    make, target_length: int, config: ResolvedConfig = CONFIG, **options
) -> Iterator[tuple[MixedWindowModel, torch.optim.Optimizer]]:
    """A model set up for training as the command does it."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = make()
    if config.precision(config.level, DEVICE) != "float32":
        model = model.bfloat16()
    if config.lora is not None:
        add_lora(model, config.lora)
    if config.level.four_bit:
        freeze_in_four_bits(model)
    factors = rescale("yarn", read_config(model.config.to_dict()).rope, target_length)
    room = room_for_inputs(model, config.level, ALONE)
    with mixed_window(model, factors, check=False, host_room=room, **options) as mixed:
        shard(mixed, ALONE, DEVICE)
        mixed.train()
        yield mixed, make_optimizer(mixed, config)
    del model, mixed
    gc.collect()
    torch.cuda.empty_cache()


def speed(mixed, optimizer, batches: list[Batch], *, warm_up: int, steps: int) -> float:
    """Tokens per second over some steps."""
    tokens = sum(batch.tokens.numel() for batch in batches)
    for step in range(warm_up + steps):
        if step == warm_up:
            synchronize()
            start = time.perf_counter()
        result = train_step(mixed, optimizer, batches, CONFIG, step, ALONE)
        print(f"  step {step + 1}: {tokens / result.seconds:,.0f} tokens/s, loss {result.loss:.3f}", flush=True)
    synchronize()
    return steps * tokens / (time.perf_counter() - start)


def measure_phi3(options) -> None:
    length, document = 131_072, 8192
    with trainable(phi3_mini, length, recompute=True, compiled=True) as (mixed, optimizer):
        vocabulary = mixed.model.config.vocab_size
        long = speed(mixed, optimizer, [row(length, vocabulary)], warm_up=1, steps=1)
        short = speed(mixed, optimizer, [row(length, vocabulary, document=document)], warm_up=1, steps=1)
        peak = peak_gib()
    with trainable(phi3_mini, length) as (mixed, optimizer):
        mixed.model.gradient_checkpointing_enable({"use_reentrant": False})
        full = speed(mixed, optimizer, [row(length, vocabulary)], warm_up=0, steps=1)
        mixed.model.gradient_checkpointing_disable()
    shape = {"length": length, "parameters": "3.8B", "more_is_better": True, "unit": "tokens/s"}
    report(
        options, name="train-phi3-mini-128k", value=long, peer="not compiled, attention recomputed (its first step)",
        peer_value=full, peak_gib=peak, paper_tokens_per_second_a100=1113, **shape,
    )  # fmt: skip
    report(
        options, name="train-short-rows", value=short, peer="a long row of the same length", peer_value=long,
        document=document, **shape,
    )  # fmt: skip


def shape_of_model(make: Callable[[], Any], config: ResolvedConfig) -> ModelShape:
    """What the estimate knows of a model."""
    with tempfile.TemporaryDirectory() as folder:
        with torch.device("meta"):
            make().config.save_pretrained(folder)
        info = describe(folder)
        return shape_of(skeleton(info), info, lora=config.lora)


def measure_llama3(options) -> None:
    make = tiny_llama3 if options.tiny else llama3_8b
    length = parse_length("256" if options.tiny else options.length)
    config = TrainConfig(steps=100, memory=options.memory, lora=options.lora).resolved()
    compiled = not options.tiny
    with trainable(make, length, config, recompute=True, compiled=compiled, level=config.level) as (mixed, optimizer):
        vocabulary = mixed.model.config.vocab_size
        long = speed(mixed, optimizer, [row(length, vocabulary)], warm_up=1, steps=1)
        short = {
            document: speed(mixed, optimizer, [row(length, vocabulary, document=document)], warm_up=1, steps=1)
            for document in (length // 16, length // 32)
        }
        peak = peak_gib()
    del mixed, optimizer
    gc.collect()
    if config.lora:
        peer, full = "transformers, peft, gradient checkpointing, loss in pieces", plain_lora(make, config.lora, length)
    else:  # plain gradient checkpointing does not fit: attention computed again and nothing compiled, the rest alike
        peer = "not compiled, attention recomputed (its first step)"
        again = replace(config.level, keeps_attention=False)
        with trainable(make, length, config, recompute=True, level=again) as (mixed, optimizer):
            full = speed(mixed, optimizer, [row(length, vocabulary)], warm_up=0, steps=1)
    shape = shape_of_model(make, config)
    name = f"train-{'tiny' if options.tiny else 'llama3-8b'}{'-lora' if config.lora else ''}-{length // 1024}k"
    report(
        options, name=name, value=long, unit="tokens/s", more_is_better=True, peer=peer, peer_value=full, length=length,
        parameters=shape.parameters, trained_parameters=shape.trained, memory=options.memory,
        peak_gib=peak, estimated_gib=sum(
            memory_of(shape, length, 1, config.level, compiled=compiled, accumulates=False).values()
        ) / GIB,
        host_gib=sum(host_memory_of(shape, length, 1, config.level).values()) / GIB,
        model_teraflops=long / length * shape.step_flops(length, length**2 // 2) / 1e12,
        short_rows_tokens_per_second=short,
        published_tokens_per_second_per_gpu={"Untied Ulysses, 8 x H100": 2280, "torchtitan, 8 x H100, fp8": 1071},
    )  # fmt: skip


def measure_lengths(options) -> None:
    """Steps of a few layers at growing lengths; with what one more layer adds, they are those of the whole model.

    Two layers at least, or what is there twice, such as the layer input that comes next, counts for each layer. If
    the second number of layers is the model's own, its step is the whole one itself.
    """
    make = SHAPES[options.of]
    config = TrainConfig(steps=100, memory=options.memory, lora=options.lora).resolved()
    whole, compiled = shape_of_model(make, config), DEVICE == "cuda"
    few, more = (int(number) for number in options.layers.split(","))
    rest = len(whole.windows) - more
    documents = [parse_length(text) for text in options.documents.split(",") if text]
    points = []
    for length in map(parse_length, options.lengths.split(",")):
        steps, tokens = {}, options.rows * length
        for layers in (few, more):
            reset_peak()
            with trainable(
                partial(make, layers), length, config, recompute=True, compiled=compiled, level=config.level
            ) as (mixed, optimizer):
                vocabulary, chosen = mixed.model.config.vocab_size, {"warm_up": options.warm_up, "steps": 1}
                long = [row(length, vocabulary) for _ in range(options.rows)]
                found = [tokens / speed(mixed, optimizer, long, **chosen), peak_gib() or 0.0]
                for document in documents:
                    short = [row(length, vocabulary, document=document) for _ in range(options.rows)]
                    found.append(tokens / speed(mixed, optimizer, short, **chosen))
                steps[layers] = found
            del mixed, optimizer  # or the next model's peak counts this one
            gc.collect()
        pairs = zip(*steps.values(), strict=True)
        seconds, peak, *short = (after + rest * (after - before) / (more - few) for before, after in pairs)
        work = Work(length=length, rows=options.rows, attended=tokens * length // 2, steps=None)
        said = estimate(whole, work, gpus=1, gpu="h200", compiled=compiled, memory=options.memory)
        points.append({
            "length": length, "steps": {layers: {"seconds": a, "peak_gib": b} for layers, (a, b, *_) in steps.items()},
            "rows": options.rows, "seconds": seconds, "tokens_per_second": tokens / seconds, "peak_gib": peak,
            "estimated_gib": said["memory_total_gib"], "floor_seconds": said["seconds_per_step"] / OVERHEAD,
            "short_rows_tokens_per_second": {
                document: tokens / each for document, each in zip(documents, short, strict=True)
            },
        })  # fmt: skip
        print(points[-1], flush=True)
    last = points[-1]
    report(
        options, name=f"train-{'lengths' if options.rows == 1 else f'{options.rows}-rows'}-{options.of}"
        f"{'-lora' if config.lora else ''}{'' if rest else '-whole'}",
        value=last["tokens_per_second"],
        unit="tokens/s", more_is_better=True, peer="its FLOPs at the rates of the kernels alone",
        peer_value=tokens / last["floor_seconds"], parameters=whole.parameters, memory=options.memory,
        layers=len(whole.windows), points=points,
    )  # fmt: skip


def draw_lengths(folder: Path) -> None:
    """Memory and speed over length of all shapes measured, with the floor by FLOPs as dashes."""
    shapes: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("train-lengths-*.json")):
        result = json.loads(path.read_text())
        name = result["name"].removeprefix("train-lengths-").removesuffix("-whole")
        learns = "LoRA" if name.endswith("-lora") else "all weights"
        shape = name.removesuffix("-lora")
        shapes[f"{TITLES.get(shape, shape)}, {learns}, {result['memory']}"] = result["points"]
    path = folder.parents[1] / "docs" / "images" / "training-lengths.png"
    with figure(path, 1, 2, (9, 3.4)) as drawing:
        for (name, found), colour in zip(shapes.items(), SERIES, strict=False):
            points = sorted(found, key=lambda point: point["length"])
            lengths = [point["length"] for point in points]
            for axis, key in zip(drawing.axes.flat, ("peak_gib", "tokens_per_second"), strict=True):
                measured = [math.nan if point[key] is None else point[key] for point in points]
                axis.plot(lengths, measured, "o-", color=colour, label=name)
            floor = [point["length"] / point["floor_seconds"] for point in points]
            drawing.axes.flat[1].plot(lengths, floor, "_--", color=colour)
        every = sorted({point["length"] for points in shapes.values() for point in points})
        for axis, label in zip(drawing.axes.flat, ("peak memory, GiB", "tokens/s (dashes: by FLOPs)"), strict=True):
            axis.set(xscale="log", xlabel="tokens of a row", ylabel=label)
            axis.set_xticks(every, labels=map(length_label, every))
            axis.minorticks_off()
        drawing.axes.flat[1].set(yscale="log")
        drawing.axes.flat[1].yaxis.set_major_formatter("{x:,.0f}")
        drawing.axes.flat[0].set(ylim=(0, 139))
        handles, labels = drawing.axes.flat[0].get_legend_handles_labels()
        drawing.figure.legend(handles, labels, loc="outside lower center", ncols=3)


def plain_loop(
    model: nn.Module, batches: list[Batch], loss_of: Callable[[nn.Module, Tensor], Tensor], steps: int
) -> float:
    """What one writes first: transformers' forward under autocast, cuDNN attention, a row at a time."""
    optimizer = make_optimizer(model, CONFIG)
    tokens = sum(batch.tokens.numel() for batch in batches)
    for step in range(1 + steps):
        if step == 1:
            synchronize()
            start = time.perf_counter()
        for batch in batches:
            with torch.autocast(DEVICE, torch.bfloat16), sdpa_kernel(KERNELS):
                (loss_of(model, batch.tokens) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronize()
    return steps * tokens / (time.perf_counter() - start)


def whole_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """transformers' own."""
    return model(tokens, labels=tokens, use_cache=False).loss


def loss_in_pieces(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token loss without logits for the whole row, of which an 8B model's would take 100 GiB at 128k."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]

    def of(piece: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(piece).flatten(0, 1).float(), labels.flatten(), reduction="sum")

    pieces = zip(hidden.split(PIECE, dim=1), tokens[:, 1:].split(PIECE, dim=1), strict=True)
    return sum(checkpoint(of, *piece, use_reentrant=False) for piece in pieces) / hidden[..., 0].numel()


def plain_lora(make: Callable[[], Any], rank: int, length: int) -> float:
    """Tokens per second of transformers, peft and gradient checkpointing, with frozen weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = make().bfloat16().train()
    add_lora(model, rank)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain_loop(model, [row(length, model.config.vocab_size)], loss_in_pieces, steps=1)


def measure_smollm2(options) -> None:
    length, document = 32_768, 4096
    variants = {}
    for name, chosen in {"plain": {}, "compiled": {"compiled": True}, "recompute": {"recompute": True}}.items():
        reset_peak()
        with trainable(smollm2, length, **chosen) as (mixed, optimizer):
            vocabulary = mixed.model.config.vocab_size
            batches = [row(length, vocabulary) for _ in range(3)] + [row(length, vocabulary, document=document)]
            found = speed(mixed, optimizer, batches, warm_up=2, steps=4)
        variants[name] = {"tokens_per_second": found, "peak_gib": peak_gib()}
        print(name, variants[name], flush=True)
    # The plain loop knows no documents: its short rows are four windows of 8k, each attended to as a whole.
    short = [row(8192, vocabulary) for _ in range(4)]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = smollm2().train()
    peer = plain_loop(model, batches[:3] + short, whole_loss, steps=4)
    report(
        options, name="train-smollm2-32k", value=max(v["tokens_per_second"] for v in variants.values()),
        unit="tokens/s", peer="transformers, autocast, cuDNN attention, short rows as windows of 8k", peer_value=peer,
        more_is_better=True, length=length, document=document, variants=variants,
        loop_of_first_experiments_tokens_per_second=76_000,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=["phi3-mini", "smollm2", "llama3-8b", "lengths", "figure"])
    parser.add_argument("--memory", choices=list(LEVELS), default="small", help="level of llama3-8b and lengths")
    parser.add_argument("--lora", type=int, help="rank, for llama3-8b and lengths")
    parser.add_argument("--of", choices=list(SHAPES), default="phi3-mini", help="shape of lengths")
    parser.add_argument("--lengths", default="128k,256k,512k")
    parser.add_argument("--layers", default="2,4", help="two numbers of layers to run at each length")
    parser.add_argument("--rows", type=int, default=1, help="rows of a step of lengths")
    parser.add_argument("--documents", default="", help="of short rows to measure at each length, by their tokens")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of lengths before the one that counts")
    parser.add_argument("--length", default="128k", help="rows of llama3-8b")
    parser.add_argument("--tiny", action="store_true", help="a small shape in place of llama3-8b")
    options = parser.parse_args()
    {
        "phi3-mini": measure_phi3, "smollm2": measure_smollm2, "llama3-8b": measure_llama3, "lengths": measure_lengths,
        "figure": lambda options: draw_lengths(options.output),
    }[options.what](options)  # fmt: skip


if __name__ == "__main__":
    main()
