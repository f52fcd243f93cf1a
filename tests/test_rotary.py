"""Factors in live models: the same logits as transformers where it is right, and right where it is not."""

import copy

import pytest
import torch

from conftest import FAMILY_OPTIONS, ORIGINAL_LENGTH, TARGET_LENGTH, family_model
from longrope2.errors import RotaryError
from longrope2.factors import RescaleFactors
from longrope2.families import read_config
from longrope2.rope import STANDSTILL
from longrope2.rotary import RescaledRotary, _rotary_places, rescaled

FAMILIES = sorted(FAMILY_OPTIONS)
OWN_SLIDING_ROPE = ("gemma3_text",)
ATTENTION = {"short_attention_factor": 1.2, "long_attention_factor": 1.2}


def make_factors(model, **changes) -> RescaleFactors:
    """Factors that differ in every dimension, on both sides."""
    rope = read_config(model.config.to_dict()).rope
    n = rope.num_dims
    values = {
        "method": "test",
        "rotary_dim": rope.rotary_dim,
        "theta": rope.theta,
        "original_length": ORIGINAL_LENGTH,
        "target_length": TARGET_LENGTH,
        "long": tuple(4.0 + i / n for i in range(n)),
        "short": tuple(1.0 + i / (2 * n) for i in range(n)),
        **changes,
    }
    return RescaleFactors(**values)


def through_transformers(family: str, factors: RescaleFactors):
    """The same weights with the factors in transformers' own longrope config."""
    rope = {
        "rope_type": "longrope",
        "long_factor": list(factors.long),
        "short_factor": list(factors.short),
        "original_max_position_embeddings": factors.original_length,
        "attention_factor": factors.long_attention_factor,
    }
    lengths = {"max_position_embeddings": factors.target_length}
    if family == "phi3":  # it keeps the original window beside the RoPE parameters, where it overrides them
        lengths["original_max_position_embeddings"] = factors.original_length
    return family_model(family, rope, **lengths)


def logits(model, tokens, **inputs):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, **inputs).logits


def tokens_of(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (1, length), generator=generator)


def layer_type(family: str) -> dict[str, str]:
    return {"layer_type": "full_attention"} if family in OWN_SLIDING_ROPE else {}


def assert_close(ours, theirs, tolerance=2e-4):
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_a_standstill_is_bit_for_bit_no_rotation(self, family):
        """Here and in plain transformers, up to position 16 million."""
        model, tokens = family_model(family), tokens_of(ORIGINAL_LENGTH + 8)
        still = (STANDSTILL,) * len(make_factors(model).long)
        factors = make_factors(model, long=still, short=still)
        near = torch.arange(tokens.shape[1])[None]
        far = torch.linspace(0, 2**24, tokens.shape[1]).long()[None]
        mask = torch.ones_like(tokens)
        with rescaled(model, factors) as rotary:
            ours = [logits(model, tokens, position_ids=at, attention_mask=mask) for at in (near, far)]
            rotary._sides(tokens.device)[:, :-1] = 0
            unrotated = [logits(model, tokens, position_ids=at, attention_mask=mask) for at in (near, far)]
        assert torch.equal(ours[0], unrotated[0])
        assert torch.equal(ours[1], unrotated[1])
        assert torch.equal(logits(through_transformers(family, factors), tokens), unrotated[0])
        if family not in OWN_SLIDING_ROPE:
            assert torch.equal(unrotated[0], unrotated[1])

    def test_a_model_that_does_not_rotate_takes_no_factors_that_do(self, family):
        """It would have to be guessed how its dimensions are laid out."""
        still = (STANDSTILL,) * len(make_factors(family_model(family)).long)
        factors = make_factors(family_model(family), long=still, short=still)
        model = through_transformers(family, factors)
        with rescaled(model, factors):
            pass
        cos = _rotary_places(model)[0][2](torch.zeros(1, 1, 1), torch.zeros(1, 1), **layer_type(family))[0]
        if cos.shape[-1] == len(still):
            return  # there is only one layout of that size
        with (
            pytest.raises(RotaryError, match="nothing tells how its dimensions are laid out"),
            rescaled(model, make_factors(model)),
        ):
            pass

    def test_short_and_long_rows_equal_transformers(self, family):
        model = family_model(family)
        factors = make_factors(model, **ATTENTION)
        theirs = through_transformers(family, factors)
        assert theirs.state_dict().keys() == model.state_dict().keys()
        short, long = tokens_of(ORIGINAL_LENGTH), tokens_of(ORIGINAL_LENGTH + 1)
        untouched = logits(model, short), logits(model, long)
        # One long forward per model: transformers 5.17–5.20 fail on the second one with nested parameters.
        expected = logits(theirs, short), logits(theirs, long)
        with rescaled(model, factors):
            assert_close(logits(model, short), expected[0])
            assert_close(logits(model, long), expected[1])
            assert not torch.allclose(logits(model, long), untouched[1], atol=1e-2)
        assert torch.equal(logits(model, short), untouched[0])
        assert torch.equal(logits(model, long), untouched[1])

    def test_mixed_batch_equals_each_row_alone(self, family):
        model = family_model(family)
        factors = make_factors(model, short_attention_factor=1.0, long_attention_factor=1.3)
        long, short = tokens_of(80, seed=1), tokens_of(20, seed=2)
        with rescaled(model, factors):
            alone = logits(model, long), logits(model, short)
            padded = torch.cat((short, torch.zeros(1, 60, dtype=torch.long)), dim=1)
            batch = torch.cat((long, padded))
            mask = torch.ones_like(batch)
            mask[1, 20:] = 0
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            together = logits(model, batch, attention_mask=mask, position_ids=positions)
        assert_close(together[:1], alone[0])
        assert_close(together[1:, :20], alone[1])

    def test_rows_can_be_chosen_by_hand(self, family):
        model = family_model(family)
        factors = make_factors(model, long_attention_factor=1.3)
        tokens = tokens_of(24)
        with rescaled(model, factors, long_rows=True) as rotary:
            long = logits(model, tokens)
            rotary.long_rows = False
            short = logits(model, tokens)
            rotary.long_rows = torch.tensor([True, False])
            both = logits(model, torch.cat((tokens, tokens)))
            rotary.long_rows = torch.tensor([[True] * 24, [False] * 24])
            by_token = logits(model, torch.cat((tokens, tokens)))
        assert not torch.allclose(long, short, atol=1e-3)
        assert_close(both, torch.cat((long, short)))
        assert_close(by_token, torch.cat((long, short)))

    def test_factors_of_one_are_the_untouched_model(self, family):
        model = family_model(family)
        n = len(make_factors(model).long)
        factors = make_factors(model, long=(1.0,) * n, short=(1.0,) * n)
        tokens = tokens_of(48)
        before = logits(model, tokens)
        with rescaled(model, factors):
            assert_close(logits(model, tokens), before)


