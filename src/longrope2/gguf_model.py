"""GGUF files as ordinary transformers models: llama.cpp's names of tensors, its metadata, and how it stores weights.

For LLaMA it stores the rows of W_q and W_k so that both halves of a rotated pair lie side by side; transformers keeps
them half a head apart. Reading undoes that permutation and dequantises to float32.
"""

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.errors import ModelError, damage, require
from longrope2.factors import RescaleFactors
from longrope2.files import parse_json
from longrope2.methods import yarn_temperature

if TYPE_CHECKING:
    import numpy as np
    import torch

AGAIN = "the file may be cut short; download it, or export it, again"
FACTORS_KEY = "longrope2.factors"
"""Where our own exports keep their factors in full: the file's tensors are float32, with one attention factor."""

MOST_ITEMS = 1 << 21
"""Of a list in the metadata, where tokens and merges are the longest."""

# How each of llama.cpp's pre-tokenisers splits text, where it differs from GPT-2's own rule.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN_SPLITS = ("default", "gpt-2")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_SPLIT),
    "gpt-4o": GPT4O_SPLIT,
}

WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
"""Splits after which whole words of the vocabulary go before merges."""
CONTROL, USER_DEFINED = 3, 4
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

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
NORMED_LAYER = {**LLAMA_LAYER, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA3_LAYER = {
    **NORMED_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI3_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One of llama.cpp's: what it calls its tensors, and how it stores them."""

    name: str
    family: str
    """`model_type` of the models it holds, if their tensors do not say otherwise."""
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA_LAYER)
    """What transformers calls the parts of a layer → llama.cpp's name."""
    pairs_side_by_side: bool = False
    """Whether the rows of W_q and W_k are permuted."""
    norms_from_one: bool = False
    """Whether transformers stores the weights of norms less 1."""
    rotary_scale: int = 1
    """How many times the rotated dimensions its metadata count."""
    is_stand_in: bool = False
    """Whether it is that of another model: with an output, without biases, and with a last layer that adds nothing."""
    scales: Mapping[str, str] = field(default_factory=dict)
    """Metadata key → config key of further numbers."""

    def gguf_name(self, name: str) -> str | None:
        """llama.cpp's name of a tensor of transformers; None if it has no such tensor."""
        stem, _, ending = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        place = self.layer.get(layer[2]) if layer else OUTER.get(stem)
        if place is None or ending not in (("weight",) if self.is_stand_in else ("weight", "bias")):
            return None
        return f"blk.{layer[1]}.{place}.{ending}" if layer else f"{place}.{ending}"

    def hf_name(self, name: str) -> str | None:
        """transformers' name of a tensor of llama.cpp; None if it has no such tensor."""
        stem, _, ending = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        names = {theirs: ours for ours, theirs in (self.layer if layer else OUTER).items()}
        found = names.get(layer[2] if layer else stem)
        if found is None:
            return None
        return f"model.layers.{layer[1]}.{found}.{ending}" if layer else f"{found}.{ending}"

    def permuted_heads(self, name: str, config: Any) -> int:
        """How many heads the rows of a permuted tensor belong to; 0 for all others."""
        if not self.pairs_side_by_side:
            return 0
        if "self_attn.q_proj." in name:
            return config.num_attention_heads
        return config.num_key_value_heads if "self_attn.k_proj." in name else 0


LLAMA = Architecture(name="llama", family="llama", pairs_side_by_side=True)
GRANITE = Architecture(
    name="granite",
    family="granite",
    pairs_side_by_side=True,
    scales={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
)
PHI3 = Architecture(name="phi3", family="phi3", layer=PHI3_LAYER)
# Step 3.5 without experts and gates is Qwen 3; and llama.cpp gives it factors, which its own Qwen 3 has not. It halves
# the rotated dimensions, and some layer must slide: a last one, which adds nothing.
STEP35 = Architecture(name="step35", family="qwen3", layer=NORMED_LAYER, rotary_scale=2, is_stand_in=True)
ARCHITECTURES = {
    each.name: each
    for each in (
        LLAMA,
        Architecture(name="qwen2", family="qwen2"),
        Architecture(name="qwen3", family="qwen3", layer=NORMED_LAYER),
        Architecture(name="gemma3", family="gemma3_text", layer=GEMMA3_LAYER, norms_from_one=True),
        PHI3,
        GRANITE,
        STEP35,
    )
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
}


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
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined]
        """One that takes no half minute for long lists, and does not count to 2⁶⁰ where a file says so."""

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(offset, kind)
            item, count = self._get(offset, "u4"), self._get(offset + 4, "u8")
            if (length := int(count[0])) > MOST_ITEMS:
                raise ValueError(f"a list of {length:,} values")
            types, start = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item[0])], offset + 12
            if scalar := self.gguf_scalar_to_np.get(types[1]):
                values = self._get(start, scalar, length)
                return 12 + values.nbytes, [item, count, values], [2], types
            if types[1] != gguf.GGUFValueType.STRING or self.byte_order != "I":
                return super()._get_field_parts(offset, kind)
            parts, content = [item, count], memoryview(self.data)
            plain = self.data.view(type=np.ndarray)
            for _ in range(length):
                size = int.from_bytes(content[start : start + 8], sys.byteorder)
                parts.append(plain[start + 8 : start + 8 + size])
                start += 8 + size
                if start > len(content):
                    raise ValueError("it ends before the end of a value")
            return start - offset, parts, list(range(2, len(parts))), types

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
    from transformers.initialization import no_init_weights

    with no_init_weights():  # memory that is never written takes none
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:  # of other sizes than the config says
        problem = str(error).strip().rpartition("\n")[2].strip()
        raise ModelError(f"{name}: tensors and metadata disagree ({problem})", hint=AGAIN) from error
    model.tie_weights()
    missing = [weight for weight in missing if not (config.tie_word_embeddings and weight == "lm_head.weight")]
    if missing or unexpected:
        raise ModelError(f"{name}: tensors missing {missing[:3]} or not known {unexpected[:3]}", hint=AGAIN)
    return model.eval()


