"""Factors in a transformers config and out of it, so that `save_pretrained` writes what plain engines read."""

from typing import Any

from longrope2.errors import FactorsError
from longrope2.factors import RescaleFactors
from longrope2.families import FULL_ATTENTION, read_config


def write_factors(config: Any, factors: RescaleFactors) -> None:
    """Turn a model's config, in place, into one with these factors; sliding layers keep their own RoPE."""
    nested = FULL_ATTENTION in (config.rope_parameters or {})
    before = config.rope_parameters[FULL_ATTENTION] if nested else config.rope_parameters or {}
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
    }
    if factors.long_attention_factor != factors.short_attention_factor:
        # The names vLLM reads; transformers knows one for both sides, and passes over these.
        parameters |= {
            "long_mscale": factors.long_attention_factor,
            "short_mscale": factors.short_attention_factor,
        }
    config.rope_parameters = {**config.rope_parameters, FULL_ATTENTION: parameters} if nested else parameters
    config.max_position_embeddings = factors.target_length
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3, where it overrides the parameters
        config.original_max_position_embeddings = factors.original_length


def read_factors(config: Any) -> RescaleFactors:
    """The factors a longrope config carries, or FactorsError."""
    reading = read_config(config.to_dict())
    parameters = config.rope_parameters or {}
    parameters = parameters.get(FULL_ATTENTION, parameters)
    if reading.rescaled is None or "long_factor" not in parameters:
        raise FactorsError(
            "no factors were given, and the model's config has none (its rope_type is not 'longrope')",
            hint="pass factors=, a RescaleFactors or the path of a factors file",
        )
    attention_factor = reading.rescaled.attention_factor
    return RescaleFactors(
        method="longrope",
        rotary_dim=reading.rope.rotary_dim,
        theta=reading.rope.theta,
        original_length=reading.rope.original_length,
        target_length=reading.window,
        long=tuple(parameters["long_factor"]),
        short=reading.rescaled.factors,
        long_attention_factor=parameters.get("long_mscale", attention_factor),
        short_attention_factor=parameters.get("short_mscale", attention_factor),
    )
