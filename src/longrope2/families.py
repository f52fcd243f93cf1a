"""What each model family's config.json says about its RoPE, read without transformers or torch.

Only families in the table below are extended: an unknown layout is refused, never guessed to be a LLaMA.
"""

import logging
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longrope2.errors import ModelError, all_problems, damage
from longrope2.methods import longrope_temperature, ntk_by_parts, yarn, yarn_temperature
from longrope2.rope import RopeSpec

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
FullLayers = Callable[[Mapping[str, Any], int], Container[int]]
"""From a config and the number of layers: those that see everything, where the config does not list them."""


@dataclass(frozen=True)
class Family:
    """What transformers assumes where a config.json of this family is silent, and what is odd about its models."""

    window: int
    examples: str
    """Models of this family, for the docs."""
    theta: float = 10_000.0
    theta_key: str = "rope_theta"
    partial_rotary: float = 1.0
    partial_key: str = "partial_rotary_factor"
    head_dim: int | None = None
    sliding_window: int | None = None
    slides_if_asked: bool = False
    """Whether it names a sliding window that takes effect only when a second key switches it on."""
    full_layers: FullLayers | None = None
    """Its rule, if not all layers slide."""
    original_window: int | None = None
    """Phi-3 alone keeps it beside the RoPE parameters, where it overrides them."""
    inside: str | None = None
    """The model_type of larger models whose text_config is of this family."""
    rotates: str | None = None
    """The kind of attention of the only layers that these factors act on; None for all that rotate."""
    norms_add_one: bool = False
    """Whether its norms multiply by 1 + weight."""
    legacy_keys: tuple[str, ...] | None = None
    """All that `rope_scaling` may hold in transformers 4, at the temperature which it then assumes."""
    remark: str | None = None
    """What a user should know before extending such a model."""


def _first_layers(config: Mapping[str, Any], count: int) -> Container[int]:
    return range(min(config.get("max_window_layers", 28), count))


def _odd_and_last_layers(config: Mapping[str, Any], count: int) -> Container[int]:
    return {i for i in range(count) if i % 2 or i >= config.get("max_window_layers", 28)}


def _odd_layers(config: Mapping[str, Any], count: int) -> Container[int]:
    return range(1, count, 2)


def _last_of_every(default: int) -> FullLayers:
    def full_layers(config: Mapping[str, Any], count: int) -> Container[int]:
        pattern = config.get("sliding_window_pattern", default)
        return range(pattern - 1, count, pattern)

    return full_layers


def _layers_with_rope(config: Mapping[str, Any], count: int) -> Container[int]:
    """Only those without RoPE slide."""
    every = config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(i + 1) % every for i in range(count)]
    return {i for i, has_rope in enumerate(rotates) if has_rope}


# One row is all that a family takes here; a test model in tests/conftest.py compares it with transformers. Engines
# beyond transformers list the families that they were tried with: export/engines.py, export/gguf.py.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(2048, "LLaMA, SmolLM2, Yi"),
    "mistral": Family(131072, "Mistral, Mistral Nemo", sliding_window=4096),
    "mixtral": Family(131072, "Mixtral", theta=1_000_000.0),
    "qwen2": Family(32768, "Qwen 2, Qwen 2.5", sliding_window=4096, slides_if_asked=True, full_layers=_first_layers),
    "qwen2_moe": Family(
        32768,
        "Qwen 1.5 MoE, Qwen 2 57B",
        sliding_window=4096,
        slides_if_asked=True,
        full_layers=_odd_and_last_layers,
    ),
    "qwen3": Family(
        32768, "Qwen 3", head_dim=128, sliding_window=4096, slides_if_asked=True, full_layers=_first_layers
    ),
    "qwen3_moe": Family(32768, "Qwen 3 30B", sliding_window=4096, slides_if_asked=True),
    "phi": Family(2048, "Phi-1, Phi-2", partial_rotary=0.5),
    "phi3": Family(
        4096,
        "Phi-3, Phi-3.5, Phi-4",
        original_window=4096,
        legacy_keys=("type", "short_factor", "long_factor"),
    ),
    "gpt_neox": Family(2048, "Pythia", theta_key="rotary_emb_base", partial_rotary=0.25, partial_key="rotary_pct"),
    "gemma": Family(8192, "Gemma", head_dim=256),
    "gemma2": Family(8192, "Gemma 2", head_dim=256, sliding_window=4096, full_layers=_odd_layers),
    "gemma3_text": Family(
        131072,
        "Gemma 3; only its full-attention layers are rescaled",
        theta=1_000_000.0,
        head_dim=256,
        sliding_window=4096,
        full_layers=_last_of_every(6),
        inside="gemma3",
        rotates=FULL_ATTENTION,  # the sliding ones have a RoPE of their own
        norms_add_one=True,
    ),
    "olmo2": Family(2048, "OLMo 2"),
    "granite": Family(2048, "Granite 3"),
    "stablelm": Family(4096, "StableLM", partial_rotary=0.25),
    "glm": Family(131072, "GLM-4 9B", partial_rotary=0.5, head_dim=128),
    "glm4": Family(131072, "GLM-4 0414", partial_rotary=0.5, head_dim=128),
    "cohere": Family(8192, "Command R", theta=500_000.0),
    "cohere2": Family(
        8192,
        "Command R7B, Command A",
        sliding_window=4096,
        full_layers=_last_of_every(4),
        rotates=SLIDING_ATTENTION,
        remark="its full-attention layers have no RoPE; factors act on the sliding ones only",
    ),
    "starcoder2": Family(4096, "StarCoder 2"),
    "smollm3": Family(32768, "SmolLM3", theta=2_000_000.0, slides_if_asked=True, full_layers=_layers_with_rope),
    "gpt_oss": Family(
        131072,
        "GPT-OSS, dequantised",
        theta=150_000.0,
        head_dim=64,
        sliding_window=128,
        full_layers=_odd_layers,
    ),
}

