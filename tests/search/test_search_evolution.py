"""The evolution on synthetic objectives, whose optimum and cost are known without a model."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrope2.methods import METHODS, rescale
from longrope2.options import broken_limits
from longrope2.rope import RopeSpec
from longrope2.search.config import EvolutionConfig, SearchConfig
from longrope2.search.evolution import FINALISTS, children, evolve, first_population
from longrope2.search.racing import Scores
from longrope2.search.space import SearchSpace

LLAMA3 = RopeSpec(rotary_dim=128, theta=5e5, original_length=8192)
SMOLLM2 = RopeSpec(rotary_dim=64, theta=1e5, original_length=8192)
TINY = RopeSpec(rotary_dim=64, theta=1e4, original_length=256)
SMALL = EvolutionConfig(population=16, parents=8, iterations=6, mutations=6, crossovers=6)
PAPER = EvolutionConfig(
    algorithm="evolution", population=64, iterations=40, parents=32, mutations=16, crossovers=16, race="off"
)


def make_space(spec=TINY, ratio=4, **options):
    if options.get("kind") == "wide":
        options.setdefault("attention_factor", None)
    return SearchSpace(spec=spec, target_length=round(spec.original_length * ratio), **options)


class Landscape:
    """NLL = what the document costs anyone + its weighted squared distance from an optimum in log λ.

    `noise` is how differently documents weigh dimensions; with 0 all differ by a constant only.
    """

    def __init__(self, optimum, *, documents=5, seed=0, noise=0.3, temperature=1.0):
        rng = np.random.default_rng(seed)
        self.optimum = np.log(optimum)
        self.temperature = temperature
        self.base = rng.uniform(0.5, 30, documents)
        self.weights = np.exp(noise * rng.standard_normal((documents, len(self.optimum))))
        self.calls = Counter()
        self.last_batch = []

    def nll(self, factors, temperature, document):
        distance = self.weights[document] @ (np.log(factors) - self.optimum) ** 2
        return float(self.base[document] + distance + 5 * math.log(temperature / self.temperature) ** 2)

    def total(self, factors, temperature=1.0):
        return sum(self.nll(factors, temperature, document) for document in range(len(self.base)))

    def __call__(self, tasks):
        self.last_batch = [(genome.key(), document) for genome, document in tasks]
        self.calls.update(self.last_batch)
        return [self.nll(genome.factors(), genome.attention_factor, document) for genome, document in tasks]

    def __len__(self):
        return len(self.base)


def searched_optimum(space, c, seed=0):
    """A random point of the paper's space."""
    rng = np.random.default_rng(seed)
    s = space.ratio
    right = np.sort(rng.uniform(s, 2 * s, space.spec.num_dims - c))
    return np.concatenate([[right[0] ** (i / c) for i in range(c)], right])


def test_the_paper_schedule_costs_13440_evaluations_of_1344_candidates():
    space = make_space(LLAMA3, 16)
    landscape = Landscape(searched_optimum(space, 30), documents=10)
    outcome = evolve(space, PAPER, 10, landscape)
    assert len(outcome.genomes) == 64 + 40 * (16 + 16) == 1344
    assert len(landscape.calls) == sum(landscape.calls.values()) == 13_440
    assert max(landscape.calls.values()) == 1
    last = outcome.history[-1]
    assert (last.iteration, last.evaluations, last.exhaustive_evaluations) == (40, 13_440, 13_440)
    assert [progress.evaluations for progress in outcome.history] == [640 + 320 * k for k in range(41)]
    # All scores are there and true; the best is the least of them.
    totals = {key: landscape.total(genome.factors()) for key, genome in outcome.genomes.items()}
    assert {key: outcome.scores.total(key) for key in totals} == pytest.approx(totals)
    assert outcome.best.key() == min(totals, key=totals.__getitem__)
    assert last.best_nll == pytest.approx(min(totals.values()))


def test_racing_costs_far_less_and_finds_as_good():
    space = make_space(LLAMA3, 16)
    optimum = searched_optimum(space, 30)
    full, raced = Landscape(optimum, documents=10), Landscape(optimum, documents=10)
    best = {}
    for landscape, race in ((full, "off"), (raced, "statistical")):
        outcome = evolve(space, dataclasses.replace(PAPER, iterations=15, race=race), 10, landscape)
        best[race] = outcome.history[-1].best_nll - landscape.base.sum()
    assert sum(raced.calls.values()) < sum(full.calls.values()) / 3
    assert max(raced.calls.values()) == 1
    assert best["statistical"] < 1.2 * best["off"]


