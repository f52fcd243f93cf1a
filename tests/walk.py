"""Every causal language model class of the installed transformers, tiny and random, put into one of three boxes.

`python tests/walk.py docs/models.md` writes the result there; tests/test_walk.py compares it with the classes.
"""

import copy
import json
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import CONFIG_MAPPING, __version__, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longrope2.data.loader import IGNORED_LABEL
from longrope2.errors import LongRopeError
from longrope2.evaluation.backend import TorchBackend
from longrope2.evaluation.suite import TextSpan
from longrope2.export.engines import MLX, TRANSFORMERS, VLLM
from longrope2.export.gguf import WRITTEN_AS
from longrope2.export.huggingface import serving_config
from longrope2.factors import RescaleFactors
from longrope2.families import read_config, refuse, rope_parameters
from longrope2.generation.saved import read_factors
from longrope2.generation.switch import switching
from longrope2.models import causal_lm, empty_model
from longrope2.needles import Needle, NeedleDocument
from longrope2.perplexity import scoring
from longrope2.rotary import _frequencies, _rotary_places, rescaled
from longrope2.training.estimate import shape_of
from longrope2.training.mixed import Batch, mixed_window

WINDOW, TARGET = 32, 128
LARGEST = 10_000_000
# What makes a model small, under the names that families have for it.
SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": WINDOW, "sliding_window": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "attention_chunk_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "top_k": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_expand": 1, "mamba_chunk_size": 16, "block_size": 16, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "laurel_rank": 8, "num_kv_shared_layers": 0, "index_topk": 128,
    "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MLA = {"num_key_value_heads": 4}  # one for each head
