"""GGUF files of LLaMA architecture as ordinary transformers models.

llama.cpp stores the rows of W_q and W_k so that both halves of a rotated pair lie side by side; transformers
keeps them half a head apart. Reading undoes that permutation and dequantises to float32.
"""

import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.errors import ModelError, damage, require
from longrope2.factors import RescaleFactors
from longrope2.files import parse_json

if TYPE_CHECKING:
    import numpy as np
    import torch

ARCHITECTURE = "llama"
AGAIN = "the file may be cut short; download it, or export it, again"
FACTORS_KEY = "longrope2.factors"
"""Where our own exports keep their factors in full: the file's tensors are float32, with one attention factor."""

MOST_ITEMS = 1 << 21
"""Of a list in the metadata, where tokens and merges are the longest."""

# How each of llama.cpp's pre-tokenisers splits text, where it differs from GPT-2's own rule.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN_SPLITS = ("default", "gpt-2")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LLAMA3_SPLITS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")


def open_gguf(path: Path) -> "GGUFModel":
    """A GGUF file, parsed once while it stays the same: that takes seconds, and a command asks several times."""
    try:
        state = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: not a readable GGUF file ({error.strerror})") from error
    return _parsed(path, (state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _parsed(path: Path, _state: tuple[int, ...]) -> "GGUFModel":
    return GGUFModel(path)


def read_gguf(path: Path) -> Any:
    """The reader of the gguf package, for a file that may be damaged or hostile."""
    gguf = require("gguf", extra="export", purpose="reading a GGUF file")

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined]
        """One that does not count to 2⁶⁰ where a file says that a list is so long."""

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind == gguf.GGUFValueType.ARRAY and (count := int(self._get(offset + 4, "u8")[0])) > MOST_ITEMS:
                raise ValueError(f"a list of {count:,} values")
            return super()._get_field_parts(offset, kind)

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **options)
            if len(found) < int(count):
                raise ValueError("it ends before the end of a value")
            return found

    with damage(f"{path}: not a readable GGUF file", hint=AGAIN):
        return Reader(path)