@pytest.mark.parametrize("size", [1, 5, 9, 64, 200])
def test_the_first_population_has_exactly_the_size_asked_for(size):
    population = first_population(make_space(LLAMA3, 16), size, np.random.default_rng(0))
    assert len(population) == size
    assert len({genome.key() for genome in population}) == size
    # Three of four are drawn, at least one for each critical dimension; what follows are mutations.
    drawn = min(size, max(12, round(0.75 * size)))
    assert [genome.origin for genome in population] == ["random"] * drawn + ["mutation"] * (size - drawn)


def test_a_first_population_has_many_levels_for_each_critical_dimension():
    """One level for each was what every search of the first release ended with."""
    drawn = [g for g in first_population(make_space(SMOLLM2, 4), 64, np.random.default_rng(0)) if g.origin == "random"]
    levels = {c: {genome.right[0] for genome in drawn if genome.critical_dimension == c} for c in range(14, 21)}
    assert all(len(found) >= 6 for found in levels.values())


def test_a_small_population_has_critical_dimensions_from_the_whole_range():
    paper = first_population(make_space(LLAMA3, 16), 4, np.random.default_rng(0))
    assert [genome.critical_dimension for genome in paper] == [24, 28, 31, 35]
    wide = first_population(make_space(LLAMA3, 16, kind="wide"), len(METHODS) + 4, np.random.default_rng(0))
    drawn = [genome for genome in wide if genome.origin == "random"]
    assert [genome.critical_dimension for genome in drawn] == [24, 28, 31, 35]
    assert {genome.shape for genome in drawn} == {"ntk", "ramp"}


def test_the_first_population_keeps_closed_forms_and_what_was_carried_however_small():
    space = make_space(LLAMA3, 16, kind="wide")
    carried = [dataclasses.replace(genome, origin="carried") for genome in space.draws(5, np.random.default_rng(9))]
    population = first_population(space, 3, np.random.default_rng(0), carried)
    assert [genome.origin for genome in population] == [*METHODS, *["carried"] * 5]
    assert [genome.origin for genome in first_population(make_space(), 1, np.random.default_rng(0))] == ["random"]


def scored(space, population, landscape):
    """Every individual on every document."""
    scores = Scores(len(landscape))
    for genome in population:
        for document in range(len(landscape)):
            scores.add(genome.key(), document, landscape.nll(genome.factors(), genome.attention_factor, document))
    return {genome.key(): genome for genome in population}, scores


@pytest.mark.parametrize("algorithm", ["surrogate", "evolution"])
def test_children_are_new_and_as_many_as_configured(algorithm):
    space = make_space(LLAMA3, 16)
    rng = np.random.default_rng(0)
    genomes, scores = scored(space, first_population(space, 20, rng), Landscape(searched_optimum(space, 30)))
    made = children(space, EvolutionConfig(algorithm=algorithm, mutations=7, crossovers=9), genomes, scores, rng)
    keys = {genome.key() for genome in made}
    assert len(keys) == len(made) == 16
    assert not keys & set(genomes)
    if algorithm == "evolution":
        assert [genome.origin for genome in made] == ["mutation"] * 7 + ["crossover"] * 9


def test_the_surrogate_chooses_children_that_are_better_than_those_it_leaves():
    space = make_space(LLAMA3, 16)
    landscape = Landscape(searched_optimum(space, 30), noise=0.0)
    gains = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        genomes, scores = scored(space, first_population(space, 64, rng), landscape)
        means = []
        for algorithm in ("surrogate", "evolution"):
            config = EvolutionConfig(algorithm=algorithm, mutations=8, crossovers=8)
            made = children(space, config, genomes, scores, np.random.default_rng(seed))
            means.append(np.mean([landscape.total(genome.factors()) for genome in made]) - landscape.base.sum())
        gains.append(means[1] / means[0])
    assert min(gains) > 1.5


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
@pytest.mark.parametrize("kind", ["paper", "wide"])
def test_a_search_depends_on_its_seed_alone(race, kind):
    space = make_space(kind=kind)
    optimum = searched_optimum(space, 9)

    def run(seed):
        landscape = Landscape(optimum)
        config = dataclasses.replace(SMALL, race=race, seed=seed)
        outcome = evolve(space, config, len(landscape), landscape)
        return list(outcome.genomes), landscape.calls, outcome.history

    assert run(0) == run(0)
    assert run(0)[0] != run(1)[0]


