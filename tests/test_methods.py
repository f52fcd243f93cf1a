"""Every method against transformers' own rope functions, published factors, and its promises."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longrope2 import methods
from longrope2.errors import FactorsError
from longrope2.methods import METHODS, rescale
from longrope2.rope import STANDSTILL, RopeSpec

LLAMA3 = RopeSpec(rotary_dim=128, theta=5e5, original_length=8192)
PHI3 = RopeSpec(rotary_dim=96, theta=1e4, original_length=2048)
SMOLLM2 = RopeSpec(rotary_dim=64, theta=1e5, original_length=8192)
TINY = RopeSpec(rotary_dim=64, theta=1e4, original_length=256)
MODELS = [LLAMA3, PHI3, SMOLLM2, TINY]

specs = st.builds(
    RopeSpec,
    rotary_dim=st.integers(8, 64).map(lambda n: 2 * n),
    theta=st.floats(1e4, 1e7),
    original_length=st.integers(256, 32768),
)
ratios = st.floats(1.01, 64)


def oracle(spec, rope_type, seq_len=None, **parameters):
    """transformers' inverse frequencies, computed by its own code from its own config."""
    config = LlamaConfig(
        hidden_size=spec.rotary_dim * 2,
        num_attention_heads=2,
        head_dim=spec.rotary_dim,
        max_position_embeddings=spec.original_length,
        rope_parameters={"rope_type": rope_type, "rope_theta": spec.theta, **parameters},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len)
    return inv_freq.double(), attention_factor


def assert_same(factors, inv_freq, attention_factor=1.0):
    ours = torch.tensor(factors.inv_freq(long=True), dtype=torch.float64)
    torch.testing.assert_close(ours, inv_freq, rtol=1e-6, atol=0)
    assert factors.long_attention_factor == pytest.approx(attention_factor, rel=1e-9)


