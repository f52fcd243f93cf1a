"""Search algorithms on landscapes whose optimum is known, and on one recorded from SmolLM2, at equal evaluations.

    python benchmarks/search_algorithms.py

No model is run. The synthetic landscapes are needle losses that grow with the squared distance from an optimum in the
paper's space, as steep as SmolLM2's at 16k; the recorded one is a forest of regression trees over all that five
searches of the wide space have scored at 32k (results/search/smollm2/recorded-32k.json).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from longrope2.rope import RopeSpec
from longrope2.search.config import EvolutionConfig
from longrope2.search.evolution import evolve
from longrope2.search.space import Genome, SearchSpace

SMOLLM2 = RopeSpec(rotary_dim=64, theta=1e5, original_length=8192)
TOKENS = 7
"""Digits of an answer."""
NOISE = 0.6
"""With which the difference between two candidates varies from document to document as it does on SmolLM2 at 16k: by
0.7 of its mean (0.63 to 0.72 for the cells of results/smollm2/hypothesis-*-16384.json near the best one)."""
SCATTER = 0.1
"""How far, in ln λ, the optimum of single documents lies from that of all (one standard deviation): at 16k, two and
three of ten documents prefer dimension 21 and 22 to the best one of all, which is 20."""
RECORDED = Path(__file__).parent.parent / "results" / "search" / "smollm2" / "recorded-32k.json"


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """Where a landscape is lowest."""

    length: int
    critical_dimension: int
    level: float
    """λ_c/s …"""
    rise: float = 0.0
    """… and how much of it the factors rise by up to the last dimension."""

    def factors(self) -> np.ndarray:
        """λ for every dimension."""
        c, s = self.critical_dimension, self.length / SMOLLM2.original_length
        steps = np.linspace(0, 1, SMOLLM2.num_dims - c)
        right = np.round(np.minimum(self.level * s * (1 + self.rise * steps), 2 * s), 2)
        return np.concatenate([right[0] ** (np.arange(c) / c), right])


OPTIMA = {
    "16k, 20, 1.5": Optimum(length=16_384, critical_dimension=20, level=1.5),
    "32k, 18, 1.3, rising": Optimum(length=32_768, critical_dimension=18, level=1.3, rise=0.15),
    "32k, 16, 1.9": Optimum(length=32_768, critical_dimension=16, level=1.9),
    "64k, 20, 1.25, rising": Optimum(length=65_536, critical_dimension=20, level=1.25, rise=0.4),
    "128k, 18, 1.6, rising": Optimum(length=131_072, critical_dimension=18, level=1.6, rise=0.1),
}


class Landscape:
    """Needle losses with a known optimum.

    The dimensions around the critical ones weigh most, and too small a factor is worse than too large a one. With
    `noise`, documents tell candidates apart more or less, and weigh dimensions differently; with `scatter`, each has an
    optimum of its own.
    """

    FLOOR, STEEPNESS = 0.5, 1.5  # nats per digit at the optimum; nats per squared log

    def __init__(
        self, optimum: Optimum, *, documents: int = 1, noise: float = 0.0, scatter: float = 0.0, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.optimum, self.documents, self.calls = optimum, documents, 0
        self.space = SearchSpace(spec=SMOLLM2, target_length=optimum.length)
        self._best = np.log(optimum.factors())
        weights = np.exp(-0.5 * ((np.arange(SMOLLM2.num_dims) - 19) / 5) ** 2) + 0.1
        spread = rng.standard_normal((documents, 1)) + rng.standard_normal((documents, SMOLLM2.num_dims))
        self._weights = self.STEEPNESS * weights * np.exp(noise * spread - noise**2)
        self._floors = self.FLOOR * np.exp(noise * rng.standard_normal(documents))
        # As a stretch: dimensions in proportion to their factors.
        self._shifts = scatter * rng.standard_normal((documents, 1)) * self._best / self._best.max()

    def losses(self, factors: Sequence[float]) -> np.ndarray:
        """Nats per digit on each document."""
        apart = np.log(factors) - self._best - self._shifts
        return self._floors + (self._weights * np.where(apart < 0, 1.5 * apart, apart) ** 2).sum(axis=1)

    def mean(self, genome: Genome) -> float:
        """Nats per digit over all documents."""
        return float(self.losses(genome.factors()).mean())

    def __call__(self, tasks: Sequence[tuple[Genome, int]]) -> list[float]:
        """What `evolve` asks for."""
        self.calls += len(tasks)
        return [float(TOKENS * self.losses(genome.factors())[document]) for genome, document in tasks]

    def regret(self, factors: Sequence[float]) -> float:
        """How much larger perplexity is than at the optimum."""
        return math.expm1(self.losses(factors).mean() - self.losses(np.exp(self._best)).mean())


class FirstRelease(SearchSpace):
    """How the first release searched the paper's space: one level for each dimension, and moves that keep plateaus."""

    def draws(self, count: int, rng: np.random.Generator) -> list[Genome]:
        """One for each critical dimension."""
        return super().draws(min(count, len(self.critical_dimensions)), rng)

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Factors between their neighbours."""
        return replace(self._redraw(genome, rng), origin="mutation")

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Each factor from either parent."""
        other = self._right_from(second, first.critical_dimension)
        picked = np.where(rng.random(len(other)) < 0.5, first.right, other)
        return replace(first, right=self._monotone(picked), origin="crossover")


