"""A GGUF file that llama.cpp runs with short and long factors, written one tensor at a time; and back again.

llama.cpp's own converter drops the factors of LLaMA models. Its llama, granite and phi3 architectures load them,
though, and Qwen 2 is a LLaMA with biases. The others would run with plain RoPE, silently, and are refused.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longrope2.console import ProgressLine
from longrope2.errors import FactorsError, ModelError, damage, require
from longrope2.export.gguf_tokenizer import add_tokenizer
from longrope2.export.huggingface import serving_config
from longrope2.export.weights import Change, SourceModel, cast, check_room
from longrope2.factors import RescaleFactors
from longrope2.families import FULL_ATTENTION
from longrope2.files import atomic_path, parse_json, write_text
from longrope2.gguf_model import AGAIN, FACTORS_KEY, model_of, read_gguf, unpermute
from longrope2.models import head_dim, live_config

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

CONFIG_KEY = "longrope2.config"
"""The config.json of the same model as a folder, from which `verify` makes its reference."""
PRECISIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LLAMA_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PHI3_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures that load factors."""

    name: str
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA_LAYER)
    pairs_side_by_side: bool = True
    """Whether the rows of W_q and W_k are permuted; see gguf_model.py."""
    rotates_parts: bool = False
    """Whether it can rotate a part of each head."""
    scales: Mapping[str, str] = field(default_factory=dict)
    """Metadata key → config key of further numbers."""


ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama"),
    "qwen2": Architecture("llama"),
    "granite": Architecture(
        "granite",
        scales={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "phi3": Architecture("phi3", layer=PHI3_LAYER, pairs_side_by_side=False, rotates_parts=True),
}


def check_architecture(source: SourceModel, factors: RescaleFactors) -> None:
    """Raise ModelError unless llama.cpp would run this model with its factors."""
    reading, name = source.info.reading, source.info.name
    if reading.family not in ARCHITECTURES:
        raise ModelError(
            f"{name}: llama.cpp has no short and long RoPE factors for '{reading.family}' models; "
            "it would run them with plain RoPE, and say nothing",
            hint=f"use --format huggingface; families that can be written as GGUF: {', '.join(ARCHITECTURES)}",
        )
    live = live_config(source.config)
    sliding = set(reading.layer_types) != {FULL_ATTENTION} and (reading.sliding_window or 0) < factors.target_length
    if sliding:
        raise ModelError(
            f"{name}: its layers attend to {reading.sliding_window:,} tokens, which llama.cpp does not do here",
            hint="use --format huggingface",
        )
    if live.hidden_act != "silu":
        raise ModelError(f"{name}: llama.cpp's architecture has the activation 'silu', not {live.hidden_act!r}")
    if not ARCHITECTURES[reading.family].rotates_parts and reading.rope.rotary_dim != head_dim(live):
        raise ModelError(f"{name}: llama.cpp rotates whole heads of '{reading.family}' models, not a part of them")


def write_file(
    source: SourceModel, factors: RescaleFactors, output: Path, *, dtype: str, change: Change, card: str
) -> None:
    """Write the export; `change` is applied to every tensor on its way."""
    gguf = require("gguf", extra="export", purpose="writing a GGUF file")
    live, architecture = live_config(source.config), ARCHITECTURES[source.info.reading.family]
    places = _places(source, architecture, live)
    kinds = {name: _kind(source.tensors[name].shape, dtype) for name in places}
    sizes = {name: _num_bytes(source.tensors[name].shape, kinds[name]) for name in places}
    check_room(output, sum(sizes.values()))
    with atomic_path(output) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture.name)
        _add_metadata(writer, source, factors, live, architecture, dtype)
        add_tokenizer(writer, source, live.vocab_size)
        for name, values in (("long", factors.long), ("short", factors.short)):
            # Small, and never quantised: these come first.
            writer.add_tensor_info(f"rope_factors_{name}.weight", (len(values),), _float32(), 4 * len(values))
        for name, place in places.items():
            shape = source.tensors[name].shape
            writer.add_tensor_info(place, shape, _float32(), sizes[name], raw_dtype=kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in (factors.long, factors.short):
            writer.write_tensor_data(torch.tensor(values, dtype=torch.float32).numpy())
        progress = ProgressLine(len(places), "tensors")
        for count, name in enumerate(places, start=1):
            tensor = change(name, source.tensors[name].read())
            writer.write_tensor_data(_encoded(name, tensor, kinds[name], architecture, live))
            progress.update(count)
        writer.close()
        write_text(card_path(output), card)  # first: where the file is, everything is


def card_path(output: Path) -> Path:
    """Where the model card of a file lies."""
    return output.with_suffix(".md")


class GGUFExport:
    """A file that `write_file` wrote, through our own eyes: its factors and config at once, its model when asked."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._reader = read_gguf(path)
        fields = [self._reader.get_field(key) for key in (FACTORS_KEY, CONFIG_KEY)]
        if not all(fields):
            raise ModelError(
                f"{path}: not an export of longrope2", hint="make one with: longrope2 export --format gguf"
            )
        with damage(f"{path}: its factors or config are damaged", hint=AGAIN):
            factors, config = (parse_json(field.contents(), lenient=True) for field in fields)
            self.factors = RescaleFactors.from_json(factors, source=str(path))
            self.config = live_config(config)
        self.is_rounded = any(tensor.tensor_type.name != "F32" for tensor in self._reader.tensors)

    def model(self) -> Any:
        """The model in float32."""
        import gguf

        with damage(f"{self._name}: tensors and metadata disagree", hint=AGAIN):
            architecture = ARCHITECTURES[self.config.model_type]
            state = {}
            for tensor in self._reader.tensors:
                name = _hf_name(tensor.name, architecture)
                if name is None:
                    continue
                shape = [int(n) for n in reversed(tensor.shape)]
                values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
                heads = _permuted_heads(name, architecture, self.config)
                state[name] = torch.tensor(unpermute(values, heads) if heads else values, dtype=torch.float32)
            return model_of(self.config, state, self._name).float()


def is_exported_file(path: Path) -> bool:
    """Whether `write_file` wrote it."""
    try:
        GGUFExport(path)
    except (ModelError, FactorsError):
        return False
    return True


def _float32() -> "np.dtype[Any]":
    import numpy as np

    return np.dtype(np.float32)


def _places(source: SourceModel, architecture: Architecture, live: Any) -> dict[str, str]:
    """HF name → GGUF name of every tensor, or ModelError for one that the architecture does not have."""
    places = {}
    for name in source.tensors:
        if live.tie_word_embeddings and name == "lm_head.weight":
            continue
        place = _gguf_name(name, architecture)
        if place is None:
            raise ModelError(
                f"{source.info.name}: tensor {name} has no place in llama.cpp's '{architecture.name}' architecture",
                hint="use --format huggingface",
            )
        places[name] = place
    return places


def _gguf_name(name: str, architecture: Architecture) -> str | None:
    stem, _, ending = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    place = architecture.layer.get(layer[2]) if layer else OUTER.get(stem)
    if place is None or ending not in ("weight", "bias"):
        return None
    return f"blk.{layer[1]}.{place}.{ending}" if layer else f"{place}.{ending}"


def _hf_name(name: str, architecture: Architecture) -> str | None:
    stem, _, ending = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    names = {theirs: ours for ours, theirs in (architecture.layer if layer else OUTER).items()}
    found = names.get(layer[2] if layer else stem)
    if found is None:
        return None
    return f"model.layers.{layer[1]}.{found}.{ending}" if layer else f"{found}.{ending}"


def _kind(shape: tuple[int, ...], dtype: str) -> Any:
    """How a tensor is stored: vectors in full, matrices as asked for unless their rows do not fill blocks."""
    import gguf

    kind = gguf.GGMLQuantizationType[PRECISIONS[dtype]]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    return kind if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _num_bytes(shape: tuple[int, ...], kind: Any) -> int:
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = 1
    for n in shape:
        count *= n
    return count // block * block_bytes


def _permuted_heads(name: str, architecture: Architecture, live: Any) -> int:
    """How many heads the rows of a permuted tensor belong to; 0 for all others."""
    if not architecture.pairs_side_by_side:
        return 0
    if "self_attn.q_proj." in name:
        return live.num_attention_heads
    return live.num_key_value_heads if "self_attn.k_proj." in name else 0


def _encoded(name: str, tensor: Tensor, kind: Any, architecture: Architecture, live: Any) -> "np.ndarray":
    import gguf

    if kind == gguf.GGMLQuantizationType.F16:
        cast(name, tensor, torch.float16)
    values = tensor.float()
    heads = _permuted_heads(name, architecture, live)
    if heads:
        rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = rows.transpose(1, 2).reshape(values.shape)
    return gguf.quantize(values.contiguous().numpy(), kind)


def _add_metadata(
    writer: "GGUFWriter",
    source: SourceModel,
    factors: RescaleFactors,
    live: Any,
    architecture: Architecture,
    dtype: str,
) -> None:
    import gguf

    writer.add_name(Path(source.info.name).name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_context_length(factors.target_length)
    writer.add_embedding_length(live.hidden_size)
    writer.add_block_count(live.num_hidden_layers)
    writer.add_feed_forward_length(live.intermediate_size)
    writer.add_head_count(live.num_attention_heads)
    writer.add_head_count_kv(live.num_key_value_heads)
    writer.add_key_length(head_dim(live))
    writer.add_value_length(head_dim(live))
    writer.add_layer_norm_rms_eps(live.rms_norm_eps)
    writer.add_vocab_size(live.vocab_size)
    for key, name in architecture.scales.items():
        writer.add_float32(f"{architecture.name}.{key}", getattr(live, name))
    writer.add_rope_dimension_count(factors.rotary_dim)
    writer.add_rope_freq_base(factors.theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(factors.original_length)
    # Never rope.scaling.factor: llama.cpp would divide every frequency by it once more.
    writer.add_rope_scaling_attn_factors(factors.long_attention_factor)
    writer.add_string(FACTORS_KEY, json.dumps(factors.to_json()))
    writer.add_string(CONFIG_KEY, json.dumps(serving_config(source.config, factors, dtype="float32")))
