"""What the rotary modules of a live transformers model do, read off what they return.

Knows no layout and no family: positions go in, cos and sin (or complex numbers) come out.
"""

from typing import Any

import torch
from torch import Tensor, nn

from longrope2.checking.rotation import Rotation
from longrope2.errors import RotaryError
from longrope2.families import FULL_ATTENTION
from longrope2.models import empty_model
from longrope2.rotary import RescaledRotary


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that rotate text, ours among them; RotaryError where there is none."""
    found: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if isinstance(child, RescaledRotary) or type(child).__name__.endswith("RotaryEmbedding"):
                found.append(child)
            elif not any(part in name for part in ("vision", "visual", "audio")):
                visit(child)

    visit(model)
    if not found:
        raise RotaryError(f"{type(model).__name__} has no rotary module")
    return found


def bare_module(config: Any) -> nn.Module:
    """The rotary module that transformers builds for a config, without the model's weights."""
    kind: Any = type(rotary_modules(empty_model(config))[0])
    return kind(config=config)


def rounded_to(module: nn.Module) -> str:
    """That a module's frequencies were rounded to 16 bits, as `model.to(dtype)` does it; empty where they were not."""
    kinds = {value.dtype for name, value in module.named_buffers() if name.endswith("inv_freq")}
    short = [str(kind).removeprefix("torch.") for kind in kinds if kind.itemsize < 4]
    if not short:
        return ""
    return f"its frequencies were rounded to {short[0]}: load the model with dtype=, not with .to() or .half()"


def measured(module: nn.Module, stated: Rotation) -> Rotation:
    """What a rotary module does below and above the stated switch, in the form of the oracle."""
    threshold = stated.switch or 1024
    # Dynamic NTK depends on the length; the oracle's `long` is at twice the window.
    beyond = 2 * threshold - 1 if stated.rope_type == "dynamic" else threshold
    (short, short_attention), (long, long_attention) = (
        _turns(module, last, len(stated.short)) for last in (threshold - 1, beyond)
    )
    return Rotation(
        rope_type=stated.rope_type,
        theta=stated.theta,
        short=short,
        long=long,
        short_attention=short_attention,
        long_attention=long_attention,
        switch=stated.switch,
    )


@torch.no_grad()
def _turns(module: nn.Module, last: int, count: int) -> tuple[tuple[float, ...], float]:
    """Frequencies and attention factor of a forward that ends at `last`; no angle passes a half turn at position 1."""
    device = next((value.device for value in module.buffers()), torch.device("cpu"))
    positions = torch.tensor([[0, 1, last]], device=device)
    nested = not isinstance(module, RescaledRotary) and hasattr(module, f"{FULL_ATTENTION}_inv_freq")
    if not (nested or isinstance(module, RescaledRotary) or hasattr(module, "inv_freq")):
        raise RotaryError(f"{type(module).__name__} has frequencies for kinds of layers that are not known here")
    layer = {"layer_type": FULL_ATTENTION} if nested else {}
    output = module(torch.zeros(1, 3, 1, device=device), positions, **layer)
    turned = _as_complex(output)
    if turned is None or turned.dim() != 3:
        raise RotaryError(f"{type(module).__name__} returns neither cos and sin nor complex numbers for each position")
    attention, angles = float(turned[0, 0, 0].abs()), turned[0, 1].angle()
    if angles.numel() == 2 * count:
        halves = torch.equal(angles[:count], angles[count:])
        angles = angles[:count] if halves else angles[::2]
    return tuple(angles.tolist()), attention


def _as_complex(output: Any) -> Tensor | None:
    """a·e^(i·angle) in float64, from what a rotary module returns."""
    if isinstance(output, Tensor) and output.is_complex():
        return output.to(torch.complex128)
    if isinstance(output, tuple) and len(output) == 2 and all(isinstance(each, Tensor) for each in output):
        return torch.complex(output[0].double(), output[1].double())
    return None
