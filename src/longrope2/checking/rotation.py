"""The float64 oracle: from RoPE parameters, in the form of transformers 5, to what a model should be rotated by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrope2.families import LONG_MSCALE, ORIGINAL, SHORT_MSCALE, yarn_attention
from longrope2.methods import dynamic_ntk, longrope_temperature, ntk_by_parts, yarn
from longrope2.rope import RopeSpec

SAME = 1e-4
"""Relative differences up to this are float32's."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
}
"""By rope_type, the keys without which its formula is not defined."""


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What an engine rotates by: frequencies in radians per token, and what it multiplies cos and sin with."""

    rope_type: str
    theta: float
    short: tuple[float, ...]
    long: tuple[float, ...]
    short_attention: float = 1.0
    long_attention: float = 1.0
    switch: int | None = None
    """The longest sequence that is rotated by `short`; None where all are rotated alike."""

    def error(self, other: "Rotation") -> float | None:
        """The largest relative difference in any frequency or attention factor; None where their numbers differ."""
        mine, others = ((*each.short, *each.long, each.short_attention, each.long_attention) for each in (self, other))
        if len(mine) != len(others):
            return None
        return max(_relative(one, two) for one, two in zip(mine, others, strict=True))

    def differences(self, other: "Rotation") -> list[str]:
        """Where two differ by more than float32 rounds, in words with the numbers of both."""
        if len(self.short) != len(other.short):
            return [f"{len(self.short)} frequencies, not {len(other.short)}"]
        switches = (self.switch or other.switch) is not None
        sides = [("short", self.short, other.short, self.short_attention, other.short_attention)]
        sides += [("long", self.long, other.long, self.long_attention, other.long_attention)] if switches else []
        found = []
        if _relative(self.theta, other.theta) > SAME:
            found.append(f"base {self.theta:,.0f} in place of {other.theta:,.0f}")
        for side, mine, others, attention, expected in sides:
            where = f" of {side} sequences" if switches else ""
            errors = [_relative(one, two) for one, two in zip(mine, others, strict=True)]
            if max(errors) > SAME:
                worst = errors.index(max(errors))
                found.append(f"frequency {worst}{where} is {mine[worst]:.4g} in place of {others[worst]:.4g}")
            if _relative(attention, expected) > SAME:
                found.append(f"the attention factor{where} is {attention:.4f} in place of {expected:.4f}")
        return found

    def __str__(self) -> str:
        one, two = self.short_attention, self.long_attention
        factors = f"attention factor {one:.4f}" + ("" if one == two else f" in short and {two:.4f} in long sequences")
        text = f"{self.rope_type}, base {self.theta:,.0f}, {factors}"
        return text if self.switch is None else f"{text}, another RoPE above {self.switch:,} tokens"


def rotation(parameters: Mapping[str, Any], *, head_dim: int, window: int) -> Rotation:
    """What complete parameters ask for; KeyError or ValueError where they are not complete."""
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    partial = float(parameters.get("partial_rotary_factor") or 1.0)
    for key in NEEDED[kind]:
        if parameters.get(key) is None:
            raise KeyError(key)
    if kind == "proportional":  # the last dimensions of a head do not turn at all
        turning, scale = int(partial * head_dim // 2), float(parameters.get("factor") or 1.0)
        turns = [theta ** (-2 * i / head_dim) / scale for i in range(turning)]
        return _one_side(kind, theta, [*turns, *[0.0] * (head_dim // 2 - turning)])
    spec = RopeSpec(
        rotary_dim=int(head_dim * partial), theta=theta, original_length=int(parameters.get(ORIGINAL) or window)
    )
    ones = [1.0] * spec.num_dims
    if kind == "longrope":
        return _longrope(parameters, spec, window)
    if kind == "default":
        return _one_side(kind, theta, _divided(spec, ones))
    factor = float(parameters["factor"])
    if kind == "linear":
        return _one_side(kind, theta, _divided(spec, [factor] * spec.num_dims))
    if kind == "dynamic":  # which stretches with each token; `long` is at twice the window
        trained = RopeSpec(rotary_dim=spec.rotary_dim, theta=theta, original_length=window)
        stretched = dynamic_ntk(trained, round(factor * window), current_length=2 * window).factors
        short, long = _divided(trained, ones), _divided(trained, stretched)
        return Rotation(rope_type=kind, theta=theta, short=short, long=long, switch=window)
    target = spec.original_length * factor
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return _one_side(
            kind, theta, _divided(spec, ntk_by_parts(spec, target, low_rotations=low, high_rotations=high).factors)
        )
    ramp = yarn(
        spec,
        target,
        fast_rotations=parameters.get("beta_fast") or 32,
        slow_rotations=parameters.get("beta_slow") or 1,
        truncate=parameters.get("truncate", True),
    )
    stated = parameters.get("attention_factor")
    attention = yarn_attention(parameters, factor) if stated is None else float(stated)
    return _one_side(kind, theta, _divided(spec, ramp.factors), attention)


def default_longrope_attention(ratio: float, original_length: int) -> float:
    """What engines apply to longrope where a config names no attention factor."""
    return longrope_temperature(ratio, original_length) if ratio > 1 else 1.0


def _longrope(parameters: Mapping[str, Any], spec: RopeSpec, window: int) -> Rotation:
    short, long = (_factors(parameters, key, spec.num_dims) for key in ("short_factor", "long_factor"))
    stated = parameters.get("attention_factor")
    if stated is None:
        ratio = float(parameters.get("factor") or window / spec.original_length)
        stated = default_longrope_attention(ratio, spec.original_length)
    sides = [float(parameters.get(key) or stated) for key in (SHORT_MSCALE, LONG_MSCALE)]
    return Rotation(
        rope_type="longrope",
        theta=spec.theta,
        short=_divided(spec, short),
        long=_divided(spec, long),
        short_attention=sides[0],
        long_attention=sides[1],
        switch=spec.original_length if short != long or sides[0] != sides[1] else None,
    )


def _factors(parameters: Mapping[str, Any], key: str, count: int) -> list[float]:
    values = parameters[key]
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{key} has {len(values) if isinstance(values, list) else 'no'} numbers, not {count}")
    return [float(value) for value in values]


def _one_side(kind: str, theta: float, frequencies: Sequence[float], attention: float = 1.0) -> Rotation:
    turns = tuple(frequencies)
    return Rotation(
        rope_type=kind, theta=theta, short=turns, long=turns, short_attention=attention, long_attention=attention
    )


def _divided(spec: RopeSpec, factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(frequency / factor for frequency, factor in zip(spec.frequencies, factors, strict=True))


def _relative(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), 1e-20)
