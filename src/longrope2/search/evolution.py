"""The evolutionary search: a population, its parents, their children, and who is scored on what."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from longrope2.search.config import EvolutionConfig
from longrope2.search.racing import Race, Scores, Task
from longrope2.search.space import Genome, SearchSpace
from longrope2.search.surrogate import Surrogate

ATTEMPTS = 200
"""Draws for a child that was not seen before; a small space may be exhausted."""
FINALISTS = 4
"""How many of the best are scored on every document at the end."""
DRAWN = 0.75
"""The share of a first population that is drawn; the rest are mutations of these."""
PROPOSALS = 10
"""Children proposed for each that the surrogate chooses."""


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

    scores: Scores
    genomes: dict[str, Genome]
    """Every candidate by key, in the order of their making."""
    history: list[Progress]

    @property
    def best(self) -> Genome:
        """The best of those scored on every document."""
        return self.history[-1].best

    def ranking(self) -> list[Genome]:
        """All candidates, best first; those scored on some documents alone by their estimates."""
        return [self.genomes[key] for key in self.scores.ranking()]

    def finalists(self) -> list[Genome]:
        """The best of those scored on every document."""
        complete = [key for key in self.scores.ranking() if self.scores.is_complete(key)]
        return [self.genomes[key] for key in complete[:FINALISTS]]


def evolve(
    space: SearchSpace,
    config: EvolutionConfig,
    num_documents: int,
    evaluate: Callable[[Sequence[tuple[Genome, int]]], Sequence[float]],
    *,
    kinds: Sequence[Hashable] = (),
    carried: Sequence[Genome] = (),
    stage: int = 0,
    generation: Callable[[int, Callable[[], list[Genome]]], list[Genome]] = lambda _, make: make(),
    report: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Search `space`; `evaluate` gives the NLL of each (genome, document index).

    `kinds` says which documents are alike (see Race). `carried` are in the first population, whatever its size.
    `generation` gets the number of an iteration and what makes its candidates; it may answer with those it knows. A
    pure function of its arguments otherwise: random draws depend on the seed, the stage and the iteration alone.
    """
    scores, history = Scores(num_documents), list[Progress]()
    genomes: dict[str, Genome] = {}
    race = Race(mode=config.race, num_parents=config.parents, confidence=config.race_confidence, kinds=kinds)

    def score(tasks: Sequence[Task]) -> Sequence[float]:
        return evaluate([(genomes[key], document) for key, document in tasks])

    for iteration in range(config.iterations + 1):
        # Two streams, since candidates that are known are not made again.
        making, ordering = (np.random.default_rng([config.seed, stage, iteration, part]) for part in range(2))

        def make(first: bool = iteration == 0, rng: np.random.Generator = making) -> list[Genome]:
            if first:
                # With some known to be good, fewer have to be drawn.
                size = config.population // 2 if carried else config.population
                return first_population(space, size, rng, carried)
            return children(space, config, genomes, scores, rng)

        fresh = {genome.key(): genome for genome in generation(iteration, make)}
        fresh = {key: genome for key, genome in fresh.items() if key not in genomes}
        genomes.update(fresh)
        # Another order each time: it decides between documents that separate candidates equally well.
        order = [int(document) for document in ordering.permutation(num_documents)]
        race.run(list(fresh), scores, order, score)
        # However they raced: who leads is scored on every document, and in the end all finalists are.
        leaders = scores.ranking()[: FINALISTS if iteration == config.iterations else 1]
        tasks = [(key, d) for key in leaders for d in range(num_documents) if d not in scores.table[key]]
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
    return Outcome(scores=scores, genomes=genomes, history=history)


def first_population(
    space: SearchSpace, size: int, rng: np.random.Generator, carried: Sequence[Genome] = ()
) -> list[Genome]:
    """Algorithm 1: sample and mutate until the population is full.

    Closed forms and carried individuals stay, whatever the size: the search may never end below them.
    """
    population = {genome.key(): genome for genome in (*space.closed_forms(), *carried)}
    room = max(size - len(population), 0)
    drawn = min(max(round(DRAWN * room), len(space.critical_dimensions)), room)
    for genome in space.draws(drawn if population or drawn else 1, rng):
        population.setdefault(genome.key(), genome)
    for _ in range(ATTEMPTS * size):
        if len(population) >= size:
            break
        seeds = list(population.values())
        child = space.mutate(seeds[int(rng.integers(len(seeds)))], rng)
        population.setdefault(child.key(), child)
    return list(population.values())


def children(
    space: SearchSpace,
    config: EvolutionConfig,
    genomes: dict[str, Genome],
    scores: Scores,
    rng: np.random.Generator,
) -> list[Genome]:
    """New individuals of one iteration; none that was seen before."""
    parents = [genomes[key] for key in scores.ranking()[: config.parents]]
    guided = config.algorithm == "surrogate"
    found: dict[str, Genome] = {}

    def pick() -> Genome:
        return parents[int(rng.integers(len(parents)))]

    makers: list[tuple[int, Callable[[], Genome]]] = [
        (config.mutations, lambda: space.mutate(pick(), rng)),
        (config.crossovers, lambda: space.cross(pick(), pick(), rng)),
    ]
    for count, make in makers:
        wanted = len(found) + count * (PROPOSALS if guided else 1)
        for _ in range(ATTEMPTS * count):
            if len(found) == wanted:
                break
            child = make()
            if child.key() not in genomes:
                found.setdefault(child.key(), child)
    proposed = list(found.values())
    return _promising(space, config, genomes, scores, proposed, rng) if guided and proposed else proposed


def _promising(
    space: SearchSpace,
    config: EvolutionConfig,
    genomes: dict[str, Genome],
    scores: Scores,
    proposed: Sequence[Genome],
    rng: np.random.Generator,
) -> list[Genome]:
    """Of many proposed children the ones that may be best, by a model of the scores so far.

    How much doubt counts in favour of a child is drawn for each choice, so that some refine and some explore.
    """
    estimates = scores.estimates()
    surrogate = Surrogate(
        [space.features(genomes[key]) for key in estimates],
        list(estimates.values()),
        [len(scores.table[key]) for key in estimates],
    )
    expected, doubt = surrogate.predict([space.features(genome) for genome in proposed])
    chosen: list[Genome] = []
    left = np.ones(len(proposed), dtype=bool)
    for _ in range(min(config.mutations + config.crossovers, len(proposed))):
        bound = expected - abs(rng.standard_normal()) * doubt
        best = int(np.argmin(np.where(left, bound, np.inf)))
        left[best] = False
        chosen.append(proposed[best])
    return chosen