# Well-known models without rotary embeddings: the refusal can say so, rather than "unknown".
WITHOUT_ROPE = {
    "gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "mpt", "bert", "roberta", "t5", "bart", "xlnet",
    "mamba", "mamba2", "rwkv", "ctrl", "xglm", "biogpt",
}  # fmt: skip

COPY_AGAIN = "copy or download config.json again"
LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "max_window_layers"), 1 << 10),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 1 << 12),
    "hidden_size": 1 << 18,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 20),
    "vocab_size": 1 << 24,
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), 1 << 27),
}
"""The most that a model plausibly has, an order of magnitude above the largest known. Lists and tensors of these sizes
are made later, so a damaged or hostile config.json is refused before."""

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
LONG_MSCALE, SHORT_MSCALE = "long_mscale", "short_mscale"
"""The attention factor of each side, as vLLM and SGLang call it; transformers has only one, for both."""


def accept_mscales() -> None:
    """Keep transformers from complaining, at every load and save, of the two RoPE parameters that it does not know."""
    logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_of_other_keys)


def _is_of_other_keys(record: logging.LogRecord) -> bool:
    text, _, keys = record.getMessage().partition("': {")
    return "Unrecognized keys" not in text or not set(re.findall(r"'(\w+)'", keys)) <= {LONG_MSCALE, SHORT_MSCALE}


@dataclass(frozen=True, kw_only=True)
class Rescaled:
    """The rescaling a checkpoint already carries."""

    method: str
    factors: tuple[float, ...]
    """λ_i it applies within its original window."""
    long_factors: tuple[float, ...] | None = None
    """λ_i beyond it, where the config lists some."""
    attention_factor: float
    long_attention_factor: float
    """Beyond the original window, where that is another one."""


@dataclass(frozen=True, kw_only=True)
class RopeReading:
    """A model's RoPE as its configuration states it."""

    family: str
    rope: RopeSpec
    window: int
    """The length the checkpoint claims to handle now."""
    rescaled: Rescaled | None
    num_layers: int
    layer_types: tuple[str, ...]
    """Per layer: full_attention or sliding_attention."""
    sliding_window: int | None
    """The span of the sliding layers, if there are any."""
    remarks: tuple[str, ...] = ()
    """What a user should know before extending this model."""


def read_config(config: Mapping[str, Any], *, original_length: int | None = None) -> RopeReading:
    """Read a config.json, of transformers 4 or 5; `original_length` overrides what it says or implies."""
    family = config.get("model_type")
    inner = next((name for name, row in FAMILIES.items() if row.inside is not None and row.inside == family), None)
    if inner is not None and isinstance(config.get("text_config"), Mapping):
        return read_config({"model_type": inner, **config["text_config"]}, original_length=original_length)
    if not isinstance(family, str) or family not in FAMILIES:
        raise _refusal(family, config)
    if config.get("use_bidirectional_attention"):
        raise ModelError(
            f"this {family} model attends to later tokens, too: it embeds texts, and writes none",
            hint="give a causal language model",
        )
    check_plausible(config)
    # Much of what should be a number, and is a text, a list, zero or negative, shows only where it is used.
    with damage(_unusable(config), hint=COPY_AGAIN):
        return _read(config, family, original_length)


