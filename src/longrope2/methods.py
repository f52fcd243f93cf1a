"""Every closed-form rescaling method, each a function from a RopeSpec to RescaleFactors.

s = L/L_train is the extension ratio and λ_i the factor of dimension i; see docs/concepts.md for the formulas
side by side. Blends between "untouched" and "divided by s" are made in 1/λ, as their authors do.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longrope2.errors import FactorsError
from longrope2.factors import RescaleFactors
from longrope2.options import Length, option, stated
from longrope2.rope import STANDSTILL, RopeSpec

# YaRN leaves dimensions of more than 32 rotations untouched and interpolates those of fewer than one.
YARN_FAST_ROTATIONS = 32
YARN_SLOW_ROTATIONS = 1
# CoPE's authors clip LLaMA-3-8B from dimension 44 of 64 on: 20 of the 29 that no longer complete a period in training.
CLIPPED_SHARE = 20 / 29


@dataclass(frozen=True)
class Rescaling:
    """What a method decides: factors, temperature, and the critical dimension where it uses one."""

    factors: Sequence[float]
    attention_factor: float = 1.0
    critical_dimension: int | None = None


def no_rescaling(spec: RopeSpec, target_length: int) -> Rescaling:
    """The untouched model, λ = 1: what every method is measured against."""
    return Rescaling([1.0] * spec.num_dims)


def position_interpolation(spec: RopeSpec, target_length: int) -> Rescaling:
    """PI: every dimension is divided by s."""
    return Rescaling([spec.extension_ratio(target_length)] * spec.num_dims)


def ntk(spec: RopeSpec, target_length: int) -> Rescaling:
    """NTK as the paper uses it: the larger base that brings the critical dimension to the target length."""
    if spec.original_length <= 2 * math.pi:
        raise FactorsError(
            f"NTK needs an original window above 2π tokens, got {spec.original_length}",
            hint="use ntk-aware, which does not depend on the critical dimension",
        )
    exponent = math.log(target_length / (2 * math.pi)) / math.log(spec.original_length / (2 * math.pi))
    return Rescaling(_base_change(spec, spec.theta ** (exponent - 1)), critical_dimension=spec.critical_dimension)


def ntk_aware(spec: RopeSpec, target_length: int) -> Rescaling:
    """The first NTK formula, λ_i = s^(2i/(d−2)): only the very last dimension reaches s."""
    s = spec.extension_ratio(target_length)
    return Rescaling([s ** (2 * i / _below_d(spec)) for i in range(spec.num_dims)])


def dynamic_ntk(spec: RopeSpec, target_length: int, *, current_length: int | None = None) -> Rescaling:
    """Dynamic NTK with factor s, frozen at a current length (default: the target, its strongest)."""
    s = spec.extension_ratio(target_length)
    length = max(current_length or target_length, spec.original_length)
    growth = (s * length / spec.original_length - (s - 1)) ** (spec.rotary_dim / _below_d(spec))
    return Rescaling(_base_change(spec, growth))


def ntk_by_parts(
    spec: RopeSpec,
    target_length: float,
    *,
    low_rotations: float = YARN_SLOW_ROTATIONS,
    high_rotations: float = YARN_FAST_ROTATIONS,
) -> Rescaling:
    """Untouched above `high_rotations`, divided by s below `low_rotations`, blended by rotations between."""
    s = spec.extension_ratio(target_length)
    weights = [(turns - low_rotations) / (high_rotations - low_rotations) for turns in spec.coverage]
    return Rescaling([_blend(s, 1 - weight) for weight in weights])


def llama3(spec: RopeSpec, target_length: int) -> Rescaling:
    """The scaling of LLaMA 3.1: NTK-by-parts with its blend between one and four rotations."""
    return ntk_by_parts(spec, target_length, low_rotations=1, high_rotations=4)


def yarn(
    spec: RopeSpec,
    target_length: float,
    *,
    fast_rotations: float = YARN_FAST_ROTATIONS,
    slow_rotations: float = YARN_SLOW_ROTATIONS,
    truncate: bool = True,
) -> Rescaling:
    """YaRN: a ramp over the index from 32 rotations to one, and the temperature 0.1·ln s + 1."""
    low, high = spec.dimension_completing(fast_rotations), spec.dimension_completing(slow_rotations)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return _yarn_ramp(spec, target_length, low, high)


def yarn_rcd(spec: RopeSpec, target_length: int, *, critical_dimension: int | None = None) -> Rescaling:
    """YaRN whose ramp ends at the real critical dimension (paper, ablation)."""
    c = _given_dimension(spec, critical_dimension)
    return replace(_yarn_ramp(spec, target_length, _yarn_borders(spec)[0], c), critical_dimension=c)


def ntk_rcd(spec: RopeSpec, target_length: int, *, critical_dimension: int | None = None) -> Rescaling:
    """NTK whose base puts the factor s at the real critical dimension (paper, ablation)."""
    c = _given_dimension(spec, critical_dimension)
    s = spec.extension_ratio(target_length)
    return Rescaling([s ** (i / c) for i in range(spec.num_dims)], critical_dimension=c)


def mrrope_uni(spec: RopeSpec, target_length: int) -> Rescaling:
    """MrRoPE-Uni: between YaRN's borders every dimension grows by the same ratio over the one before."""
    return _mixed_radix(spec, target_length, lambda step, steps: step / steps)


