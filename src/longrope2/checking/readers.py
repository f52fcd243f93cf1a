"""How engines read a config.json, version by version where they differ, each read in its own source.

transformers is not among them: what is installed here is run (live.py). `tests/export` holds the older transformers
and mlx-lm against their own code where it can be had; llama.cpp's YaRN was run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longrope2.checking.rotation import Rotation, default_longrope_attention, rotation
from longrope2.checking.statement import ALIASES, LLAMA3_WINDOW, Statement
from longrope2.errors import LongRopeError
from longrope2.export.engines import MLX, VLLM
from longrope2.export.gguf import WRITTEN_AS
from longrope2.families import LONG_MSCALE, ORIGINAL, SHORT_MSCALE, read_config
from longrope2.methods import yarn_temperature


@dataclass(frozen=True)
class Reading:
    """What an engine makes of a config."""

    rotation: Rotation
    window: int
    """The longest sequence that it takes by default."""
    remark: str = ""


class NotKnownError(Exception):
    """What an engine does with this family was not looked at."""


Live = Mapping[str, Any]
"""The RoPE parameters as the installed transformers holds them; vLLM reads a config through it."""


@dataclass(frozen=True)
class Reader:
    """An engine in a range of versions; `read` raises what stops the engine."""

    engine: str
    first: str
    last: str
    read: Callable[[Statement, Live], Reading]
    is_current: bool = False
    """Whether a difference is a fault: others can be avoided by another version or engine."""


def _refuse_proportional(statement: Statement) -> None:
    if statement.kind == "proportional":
        raise NotKnownError("what it does with proportional RoPE was not looked at")


def _transformers_4(statement: Statement, yarn_factor: str, *, switches: bool) -> Reading:
    _refuse_proportional(statement)
    config, section = statement.config, dict(statement.older)
    kind = str(section.get("rope_type") or section.get("type") or "default")
    top = config.get(ORIGINAL) or getattr(statement.plain, ORIGINAL, None)
    section |= {
        "rope_type": ALIASES.get(kind, kind),
        "rope_theta": statement.top_theta or statement.default_theta,
        "partial_rotary_factor": statement.parameters.get("partial_rotary_factor"),
        SHORT_MSCALE: None,
        LONG_MSCALE: None,
    }
    if section["rope_type"] == "longrope":
        section[ORIGINAL] = top or statement.window
        section["factor"] = statement.window / top if top else section.get("factor")
    if section["rope_type"] == "yarn":
        original = section.get(ORIGINAL)
        if yarn_factor == "window" and original:
            section["factor"] = statement.window / original
        if yarn_factor == "stated, window for original" or not original:
            section[ORIGINAL] = statement.window
    found = _rotated(statement, section)
    if found.rope_type == "longrope" and not switches and config.get("model_type") != "phi3":
        found = replace(found, long=found.short, switch=None)
    return Reading(found, statement.window)


def _transformers_4_57(statement: Statement, live: Live) -> Reading:
    return _transformers_4(statement, "stated", switches=True)


def _transformers_4_51(statement: Statement, live: Live) -> Reading:
    return _transformers_4(statement, "window", switches=True)


def _transformers_4_43(statement: Statement, live: Live) -> Reading:
    return _transformers_4(statement, "stated, window for original", switches=False)


def _refuse_unknown_to_vllm(statement: Statement, kind: str) -> None:
    family = statement.config.get("model_type")
    if kind != "default" and family not in (*(VLLM.families or ()), *VLLM.static_families):
        raise NotKnownError(f"{family} models with {kind} RoPE in vLLM were not looked at")


def _vllm(statement: Statement, live: Live) -> Reading:
    section = {**live, "rope_type": ALIASES.get(live["rope_type"], live["rope_type"])}
    kind, window = section["rope_type"], statement.window
    _refuse_unknown_to_vllm(statement, kind)
    if kind == "longrope":
        found = _rotated(statement, _vllm_longrope(statement, section))
        original = statement.config.get(ORIGINAL) or getattr(statement.plain, ORIGINAL, None) or window
        chosen = "one side for all sequences, the long one with --max-model-len above the original window"
        return Reading(found, int(original), chosen if found.switch else "")
    remark = ""
    if kind in ("linear", "dynamic"):
        window = int(window * float(section["factor"]))
        original = statement.original
        if original and abs(original * float(section["factor"]) / statement.window - 1) < 1e-3:
            remark = f"it multiplies the window once more: start it with --max-model-len {statement.window}"
    return Reading(_rotated(statement, section), window, remark)


def _vllm_longrope(statement: Statement, section: dict[str, Any]) -> dict[str, Any]:
    """It knows both mscales, and neither attention_factor nor factor."""
    forced = default_longrope_attention(statement.window / section[ORIGINAL], section[ORIGINAL])
    return {**section, "attention_factor": forced}


def _vllm_before_30(statement: Statement, live: Live) -> Reading:
    if live["rope_type"] != "yarn":
        return _vllm(statement, live)
    _refuse_unknown_to_vllm(statement, "yarn")
    factor = float(live["factor"])
    temperature = (yarn_temperature(factor) if factor > 1 else 1.0) * float(live.get("attn_factor") or 1.0)
    if statement.original is None:
        raise KeyError(ORIGINAL)
    found = _rotated(statement, {**live, "attention_factor": temperature})
    return Reading(found, round(live[ORIGINAL] * factor))


MLX_BASES = {"qwen2": 1_000_000.0, "gemma3_text": 1_000_000.0}


def _mlx(statement: Statement, live: Live) -> Reading:
    family, section = statement.config.get("model_type"), dict(statement.older)
    if family not in (MLX.families or ()):
        raise NotKnownError(f"{family} models in mlx-lm were not looked at")
    kind = str(section.get("type") or section.get("rope_type") or "default")
    if statement.top_theta is None and family in ("qwen3", "granite"):
        raise KeyError("rope_theta")  # of the others each has a default
    section |= {
        "rope_type": "longrope" if kind == "su" and family == "phi3" else kind,
        "rope_theta": statement.top_theta or MLX_BASES.get(family, 10_000.0),
        "partial_rotary_factor": statement.parameters.get("partial_rotary_factor"),
    }
    if section["rope_type"] == "longrope":
        if family == "phi3":
            section[ORIGINAL] = statement.config.get(ORIGINAL) or 4096
        forced = default_longrope_attention(statement.window / section[ORIGINAL], section[ORIGINAL])
        section |= {"attention_factor": forced, SHORT_MSCALE: None, LONG_MSCALE: None}
        found = _rotated(statement, section)
        found = replace(found, short=found.long, switch=None)
        return Reading(found, statement.window, "the long side in all sequences")
    if section["rope_type"] == "yarn":
        section |= {"attention_factor": None, "truncate": True, ORIGINAL: section.get(ORIGINAL, 4096)}
        if section.get("mscale") and not section.get("mscale_all_dim"):
            section["attention_factor"] = 0.1 * float(section["mscale"]) * math.log(float(section["factor"])) + 1
    if section["rope_type"] == "llama3":
        section = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: LLAMA3_WINDOW, **section}
    return Reading(_rotated(statement, section), statement.window)


def _llama_cpp(statement: Statement, live: Live) -> Reading:
    """The converter of llama.cpp, and llama.cpp with what that wrote."""
    _refuse_proportional(statement)
    config, section = statement.config, dict(statement.newer or statement.older)
    kind = str(section.get("rope_type") or section.get("type") or "default")
    family, base = config.get("model_type"), section.get("rope_theta") or statement.top_theta
    if family not in (*WRITTEN_AS, "phimoe") and (kind != "default" or not base):
        # Gemma 3 has another base there, DeepSeek and Ministral 3 another YaRN.
        raise NotKnownError(f"{family} models with {kind} RoPE, or without a base, have a converter of their own")
    top = config.get(ORIGINAL)
    section |= {
        "rope_type": ALIASES.get(kind, kind),
        "rope_theta": base or 10_000.0,
        "partial_rotary_factor": statement.parameters.get("partial_rotary_factor"),
        ORIGINAL: section.get(ORIGINAL) or top,
    }
    remark = ""
    if section["rope_type"] == "longrope":
        if family not in ("phi3", "phimoe"):
            section["rope_type"], remark = "default", "its converter drops the factors; use longrope2 export"
        else:
            forced = default_longrope_attention(statement.window / section[ORIGINAL], section[ORIGINAL])
            section |= {"attention_factor": forced, SHORT_MSCALE: None, LONG_MSCALE: None}
            remark = "one side for all sequences, the long one with -c above the original window"
    elif section["rope_type"] == "llama3":
        section = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **section}
        section[ORIGINAL] = top or LLAMA3_WINDOW
    elif section["rope_type"] == "yarn":  # the key that its converter writes for attention_factor is never read
        factor = float(section["factor"])
        section |= {"attention_factor": yarn_temperature(factor) if factor > 1 else 1.0, "truncate": True}
    elif section["rope_type"] == "dynamic":
        section["rope_type"], remark = "default", "it does not know dynamic scaling"
    return Reading(_rotated(statement, section), statement.window, remark)


def own_reading(statement: Statement, live: Live) -> Reading:
    """What longrope2.load does."""
    try:
        reading = read_config(statement.config)
    except LongRopeError as error:
        raise NotKnownError(error.message) from error
    rope, rescaled = reading.rope, reading.rescaled
    ones = (1.0,) * rope.num_dims
    short = rescaled.factors if rescaled else ones
    long = (rescaled.long_factors or rescaled.factors) if rescaled else ones
    still = (0.0,) * reading.num_still
    turns = [(*(f / by for f, by in zip(rope.frequencies, side, strict=True)), *still) for side in (short, long)]
    found = Rotation(
        rope_type=rescaled.method if rescaled else "default",
        theta=rope.theta ** (len(turns[0]) / rope.num_dims),
        short=turns[0],
        long=turns[1],
        short_attention=rescaled.attention_factor if rescaled else 1.0,
        long_attention=rescaled.long_attention_factor if rescaled else 1.0,
    )
    switches = (found.short, found.short_attention) != (found.long, found.long_attention)
    if statement.kind == "dynamic" and (stated := statement.rotation()) is not None:
        found = replace(found, long=stated.long, switch=stated.switch)  # as transformers stretches it
    remark = "each sequence switches for itself, and its cache is computed again" if switches else ""
    return Reading(replace(found, switch=rope.original_length) if switches else found, reading.window, remark)


READERS = (
    Reader("transformers", "4.43", "4.50", _transformers_4_43),
    Reader("transformers", "4.51", "4.55", _transformers_4_51),
    Reader("transformers", "4.56", "4.57", _transformers_4_57),
    Reader("vLLM", "0.12", "0.29", _vllm_before_30),
    Reader("vLLM", "0.30", "0.32", _vllm, is_current=True),
    Reader("mlx-lm", "0.32", "0.32", _mlx),
    Reader("llama.cpp", "2026", "2026", _llama_cpp),
)


def _rotated(statement: Statement, parameters: Mapping[str, Any]) -> Rotation:
    return rotation(parameters, head_dim=statement.head_dim, window=statement.window)
