"""The evolutionary search: a population, its parents, their children, and who is scored on what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longrope2.errors import below_minimum, out_of_range, unknown_choices
from longrope2.methods import METHODS
from longrope2.search.journal import Journal
from longrope2.search.racing import Mode, Race, Scores, Task
from longrope2.search.space import Genome, SearchSpace

ATTEMPTS = 200
"""Draws for a child that was not seen before; a small space may be exhausted."""
FINALISTS = 4
"""How many of the best are scored on every document at the end, however they raced; so are closed forms."""


@dataclass(frozen=True, kw_only=True)
class EvolutionConfig:
    """The schedule; the defaults are the paper's."""

    population: int = 64
    iterations: int = 40
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    race: Mode = "statistical"
    race_confidence: float = 1.0
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        found = below_minimum(self, population=1, iterations=0, parents=1, mutations=0, crossovers=0, seed=0)
        if self.iterations and self.mutations + self.crossovers == 0:
            found.append("an iteration needs mutations or crossovers")
        return found + unknown_choices(self) + out_of_range(self, race_confidence=(0.0, 1000.0))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a search stands after an iteration; iteration 0 is the first population."""

    iteration: int
    best: Genome
    best_nll: float
    """Sum of NLL over all documents."""
    evaluations: int
    """Document evaluations so far."""
    exhaustive_evaluations: int
    """What the same candidates would have cost without racing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search found."""

    best: Genome
    scores: Scores
    genomes: dict[str, Genome]
    """Every candidate by key, in the order of their making."""
    history: list[Progress]


def evolve(
    space: SearchSpace,
    config: EvolutionConfig,
    num_documents: int,
    evaluate: Callable[[Sequence[tuple[Genome, int]]], Sequence[float]],
    *,
    journal: Journal | None = None,
    report: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Search `space`; `evaluate` gives the NLL of each (genome, document index).

    A pure function of its arguments: random draws depend on the seed and the iteration alone, so running it again
    with a journal of answers goes the same way.
    """
    scores, history = Scores(num_documents), list[Progress]()
    genomes: dict[str, Genome] = {}
    race = Race(mode=config.race, num_parents=config.parents, confidence=config.race_confidence)

    def score(tasks: Sequence[Task]) -> Sequence[float]:
        return evaluate([(genomes[key], document) for key, document in tasks])

    def settle(candidates: list[Genome], iteration: int, rng: np.random.Generator) -> None:
        fresh = []
        for genome in candidates:
            key = genome.key()
            if key not in genomes:
                genomes[key] = genome
                fresh.append(key)
                if journal is not None:
                    journal.note("candidate", key, iteration=iteration, genome=genome.to_json())
        # Another order each time: it decides between documents that tell candidates apart equally well.
        order = [int(document) for document in rng.permutation(num_documents)]
        race.run(fresh, scores, order, score)
        if iteration == config.iterations:
            closed_forms = [key for key, genome in genomes.items() if genome.origin in METHODS]
            finalists = dict.fromkeys(scores.ranking()[:FINALISTS] + closed_forms)
            tasks = [(key, d) for key in finalists for d in range(num_documents) if d not in scores.table[key]]
            for (key, document), nll in zip(tasks, score(tasks), strict=True):
                scores.add(key, document, nll)
        best = scores.best()
        assert best is not None
        history.append(
            Progress(
                iteration=iteration,
                best=genomes[best],
                best_nll=scores.total(best),
                evaluations=sum(len(documents) for documents in scores.table.values()),
                exhaustive_evaluations=len(genomes) * num_documents,
            )
        )
        report(history[-1])

    rng = np.random.default_rng([config.seed, 0])
    settle(first_population(space, config.population, rng), 0, rng)
    for iteration in range(1, config.iterations + 1):
        rng = np.random.default_rng([config.seed, iteration])
        parents = [genomes[key] for key in scores.ranking()[: config.parents]]
        settle(children(space, config, parents, set(genomes), rng), iteration, rng)
    return Outcome(best=history[-1].best, scores=scores, genomes=genomes, history=history)


def first_population(space: SearchSpace, size: int, rng: np.random.Generator) -> list[Genome]:
    """Algorithm 1: the seeds, then mutations of them until the population is full."""
    seeds = list(space.seeds(rng))
    unique: dict[str, Genome] = {}
    for genome in seeds:
        unique.setdefault(genome.key(), genome)
    # Closed forms stand first and stay, whatever the size: the search may never end below them.
    population = [genome for genome in unique.values() if genome.origin != "random"]
    drawn = [genome for genome in unique.values() if genome.origin == "random"]
    # Without room for all, some from the whole range: in the paper's space no other critical dimension comes later.
    room = min(max(size - len(population), 1), len(drawn))
    population += [drawn[round(place)] for place in np.linspace(0, len(drawn) - 1, room)]
    seen = {genome.key() for genome in population}
    for _ in range(ATTEMPTS * size):
        if len(population) >= size:
            break
        child = space.mutate(seeds[int(rng.integers(len(seeds)))], rng)
        if child.key() not in seen:
            seen.add(child.key())
            population.append(child)
    return population


def children(
    space: SearchSpace,
    config: EvolutionConfig,
    parents: Sequence[Genome],
    seen: set[str],
    rng: np.random.Generator,
) -> list[Genome]:
    """New individuals of one iteration; none that was seen before."""
    found: list[Genome] = []

    def pick() -> Genome:
        return parents[int(rng.integers(len(parents)))]

    makers: list[tuple[int, Callable[[], Any]]] = [
        (config.mutations, lambda: space.mutate(pick(), rng)),
        (config.crossovers, lambda: space.cross(pick(), pick(), rng)),
    ]
    for count, make in makers:
        made = 0
        for _ in range(ATTEMPTS * count):
            if made == count:
                break
            child = make()
            if child.key() not in seen:
                seen.add(child.key())
                found.append(child)
                made += 1
    return found