# Where those are not enough.
OPTIONS: dict[str, dict[str, Any]] = {
    "axk1": MLA, "axk2": MLA, "deepseek_v2": MLA, "deepseek_v3": MLA, "deepseek_v32": MLA, "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA, "minicpm3": MLA, "youtu": MLA,
    "bailing_hybrid": {**MLA, "layer_types": [LINEAR, FULL, LINEAR, FULL]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}, "d_model": 64, "n_heads": 4,
             "n_layers": 4, "max_seq_len": WINDOW, "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96}},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3_text": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "gemma4_text": {"global_head_dim": 32, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"global_head_dim": 32, "layer_types": [SLIDING, FULL] * 2},
    "gemma3n_text": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "activation_sparsity_pattern": None,
                     "num_kv_shared_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", FULL] * 2, "position_embedding_type": "rope"},
    "hrm_text": {"initializer_range": 0.05},
    "longcat_flash": {**MLA, "head_dim": 8, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
                      "zero_expert_num": 2},
    "mimo_v2_flash": {"head_dim": 24, "swa_head_dim": 24},
    "mistral4": MLA,
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 128,
                       "indexer_compress_ratio": 4},
    "kolibri1": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "laguna": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "lfm2": {"layer_types": ["conv", FULL, "conv", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv", FULL], "num_dense_layers": 1},
    "mellum": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "zamba2": {"initializer_range": 0.05, "use_mem_rope": True, "layer_types": ["linear_attention", "hybrid"] * 2,
               "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def model_types() -> list[str]:
    """All that AutoModelForCausalLM knows, and those whose class is only listed elsewhere."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral4"})


def tiny_config(model_type: str, rope: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A small config of a type, with plain RoPE, or with `rope` in the layers that are rescaled."""
    kind = CONFIG_MAPPING[model_type]
    if not hasattr(kind(), "rope_parameters"):
        return kind()
    known = {name for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}
    options = {name: value for name, value in SHAPE.items() if name in known}
    options |= OPTIONS.get(model_type, {}) | overrides
    config = kind(**options)
    found = config.rope_parameters
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    plain = {name: plain_rope(value) for name, value in nested.items()} if nested else plain_rope(found)
    config = kind(**{**options, "rope_parameters": {**found, **plain} if nested else plain | ROPES.get(model_type, {})})
    if rope is not None:
        layers, before = rope_parameters(config)
        whole = {**before, **rope}
        config = kind(**{**options, "rope_parameters": {**config.rope_parameters, layers: whole} if layers else whole})
    return config


def as_saved(config: Any) -> dict[str, Any]:
    """The config.json that transformers writes for it, which has objects for numbers that JSON lacks."""
    return json.loads(config.to_json_string(use_diff=False))


# Types that transformers cannot build with plain RoPE, in a form of theirs that does nothing.
ROPES = {
    "mistral4": {"rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
}


def plain_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    kept = {name: parameters[name] for name in parameters if name in ("partial_rotary_factor", "llama_4_scaling_beta")}
    if "llama_4_scaling_beta" in kept:
        kept["original_max_position_embeddings"] = WINDOW
    kind = parameters["rope_type"] if parameters["rope_type"] in KEPT_TYPES else "default"
    return {"rope_type": kind, "rope_theta": 10_000.0, **kept}


def tiny_model(config: Any) -> Any:
    assert empty_model(copy.deepcopy(config)).num_parameters() < LARGEST, (
        f"{config.model_type}: SHAPE or OPTIONS lack a size"
    )
    torch.manual_seed(0)
    model = causal_lm(config)._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in model.parameters():
        if not parameter.detach().any():  # zeros at the start of training may hide all that positions do
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tiny_factors(config: Any, *, one_temperature: bool = False) -> RescaleFactors:
    """Factors that differ in every dimension, and sides in temperature, so that nothing wrong passes for right."""
    rope = read_config(config.to_dict()).rope
    count = rope.num_dims
    return RescaleFactors(
        method="test",
        rotary_dim=rope.rotary_dim,
        theta=rope.theta,
        original_length=WINDOW,
        target_length=TARGET,
        long=tuple(4.0 + i / count for i in range(count)),
        short=tuple(1.0 + i / (2 * count) for i in range(count)),
        long_attention_factor=1.3,
        short_attention_factor=1.3 if one_temperature else 1.0,
    )


def tokens_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False, **inputs).logits


def off(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours - right).abs().max() / right.abs().max())


KEPT_TYPES = ("proportional",)
TOLERANCE = 2e-4


def require(error: float, what: str) -> None:
    if not error < TOLERANCE:
        raise AssertionError(f"{what}: off by {error:.1e}")


@torch.no_grad()
def oracle(model: Any, factors: RescaleFactors, row: torch.Tensor, *, long: bool) -> torch.Tensor:
    """transformers' own rotary modules, with frequencies and attention factor put into them by hand."""
    inv_freq = torch.tensor(factors.inv_freq(long=long), dtype=torch.float64).float()
    scale = factors.long_attention_factor if long else factors.short_attention_factor
    before = []
    for _, _, module in _rotary_places(model):
        kind, found = _frequencies(module)
        prefix = f"{kind}_" if kind else ""
        before.append((module, prefix, found, getattr(module, f"{prefix}attention_scaling", 1.0)))
        setattr(module, f"{prefix}inv_freq", torch.nn.functional.pad(inv_freq, (0, len(found) - len(inv_freq))))
        setattr(module, f"{prefix}attention_scaling", scale)
        if hasattr(module, "rope_init_fn"):  # PhiMoE asks for them in each forward
            module.rope_init_fn = lambda config: (inv_freq, scale)
    try:
        return logits(model, row)
    finally:
        for module, prefix, found, scaling in before:
            setattr(module, f"{prefix}inv_freq", found)
            setattr(module, f"{prefix}attention_scaling", scaling)
            if hasattr(module, "rope_init_fn"):
                module.rope_init_fn = lambda config, found=found, scaling=scaling: (found, scaling)


def check_rows(config: Any) -> None:
    """Short and long rows, alone and in one batch, equal the oracle."""
    model, factors = tiny_model(config), tiny_factors(config)
    short, long = tokens_of(20, 1), tokens_of(80, 2)
    right = oracle(model, factors, short, long=False), oracle(model, factors, long, long=True)
    plain = logits(model, long)
    batch = torch.cat((torch.nn.functional.pad(short, (0, 60)), long))
    mask = torch.ones_like(batch)
    mask[0, 20:] = 0
    with rescaled(model, factors):
        require(off(logits(model, short), right[0]), "short rows")
        require(off(logits(model, long), right[1]), "long rows")
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        both = logits(model, batch, attention_mask=mask, position_ids=positions)
        require(off(both[:1, :20], right[0]), "the short row of a mixed batch")
        require(off(both[1:], right[1]), "the long row of a mixed batch")
    assert torch.equal(logits(model, long), plain), "the model is not as it was before"
    assert off(right[1], plain) > 1e-2, "factors change nothing"


def check_search(config: Any) -> None:
    """Needle and plain scores are those of all logits of the model's own attention."""
    model, factors = tiny_model(config), tiny_factors(config)
    tokens = tokens_of(72, 6)
    needle = Needle(key="k", value="1", depth=0.0, wanted_depth=0.0, start=1, answer=(66, 72))
    ids = tuple(tokens[0].tolist())
    document = NeedleDocument(token_ids=ids, needles=(needle,), book="b", book_start=0, asked_from=60)
    right = oracle(model, factors, tokens, long=True)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    for objective, first in (("needle", 65), ("plain", 0)):
        with scoring(model, factors, objective=objective) as score:
            found = torch.tensor(score(factors, [document])[0].nll)
        require(off(found, -right[first:].sum()), f"the {objective} score of a search")


def check_evaluation(config: Any) -> None:
    """The loss of every token, on both sides of the switch, is that of all logits of the model's own attention."""
    plain, factors = tiny_model(config), tiny_factors(config)
    rows = [tokens_of(24, 3), tokens_of(60, 4)]
    right = torch.cat(
        [-oracle(plain, factors, row, long=row.shape[1] > WINDOW)[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])
         for row in rows]
    )[:, 0]  # fmt: skip
    model = switching(tiny_model(config), factors)
    backend = TorchBackend(model, SimpleNamespace(eos_token_id=None), window=factors.target_length)
    found = backend.losses([TextSpan(token_ids=row[0].tolist(), start=1) for row in rows])
    require(off(torch.tensor([*found[0], *found[1]]), right), "the loss of tokens in an evaluation")


def check_training(config: Any) -> None:
    """A short row of two documents and a long row, in one batch, are what each is alone, also in their gradients.

    And the estimate knows the model's shape.
    """
    model, factors = tiny_model(config), tiny_factors(config)
    for rank in (None, 4):
        shape = shape_of(model, SimpleNamespace(reading=read_config(config.to_dict())), lora=rank)
        assert 0 < shape.trained_at_once < shape.trained
        assert min(shape.matrices, shape.inner) > 0
    short, long = tokens_of(48, 7), tokens_of(48, 8)
    labels = torch.cat((short, long)).roll(-1, dims=1)
    labels[:, -1] = labels[0, 17] = IGNORED_LABEL
    batch = Batch(
        tokens=torch.cat((short, long)),
        positions=torch.stack((torch.cat((torch.arange(18), torch.arange(30))), torch.arange(48))),
        labels=labels,
        long_rows=torch.tensor([False, True]),
        boundaries=[[0, 18, 48], [0, 48]],
    )
    right = [oracle(model, factors, row, long=False) for row in (short[:, :18], short[:, 18:])]
    right = torch.cat((torch.cat(right, dim=1), oracle(model, factors, long, long=True)))
    with mixed_window(model, factors) as mixed, mixed.rows_of(batch):
        with torch.no_grad():
            require(off(mixed.logits(batch), right), "rows of a training batch")
        loss = mixed(batch)
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        sum_of(mixed.logits(batch), labels).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            require(off(found[name], parameter.grad), f"the gradient of {name}")
    require(off(loss.detach(), sum_of(right, labels)), "the loss of a training batch")


def sum_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of all positions."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )


def check_switch(config: Any) -> None:
    """Every logit of `generate` across the switch equals a forward of its row alone, without a cache."""
    plain, factors = tiny_model(config), tiny_factors(config)
    rows = [tokens_of(length, seed)[0] for seed, length in enumerate((30, 26, 40))]
    model = switching(tiny_model(config), factors)
    check_logits(plain, factors, model, rows)
    assert sum(model.longrope2.extra_tokens) > 0, "nothing was recomputed"
    ahead = switching(tiny_model(config), factors, strategy="shadow", shadow_chunk=4)
    check_logits(plain, factors, ahead, rows, prefill_chunk_size=7)
    # A second turn goes on from the cache of the first, which lies on the short side.
    first = check_logits(plain, factors, model, [rows[1][:20]], max_new_tokens=2)
    more = torch.cat((first.sequences[0], tokens_of(6, 9)[0]))
    check_logits(plain, factors, model, [more], past_key_values=first.past_key_values)


def check_logits(plain: Any, factors: RescaleFactors, model: Any, rows: list[torch.Tensor], **options: Any) -> Any:
    width = max(map(len, rows))
    ids, mask = (
        torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in each])
        for each in (rows, map(torch.ones_like, rows))
    )
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        **{"max_new_tokens": 10, **options},
    )  # fmt: skip
    for index, row in enumerate(rows):
        for step, found in enumerate(output.logits):
            whole = torch.cat((row, output.sequences[index, width : width + step]))[None]
            right = oracle(plain, factors, whole, long=whole.shape[1] > WINDOW)[0, -1]
            require(off(found[index], right), f"row {index}, token {step} of generate with {sorted(options)}")
    return output


