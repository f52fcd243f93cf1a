"""Configs for the tests of `check`, in the forms that people have, with the sizes of a toy."""

import json
from pathlib import Path
from typing import Any

PAIRS = 8
"""Frequencies of a head of 16."""


def config(family: str = "llama", window: int = 1024, **rope: Any) -> dict[str, Any]:
    """The config.json of a small model; RoPE keys are given as they stand there."""
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {"model_type": family, **sizes, "max_position_embeddings": window, **rope}


def write(folder: Path, content: dict[str, Any]) -> Path:
    """A folder with only a config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = [1.0 + i for i in range(PAIRS)]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": LONG}


def write_gguf_like(
    source: Path, place: Path, scaling: dict[str, Any], tensors: dict[str, Any], *, window: int | None = None
) -> Path:
    """A GGUF file of LLaMA architecture with the weights of an export, but without our keys, and another scaling."""
    import gguf

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(place, "llama")
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "longrope2.", "llama.rope.scaling.")) or name == "general.architecture":
            continue
        value = window if window and name == "llama.context_length" else field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    kinds = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}
    for name, value in scaling.items():
        writer.add_key_value(f"llama.rope.scaling.{name}", value, kinds[type(value)])
    for tensor in reader.tensors:
        if not tensor.name.startswith("rope_"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place