def check_plausible(config: Mapping[str, Any], subject: str = "") -> None:
    """Refuse sizes that no model has, and values that transformers would stumble over; names all of them."""
    found = [
        f"{key} must be a positive integer of at most {most:,}, got {_shown(config[key])}"
        for key, most in LIMITS.items()
        if config.get(key) not in (None, 0) and not _is_count(config[key], most)
    ]
    for key, value in config.items():
        ids = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and not all(
            id in (None, -1, 0) or _is_count(id, LIMITS["vocab_size"]) for id in ids
        ):
            found.append(f"{key} must be the number of a token, got {_shown(value)}")
    if not isinstance(config.get("auto_map", {}), Mapping | None):
        found.append(f"auto_map must be an object, got {_shown(config['auto_map'])}")
    kinds, count = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(kinds, list) and isinstance(count, int) and len(kinds) != count:
        found.append(f"layer_types names {len(kinds):,} layers, num_hidden_layers is {_shown(count)}")
    if found:
        hint = "copy or download it again" if subject else COPY_AGAIN
        raise ModelError(all_problems(subject or _unusable(config), found), hint=hint)


def _unusable(config: Mapping[str, Any]) -> str:
    return f"the config of this {config.get('model_type')} model is not usable"


def _read(config: Mapping[str, Any], family: str, original_length: int | None) -> RopeReading:
    defaults = FAMILIES[family]
    layer_types, sliding_window = _layers(config, defaults)
    parameters = _rope_parameters(config, defaults)
    head_dim = _head_dim(config, defaults)
    partial = float(parameters["partial_rotary_factor"])
    if not 0 < partial <= 1:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {partial}")
    rotary_dim = int(head_dim * partial)
    window = _positive_int(config, "max_position_embeddings", defaults.window)
    method = parameters["rope_type"]
    remarks = []

    found_length = original_length or _original_length(parameters, window)
    if original_length is None and _length_is_implied(parameters):
        remarks.append(
            f"its config does not state the window before '{method}' scaling; "
            f"{found_length:,} is implied by the factor (override with --original-length)"
        )
    rope = RopeSpec(rotary_dim=rotary_dim, theta=float(parameters["rope_theta"]), original_length=found_length)
    if sliding_window and sliding_window < max(window, found_length) and FULL_ATTENTION not in layer_types:
        remarks.append(
            f"every layer attends to a sliding window of {sliding_window:,} tokens: "
            "rescaled RoPE cannot carry information further in one layer"
        )
    if defaults.remark:
        remarks.append(defaults.remark)
    return RopeReading(
        family=family,
        rope=rope,
        window=max(window, found_length),
        rescaled=_existing_rescaling(parameters, rope, window),
        num_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=sliding_window,
        remarks=tuple(remarks),
    )


def _refusal(family: Any, config: Mapping[str, Any]) -> ModelError:
    known = ", ".join(FAMILIES)
    if family is None:
        return ModelError("config.json has no 'model_type'", hint="is this the folder of a language model?")
    if isinstance(family, str) and family in WITHOUT_ROPE:
        return ModelError(
            f"'{family}' models have no rotary position embedding: there is nothing to rescale",
            hint=f"families that can be extended: {known}",
        )
    if "auto_map" in config:
        return ModelError(
            f"'{family}' needs code from the model repository, which is never run here",
            hint=f"families that can be extended: {known}",
        )
    return ModelError(
        f"the RoPE layout of '{family}' models is not known here, and a guess could be silently wrong",
        hint=f"families that can be extended: {known}",
    )


def _head_dim(config: Mapping[str, Any], defaults: Family) -> int:
    if config.get("head_dim"):
        return _positive_int(config, "head_dim")
    if defaults.head_dim and "head_dim" not in config:
        return defaults.head_dim
    hidden, heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not divisible by num_attention_heads {heads}, and head_dim is missing"
        )
    return hidden // heads


def _rope_parameters(config: Mapping[str, Any], defaults: Family) -> dict[str, Any]:
    """The RoPE of the full-attention layers, with every key and in the form of transformers 5."""
    found, older = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for value in (found, older):
        if not isinstance(value, Mapping):
            raise TypeError(f"rope_parameters must be an object, got {value!r}")
    # Where a config has both, the older key wins, as in transformers 5: people add it by hand to what that saved.
    older = older.get(FULL_ATTENTION, older)
    found = {**found[FULL_ATTENTION], **older} if FULL_ATTENTION in found else older or found
    partial = config.get("partial_rotary_factor", config.get("rotary_pct", config.get("rope_pct")))
    theta, method = config.get(defaults.theta_key), found.get("rope_type") or found.get("type") or "default"
    parameters = {
        "rope_theta": defaults.theta if theta is None else theta,
        "partial_rotary_factor": defaults.partial_rotary if partial is None else partial,
        **{key: value for key, value in found.items() if value is not None},
        "rope_type": {"su": "longrope"}.get(method, method),
    }
    if parameters["rope_type"] not in ROPE_TYPES:
        raise ModelError(f"the config's rope_type {method!r} is not known here", hint=f"known: {', '.join(ROPE_TYPES)}")
    original = config.get("original_max_position_embeddings", defaults.original_window)
    if original:
        parameters["original_max_position_embeddings"] = original
    return parameters