def check_export(config: Any) -> None:
    """Plain transformers rotates by the exported factors, and they are read as they were written."""
    model, factors = tiny_model(config), tiny_factors(config, one_temperature=True)
    if config.model_type in TRANSFORMERS.static_families:
        factors = factors.long_everywhere()
    exported = serving_config(as_saved(config), factors, dtype="float32")
    found = read_factors(read_config(exported))
    assert found.rotates_as(factors), "factors are read otherwise than they were written"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(exported, allow_nan=False))
        theirs = tiny_model(CONFIG_MAPPING[config.model_type].from_pretrained(folder))
    theirs.load_state_dict(model.state_dict())
    for length in (WINDOW, WINDOW + 1):
        row = tokens_of(length)
        right = oracle(model, factors, row, long=length > WINDOW)
        require(off(logits(theirs, row), right), f"the export in plain transformers, {length} tokens")


@torch.no_grad()
def rotating_kinds(config: Any) -> set[str]:
    """The kinds of layers that factors act on: those that turn into NaN with the angles, whatever comes in."""
    model = tiny_model(config)
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = next((block for block in blocks if len(block) == config.num_hidden_layers), None)
    if layers is None:  # blocks of several layers, all of one kind
        return set(read_config(config.to_dict()).layer_types)
    inputs: dict[int, torch.Tensor] = {}
    found = set()

    def before(layer: Any, args: Any, options: Any) -> Any:
        hidden = inputs.setdefault(id(layer), args[0] if args else options["hidden_states"])
        return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

    def after(layer: Any, args: Any, options: Any, output: Any) -> None:
        if (output[0] if isinstance(output, tuple) else output).isnan().any():
            found.add(layer)

    for layer in layers:
        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after, with_kwargs=True)
    with rescaled(model, tiny_factors(config), check=False) as rotary:
        logits(model, tokens_of(12))
        rotary._tables = {device: table * float("nan") for device, table in rotary._tables.items()}
        logits(model, tokens_of(12))
    kinds = read_config(config.to_dict()).layer_types
    return {kind for layer, kind in zip(layers, kinds, strict=True) if layer in found}


