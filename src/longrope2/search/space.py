"""What the search may try: genes, how they become factors, and how they change (Algorithms 1 and 2).

Legend: c is the critical dimension d_rcd an individual carries, λ_c its first right-hand factor, s the extension
ratio, "left" the dimensions below c and "right" those from c on. Right factors never fall, lie on a grid of 0.01
and within [s, 2s]; the left follows from them by a shape.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from longrope2.factors import RescaleFactors
from longrope2.methods import METHODS, ntk_below, rescale, yarn_temperature
from longrope2.rope import RopeSpec
from longrope2.search.config import Bounds

Shape = Literal["ntk", "ramp", "power", "given"]
STRETCHES = (0.005, 0.2)
"""Standard deviations of ln λ between which that of one move is drawn: some moves explore, some refine."""
TEMPERATURE_SCALE = 10.0
"""What makes a step of ln T as large as one of ln λ: both then predict the objective of SmolLM2 best (LOG.md)."""
FAR = 4.0
"""Factors of more than this many s are as good as any other of them."""
WARMEST = 2.0
"""The first temperatures lie between 1 and this many times YaRN's distance from 1."""


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
    """Where it comes from: a method's name, random, carried, mutation or crossover."""

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


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Bounds):
    """Bounds and moves. `paper` is exactly the paper's set; `wide` also searches temperature and left shape."""

    spec: RopeSpec
    kind: Literal["paper", "wide"] = "paper"
    attention_factor: float | None = 1.0
    """The temperature of all individuals; None where it is a gene."""
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

    def features(self, genome: Genome) -> list[float]:
        """Where an individual lies for a model of the objective: ln λ, and ln of the temperature on a like scale."""
        return [*map(math.log, genome.factors()), TEMPERATURE_SCALE * math.log(genome.attention_factor)]

    # The first population

    def closed_forms(self) -> list[Genome]:
        """Where a search starts besides what it draws: nowhere in the paper's space, in the wide one everywhere."""
        if self.method == "longrope":
            return [self._clipped_closed_form(name) for name in ("pi", "ntk", "yarn")]
        return [self.at_fixed_temperature(self.closed_form(name)) for name in METHODS] if self.kind == "wide" else []

    def draws(self, count: int, rng: np.random.Generator) -> list[Genome]:
        """Individuals of Algorithm 1, drawn again and again: one level from c on, NTK below.

        Every critical dimension has its turn, and the levels of each are spread evenly over the range. With fewer
        draws than dimensions, those are spread evenly.
        """
        if self.method == "longrope" or count < 1:
            return []
        dimensions = list(self.critical_dimensions)
        if count < len(dimensions):
            dimensions = [dimensions[round(place)] for place in np.linspace(0, len(dimensions) - 1, count)]
        rounds = math.ceil(count / len(dimensions))
        slices = {c: rng.permutation(rounds) for c in dimensions}
        lower, upper = self._bounds
        found = []
        for number in range(count):
            c = dimensions[number % len(dimensions)]
            part = (slices[c][number // len(dimensions)] + rng.random()) / rounds
            found.append(self._flat(c, self._onto_grid(lower + part * (upper - lower)), rng))
        return found

    def _flat(self, c: int, level: float, rng: np.random.Generator) -> Genome:
        genome = Genome(
            critical_dimension=c,
            right=(level,) * (self.spec.num_dims - c),
            attention_factor=self._first_temperature(rng),
        )
        if self.dimensions == "all":
            return self._with_free_left(genome)
        if self.kind == "wide" and rng.random() < 0.5:
            return replace(genome, shape="ramp", parameter=float(rng.integers(0, c)))
        return genome

    def _first_temperature(self, rng: np.random.Generator) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return self._snap(1 + WARMEST * rng.random() * (yarn_temperature(self.ratio) - 1))

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

    def at_fixed_temperature(self, genome: Genome) -> Genome:
        """An individual as this space holds it: with its own temperature only where temperatures are searched."""
        return genome if self.attention_factor is None else replace(genome, attention_factor=self.attention_factor)

    def carry(self, genome: Genome, ratio: float) -> Genome:
        """An individual found at another extension ratio, in units of this one: λ/s and (T - 1)/ln s stay."""
        growth, exponent = self.ratio / ratio, math.log(self.ratio) / math.log(ratio)
        temperature = self.attention_factor
        if temperature is None:
            temperature = self._snap(max(1 + (genome.attention_factor - 1) * exponent, 0.5))
        right = tuple(self._onto_grid(value * growth) for value in genome.right)
        # A dimension that hardly rotates has a factor whose power may overflow.
        left = tuple(min(min(value, FAR * ratio) ** exponent, right[0]) for value in genome.left)
        return replace(genome, right=right, left=left, attention_factor=temperature, origin="carried")

    # Moves

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """One move, or with a probability of a half two: redraw factors (Algorithm 2), stretch them, move c.

        The left is derived again. In the wide space, temperature and left shape move, too.
        """
        moves = [self._redraw, self._stretch]
        if self.method != "longrope":
            moves.append(self._shift)
        if self.attention_factor is None:
            moves.append(self._warm)
        if self.kind == "wide":
            moves.append(self._change_shape)
        for _ in range(1 + int(rng.random() < 0.5)):
            genome = moves[int(rng.integers(len(moves)))](genome, rng)
            # The right side may now begin lower than a given left side ends.
            genome = replace(genome, left=tuple(min(value, genome.right[0]) for value in genome.left))
        # A closed form has a temperature of its own.
        temperature = genome.attention_factor if self.attention_factor is None else self.attention_factor
        return replace(genome, attention_factor=temperature, origin="mutation")

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Right factors of two parents, mixed one by one or blended; critical dimension and shape of the first."""
        c = first.critical_dimension
        other = self._right_from(second, c)
        weight = rng.uniform(-0.25, 1.25)
        if rng.random() < 0.5:
            mixed = np.where(rng.random(len(other)) < 0.5, first.right, other)
            weight = round(weight)
        else:
            mixed = np.exp(weight * np.log(other) + (1 - weight) * np.log(first.right))
        right = self._monotone(mixed)
        left = first.left
        if self.dimensions == "all" and second.critical_dimension == c:
            picked = np.where(rng.random(c) < 0.5, first.left, second.left)
            left = tuple(float(value) for value in np.maximum.accumulate(picked))
        left = tuple(min(value, right[0]) for value in left)
        temperature = self.attention_factor
        if temperature is None:
            apart = second.attention_factor - first.attention_factor
            temperature = self._snap(max(first.attention_factor + weight * apart, 0.5))
        return replace(first, right=right, left=left, attention_factor=temperature, origin="crossover")

    def _redraw(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Algorithm 2: factors between their neighbours, each with the mutation probability."""
        right = self._mutate_monotone(genome.right, *self._bounds, rng)
        if self.dimensions == "all":
            left = tuple(min(value, right[0]) for value in genome.left)
            return replace(genome, right=right, left=self._mutate_monotone(left, 1.0, right[0], rng))
        return replace(genome, right=right)

    def _mutate_monotone(
        self, values: Sequence[float], lower: float, upper: float, rng: np.random.Generator
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

    def _stretch(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """All right factors by a common factor, or those from some dimension on, or those up to it.

        Redrawing moves a plateau only at its ends; this moves it as a whole, or a part of it.
        """
        narrow, wide = map(math.log, STRETCHES)
        growth = math.exp(rng.standard_normal() * math.exp(rng.uniform(narrow, wide)))
        right, place = np.array(genome.right), int(rng.integers(len(genome.right)))
        if rng.random() < 0.5:
            before = right[place - 1] if place else 0.0
            right[place:] = np.maximum(right[place:] * growth, before)
        else:
            right[: place + 1] *= growth
            if place + 1 < len(right):
                right[: place + 1] = np.minimum(right[: place + 1], right[place + 1])
        return replace(genome, right=self._monotone(right))

    def _shift(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Another critical dimension nearby, with the same factors from there on or the same slope below."""
        c = genome.critical_dimension
        allowed = self.critical_dimensions
        moved = min(max(c + int(rng.choice([-2, -1, 1, 2])), allowed[0]), allowed[-1])
        right = self._right_from(genome, moved)
        if genome.shape == "given":
            return replace(genome, critical_dimension=moved, right=right, left=genome.factors()[:moved])
        if rng.random() < 0.5:
            growth = genome.right[0] ** (moved / c) / right[0]
            right = self._monotone(np.array(right) * growth)
        return replace(genome, critical_dimension=moved, right=right)

    def _warm(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Another temperature nearby."""
        temperature = genome.attention_factor * math.exp(0.05 * rng.standard_normal())
        return replace(genome, attention_factor=max(self._snap(temperature), 0.5))

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

    @staticmethod
    def _right_from(genome: Genome, c: int) -> tuple[float, ...]:
        """Its factors from another critical dimension on; a longer right side begins as the shorter one did."""
        missing = genome.critical_dimension - c
        return (genome.right[0],) * missing + genome.right if missing > 0 else genome.right[-missing:]

    def _monotone(self, values: Any) -> tuple[float, ...]:
        """Non-decreasing values on the grid and within the bounds."""
        return tuple(self._onto_grid(float(value)) for value in np.maximum.accumulate(values))

    def _with_free_left(self, genome: Genome) -> Genome:
        left = genome.factors()[: genome.critical_dimension]
        return replace(genome, shape="given", left=tuple(map(self._snap, left)))

    def _clipped_closed_form(self, name: str) -> Genome:
        factors = rescale(name, self.spec, self.target_length).long
        right = tuple(map(self._onto_grid, factors))
        return Genome(critical_dimension=0, right=right, attention_factor=self.attention_factor or 1.0, origin=name)

    def _draw(self, rng: np.random.Generator, low: float, high: float) -> float:
        """Uniform on the grid points of [low, high]; `low` itself where there is none."""
        first, last = self._grid_points(low, high)
        if last < first:
            return low
        drawn = self._snap(int(rng.integers(first, last + 1)) * self.grid)
        return min(max(drawn, low), high)  # a neighbour off the grid may lie a rounding error beside it

    def _onto_grid(self, value: float) -> float:
        """The nearest grid point within the bounds; the lower bound itself where there is none."""
        lower, upper = self._bounds
        first, last = self._grid_points(lower, upper)
        return lower if last < first else self._snap(min(max(round(value / self.grid), first), last) * self.grid)

    def _grid_points(self, low: float, high: float) -> tuple[int, int]:
        return math.ceil(low / self.grid - 1e-6), math.floor(high / self.grid + 1e-6)

    def _snap(self, value: float) -> float:
        return round(round(value / self.grid) * self.grid, 10)