def mrrope_pro(spec: RopeSpec, target_length: int) -> Rescaling:
    """MrRoPE-Pro: between YaRN's borders the ratio of a dimension to the one before itself grows geometrically."""
    return _mixed_radix(spec, target_length, lambda step, steps: step * (step + 1) / (steps * (steps + 1)))


def cope(spec: RopeSpec, target_length: int, *, onset: int | None = None, base: float | None = None) -> Rescaling:
    """CoPE: frequencies fade out by ½(1 + cos) over the index, from the onset to the last, which stands still.

    It does not depend on the target length; its authors raise the base as well before they train.
    """
    first = _onset(spec, onset)
    last = max(spec.num_dims - 1 - first, 1)
    kept = [0.5 * (1 + math.cos(math.pi * max(i - first, 0) / last)) for i in range(spec.num_dims)]
    raised = _raised_base(spec, base)
    return Rescaling([raised[i] / part if part else STANDSTILL for i, part in enumerate(kept)])


def hardclip(spec: RopeSpec, target_length: int, *, onset: int | None = None, base: float | None = None) -> Rescaling:
    """HardClip, which CoPE's authors compare with: every dimension from the onset on stands still."""
    first = _onset(spec, onset)
    return Rescaling([*_raised_base(spec, base)[:first], *[STANDSTILL] * (spec.num_dims - first)])


def drope(spec: RopeSpec, target_length: int) -> Rescaling:
    """DroPE: no rotation at all, which a model has to be trained for, in rows of its original length."""
    return Rescaling([STANDSTILL] * spec.num_dims)


