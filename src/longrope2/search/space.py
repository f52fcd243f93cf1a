"""What the search may try: genes, how they become factors, and how they change (Algorithms 1 and 2).

Legend: c is the critical dimension d_rcd an individual carries, λ_c its first right-hand factor, s the extension
ratio, "left" the dimensions below c and "right" those from c on. Right factors never fall, lie on a grid of 0.01
and within [s, 2s]; the left follows from them by a shape.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from longrope2.factors import RescaleFactors
from longrope2.methods import METHODS, longrope_temperature, ntk_below, rescale, yarn_temperature
from longrope2.rope import RopeSpec

Shape = Literal["ntk", "ramp", "power", "given"]


@dataclass(frozen=True, kw_only=True)
class Genome:
    """One individual."""

    critical_dimension: int
    """c: where the right side begins; 0 when every dimension is searched alike."""
    right: tuple[float, ...]
    """λ_i for i ≥ c."""
    shape: Shape = "ntk"
    """How the left follows: `ntk` λ_c^(i/c); `power` λ_c^((i/c)^parameter); `ramp` untouched below the index
    `parameter`, then 1/λ falling linearly to c as in YaRN; `given` as listed in `left`."""
    parameter: float = 1.0
    left: tuple[float, ...] = ()
    attention_factor: float = 1.0
    """Temperature of long sequences."""
    origin: str = "random"
    """Where it comes from: a method's name, random, mutation or crossover."""

    def factors(self) -> tuple[float, ...]:
        """λ for every dimension."""
        c, first = self.critical_dimension, self.right[0]
        if self.shape == "given":
            left = list(self.left)
        elif self.shape == "ramp":
            start = min(self.parameter, c - 1)
            weights = [max(i - start, 0) / (c - start) for i in range(c)]
            left = [1 / (1 - weight + weight / first) for weight in weights]
        elif self.shape == "power":
            left = [first ** ((i / c) ** self.parameter) for i in range(c)]
        else:
            left = ntk_below(first, c)
        return (*left, *self.right)

    def key(self) -> str:
        """The same for individuals that rotate alike, whatever their genes."""
        values = [round(value, 9) for value in (*self.factors(), self.attention_factor)]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the journal."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a user may say of the space, whatever the model."""

    target_length: int
    dimensions: Literal["critical", "all"] = "critical"
    """`critical`: the left follows from the right; `all`: left factors are searched one by one as well."""
    method: Literal["longrope2", "longrope"] = "longrope2"
    """`longrope` is the first version: no critical dimension, all factors free from 1 to 1.25 s."""
    lower: float = 1.0
    """Right factors are at least this many s …"""
    upper: float = 2.0
    """… and at most this many."""
    grid: float = 0.01
    mutation_probability: float = 0.3


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Bounds):
    """Bounds and moves. `paper` is exactly the paper; `wide` also searches temperature and left shape."""

    spec: RopeSpec
    kind: Literal["paper", "wide"] = "paper"
    attention_factor: float = 1.0
    """Fixed in the paper's space; where the wide one starts."""
    short: tuple[float, ...] | None = None
    """What the model already does within its window, which no search changes; None: nothing."""
    short_attention_factor: float = 1.0

    @property
    def ratio(self) -> float:
        """s, which may be fractional."""
        return self.spec.extension_ratio(self.target_length)

    @property
    def critical_dimensions(self) -> range:
        """Candidates for d_rcd: from the ten-period dimension to the theoretical one."""
        last = min(self.spec.critical_dimension, self.spec.num_dims - 1)
        return range(min(max(self.spec.ten_period_dimension, 1), last), last + 1)

    @property
    def _bounds(self) -> tuple[float, float]:
        if self.method == "longrope":
            return 1.0, self._snap(math.floor(1.25 * self.ratio / self.grid + 1e-6) * self.grid)
        return self.lower * self.ratio, self.upper * self.ratio

    def rescale_factors(self, genome: Genome, provenance: dict[str, Any] | None = None) -> RescaleFactors:
        """The value that flows on."""
        return RescaleFactors(
            method=self.method,
            rotary_dim=self.spec.rotary_dim,
            theta=self.spec.theta,
            original_length=self.spec.original_length,
            target_length=self.target_length,
            long=genome.factors(),
            short=self.short or (1.0,) * self.spec.num_dims,
            long_attention_factor=genome.attention_factor,
            short_attention_factor=self.short_attention_factor,
            critical_dimension=genome.critical_dimension or None,
            provenance=provenance or {},
        )

    def seeds(self, rng: np.random.Generator) -> Iterator[Genome]:
        """The individuals every first population has (Algorithm 1), closed forms first."""
        if self.method == "longrope":
            for name in ("pi", "ntk", "yarn"):
                yield self._clipped_closed_form(name)
            return
        if self.kind == "wide":
            for name in METHODS:
                yield self.closed_form(name)
        for c in self.critical_dimensions:
            flat = (self._draw(rng, *self._bounds),) * (self.spec.num_dims - c)
            genome = Genome(critical_dimension=c, right=flat, attention_factor=self.attention_factor)
            yield self._with_free_left(genome) if self.dimensions == "all" else genome
            if self.kind == "wide":
                start, temperature = float(rng.integers(0, c)), yarn_temperature(self.ratio)
                yield replace(genome, shape="ramp", parameter=start, attention_factor=temperature)

    def closed_form(self, name: str) -> Genome:
        """A closed-form method as an individual, exactly as it is, with its temperature."""
        factors = rescale(name, self.spec, self.target_length)
        c = min(factors.critical_dimension or self.spec.critical_dimension, self.spec.num_dims - 1)
        return Genome(
            critical_dimension=c,
            right=factors.long[c:],
            shape="given",
            left=factors.long[:c],
            attention_factor=factors.long_attention_factor,
            origin=name,
        )

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Algorithm 2: change right factors under the monotone constraint, re-derive the left."""
        if self.kind == "wide":
            genome = self._mutate_wide_genes(genome, rng)
        right = self._mutate_monotone(genome.right, *self._bounds, rng)
        child = replace(genome, right=right, origin="mutation")
        if genome.shape != "given":
            return child
        left = genome.left
        if self.dimensions == "all":
            left = self._mutate_monotone(left, 1.0, right[0], rng)
        # The right side may now begin lower than a given left side ends.
        return replace(child, left=tuple(min(value, right[0]) for value in left))

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Each right factor from either parent; critical dimension and left shape from the first."""
        c = first.critical_dimension
        other = (second.right[0],) * max(second.critical_dimension - c, 0) + second.right
        other = other[len(other) - len(first.right) :]
        take = rng.random(len(first.right)) < 0.5
        mixed = np.where(take, first.right, other)
        right = tuple(float(value) for value in np.maximum.accumulate(mixed))
        left = first.left
        if first.shape == "given":
            if self.dimensions == "all" and second.critical_dimension == c:
                picked = np.where(rng.random(c) < 0.5, first.left, second.left)
                left = tuple(float(value) for value in np.maximum.accumulate(picked))
            left = tuple(min(value, right[0]) for value in left)
        temperature = first.attention_factor
        if self.kind == "wide" and rng.random() < 0.5:
            temperature = second.attention_factor
        return replace(first, right=right, left=left, attention_factor=temperature, origin="crossover")

    def _mutate_monotone(
        self, values: tuple[float, ...], lower: float, upper: float, rng: np.random.Generator
    ) -> tuple[float, ...]:
        """Redraw each factor with probability p between its neighbours.

        A pass from the left can only lower factors that were equal, one from the right only raise them; the direction
        is drawn, so that neither has the upper hand.
        """
        changed = [min(max(value, lower), upper) for value in values]
        order = range(len(changed)) if rng.random() < 0.5 else range(len(changed) - 1, -1, -1)
        for i in order:
            if rng.random() < self.mutation_probability:
                low = changed[i - 1] if i > 0 else lower
                high = changed[i + 1] if i + 1 < len(changed) else upper
                changed[i] = self._draw(rng, low, high)
        return tuple(changed)

    def _mutate_wide_genes(self, genome: Genome, rng: np.random.Generator) -> Genome:
        p = self.mutation_probability
        if rng.random() < p:
            temperature = genome.attention_factor * math.exp(0.08 * rng.standard_normal())
            genome = replace(genome, attention_factor=max(self._snap(temperature), 0.5))
        if rng.random() < p:
            genome = self._move_critical_dimension(genome, int(rng.integers(-2, 3)))
        if rng.random() < p:
            genome = self._change_shape(genome, rng)
        if rng.random() < p:
            stretch = math.exp(0.15 * rng.standard_normal())
            right = tuple(self._snap(value * stretch) for value in genome.right)
            genome = replace(genome, right=right)
        return genome

    def _move_critical_dimension(self, genome: Genome, step: int) -> Genome:
        allowed = self.critical_dimensions
        c = min(max(genome.critical_dimension + step, allowed[0]), allowed[-1])
        moved = c - genome.critical_dimension
        right = genome.right[moved:] if moved > 0 else (genome.right[0],) * -moved + genome.right
        if genome.shape == "given":
            factors = genome.factors()
            return replace(genome, critical_dimension=c, right=right, left=factors[:c])
        return replace(genome, critical_dimension=c, right=right)

    def _change_shape(self, genome: Genome, rng: np.random.Generator) -> Genome:
        c = genome.critical_dimension
        if genome.shape == "ramp" and rng.random() < 0.5:
            start = int(min(max(genome.parameter + rng.integers(-3, 4), 0), c - 1))
            return replace(genome, parameter=float(start))
        if genome.shape == "power" and rng.random() < 0.5:
            exponent = genome.parameter * math.exp(0.3 * rng.standard_normal())
            return replace(genome, parameter=min(max(self._snap(exponent), 0.1), 10.0))
        shape: Shape = ("ntk", "ramp", "power")[int(rng.integers(3))]
        parameter = float(rng.integers(0, c)) if shape == "ramp" else 1.0
        if shape == "power":
            parameter = self._snap(math.exp(0.5 * rng.standard_normal()))
        return replace(genome, shape=shape, parameter=parameter, left=())

    def _with_free_left(self, genome: Genome) -> Genome:
        left = genome.factors()[: genome.critical_dimension]
        return replace(genome, shape="given", left=tuple(map(self._snap, left)))

    def _clipped_closed_form(self, name: str) -> Genome:
        lower, upper = self._bounds
        factors = rescale(name, self.spec, self.target_length).long
        right = tuple(min(max(self._snap(value), lower), upper) for value in factors)
        return Genome(critical_dimension=0, right=right, attention_factor=self.attention_factor, origin=name)

    def _draw(self, rng: np.random.Generator, low: float, high: float) -> float:
        """Uniform on the grid points of [low, high]; `low` itself where there is none."""
        first, last = math.ceil(low / self.grid - 1e-6), math.floor(high / self.grid + 1e-6)
        if last < first:
            return low
        drawn = self._snap(int(rng.integers(first, last + 1)) * self.grid)
        return min(max(drawn, low), high)  # a neighbour off the grid may lie a rounding error beside it

    def _snap(self, value: float) -> float:
        return round(round(value / self.grid) * self.grid, 10)


def default_attention_factor(method: str, spec: RopeSpec, target_length: int) -> float:
    """The temperature of each method: the paper names none, the first LongRoPE had its own."""
    if method == "longrope":
        return longrope_temperature(spec.extension_ratio(target_length), spec.original_length)
    return 1.0
