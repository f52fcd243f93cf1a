"""RescaleFactors into a live model, per row or per token, and out again.

transformers computes cos and sin once per forward in one rotary module that all layers share. We put our own
module in its place: it builds the tables in float64 (float32 phases are off by up to 0.009 at 128k), chooses
between short and long factors for each row, and casts to the model's dtype last.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longrope2.errors import RotaryError
from longrope2.factors import RescaleFactors
from longrope2.families import STILL, rescaled_kind
from longrope2.rope import STANDSTILL

# How a family lays out d/2 angles over the rotated components of a head. Complex numbers are laid out as "single".
LAYOUTS = {
    "halves": lambda angles: torch.cat((angles, angles), dim=-1),
    "interleaved": lambda angles: angles.repeat_interleave(2, dim=-1),
    "single": lambda angles: angles,
}


REPORT = "this may be a new transformers version; please report it with the versions you use"


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
        self, original: nn.Module, layout: "Layout", factors: RescaleFactors, long_rows: bool | Tensor | None
    ) -> None:
        super().__init__()
        self.original = original
        self.layout = layout
        self.factors = factors
        self.long_rows = long_rows

    @property
    def config(self) -> Any:
        """The original's; some models look it up here."""
        return self.original.config

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
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor] | Tensor:
        """cos and sin for `position_ids` [batch or 1, sequence], in the dtype of `x`; for some families, e^(i·angle).

        Families that also take images have an axis of positions before the batch; in text all its rows are equal.
        """
        if layer_type not in (None, self.layout.kind):
            # Layers with a RoPE of their own (Gemma 3's sliding ones) keep it.
            return self.original(x, position_ids, layer_type)
        if position_ids.dim() == 3:
            position_ids = position_ids[0]
        frequencies, attention_factor = self._chosen(position_ids)
        angles = position_ids[..., None].double() * frequencies
        return self.layout(angles, attention_factor, x.dtype)

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
    places = _rotary_places(model)
    try:
        yield install(model, factors, long_rows=long_rows, check=check)
    finally:
        _put_back(places)


def install(
    model: nn.Module,
    factors: RescaleFactors,
    *,
    long_rows: bool | Tensor | None = None,
    check: bool = True,
) -> RescaledRotary:
    """The same for good: put our rotary module into `model`, or raise and leave the model as it was."""
    places = _rotary_places(model)
    original = places[0][2]
    rotary = RescaledRotary(original, _layout(original, factors), factors, long_rows)
    for parent, name, _ in places:
        setattr(parent, name, rotary)
    try:
        if check:
            _prove_effect(model, rotary)
    except BaseException:
        _put_back(places)
        raise
    return rotary


Place = tuple[nn.Module, str, nn.Module]
"""Parent, attribute and module."""


def _put_back(places: list[Place]) -> None:
    for parent, name, original in places:
        setattr(parent, name, original)


def _rotary_places(model: nn.Module) -> list[Place]:
    """Where rotary modules sit: one that all layers share, or several that rotate by the same frequencies."""
    places: list[Place] = []

    def visit(parent: nn.Module) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            if isinstance(child, RescaledRotary) or _frequencies(child)[1] is not None:
                places.append((parent, name, child))
            else:
                visit(child)

    visit(model)
    known = [_frequencies(module) for _, _, module in places]
    if not places or any(kind != known[0][0] or not torch.equal(each, known[0][1]) for kind, each in known):
        raise RotaryError(
            f"{type(model).__name__} has {len(places)} rotary modules, expected one that all layers share",
            hint="pass a language model that `longrope2 inspect` accepts, without vision or audio parts",
        )
    return places


def _frequencies(module: nn.Module) -> tuple[str | None, Any]:
    """The kind of layers that a rotary module has the rescaled frequencies for, or None for all, and these."""
    while isinstance(module, RescaledRotary):
        module = module.original
    if not type(module).__name__.endswith("RotaryEmbedding"):
        return None, None
    if isinstance(getattr(module, "inv_freq", None), Tensor):
        return None, module.inv_freq
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("_inv_freq")]
    kind = rescaled_kind(name.removesuffix("_inv_freq") for name in names if "original" not in name)
    return kind, getattr(module, f"{kind}_inv_freq", None)