def longrope2(
    spec: RopeSpec,
    target_length: int,
    *,
    critical_dimension: int | None = None,
    right_factors: Sequence[float] | None = None,
    attention_factor: float = 1.0,
) -> Rescaling:
    """LongRoPE2 of a known critical dimension: given factors from it on, NTK below (Algorithm 2).

    One right factor stands for all of them; none means s, the bound of the theory.
    """
    c = _given_dimension(spec, critical_dimension)
    width = spec.num_dims - c
    right = list(right_factors) if right_factors is not None else [spec.extension_ratio(target_length)]
    right = right * width if len(right) == 1 else right
    if not all(0 < factor < math.inf for factor in right):
        raise FactorsError(
            f"right-hand factors must be finite numbers above 0, got {', '.join(map(str, right[:3]))}",
            hint=f"the theory's bound is {spec.extension_ratio(target_length):g}, the target over the original length",
        )
    if not 0 < attention_factor < math.inf:
        raise FactorsError(
            f"the attention factor must be a finite number above 0, got {attention_factor:g}",
            hint="1 leaves the temperature as it is",
        )
    if len(right) != width:
        raise FactorsError(
            f"{len(right)} right-hand factors, expected {width} for critical dimension {c} "
            f"of {spec.num_dims} (or one for all)",
            hint="give as many, or one",
        )
    return Rescaling(ntk_below(right[0], c) + right, attention_factor, c)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A closed form: what `factors`, `inspect`, the search and the docs know of it."""

    rescaling: Callable[..., Rescaling]
    """From a RopeSpec, the target length and options of its own."""
    formula: str
    """λ_i in words: s = L/L_train, b the base, d the rotary dimension, c = d_rcd."""
    temperature: str = "1"
    """Its attention factor in words."""
    well_known: bool = False
    """Whether `inspect` shows it where a terminal has no room for all."""


METHODS: Mapping[str, Method] = {
    "none": Method(rescaling=no_rescaling, formula="1: the untouched model"),
    "pi": Method(rescaling=position_interpolation, formula="s", well_known=True),
    "ntk": Method(
        rescaling=ntk,
        formula="(b'/b)^(2i/d) with the paper's b' = b^(ln(L/2π)/ln(L_train/2π))",
        well_known=True,
    ),
    "ntk-aware": Method(rescaling=ntk_aware, formula="s^(2i/(d−2)): only the last dimension reaches s"),
    "dynamic-ntk": Method(rescaling=dynamic_ntk, formula="base b·(s·l/L_train − (s−1))^(d/(d−2)) at current length l"),
    "ntk-by-parts": Method(
        rescaling=ntk_by_parts,
        formula="1 above 32 rotations within L_train, s below one, 1/λ blended by rotations in between",
    ),
    "yarn": Method(
        rescaling=yarn,
        formula="1/λ blended over the index, from 32 rotations to one",
        temperature="0.1·ln s + 1",
        well_known=True,
    ),
    "llama3": Method(
        rescaling=llama3,
        formula="as ntk-by-parts, with the blend between four rotations and one",
        well_known=True,
    ),
    "ntk-rcd": Method(rescaling=ntk_rcd, formula="s^(i/c), c = d_rcd", well_known=True),
    "yarn-rcd": Method(
        rescaling=yarn_rcd, formula="YaRN's ramp, ending at c", temperature="0.1·ln s + 1", well_known=True
    ),
    "mrrope-uni": Method(
        rescaling=mrrope_uni,
        formula="s^(k/n) at the k-th of n dimensions between YaRN's borders; 1 before, s after",
        temperature="0.1·ln s + 1",
    ),
    "mrrope-pro": Method(
        rescaling=mrrope_pro,
        formula="as mrrope-uni, with s^(k(k+1)/(n(n+1)))",
        temperature="0.1·ln s + 1",
    ),
    "cope": Method(
        rescaling=cope,
        formula="2/(1 + cos(πk/n)) at the k-th of n dimensions after the onset, 1 before; the last does not rotate",
    ),
    "hardclip": Method(rescaling=hardclip, formula="1 before the onset; from it on, no dimension rotates"),
    "drope": Method(rescaling=drope, formula="no dimension rotates; for training, in rows of the original length"),
    "longrope2": Method(
        rescaling=longrope2,
        formula="λ_c^(i/c) below c; the given factors from c on",
        temperature="given, default 1",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """A method, and what it is given besides the model: the options of `longrope2 factors`."""

    target_length: Length = option(help="Window to reach, e.g. 128k.")
    method: str = option(help=f"One of {', '.join(METHODS)}.", metavar="NAME")
    critical_dimension: int | None = option(
        None,
        "d_rcd of the -rcd methods and longrope2; default: the middle of the range that `search` would try.",
        metavar="I",
    )
    right_factors: tuple[float, ...] | None = option(
        None,
        "For longrope2: factors from d_rcd on, comma-separated, or one for all; default: the extension ratio.",
    )
    attention_factor: float | None = option(
        None, "For longrope2: temperature of long sequences; default: 1.", metavar="A"
    )
    onset: int | None = option(
        None,
        "For cope and hardclip: first dimension to clip; default: 20 of every 29 from d_tcd on, counted from the end.",
        metavar="I",
    )
    base: float | None = option(None, "For cope and hardclip: a raised base of RoPE, e.g. 1e7; default: as it is.")
    single: bool = option(
        False,
        "One RoPE at every length, as closed forms are published; default: the original one within the window.",
    )

    def given(self) -> dict[str, Any]:
        """The options of the method itself that were given; refuses those that it does not take."""
        own = ("critical_dimension", "right_factors", "attention_factor", "onset", "base")
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        for entry in stated(ClosedForm):
            if entry.name in given and self.method in METHODS and entry.name not in taken_by(self.method):
                takers = ", ".join(method for method in METHODS if entry.name in taken_by(method))
                raise FactorsError(f"{self.method} takes no {entry.flag}", hint=f"it is for {takers}; leave it out")
        return given


def taken_by(method: str) -> set[str]:
    """The names of the options that a method takes."""
    return set(inspect.signature(METHODS[method].rescaling).parameters) - {"spec", "target_length"}


def rescale(
    method: str,
    spec: RopeSpec,
    target_length: int,
    *,
    short: Sequence[float] | None = None,
    short_attention_factor: float = 1.0,
    provenance: Mapping[str, Any] | None = None,
    **options: Any,
) -> RescaleFactors:
    """Apply a method by name. `short` is what the model already does within its window; default ones."""
    if method not in METHODS:
        close = difflib.get_close_matches(method.lower(), METHODS, n=1)
        raise FactorsError(
            f"unknown method {method!r}",
            hint=f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(METHODS)}",
        )
    if target_length <= spec.original_length:
        raise FactorsError(
            f"target length {target_length:,} is not above the trained window of {spec.original_length:,}",
            hint="choose a longer target; within its window the model needs no rescaling",
        )
    accepted = taken_by(method)
    if unknown := sorted(set(options) - accepted):
        raise FactorsError(
            f"method {method!r} takes no {', '.join(unknown)}",
            hint=f"it takes: {', '.join(sorted(accepted))}" if accepted else "it takes no options",
        )
    rescaling = METHODS[method].rescaling(spec, target_length, **options)
    return RescaleFactors(
        method=method,
        rotary_dim=spec.rotary_dim,
        theta=spec.theta,
        original_length=spec.original_length,
        target_length=target_length,
        long=tuple(rescaling.factors),
        short=tuple(short) if short is not None else (1.0,) * spec.num_dims,
        long_attention_factor=rescaling.attention_factor,
        short_attention_factor=short_attention_factor,
        critical_dimension=rescaling.critical_dimension,
        provenance=provenance or {},
    )


def ntk_below(factor: float, critical_dimension: int) -> list[float]:
    """λ_i = λ_c^(i/c) for i < c: the base change that meets `factor` at the critical dimension."""
    return [factor ** (i / critical_dimension) for i in range(critical_dimension)]


def yarn_temperature(ratio: float) -> float:
    """YaRN's attention factor 0.1·ln s + 1."""
    return 0.1 * math.log(ratio) + 1


