"""The search space: every seed and every chain of moves against the paper's constraints, computed again."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrope2.factors import RescaleFactors
from longrope2.methods import METHODS, rescale
from longrope2.records import as_json, parse
from longrope2.rope import RopeSpec
from longrope2.search.evolution import first_population
from longrope2.search.space import Genome, SearchSpace

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
    if options.get("kind") == "wide":
        options.setdefault("attention_factor", None)
    return SearchSpace(spec=spec, target_length=max(round(spec.original_length * ratio), 2), **options)


def chain(space, seed, steps=40):
    """A first population, then moves among all made so far; yields (parents, child), parents empty at first."""
    rng = np.random.default_rng(seed)
    pool = [*space.closed_forms(), *space.draws(20, rng)]
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
def test_draws_are_flat_and_cover_every_critical_dimension_and_level(spec, first, last, ratio):
    space = make_space(spec, ratio)
    width = last - first + 1
    found = space.draws(8 * width, np.random.default_rng(0))
    assert [genome.critical_dimension for genome in found] == list(range(first, last + 1)) * 8
    for genome in found:
        assert len(genome.right) == spec.num_dims - genome.critical_dimension
        assert len(set(genome.right)) == 1
        assert ratio <= genome.right[0] <= 2 * ratio
        assert on_grid(genome.right[0])
    for c in range(first, last + 1):
        levels = sorted(genome.right[0] / ratio for genome in found if genome.critical_dimension == c)
        # One in each eighth of the range.
        assert all(1 + k / 8 - 0.01 <= level <= 1 + (k + 1) / 8 + 0.01 for k, level in enumerate(levels))
    other = [genome.right[0] for genome in space.draws(8 * width, np.random.default_rng(1))]
    assert other != [genome.right[0] for genome in found]


def test_few_draws_are_spread_over_the_critical_dimensions():
    space = make_space(LLAMA3, 16)
    assert [genome.critical_dimension for genome in space.draws(4, np.random.default_rng(0))] == [24, 28, 31, 35]
    assert space.draws(0, np.random.default_rng(0)) == []


def test_no_critical_dimension_is_the_first():
    """However short the window: with nothing on its left, nothing could follow from the right."""
    assert make_space(RopeSpec(rotary_dim=64, theta=1e4, original_length=32), 4).critical_dimensions == range(1, 7)


def test_draws_reach_both_ends_of_the_range():
    space = make_space(TINY, 2)
    rng = np.random.default_rng(0)
    values = {genome.right[0] for _ in range(400) for genome in space.draws(9, rng)}
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
        assert c in space.critical_dimensions
        if len(parents) == 2:
            assert c == parents[0].critical_dimension


@settings(max_examples=40)
@example(spec=LLAMA3, ratio=2.0, seed=29278)  # stretched below its left side, then shifted
@given(spec=st.sampled_from(MODELS), ratio=ratios, seed=seeds)
def test_with_all_dimensions_the_left_is_searched_too(spec, ratio, seed):
    space = make_space(spec, ratio, dimensions="all")
    s = space.target_length / spec.original_length
    for _, genome in chain(space, seed):
        factors = genome.factors()
        assert len(factors) == spec.num_dims
        assert is_monotone(factors)
        assert all(value >= 1 and on_grid(value) for value in factors)
        assert all(s - 1e-6 <= value <= 2 * s + 1e-6 for value in factors[genome.critical_dimension :])
        assert genome.critical_dimension in space.critical_dimensions


def test_with_all_dimensions_left_factors_move_on_their_own():
    space = make_space(LLAMA3, 16, dimensions="all", mutation_probability=1.0)
    rng = np.random.default_rng(0)
    parent = space.draws(1, rng)[0]
    child = space._redraw(parent, rng)
    assert child.left != parent.left
    c = child.critical_dimension
    derived = [child.right[0] ** (i / c) for i in range(c)]
    assert max(abs(a - b) for a, b in zip(child.left, derived, strict=True)) > 0.5
    other = space._redraw(parent, rng)
    crossed = [space.cross(child, other, rng) for _ in range(20)]
    sources = {value for parent in (child, other) for value in parent.left}
    assert all(set(genome.left) <= sources | {genome.right[0]} for genome in crossed)
    assert any(genome.left not in (child.left, other.left) for genome in crossed)


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
    found = space.closed_forms()
    assert space.draws(5, np.random.default_rng(0)) == []
    assert [genome.origin for genome in found] == ["pi", "ntk", "yarn"]
    for genome in found:
        exact = rescale(genome.origin, SMOLLM2, space.target_length).long
        for value, wanted in zip(genome.factors(), exact, strict=True):
            assert value == pytest.approx(min(wanted, 1.25 * ratio), abs=0.01)
        assert genome.attention_factor == 1.2


def test_closed_forms_of_the_wide_space_have_the_temperature_that_was_asked_for():
    own = {genome.origin: genome for genome in make_space(TINY, 16, kind="wide", attention_factor=None).closed_forms()}
    assert own["yarn"].attention_factor > 1.2
    for genome in make_space(TINY, 16, kind="wide", attention_factor=1.0).closed_forms():
        assert genome.attention_factor == 1
        assert genome.factors() == own[genome.origin].factors()


def test_a_mutation_redraws_each_factor_with_its_probability():
    space = make_space(TINY, 16)
    parent = Genome(critical_dimension=8, right=(24.0,) * 24)
    rng = np.random.default_rng(0)
    children = [space._redraw(parent, rng) for _ in range(4000)]
    share = sum(child.right[-1] != 24.0 for child in children) / len(children)
    assert share == pytest.approx(0.3, abs=0.03)
    # Both ways: from the left factors fall one after another, from the right they rise.
    assert any(child.right[0] < child.right[1] < child.right[2] < 24.0 for child in children)
    assert any(child.right[-1] > child.right[-2] > child.right[-3] > 24.0 for child in children)


def test_a_stretch_moves_a_plateau_as_a_whole_or_one_end_of_it():
    space = make_space(TINY, 16)
    plateau = Genome(critical_dimension=8, right=(24.0,) * 24)
    rng = np.random.default_rng(0)
    children = [space._stretch(plateau, rng).right for _ in range(2000)]
    assert any(len(set(right)) == 1 and right[0] > 24 for right in children)
    assert any(len(set(right)) == 1 and right[0] < 24 for right in children)
    # The end from somewhere on is raised, the beginning up to somewhere is lowered, both in one piece.
    assert any(right[0] == 24 and right[-1] > 24 and len(set(right)) == 2 for right in children)
    assert any(right[0] < 24 and right[-1] == 24 and len(set(right)) == 2 for right in children)
    moved = np.abs(np.log([right for right in children if right != plateau.right]) - math.log(24)).max(axis=1)
    assert np.quantile(moved, 0.1) < 0.01  # some refine
    assert np.quantile(moved, 0.9) > 0.1  # and some explore


def test_stretched_steps_stay_in_order_and_within_the_bounds():
    space = make_space(TINY, 16)
    stairs = Genome(critical_dimension=8, right=tuple(16 + k / 2 for k in range(24)))
    rng = np.random.default_rng(0)
    for _ in range(500):
        right = space._stretch(stairs, rng).right
        assert is_monotone(right)
        assert min(right) >= 16
        assert max(right) <= 32


def test_a_shift_keeps_the_factors_from_there_on_or_the_slope_below():
    space = make_space(LLAMA3, 16)
    genome = Genome(critical_dimension=30, right=tuple(24 + 0.1 * k for k in range(34)))
    rng = np.random.default_rng(0)
    kept, sloped = 0, 0
    for _ in range(200):
        child = space._shift(genome, rng)
        c = child.critical_dimension
        assert c in (28, 29, 31, 32)
        if child.factors()[max(c, 30) :] == genome.factors()[max(c, 30) :]:
            kept += 1
            assert set(child.factors()[c:30]) <= {24.0}
        else:
            sloped += 1
            slope = math.log(child.right[0]) / c
            assert slope == pytest.approx(math.log(24) / 30, rel=1e-3)
    assert min(kept, sloped) > 60
    at_the_end = Genome(critical_dimension=35, right=(20.0,) * 29)
    assert {space._shift(at_the_end, rng).critical_dimension for _ in range(50)} == {33, 34, 35}


def test_crossover_mixes_or_blends_and_keeps_the_first_ones_dimension():
    space = make_space(TINY, 2)
    first = Genome(critical_dimension=6, right=tuple(round(2 + 0.02 * k, 2) for k in range(26)))
    second = Genome(critical_dimension=9, right=tuple(round(3 + 0.01 * k, 2) for k in range(23)))
    rng = np.random.default_rng(0)
    mixed = 0
    for one, two in ((first, second), (second, first)):
        for _ in range(100):
            child = space.cross(one, two, rng)
            assert child.critical_dimension == one.critical_dimension
            assert child.origin == "crossover"
            # Where the other parent has no right side yet, its first right factor stands in.
            offered = np.array(
                [
                    [parent.right[max(i - parent.critical_dimension, 0)] for i in range(one.critical_dimension, 32)]
                    for parent in (one, two)
                ]
            )
            if set(child.right) <= set(offered.flatten()):
                mixed += 1
                continue
            # A blend: the same share of the way from one to the other everywhere, or a little past either.
            way = np.log(np.array(child.right) / offered[0]) / np.log(offered[1] / offered[0])
            inside = (np.array(child.right) > 2) & (np.array(child.right) < 4)
            assert np.ptp(way[inside & (np.abs(np.log(offered[1] / offered[0])) > 0.2)]) < 0.1
            assert -0.3 < np.median(way) < 1.3
    assert 70 < mixed < 130


@pytest.mark.parametrize("ratio", [2, 4, 2.5])
def test_what_is_carried_to_another_ratio_keeps_its_place(ratio):
    near, far = make_space(SMOLLM2, ratio), make_space(SMOLLM2, 2 * ratio)
    for _, genome in chain(near, seed=3, steps=20):
        carried = far.carry(genome, near.ratio)
        assert (carried.critical_dimension, carried.shape, carried.origin) == (
            genome.critical_dimension, genome.shape, "carried"
        )  # fmt: skip
        assert np.array(carried.right) / far.ratio == pytest.approx(np.array(genome.right) / near.ratio, abs=0.006)
    warm = make_space(SMOLLM2, 4, kind="wide")
    yarn = warm.carry(make_space(SMOLLM2, 2, kind="wide").closed_form("yarn"), 2.0)
    exact = warm.closed_form("yarn")
    assert yarn.attention_factor == pytest.approx(exact.attention_factor, abs=0.005)
    assert yarn.right == pytest.approx(exact.right, abs=0.01)
    assert is_monotone(yarn.factors())


@pytest.mark.parametrize("name", METHODS)
def test_every_closed_form_can_be_carried_far(name):
    """Also one with dimensions that stand still, whose factors to a power would overflow."""
    for spec in MODELS:
        near, far = make_space(spec, 1.02, kind="wide"), make_space(spec, 40, kind="wide")
        carried = far.carry(near.closed_form(name), near.ratio)
        assert is_monotone(carried.factors())
        assert max(carried.factors()) <= 2 * far.ratio + 0.01


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


def test_a_wide_crossover_takes_the_temperature_of_either_parent_or_blends_them():
    space = make_space(LLAMA3, 16, kind="wide")
    first, second = space.closed_form("yarn"), space.closed_form("pi")
    rng = np.random.default_rng(0)
    found = {space.cross(first, second, rng).attention_factor for _ in range(200)}
    assert {1.0, 1.28} < found
    assert len(found) > 20
    assert all(0.92 < value < 1.36 for value in found)
    paper = make_space(LLAMA3, 16)
    assert {paper.cross(first, second, rng).attention_factor for _ in range(20)} == {1.0}
    assert {paper.mutate(first, rng).attention_factor for _ in range(20)} == {1.0}


def test_factors_that_the_wide_space_moves_are_within_the_bounds_of_the_paper():
    """A closed form keeps its own where only the temperature or the left changes."""
    space = make_space(LLAMA3, 16, kind="wide")
    for parents, genome in chain(space, seed=1, steps=200):
        if parents and genome.right != parents[0].right:
            own = {value for parent in parents for value in parent.right}
            assert all(16 <= value <= 32 or value in own for value in genome.right)


def test_a_shift_of_a_given_left_side_changes_no_factor_upwards():
    space = make_space(LLAMA3, 16, kind="wide")
    left = tuple(1 + 0.5 * i for i in range(30))
    genome = Genome(critical_dimension=30, right=(16.0,) * 34, shape="given", left=left)
    rng = np.random.default_rng(0)
    for _ in range(50):
        moved = space._shift(genome, rng)
        if moved.critical_dimension > 30:
            assert moved.factors() == genome.factors()
        else:
            assert moved.factors()[: moved.critical_dimension] == left[: moved.critical_dimension]


def test_first_temperatures_lie_between_one_and_twice_yarns():
    rng = np.random.default_rng(0)
    for options in ({"kind": "wide"}, {"attention_factor": None}):
        found = [genome.attention_factor for genome in make_space(LLAMA3, 16, **options).draws(200, rng)]
        yarn = 0.1 * math.log(16)
        assert min(found) < 1 + 0.1 * yarn
        assert max(found) > 1 + 1.8 * yarn
        assert all(1 <= value <= 1 + 2 * yarn + 0.005 for value in found)


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
        values = json.loads(json.dumps(as_json(genome), allow_nan=False))
        assert parse(Genome, values, "") == genome


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