@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("s", [2, 4.5, 16])
class TestAgainstTransformers:
    def test_pi(self, spec, s):
        target = int(spec.original_length * s)
        assert_same(rescale("pi", spec, target), *oracle(spec, "linear", factor=s))

    def test_yarn(self, spec, s):
        target = int(spec.original_length * s)
        expected = oracle(spec, "yarn", factor=s, original_max_position_embeddings=spec.original_length)
        assert_same(rescale("yarn", spec, target), *expected)

    def test_llama3_and_ntk_by_parts(self, spec, s):
        target = int(spec.original_length * s)
        common = {
            "factor": s,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": spec.original_length,
        }
        expected = oracle(spec, "llama3", high_freq_factor=4.0, **common)
        assert_same(rescale("llama3", spec, target), *expected)
        by_parts = oracle(spec, "llama3", high_freq_factor=32.0, **common)
        assert_same(rescale("ntk-by-parts", spec, target), *by_parts)

    def test_dynamic_ntk(self, spec, s):
        target = int(spec.original_length * s)
        for length in (target, target // 2 + spec.original_length):
            expected = oracle(spec, "dynamic", seq_len=length, factor=s)
            assert_same(rescale("dynamic-ntk", spec, target, current_length=length), *expected)

    def test_ntk_aware_is_dynamic_ntk_of_factor_one(self, spec, s):
        target = int(spec.original_length * s)
        expected = oracle(spec, "dynamic", seq_len=target, factor=1.0)
        assert_same(rescale("ntk-aware", spec, target), *expected)

    def test_any_factors_as_longrope(self, spec, s):
        target = int(spec.original_length * s)
        for name in METHODS:
            factors = rescale(name, spec, target)
            expected = oracle(
                spec, "longrope", seq_len=target, long_factor=list(factors.long),
                short_factor=list(factors.short), original_max_position_embeddings=spec.original_length,
                attention_factor=factors.long_attention_factor,
            )  # fmt: skip
            assert_same(factors, *expected)


class TestAgainstTheirAuthors:
    """Transcribed in float64 from mattian7/mrRoPE (yarn_radix, yarn_radix3) and hrlics/CoPE (modeling_cope.py)."""

    @staticmethod
    def mixed_radix(spec, s, *, progressive):
        dim, window = spec.rotary_dim, spec.original_length

        def correction(rotations):
            return dim * math.log(window / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

        low, high = max(math.floor(correction(32)), 0), min(math.ceil(correction(1)), dim - 1)
        inv_freq = 1.0 / spec.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        for i in range(dim // 2):
            if i > high - 1:
                inv_freq[i] /= s
            elif i > low and progressive:
                inv_freq[i] /= (s ** (1.0 / ((high - low) * (high - low + 1)))) ** ((i + 1 - low) * (i - low))
            elif i > low:
                inv_freq[i] /= (s ** (1.0 / (high - low))) ** (i - low)
        return inv_freq, 0.1 * math.log(s) + 1.0

    @pytest.mark.parametrize("spec", MODELS)
    @pytest.mark.parametrize("s", [2, 4.5, 16])
    def test_mrrope(self, spec, s):
        target = int(spec.original_length * s)
        assert_same(rescale("mrrope-uni", spec, target), *self.mixed_radix(spec, s, progressive=False))
        assert_same(rescale("mrrope-pro", spec, target), *self.mixed_radix(spec, s, progressive=True))

    @staticmethod
    def clipped(theta, dim, clip_low_n, *, soft):
        inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        start = inv_freq.numel() - min(clip_low_n, inv_freq.numel())
        taper = 0.5 * (1.0 + torch.cos(torch.linspace(0.0, torch.pi, steps=clip_low_n, dtype=torch.float64)))
        inv_freq[start:] *= taper if soft else 0.0
        return inv_freq

    @pytest.mark.parametrize("soft", [True, False])
    @pytest.mark.parametrize("base", [None, 1e7])
    @pytest.mark.parametrize("clipped", [None, 29, 34, 1])
    def test_clipping(self, soft, base, clipped):
        """LLaMA-3-8B to 64k: 20 of 64 frequencies, and the paper's ablations; they train with a base of 1e7."""
        onset = None if clipped is None else 64 - clipped
        factors = rescale("cope" if soft else "hardclip", LLAMA3, 65536, onset=onset, base=base)
        expected = self.clipped(base or LLAMA3.theta, 128, clipped or 20, soft=soft)
        ours = torch.tensor(factors.inv_freq(long=True), dtype=torch.float64)
        rotating = expected > 0
        torch.testing.assert_close(ours[rotating], expected[rotating], rtol=1e-12, atol=0)
        assert all(value == STANDSTILL for value in torch.tensor(factors.long)[~rotating])
        assert factors.long_attention_factor == 1.0

    @pytest.mark.parametrize(("spec", "onset"), [(LLAMA3, 44), (PHI3, 36), (SMOLLM2, 24), (TINY, 19)])
    def test_the_default_onset_is_the_published_share_of_dimensions_without_a_period(self, spec, onset):
        target = 4 * spec.original_length
        assert next(i for i, value in enumerate(rescale("hardclip", spec, target).long) if value > 1) == onset
        assert rescale("cope", spec, target) == rescale("cope", spec, target, onset=onset)

    def test_a_model_that_knows_every_angle_is_not_clipped(self):
        trained = RopeSpec(rotary_dim=32, theta=1e4, original_length=131_072)
        assert {*rescale("cope", trained, 262_144).long, *rescale("hardclip", trained, 262_144).long} == {1.0}

    def test_drope_rotates_nothing(self):
        assert rescale("drope", TINY, 1024).long == (STANDSTILL,) * 32

    def test_mixed_radix_where_the_borders_meet(self):
        """A step, as YaRN's; the authors' code divides by zero."""
        spec = RopeSpec(rotary_dim=8, theta=1e4, original_length=6)
        assert {rescale(name, spec, 12).long for name in ("mrrope-uni", "mrrope-pro", "yarn")} == {(1.0, 2.0, 2.0, 2.0)}


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e9])
def test_every_engine_can_divide_by_a_standstill_in_float32(theta):
    """As each does it: transformers and vLLM, mlx-lm, llama.cpp; nothing overflows, and float32 sees no rotation."""
    dim, positions = 128, np.arange(0, 2**24, 99_991, dtype=np.float32)[:, None]
    powers = np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    factor = np.full(dim // 2, STANDSTILL, dtype=np.float32)
    for angles in (
        positions * (np.float32(1) / (factor * powers)),
        positions / (factor * powers),
        positions / powers / factor,
    ):
        assert angles.dtype == np.float32
        assert np.isfinite(angles).all()
        assert (np.cos(angles) == 1).all()
        assert np.abs(np.sin(angles)).max() < 2.0**-39


def test_published_llama3_factors_are_rebuilt_from_their_right_side(published):
    vector = published["llama3_8b_longrope2_long"]
    factors = rescale("longrope2", LLAMA3, 131072, critical_dimension=33, right_factors=vector[33:])
    assert max(abs(a - b) for a, b in zip(factors.long, vector, strict=True)) < 1e-8
    assert factors.critical_dimension == 33


@pytest.mark.parametrize(("spec", "base"), [(LLAMA3, 7.976e7), (PHI3, 7.495e6)])
def test_ntk_base_at_128k(spec, base):
    factors = rescale("ntk", spec, 131072)
    i = spec.num_dims - 1
    rebuilt = spec.theta * factors.long[i] ** (spec.rotary_dim / (2 * i))
    assert rebuilt == pytest.approx(base, rel=1e-3)


@pytest.mark.parametrize(("spec", "ramp"), [(LLAMA3, (18, 35)), (PHI3, (12, 31)), (SMOLLM2, (10, 20)), (TINY, (0, 13))])
def test_yarn_ramps(spec, ramp):
    target = spec.original_length * 16
    factors = rescale("yarn", spec, target).long
    low, high = ramp
    assert factors[low] == 1 < factors[low + 1]
    assert factors[high] == 16 > factors[high - 1]


def test_temperatures():
    assert rescale("yarn", LLAMA3, 131072).long_attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    assert methods.longrope_temperature(16, 8192) == pytest.approx(math.sqrt(1 + math.log(16) / math.log(8192)))


@given(specs, ratios)
def test_what_every_method_promises(spec, ratio):
    target = math.ceil(spec.original_length * ratio)
    s = spec.extension_ratio(target)
    for name in METHODS:
        factors = rescale(name, spec, target)
        assert factors.oddities() == [], name  # monotone and nowhere below 1
        if name not in ("pi", "ntk-by-parts", "drope"):
            assert factors.long[0] == pytest.approx(1), name
        assert factors.short == (1.0,) * spec.num_dims
        assert factors.short_attention_factor == 1.0
        if name not in (
            "none",
            "ntk-aware",
            "dynamic-ntk",
            "cope",
            "hardclip",
        ):  # these do not promise the theory's bound
            tail = factors.long[spec.critical_dimension :]
            assert all(value >= s * (1 - 1e-9) for value in tail), name


def test_ntk_aware_breaks_the_bound_as_the_paper_says():
    factors = rescale("ntk-aware", LLAMA3, 131072)
    assert factors.long[LLAMA3.critical_dimension] < 16
    assert factors.long[-1] == pytest.approx(16)


@given(specs, ratios, st.data())
def test_factors_are_continuous_at_the_critical_dimension(spec, ratio, data):
    target = math.ceil(spec.original_length * ratio)
    s = spec.extension_ratio(target)
    lowest = max(spec.ten_period_dimension, 1)
    c = data.draw(st.integers(lowest, min(max(spec.critical_dimension, lowest), spec.num_dims - 1)))
    right = sorted(data.draw(st.lists(st.floats(s, 2 * s), min_size=spec.num_dims - c, max_size=spec.num_dims - c)))
    factors = rescale("longrope2", spec, target, critical_dimension=c, right_factors=right).long
    assert list(factors[c:]) == right
    assert factors[0] == 1
    step = right[0] ** (1 / c)
    for i in range(c):  # the geometric run meets the right side: λ_c is its next term
        assert factors[i + 1] / factors[i] == pytest.approx(step, rel=1e-9)
    assert rescale("ntk-rcd", spec, target, critical_dimension=c).long[c] == pytest.approx(s)
    assert rescale("yarn-rcd", spec, target, critical_dimension=c).long[c] == pytest.approx(s)


def test_one_right_factor_stands_for_all():
    factors = rescale("longrope2", SMOLLM2, 32768, critical_dimension=20, right_factors=[6.0])
    assert factors.long[20:] == (6.0,) * 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rescale("yarm", LLAMA3, 131072), "did you mean 'yarn'"),
        (lambda: rescale("zzz", LLAMA3, 131072), "one of: none, pi"),
        (lambda: rescale("pi", LLAMA3, 8192), "not above the trained window of 8,192"),
        (lambda: rescale("ntk-rcd", LLAMA3, 131072, critical_dimension=0), "outside 1…63"),
        (lambda: rescale("ntk-rcd", LLAMA3, 131072, critical_dimension=64), "outside 1…63"),
        (lambda: rescale("yarn-rcd", LLAMA3, 131072, critical_dimension=5), "before it begins at 18"),
        (lambda: rescale("longrope2", LLAMA3, 131072, right_factors=[1, 2]), "expected 34"),
        (
            lambda: rescale("longrope2", TINY, 512, critical_dimension=30, right_factors=[2, -2]),
            "right-hand factors must be finite numbers above 0, got 2, -2",
        ),
        (lambda: rescale("cope", LLAMA3, 131072, onset=64), "onset 64 is outside 1…63"),
        (lambda: rescale("hardclip", LLAMA3, 131072, onset=0), "onset 0 is outside 1…63"),
        (lambda: rescale("cope", LLAMA3, 131072, base=1e4), "a base of 10000 is not above the model's own"),
        (lambda: rescale("mrrope-pro", RopeSpec(rotary_dim=64, theta=1e4, original_length=1), 64), "before it begins"),
        (lambda: rescale("longrope2", TINY, 512, attention_factor=0.0), "the attention factor must be"),
        (lambda: rescale("ntk", RopeSpec(rotary_dim=8, theta=1e4, original_length=6), 64), "above 2π"),
        (lambda: rescale("ntk-aware", RopeSpec(rotary_dim=2, theta=1e4, original_length=64), 128), "above 2"),
    ],
)  # fmt: skip
def test_bad_requests(call, message):
    with pytest.raises(FactorsError) as caught:
        call()
    assert message in str(caught.value)


def test_short_side_keeps_what_the_model_already_does():
    factors = rescale("pi", TINY, 512, short=[2.0] * 32, short_attention_factor=1.1)
    assert factors.short == (2.0,) * 32
    assert factors.short_attention_factor == 1.1


def test_methods_are_documented_where_they_stand():
    for name, method in METHODS.items():
        assert method.rescaling.__doc__, name


def test_the_table_of_methods_in_the_docs():
    """Name, formula and attention factor, as each row of METHODS states them."""
    text = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text()
    assert [line for line in methods_table() if line not in text.splitlines()] == []


def methods_table():
    return [f"| `{name}` | {method.formula} | {method.temperature} |" for name, method in METHODS.items()]