def longrope_temperature(ratio: float, original_length: int) -> float:
    """LongRoPE's attention factor √(1 + ln s/ln L_train), which engines apply when a config names none."""
    return math.sqrt(1 + math.log(ratio) / math.log(original_length))


def _base_change(spec: RopeSpec, growth: float) -> list[float]:
    """Factors that amount to multiplying the base by `growth`."""
    return [growth ** (2 * i / spec.rotary_dim) for i in range(spec.num_dims)]


def _raised_base(spec: RopeSpec, base: float | None) -> list[float]:
    """Factors of another base; ones for the model's own."""
    base = spec.theta if base is None else base
    if not spec.theta <= base < math.inf:
        raise FactorsError(f"a base of {base:g} is not above the model's own", hint=f"give one above {spec.theta:g}")
    return _base_change(spec, base / spec.theta)


def _onset(spec: RopeSpec, onset: int | None) -> int:
    """The first dimension to clip; d/2 where there is nothing to clip."""
    if onset is None:
        return spec.num_dims - round(CLIPPED_SHARE * (spec.num_dims - spec.critical_dimension))
    if not 1 <= onset < spec.num_dims:
        raise FactorsError(
            f"onset {onset} is outside 1…{spec.num_dims - 1}",
            hint=f"dimensions from {spec.critical_dimension} on complete no period in training; drope rotates none",
        )
    return onset


def _mixed_radix(spec: RopeSpec, target_length: int, share: Callable[[int, int], float]) -> Rescaling:
    """s^share(k, n) at the k-th of n dimensions between YaRN's borders."""
    s = spec.extension_ratio(target_length)
    low, high = map(round, _ramp_ends(spec, *_yarn_borders(spec)))
    steps = max(high - low, 1)  # where the borders meet, a step as in YaRN; the authors divide by zero
    factors = [s ** share(min(max(i - low, 0), steps), steps) for i in range(spec.num_dims)]
    return Rescaling(factors, yarn_temperature(s))


def _yarn_borders(spec: RopeSpec) -> tuple[int, int]:
    """From where YaRN blends, and up to where."""
    low, high = map(spec.dimension_completing, (YARN_FAST_ROTATIONS, YARN_SLOW_ROTATIONS))
    return math.floor(low), math.ceil(high)


def _ramp_ends(spec: RopeSpec, low: float, high: float) -> tuple[float, float]:
    """The ends of a ramp within what YaRN's authors allow."""
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if high < low:
        raise FactorsError(
            f"YaRN's ramp would end at dimension {high}, before it begins at {low}",
            hint=f"give a critical dimension of at least {low}",
        )
    return low, high


def _yarn_ramp(spec: RopeSpec, target_length: float, low: float, high: float) -> Rescaling:
    s = spec.extension_ratio(target_length)
    low, high = _ramp_ends(spec, low, high)
    width = high - low or 0.001  # a step instead of a ramp, as YaRN's authors do
    factors = [_blend(s, (i - low) / width) for i in range(spec.num_dims)]
    return Rescaling(factors, yarn_temperature(s))


def _blend(s: float, weight: float) -> float:
    """1/λ goes linearly from 1 (weight 0) to 1/s (weight 1)."""
    weight = min(max(weight, 0.0), 1.0)
    return 1 / (1 - weight + weight / s)


def _given_dimension(spec: RopeSpec, critical_dimension: int | None) -> int:
    c = spec.middle_dimension if critical_dimension is None else critical_dimension
    if not 1 <= c < spec.num_dims:
        raise FactorsError(
            f"critical dimension {c} is outside 1…{spec.num_dims - 1}",
            hint=f"the paper searches from {spec.ten_period_dimension} to {spec.critical_dimension} here",
        )
    return c


def _below_d(spec: RopeSpec) -> int:
    if spec.rotary_dim <= 2:
        raise FactorsError(f"this NTK formula needs a rotary dimension above 2, got {spec.rotary_dim}")
    return spec.rotary_dim - 2
