"""The search space: every seed and every chain of moves against the paper's constraints, computed anew."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrope2.factors import RescaleFactors
from longrope2.methods import METHODS, rescale
from longrope2.rope import RopeSpec
from longrope2.search.evolution import first_population
from longrope2.search.space import Genome, SearchSpace, default_attention_factor

LLAMA3 = RopeSpec(rotary_dim=128, theta=5e5, original_length=8192)
PHI3 = RopeSpec(rotary_dim=96, theta=1e4, original_length=2048)
SMOLLM2 = RopeSpec(rotary_dim=64, theta=1e5, original_length=8192)
TINY = RopeSpec(rotary_dim=64, theta=1e4, original_length=256)
# Every dimension completes its period many times over in training: the theory finds no critical one.
ALL_TRAINED = RopeSpec(rotary_dim=32, theta=1e4, original_length=131_072)
MODELS = [LLAMA3, PHI3, SMOLLM2, TINY, ALL_TRAINED]

ratios = st.one_of(st.sampled_from([2.0, 4.0, 16.0, 64.0]), st.floats(1.02, 40))
seeds = st.integers(0, 2**32 - 1)


def make_space(spec, ratio, **options):
    return SearchSpace(spec=spec, target_length=max(round(spec.original_length * ratio), 2), **options)


def chain(space, seed, steps=40):
    """Seeds, then moves among all that was made so far; yields (parents, child), parents empty for seeds."""
    rng = np.random.default_rng(seed)
    pool = list(space.seeds(rng))
    for genome in pool:
        yield (), genome
    for _ in range(steps):
        first, second = (pool[int(rng.integers(len(pool)))] for _ in range(2))
        if rng.random() < 0.5:
            parents, child = (first,), space.mutate(first, rng)
        else:
            parents, child = (first, second), space.cross(first, second, rng)
        pool.append(child)
        yield parents, child


def on_grid(value, grid=0.01):
    return abs(value / grid - round(value / grid)) < 1e-6


def is_monotone(values):
    return all(a <= b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize(
    ("spec", "first", "last"),
    [(LLAMA3, 24, 35), (PHI3, 19, 31), (SMOLLM2, 14, 20)],
    ids=["llama3", "phi3", "smol"],
)
@pytest.mark.parametrize("ratio", [4, 16, 2.5])
def test_seeds_are_flat_and_cover_every_critical_dimension(spec, first, last, ratio):
    space = make_space(spec, ratio)
    found = list(space.seeds(np.random.default_rng(0)))
    assert [genome.critical_dimension for genome in found] == list(range(first, last + 1))
    for genome in found:
        assert len(genome.right) == spec.num_dims - genome.critical_dimension
        assert len(set(genome.right)) == 1
        assert ratio <= genome.right[0] <= 2 * ratio
        assert on_grid(genome.right[0])
    assert len({genome.right[0] for genome in found}) > 1
    other = [genome.right[0] for genome in space.seeds(np.random.default_rng(1))]
    assert other != [genome.right[0] for genome in found]


def test_no_critical_dimension_is_the_first():
    """However short the window: with nothing on its left, nothing could follow from the right."""
    assert make_space(RopeSpec(rotary_dim=64, theta=1e4, original_length=32), 4).critical_dimensions == range(1, 7)


def test_seeds_reach_both_ends_of_the_range():
    space = make_space(TINY, 2)
    rng = np.random.default_rng(0)
    values = {genome.right[0] for _ in range(400) for genome in space.seeds(rng)}
    assert min(values) == 2.0
    assert max(values) == 4.0
    assert values == {round(2 + k / 100, 2) for k in range(201)}


@settings(max_examples=60)
@given(spec=st.sampled_from(MODELS), ratio=ratios, seed=seeds)
def test_no_chain_of_moves_leaves_the_paper_space(spec, ratio, seed):
    space = make_space(spec, ratio)
    s = space.target_length / spec.original_length
    for parents, genome in chain(space, seed):
        c, factors = genome.critical_dimension, genome.factors()
        assert len(factors) == spec.num_dims
        assert factors[0] == 1.0
        assert is_monotone(factors)
        assert list(factors[:c]) == [factors[c] ** (i / c) for i in range(c)]
        for value in factors[c:]:
            assert s - 1e-6 <= value <= 2 * s + 1e-6
            assert on_grid(value)
        assert genome.attention_factor == 1.0
        if parents:
            assert c == parents[0].critical_dimension
        if len(parents) == 2:
            # Nothing is invented: each factor is one of a parent's, or what a neighbour raised it to.
            assert set(genome.right) <= {value for parent in parents for value in parent.right}


@settings(max_examples=40)
@given(spec=st.sampled_from(MODELS), ratio=ratios, seed=seeds)
def test_with_all_dimensions_the_left_is_searched_too(spec, ratio, seed):
    space = make_space(spec, ratio, dimensions="all")
    s = space.target_length / spec.original_length
    for parents, genome in chain(space, seed):
        factors = genome.factors()
        assert len(factors) == spec.num_dims
        assert is_monotone(factors)
        assert all(value >= 1 and on_grid(value) for value in factors)
        assert all(s - 1e-6 <= value <= 2 * s + 1e-6 for value in factors[genome.critical_dimension :])
        if parents:
            assert genome.critical_dimension == parents[0].critical_dimension


def test_with_all_dimensions_left_factors_move_on_their_own():
    space = make_space(LLAMA3, 16, dimensions="all", mutation_probability=1.0)
    rng = np.random.default_rng(0)
    parent = next(iter(space.seeds(rng)))
    child = space.mutate(parent, rng)
    assert child.left != parent.left
    c = child.critical_dimension
    derived = [child.right[0] ** (i / c) for i in range(c)]
    assert max(abs(a - b) for a, b in zip(child.left, derived, strict=True)) > 0.5
    other = space.mutate(parent, rng)
    crossed = [space.cross(child, other, rng).left for _ in range(20)]
    sources = {value for parent in (child, other) for value in (*parent.left, *parent.right)}
    assert all(set(left) <= sources for left in crossed)
    assert any(left not in (child.left, other.left) for left in crossed)


@settings(max_examples=40)
@given(spec=st.sampled_from(MODELS[:4]), ratio=ratios, seed=seeds)
def test_the_first_longrope_searches_every_dimension_from_one_to_five_quarters_of_s(spec, ratio, seed):
    space = make_space(spec, ratio, method="longrope")
    s = space.target_length / spec.original_length
    for _, genome in chain(space, seed):
        assert genome.critical_dimension == 0
        assert len(genome.right) == spec.num_dims
        assert is_monotone(genome.right)
        assert all(1 <= value <= 1.25 * s + 1e-6 and on_grid(value) for value in genome.factors())


@pytest.mark.parametrize("ratio", [2, 16, 2.5])
def test_the_first_longrope_starts_from_pi_ntk_and_yarn(ratio):
    space = make_space(SMOLLM2, ratio, method="longrope", attention_factor=1.2)
    found = list(space.seeds(np.random.default_rng(0)))
    assert [genome.origin for genome in found] == ["pi", "ntk", "yarn"]
    for genome in found:
        exact = rescale(genome.origin, SMOLLM2, space.target_length).long
        for value, wanted in zip(genome.factors(), exact, strict=True):
            assert value == pytest.approx(min(wanted, 1.25 * ratio), abs=0.01)
        assert genome.attention_factor == 1.2


def test_a_mutation_redraws_each_factor_with_its_probability():
    space = make_space(TINY, 16)
    parent = Genome(critical_dimension=8, right=(24.0,) * 24)
    rng = np.random.default_rng(0)
    children = [space.mutate(parent, rng) for _ in range(4000)]
    share = sum(child.right[-1] != 24.0 for child in children) / len(children)
    assert share == pytest.approx(0.3, abs=0.03)
    # Both ways: from the left factors fall one after another, from the right they rise.
    assert any(child.right[0] < child.right[1] < child.right[2] < 24.0 for child in children)
    assert any(child.right[-1] > child.right[-2] > child.right[-3] > 24.0 for child in children)
    assert all(child.origin == "mutation" for child in children)


def test_a_mutation_without_probability_changes_nothing_but_its_origin():
    space = make_space(TINY, 16, mutation_probability=1e-12)
    parent = next(iter(space.seeds(np.random.default_rng(3))))
    assert space.mutate(parent, np.random.default_rng(0)).factors() == parent.factors()


def test_crossover_takes_from_both_parents_and_keeps_the_first_ones_dimension():
    space = make_space(TINY, 2)
    first = Genome(critical_dimension=6, right=tuple(2 + 0.02 * k for k in range(26)))
    second = Genome(critical_dimension=9, right=tuple(3 + 0.01 * k for k in range(23)))
    rng = np.random.default_rng(0)
    for one, two in ((first, second), (second, first)):
        for _ in range(50):
            child = space.cross(one, two, rng)
            assert child.critical_dimension == one.critical_dimension
            assert child.origin == "crossover"
            for i in range(one.critical_dimension, TINY.num_dims):
                # Where the other parent has no right side yet, its first right factor stands in.
                offered = {parent.right[max(i - parent.critical_dimension, 0)] for parent in (one, two)}
                value = child.right[i - child.critical_dimension]
                before = child.right[i - child.critical_dimension - 1] if i > child.critical_dimension else 0
                assert value in offered or value == before
    children = {space.cross(first, second, rng).right for _ in range(20)}
    assert len(children) > 10


def test_bounds_and_grid_are_options():
    space = make_space(LLAMA3, 16, lower=0.5, upper=1.5, grid=0.25)
    for _, genome in chain(space, seed=5):
        assert all(8 <= value <= 24 and on_grid(value, 0.25) for value in genome.right)


def test_a_range_without_grid_points_is_its_lower_end():
    space = make_space(TINY, 2.5, upper=1.0, grid=10.0)
    assert {value for _, genome in chain(space, seed=0) for value in genome.right} == {2.5}


# The wide space


@pytest.mark.parametrize("spec", MODELS, ids=["llama3", "phi3", "smol", "tiny", "all-trained"])
@pytest.mark.parametrize("ratio", [2, 16, 3.7])
@pytest.mark.parametrize("size", [1, 64])
def test_the_wide_population_holds_every_closed_form_exactly(spec, ratio, size):
    space = make_space(spec, ratio, kind="wide")
    population = first_population(space, size, np.random.default_rng(0))
    found = {(genome.factors(), genome.attention_factor) for genome in population}
    for name in METHODS:
        exact = rescale(name, spec, space.target_length)
        assert (exact.long, exact.long_attention_factor) in found, name


def test_a_seed_that_equals_a_closed_form_does_not_push_it_out():
    space = make_space(TINY, 2, kind="wide", upper=1.0)  # every flat seed is s itself, as in the closed forms
    names = set()
    for seed in range(30):
        population = first_population(space, 1, np.random.default_rng(seed))
        names.add(frozenset(genome.origin for genome in population) - {"random"})
    assert names == {frozenset(METHODS)}


@settings(max_examples=60)
@given(spec=st.sampled_from(MODELS), ratio=ratios, seed=seeds)
def test_no_chain_of_moves_in_the_wide_space_makes_factors_a_model_cannot_use(spec, ratio, seed):
    space = make_space(spec, ratio, kind="wide")
    allowed = set(range(max(spec.ten_period_dimension, 1), spec.critical_dimension + 1))
    allowed = {min(c, spec.num_dims - 1) for c in allowed}
    for _, genome in chain(space, seed, steps=60):
        c, factors = genome.critical_dimension, genome.factors()
        assert len(factors) == spec.num_dims
        assert c in allowed
        assert all(math.isfinite(value) and value > 0 for value in factors)
        assert is_monotone(factors[c:])
        assert is_monotone(factors)
        assert math.isfinite(genome.attention_factor)
        assert genome.attention_factor > 0
        space.rescale_factors(genome)


def test_neighbours_a_rounding_error_beside_the_grid_stay_in_order():
    space = make_space(TINY, 2, kind="wide", mutation_probability=0.5)
    rng = np.random.default_rng(0)
    for values in ((2.99, math.nextafter(3.0, 0)), (math.nextafter(3.0, 4), 3.01)):
        mutated = {space._mutate_monotone(values, 2.99, 3.01, rng) for _ in range(200)}
        assert len(mutated) > 2
        assert all(is_monotone(found) for found in mutated)


def test_wide_moves_change_temperature_shape_and_critical_dimension():
    space = make_space(LLAMA3, 16, kind="wide")
    seen = [genome for _, genome in chain(space, seed=0, steps=400)]
    assert {genome.shape for genome in seen} == {"ntk", "ramp", "power", "given"}
    assert {genome.critical_dimension for genome in seen} == set(range(24, 36))
    assert len({genome.attention_factor for genome in seen}) > 20
    assert len({genome.parameter for genome in seen if genome.shape == "power"}) > 3
    assert len({genome.parameter for genome in seen if genome.shape == "ramp"}) > 3


def test_a_wide_crossover_takes_the_temperature_of_either_parent():
    space = make_space(LLAMA3, 16, kind="wide")
    first, second = space.closed_form("yarn"), space.closed_form("pi")
    rng = np.random.default_rng(0)
    found = {space.cross(first, second, rng).attention_factor for _ in range(20)}
    assert found == {first.attention_factor, second.attention_factor}
    assert first.attention_factor != second.attention_factor
    paper = make_space(LLAMA3, 16)
    assert {paper.cross(first, second, rng).attention_factor for _ in range(20)} == {first.attention_factor}


def test_mutated_factors_of_the_wide_space_are_within_the_bounds_of_the_paper():
    space = make_space(LLAMA3, 16, kind="wide")
    for parents, genome in chain(space, seed=1, steps=200):
        if len(parents) == 1:
            assert all(16 <= value <= 32 for value in genome.right)


def test_critical_dimension_moves_keep_the_factors_of_the_right():
    space = make_space(LLAMA3, 16, kind="wide", mutation_probability=0.5)
    genome = Genome(critical_dimension=30, right=tuple(16 + 0.1 * k for k in range(34)))
    for step in (-2, -1, 1, 2, 99, -99):
        moved = space._move_critical_dimension(genome, step)
        c = moved.critical_dimension
        assert c == min(max(30 + step, 24), 35)
        assert moved.factors()[max(c, 30) :] == genome.factors()[max(c, 30) :]
        assert set(moved.factors()[c : max(c, 30)]) <= {16.0}
    given_left = Genome(
        critical_dimension=30, right=genome.right, shape="given", left=tuple(1 + 0.5 * i for i in range(30))
    )
    for step in (1, 2):
        moved = space._move_critical_dimension(given_left, step)
        assert moved.factors() == given_left.factors()


@pytest.mark.parametrize(
    ("shape", "parameter", "near", "end"),
    [
        ("ramp", 28.0, (25, 29), 29),
        ("ramp", 1.0, (0, 4), 0),
        ("power", 9.0, (4, 10), 10),
        ("power", 0.11, (0.1, 0.3), 0.1),
    ],
)
def test_a_shape_is_refined_as_often_as_it_is_drawn_anew(shape, parameter, near, end):
    space = make_space(LLAMA3, 16, kind="wide")
    genome = Genome(critical_dimension=30, right=(16.0,) * 34, shape=shape, parameter=parameter)
    rng = np.random.default_rng(0)
    changed = [space._change_shape(genome, rng) for _ in range(300)]
    refined = [other for other in changed if other.shape == shape and near[0] <= other.parameter <= near[1]]
    assert 120 < len(refined) < 190
    assert end in {other.parameter for other in refined}  # where the parameter has to stop
    assert {other.shape for other in changed} == {"ntk", "ramp", "power"}


# Shapes, keys and the value that flows on


@pytest.mark.parametrize("first", [2.0, 7.25, 31.99])
@pytest.mark.parametrize("c", [1, 5, 24])
def test_shapes_follow_their_formulas(first, c):
    right = (first, first + 1)
    ntk = Genome(critical_dimension=c, right=right).factors()
    assert ntk == pytest.approx([math.exp(math.log(first) * i / c) for i in range(c)] + list(right), rel=1e-14)
    power = Genome(critical_dimension=c, right=right, shape="power", parameter=2.5).factors()
    assert power == pytest.approx([math.exp(math.log(first) * (i / c) ** 2.5) for i in range(c)] + list(right))
    start = min(3, c - 1)
    ramp = Genome(critical_dimension=c, right=right, shape="ramp", parameter=3.0).factors()
    inverse = np.interp(range(c), [start, c], [1.0, 1 / first])
    assert ramp == pytest.approx([*(1 / inverse), *right])
    given_left = tuple(1 + 0.1 * i for i in range(c))
    assert Genome(critical_dimension=c, right=right, shape="given", left=given_left).factors() == given_left + right


@pytest.mark.parametrize("spec", MODELS[:4], ids=["llama3", "phi3", "smol", "tiny"])
@pytest.mark.parametrize("ratio", [2, 16, 3.7])
def test_the_ramp_holds_yarn_exactly(spec, ratio):
    target = round(spec.original_length * ratio)
    s = target / spec.original_length

    def dimension(rotations):
        return spec.rotary_dim * math.log(spec.original_length / (2 * math.pi * rotations)) / (2 * math.log(spec.theta))

    low, high = max(math.floor(dimension(32)), 0), math.ceil(dimension(1))
    genome = Genome(critical_dimension=high, right=(s,) * (spec.num_dims - high), shape="ramp", parameter=low)
    yarn = rescale("yarn", spec, target).long
    assert genome.factors()[:high] == yarn[:high]
    assert genome.factors()[high:] == pytest.approx(yarn[high:], rel=1e-15)


def test_keys_are_equal_for_those_that_rotate_alike():
    ntk = Genome(critical_dimension=8, right=(4.0, 5.0))
    alike = [
        Genome(critical_dimension=8, right=(4.0, 5.0), shape="power", parameter=1.0, origin="mutation"),
        Genome(critical_dimension=8, right=(4.0, 5.0), shape="given", left=ntk.factors()[:8]),
        Genome(critical_dimension=0, right=ntk.factors()),
    ]
    assert {genome.key() for genome in alike} == {ntk.key()}


@settings(max_examples=100)
@given(seed=seeds, position=st.integers(0, 31), step=st.sampled_from([-0.01, 0.01, 1e-6, 3.0]))
def test_keys_tell_apart_those_that_do_not(seed, position, step):
    rng = np.random.default_rng(seed)
    factors = [1 + 0.01 * int(k) for k in np.sort(rng.integers(0, 3000, 32))]
    changed = [value + step * (i == position) for i, value in enumerate(factors)]
    one = Genome(critical_dimension=0, right=tuple(factors))
    assert one.key() == Genome(critical_dimension=0, right=tuple(factors), origin="crossover").key()
    assert one.key() != Genome(critical_dimension=0, right=tuple(changed)).key()
    assert one.key() != Genome(critical_dimension=0, right=tuple(factors), attention_factor=1 + step).key()


def test_genomes_survive_the_journal():
    for _, genome in chain(make_space(TINY, 2, kind="wide"), seed=0):
        values = json.loads(json.dumps(genome.to_json(), allow_nan=False))
        back = Genome(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
        assert back == genome


@pytest.mark.parametrize("options", [{}, {"kind": "wide"}, {"dimensions": "all"}, {"method": "longrope"}])
def test_rescale_factors_are_valid_and_carry_everything(options):
    space = make_space(SMOLLM2, 4, **options)
    for _, genome in chain(space, seed=0):
        factors = space.rescale_factors(genome, {"model": "smol"})
        assert factors.long == genome.factors()
        assert factors.short == (1.0,) * 32
        assert factors.long_attention_factor == genome.attention_factor
        assert factors.short_attention_factor == 1.0
        assert factors.critical_dimension == (genome.critical_dimension or None)
        assert factors.method == options.get("method", "longrope2")
        assert factors.target_length == 32768
        factors.check_fits(SMOLLM2)
        again = RescaleFactors.from_json(json.loads(json.dumps(factors.to_json())))
        assert again.to_json() == factors.to_json()


def test_temperatures_are_those_the_methods_name():
    assert default_attention_factor("longrope2", LLAMA3, 131072) == 1.0
    # Published: engines apply √(1 + ln 32/ln 4096) to Phi-3's 128k.
    phi3 = RopeSpec(rotary_dim=96, theta=1e4, original_length=4096)
    assert default_attention_factor("longrope", phi3, 131072) == pytest.approx(1.1902380714238083, rel=1e-12)
