"""A GGUF file that llama.cpp runs with short and long factors, written one tensor at a time; and back again.

llama.cpp's own converter drops the factors of LLaMA models. Its llama, granite and phi3 architectures load them,
though; Qwen 2 is a LLaMA with biases, and Qwen 3 a Step 3.5 without experts and gates. The others would run with plain
RoPE, silently, and are refused.
"""

import json
import math
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
from longrope2.families import FULL_ATTENTION, head_dim, live_config
from longrope2.files import atomic_path, parse_json, write_text
from longrope2.gguf_model import AGAIN, FACTORS_KEY, GRANITE, LLAMA, PHI3, STEP35, Architecture, open_gguf

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

CONFIG_KEY = "longrope2.config"
"""The config.json of the same model as a folder, from which `verify` makes its reference."""
PRECISIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}

# Which of llama.cpp's architectures computes a family with factors.
WRITTEN_AS = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": STEP35, "granite": GRANITE, "phi3": PHI3}


def check_architecture(source: SourceModel, factors: RescaleFactors) -> None:
    """Raise ModelError unless llama.cpp would run this model with its factors."""
    reading, name = source.info.reading, source.info.name
    if reading.family not in WRITTEN_AS:
        raise ModelError(
            f"{name}: llama.cpp has no short and long RoPE factors for '{reading.family}' models; "
            "it would run them with plain RoPE, and say nothing",
            hint=f"use --format huggingface; families that can be written as GGUF: {', '.join(WRITTEN_AS)}",
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
    if reading.family != "phi3" and reading.rope.rotary_dim != head_dim(live):
        raise ModelError(f"{name}: llama.cpp rotates whole heads of '{reading.family}' models, not a part of them")


def write_file(
    source: SourceModel, factors: RescaleFactors, output: Path, *, dtype: str, change: Change, card: str
) -> None:
    """Write the export; `change` is applied to every tensor on its way."""
    gguf = require("gguf", extra="export", purpose="writing a GGUF file")
    live, architecture = live_config(source.config), WRITTEN_AS[source.info.reading.family]
    places = _places(source, architecture, live)
    kinds = {name: _kind(source.tensors[name].shape, dtype) for name in places.values()}
    sizes = {place: _num_bytes(source.tensors[name].shape, kinds[name]) for place, name in places.items()}
    check_room(output, sum(sizes.values()))
    with atomic_path(output) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture.name)
        _add_metadata(writer, source, factors, live, architecture, dtype)
        add_tokenizer(writer, source, live.vocab_size)
        for name, values in (("long", factors.long), ("short", factors.short)):
            # Small, and never quantised: these come first.
            writer.add_tensor_info(f"rope_factors_{name}.weight", (len(values),), _float32(), 4 * len(values))
        for place, name in places.items():
            shape = source.tensors[name].shape
            writer.add_tensor_info(place, shape, _float32(), sizes[place], raw_dtype=kinds[name])
        blanks = _blank_layer(live) if architecture.is_stand_in else {}
        for place, shape in blanks.items():
            writer.add_tensor_info(place, shape, _float32(), 4 * math.prod(shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in (factors.long, factors.short):
            writer.write_tensor_data(torch.tensor(values, dtype=torch.float32).numpy())
        progress = ProgressLine(len(places), "tensors")
        for count, name in enumerate(places.values(), start=1):
            tensor = change(name, source.tensors[name].read())
            writer.write_tensor_data(_encoded(name, tensor, kinds[name], architecture, live))
            progress.update(count)
        for shape in blanks.values():
            writer.write_tensor_data(torch.zeros(shape).numpy())
        writer.close()
        write_text(card_path(output), card)  # first: where the file is, everything is


def card_path(output: Path) -> Path:
    """Where the model card of a file lies."""
    return output.with_suffix(".md")


class GGUFExport:
    """A file that `write_file` wrote, through our own eyes: its factors and config at once, its model when asked."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        written = [self._file.value(key) for key in (FACTORS_KEY, CONFIG_KEY)]
        if None in written:
            raise ModelError(
                f"{path}: not an export of longrope2", hint="make one with: longrope2 export --format gguf"
            )
        with damage(f"{path}: its factors or config are damaged", hint=AGAIN):
            factors, config = (parse_json(text, lenient=True) for text in written)
            self.factors = RescaleFactors.from_json(factors, source=str(path))
            self.config = live_config(config)
        self.is_rounded = self._file.is_rounded

    def model(self) -> Any:
        """The model in float32."""
        return self._file.model(dtype=torch.float32, config=self.config)


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
    """GGUF name → HF name of every tensor, or ModelError for one that the architecture does not have."""
    places = {}
    for name in source.tensors:
        if live.tie_word_embeddings and name == "lm_head.weight":
            continue
        place = architecture.gguf_name(name)
        if place is None:
            raise ModelError(
                f"{source.info.name}: tensor {name} has no place in llama.cpp's '{architecture.name}' architecture",
                hint="use --format huggingface",
            )
        places[place] = name
    if live.tie_word_embeddings and architecture.is_stand_in:
        places["output.weight"] = "model.embed_tokens.weight"
    return places


def _blank_layer(live: Any) -> dict[str, tuple[int, ...]]:
    """Tensors of zeros, with their shapes, that make a layer of one head and no MLP: it gives what it gets."""
    layer, hidden, rows = f"blk.{live.num_hidden_layers}", live.hidden_size, head_dim(live)
    return {
        f"{layer}.attn_norm.weight": (hidden,),
        f"{layer}.ffn_norm.weight": (hidden,),
        **{f"{layer}.{name}.weight": (rows, hidden) for name in ("attn_q", "attn_k", "attn_v")},
        f"{layer}.attn_output.weight": (hidden, rows),
    }


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
    return math.prod(shape) // block * block_bytes


def _encoded(name: str, tensor: Tensor, kind: Any, architecture: Architecture, live: Any) -> "np.ndarray":
    import gguf

    if kind == gguf.GGMLQuantizationType.F16:
        cast(name, tensor, torch.float16)
    values = tensor.float()
    heads = architecture.permuted_heads(name, live)
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
    writer.add_feed_forward_length(live.intermediate_size)
    blank = [1] if architecture.is_stand_in else []
    writer.add_block_count(live.num_hidden_layers + len(blank))
    if blank:
        writer.add_head_count([live.num_attention_heads] * live.num_hidden_layers + blank)
        writer.add_head_count_kv([live.num_key_value_heads] * live.num_hidden_layers + blank)
        # The window of the layer that adds nothing; and no layer has experts, but this key must be there.
        writer.add_sliding_window(1)
        writer.add_sliding_window_pattern([False] * live.num_hidden_layers + [True])
        writer.add_rope_dimension_count_swa(factors.rotary_dim)
        writer.add_expert_feed_forward_length(live.intermediate_size)
    else:
        writer.add_head_count(live.num_attention_heads)
        writer.add_head_count_kv(live.num_key_value_heads)
    writer.add_key_length(head_dim(live))
    writer.add_value_length(head_dim(live))
    writer.add_layer_norm_rms_eps(live.rms_norm_eps)
    writer.add_vocab_size(live.vocab_size)
    for key, name in architecture.scales.items():
        writer.add_float32(f"{architecture.name}.{key}", getattr(live, name))
    writer.add_rope_dimension_count(factors.rotary_dim * architecture.rotary_scale)
    writer.add_rope_freq_base(factors.theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(factors.original_length)
    # Never rope.scaling.factor: llama.cpp would divide every frequency by it once more.
    writer.add_rope_scaling_attn_factors(factors.long_attention_factor)
    writer.add_string(FACTORS_KEY, json.dumps(factors.to_json()))
    writer.add_string(CONFIG_KEY, json.dumps(serving_config(source.config, factors, dtype="float32")))
