"""The options of a search, and their limits."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from longrope2.errors import LongRopeError, all_problems
from longrope2.methods import longrope_temperature, rescale
from longrope2.needles import MOST_NEEDLES, depth_problems
from longrope2.options import Length, broken_limits, build, option, wrong_types
from longrope2.rope import RopeSpec

Temperature = Literal["released", "searched"]
"""`released`: √(1 + ln s/ln L_train), which the released longrope models are run with; `searched`: a gene."""
Mode = Literal["statistical", "exact", "off"]
SPREAD = (0.0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875)
"""Depths of the wide space's needles, in this order, so that a few needles are already spread."""
WIDE_DOCUMENTS = 6
"""Of eight needles each: one of them ranks candidates better than eight documents of one needle (LOG.md)."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a user may say about the space, whatever the model."""

    target_length: Length = option(help="Window to reach, e.g. 128k.", recipe=False)
    method: Literal["longrope2", "longrope"] = option(
        "longrope2", "longrope: the first version (all dimensions from 1 to 1.25 s, plain perplexity)."
    )
    dimensions: Literal["critical", "all"] = option("critical", "Search from d_rcd on, or every dimension.")
    lower: float = option(1.0, "Smallest right-hand factor, in extension ratios.", least=0.01, most=1000)
    upper: float = option(2.0, "Largest right-hand factor, in extension ratios.", least=0.01, most=1000)
    grid: float = option(0.01, "Step between factors.", least=1e-6, most=0.25)
    mutation_probability: float = option(0.3, "Probability that a mutation changes a factor.", above=0, most=1)


