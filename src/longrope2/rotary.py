"""RescaleFactors into a live model, per row or per token, and out again.

transformers computes cos and sin once per forward in one rotary module that all layers share. We put our own
module in its place: it builds the tables in float64 (float32 phases are off by up to 0.009 at 128k), chooses
between short and long factors for each row, and casts to the model's dtype last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longrope2.errors import RotaryError
from longrope2.factors import RescaleFactors
from longrope2.families import FULL_ATTENTION
from longrope2.rope import STANDSTILL

# How a family lays out d/2 angles over the rotated components of a head.
LAYOUTS = {
    "halves": lambda angles: torch.cat((angles, angles), dim=-1),
    "interleaved": lambda angles: angles.repeat_interleave(2, dim=-1),
    "single": lambda angles: angles,
}


def is_long(lengths: Tensor, factors: RescaleFactors, switch_length: int | None = None) -> Tensor:
    """The switch rule: a row is long once its tokens exceed the original window, or another switch length.

    With one RoPE for all there is no other side to switch from: every row is long.
    """
    if not factors.switches:
        return torch.ones_like(lengths, dtype=torch.bool)
    return lengths > (factors.original_length if switch_length is None else switch_length)


class RescaledRotary(nn.Module):
    """Stands in for a model's rotary module; `factors` and `long_rows` may be changed between forwards."""

    long_rows: bool | Tensor | None
    """Who uses the long factors: all rows or none, a bool tensor [batch] or [batch, sequence] for a choice
    per row or token, or None for the switch rule applied to each row's positions."""
    switch_length: int | None = None
    """The switch length that rule uses; None is the original window."""

    def __init__(
        self, original: nn.Module, layout: str, factors: RescaleFactors, long_rows: bool | Tensor | None
    ) -> None:
        super().__init__()
        self.original = original
        self.layout = layout
        self.factors = factors
        self.long_rows = long_rows
        self._angle_scale = 1.0  # the self-test turns rotation off with it

    @property
    def factors(self) -> RescaleFactors:
        """What the model rotates by."""
        return self._factors

    @factors.setter
    def factors(self, factors: RescaleFactors) -> None:
        self._factors = factors
        self._tables: dict[torch.device, Tensor] = {}

    def _sides(self, device: torch.device) -> Tensor:
        """[short, long] in float64: the frequencies, and last the attention factor."""
        if device not in self._tables:
            factors = self.factors
            short = (*factors.inv_freq(long=False), factors.short_attention_factor)
            long = (*factors.inv_freq(long=True), factors.long_attention_factor)
            self._tables[device] = torch.tensor([short, long], dtype=torch.float64, device=device)
        return self._tables[device]

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin for `position_ids` [batch or 1, sequence], in the dtype of `x`."""
        if layer_type not in (None, FULL_ATTENTION):
            # Sliding layers with a RoPE of their own (Gemma 3) never look beyond the trained window.
            return self.original(x, position_ids, layer_type)
        frequencies, attention_factor = self._chosen(position_ids)
        angles = position_ids[..., None].double() * frequencies * self._angle_scale
        angles = LAYOUTS[self.layout](angles)
        cos, sin = (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()
        return cos.to(x.dtype), sin.to(x.dtype)

    def _chosen(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies and attention factor, broadcastable to [batch, sequence, dims]."""
        short, long = self._sides(position_ids.device)
        rows = self.long_rows
        if isinstance(rows, bool):
            side = long if rows else short
        else:
            if rows is None:
                rows = is_long(position_ids.amax(dim=-1) + 1, self.factors, self.switch_length)
            rows = rows.to(position_ids.device)
            side = torch.where(rows[:, None, None] if rows.dim() == 1 else rows[..., None], long, short)
        return side[..., :-1], side[..., -1:]


@contextmanager
def rescaled(
    model: nn.Module,
    factors: RescaleFactors,
    *,
    long_rows: bool | Tensor | None = None,
    check: bool = True,
) -> Iterator[RescaledRotary]:
    """Run `model` with rescaled RoPE inside the block, and leave it as it was afterwards.

    `long_rows` gives the long factors to all rows or none, or says so for each row or token (a bool tensor [batch] or
    [batch, sequence]); None: to rows that reach beyond the original window. With `check` a few tokens are run through
    the model to prove that the factors took effect.
    """
    parent, name, original = _rotary_place(model)
    try:
        yield install(model, factors, long_rows=long_rows, check=check)
    finally:
        setattr(parent, name, original)


def install(
    model: nn.Module,
    factors: RescaleFactors,
    *,
    long_rows: bool | Tensor | None = None,
    check: bool = True,
) -> RescaledRotary:
    """The same for good: put our rotary module into `model`, or raise and leave the model as it was."""
    parent, name, original = _rotary_place(model)
    rotary = RescaledRotary(original, _layout(original, factors), factors, long_rows)
    setattr(parent, name, rotary)
    try:
        if check:
            _prove_effect(model, rotary)
    except BaseException:
        setattr(parent, name, original)
        raise
    return rotary


