"""Shapes of models with random weights, which is all that speed depends on."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def phi3_mini(layers: int = 32) -> Phi3ForCausalLM:
    config = Phi3Config(
        vocab_size=32_064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
        original_max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    return Phi3ForCausalLM(config)


def smollm2(layers: int = 30) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama3_8b(layers: int = 32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_llama3(layers: int = 8) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=224, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config)


SHAPES = {"smollm2": smollm2, "phi3-mini": phi3_mini, "llama3-8b": llama3_8b, "tiny": tiny_llama3}


def in_bfloat16(make: Callable[[], Any]) -> Any:
    """A model for inference, always the same one, made in its final precision on its device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)