def test_tables_are_those_of_float64_however_rows_are_chosen():
    """Also the attention factor is float64 until the end: a choice by row must not round it earlier."""
    model = family_model("llama")
    factors = make_factors(model, long_attention_factor=1.3)
    positions = torch.arange(4096)[None]
    angles = positions[0, :, None].double() * torch.tensor(factors.inv_freq(long=True), dtype=torch.float64)
    expected = torch.cat((angles, angles), dim=-1).cos().mul(1.3).float()
    with rescaled(model, factors) as rotary:
        for chosen in (True, torch.tensor([True]), torch.ones(1, 4096, dtype=torch.bool), None):
            rotary.long_rows = chosen
            cos, _ = rotary(torch.zeros(1), positions)
            assert torch.equal(cos[0], expected), chosen


def test_transformers_itself_is_wrong_on_a_mixed_batch():
    """Why per-row choice exists: the day this fails, transformers has learnt it."""
    model = family_model("llama")
    factors = make_factors(model)
    theirs = through_transformers("llama", factors)
    short = tokens_of(20)
    alone = logits(theirs, short)
    batch = torch.cat((tokens_of(80), torch.cat((short, torch.zeros(1, 60, dtype=torch.long)), dim=1)))
    mask = torch.ones_like(batch)
    mask[1, 20:] = 0
    together = logits(theirs, batch, attention_mask=mask)
    assert (together[1, :20] - alone[0]).abs().max() > 0.1


@pytest.mark.parametrize("position", [0, 257, 131_071, 1_048_575])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_float64_exact_whatever_the_dtype(position, dtype):
    model = family_model("llama").to(dtype)  # casts transformers' own inv_freq; ours must not be touched
    factors = make_factors(model, original_length=16, long_attention_factor=1.25)
    with rescaled(model, factors, check=False) as rotary:
        rotary.to(torch.bfloat16)
        positions = torch.tensor([[position]])
        cos, sin = rotary(torch.zeros(1, 1, 4, dtype=torch.float32), positions)
        low_cos, _ = rotary(torch.zeros(1, 1, 4, dtype=dtype), positions)
    angles = position * torch.tensor(factors.inv_freq(long=position >= 16), dtype=torch.float64)
    scale = 1.25 if position >= 16 else 1.0
    expected = torch.cat((angles, angles))
    torch.testing.assert_close(cos[0, 0].double(), expected.cos() * scale, rtol=0, atol=1.5e-7)
    torch.testing.assert_close(sin[0, 0].double(), expected.sin() * scale, rtol=0, atol=1.5e-7)
    assert low_cos.dtype == dtype


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_restored_after_an_error_and_nested(family):
    model = family_model(family)
    original = model.model.rotary_emb
    factors, tokens = make_factors(model), tokens_of(60)
    other = make_factors(model, long=tuple(value * 2 for value in factors.long))
    with pytest.raises(KeyError), rescaled(model, factors):
        raise KeyError
    assert model.model.rotary_emb is original
    with rescaled(model, factors):
        outer = logits(model, tokens)
        with rescaled(model, other):
            assert not torch.allclose(logits(model, tokens), outer, atol=1e-3)
        assert torch.equal(logits(model, tokens), outer)
    assert model.model.rotary_emb is original


