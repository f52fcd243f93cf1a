"""A search on landscapes whose optimum is known must find it: the level of a plateau, its rise, and where it begins."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest

from longrope2.search.config import EvolutionConfig

ROOT = Path(__file__).parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "results" / "smollm2"
SEEDS = 12


@pytest.fixture(scope="module")
def algorithms():
    sys.path.insert(0, str(BENCHMARKS))
    import search_algorithms

    yield search_algorithms
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("seeds", [3, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_the_optimum_is_found_within_twelve_iterations_without_racing(algorithms, seeds):
    found = algorithms.synthetic(algorithms.ALGORITHMS["surrogate"], seeds)
    assert max(entry["median_regret"] for entry in found.values()) <= 0.001
    assert fmean(entry["within_one"] for entry in found.values()) >= 0.95


@pytest.mark.slow
def test_moves_alone_find_plateaus_that_the_first_release_missed(algorithms):
    """Three landscapes rise from the critical dimension on, which takes a surrogate; two are flat."""
    flat = {name: optimum for name, optimum in algorithms.OPTIMA.items() if not optimum.rise}
    assert len(flat) == 2
    regrets = {}
    for algorithm in ("first release", "evolution"):
        found = algorithms.synthetic(algorithms.ALGORITHMS[algorithm], 6)
        regrets[algorithm] = {name: entry["median_regret"] for name, entry in found.items()}
    assert all(regret > 0.003 for regret in regrets["first release"].values())
    assert all(regrets["evolution"][name] < 0.001 for name in flat)
    assert all(regrets["evolution"][name] < 0.7 * regrets["first release"][name] for name in algorithms.OPTIMA)


@pytest.mark.parametrize("seeds", [3, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_racing_on_noisy_documents_finds_it_with_a_fifth_of_the_evaluations(algorithms, seeds):
    """A fifth on average: where the best candidate changes in every iteration, each one is scored on all documents."""
    found = algorithms.racing(seeds)
    assert max(entry["median_regret"] for entry in found.values()) <= 0.01
    times = [entry["times_fewer_evaluations"] for entry in found.values()]
    assert fmean(times) >= 5
    assert min(times) >= 4.5


@pytest.mark.slow
def test_the_default_of_eight_iterations_comes_near(algorithms):
    found = algorithms.racing(SEEDS, iterations=EvolutionConfig().iterations)
    regrets = sorted(entry["median_regret"] for entry in found.values())
    assert regrets[-1] <= 0.015
    assert regrets[-2] <= 0.006


@pytest.mark.slow
def test_twenty_documents_that_disagree_determine_the_optimum_of_all(algorithms):
    found = algorithms.noisy(algorithms.ALGORITHMS["surrogate"], 6, documents=20)
    assert max(entry["median_regret"] for entry in found.values()) <= 0.02
    few = algorithms.noisy(algorithms.ALGORITHMS["first release"], 6)
    assert all(found[name]["median_regret"] < few[name]["median_regret"] for name in found)


def test_documents_disagree_as_those_of_smollm2_do(algorithms):
    """At 16k, two and three of ten documents prefer dimensions 21 and 22 to 20, the best one of all."""
    recorded = json.loads((RESULTS / "hypothesis-SmolLM2-135M-Instruct-16384.json").read_text())["landscape"]
    cells = {(cell["critical_dimension"], cell["ratio"]): np.array(cell["nll"]) for cell in recorded}
    optimum = algorithms.OPTIMA["16k, 20, 1.5"]
    landscape = algorithms.Landscape(optimum, documents=1000, noise=algorithms.NOISE, scatter=algorithms.SCATTER)
    best = landscape.losses(optimum.factors())
    for dimension in (21, 22):
        measured = np.mean(cells[dimension, 1.5] < cells[20, 1.5])
        moved = replace(optimum, critical_dimension=dimension)
        simulated = np.mean(landscape.losses(moved.factors()) < best)
        assert simulated == pytest.approx(measured, abs=0.2)


def test_the_noise_is_that_of_smollm2(algorithms):
    """How much the difference between a candidate and the best one varies over documents, relative to its mean."""
    recorded = json.loads((RESULTS / "hypothesis-SmolLM2-135M-Instruct-16384.json").read_text())["landscape"]
    cells = {(cell["critical_dimension"], cell["ratio"]): np.array(cell["nll"]) for cell in recorded}
    best = cells[20, 1.5]
    near = [cells[place] - best for place in ((19, 1.5), (18, 1.5), (18, 1.25), (17, 1.25), (14, 1.25))]
    landscape = algorithms.Landscape(algorithms.OPTIMA["16k, 20, 1.5"], documents=400, noise=algorithms.NOISE)
    factors = landscape.optimum.factors()
    made = [landscape.losses(factors * growth) - landscape.losses(factors) for growth in (1.1, 1.2, 0.9)]
    measured, simulated = (median(float(np.std(d) / np.mean(d)) for d in apart) for apart in (near, made))
    assert 0.6 < measured < 0.8
    assert simulated == pytest.approx(measured, abs=0.15)
