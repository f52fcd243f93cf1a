"""What a config.json says about RoPE: transformers resolves its defaults and older forms, and this reads the result.

A model_type needs no row here. What a config cannot say about a family is in ODD and REFUSED; whether a live model
really rotates as its config was read is for rotary.py to prove.
"""

import copy
import logging
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from longrope2.errors import ModelError, all_problems, damage
from longrope2.methods import longrope_temperature, ntk_by_parts, yarn, yarn_temperature
from longrope2.rope import RopeSpec

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


OWN_ATTENTION = frozenset({
    "beam", "dbrx", "deepseek_v2", "diffllama", "doge", "falcon", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
    "gpt_neox_japanese", "hrm_text", "longcat_flash", "phimoe",
})  # fmt: skip
"""Families whose attention is more than a function of queries, keys and values in layers of the usual form."""


@dataclass(frozen=True)
class Family:
    """What is odd about the models of a family."""

    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"
    rotates: str | None = None
    """The kind of attention of the only layers that have RoPE; None where others have it, too."""
    norms_add_one: bool = False
    """Whether its norms multiply by 1 + weight."""
    legacy_keys: tuple[str, ...] | None = None
    """All that `rope_scaling` may hold in transformers 4, at the temperature which it then assumes."""


ODD: Mapping[str, Family] = {
    "phi3": Family(legacy_keys=("type", "short_factor", "long_factor")),
    "gpt_neox": Family(theta_key="rotary_emb_base", partial_key="rotary_pct"),
    "gemma3_text": Family(norms_add_one=True),
    "llama4_text": Family(rotates="chunked_attention"),
    **dict.fromkeys(
        ("afmoe", "beam", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"),
        Family(rotates=SLIDING_ATTENTION),
    ),
}

# What a config does not show. tests/test_walk.py holds these against the classes themselves.
_IN_ATTENTION = "transformers rotates within its attention, with no module that could be replaced"
_DRAFTS = "it drafts for another model, and does not write alone"
_MANY_PARTS = "it has more parts than its language model"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("codegen", "gptj", "roformer"), _IN_ATTENTION),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    **dict.fromkeys(("blt", "moshi", "phi4_multimodal"), _MANY_PARTS),
    "deepseek_v4": "keys that it compresses have a RoPE of their own",
    "recurrent_gemma": "its attention is local, and transformers gives it no RoPE but the plain one",
}

COPY_AGAIN = "copy or download config.json again"
OTHER_MODEL = "docs/models.md lists the models that can be extended"
CONFIG_REFUSED = "transformers cannot read its config"
ORIGINAL = "original_max_position_embeddings"
LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "max_window_layers"), 1 << 10),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 1 << 12),
    "hidden_size": 1 << 18,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 20),
    "num_labels": 1 << 20,
    "vocab_size": 1 << 24,
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), 1 << 27),
}
"""The most that a model plausibly has, an order of magnitude above the largest known. Lists and tensors of these sizes
are made later, so a damaged or hostile config.json is refused before."""

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
STILL = 1e30
"""The factor of a frequency that stays at zero, in lists that a config must write out for a whole head (Gemma 4)."""
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
    """Per layer: full_attention, sliding_attention, linear_attention, …"""
    sliding_window: int | None
    """The span of the sliding layers, if there are any."""
    rotates: str | None = None
    """The kind of attention of the only layers that factors act on; None for all that rotate."""
    num_still: int = 0
    """Frequencies of a head that stay at zero, after those that rotate ("proportional" RoPE)."""
    remarks: tuple[str, ...] = ()
    """What a user should know before extending this model."""


