"""Estimates against the facts they are calibrated on, and against real models."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from training_samples import make_sample
from transformers import LlamaConfig, Phi3Config

from conftest import FAMILY_OPTIONS, family_config, family_model
from longrope2.cli import cli
from longrope2.data.loader import RowLoader
from longrope2.data.plan import read_plan
from longrope2.errors import LongRopeError
from longrope2.models import describe, skeleton
from longrope2.training.config import LEVELS, EstimateConfig, TrainConfig
from longrope2.training.estimate import (
    GIB,
    RESERVED,
    Work,
    assumed_work,
    estimate,
    estimate_run,
    estimate_tables,
    host_memory_of,
    known_gpu,
    memory_of,
    planned_work,
    shape_of,
)  # fmt: skip
from longrope2.training.four_bit import freeze_in_four_bits
from longrope2.training.loop import PlanRows, _attended, make_optimizer
from longrope2.training.optimizer import BLOCK
from longrope2.training.trainable import add_lora

LENGTH = 131_072
PHI3 = Phi3Config(
    hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    vocab_size=32_064, max_position_embeddings=2048, original_max_position_embeddings=2048, sliding_window=None,
)  # fmt: skip
LLAMA3 = LlamaConfig(
    hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128_256, max_position_embeddings=8192,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip


def shape(config, folder, **options):
    config.save_pretrained(folder)
    info = describe(folder)
    return shape_of(skeleton(info), info, **options)


def state_of(result):
    """Bytes of weights, gradients and moments."""
    return GIB * sum(size for name, size in result["memory_gib"].items() if "float32" in name)


def long_rows(rows=1, *, length=LENGTH):
    return Work(length=length, rows=rows, attended=rows * length**2 // 2, steps=None)


def test_phi3_mini_on_one_h200(tmp_path):
    """61 GB of state and 26 GB of layer inputs; about 3,900 tokens/s from the measured kernels."""
    phi3 = shape(PHI3, tmp_path)
    assert phi3.parameters == 3_821_079_552
    result = estimate(phi3, long_rows(2), gpus=1, gpu="h200")
    memory = result["memory_gib"]
    assert state_of(result) == pytest.approx(61e9, rel=0.01)
    assert memory["activations that layers keep"] * GIB == pytest.approx(
        2 * 25.8e9, rel=0.02
    )  # inputs, and attention outputs of the same width
    assert result["tokens_per_second"] == pytest.approx(3900, rel=0.03)
    assert 0.3 < result["model_flops_utilisation"] < 0.5
    keeping = estimate(phi3, long_rows(2), gpus=1, gpu="h200", recompute=False)
    assert keeping["seconds_per_step"] < result["seconds_per_step"]
    assert keeping["memory_total_gib"] > 2 * result["memory_total_gib"]
    assert result["fits"]
    assert not keeping["fits"]


@pytest.mark.parametrize(
    ("length", "options", "measured"),
    [
        (32_768, {"recompute": True}, 6.27),
        (32_768, {"recompute": False}, 28.6),
        (32_768, {"recompute": False, "compiled": True}, 20.9),
        (65_536, {"recompute": False, "compiled": True}, 39.0),
    ],
)
def test_smollm2_takes_the_memory_that_was_measured(length, options, measured, tmp_path):
    """Peaks in GiB on one H200."""
    work = Work(length=length, rows=4, attended=2 * length**2, steps=None)
    result = estimate(shape(SMOLLM2, tmp_path), work, gpus=1, gpu="h200", **options)
    assert result["memory_total_gib"] == pytest.approx(measured, rel=0.05)
    assert any("60%" in assumption for assumption in result["assumptions"])


@pytest.mark.parametrize(("compiled", "measured"), [(False, 115), (True, 110)])
def test_phi3_takes_the_memory_that_was_measured(compiled, measured, tmp_path):
    """With one row in a step, gradients take the place of what layers kept."""
    result = estimate(shape(PHI3, tmp_path), long_rows(), gpus=1, gpu="h200", compiled=compiled)
    assert result["memory_total_gib"] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("config", "layers", "length", "memory", "lora", "measured"),
    [
        (LLAMA3, 32, LENGTH, "small", None, 97.4),
        (LLAMA3, 1, LENGTH, "least", 16, 22.9),
        (LLAMA3, 4, LENGTH, "least", 16, 25.2),
        (LLAMA3, 1, 4 * LENGTH, "least", 16, 60.5),
        (LLAMA3, 3, 4 * LENGTH, "least", 16, 62.1),
        (LLAMA3, 32, 2 * LENGTH, "host", 16, 113.6),
        (PHI3, 1, LENGTH, "least", None, 14.6),
        (PHI3, 5, LENGTH, "least", None, 17.2),
        (PHI3, 3, 4 * LENGTH, "least", None, 51.0),
        (PHI3, 32, 4 * LENGTH, "least", None, 63.2),  # with what each more layer adds at 128k, from 3 to 5 of them
        (SMOLLM2, 30, 8 * LENGTH, "plain", None, 89.8),
    ],
)
def test_levels_take_the_memory_that_was_measured(config, layers, length, memory, lora, measured, tmp_path):
    """Peaks in GiB on one H200, one row a step, compiled."""
    cut = type(config)(**{**config.to_dict(), "num_hidden_layers": layers})
    result = estimate(
        shape(cut, tmp_path, lora=lora), long_rows(length=length), gpus=1, gpu="h200", memory=memory, compiled=True
    )
    assert result["memory_total_gib"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("config", "length", "memory", "lora", "seconds"),
    [
        (LLAMA3, LENGTH, "small", None, 43.9),
        (LLAMA3, 2 * LENGTH, "host", 16, 142.2),
        # Of a few layers, with what each more of them adds.
        (LLAMA3, LENGTH, "least", 16, 48.8),
        (LLAMA3, 4 * LENGTH, "least", 16, 666),
        (PHI3, LENGTH, "least", None, 38.3),
        (PHI3, 4 * LENGTH, "least", None, 625),
        (SMOLLM2, 8 * LENGTH, "plain", None, 339),
    ],
)
def test_levels_take_the_time_that_was_measured(config, length, memory, lora, seconds, tmp_path):
    model = shape(config, tmp_path, lora=lora)
    result = estimate(model, long_rows(length=length), gpus=1, gpu="h200", memory=memory, compiled=True)
    assert result["seconds_per_step"] == pytest.approx(seconds, rel=0.1)


def test_llama3_8b_needs_more_than_one_h200(tmp_path):
    llama = shape(LLAMA3, tmp_path)
    assert llama.parameters == 8_030_261_248
    alone = estimate(llama, long_rows(), gpus=1, gpu="h200")
    assert state_of(alone) == pytest.approx(128e9, rel=0.01)
    assert not alone["fits"]
    shared = estimate(llama, long_rows(8), gpus=8, gpu="h100", sequence_parallel=4)
    assert shared["fits"]
    assert shared["seconds_per_step"] == pytest.approx(alone["seconds_per_step"])
    lora = estimate(shape(LLAMA3, tmp_path, lora=16), long_rows(), gpus=1, gpu="h200")
    assert lora["trained_parameters"] < 0.01 * lora["parameters"]
    assert lora["memory_total_gib"] < alone["memory_total_gib"] - 80
    assert lora["seconds_per_step"] < alone["seconds_per_step"]


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_shapes_are_those_of_real_models(family, tmp_path):
    """Parameters counted on a live model; matrix work against what torch counts in a forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    ours = shape(family_config(family), tmp_path)
    model = family_model(family)
    if "experts_per_tok" in str(model.config):
        model.set_experts_implementation("eager")  # torch does not count its grouped products
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    assert len(ours.windows) == model.config.num_hidden_layers
    tokens = 16
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 3 + tokens)[None], use_cache=False)
    # torch sees full squares of attention in eager mode, twice the causal half.
    attention = 2 * ours.attention_flops(tokens, tokens * tokens // 2)
    assert ours.linear_flops(tokens) + attention == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_lora_and_freezing_are_counted(tmp_path):
    config = family_config("llama")
    model = family_model("llama")
    mlp = sum(p.numel() for name, p in model.named_parameters() if "mlp" in name)
    frozen = shape(config, tmp_path, freeze=["*mlp*"])
    assert frozen.trained == frozen.parameters - mlp
    add_lora(model, 4)
    assert shape(config, tmp_path, lora=4).trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
@pytest.mark.parametrize("also", [(), ("norms",), ("norms", "embeddings")])
def test_memory_of_what_learns_beside_lora_is_counted(tmp_path, family, also):
    """Gradients and Adam's moments against those of a real step."""
    model = family_model(family)
    add_lora(model, 4, also)
    ours = shape(family_config(family), tmp_path, lora=4, also=also)
    optimizer = make_optimizer(model, TrainConfig().resolved())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    memory = estimate(ours, long_rows(), gpus=1, gpu="h200")["memory_gib"]
    assert memory["Adam moments (float32)"] * GIB == pytest.approx(sum(x.nbytes for x in moments))
    learned = sum(x.nbytes for p in model.parameters() if p.grad is not None for x in (p, p.grad))
    assert memory["what learns, and its gradients (float32)"] * GIB == pytest.approx(learned)
    layers = [{id(p) for p in layer.parameters()} for layer in model.base_model.layers]
    inside = set().union(*layers)
    parts = [*layers, {id(p) for p in model.parameters()} - inside]
    learning = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    assert ours.trained_at_once == max(sum(learning.get(one, 0) for one in part) for part in parts)


def test_sliding_layers_attend_to_less(tmp_path):
    gemma = shape(family_config("gemma2"), tmp_path)
    assert sorted(gemma.windows, key=str) == [16, None]
    tokens, pairs = 128, 128 * 129 // 2
    assert gemma.attention_flops(tokens, pairs) == 4 * gemma.width * (pairs + 128 * 16)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.mark.parametrize("mask", ["full", "document"])
def test_the_work_of_a_plan_is_that_of_its_rows(sample, mask):
    plan = read_plan(sample.folder / "plan.jsonl")
    corpora = RowLoader.open(plan, sample.folder / "cache")._corpora
    rows = PlanRows(plan, corpora, seed=0, long_row_mask=mask)
    real = np.mean([_attended(rows(number).boundaries[0]) for number in range(len(plan))])
    work = planned_work(plan, rows=4, steps=3, long_row_mask=mask)
    assert work.attended / 4 == pytest.approx(real, rel=0.12)  # BOS, EOS and the diagonal left out
    assert work.tokens == 4 * 128


def test_work_without_a_plan_is_the_papers_mix():
    work = assumed_work(original_length=8192, target_length=LENGTH, rows=64, steps=None)
    assert work.attended / 64 == pytest.approx(0.7 * LENGTH**2 / 2, rel=0.02)
    assert "30% short rows" in work.assumption


def test_the_command_prints_tables_or_json(sample, tmp_path):
    run = CliRunner().invoke
    options = ["train", str(sample.model), "--estimate", "--gpus", "4", "--gpu", "a100"]
    shown = run(cli, [*options, "--plan", str(sample.folder / "plan.jsonl"), "--batch-rows", "8"])
    assert shown.exit_code == 0, shown.output
    assert "3 steps" in shown.output
    assert re.search(r"Adam moments \(float32\)\s+0\.0", shown.output)
    assert "fits" in shown.output
    result = json.loads(run(cli, [*options, "--target-length", "4k", "--json"]).stdout)
    assert (result["length"], result["gpus"], result["steps"], result["batch_rows"]) == (4096, 4, None, 64)
    with pytest.raises(LongRopeError, match="length of the rows is missing"):
        run(cli, options, catch_exceptions=False)
    with pytest.raises(LongRopeError, match="4 GPUs cannot form groups of 3"):
        run(cli, [*options, "--sequence-parallel", "3"], catch_exceptions=False)
    assert "missing: --factors, --output" in run(cli, ["train", "tiny", "--plan", "x"]).output


def test_a_run_that_does_not_fit_says_so(tmp_path):
    LLAMA3.save_pretrained(tmp_path)
    wanted = EstimateConfig(gpu="h100", target_length=LENGTH)
    memory, time = estimate_tables(estimate_run(str(tmp_path), TrainConfig(steps=100, memory="plain"), wanted))
    assert "does NOT fit; it would with --memory least or --gpus 4 --sequence-parallel 4" in memory.caption
    assert "100 steps" in [row[0] for row in time.rows]


@pytest.mark.parametrize(
    ("length", "gpus", "memory"),
    [(LENGTH, 1, "plain"), (LENGTH, 2, "plain"), (8 * LENGTH, 8, "plain"), (8 * LENGTH, 1, "auto")],
)
def test_what_would_fit_fits_and_half_of_it_does_not(tmp_path, length, gpus, memory):
    LLAMA3.save_pretrained(tmp_path)

    def result(*, gpus=gpus, length=length, memory=memory, **options):
        wanted = EstimateConfig(gpu="h100", gpus=gpus, target_length=length)
        return estimate_run(str(tmp_path), TrainConfig(memory=memory, **options), wanted)

    assert result()["would_fit"]
    for change in result()["would_fit"]:
        found = {name.replace("-", "_"): int(number) for name, number in re.findall(r"--([a-z-]+) (\d+)", change)}
        if level := re.fullmatch(r"--memory (\w+)", change):
            found = {"memory": level[1]}
            assert memory == "plain"
            assert result(memory="auto")["memory"] == level[1]
            assert result(**found)["fits"]
            continue
        if rows := re.fullmatch(r"rows of ([\d,]+) tokens", change):
            found = {"length": int(rows[1].replace(",", ""))}
            assert not result(length=2 * found["length"])["fits"]
        elif "lora" not in found:
            half = {name: max(number // 2, gpus if name == "gpus" else 1) for name, number in found.items()}
            assert not result(**half)["fits"], change
        assert found
        assert result(**found)["fits"], change


SIZES = {  # width, width of MLPs, layers, heads, key and value heads: those of LLaMA 3
    "1B": (2048, 8192, 16, 32, 8), "3B": (3072, 8192, 28, 24, 8), "8B": (4096, 14_336, 32, 32, 8),
    "70B": (8192, 28_672, 80, 64, 8),
}  # fmt: skip
GIB_OF = {24: 23.9, 48: 44.9, 80: 79, 141: 139}


def longest_rows(model, gpus, gib, levels):
    """The longest rows that fit, and the first level at which they do."""
    for length in (1 << power for power in range(22, 12, -1)):
        for name in levels:
            tokens, level, host = length // gpus, LEVELS[name], 128 * GIB * RESERVED
            held, beside = (count(model, tokens, gpus, level, host=host) for count in (memory_of, host_memory_of))
            if sum(held.values()) <= gib * GIB * RESERVED and sum(beside.values()) <= host:
                label = f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"
                return label + "*" * (name == "4bit")
    return "–"


def test_the_table_of_what_fits_is_that_of_the_estimate(tmp_path):
    shapes = []
    for name, (hidden, inner, layers, heads, kv_heads) in SIZES.items():
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=128_256, tie_word_embeddings=name in ("1B", "3B"),
        )  # fmt: skip
        shapes += [(shape(config, tmp_path / f"{name}-{rank}", lora=rank), rank) for rank in (None, 16)]
    assert shapes[-2][0].parameters == pytest.approx(70.55e9, rel=1e-3)
    rows = [
        f"| {gpus} × {size} GB | "
        + " | ".join(longest_rows(model, gpus, gib, list(LEVELS)[: None if rank else -1]) for model, rank in shapes)
        + " |"
        for size, gib in GIB_OF.items()
        for gpus in (1, 2, 4, 8)
    ]
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs" / "training.md").read_text(), rows


def test_an_8b_model_at_128k_fits_one_gpu(tmp_path):
    """With weights, gradients and state in 8 bytes a parameter, or with what can wait in host memory."""
    llama = shape(LLAMA3, tmp_path)
    results = {level: estimate(llama, long_rows(), gpus=1, gpu="h200", memory=level) for level in list(LEVELS)[:4]}
    assert [level for level, result in results.items() if result["fits"]] == ["host", "small", "least"]
    for level, size in {"plain": 16, "host": 8, "small": 8 + 2 * 4 / BLOCK, "least": 4}.items():
        memory = results[level]["memory_gib"]
        held = sum(gib for name, gib in memory.items() if re.search(r"\((float32|bfloat16|.*bits)\)", name))
        assert held * GIB == pytest.approx(size * llama.parameters), level
    assert results["least"]["seconds_per_step"] > results["small"]["seconds_per_step"]
    assert results["host"]["host_memory_gib"] * GIB == pytest.approx(8 * llama.parameters + 2 * 32 * 4096 * LENGTH)
    assert results["plain"]["host_memory_gib"] == 0


def test_layer_inputs_for_which_host_memory_is_too_small_are_counted_on_the_gpu(tmp_path):
    llama, level, inputs = shape(LLAMA3, tmp_path), LEVELS["least"], 32 * 2 * LENGTH * 4096
    states = sum(host_memory_of(llama, 0, 1, level).values())
    everything = sum(memory_of(llama, LENGTH, 1, level).values())
    for room in (0, inputs / 4, inputs, 2 * inputs):
        beside = sum(host_memory_of(llama, LENGTH, 1, level, host=states + room).values())
        assert beside == states + min(room, inputs)
        held = sum(memory_of(llama, LENGTH, 1, level, host=states + room).values())
        assert held == pytest.approx(everything + max(inputs - room, 0))


@pytest.mark.parametrize(
    ("memory", "lora"), [(memory, lora) for memory in LEVELS for lora in (None, 4) if lora or memory != "4bit"]
)
def test_bytes_are_those_of_a_real_step(tmp_path, lora, memory):
    """Weights, gradients and the optimizer's state, on the GPU and beside it, after a step of a real model."""
    level = LEVELS[memory]
    config = TrainConfig(memory=memory, lora=lora).resolved()
    precision = config.precision(level, "cuda")
    model = family_model("llama").to(torch.float32 if precision == "float32" else torch.bfloat16)
    if lora:
        add_lora(model, lora)
    if level.four_bit:
        freeze_in_four_bits(model)
    optimizer = make_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    state = sum(x.nbytes for values in optimizer.state.values() for name, x in values.items() if name != "step")
    held = sum(x.nbytes for p in model.parameters() for x in (p, p.grad) if x is not None)
    ours = shape(family_config("llama"), tmp_path, lora=lora)
    counted = memory_of(ours, 0, 1, level)
    named = sum(size for name, size in counted.items() if re.search(r"\((float32|bfloat16|.*bits)\)", name))
    beside = sum(host_memory_of(ours, 0, 1, level).values())
    # Rows of this model are shorter than a block, and its norms have moments of float32; additions to LoRA's plain
    # weights are not counted.
    assert named + beside == pytest.approx(held + state, rel=0.12)
    assert (beside > 0) == level.states_in_host


def test_known_gpus():
    assert known_gpu("NVIDIA H200") is known_gpu("NVIDIA H200 NVL")
    assert known_gpu("NVIDIA A100-SXM4-80GB").peak == 312
    assert known_gpu("NVIDIA GeForce RTX 4090") is None
