"""What the rotary module of a transformers model really does, read off the cos and sin that it returns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longrope2.checking.rotation import Rotation
from longrope2.errors import RotaryError
from longrope2.factors import RescaleFactors
from longrope2.families import FULL_ATTENTION
from longrope2.models import empty_model
from longrope2.rotary import RescaledRotary, rescaled, rotary_module


@dataclass(frozen=True)
class Turns:
    """What positions are turned by in one forward."""

    frequencies: tuple[float, ...]
    attention: float


def measured(module: nn.Module, stated: Rotation) -> Rotation:
    """What a rotary module does below and above the stated switch, in the form of the oracle."""
    threshold = stated.switch or 1024
    sides = [_turns(module, last, len(stated.short)) for last in (threshold - 1, _beyond(stated, threshold))]
    return Rotation(
        rope_type=stated.rope_type,
        theta=stated.theta,
        short=sides[0].frequencies,
        long=sides[1].frequencies,
        short_attention=sides[0].attention,
        long_attention=sides[1].attention,
        switch=stated.switch,
    )


def _beyond(stated: Rotation, threshold: int) -> int:
    # Dynamic NTK depends on the length; the oracle's `long` is at twice the window.
    return 2 * threshold - 1 if stated.rope_type == "dynamic" else threshold


@torch.no_grad()
def _turns(module: nn.Module, last: int, count: int) -> Turns:
    """One forward whose last position is `last`: frequencies from position 1, where no angle has passed a half turn."""
    device = next((value.device for value in module.buffers()), torch.device("cpu"))
    positions = torch.tensor([[0, 1, last]], device=device)
    nested = not isinstance(module, RescaledRotary) and hasattr(module, f"{FULL_ATTENTION}_inv_freq")
    layer = {"layer_type": FULL_ATTENTION} if nested else {}
    found: Any = module(torch.zeros(1, 3, 1, device=device), positions, **layer)
    if not (isinstance(found, tuple) and len(found) == 2 and all(_is_table(each) for each in found)):
        raise RotaryError(f"{type(module).__name__} returns no pair of cos and sin for each position")
    cos, sin = (each[0, :2].double() for each in found)
    attention, angles = float(cos[0, 0]), torch.atan2(sin[1], cos[1])
    if angles.numel() == 2 * count:
        halves = torch.equal(angles[:count], angles[count:])
        angles = angles[:count] if halves else angles[::2]
    return Turns(tuple(angles.tolist()), attention)


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def bare_module(config: Any) -> nn.Module:
    """The rotary module that transformers builds for a config, without the model's weights."""
    module = rotary_module(empty_model(config))
    kind: Any = type(module)
    return kind(config=config)


def prove(model: nn.Module, count: int) -> None:
    """Raise RotaryError unless the module, of that many frequencies, is all that rotates: see `rescaled`."""
    ones = (1.0,) * count
    factors = RescaleFactors(
        method="check",
        rotary_dim=2 * count,
        theta=10_000.0,
        original_length=1,
        target_length=1,
        long=ones,
        short=ones,
    )
    with rescaled(model, factors, long_rows=True):
        pass