def test_a_stage_has_random_draws_of_its_own():
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9))
    one, two = (list(evolve(space, SMALL, len(landscape), landscape, stage=stage).genomes) for stage in (0, 1))
    assert set(one) != set(two)


@pytest.mark.parametrize("race", ["off", "statistical"])
def test_candidates_that_are_known_are_not_made_again_and_lead_the_same_way(race):
    """As after a kill, also where a surrogate would round otherwise: the choice was made before."""
    space = make_space(kind="wide")
    landscape = Landscape(searched_optimum(space, 9))
    config = dataclasses.replace(SMALL, race=race)
    kept = {}

    def keep(iteration, make):
        kept[iteration] = make()
        return kept[iteration]

    first = evolve(space, config, len(landscape), landscape, generation=keep)

    def known(iteration, make):
        return kept[iteration] if iteration < 4 else make()

    again = evolve(space, config, len(landscape), landscape, generation=known)
    assert list(again.genomes) == list(first.genomes)
    assert again.history == first.history
    assert again.scores == first.scores


def test_carried_candidates_halve_what_is_drawn():
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9))
    carried = space.draws(4, np.random.default_rng(5))
    config = dataclasses.replace(SMALL, iterations=0, race="off")
    outcome = evolve(space, config, len(landscape), landscape, carried=carried)
    assert {genome.key() for genome in carried} < set(outcome.genomes)
    assert len(outcome.genomes) == SMALL.population // 2


def test_children_depend_on_the_seed_even_where_the_first_population_does_not():
    space = make_space(method="longrope")  # starts from three closed forms, whatever the seed
    landscape = Landscape(space.closed_form("ntk").factors())
    config = dataclasses.replace(SMALL, population=3)
    one, two = (
        list(evolve(space, dataclasses.replace(config, seed=seed), len(landscape), landscape).genomes)
        for seed in (0, 1)
    )
    assert one[:3] == two[:3]
    assert one[3:] != two[3:]


def test_documents_come_in_another_order_each_iteration():
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9), documents=8)
    batches = []

    def evaluate(tasks):
        if tasks:
            batches.append({document for _, document in tasks})
        return landscape(tasks)

    evolve(space, dataclasses.replace(SMALL, race="off"), 8, evaluate)
    assert all(len(batch) == 1 for batch in batches)
    documents = [next(iter(batch)) for batch in batches]
    orders = [tuple(documents[begin : begin + 8]) for begin in range(0, len(documents), 8)]
    assert len(orders) == 7
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(orders)) > 5


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
def test_nothing_is_evaluated_twice_and_duplicates_never(race):
    space = make_space(grid=1.0)  # so coarse that duplicates are made all the time
    landscape = Landscape(searched_optimum(space, 9))
    outcome = evolve(space, dataclasses.replace(SMALL, race=race), len(landscape), landscape)
    assert set(landscape.calls.values()) == {1}
    assert {key for key, _ in landscape.calls} == set(outcome.genomes)
    rotations = {(genome.factors(), genome.attention_factor) for genome in outcome.genomes.values()}
    assert len(rotations) == len(outcome.genomes)


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
@pytest.mark.parametrize("seed", range(2))
def test_it_comes_near_a_known_optimum(race, seed):
    space = make_space()
    optimum = searched_optimum(space, 9, seed)
    landscape = Landscape(optimum, seed=seed)
    config = EvolutionConfig(population=32, parents=16, iterations=20, race=race, seed=seed)
    outcome = evolve(space, config, len(landscape), landscape)
    excess = [progress.best_nll - landscape.base.sum() for progress in outcome.history]
    assert excess == sorted(excess, reverse=True)
    assert excess[-1] < 0.3 * excess[0]


