"""The weights of a model on their way from disk to an export, one tensor at a time: never a whole model in memory."""

import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrope2.errors import LongRopeError, ModelError, damage
from longrope2.families import ODD, Family, head_dim, live_config, read_config
from longrope2.files import read_json
from longrope2.gguf_model import GGUFModel, open_gguf
from longrope2.models import (
    ModelInfo,
    check_manifest,
    json_object,
    load_tokenizer,
    pretrained_source,
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
DOWNLOADED = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "NOTICE*", "README.md")
BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
"""What old checkpoints kept beside their weights, and models now make for themselves."""

MARGIN = 64 << 20
"""Bytes for tokenizer, config and the file system's own needs."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NORMS = ("q_norm.", "q_layernorm.")
PROJECTIONS = ("self_attn.q_proj.", "self_attn.qkv_proj.", "attention.query_key_value.")

Change = Callable[[str, Tensor], Tensor]
"""What is done to a tensor of some name on its way into an export."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_values(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


class SourceModel:
    """What an export starts from: nothing is read, or downloaded, before it is asked for."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info

    @cached_property
    def folder(self) -> Path | None:
        """Where its files lie; None for a GGUF file."""
        if self.info.is_gguf:
            return None
        folder = Path(self.info.location)
        return folder if folder.is_dir() else _download(self.info)

    @cached_property
    def _file(self) -> GGUFModel:
        return open_gguf(Path(self.info.location))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        if self.folder is None:
            return self._file.config()
        return json_object(self.folder / "config.json")

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Its weights, by the names they have on disk; those of a GGUF file dequantised, in memory."""
        if self.folder is not None:
            check_manifest(self.folder)
            return dict(_stored(self.folder))
        state = self._file.model(dtype=torch.float32).state_dict()
        if self.config["tie_word_embeddings"]:
            del state["lm_head.weight"]
        return {name: _in_memory(tensor) for name, tensor in state.items()}

    def tokenizer(self) -> Any:
        """Its tokenizer, as transformers loads it."""
        return self._file.tokenizer() if self.folder is None else load_tokenizer(self.info)

    @property
    def dtype(self) -> torch.dtype:
        """That of most of its numbers."""
        counts: dict[torch.dtype, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_values
        return max(counts, key=lambda dtype: counts[dtype])


def _download(info: ModelInfo) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    source, options = pretrained_source(info)
    try:
        return Path(snapshot_download(source, revision=options.get("revision"), allow_patterns=list(DOWNLOADED)))
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{info.name}: its files cannot be had from the hub ({str(error).strip().partition(chr(10))[0]})",
            hint="check the network; what was downloaded already is kept",
        ) from error


def _in_memory(tensor: Tensor) -> Stored:
    return Stored(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers loads: a folder may also hold the weights in another format (Mistral's consolidated)."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise ModelError(
            f"{folder}: no *.safetensors weights there that transformers would load",
            hint="they are model.safetensors, or files that model.safetensors.index.json names",
        )
    with damage(f"{index}: not an index of weights", hint="copy or download it again"):
        return sorted({folder / file for file in read_json(index, lenient=True)["weight_map"].values()})


def _stored(folder: Path) -> Iterator[tuple[str, Stored]]:
    from safetensors import SafetensorError, safe_open

    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - no mapping
                    if name.endswith(BUFFERS):
                        continue
                    part = content.get_slice(name)
                    dtype = part.get_dtype()
                    if dtype not in DTYPES:
                        raise ModelError(
                            f"{folder}: {name} is stored as {dtype}",
                            hint="export the unquantised model, and quantise the export",
                        )
                    yield name, Stored(tuple(part.get_shape()), DTYPES[dtype], _reader(file, name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: cannot be read ({error})", hint="the file may be cut short") from error


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    from safetensors import safe_open

    def read() -> Tensor:
        with safe_open(file, framework="pt") as content:
            return content.get_tensor(name)

    return read


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another precision, or ModelError where it does not fit into its range."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(result).all() and torch.isfinite(tensor).all():
        raise ModelError(
            f"{name} has values up to {float(tensor.abs().max()):.3g}, beyond the range of float16",
            hint="use --dtype bfloat16",
        )
    return result


def check_room(output: Path, needed: int) -> None:
    """Raise unless the disk has room for this many bytes."""
    place = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed + MARGIN:
        raise LongRopeError(
            f"{output}: the export needs {(needed + MARGIN) / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free there",
            hint="make room, name another disk with -o, or write a smaller --dtype",
        )


FOLDED = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi", "phi3", "gpt_neox", "gemma",
    "gemma2", "gemma3_text", "olmo2", "granite", "stablelm", "glm", "glm4", "cohere", "cohere2", "starcoder2",
    "smollm3", "gpt_oss",
)  # fmt: skip
"""Families whose queries are known to be made by these weights alone; each is tested."""


class QueryScale:
    """The attention temperature, moved from RoPE into the weights that make queries, tensor by tensor.

    Some engines multiply cos and sin by √(1 + ln s/ln L_train), whatever the config says. In the rotated dimensions
    scores are then off by the square of (forced/wanted attention factor). Queries divided by that square bring them
    back: exactly, apart from the rounding of the weights.
    """

    def __init__(self, config: Mapping[str, Any], names: Collection[str], factor: float) -> None:
        live = live_config(config)
        reading = read_config(config)
        if reading.family not in FOLDED:
            raise ModelError(
                f"which weights of '{reading.family}' models make queries is not known here: nothing can be folded",
                hint="omit --fold-temperature",
            )
        self._family = ODD.get(reading.family, Family())
        self._num_heads = live.num_attention_heads
        self._pattern = torch.ones(head_dim(live))
        self._pattern[: reading.rope.rotary_dim] = factor
        kinds = reading.layer_types
        if reading.rotates is not None:
            self._layers = {i for i, kind in enumerate(kinds) if kind == reading.rotates}
        else:
            rotates = getattr(live, "no_rope_layers", None) or [True] * len(kinds)  # SmolLM3; 1 means it rotates
            self._layers = {i for i in range(len(kinds)) if rotates[i]}
        # A norm would undo what is done to the projection before it.
        self._parts = NORMS if any(part in name for name in names for part in NORMS) else PROJECTIONS
        missing = self._layers - {self._layer(name) for name in names}
        if missing:
            raise ModelError(f"the weights that make the queries of layer {min(missing)} are not where they should be")

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of that name, in float32 where it was changed."""
        if self._layer(name) is None:
            return tensor
        values = tensor.float()
        if values.dim() == 2 and self._parts is NORMS:  # Cohere's: a row for each head
            return values * self._pattern
        rows = self._rows(name, len(values)).reshape(-1, *[1] * (values.dim() - 1))
        if self._family.norms_add_one:
            return (1 + values) * rows - 1
        return values * rows

    def _layer(self, name: str) -> int | None:
        """The layer whose queries this tensor makes, if it does that."""
        layer = LAYER.search(name)
        if layer is None or int(layer[1]) not in self._layers or not any(part in name for part in self._parts):
            return None
        return int(layer[1])

    def _rows(self, name: str, count: int) -> Tensor:
        """What each row of a tensor is multiplied by."""
        if "query_key_value" in name:  # per head: query, key, value
            untouched = torch.ones(2, len(self._pattern))
            return torch.cat((self._pattern[None], untouched)).flatten().repeat(self._num_heads)
        queries = self._pattern.repeat(max(min(count // len(self._pattern), self._num_heads), 1))
        return torch.cat((queries, torch.ones(count - len(queries))))
