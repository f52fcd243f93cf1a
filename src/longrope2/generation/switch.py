"""The short/long switch in generation: original RoPE while a row fits the original window, rescaled beyond."""

from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from longrope2 import models
from longrope2.console import warn
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.families import read_config
from longrope2.generation.config import Strategy
from longrope2.generation.model import SwitchingModel, choose_rows, note_rows
from longrope2.generation.run import Switch
from longrope2.generation.saved import read_factors, read_switch_length, write_factors
from longrope2.rotary import install

STRATEGIES = get_args(Strategy)


def load(
    model: Any,
    factors: RescaleFactors | str | Path | None = None,
    *,
    switch_length: int | None = None,
    strategy: Strategy = "recompute",
    shadow_chunk: int = 128,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """A transformers model whose `generate` is exact on both sides of the switch.

    `model` is what `longrope2.models.load` takes, or a live model; `factors` a value, a factors file, or None
    for those in the model's own longrope config, with the switch length saved there. A row is long once it attends
    to more than `switch_length` tokens, by default the original window. When it crosses, the `strategy` "recompute"
    runs it again at once, "shadow" does so ahead, `shadow_chunk` tokens a step, and "pin" keeps one side throughout.
    """
    if isinstance(model, str | Path | models.ModelInfo):
        model = models.load(model, dtype=dtype, device=device).model
    if factors is None:
        config = model.config.to_dict()
        factors = read_factors(read_config(config))
        if switch_length is None:
            switch_length = read_switch_length(config)
    return switching(
        model, RescaleFactors.given(factors), switch_length=switch_length, strategy=strategy, shadow_chunk=shadow_chunk
    )


def switching(
    model: Any,
    factors: RescaleFactors,
    *,
    switch_length: int | None = None,
    strategy: Strategy = "recompute",
    shadow_chunk: int = 128,
) -> Any:
    """Put `factors` into a live model for good, and the switch into its `generate`; returns the model.

    A row is long once it attends to more than `switch_length` tokens, by default the original window. When it
    crosses, `recompute` runs it again at once, `shadow` does so ahead, `shadow_chunk` tokens with each of the
    last steps before, and `pin` chooses a side for the whole call by prompt and max_new_tokens. The model's
    config becomes one with these factors and this switch length, so that `save_pretrained` writes them.
    """
    if strategy not in STRATEGIES:
        raise LongRopeError(f"strategy {strategy!r} is not known", hint=f"choose one of {', '.join(STRATEGIES)}")
    switch_length = factors.original_length if switch_length is None else switch_length
    check_switch_length(switch_length, factors.target_length)
    if switch_length != factors.original_length and not factors.switches:
        warn(f"a switch length of {switch_length:,} changes nothing: these factors are one RoPE for every length")
    if shadow_chunk < 1:
        raise LongRopeError(f"shadow_chunk must be at least 1, got {shadow_chunk}")
    factors.check_fits(read_config(model.config.to_dict(), original_length=factors.original_length).rope)
    if isinstance(model, SwitchingModel):
        rotary = model.longrope2.rotary
        rotary.factors = factors
    else:
        rotary = install(model, factors)
        base: Any = type(model)
        model.__class__ = _switching_class(base)
        model.register_forward_pre_hook(choose_rows, with_kwargs=True)
        model.register_forward_hook(note_rows, with_kwargs=True)
    rotary.switch_length = switch_length
    model.longrope2 = Switch(rotary=rotary, switch_length=switch_length, strategy=strategy, shadow_chunk=shadow_chunk)
    write_factors(model.config, factors, switch_length)
    return model


def check_switch_length(switch_length: int, target_length: int) -> None:
    """Refuse a switch length that no row could have or that leaves none for the long side."""
    if not 1 <= switch_length <= target_length:
        raise LongRopeError(
            f"switch_length must lie from 1 to the target length {target_length}, got {switch_length}",
            hint="leave it out: the original window; `longrope2 calibrate` measures a better one",
        )


@cache
def _switching_class(base: Any) -> Any:
    """The model's class with our methods before its own, and its own name, which `save_pretrained` writes."""
    return type(base.__name__, (SwitchingModel, base), {"__module__": base.__module__, "__doc__": base.__doc__})