def _rotary_place(model: nn.Module) -> tuple[nn.Module, str, nn.Module]:
    """Where the one rotary module sits: (parent, attribute, module)."""
    places: list[tuple[nn.Module, str, nn.Module]] = []

    def visit(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if isinstance(child, RescaledRotary) or _inv_freq(child) is not None:
                places.append((parent, name, child))
            else:
                visit(child)

    visit(model)
    if len(places) != 1:
        raise RotaryError(
            f"{type(model).__name__} has {len(places)} rotary modules, expected one shared by all layers",
            hint="pass a language model that `longrope2 inspect` accepts, without vision or audio parts",
        )
    return places[0]


def _inv_freq(module: nn.Module) -> Tensor | None:
    if not type(module).__name__.endswith("RotaryEmbedding"):
        return None
    for name in ("inv_freq", f"{FULL_ATTENTION}_inv_freq"):
        if isinstance(getattr(module, name, None), Tensor):
            return getattr(module, name)
    return None


def _layout(module: nn.Module, factors: RescaleFactors) -> str:
    """Find by trial how this module lays out its angles; refuse what matches nothing known."""
    if isinstance(module, RescaledRotary):
        return module.layout
    inv_freq = _inv_freq(module)
    assert inv_freq is not None
    if inv_freq.numel() != len(factors.long):
        raise RotaryError(
            f"the model rotates {inv_freq.numel()} dimensions, the factors are for {len(factors.long)}",
            hint="make its own: longrope2 factors MODEL --target-length N --method NAME -o FILE",
        )
    nested = getattr(module, "inv_freq", None) is None
    layer = {"layer_type": FULL_ATTENTION} if nested else {}
    scaling = getattr(module, f"{FULL_ATTENTION}_attention_scaling" if nested else "attention_scaling", 1.0)
    positions = torch.arange(4, device=inv_freq.device)[None]
    with torch.no_grad():
        cos, _ = module(torch.zeros(1, 4, 1, device=inv_freq.device), positions, **layer)
    inv_freq = _inv_freq(module)  # again: some kinds of RoPE choose it in each forward
    assert inv_freq is not None
    angles = positions[..., None].float() * inv_freq.float()
    tables = {layout: arrange(angles).cos() * scaling for layout, arrange in LAYOUTS.items()}
    found = [
        layout
        for layout, expected in tables.items()
        if expected.shape == cos.shape and torch.allclose(expected, cos, atol=1e-3)
    ]
    if len(found) > 1 and min(factors.long + factors.short) < STANDSTILL:
        raise RotaryError(
            f"this {type(module).__name__} does not rotate, so that nothing tells how its dimensions are laid out",
            hint="extend the model that it was made from",
        )
    if found:
        return found[0]
    raise RotaryError(
        f"the rotary layout of {type(module).__name__} is not known here (cos has shape {tuple(cos.shape)})",
        hint="this may be a new transformers version; please report it with the versions you use",
    )


@torch.no_grad()
def _prove_effect(model: nn.Module, rotary: RescaledRotary) -> None:
    """Raise RotaryError unless rotation, and all of it, now comes from our module.

    The field's classic fault is a patch that transformers never calls. With our angles set to zero the model
    must become blind to positions (nothing else rotates) and must differ from the model that rotates.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device)[None]
    near = torch.arange(8, device=device)[None]

    def logits(positions: Tensor, angle_scale: float) -> Tensor:
        # One side only: at angle zero nothing but the two attention factors could distinguish rows. With the original
        # frequencies: factors may be such that nothing rotates.
        chosen, factors = rotary.long_rows, rotary.factors
        rotary.factors = replace(factors, long=(1.0,) * len(factors.long))
        rotary.long_rows, rotary._angle_scale = True, angle_scale
        try:
            # An explicit mask: without one, gaps between positions would be read as document boundaries.
            outputs: Any = model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            )
        finally:
            rotary.factors, rotary.long_rows, rotary._angle_scale = factors, chosen, 1.0
        return outputs.logits.float()

    blind, seeing = logits(near, 0.0), logits(near, 1.0)
    if bool(blind.isnan().any()):
        raise RotaryError(
            f"{type(model).__name__} returns logits that are not numbers for eight plain tokens",
            hint="its weights may be damaged, or too large for this dtype",
        )
    if torch.equal(blind, seeing):
        raise RotaryError(
            f"rescaling had no effect on {type(model).__name__}: its rotary module is never used",
            hint="this may be a new transformers version; please report it with the versions you use",
        )
    own_sliding_rope = _inv_freq(rotary.original) is not None and not hasattr(rotary.original, "inv_freq")
    if own_sliding_rope or isinstance(rotary.original, RescaledRotary):
        return
    spread = logits(near * 5, 0.0)
    if not torch.allclose(blind, spread, atol=1e-3 * float(blind.abs().max())):
        raise RotaryError(
            f"rescaling reached only a part of {type(model).__name__}: some layers still rotate alone",
            hint="this may be a new transformers version; please report it with the versions you use",
        )
