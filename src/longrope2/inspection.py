"""A model's RoPE at a glance: periods, coverage, critical dimensions, and every method's factors."""

from dataclasses import dataclass
from pathlib import Path

from longrope2.console import terminal_width
from longrope2.errors import FactorsError
from longrope2.factors import RescaleFactors
from longrope2.methods import METHODS, rescale
from longrope2.models import ModelInfo
from longrope2.records import Table
from longrope2.rope import STANDSTILL

DEFAULT_RATIO = 16
"""The target that `inspect` assumes when none is named, in original windows (8k → 128k)."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything `longrope2 inspect` shows; lists have an entry for each dimension."""

    model: str
    family: str
    rotary_dim: int
    theta: float
    original_length: int
    window: int
    target_length: int
    extension_ratio: float
    critical_dimension: int
    ten_period_dimension: int
    default_real_critical_dimension: int
    num_layers: int
    full_attention_layers: int
    sliding_window: int | None
    rescaled_by: str | None
    remarks: tuple[str, ...]
    periods: tuple[float, ...]
    coverage: tuple[float, ...]
    """Periods that a dimension completes within the trained window."""
    first_unseen_position: tuple[int | None, ...]
    methods: dict[str, tuple[float, ...]]
    """Factors by method."""
    attention_factors: dict[str, float]
    given: tuple[str, int | None] | None = None
    """Under which name `methods` has factors of a file, and their critical dimension."""

    def table(self) -> Table:
        """One row per dimension."""
        # Methods that a narrow terminal cannot hold are in --json; the best known ones come first.
        room = (terminal_width() - 42) // 11
        known = {name: name not in METHODS or METHODS[name].well_known for name in self.methods}
        names = sorted(self.methods, key=lambda name: not known[name])[: max(room, 2)]
        marks = {self.ten_period_dimension: " ten", self.critical_dimension: " tcd"}  # tcd where they are the same
        rows = [
            [
                f"{i}{marks.get(i, '    ')}",
                f"{period:,.1f}",
                f"{self.coverage[i]:,.2f}",
                "-" if unseen is None else f"{unseen:,}",
                *("∞" if self.methods[name][i] >= STANDSTILL else f"{self.methods[name][i]:.3f}" for name in names),
            ]
            for i, (period, unseen) in enumerate(zip(self.periods, self.first_unseen_position, strict=True))
        ]
        columns = ["i", "period", "turns", "unseen", *names]
        caption = self._caption(len(self.methods) - len(names))
        return Table(title=self._headline(), columns=columns, rows=rows, caption=caption)

    def _headline(self) -> str:
        lines = [
            f"{self.model} ({self.family}): rotary dimension {self.rotary_dim}, theta {self.theta:,.0f}, "
            f"trained window {self.original_length:,} tokens",
            f"target {self.target_length:,} tokens, {self.extension_ratio:g}×; critical dimension "
            f"{self.critical_dimension} (tcd), search from {self.ten_period_dimension} (ten periods)",
        ]
        if self.rescaled_by:
            lines.append(f"already rescaled by {self.rescaled_by} to {self.window:,} tokens")
        if self.sliding_window:
            lines.append(
                f"{self.full_attention_layers} of {self.num_layers} layers see everything, "
                f"the others {self.sliding_window:,} tokens"
            )
        return "\n".join(lines)

    def _caption(self, hidden: int) -> str:
        caption = (
            "turns: how many periods a dimension completes within the trained window; "
            "unseen: first position whose angle training never reached; then λ by method "
            f"(-rcd at dimension {self.default_real_critical_dimension}; ∞: does not rotate)"
        )
        return caption + (f"; {hidden} more methods with --json" if hidden else "")


def inspect(info: ModelInfo, target_length: int | None = None, given: Path | None = None) -> Inspection:
    """What a model's config says about its RoPE, what every method would do to it, and what a file's factors do."""
    rope, reading = info.rope, info.reading
    factors: dict[str, RescaleFactors] = {}
    if given is not None:
        factors[given.name] = own = RescaleFactors.load(given)
        own.check_fits(rope)
        if target_length not in (None, own.target_length):
            raise FactorsError(f"{given}: made for {own.target_length:,} tokens", hint="omit --target-length")
        target_length = own.target_length
    target_length = target_length or DEFAULT_RATIO * rope.original_length
    factors |= {name: rescale(name, rope, target_length) for name in METHODS if name != "none"}
    return Inspection(
        model=info.name,
        family=reading.family,
        rotary_dim=rope.rotary_dim,
        theta=rope.theta,
        original_length=rope.original_length,
        window=reading.window,
        target_length=target_length,
        extension_ratio=rope.extension_ratio(target_length),
        critical_dimension=rope.critical_dimension,
        ten_period_dimension=rope.ten_period_dimension,
        default_real_critical_dimension=rope.middle_dimension,
        num_layers=reading.num_layers,
        full_attention_layers=reading.layer_types.count("full_attention"),
        sliding_window=reading.sliding_window,
        rescaled_by=reading.rescaled.method if reading.rescaled else None,
        remarks=reading.remarks,
        periods=tuple(rope.periods),
        coverage=tuple(rope.coverage),
        first_unseen_position=tuple(rope.first_unseen_position(target_length)),
        methods={name: value.long for name, value in factors.items()},
        attention_factors={name: value.long_attention_factor for name, value in factors.items()},
        given=(given.name, factors[given.name].critical_dimension) if given else None,
    )