SUPPORTED, SEARCH, REFUSED = "supported", "search and training only", "refused"


@dataclass(frozen=True)
class Verdict:
    """Where a model_type belongs, and why; for one that works, which layers factors act on."""

    box: str
    note: str


def judge(model_type: str) -> Verdict:
    """Try everything with a tiny model; an AssertionError means a wrong number that nothing refuses."""
    try:
        refuse(model_type)
        config = tiny_config(model_type)
        reading = read_config(as_saved(config))
        if reading.family != model_type:
            return Verdict(REFUSED, "parts of larger models, whose language model can be saved alone (see above)")
        check_rows(config)
        check_search(config)
        check_evaluation(config)
        check_training(config)
    except LongRopeError as error:
        return Verdict(REFUSED, error.message.partition(": ")[2])
    reasons = []
    for check in (check_switch, check_export):
        try:
            check(config)
        except LongRopeError as error:
            reasons.append(error.message)
    return Verdict(SEARCH, "; ".join(reasons)) if reasons else Verdict(SUPPORTED, layers_note(config))


def layers_note(config: Any) -> str:
    reading, found = read_config(config.to_dict()), rotating_kinds(config)
    attention = {kind for kind in reading.layer_types if kind not in (LINEAR, "conv")}
    if len(set(reading.layer_types)) > 1:
        assert found == ({reading.rotates} if reading.rotates else attention), f"factors act on {found}"
    if found != attention:
        several = sum(isinstance(each, dict) for each in config.rope_parameters.values()) > 1
        own = "have a RoPE of their own" if several else "have no RoPE"
        return f"its {min(found).split('_')[0]}-attention layers; the others {own}"
    return "" if attention == set(reading.layer_types) else "its attention layers; states of the others are recomputed"