@dataclass(frozen=True)
class Layout:
    """How a rotary module hands out its angles."""

    name: str
    kind: str | None
    """The kind of layers it does so for, if others have a RoPE of their own."""
    num_still: int
    """Frequencies at zero, after those that rotate."""
    is_complex: bool

    def __call__(self, angles: Tensor, attention_factor: Tensor | float, dtype: torch.dtype) -> Any:
        """cos and sin, or complex numbers, from angles in float64."""
        angles = LAYOUTS[self.name](nn.functional.pad(angles, (0, self.num_still)))
        cos, sin = (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()
        return torch.complex(cos, sin) if self.is_complex else (cos.to(dtype), sin.to(dtype))


def _layout(module: nn.Module, factors: RescaleFactors) -> Layout:
    """Find by trial how this module lays out its angles; refuse what matches nothing known."""
    if isinstance(module, RescaledRotary):
        return module.layout
    kind, inv_freq = _frequencies(module)
    num_still = int((inv_freq <= 1 / STILL).sum())  # at zero, or divided by that in a config that was written here
    if inv_freq.numel() - num_still != len(factors.long):
        raise RotaryError(
            f"the model rotates {inv_freq.numel() - num_still} dimensions, the factors are for {len(factors.long)}",
            hint="make its own: longrope2 factors MODEL --target-length N --method NAME -o FILE",
        )
    layer = {} if kind is None else {"layer_type": kind}
    prefix = "" if kind is None else f"{kind}_"
    rope_type: Any = getattr(module, "rope_type", None)
    if (rope_type if kind is None else rope_type[kind]) in ("default", "proportional"):
        _check_frequencies(module, inv_freq, factors)
    scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
    positions = torch.arange(4, device=inv_freq.device)[None]
    with torch.no_grad():
        output = module(torch.zeros(1, 4, 1, device=inv_freq.device), positions, **layer)
    _, inv_freq = _frequencies(module)  # again: some kinds of RoPE choose them in each forward
    rotating = inv_freq[: inv_freq.numel() - num_still].double()
    angles = positions[..., None] * rotating
    is_complex = isinstance(output, Tensor)
    found = []
    for name in LAYOUTS:
        layout = Layout(name, kind, num_still, is_complex)
        expected = layout(angles, scaling, torch.float32)
        pairs = [(expected, output)] if is_complex else list(zip(expected, output, strict=True))
        if all(ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in pairs):
            found.append(layout)
    if len(found) > 1 and min(factors.long + factors.short) < STANDSTILL:
        raise RotaryError(
            f"this {type(module).__name__} does not rotate, so that nothing tells how its dimensions are laid out",
            hint="extend the model that it was made from",
        )
    if found:
        return found[0]
    shape = tuple((output if is_complex else output[0]).shape)
    raise RotaryError(
        f"the rotary layout of {type(module).__name__} is not known here (cos has shape {shape})", hint=REPORT
    )


def _check_frequencies(module: nn.Module, inv_freq: Tensor, factors: RescaleFactors) -> None:
    """What was read from the config must be what the model rotates by; its buffer may be bfloat16."""
    read = torch.tensor(
        [value * factor for value, factor in zip(factors.inv_freq(long=True), factors.long, strict=True)]
    )
    if not torch.allclose(inv_freq[: len(read)].float().cpu(), read, rtol=1e-2, atol=0):
        raise RotaryError(f"{type(module).__name__} rotates by other frequencies than its config says", hint=REPORT)


def _prove_effect(model: nn.Module, rotary: RescaledRotary) -> None:
    """Raise RotaryError unless rotation, and all of it, now comes from our module."""
    # One side only: at angle zero nothing but the two attention factors could distinguish rows. With the original
    # frequencies: factors may be such that nothing rotates.
    chosen, factors = rotary.long_rows, rotary.factors
    rotary.factors, rotary.long_rows = replace(factors, long=(1.0,) * len(factors.long)), True
    try:
        prove_rotation(model, [rotary])
    finally:
        rotary.factors, rotary.long_rows = factors, chosen


@torch.no_grad()
def prove_rotation(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise RotaryError unless these rotary modules, and nothing else, tell a model where tokens are.

    The field's classic fault is a patch that transformers never calls. With angles of zero the model must be blind to
    positions, and must differ from the model that rotates.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device)[None]
    near = torch.arange(8, device=device)[None]

    def logits(positions: Tensor) -> Tensor:
        # An explicit mask: without one, gaps between positions would be read as document boundaries.
        outputs: Any = model(
            input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False
        )
        return outputs.logits.float()

    was_training = model.training
    model.eval()  # a trainer's own has dropout
    try:
        seeing = logits(near)
        with angles_of_zero(modules):
            # Not far: some models scale queries by their position beyond the original window.
            blind, spread = logits(near), logits(near * 3)
    finally:
        model.train(was_training)
    name = type(model).__name__
    if bool(blind.isnan().any()):
        raise RotaryError(
            f"{name} returns logits that are not numbers for eight plain tokens",
            hint="its weights may be damaged, or too large for this dtype",
        )
    if torch.equal(blind, seeing):
        raise RotaryError(f"angles of zero have no effect on {name}: its rotary module is never used", hint=REPORT)
    if not torch.allclose(blind, spread, atol=1e-3 * float(blind.abs().max())):
        raise RotaryError(
            f"with angles of zero {name} still tells positions apart: some layers rotate alone", hint=REPORT
        )


@contextmanager
def angles_of_zero(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let rotary modules see position zero alone inside the block, where nothing turns."""

    def still(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        zeroed = {name: value * 0 if name == "position_ids" else value for name, value in named.items()}
        return (*given[:1], *(value * 0 if isinstance(value, Tensor) else value for value in given[1:])), zeroed

    hooks = [module.register_forward_pre_hook(still, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