class GGUFModel:
    """One GGUF file: its metadata at once, its tensors when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = read_gguf(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = LLAMA
        name = self.value("general.architecture")
        found = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if found is None or (found is STEP35 and self.value(FACTORS_KEY) is None):
            known = ", ".join(each.name for each in ARCHITECTURES.values() if each is not STEP35)
            raise ModelError(
                f"{path.name}: GGUF architecture {name!r} is not supported, only {known}",
                hint="use the original safetensors folder of the model",
            )
        self._architecture = found

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value; keys of the architecture may leave out its name ('rope.freq_base')."""
        for name in (key, f"{self._architecture.name}.{key}"):
            field = self._reader.get_field(name)
            if field is not None:
                with damage(f"{self.path.name}: '{name}' is damaged", hint=AGAIN):
                    return field.contents()
        return default

    def config(self) -> dict[str, Any]:
        """The config.json that a folder of this model would have."""
        with damage(f"{self.path.name}: its metadata are damaged", hint=AGAIN):
            return self._config()

    def _config(self) -> dict[str, Any]:
        family = self._architecture.family
        if family == "llama" and self._has("attn_q.bias") and not self._has("attn_output.bias"):
            family = "qwen2"  # written as a LLaMA, which llama.cpp gives factors
        hidden, heads = self._required("embedding_length"), self._uniform("attention.head_count")
        head_dim = self.value("attention.key_length", hidden // heads)
        config = {
            "model_type": family,
            "architectures": [CLASSES[family]],
            "vocab_size": self.value("vocab_size") or self._tensors["token_embd.weight"].shape[1].item(),
            "hidden_size": hidden,
            "intermediate_size": self._required("feed_forward_length"),
            "num_hidden_layers": self._num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._uniform("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._required("context_length"),
            "rms_norm_eps": self.value("attention.layer_norm_rms_epsilon", 1e-5),
            "tie_word_embeddings": self._is_tied,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
            "rope_parameters": self._rope_parameters(head_dim),
            **{name: self._required(key) for key, name in self._architecture.scales.items()},
        }
        if family in ("llama", "qwen3"):
            config["attention_bias"] = self._has("attn_q.bias")
        if family == "llama":
            config["mlp_bias"] = self._has("ffn_up.bias")
        if family == "phi3":
            config["sliding_window"] = self.value("attention.sliding_window") or None
            config["original_max_position_embeddings"] = self._original_length or config["max_position_embeddings"]
        if family == "gemma3_text":
            config |= self._gemma3(config)
        return config

    def _gemma3(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What Gemma 3 has besides; numbers that the file leaves out are those of llama.cpp."""
        count, period = config["num_hidden_layers"], self.value("attention.sliding_window_pattern", 6)
        slides = [bool((i + 1) % period) for i in range(count)] if isinstance(period, int) else period
        local = {"rope_type": "default", "rope_theta": float(self.value("rope.freq_base_swa", 10_000.0))}
        of_27b = config["hidden_size"] // config["num_attention_heads"]
        return {
            "sliding_window": self._required("attention.sliding_window"),
            "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
            "query_pre_attn_scalar": of_27b if count == 62 else config["head_dim"],
            "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        }

    @property
    def _num_layers(self) -> int:
        return self._required("block_count") - self._architecture.is_stand_in

    def _uniform(self, key: str, default: int | None = None) -> int:
        """A number that is the same in all layers, though it may be listed for each."""
        value = self._required(key) if default is None else self.value(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value[: self._num_layers])) != 1:
            raise ModelError(f"{self.path.name}: layers that differ in '{key}' are not supported")
        return value[0]

    def _has(self, part: str) -> bool:
        """Whether its first layer has such a tensor."""
        return f"blk.0.{part}" in self._tensors

    @cached_property
    def _is_tied(self) -> bool:
        """Whether the output is the embedding, which some files store twice."""
        if "output.weight" not in self._tensors:
            return True
        embedding, output = self._tensors["token_embd.weight"], self._tensors["output.weight"]
        return embedding.tensor_type == output.tensor_type and bool((embedding.data == output.data).all())

    @property
    def _original_length(self) -> int | None:
        return self.value("rope.scaling.original_context_length")

    def _rope_parameters(self, head_dim: int) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": float(self.value("rope.freq_base", 10_000.0)),
        }
        scale = self._architecture.rotary_scale
        rotated = self.value("rope.dimension_count", head_dim * scale) // scale
        if rotated != head_dim:
            if self._architecture.family != "phi3":
                raise ModelError(
                    f"{self.path.name}: partial rotary in a GGUF of '{self._architecture.name}' is not supported"
                )
            parameters["partial_rotary_factor"] = rotated / head_dim
        scaling, original = self.value("rope.scaling.type", "none"), self._original_length
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
            if scaling == "yarn":  # llama.cpp multiplies YaRN's own temperature by it; measured with xllamacpp
                ratio = float(self.value("rope.scaling.attn_factor", 1.0))
                parameters["attention_factor"] = ratio * yarn_temperature(max(parameters["factor"], 1.0))
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

    @property
    def is_rounded(self) -> bool:
        """Whether tensors are stored in less than float32."""
        return any(tensor.tensor_type.name != "F32" for tensor in self._tensors.values())

    def model(self, *, dtype: "torch.dtype", config: Any = None) -> Any:
        """The transformers model with the dequantised weights; `config` in place of the file's metadata."""
        from transformers import CONFIG_MAPPING

        with damage(f"{self.path.name}: tensors and metadata disagree", hint=AGAIN):
            if config is None:
                values = self.config()
                config = CONFIG_MAPPING[values["model_type"]](**values)
            config.tie_word_embeddings = self._is_tied
            return model_of(config, self._state(config, dtype), self.path.name)

    def _state(self, config: Any, dtype: "torch.dtype") -> "dict[str, torch.Tensor]":
        """The weights as transformers has them."""
        import torch

        architecture, state, unknown = self._architecture, {}, []
        for tensor in self._used():
            name = architecture.hf_name(tensor.name)
            if name is None:
                unknown.append(tensor.name)
                continue
            values = dequantised(tensor)
            if heads := architecture.permuted_heads(name, config):
                values = unpermute(values, heads)
            if architecture.norms_from_one and name.endswith("norm.weight"):
                values = values - 1
            state[name] = torch.from_numpy(values).to(dtype)
        if unknown:
            raise ModelError(
                f"{self.path.name}: tensors not known for '{architecture.name}': {', '.join(sorted(unknown)[:3])}",
                hint="models with experts are not supported as GGUF; use the safetensors folder",
            )
        return state

    def _used(self) -> Iterator[Any]:
        """The tensors of the model, without a second copy and a layer that adds nothing."""
        blank = f"blk.{self._num_layers}." if self._architecture.is_stand_in else None
        for name, tensor in self._tensors.items():
            is_copy = self._is_tied and name == "output.weight"
            if name not in ROPE_TENSORS and not is_copy and not (blank and name.startswith(blank)):
                yield tensor

    def tokenizer(self) -> Any:
        """The tokenizer, with the text split that the file names; the caller's own, to change as need be."""
        return copy.deepcopy(self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Any:
        with damage(f"{self.path.name}: its tokenizer cannot be loaded", hint=AGAIN):
            return self._byte_level() if self.value("tokenizer.ggml.model") == "gpt2" else self._sentencepiece()

    def _byte_level(self) -> Any:
        """A byte-level BPE: transformers' GGUF reader splits every one like GPT-2, but the file knows better."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        split = self.value("tokenizer.ggml.pre", "default")
        if split not in (*PLAIN_SPLITS, *DIGIT_SPLITS, *PATTERNS):
            raise ModelError(
                f"{self.path.name}: text split {split!r} is not known here, and a guess would change tokens",
                hint="use the original safetensors folder of the model",
            )
        tokens, kinds = self.value("tokenizer.ggml.tokens"), self.value("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self.value("tokenizer.ggml.merges")]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        marks = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split in WHOLE_WORDS, **marks))
        rules: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in PATTERNS)]
        if split in DIGIT_SPLITS:
            rules.insert(0, pre_tokenizers.Digits(individual_digits=True))
        elif split in PATTERNS:
            rules.insert(0, pre_tokenizers.Split(Regex(PATTERNS[split]), "isolated"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(rules)
        backend.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, kinds, strict=True):
            if kind in (CONTROL, USER_DEFINED):
                backend.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
        numbers = {name: self.value(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
        special = {name: tokens[number] for name, number in numbers.items() if number is not None}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=self.value("tokenizer.chat_template"), **special
        )
        self._add_first(tokenizer, default=split in WHOLE_WORDS)
        return tokenizer

    def _sentencepiece(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        if tokenizer("a").input_ids[0] != tokenizer.bos_token_id:
            self._add_first(tokenizer, default=True)
        return tokenizer

    def _add_first(self, tokenizer: Any, *, default: bool) -> None:
        """Let texts begin with the token that the file says; `default` is llama.cpp's where it does not."""
        from tokenizers import processors

        if self.value("tokenizer.ggml.add_bos_token", default) and (first := tokenizer.bos_token):
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, tokenizer.bos_token_id)]
            )

    def _list(self, name: str) -> list[float]:
        if name not in self._tensors:
            raise ModelError(f"{self.path.name}: tensor '{name}' is missing", hint=AGAIN)
        return [float(value) for value in dequantised(self._tensors[name])]

    def _required(self, key: str) -> Any:
        value = self.value(key)
        if value is None:
            raise ModelError(f"{self.path.name}: metadata '{self._architecture.name}.{key}' is missing")
        return value


def dequantised(tensor: Any) -> "np.ndarray":
    """A tensor of gguf's reader in float32."""
    import gguf
    import numpy as np

    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(
            f"tensor '{tensor.name}' has the type {tensor.tensor_type.name}, which the gguf package cannot dequantise",
            hint="update the gguf package, or use a file of another quantisation",
        ) from error
    return np.array(values, dtype=np.float32).reshape([int(n) for n in reversed(tensor.shape)])


def unpermute(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """From llama.cpp's row order (pairs side by side) to transformers' (pairs half a head apart)."""
    rows = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)