EXAMPLES = {
    "apertus": "Apertus", "arcee": "AFM 4.5B", "cohere": "Command R", "cohere2": "Command R7B, Command A",
    "deepseek_v2": "DeepSeek V2", "deepseek_v3": "DeepSeek V3, R1, Kimi K2", "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B", "exaone4": "EXAONE 4.0", "falcon": "Falcon", "falcon_h1": "Falcon H1",
    "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3", "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4", "glm": "GLM-4 9B", "glm4": "GLM-4 0414", "glm4_moe": "GLM 4.5, 4.6", "gpt_neox": "Pythia",
    "gpt_oss": "GPT-OSS, dequantised", "granite": "Granite 3", "granitemoehybrid": "Granite 4",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B", "lfm2": "LFM 2", "llama": "LLaMA, SmolLM2, Yi", "llama4_text": "LLaMA 4",
    "minimax_m2": "MiniMax M2", "ministral3": "Ministral 3", "mistral": "Mistral, Mistral Nemo",
    "mistral4": "Mistral Small 4", "mixtral": "Mixtral", "nemotron": "Minitron, Nemotron 4", "olmo2": "OLMo 2",
    "olmo3": "OLMo 3", "phi": "Phi-1, Phi-2", "phi3": "Phi-3, Phi-3.5, Phi-4", "phimoe": "Phi-3.5-MoE",
    "qwen2": "Qwen 2, Qwen 2.5", "qwen2_moe": "Qwen 1.5 MoE, Qwen 2 57B", "qwen3": "Qwen 3", "qwen3_5_text": "Qwen 3.5",
    "qwen3_moe": "Qwen 3 30B", "qwen3_next": "Qwen3-Next", "seed_oss": "Seed-OSS", "smollm3": "SmolLM3",
    "stablelm": "StableLM", "starcoder2": "StarCoder 2",
}  # fmt: skip
HEADING = "## All model types\n"
"""Everything below it is generated."""


def page(text: str, verdicts: dict[str, Verdict]) -> str:
    """docs/models.md with its generated part as it should be."""
    kept, heading, _ = text.partition(HEADING)
    boxes = {
        box: [name for name in sorted(verdicts) if verdicts[name].box == box] for box in (SUPPORTED, SEARCH, REFUSED)
    }
    lines = [
        f"`make families` writes this from a walk over every causal language model of transformers {__version__}: "
        f"{len(boxes[SUPPORTED])} model types are supported, {len(boxes[SEARCH])} for search and training only, "
        f"{len(boxes[REFUSED])} are refused.",
        "",
        "| `model_type` | such as | factors act on | vLLM | mlx-lm | llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    for name in boxes[SUPPORTED]:
        vllm = "yes" if name in VLLM.families else "`static-long`" if name in VLLM.static_families else ""
        known = ("yes" if name in families else "" for families in (MLX.families, WRITTEN_AS))
        cells = (f"`{name}`", EXAMPLES.get(name, ""), verdicts[name].note, vllm, *known)
        lines.append(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|")
    for box, title in ((SEARCH, "For search and training only"), (REFUSED, "Refused")):
        lines += ["", f"### {title}", ""]
        for reason in sorted({verdicts[name].note for name in boxes[box]}):
            names = ", ".join(f"`{name}`" for name in boxes[box] if verdicts[name].note == reason)
            lines += textwrap.wrap(f"- {reason}: {names}", 120, subsequent_indent="  ", break_on_hyphens=False)
    return kept + heading + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    logging.set_verbosity_error()
    place = Path(sys.argv[1])
    text = place.read_text(encoding="utf-8")
    place.write_text(page(text, {name: judge(name) for name in model_types()}), encoding="utf-8")
