"""The theory against the published numbers and against plain float64 arithmetic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrope2.rope import RopeSpec

PHI3 = RopeSpec(rotary_dim=96, theta=1e4, original_length=2048)
LLAMA3 = RopeSpec(rotary_dim=128, theta=5e5, original_length=8192)
SMOLLM2 = RopeSpec(rotary_dim=64, theta=1e5, original_length=8192)

specs = st.builds(
    RopeSpec,
    rotary_dim=st.integers(2, 64).map(lambda n: 2 * n),
    theta=st.floats(100, 1e7),
    original_length=st.integers(16, 1 << 20),
)


@pytest.mark.parametrize(
    ("spec", "raw", "critical", "raw_ten", "ten"),
    [
        (PHI3, 30.158, 31, 18.158, 19),
        (LLAMA3, 34.984, 35, 23.754, 24),
        (SMOLLM2, 19.937, 20, 13.537, 14),
    ],
)
def test_critical_dimensions_of_known_models(spec, raw, critical, raw_ten, ten):
    assert spec.dimension_completing(1) == pytest.approx(raw, abs=5e-4)
    assert spec.dimension_completing(10) == pytest.approx(raw_ten, abs=5e-4)
    assert (spec.critical_dimension, spec.ten_period_dimension) == (critical, ten)


def test_middle_dimension_leaves_something_to_its_right():
    assert RopeSpec(rotary_dim=64, theta=2.0, original_length=256).middle_dimension == 31


def test_middle_dimension_is_what_the_paper_found():
    assert (PHI3.middle_dimension, LLAMA3.middle_dimension) == (25, 30)


def test_periods_named_in_the_paper():
    assert PHI3.periods[47] == pytest.approx(51861, abs=1)  # "the 48th dimension"
    assert PHI3.coverage[47] < 0.04
    assert PHI3.periods[7] == pytest.approx(24, abs=0.5)  # "the 8th dimension has a period of 24"


@given(specs)
def test_critical_dimension_splits_complete_from_incomplete_periods(spec):
    for i, period in enumerate(spec.periods):
        if not math.isclose(period, spec.original_length, rel_tol=1e-9):
            assert (period > spec.original_length) == (i >= spec.critical_dimension)
    assert 0 <= spec.ten_period_dimension <= spec.critical_dimension <= spec.num_dims


@given(specs, st.floats(1.01, 64))
def test_theory_bound_is_exactly_what_removes_unseen_angles(spec, ratio):
    target = math.ceil(spec.original_length * ratio)
    s = spec.extension_ratio(target)
    assert spec.first_unseen_position(target, [s] * spec.num_dims) == (None,) * spec.num_dims
    unseen = spec.first_unseen_position(target)
    for i, position in enumerate(unseen):
        expected = None if spec.coverage[i] >= 1 else spec.original_length
        assert position == expected


def test_unseen_positions_by_brute_force():
    spec = RopeSpec(rotary_dim=16, theta=1e4, original_length=64)
    factors = [1.0, 1.5, 2.0, 2.5, 3.0, 3.9, 4.0, 5.0]
    window = [64 * frequency for frequency in spec.frequencies]
    for i, found in enumerate(spec.first_unseen_position(256, factors)):
        beyond = [p for p in range(256) if p * spec.frequencies[i] / factors[i] >= window[i] * (1 - 1e-12)]
        expected = beyond[0] if beyond and spec.coverage[i] < 1 else None
        assert found == expected


@pytest.mark.parametrize(
    "values",
    [{"rotary_dim": 63}, {"rotary_dim": 0}, {"theta": 1.0}, {"theta": math.nan}, {"original_length": 0}],
)
def test_impossible_values_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        RopeSpec(**{"rotary_dim": 64, "theta": 1e4, "original_length": 256, **values})