Search = Callable[[SearchSpace, Callable[[Genome], float], int], Genome]
SCHEDULE = {"population": 64, "iterations": 12, "parents": 32, "mutations": 16, "crossovers": 16, "race": "off"}
BUDGET = 64 + 12 * 32


def evolved(algorithm: str, make: Callable[..., SearchSpace] | None = None) -> Search:
    """`longrope2 search` without a model."""

    def run(space: SearchSpace, loss: Callable[[Genome], float], seed: int) -> Genome:
        space = make(**space.__dict__) if make else space
        config = EvolutionConfig(**{**SCHEDULE, "algorithm": algorithm, "seed": seed})
        return evolve(space, config, 1, lambda tasks: [loss(genome) for genome, _ in tasks]).best

    return run


def cma_es(space: SearchSpace, loss: Callable[[Genome], float], seed: int) -> Genome:
    """CMA-ES (the package `cmaes`) over c, the first level and non-negative increments; the same first draws.

    In the wide space also over the exponent of the left side and the temperature.
    """
    from cmaes import CMA

    rng = np.random.default_rng([seed, 1])
    dimensions, wide = space.critical_dimensions, space.kind == "wide"
    extra = 2 if wide else 0
    increments = space.spec.num_dims - 1 - dimensions[0]
    middle, reach = (dimensions[0] + dimensions[-1]) / 2, (dimensions[-1] - dimensions[0]) / 2

    def genome(x: np.ndarray) -> Genome:
        c = int(np.clip(round(middle + reach * x[0]), dimensions[0], dimensions[-1]))
        rises = 0.05 * np.maximum(x[2 : 2 + increments], 0)[c - dimensions[0] :]
        logs = math.log(space.ratio) + math.log(2) * np.clip(x[1], 0, 1) + np.concatenate([[0], np.cumsum(rises)])
        shape = (
            {"shape": "power", "parameter": math.exp(x[-2]), "attention_factor": 1 + 0.1 * abs(x[-1])} if wide else {}
        )
        return Genome(critical_dimension=c, right=space._monotone(np.exp(logs)), **shape)

    found: list[tuple[float, np.ndarray]] = []

    def tell(x: np.ndarray) -> float:
        outside = np.minimum(x[2 : 2 + increments], 0) ** 2
        value = loss(genome(x))
        found.append((value, x))
        return value + 0.005 * float(outside.sum() + max(x[1] - 1, 0) ** 2 + min(x[1], 0) ** 2)

    for _ in range(SCHEDULE["population"]):
        tell(np.concatenate([[rng.uniform(-1, 1), rng.uniform(0, 1)], np.zeros(increments), rng.uniform(0, 2, extra)]))
    start = min(found, key=lambda entry: entry[0])[1]
    optimiser = CMA(mean=start, sigma=0.1, population_size=16, seed=seed)
    while len(found) < BUDGET:
        optimiser.tell([(x, tell(x)) for x in (optimiser.ask() for _ in range(16))])
    return genome(min(found, key=lambda entry: entry[0])[1])


ALGORITHMS: dict[str, Search] = {
    "first release": evolved("evolution", FirstRelease),
    "evolution": evolved("evolution"),
    "surrogate": evolved("surrogate"),
    "CMA-ES": cma_es,
}


def synthetic(search: Search, seeds: int) -> dict[str, Any]:
    """Regret and critical dimensions found, by landscape."""
    found = {}
    for name, optimum in OPTIMA.items():
        landscape = Landscape(optimum)
        best = [search(landscape.space, landscape.mean, seed) for seed in range(seeds)]
        regrets = [landscape.regret(genome.factors()) for genome in best]
        off = [abs(genome.critical_dimension - optimum.critical_dimension) for genome in best]
        found[name] = {
            "median_regret": median(regrets),
            "largest_regret": max(regrets),
            "within_one": fmean(distance <= 1 for distance in off),
        }
    return found