def test_factors_can_be_swapped_in_place():
    model = family_model("llama")
    factors, tokens = make_factors(model), tokens_of(60)
    other = make_factors(model, long=tuple(value * 2 for value in factors.long))
    with rescaled(model, other):
        expected = logits(model, tokens)
    with rescaled(model, factors) as rotary:
        logits(model, tokens)
        rotary.factors = other
        assert torch.equal(logits(model, tokens), expected)


def test_saving_inside_the_block_saves_no_trace(tmp_path):
    model = family_model("llama")
    keys = set(model.state_dict())
    with rescaled(model, make_factors(model)):
        assert set(model.state_dict()) == keys


class TestLoudFailures:
    def test_wrong_number_of_factors(self):
        model = family_model("llama")
        wrong = make_factors(model, rotary_dim=8, long=(4.0,) * 4, short=(1.0,) * 4)
        with (
            pytest.raises(RotaryError, match="rotates 8 dimensions, the factors are for 4"),
            rescaled(model, wrong),
        ):
            pass

    def test_a_patch_that_is_never_called(self):
        model = family_model("llama")
        factors = make_factors(model)
        hidden = model.model.rotary_emb

        class Stray(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.rotary_emb = hidden

        # The model keeps using a copy that the search for modules cannot see.
        secret = copy.deepcopy(hidden)
        model.model.stray = Stray()
        del model.model.rotary_emb
        object.__setattr__(model.model, "rotary_emb", lambda x, position_ids: secret(x, position_ids))
        with pytest.raises(RotaryError, match="is never used"), rescaled(model, factors):
            pass
        assert model.model.stray.rotary_emb is hidden

    def test_a_patch_that_reaches_only_some_layers(self):
        model = family_model("llama")
        factors = make_factors(model)
        secret = copy.deepcopy(model.model.rotary_emb)
        layer = model.model.layers[1]
        forward = layer.forward

        def rotate_alone(hidden_states, position_ids=None, position_embeddings=None, **options):
            own = secret(hidden_states, position_ids)
            return forward(hidden_states, position_ids=position_ids, position_embeddings=own, **options)

        layer.forward = rotate_alone
        with pytest.raises(RotaryError, match="some layers rotate alone"), rescaled(model, factors):
            pass

    def test_unknown_layout(self):
        model = family_model("llama")
        factors = make_factors(model)

        class OddRotaryEmbedding(torch.nn.Module):
            def __init__(self, inv_freq):
                super().__init__()
                self.inv_freq = torch.nn.Buffer(inv_freq, persistent=False)

            def forward(self, x, position_ids):
                angles = position_ids[..., None].float() * self.inv_freq
                return torch.cat((angles, angles.flip(-1)), -1).cos(), torch.cat((angles, angles), -1).sin()

        model.model.rotary_emb = OddRotaryEmbedding(model.model.rotary_emb.inv_freq)
        with (
            pytest.raises(RotaryError, match="layout of OddRotaryEmbedding is not known"),
            rescaled(model, factors),
        ):
            pass

    def test_weights_that_are_not_numbers(self):
        model = family_model("llama")
        factors = make_factors(model)
        torch.nn.init.constant_(model.model.layers[0].mlp.up_proj.weight, float("nan"))
        with pytest.raises(RotaryError, match="logits that are not numbers"), rescaled(model, factors):
            pass

    def test_no_rotary_module(self):
        with (
            pytest.raises(RotaryError, match="has 0 rotary modules"),
            rescaled(torch.nn.Linear(2, 2), make_factors(family_model("llama"))),
        ):
            pass

    def test_sliding_layers_of_gemma3_are_left_alone(self):
        model = family_model("gemma3_text")
        factors = make_factors(model)
        positions = torch.arange(40)[None]
        hidden = torch.zeros(1, 40, 4)
        before = model.model.rotary_emb(hidden, positions, "sliding_attention")
        with rescaled(model, factors) as rotary:
            assert isinstance(rotary, RescaledRotary)
            after = rotary(hidden, positions, "sliding_attention")
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