def read_config(config: Mapping[str, Any], *, original_length: int | None = None) -> RopeReading:
    """Read a config.json, of transformers 4 or 5; `original_length` overrides what it says or implies."""
    refuse(config.get("model_type"))
    live = text_config(live_config(config))
    family = live.model_type
    refuse(family)
    if getattr(live, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(
            f"this {family} model attends to later tokens, too: it embeds texts, and writes none",
            hint="give a causal language model",
        )
    # Much of what should be a number, and is a text, a list, zero or negative, shows only where it is used.
    with damage(_unusable(config), hint=COPY_AGAIN):
        return _read(live, original_length, states_original=ORIGINAL in _keys(config))


def refuse(family: Any) -> None:
    """Raise ModelError for a model_type that is known not to work."""
    if isinstance(family, str) and family in REFUSED:
        raise ModelError(f"'{family}' models cannot be extended: {REFUSED[family]}", hint=OTHER_MODEL)


def live_config(config: Mapping[str, Any]) -> Any:
    """A config.json as transformers holds it, which changes what it is given; ModelError for one that it refuses."""
    family = config.get("model_type")
    if family is None:
        raise ModelError("config.json has no 'model_type'", hint="is this the folder of a language model?")
    from transformers import CONFIG_MAPPING

    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        problem = (
            "needs code from the model repository, which is never run here"
            if "auto_map" in config
            else "is not a model_type that the installed transformers knows"
        )
        raise ModelError(f"{_shown(family)} {problem}", hint=OTHER_MODEL)
    check_plausible(config)
    values = _with_floats(copy.deepcopy(dict(config)))
    with damage(_unusable(config), hint=COPY_AGAIN):
        _check_rope_types(values)
    with config_errors(f"this {family} model"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the older form, which exports have as well
        return CONFIG_MAPPING[family].from_dict(values)


def _with_floats(value: Any) -> Any:
    """A value of a config.json, with the numbers that JSON lacks, which transformers 5 writes as objects."""
    if isinstance(value, dict):
        name = value.get("__float__")
        if len(value) == 1 and name in ("Infinity", "-Infinity", "NaN"):
            return float(name)
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def text_config(live: Any) -> Any:
    """The part of a transformers config that describes the language model; the config itself if that is all."""
    try:
        found = live.get_text_config()
    except ValueError as error:
        raise ModelError(f"'{live.model_type}': several language models in one", hint=OTHER_MODEL) from error
    if not hasattr(found, "model_type"):
        raise ModelError(f"text_config must be an object, got {_shown(found)}", hint=COPY_AGAIN)
    return found


@contextmanager
def config_errors(name: str, problem: str = CONFIG_REFUSED, *, hint: str = COPY_AGAIN) -> Iterator[None]:
    """Report what transformers raises for a model's files; for its config it has an error of many lines."""
    from huggingface_hub.errors import StrictDataclassError

    with damage(f"{name}: {problem}", hint=hint):
        try:
            yield
        except StrictDataclassError as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{name}: {CONFIG_REFUSED} ({reason})", hint=COPY_AGAIN) from error


def _check_rope_types(config: dict[str, Any]) -> None:
    """Refuse kinds of RoPE that are not known here, and call longrope by its name of today, in place."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name) or {}
        if not isinstance(found, dict):
            raise TypeError(f"rope_parameters must be an object, got {found!r}")
        for parameters in (found, *(value for value in found.values() if isinstance(value, dict))):
            for key in ("rope_type", "type"):
                method = parameters.get(key)
                if method == "su":
                    parameters[key] = "longrope"
                elif method is not None and method not in ROPE_TYPES:
                    raise ModelError(
                        f"the config's rope_type {method!r} is not known here", hint=f"known: {', '.join(ROPE_TYPES)}"
                    )


def _keys(value: Any) -> set[str]:
    """The names of all values that are set in an object, and in the objects inside."""
    if not isinstance(value, Mapping):
        return set()
    return {key for key, inner in value.items() if inner is not None}.union(*map(_keys, value.values()))


def rope_parameters(live: Any) -> tuple[str | None, dict[str, Any]]:
    """The RoPE that factors act on, and the kind of its layers; None for one RoPE in all layers.

    Where layers differ, those that see everything are rescaled; the others keep the RoPE of their own.
    """
    stated = getattr(live, "rope_parameters", None) or {}
    found = {name: value for name, value in stated.items() if value is not None}  # as of layers without RoPE
    # Where layers share one RoPE, transformers puts its type beside an entry for a kind, and passes over that entry.
    nested = found and all(isinstance(value, dict) for value in found.values())
    kind = rescaled_kind(found) if nested else None
    parameters = found[kind] if kind else {key: value for key, value in found.items() if not isinstance(value, dict)}
    if (
        parameters.get("rope_theta") is None
        or getattr(live, "position_embedding_type", "rope") != "rope"  # Granite 4
        or not getattr(live, "use_mem_rope", True)  # Zamba 2
        or getattr(live, "alibi", False)  # Falcon
    ):
        raise ModelError(
            f"'{live.model_type}': no rotary position embedding in this config, so there is nothing to rescale",
            hint=OTHER_MODEL,
        )
    parameters = parameters | {"rope_type": parameters.get("rope_type") or "default"}
    if kind is None and getattr(live, ORIGINAL, None):
        parameters[ORIGINAL] = getattr(live, ORIGINAL)  # the one outside goes first, as in transformers
    return kind, parameters


def rescaled_kind(kinds: Iterable[str]) -> str | None:
    """Which of several RoPEs by kind of layer is rescaled: that of layers that see everything."""
    kinds = list(kinds)
    return min(kinds, key=lambda kind: (kind != FULL_ATTENTION, "sliding" in kind), default=None)


def attends_simply(live: Any) -> bool:
    """Whether a function of ours can attend in the place of a model's own, also within documents of a row."""
    return live.model_type not in OWN_ATTENTION and set(_layers(live)[0]) <= {FULL_ATTENTION, SLIDING_ATTENTION}


def stretches_with_length(live: Any) -> bool:
    """Whether a key is rotated by the length of the text that it stands in, as in dynamic NTK."""
    stated = getattr(live, "rope_parameters", None) or {}
    sections = [stated, *(value for value in stated.values() if isinstance(value, dict))]
    return any(section.get("rope_type") == "dynamic" for section in sections)


def head_dim(live: Any, kind: str | None = None) -> int:
    """The size of a head by a transformers config, which some families leave to be worked out."""
    if getattr(live, "is_heterogeneous", False):
        return max(map(head_dim, live.per_layer_config)) if kind is None else head_dim(live.per_layer_config[kind])
    return getattr(live, "head_dim", None) or live.hidden_size // live.num_attention_heads


def check_plausible(config: Mapping[str, Any], subject: str = "") -> None:
    """Refuse sizes that no model has, and values that transformers would stumble over; names all of them."""
    found = [
        f"{key} must be a positive integer of at most {most:,}, got {_shown(config[key])}"
        for key, most in LIMITS.items()
        if not all(value in (None, 0) or _is_count(value, most) for value in _each(config.get(key)))
    ]
    found += _too_large(config)
    for key, value in config.items():
        if key.endswith("_token_id") and not all(
            id in (None, -1, 0) or _is_count(id, LIMITS["vocab_size"]) for id in _each(value)
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


def _too_large(config: Mapping[str, Any], part: str = "") -> list[str]:
    """What no model has in the parts of a config (`text_config`), of which transformers makes lists, too."""
    found = []
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            found += _too_large(value, f"{part}{key}.")
        elif part and key in LIMITS and any(isinstance(each, int) and each > LIMITS[key] for each in _each(value)):
            found.append(f"{part}{key} must be at most {LIMITS[key]:,}, got {_shown(value)}")
    return found


def _unusable(config: Mapping[str, Any]) -> str:
    return f"the config of this {config.get('model_type')} model is not usable"


def _read(live: Any, original_length: int | None, *, states_original: bool) -> RopeReading:
    layer_types, sliding_window = _layers(live)
    kind, parameters = rope_parameters(live)
    rotating, num_still = _rotating(live, kind, parameters)
    window = _positive_int(live.max_position_embeddings, "max_position_embeddings")
    if parameters["rope_type"] == "proportional":  # the frequencies that rotate do so in one of the usual ways
        parameters |= {"rope_type": "default" if parameters.get("factor", 1.0) == 1 else "linear"}
    method = parameters["rope_type"]
    remarks = []
    # Where no config states it, transformers takes the present window for the original one.
    stated = parameters.get(ORIGINAL) or window
    implied = method not in ("default", "dynamic") and stated == window and not states_original
    found_length = original_length or _original_length(parameters, window, None if implied else stated)
    if original_length is None and implied:
        remarks.append(
            f"its config does not state the window before '{method}' scaling; "
            f"{found_length:,} is implied by the factor (override with --original-length)"
        )
    if parameters.get("llama_4_scaling_beta") and found_length != stated:
        raise ModelError(
            f"this model scales its queries by the original window in its config, {stated} tokens",
            hint="omit --original-length",
        )
    rope = replace(rotating, original_length=found_length)
    if sliding_window and sliding_window < max(window, found_length) and FULL_ATTENTION not in layer_types:
        remarks.append(
            f"every layer attends to a sliding window of {sliding_window:,} tokens: "
            "rescaled RoPE cannot carry information further in one layer"
        )
    rotates = ODD.get(live.model_type, Family()).rotates
    if rotates is not None and {rotates, FULL_ATTENTION} <= set(layer_types):
        remarks.append(f"its full-attention layers have no RoPE; factors act on its {rotates.split('_')[0]} ones only")
    return RopeReading(
        family=live.model_type,
        rope=rope,
        window=max(window, found_length),
        rescaled=_existing_rescaling(parameters, rope, window),
        num_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=sliding_window,
        rotates=kind or rotates,
        num_still=num_still,
        remarks=tuple(remarks),
    )


def _rotating(live: Any, kind: str | None, parameters: Mapping[str, Any]) -> tuple[RopeSpec, int]:
    """The RoPE before rescaling, of any length, and how many frequencies of a head stay at zero."""
    partial, theta = float(parameters.get("partial_rotary_factor") or 1.0), float(parameters["rope_theta"])
    if not 0 < partial <= 1:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {partial}")
    size = _positive_int(head_dim(live, kind), "head_dim")
    factors = parameters.get("long_factor")
    if parameters["rope_type"] == "proportional":
        rotating = int(partial * size // 2)
    elif isinstance(factors, list) and STILL in factors:
        rotating = factors.index(STILL)
    else:
        return RopeSpec(rotary_dim=int(size * partial), theta=theta, original_length=1), 0
    # They are θ^(−2i/size), which are the frequencies of a smaller head with a smaller base.
    base = theta ** (2 * rotating / size)
    return RopeSpec(rotary_dim=2 * rotating, theta=base, original_length=1), size // 2 - rotating


def _original_length(parameters: Mapping[str, Any], window: int, stated: int | None) -> int:
    """L_train: the window before the rescaling that the config describes."""
    method = parameters["rope_type"]
    if method in ("default", "dynamic"):
        # Dynamic NTK keeps the trained window in max_position_embeddings: it stretches only beyond it.
        return window
    if stated is not None:
        return _positive_int(stated, ORIGINAL)
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
    stated = replace(rope, original_length=_positive_int(parameters.get(ORIGINAL, window), ORIGINAL))
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
    if method in ("linear", "yarn", "llama3") and factor == 1 and (attention_factor or 1.0) == 1.0:
        return None  # written out, but it does nothing
    return Rescaled(
        method=method,
        factors=tuple(map(float, factors)),
        long_factors=long_factors,
        attention_factor=float(parameters.get(SHORT_MSCALE) or attention_factor or 1.0),
        long_attention_factor=float(parameters.get(LONG_MSCALE) or attention_factor or 1.0),
    )


def _listed(parameters: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = parameters.get(name)
    if isinstance(values, list):
        values = [value for value in values if value != STILL]
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


def _layers(live: Any) -> tuple[tuple[str, ...], int | None]:
    """Each layer's kind of attention, and the sliding window where there is one."""
    count = _positive_int(live.num_hidden_layers, "num_hidden_layers")
    span = getattr(live, "sliding_window", None)
    usual = SLIDING_ATTENTION if span else FULL_ATTENTION
    kinds = tuple(getattr(live, "layer_types", None) or (usual,) * count)
    if not span:
        kinds = tuple(FULL_ATTENTION if kind == SLIDING_ATTENTION else kind for kind in kinds)
    return kinds, int(span) if span and SLIDING_ATTENTION in kinds else None


def _positive_int(value: Any, key: str) -> int:
    if not _is_count(value, LIMITS[key]):
        raise ValueError(f"{key} must be a positive integer, got {_shown(value)}")
    return int(value)


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) and value else [value]


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _shown(value: Any) -> str:
    return repr(value)[:40]