def test_a_perfectly_known_best_is_found_at_once():
    """The optimum is one of the seeds: no child can take its place."""
    space = make_space()
    first = first_population(space, SMALL.population, np.random.default_rng([3, 0, 0, 0]))
    landscape = Landscape(first[4].factors())
    outcome = evolve(space, dataclasses.replace(SMALL, seed=3), len(landscape), landscape)
    assert outcome.best == first[4]
    assert outcome.history[-1].best_nll == pytest.approx(landscape.base.sum())


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
@pytest.mark.parametrize("name", METHODS)
def test_the_wide_search_never_ends_below_a_closed_form_that_is_the_optimum(race, name):
    space = make_space(SMOLLM2, 4, kind="wide")
    closed = rescale(name, SMOLLM2, space.target_length)
    landscape = Landscape(closed.long, temperature=closed.long_attention_factor)
    outcome = evolve(space, dataclasses.replace(SMALL, race=race), len(landscape), landscape)
    assert outcome.best.factors() == closed.long
    assert outcome.best.attention_factor == closed.long_attention_factor


@settings(max_examples=30)
@given(
    race=st.sampled_from(["off", "exact"]),
    seed=st.integers(0, 2**32 - 1),
    noise=st.floats(0, 3),
    iterations=st.integers(0, 3),
)
def test_without_guessing_the_wide_space_never_ends_below_any_closed_form(race, seed, noise, iterations):
    """Documents here disagree as much as one likes. Where they race by estimates, `search` sees to it at the end."""
    space = make_space(SMOLLM2, 4, kind="wide")
    rng = np.random.default_rng(seed)
    landscape = Landscape(np.sort(rng.uniform(1, 8, 32)), seed=seed, noise=noise)
    config = EvolutionConfig(
        population=14, parents=6, iterations=iterations, mutations=4, crossovers=4, race=race, seed=seed
    )
    outcome = evolve(space, config, len(landscape), landscape)
    for name in METHODS:
        closed = rescale(name, SMOLLM2, space.target_length)
        total = landscape.total(closed.long, closed.long_attention_factor)
        assert outcome.history[-1].best_nll <= total + 1e-9, name
    assert outcome.history[-1].best_nll == pytest.approx(
        landscape.total(outcome.best.factors(), outcome.best.attention_factor)
    )


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), noise=st.floats(0, 2), parents=st.integers(3, 8))
def test_exact_racing_goes_exactly_the_way_of_no_racing(seed, noise, parents):
    space = make_space()
    optimum = searched_optimum(space, 9, seed)
    config = dataclasses.replace(SMALL, algorithm="evolution", iterations=4, parents=parents, seed=seed)
    off, exact = Landscape(optimum, seed=seed, noise=noise), Landscape(optimum, seed=seed, noise=noise)
    full = evolve(space, dataclasses.replace(config, race="off"), len(off), off)
    raced = evolve(space, dataclasses.replace(config, race="exact"), len(exact), exact)
    assert list(raced.genomes) == list(full.genomes)
    assert [p.best for p in raced.history] == [p.best for p in full.history]
    assert set(exact.calls) <= set(off.calls)


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
def test_the_finalists_and_the_result_are_scored_on_every_document(race):
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9), documents=12, noise=1.0)
    outcome = evolve(space, dataclasses.replace(SMALL, race=race), len(landscape), landscape)
    # What was known before the finalists ran: all but the last batch, which is empty if they were complete.
    before = Scores(len(landscape), {key: dict(found) for key, found in outcome.scores.table.items()})
    for key, document in landscape.last_batch:
        del before.table[key][document]
    finalists = before.ranking()[:FINALISTS]
    assert len(finalists) == FINALISTS
    assert all(outcome.scores.is_complete(key) for key in finalists)
    assert {key for key, _ in landscape.last_batch} <= set(finalists)
    for document in range(12):
        assert landscape.calls[outcome.best.key(), document] == 1
    complete = [key for key in outcome.genomes if outcome.scores.is_complete(key)]
    totals = {key: landscape.total(outcome.genomes[key].factors()) for key in complete}
    assert outcome.best.key() == min(totals, key=totals.__getitem__)
    best_first = sorted(totals, key=totals.__getitem__)
    assert [genome.key() for genome in outcome.finalists()] == best_first[:FINALISTS]
    assert outcome.history[-1].evaluations == sum(landscape.calls.values())
    if race == "statistical":
        assert landscape.last_batch
        assert len(complete) < len(outcome.genomes)


