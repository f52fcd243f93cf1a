"""What decides a search besides the model, and what of it is refused."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from longrope2.errors import LongRopeError, all_problems, out_of_range, unknown_choices
from longrope2.methods import longrope_temperature, rescale
from longrope2.needles import MOST_DOCUMENTS, depth_problems
from longrope2.perplexity import Objective
from longrope2.rope import RopeSpec
from longrope2.search.evolution import EvolutionConfig
from longrope2.search.space import Bounds

Temperature = Literal["released", "searched"]
"""`released`: √(1 + ln s/ln L_train), which the released longrope models are run with; `searched`: a gene."""
SPREAD = (0.0, 0.5, 0.25, 0.75)
"""Depths of the wide space's needles, in this order, so that a few documents are already spread."""
RANGES = {
    "documents": (1, MOST_DOCUMENTS // 2),
    "held_out": (0, MOST_DOCUMENTS // 2),
    "lower": (0.01, 1000.0),
    "upper": (0.01, 1000.0),
    "grid": (1e-6, 0.25),
}
"""What may be searched: far more than is sensible, and nothing that overflows."""
ATTENTION_FACTORS = (0.01, 100.0)


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Bounds):
    """Everything that decides the result, besides the model; saved with every run.

    What is None follows from the method and the space; `__post_init__` fills it in.
    """

    documents: int = 10
    held_out: int | None = None
    """Other documents, on which the winner is chosen and compared with every closed form; None: as many as searched."""
    books: str | None = None
    """Where books come from; None means the package's held-out ones."""
    depth: float | tuple[float, ...] | None = None
    """Where the needle stands: 0 is the start. Several are taken in turn, document by document. None: 0, as in the
    paper; spread over the document in the wide space."""
    objective: Objective | None = None
    """None: needle; plain for longrope, which is defined so."""
    space: Literal["paper", "wide"] = "paper"
    attention_factor: float | Temperature | None = None
    """None: 1 in the paper's space, which names none; searched in the wide one; released for longrope."""
    staged: bool | None = None
    """Search at twice the window first, and carry what was found from length to length, doubling up to the target.
    None: in the wide space."""
    compiled: bool = False
    """Fuse what stands between matrix products: for long searches on a GPU."""
    evolution: EvolutionConfig = field(default_factory=EvolutionConfig)

    def __post_init__(self) -> None:
        """Fill in what is None, and make one depth one depth: a journal is known by its settings."""
        wide, longrope = self.space == "wide", self.method == "longrope"
        depths = SPREAD[: max(self.documents, 1)] if wide else 0.0
        usual = {
            "held_out": self.documents,
            "depth": depths[0] if isinstance(depths, tuple) and len(depths) == 1 else depths,
            "objective": "plain" if longrope else "needle",
            "attention_factor": "released" if longrope else "searched" if wide else 1.0,
            "staged": wide,
        }
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not isinstance(self.depth, int | float):
            assert self.depth is not None
            object.__setattr__(self, "depth", self.depth[0] if len(self.depth) == 1 else tuple(self.depth))

    @property
    def depths(self) -> tuple[float, ...]:
        """Those that documents take in turn."""
        assert self.depth is not None
        return (self.depth,) if isinstance(self.depth, int | float) else self.depth

    @property
    def kinds(self) -> list[int]:
        """Which of a stage's documents are alike: those with the needle at the same depth; without needles all are."""
        return [0 if self.objective == "plain" else number % len(self.depths) for number in range(self.documents)]

    def stages(self, spec: RopeSpec) -> list[int]:
        """The lengths to search at, one after another; the target is the last."""
        lengths = [self.target_length]
        while self.staged and lengths[0] >= 4 * spec.original_length:
            lengths.insert(0, lengths[0] // 2)
        return lengths

    def temperature(self, spec: RopeSpec, length: int) -> float | None:
        """The attention factor of all candidates at a length; None where it is searched."""
        if self.attention_factor == "searched":
            return None
        if self.attention_factor == "released":
            return longrope_temperature(spec.extension_ratio(length), spec.original_length)
        assert isinstance(self.attention_factor, int | float)
        return self.attention_factor

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        found = self.evolution.problems() + unknown_choices(self) + out_of_range(self, **RANGES)
        found += self._temperature_problems()
        assert self.held_out is not None
        counts = {} if self.objective == "plain" else {"documents": self.documents, "held_out": self.held_out}
        found += depth_problems(self.depths, **counts)
        if not 0 < self.mutation_probability <= 1:
            found.append(f"mutation_probability must lie in (0, 1], got {self.mutation_probability}")
        if self.lower > self.upper:
            found.append(f"lower must not be above upper, got {self.lower} and {self.upper}")
        if self.method == "longrope" and (self.space, self.objective) != ("paper", "plain"):
            found.append("method longrope is defined with objective plain and space paper")
        if self.method == "longrope" and (self.lower, self.upper) != (SearchConfig.lower, SearchConfig.upper):
            found.append("method longrope has bounds of its own, 1 and 1.25 s; leave lower and upper out")
        if self.method == "longrope" and self.staged:
            found.append("method longrope begins at closed forms of the target length; staged goes with the spaces")
        if self.method == "longrope" and self.attention_factor == "searched":
            found.append("method longrope has no temperature to search; give a number, or leave attention_factor out")
        if self.space == "wide" and self.dimensions == "all":
            found.append("space wide shapes the left side itself; dimensions all goes with space paper")
        return found

    def _temperature_problems(self) -> list[str]:
        low, high = ATTENTION_FACTORS
        value = self.attention_factor
        if value in ("released", "searched") or (isinstance(value, int | float) and low <= value <= high):
            return []
        return [f"attention_factor must lie from {low:g} to {high:g}, or be 'released' or 'searched', got {value}"]


def check(config: SearchConfig, spec: RopeSpec) -> None:
    """Refuse what cannot be searched."""
    problems = config.problems()
    if spec.original_length <= 2 * math.pi:  # where NTK, and with it a first population, is not defined
        problems.append(f"the original length must be at least 7 tokens, got {spec.original_length}")
    if problems:
        raise LongRopeError(all_problems("search configuration", problems), hint="see `longrope2 search --help`")
    rescale("none", spec, config.target_length)  # refuses a target within the window


def search_config(**options: Any) -> SearchConfig:
    """A configuration from options of the search and of its schedule, as command line and recipes give them."""
    schedule = {f.name: options.pop(f.name) for f in fields(EvolutionConfig) if f.name in options}
    return SearchConfig(evolution=EvolutionConfig(**schedule), **options)