@dataclass(frozen=True, kw_only=True)
class EvolutionConfig:
    """The schedule. The paper's is 40 iterations of the algorithm `evolution` without racing."""

    algorithm: Literal["surrogate", "evolution"] = option(
        "surrogate", "surrogate: a model of the scores so far picks among many children; evolution: the paper's."
    )
    population: int = option(64, "Candidates in the first population.", least=1)
    iterations: int = option(8, "Rounds of mutation and crossover; the paper's search has 40.", least=0)
    parents: int = option(32, "Number of best candidates from which new ones are made.", least=1)
    mutations: int = option(4, "New candidates by mutation in each iteration.", least=0)
    crossovers: int = option(4, "New candidates by crossover in each iteration.", least=0)
    race: Mode = option("statistical", "When to stop scoring a candidate; off is the paper's schedule.")
    race_confidence: float = option(
        -0.5,
        "Standard errors granted to a candidate before it is stopped; more is safer but slower.",
        least=-1000,
        most=1000,
    )
    seed: int = option(0, "The same seed gives the same result.", least=0)


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Bounds):
    """Everything that decides the result, besides the model; saved with every run.

    What is None follows from the method and the space; `__post_init__` fills it in.
    """

    space: Literal["paper", "wide"] = option(
        "paper", "The paper's, or also temperature and left shape, starting from every closed form."
    )
    attention_factor: float | Temperature = option(
        None,
        "Temperature of long sequences: a number; released, √(1 + ln s/ln L), as the released models have it; or "
        "searched.",
        usual="1; searched in the wide space; released for --method longrope",
        metavar="A",
        least=0.01,
        most=100,
    )
    objective: Literal["needle", "plain"] = option(
        None, "Score the answer, or every token.", usual="needle; plain for --method longrope"
    )
    depth: float | tuple[float, ...] = option(
        None,
        "Position of the needle: 0 start, 1 end; documents take several depths in turn.",
        usual="0; 0 to 0.875 by eighths in the wide space",
    )
    keys: int = option(
        None,
        "Needles in each document, all asked for at its end; fewer where they would take more than half of it.",
        usual="1; 8 in the wide space",
        least=1,
        most=64,
    )
    documents: int = option(
        None, "Needle documents, a book each.", usual="10; 6 in the wide space", least=1, most=MOST_NEEDLES // 2
    )
    held_out: int = option(
        None,
        "Documents that the search does not see, to choose the winner.",
        usual="as many as --documents",
        least=0,
        most=MOST_NEEDLES // 2,
    )
    books: str | None = option(None, "Folder, file or hub dataset.", usual="the package's books", metavar="SOURCE")
    staged: bool = option(
        None,
        "Search at twice the window first, then at four times it, and so on.",
        usual="in the wide space",
    )
    evolution: EvolutionConfig = option(EvolutionConfig)
    compiled: bool = option(False, "Compile the model: for long searches on a GPU.", flag="--compile")
    tensor_parallel: int = option(1, "GPUs that share one copy of the model.", least=1, elastic=True)

    def __post_init__(self) -> None:
        """Fill in what is None, and make one depth one depth: a journal is known by its settings."""
        wide, longrope = self.space == "wide", self.method == "longrope"
        several = wide and self.objective != "plain"
        usual: dict[str, Any] = {
            "objective": "plain" if longrope else "needle",
            "attention_factor": "released" if longrope else "searched" if wide else 1.0,
            "depth": SPREAD if several else 0.0,
            "keys": len(SPREAD) if several else 1,
            "documents": WIDE_DOCUMENTS if several else 10,
            "staged": wide,
        }
        given = {name: value for name in usual if (value := getattr(self, name)) is not None}
        usual["held_out"] = {**usual, **given}["documents"]
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not isinstance(self.depth, int | float):
            object.__setattr__(self, "depth", self.depth[0] if len(self.depth) == 1 else tuple(self.depth))

    @property
    def depths(self) -> tuple[float, ...]:
        """Those that needles take in turn."""
        return (self.depth,) if isinstance(self.depth, int | float) else self.depth

    def kinds(self, keys: int) -> list[int]:
        """Which of a stage's documents are alike: those with needles at the same depths, `keys` in each."""
        return [number * keys % len(self.depths) for number in range(self.documents)]

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
        return self.attention_factor

    def problems(self) -> list[str]:
        """Problems with this configuration, one message each."""
        if wrong := wrong_types(self):
            return wrong
        found = broken_limits(self)
        # The default's first few are spread already; what a user names has to be tried.
        named = self.objective == "needle" and self.depths != SPREAD
        documents = {"documents": self.documents, "held_out": self.held_out} if named else {}
        found += depth_problems(self.depths, keys=self.keys, **documents)
        if (self.documents + self.held_out) * self.keys > MOST_NEEDLES:
            found.append(
                f"documents and held_out may have {MOST_NEEDLES:,} needles in all, got "
                f"{(self.documents + self.held_out) * self.keys:,}"
            )
        if self.keys > 1 and self.objective == "plain":
            found.append("objective plain scores texts without needles; keys goes with objective needle")
        if self.evolution.iterations and self.evolution.mutations + self.evolution.crossovers == 0:
            found.append("an iteration needs mutations or crossovers")
        if self.lower > self.upper:
            found.append(f"lower must not be above upper, got {self.lower} and {self.upper}")
        if self.method == "longrope" and (self.space, self.objective) != ("paper", "plain"):
            found.append("method longrope is defined with objective plain and space paper")
        if self.method == "longrope" and (self.lower, self.upper) != (Bounds.lower, Bounds.upper):
            found.append("method longrope has bounds of its own, 1 and 1.25 s; omit lower and upper")
        if self.method == "longrope" and self.staged:
            found.append("method longrope begins at closed forms of the target length; staged goes with the spaces")
        if self.method == "longrope" and self.attention_factor == "searched":
            found.append("method longrope has no temperature to search; give a number, or omit attention_factor")
        if self.space == "wide" and self.dimensions == "all":
            found.append("space wide shapes the left side itself; dimensions all goes with space paper")
        return found


def check(config: SearchConfig, spec: RopeSpec) -> None:
    """Refuse what cannot be searched."""
    found = config.problems()
    if spec.original_length <= 2 * math.pi:  # where NTK, and with it a first population, is not defined
        found.append(f"the original length must be at least 7 tokens, got {spec.original_length}")
    if found:
        raise LongRopeError(all_problems("search configuration", found), hint="see `longrope2 search --help`")
    rescale("none", spec, config.target_length)  # refuses a target within the window


def search_config(**options: Any) -> SearchConfig:
    """A configuration from options of the search and of its schedule, as command line and recipes give them."""
    return build(SearchConfig, "search options", options)