@pytest.mark.parametrize("race", ["off", "statistical"])
@pytest.mark.parametrize("options", [{"grid": 1000.0}, {"grid": 3.0, "upper": 1.6}, {"upper": 1.0}])
def test_an_exhausted_space_ends_instead_of_hanging(race, options):
    space = make_space(ratio=4, **options)
    landscape = Landscape(searched_optimum(space, 9), documents=2)
    config = EvolutionConfig(population=20, iterations=2, mutations=2, crossovers=2, race=race)
    outcome = evolve(space, config, 2, landscape)
    assert len(outcome.history) == 3
    assert set(landscape.calls.values()) == {1}
    if options != {"grid": 3.0, "upper": 1.6}:
        # One right side for each critical dimension is all there is.
        assert len(outcome.genomes) == len(space.critical_dimensions)


def test_one_document_and_one_individual_are_enough():
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9), documents=1)
    config = EvolutionConfig(population=1, parents=1, iterations=1, mutations=1, crossovers=0)
    outcome = evolve(space, config, 1, landscape)
    assert len(outcome.genomes) == sum(landscape.calls.values()) == 2


def test_no_iterations_score_the_first_population_alone():
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9))
    outcome = evolve(space, dataclasses.replace(SMALL, iterations=0, race="off"), len(landscape), landscape)
    assert len(outcome.history) == 1
    assert len(outcome.genomes) == SMALL.population


def test_reports_come_one_an_iteration_and_say_what_it_cost():
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9))
    reports = []
    outcome = evolve(space, SMALL, len(landscape), landscape, report=reports.append)
    assert reports == outcome.history
    assert [progress.iteration for progress in reports] == list(range(7))
    assert reports[-1].exhaustive_evaluations == len(outcome.genomes) * len(landscape)
    assert all(a.evaluations <= a.exhaustive_evaluations for a in reports)


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
def test_candidates_a_model_cannot_bear_do_not_stop_the_search(race):
    """Half of the space overflows, and on one document so do all others: infinite NLL, never NaN."""
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9))

    def evaluate(tasks):
        nlls = landscape(tasks)
        return [math.inf if task[0].right[-1] > 6 else nll for task, nll in zip(tasks, nlls, strict=True)]

    outcome = evolve(space, dataclasses.replace(SMALL, race=race), len(landscape), evaluate)
    assert math.isfinite(outcome.history[-1].best_nll)
    assert outcome.best.right[-1] <= 6
    hopeless = evolve(
        space, dataclasses.replace(SMALL, race=race), len(landscape), lambda tasks: [math.inf for _ in tasks]
    )
    assert hopeless.history[-1].best_nll == math.inf


@pytest.mark.parametrize("race", ["off", "exact", "statistical"])
@pytest.mark.parametrize("confidence", [0.0, 0.5])
def test_a_finite_candidate_replaces_an_infinite_best(race, confidence):
    """All of the first population overflows; the first child that does not must win."""
    space = make_space()
    landscape = Landscape(searched_optimum(space, 9))
    config = dataclasses.replace(SMALL, race=race, race_confidence=confidence, iterations=1)
    first = first_population(space, SMALL.population, np.random.default_rng([0, 0, 0, 0]))
    infinite = {genome.key() for genome in first}

    def evaluate(tasks):
        nlls = landscape(tasks)
        return [math.inf if task[0].key() in infinite else nll for task, nll in zip(tasks, nlls, strict=True)]

    outcome = evolve(space, config, len(landscape), evaluate)
    finite = {key: genome for key, genome in outcome.genomes.items() if key not in infinite}
    totals = {key: landscape.total(genome.factors()) for key, genome in finite.items()}
    assert len(finite) == 12
    assert math.isfinite(outcome.history[-1].best_nll)
    if race != "statistical":
        assert outcome.best.key() == min(totals, key=totals.__getitem__)


def test_every_problem_of_a_schedule_is_named():
    config = EvolutionConfig(
        population=0, iterations=-1, parents=0, mutations=-1, crossovers=-2, race_confidence=-1001, seed=-3
    )
    assert broken_limits(config) == [
        "population must be at least 1, got 0",
        "iterations must be at least 0, got -1",
        "parents must be at least 1, got 0",
        "mutations must be at least 0, got -1",
        "crossovers must be at least 0, got -2",
        "race_confidence must lie from -1000 to 1000, got -1001",
        "seed must be at least 0, got -3",
    ]
    idle = EvolutionConfig(mutations=0, crossovers=0)
    assert SearchConfig(target_length=512, evolution=idle).problems() == ["an iteration needs mutations or crossovers"]
    assert SearchConfig(target_length=512, evolution=dataclasses.replace(idle, iterations=0)).problems() == []
