"""What decides a search besides the model, and what of it is refused."""

import math
from dataclasses import dataclass, field
from typing import Literal

from longrope2.errors import LongRopeError, all_problems, out_of_range, unknown_choices
from longrope2.methods import rescale
from longrope2.needles import MOST_DOCUMENTS, depth_problems
from longrope2.perplexity import Objective
from longrope2.rope import RopeSpec
from longrope2.search.evolution import EvolutionConfig
from longrope2.search.space import Bounds

RANGES = {
    "documents": (1, MOST_DOCUMENTS),
    "held_out": (0, MOST_DOCUMENTS),
    "lower": (0.01, 1000.0),
    "upper": (0.01, 1000.0),
    "grid": (1e-6, 0.25),
    "attention_factor": (0.01, 100.0),
}
"""What may be searched: far more than is sensible, and nothing that overflows."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Bounds):
    """Everything that decides the result, besides the model; saved with every run."""

    documents: int = 10
    held_out: int = 0
    """Other documents, on which the winner and every closed form are scored at the end."""
    books: str | None = None
    """Where books come from; None means the package's held-out ones."""
    depth: float | tuple[float, ...] = 0.0
    """Where the needle stands: 0 is the start, as in the paper. Several are taken in turn, document by document."""
    objective: Objective = "needle"
    space: Literal["paper", "wide"] = "paper"
    attention_factor: float | None = None
    """None: 1 for longrope2, which names none; √(1 + ln s/ln L_train) for longrope."""
    compiled: bool = False
    """Fuse what stands between matrix products: for long searches on a GPU."""
    evolution: EvolutionConfig = field(default_factory=EvolutionConfig)

    def __post_init__(self) -> None:
        """One depth is one depth, however it was given: a journal is known by its settings."""
        if not isinstance(self.depth, int | float):
            object.__setattr__(self, "depth", self.depth[0] if len(self.depth) == 1 else tuple(self.depth))

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        found = self.evolution.problems() + unknown_choices(self) + out_of_range(self, **RANGES)
        depths = (self.depth,) if isinstance(self.depth, int | float) else self.depth
        found += depth_problems(depths, documents=self.documents, held_out=self.held_out)
        if not 0 < self.mutation_probability <= 1:
            found.append(f"mutation_probability must lie in (0, 1], got {self.mutation_probability}")
        if self.lower > self.upper:
            found.append(f"lower must not be above upper, got {self.lower} and {self.upper}")
        if self.method == "longrope" and (self.space, self.objective) != ("paper", "plain"):
            found.append("method longrope is defined with objective plain and space paper")
        if self.method == "longrope" and (self.lower, self.upper) != (SearchConfig.lower, SearchConfig.upper):
            found.append("method longrope has bounds of its own, 1 and 1.25 s; leave lower and upper out")
        if self.space == "wide" and self.dimensions == "all":
            found.append("space wide shapes the left side itself; dimensions all goes with space paper")
        return found


def check(config: SearchConfig, spec: RopeSpec) -> None:
    """Refuse what cannot be searched."""
    problems = config.problems()
    if spec.original_length <= 2 * math.pi:  # where NTK, and with it a first population, is not defined
        problems.append(f"the original length must be at least 7 tokens, got {spec.original_length}")
    if problems:
        raise LongRopeError(all_problems("search configuration", problems), hint="see `longrope2 search --help`")
    rescale("none", spec, config.target_length)  # refuses a target within the window