def noisy(search: Search, seeds: int, documents: int = 10) -> dict[str, Any]:
    """Regret on a thousand documents after searching on a few, which disagree on where the optimum is.

    A few documents do not determine the optimum of all, so that even the best search has a regret here.
    """
    found = {}
    for name, optimum in OPTIMA.items():
        truth, best = _truth(name)
        regrets = []
        for seed in range(seeds):
            few = Landscape(optimum, documents=documents, noise=NOISE, scatter=SCATTER, seed=seed)
            genome = search(few.space, few.mean, seed)
            regrets.append(math.expm1(truth.mean(genome) - best))
        found[name] = {"median_regret": median(regrets), "largest_regret": max(regrets)}
    return found


@cache
def _truth(name: str) -> tuple[Landscape, float]:
    """A thousand documents, and the least loss on them: too small a factor is worse, so it lies above the optimum."""
    truth = Landscape(OPTIMA[name], documents=1000, noise=NOISE, scatter=SCATTER, seed=999)
    return truth, min(truth.mean(evolved("surrogate")(truth.space, truth.mean, seed)) for seed in range(3))


def racing(seeds: int, iterations: int = 12) -> dict[str, Any]:
    """The default search on ten documents as noisy as SmolLM2's: regret, and evaluations it did without."""
    found = {}
    for name, optimum in OPTIMA.items():
        regrets, saved = [], []
        for seed in range(seeds):
            landscape = Landscape(optimum, documents=10, noise=NOISE, seed=seed)
            config = EvolutionConfig(iterations=iterations, seed=seed)
            outcome = evolve(landscape.space, config, 10, landscape)
            regrets.append(landscape.regret(outcome.best.factors()))
            saved.append(outcome.history[-1].exhaustive_evaluations / landscape.calls)
        found[name] = {"median_regret": median(regrets), "times_fewer_evaluations": fmean(saved)}
    return found


def recorded_losses() -> tuple[SearchSpace, Callable[[Genome], float]]:
    """The mean loss over depths of SmolLM2 at 32k as trees predict it, and the space it is of."""
    from sklearn.ensemble import ExtraTreesRegressor

    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    space = SearchSpace(spec=SMOLLM2, target_length=content["length"], kind="wide", attention_factor=None)
    kinds = len(content["depths"])
    rows = [
        (
            [*np.log(row["factors"]), 10 * math.log(row["temperature"])],
            math.log(max(nll, 0.02)),
            row["search"],
            int(place),
        )
        for row in content["rows"]
        for place, nll in row["nll"].items()
    ]
    forests = []
    for kind in range(kinds):
        part = [row for row in rows if row[3] % kinds == kind]
        documents = {key: fmean(row[1] for row in part if row[2:] == key) for key in {row[2:] for row in part}}
        level = fmean(documents.values())
        forest = ExtraTreesRegressor(n_estimators=100, min_samples_leaf=2, random_state=0)
        # Some documents are harder than others, for all candidates.
        forests.append(forest.fit([row[0] for row in part], [row[1] - documents[row[2:]] + level for row in part]))

    def loss(genome: Genome) -> float:
        features = [space.features(genome)]
        return fmean(math.exp(forest.predict(features)[0]) for forest in forests)

    return space, loss


def recorded(search: Search, seeds: int) -> dict[str, float]:
    """The loss found on the landscape of SmolLM2."""
    space, loss = recorded_losses()
    found = [loss(search(space, loss, seed)) for seed in range(seeds)]
    return {"median_loss": median(found), "largest_loss": max(found), "smallest_loss": min(found)}


def main() -> None:
    from common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--recorded-seeds", type=int, default=6)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, search in ALGORITHMS.items():
        results[name] = {"synthetic": synthetic(search, options.seeds), "noisy": noisy(search, options.seeds)}
        if name != "first release":
            results[name]["recorded"] = recorded(search, options.recorded_seeds)
        worst = max(entry["median_regret"] for entry in results[name]["synthetic"].values())
        within = fmean(entry["within_one"] for entry in results[name]["synthetic"].values())
        print(f"{name}: median regret up to {worst:.3%}, dimension within 1 in {within:.0%}", results[name], flush=True)
    regret = {
        name: fmean(entry["median_regret"] for entry in found["synthetic"].values()) for name, found in results.items()
    }
    report(
        options,
        name="search-algorithms",
        value=regret["surrogate"],
        unit="median regret in perplexity, mean of five landscapes",
        peer="CMA-ES of the package cmaes, the same number of evaluations",
        peer_value=regret["CMA-ES"],
        evaluations=BUDGET,
        seeds=options.seeds,
        algorithms=results,
        racing=racing(options.seeds),
        racing_eight_iterations=racing(options.seeds, iterations=8),
        documents={count: noisy(ALGORITHMS["surrogate"], options.seeds, count) for count in (10, 20, 40)},
    )


if __name__ == "__main__":
    main()