def model_of(config: Any, state: "dict[str, torch.Tensor]", name: str) -> Any:
    """A transformers model with these weights, all of them; `name` is the file's, for messages."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:  # of other sizes than the config says
        problem = str(error).strip().rpartition("\n")[2].strip()
        raise ModelError(f"{name}: tensors and metadata disagree ({problem})", hint=AGAIN) from error
    model.tie_weights()
    missing = [weight for weight in missing if not (config.tie_word_embeddings and weight == "lm_head.weight")]
    if missing or unexpected:
        raise ModelError(f"{name}: tensors missing {missing[:3]} or not known {unexpected[:3]}", hint=AGAIN)
    # Buffers made on the meta device hold garbage; a fresh rotary module has the right ones.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


class GGUFModel:
    """One GGUF file: its metadata at once, its tensors when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = read_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.value("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelError(
                f"{path.name}: GGUF architecture {architecture!r} is not supported, only '{ARCHITECTURE}'",
                hint="use the original safetensors folder of the model",
            )

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value; keys of the architecture may leave out its name ('rope.freq_base')."""
        for name in (key, f"{ARCHITECTURE}.{key}"):
            field = self._reader.get_field(name)
            if field is not None:
                with damage(f"{self.path.name}: '{name}' is damaged", hint=AGAIN):
                    return field.contents()
        return default

    def config(self) -> dict[str, Any]:
        """The config.json that a LLaMA folder of this model would have."""
        with damage(f"{self.path.name}: its metadata are damaged", hint=AGAIN):
            return self._config()

    def _config(self) -> dict[str, Any]:
        hidden, heads = self._required("embedding_length"), self._required("attention.head_count")
        head_dim = self.value("attention.key_length", hidden // heads)
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.value("vocab_size") or self._tensors["token_embd.weight"].shape[1].item(),
            "hidden_size": hidden,
            "intermediate_size": self._required("feed_forward_length"),
            "num_hidden_layers": self._required("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._required("context_length"),
            "rms_norm_eps": self.value("attention.layer_norm_rms_epsilon", 1e-5),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "rope_parameters": self._rope_parameters(head_dim),
        }

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        if self.value("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{self.path.name}: partial rotary in a GGUF of '{ARCHITECTURE}' is not supported")
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": float(self.value("rope.freq_base", 10_000.0)),
        }
        scaling = self.value("rope.scaling.type", "none")
        original = self.value("rope.scaling.original_context_length")
        if "rope_factors_long.weight" in self._tensors:
            parameters |= {
                "rope_type": "longrope",
                "long_factor": self._list("rope_factors_long.weight"),
                "short_factor": self._list("rope_factors_short.weight"),
                "original_max_position_embeddings": original,
                "attention_factor": self.value("rope.scaling.attn_factor", 1.0),
                **self._own_parameters(),
            }
        elif "rope_freqs.weight" in self._tensors:
            # LLaMA 3.1 keeps its divisors as a tensor; as longrope with two equal lists they act the same.
            divisors = self._list("rope_freqs.weight")
            parameters |= {
                "rope_type": "longrope",
                "long_factor": divisors,
                "short_factor": divisors,
                "original_max_position_embeddings": original or 8192,
                "attention_factor": 1.0,
            }
        elif scaling in ("linear", "yarn"):
            parameters |= {"rope_type": scaling, "factor": float(self._required("rope.scaling.factor"))}
            if original:
                parameters["original_max_position_embeddings"] = original
        return parameters

    def _own_parameters(self) -> dict[str, Any]:
        """What our own exports say more exactly than their tensors can."""
        text = self.value(FACTORS_KEY)
        if text is None:
            return {}
        with damage(f"{self.path.name}: '{FACTORS_KEY}' is damaged", hint=AGAIN):
            factors = RescaleFactors.from_json(parse_json(text), source=self.path.name)
        return {
            "long_factor": list(factors.long),
            "short_factor": list(factors.short),
            "attention_factor": factors.long_attention_factor,
            "long_mscale": factors.long_attention_factor,
            "short_mscale": factors.short_attention_factor,
        }

    def model(self, *, dtype: "torch.dtype") -> Any:
        """A LlamaForCausalLM with the dequantised weights."""
        import torch
        from transformers import LlamaConfig

        with damage(f"{self.path.name}: tensors and metadata disagree", hint=AGAIN):
            config = LlamaConfig(**self.config())
            state = {name: torch.from_numpy(array).to(dtype) for name, array in self._weights(config).items()}
            return model_of(config, state, self.path.name)

    def tokenizer(self) -> Any:
        """The tokenizer, with the text split that the file names; the caller's own, to change as need be."""
        return copy.deepcopy(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Regex, pre_tokenizers
        from transformers import AutoTokenizer

        with damage(f"{self.path.name}: its tokenizer cannot be loaded", hint=AGAIN):
            tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        if self.value("tokenizer.ggml.model") != "gpt2":
            return tokenizer
        # transformers' GGUF reader splits every BPE vocabulary like GPT-2; the file knows better.
        split = self.value("tokenizer.ggml.pre", "default")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in LLAMA3_SPLITS)
        if split in DIGIT_SPLITS:
            parts = [pre_tokenizers.Digits(individual_digits=True), byte_level]
        elif split in LLAMA3_SPLITS:
            parts = [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), byte_level]
        elif split in PLAIN_SPLITS:
            parts = [byte_level]
        else:
            raise ModelError(
                f"{self.path.name}: text split {split!r} is not known here, and a guess would change tokens",
                hint="use the original safetensors folder of the model",
            )
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        return tokenizer

    def _weights(self, config: Any) -> "dict[str, np.ndarray]":
        names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
        names["output.weight"] = "lm_head.weight"
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            names |= {
                f"blk.{i}.attn_norm.weight": layer + "input_layernorm.weight",
                f"blk.{i}.ffn_norm.weight": layer + "post_attention_layernorm.weight",
                f"blk.{i}.attn_q.weight": layer + "self_attn.q_proj.weight",
                f"blk.{i}.attn_k.weight": layer + "self_attn.k_proj.weight",
                f"blk.{i}.attn_v.weight": layer + "self_attn.v_proj.weight",
                f"blk.{i}.attn_output.weight": layer + "self_attn.o_proj.weight",
                f"blk.{i}.ffn_gate.weight": layer + "mlp.gate_proj.weight",
                f"blk.{i}.ffn_up.weight": layer + "mlp.up_proj.weight",
                f"blk.{i}.ffn_down.weight": layer + "mlp.down_proj.weight",
            }
        weights = {hf: self._dequantised(name) for name, hf in names.items() if name in self._tensors}
        unknown = set(self._tensors) - set(names)
        unknown -= {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
        if unknown:
            raise ModelError(
                f"{self.path.name}: tensors not known for '{ARCHITECTURE}': {sorted(unknown)[:3]}",
                hint="models with experts or biases are not supported as GGUF; use the safetensors folder",
            )
        for name in weights:
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                weights[name] = unpermute(weights[name], heads)
        return weights

    def _dequantised(self, name: str) -> "np.ndarray":
        import gguf
        import numpy as np

        tensor = self._tensors[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.array(values, dtype=np.float32).reshape([int(n) for n in reversed(tensor.shape)])

    def _list(self, name: str) -> list[float]:
        if name not in self._tensors:
            raise ModelError(f"{self.path.name}: tensor '{name}' is missing", hint=AGAIN)
        return [float(value) for value in self._dequantised(name)]

    def _required(self, key: str) -> Any:
        value = self.value(key)
        if value is None:
            raise ModelError(f"{self.path.name}: metadata '{ARCHITECTURE}.{key}' is missing")
        return value


def unpermute(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """From llama.cpp's row order (pairs side by side) to transformers' (pairs half a head apart)."""
    rows = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)
