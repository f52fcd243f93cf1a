"""A model's shape from its configuration alone, without weights: sizes, names of parameters, and work per token."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longrope2.families import SLIDING_ATTENTION
from longrope2.gguf_model import open_gguf
from longrope2.models import ModelInfo, head_dim, num_kv_heads, pretrained_source, refused_config
from longrope2.training.trainable import is_matrix, linear_layers, matching


def skeleton(info: ModelInfo) -> Any:
    """The model on the meta device: every parameter has its name and shape, and none takes memory."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    info.refuse_weights()
    try:
        if info.is_gguf:
            values = open_gguf(Path(info.location)).config()
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            source, options = pretrained_source(info)
            config = AutoConfig.from_pretrained(source, **options)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # initialising what has no values
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise refused_config(info.name, error) from error


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that decide what training costs."""

    parameters: int
    trained: int
    """Parameters that learn; with LoRA the additions alone."""
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


def shape_of(model: Any, info: ModelInfo, *, freeze: Sequence[str] = (), lora: int | None = None) -> Shape:
    """The shape of a model, live or on the meta device, before anything is added to it."""
    config = model.config.get_text_config()
    layers = [_count(layer) for layer in model.base_model.layers]
    total = _count(model)
    if lora:
        learning = sum(lora * (layer.in_features + layer.out_features) for layer in linear_layers(model).values())
    else:
        frozen = matching(model, freeze)
        learning = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in frozen)
    reading = info.reading
    windows = tuple(reading.sliding_window if kind == SLIDING_ATTENTION else None for kind in reading.layer_types)
    return Shape(
        parameters=total,
        trained=learning,
        matrices=_matrices(model, config),
        layer=max(layers),
        outside=total - sum(layers),
        windows=windows,
        hidden=config.hidden_size,
        inner=_inner(config),
        heads=config.num_attention_heads,
        kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        vocabulary=config.vocab_size,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(model: Any, config: Any) -> int:
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    named = dict(model.named_parameters())
    flat = sum(p.numel() for name, p in named.items() if p.ndim == 2 and is_matrix(name, p))
    matrices = flat - (0 if tied else embedding.numel())
    # Experts lie in one tensor, [experts, rows, columns].
    experts = [p for p in named.values() if p.ndim == 3]
    return matrices + sum(p.numel() // len(p) * config.num_experts_per_tok for p in experts)


def _inner(config: Any) -> int:
    """The widest MLP a token goes through."""
    if hasattr(config, "num_experts_per_tok"):
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        return int(width * config.num_experts_per_tok)
    return int(config.intermediate_size)