def _length_is_implied(parameters: Mapping[str, Any]) -> bool:
    rescaled = parameters["rope_type"] not in ("default", "dynamic")
    return rescaled and "original_max_position_embeddings" not in parameters


def _original_length(parameters: Mapping[str, Any], window: int) -> int:
    """L_train: the window before the rescaling that the config describes."""
    method = parameters["rope_type"]
    if method in ("default", "dynamic"):
        # Dynamic NTK keeps the trained window in max_position_embeddings: it stretches only beyond it.
        return window
    if "original_max_position_embeddings" in parameters:
        return _positive_int(parameters, "original_max_position_embeddings")
    factor = parameters.get("factor")
    if isinstance(factor, int | float) and factor >= 1:
        return max(round(window / factor), 1)
    raise ModelError(
        f"the model is already rescaled by '{method}', but its config says neither the original window nor the factor",
        hint="give it: --original-length N",
    )


def _existing_rescaling(parameters: Mapping[str, Any], rope: RopeSpec, window: int) -> Rescaled | None:
    """The factors a config already applies, so that 'short' can mean what the model does now."""
    method = parameters["rope_type"]
    if method == "default":
        return None
    # Blends and temperatures go by the window in the config, or by the one that transformers assumes where it names
    # none: they are what the model does now, wherever it is extended from.
    stated = replace(rope, original_length=_positive_int(parameters, "original_max_position_embeddings", window))
    factor = float(parameters.get("factor") or max(window / stated.original_length, 1.0))
    target = stated.original_length * factor
    attention_factor = parameters.get("attention_factor")
    long_factors = None
    if method == "linear":
        factors: Any = [factor] * rope.num_dims
    elif method == "dynamic":
        factors = [1.0] * rope.num_dims
    elif method == "yarn":
        ramp = yarn(
            stated,
            target,
            fast_rotations=parameters.get("beta_fast") or 32,
            slow_rotations=parameters.get("beta_slow") or 1,
            truncate=parameters.get("truncate", True),
        )
        factors = ramp.factors
        attention_factor = attention_factor or yarn_attention(parameters, factor)
    elif method == "llama3":
        low, high = parameters.get("low_freq_factor", 1), parameters.get("high_freq_factor", 4)
        factors = ntk_by_parts(stated, target, low_rotations=low, high_rotations=high).factors
    else:
        assert method == "longrope"
        factors, long_factors = (_listed(parameters, name, rope.num_dims) for name in ("short_factor", "long_factor"))
        if attention_factor is None and factor > 1:
            attention_factor = longrope_temperature(factor, stated.original_length)
    return Rescaled(
        method=method,
        factors=tuple(map(float, factors)),
        long_factors=long_factors,
        attention_factor=float(parameters.get(SHORT_MSCALE) or attention_factor or 1.0),
        long_attention_factor=float(parameters.get(LONG_MSCALE) or attention_factor or 1.0),
    )


def _listed(parameters: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(
            f"{name} must list {count} numbers, got {len(values) if isinstance(values, list) else repr(values)}"
        )
    return tuple(map(float, values))


def yarn_attention(parameters: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature, with DeepSeek's two-sided variant where a config asks for it."""
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if factor <= 1:
        return 1.0
    if above and below:
        return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    return yarn_temperature(factor)


def _layers(config: Mapping[str, Any], defaults: Family) -> tuple[tuple[str, ...], int | None]:
    """Each layer's kind of attention, and the sliding window where there is one."""
    count = _positive_int(config, "num_hidden_layers")
    span = config.get("sliding_window", defaults.sliding_window)
    if not config.get("use_sliding_window", not defaults.slides_if_asked):
        span = None
    if not span:
        return (FULL_ATTENTION,) * count, None
    if isinstance(config.get("layer_types"), list):
        kinds = tuple(map(str, config["layer_types"]))
    else:
        full = defaults.full_layers(config, count) if defaults.full_layers else ()
        kinds = tuple(FULL_ATTENTION if i in full else SLIDING_ATTENTION for i in range(count))
    return kinds, int(span) if SLIDING_ATTENTION in kinds else None


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not _is_count(value, LIMITS[key]):
        raise ValueError(f"{key} must be a positive integer, got {_shown(value)}")
    return int(value)


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _shown(value: Any) -> str:
    return repr(value)[:40]
