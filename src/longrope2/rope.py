"""RoPE theory in float64: frequencies, periods, coverage and critical dimensions (paper, section 2).

Dimensions are counted by the 0-based cosine index i = 0 … d/2−1, where d is the rotary dimension (which
partial rotary makes smaller than the head). The paper's prose counts from one.

Legend: θ_i = base^(−2i/d) is a frequency, T_i = 2π/θ_i its period, λ_i a rescaling factor (θ̂_i = θ_i/λ_i),
s = L/L_train the extension ratio, d_tcd the theoretical critical dimension: the first one whose period the
trained window does not complete.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

STANDSTILL = 2.0**64
"""The factor of a dimension that does not rotate, finite so that every engine can divide by it.

Within 16 million tokens, 2^24, its angle stays below 2^-40; a float32, which keeps 24 bits, has the same scores as
without rotation. Engines multiply it by base^(2i/d) in float32, which has room for bases up to 10^19.
"""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The rotary embedding a model was pretrained with: all the theory needs to know of a model."""

    rotary_dim: int
    """d: how many components of a head are rotated; always even."""
    theta: float
    """The base of the frequencies."""
    original_length: int
    """L_train: the window of pretraining, in tokens, before any rescaling."""

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and at least 2, got {self.rotary_dim}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"theta must be a finite number above 1, got {self.theta}")
        if self.original_length < 1:
            raise ValueError(f"original_length must be at least 1, got {self.original_length}")

    @property
    def num_dims(self) -> int:
        """d/2: the number of frequencies, and so of factors."""
        return self.rotary_dim // 2

    @cached_property
    def frequencies(self) -> tuple[float, ...]:
        """θ_i in radians per token."""
        return tuple(self.theta ** (-2 * i / self.rotary_dim) for i in range(self.num_dims))

    @cached_property
    def periods(self) -> tuple[float, ...]:
        """T_i in tokens (Eq. 6)."""
        return tuple(2 * math.pi / frequency for frequency in self.frequencies)

    @cached_property
    def coverage(self) -> tuple[float, ...]:
        """How many of its periods each dimension completes within the trained window."""
        return tuple(self.original_length / period for period in self.periods)

    def dimension_completing(self, rotations: float) -> float:
        """The (fractional) index whose period fits exactly `rotations` times into the trained window."""
        return self.num_dims * math.log(self.original_length / (2 * math.pi * rotations), self.theta)

    def first_dimension_below(self, rotations: float) -> int:
        """The first index that completes at most `rotations` periods; d/2 when all complete more."""
        return min(max(math.ceil(self.dimension_completing(rotations)), 0), self.num_dims)

    @property
    def critical_dimension(self) -> int:
        """d_tcd (Eq. 7, halved: we count cosine dimensions)."""
        return self.first_dimension_below(1)

    @property
    def ten_period_dimension(self) -> int:
        """d_tcd¹⁰ of Algorithm 1: where the search for the real critical dimension begins."""
        return self.first_dimension_below(10)

    @property
    def middle_dimension(self) -> int:
        """The middle of the searched range, a guess at d_rcd before any search.

        For Phi-3-mini and LLaMA-3-8B it is 25 and 30, the very dimensions that the paper's search found.
        """
        middle = math.ceil((self.ten_period_dimension + self.critical_dimension) / 2)
        return min(middle, self.num_dims - 1)

    def extension_ratio(self, target_length: float) -> float:
        """s = L/L_train; it may be fractional."""
        return target_length / self.original_length

    def first_unseen_position(
        self, target_length: int, factors: Sequence[float] | None = None
    ) -> tuple[int | None, ...]:
        """Per dimension, the first position below `target_length` whose angle training never reached.

        None where there is none: the dimension completes a period in training and so has seen every angle,
        or its factor keeps it inside the trained range (Eq. 9: λ_i ≥ L/L_train).
        """
        factors = factors if factors is not None else [1.0] * self.num_dims

        def first(i: int) -> int | None:
            position = math.ceil(self.original_length * factors[i] * (1 - 1e-12))
            return None if self.coverage[i] >= 1 or position >= target_length else position

        return tuple(first(i) for i in range(self.num_dims))
