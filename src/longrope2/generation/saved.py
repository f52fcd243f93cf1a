"""Factors in a transformers config and out of it, so that `save_pretrained` writes what plain engines read."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from longrope2.console import warn
from longrope2.errors import FactorsError, ModelError
from longrope2.factors import RescaleFactors
from longrope2.families import (
    FULL_ATTENTION,
    LONG_MSCALE,
    SHORT_MSCALE,
    RopeReading,
    accept_mscales,
    read_config,
)
from longrope2.files import file_digest, write_json
from longrope2.models import MANIFEST, ModelInfo, head_dim, json_object
from longrope2.records import Manifest

# Beside the RoPE parameters, whose unknown keys transformers complains about; here it passes over them.
OWN_KEY, SWITCH_LENGTH = "longrope2", "switch_length"
FACTORS_FILE = "factors.json"
"""What `train` and `export` write beside config.json; the truth that `verify` holds an exported folder to."""


def write_factors(config: Any, factors: RescaleFactors, switch_length: int) -> None:
    """Turn a model's config, in place, into one with these factors; sliding layers keep their own RoPE."""
    accept_mscales()
    before = config.rope_parameters or {}
    # Where layers share one RoPE, transformers puts its type beside an entry for a kind, and passes over that entry.
    if nested := FULL_ATTENTION in before and all(isinstance(entry, dict) for entry in before.values()):
        before = before[FULL_ATTENTION]
    kept = {name: before[name] for name in ("partial_rotary_factor",) if name in before}
    parameters: dict[str, Any] = {
        **kept,
        "rope_type": "longrope",
        "rope_theta": factors.theta,
        "long_factor": list(factors.long),
        "short_factor": list(factors.short),
        "original_max_position_embeddings": factors.original_length,
        "factor": factors.extension_ratio,
        "attention_factor": factors.long_attention_factor,
        # What vLLM and SGLang read, which otherwise apply √(1 + ln s/ln L_train); transformers passes over these.
        LONG_MSCALE: factors.long_attention_factor,
        SHORT_MSCALE: factors.short_attention_factor,
    }
    config.rope_parameters = {**config.rope_parameters, FULL_ATTENTION: parameters} if nested else parameters
    config.max_position_embeddings = factors.target_length
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3, where it overrides the parameters
        config.original_max_position_embeddings = factors.original_length
    if getattr(config, "head_dim", 0) is None:
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
