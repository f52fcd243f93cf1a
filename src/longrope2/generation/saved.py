"""Factors in a transformers config and out of it, so that `save_pretrained` writes what plain engines read."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from longrope2.console import warn
from longrope2.errors import FactorsError, ModelError
from longrope2.factors import RescaleFactors
from longrope2.families import (
    LONG_MSCALE,
    ORIGINAL,
    SHORT_MSCALE,
    STILL,
    RopeReading,
    accept_mscales,
    head_dim,
    read_config,
    rope_parameters,
)
from longrope2.files import file_digest, write_json
from longrope2.models import MANIFEST, ModelInfo, json_object
from longrope2.records import Manifest

# Beside the RoPE parameters, whose unknown keys transformers complains about; here it passes over them.
OWN_KEY, SWITCH_LENGTH = "longrope2", "switch_length"
SCALING = {
    "type", "factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "low_freq_factor", "high_freq_factor",
}  # fmt: skip
"""Parameters of the rescaling that factors replace; others say how a family rotates, and stay."""
FACTORS_FILE = "factors.json"
"""What `train` and `export` write beside config.json; the truth that `verify` holds an exported folder to."""


def write_factors(config: Any, factors: RescaleFactors, switch_length: int) -> None:
    """Turn a model's config, in place, into one with these factors; sliding layers keep their own RoPE."""
    accept_mscales()
    kind, before = rope_parameters(config)
    num_still = read_config(config.to_dict(), original_length=factors.original_length).num_still
    dropped = SCALING if num_still == 0 else {*SCALING, "partial_rotary_factor"}
    still = [STILL] * num_still
    parameters: dict[str, Any] = {
        **{name: value for name, value in before.items() if value is not None and name not in dropped},
        "rope_type": "longrope",
        "rope_theta": before["rope_theta"] if still else factors.theta,
        "long_factor": [*factors.long, *still],
        "short_factor": [*factors.short, *still],
        ORIGINAL: factors.original_length,
        "factor": factors.extension_ratio,
        "attention_factor": factors.long_attention_factor,
        # What vLLM and SGLang read, which otherwise apply √(1 + ln s/ln L_train); transformers passes over these.
        LONG_MSCALE: factors.long_attention_factor,
        SHORT_MSCALE: factors.short_attention_factor,
    }
    if "mscale_all_dim" in before and before.get("factor"):
        # DeepSeek's attention scales all scores by these two as well, whatever the kind of RoPE.
        parameters |= {name: before[name] for name in ("mscale_all_dim", "factor")}
    config.rope_parameters = {**config.rope_parameters, kind: parameters} if kind else parameters
    config.max_position_embeddings = factors.target_length
    if hasattr(config, ORIGINAL):  # Phi-3, where it overrides the parameters
        setattr(config, ORIGINAL, factors.original_length)
    if getattr(config, "is_heterogeneous", False):
        # Gemma 4, whose layers differ in head_dim: transformers looks at one of them to check the factors.
        config.allow_global_per_layer_attribute_access = True
    elif getattr(config, "head_dim", 0) is None:
        config.head_dim = head_dim(config)  # or transformers does not save it
    if hasattr(config, "auto_map"):
        del config.auto_map  # it names code that stays behind with the original, and knows none of this
    if switch_length != factors.original_length:
        setattr(config, OWN_KEY, {SWITCH_LENGTH: switch_length})
    elif hasattr(config, OWN_KEY):
        delattr(config, OWN_KEY)


def warn_of_single_attention_factor(factors: RescaleFactors) -> None:
    """Say, where a model is saved with two attention factors, what plain transformers will make of them."""
    if factors.long_attention_factor != factors.short_attention_factor:
        warn(
            f"plain transformers knows one attention factor and will use {factors.long_attention_factor:g} for "
            f"short sequences too, where {factors.short_attention_factor:g} is right; longrope2 reads both"
        )


def carries_factors(info: ModelInfo) -> bool:
    """Whether a model's config has factors of its own."""
    return info.reading.rescaled is not None and info.reading.rescaled.long_factors is not None


def read_factors(reading: RopeReading) -> RescaleFactors:
    """The factors that a longrope config carries, or FactorsError."""
    rescaled = reading.rescaled
    if rescaled is None or rescaled.long_factors is None:
        raise FactorsError(
            "the model's config has no factors of its own (its rope_type is not 'longrope')",
            hint="pass factors=, a RescaleFactors or the path of a factors file",
        )
    return RescaleFactors(
        method=rescaled.method,
        rotary_dim=reading.rope.rotary_dim,
        theta=reading.rope.theta,
        original_length=reading.rope.original_length,
        target_length=reading.window,
        long=rescaled.long_factors,
        short=rescaled.factors,
        long_attention_factor=rescaled.long_attention_factor,
        short_attention_factor=rescaled.attention_factor,
    )


def with_origin(folder: Path, carried: RescaleFactors) -> RescaleFactors:
    """The factors that a folder's config carries, with what it cannot hold: their method, and where they come from."""
    file = folder / FACTORS_FILE
    whole = RescaleFactors.load(file) if file.is_file() else carried
    return whole if whole.rotates_as(carried) else carried


def read_switch_length(config: dict[str, Any]) -> int | None:
    """The switch length that a config.json carries; None where it is the original window."""
    own = config.get(OWN_KEY, {})
    length = own.get(SWITCH_LENGTH) if isinstance(own, dict) else own
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise FactorsError(f"{SWITCH_LENGTH} in the model's config must be a number of tokens, got {length!r}")
    return length


def store_switch_length(folder: Path, switch_length: int) -> None:
    """Write a switch length into the config.json of a saved model; its original window takes it out again."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder}: no config.json to store a switch length in",
            hint="store it in the folder of an extended model, or pass --switch-length when you generate",
        )
    config = json_object(file)
    config.pop(OWN_KEY, None)
    if switch_length != read_config(config).rope.original_length:
        config[OWN_KEY] = {SWITCH_LENGTH: switch_length}
    write_json(file, config)
    with suppress(FileNotFoundError):  # most folders have no manifest
        manifest = Manifest.load(folder / MANIFEST)
        replace(manifest, files={**manifest.files, file.name: file_digest(file)}).save(folder / MANIFEST)
