"""What we read from config.json against what transformers reads from the same file."""

import copy
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from conftest import FAMILY_OPTIONS, family_config, family_model
from longrope2.errors import ModelError
from longrope2.families import read_config
from longrope2.generation.saved import read_factors

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def rotary_frequencies(config):
    """The frequencies that transformers' own model of this config would rotate by."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary_class = next(type(m) for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    rotary = rotary_class(config)
    prefix = "full_attention_" if "full_attention" in config.rope_parameters else ""
    return getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_silent_configs_mean_what_transformers_takes_them_to_mean(family, tmp_path):
    """Only model_type and the shape are given: every default must agree."""
    small = SMALL | {"num_hidden_layers": 6}  # enough for Gemma 3 to have a full-attention layer
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **small}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    extra = {"rope_parameters": theirs.rope_parameters} if family == "gpt_oss" else {}
    ours = read_config({"model_type": family, **small, **extra})
    inv_freq, attention_factor = rotary_frequencies(theirs)
    rescaled = ours.rescaled.factors if ours.rescaled else [1.0] * ours.rope.num_dims
    frequencies = [f / x for f, x in zip(ours.rope.frequencies, rescaled, strict=True)]
    torch.testing.assert_close(torch.tensor(frequencies), inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(ours.rescaled.attention_factor if ours.rescaled else 1.0)
    assert ours.window == theirs.max_position_embeddings
    if getattr(theirs, "layer_types", None):
        assert list(ours.layer_types) == theirs.layer_types


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_saved_configs_read_the_same(family, tmp_path):
    config = family_config(family)
    config.save_pretrained(tmp_path)
    ours = read_config(json.loads((tmp_path / "config.json").read_text()))
    inv_freq, _ = rotary_frequencies(AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(torch.tensor(ours.rope.frequencies), inv_freq, rtol=1e-6, atol=0)
    assert ours.rope.original_length == 32
    assert ours.rescaled is None


RESCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_with_options": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3,
    },
    "yarn_two_sided": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_by_a_fraction": {"rope_type": "yarn", "factor": 3.3, "original_max_position_embeddings": 64},
    "llama3_by_a_fraction": {
        "rope_type": "llama3", "factor": 3.3, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0 + i / 8 for i in range(8)],
        "original_max_position_embeddings": 64,
    },
    "longrope_with_temperature": {
        "rope_type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8, "attention_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RESCALINGS)
def test_existing_rescalings_are_recognised(name, tmp_path):
    config = family_config("llama", RESCALINGS[name], max_position_embeddings=256)
    config.save_pretrained(tmp_path)
    ours = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert ours.rescaled is not None
    assert ours.rope.original_length == (256 if name == "dynamic" else 64)
    inv_freq, attention_factor = rotary_frequencies(config)
    frequencies = [f / x for f, x in zip(ours.rope.frequencies, ours.rescaled.factors, strict=True)]
    torch.testing.assert_close(torch.tensor(frequencies), inv_freq, rtol=1e-6, atol=0)
    assert ours.rescaled.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize("original_length", [32, 256])
@pytest.mark.parametrize("name", RESCALINGS)
def test_a_window_given_by_hand_leaves_what_the_model_does_as_it_is(name, original_length):
    """As for LLaMA 3.1 from 128k on: its blend still goes by the 8k in its config."""
    config = family_config("llama", RESCALINGS[name], max_position_embeddings=256)
    ours = read_config(config.to_dict(), original_length=original_length)
    assert ours.rope.original_length == original_length
    assert ours.rescaled == read_config(config.to_dict()).rescaled


@pytest.mark.parametrize("name", ["yarn", "llama3", "longrope"])
def test_a_window_that_the_config_does_not_state_is_assumed_as_in_transformers(name):
    """For its blend and temperature, that is: where it is extended from follows from the factor."""
    scaling = {key: value for key, value in RESCALINGS[name].items() if key != "original_max_position_embeddings"}
    config = SMALL | {
        "model_type": "llama", "max_position_embeddings": 256, "rope_scaling": scaling | {"factor": 4.0}
    }  # fmt: skip
    ours = read_config(config)
    assert ours.rope.original_length == 64
    inv_freq, attention_factor = rotary_frequencies(CONFIG_MAPPING["llama"].from_dict(copy.deepcopy(config)))
    frequencies = [f / x for f, x in zip(ours.rope.frequencies, ours.rescaled.factors, strict=True)]
    torch.testing.assert_close(torch.tensor(frequencies), inv_freq, rtol=1e-6, atol=0)
    assert ours.rescaled.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize("family", sorted(set(FAMILY_OPTIONS) - {"phi3"}))  # which transformers refuses other scalings
def test_a_scaling_that_was_added_by_hand_counts_as_in_transformers(family):
    """To what transformers 5 saved, with parameters of its own: as the cards of Qwen and others recommend."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = family_config(family, max_position_embeddings=256).to_dict() | {"rope_scaling": scaling}
    ours = read_config(config)
    inv_freq, attention_factor = rotary_frequencies(CONFIG_MAPPING[family].from_dict(copy.deepcopy(config)))
    frequencies = [f / x for f, x in zip(ours.rope.frequencies, ours.rescaled.factors, strict=True)]
    torch.testing.assert_close(torch.tensor(frequencies), inv_freq, rtol=1e-6, atol=0)
    assert ours.rescaled.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("mscales", "short", "long"),
    [
        ({"long_mscale": 1.3, "short_mscale": 1.0}, 1.0, 1.3),
        ({"short_mscale": 1.0}, 1.0, 1.2),
        ({"long_mscale": 1.3}, 1.2, 1.3),
        ({}, 1.2, 1.2),
    ],
)
def test_a_side_with_its_own_temperature_keeps_it(mscales, short, long):
    rope = RESCALINGS["longrope"] | {"attention_factor": 1.2, **mscales}
    config = family_config("llama", rope, max_position_embeddings=256)
    reading = read_config(config.to_dict())
    assert (reading.rescaled.attention_factor, reading.rescaled.long_attention_factor) == (short, long)
    factors = read_factors(reading)
    assert (factors.short_attention_factor, factors.long_attention_factor) == (short, long)


class TestPublishedConfigs:
    """The forms that real checkpoints have, of transformers 4 and older."""

    def test_llama_3_1(self):
        reading = read_config(
            SMALL | {
                "model_type": "llama", "max_position_embeddings": 131072, "rope_theta": 500000.0,
                "rope_scaling": {
                    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192, "rope_type": "llama3",
                },
            }
        )  # fmt: skip
        assert (reading.rope.theta, reading.rope.original_length, reading.window) == (5e5, 8192, 131072)
        assert reading.rescaled.method == "llama3"

    def test_phi_3_mini_128k(self, published):
        reading = read_config({
            "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32,
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0, "sliding_window": 262144, "auto_map": {"AutoConfig": "x.Phi3Config"},
            "rope_scaling": {
                "type": "su",
                "long_factor": published["phi3_mini_128k_april_long"],
                "short_factor": published["phi3_mini_128k_april_short"],
            },
        })  # fmt: skip
        assert reading.rescaled.method == "longrope"
        assert reading.remarks == ()  # its sliding window is wider than its own
        assert reading.rope.original_length == 4096
        assert reading.rescaled.factors == tuple(published["phi3_mini_128k_april_short"])
        assert reading.rescaled.attention_factor == pytest.approx(1.1902, abs=1e-4)  # √(1 + ln 32/ln 4096)

    def test_gpt_neox_with_its_old_keys(self):
        reading = read_config(SMALL | {
            "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 50_000,
        })  # fmt: skip
        assert (reading.rope.rotary_dim, reading.rope.theta) == (8, 50_000)
        # As transformers does: it is no key of this family.
        assert read_config(SMALL | {"model_type": "gpt_neox", "rope_theta": 50_000}).rope.theta == 10_000

    def test_gemma_3_with_vision(self):
        reading = read_config({
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256,
                "num_hidden_layers": 34, "sliding_window": 1024, "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "max_position_embeddings": 131072,
            },
        })  # fmt: skip
        assert (reading.rope.theta, reading.rope.rotary_dim) == (1e6, 256)
        assert reading.rope.original_length == 16384
        assert "implied by the factor" in reading.remarks[0]
        assert reading.layer_types.count("full_attention") == 5
        assert reading.sliding_window == 1024

    def test_mistral_7b_v01_slides_everywhere(self):
        reading = read_config(SMALL | {"model_type": "mistral", "sliding_window": 4096})
        assert set(reading.layer_types) == {"sliding_attention"}
        assert "cannot carry information further" in reading.remarks[0]

    def test_qwen2_window_that_is_switched_off(self):
        base = SMALL | {"model_type": "qwen2", "sliding_window": 4096, "num_hidden_layers": 4}
        assert read_config(base).sliding_window is None
        on = read_config(base | {"use_sliding_window": True, "max_window_layers": 3})
        assert on.layer_types == ("full_attention",) * 3 + ("sliding_attention",)

    def test_head_dim_that_is_not_hidden_over_heads(self):
        assert read_config(SMALL | {"model_type": "llama", "head_dim": 48}).rope.rotary_dim == 48
        assert read_config(SMALL | {"model_type": "llama", "head_dim": None}).rope.rotary_dim == 16

    def test_cohere2_is_told_about_its_nope_layers(self):
        assert any(
            "no RoPE" in remark
            for remark in read_config(SMALL | {"model_type": "cohere2", "num_hidden_layers": 4}).remarks
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'model_type'"),
        ({"model_type": "gpt2"}, "no rotary position embedding"),
        ({"model_type": "gptj"}, "cannot be extended: transformers rotates within its attention"),
        ({"model_type": "falcon", "alibi": True}, "no rotary position embedding"),
        ({"model_type": "zamba2"}, "no rotary position embedding"),
        ({"model_type": "granitemoehybrid"}, "no rotary position embedding"),
        ({"model_type": "unheard_of"}, "is not a model_type that the installed transformers knows"),
        ({"model_type": "musicgen"}, "several language models"),
        ({"model_type": "internlm2", "auto_map": {}}, "needs code from the model repository"),
        (SMALL | {"model_type": "llama", "num_hidden_layers": "two"}, "num_hidden_layers must be a positive"),
        (SMALL | {"model_type": "llama", "rope_theta": -5}, "theta must be"),
        (SMALL | {"model_type": "llama", "rope_theta": False}, "theta must be"),
        (SMALL | {"model_type": "llama", "rope_scaling": 3}, "rope_parameters must be an object"),
        (SMALL | {"model_type": "llama", "rope_scaling": {"rope_type": "odd", "factor": 2}}, "'odd'"),
        (SMALL | {"model_type": "llama", "rope_scaling": {"rope_type": "odd"}}, "'odd' is not known here"),
        (SMALL | {"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}, "Missing required keys"),
        (
            SMALL | {"model_type": "llama", "rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}},
            "neither the original",
        ),
        (SMALL | {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attends to later tokens"),
        (
            SMALL | {"model_type": "llama", "rope_scaling": {
                "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                "original_max_position_embeddings": 64}},
            "short_factor must list 8 numbers, got 1",
        ),
    ],
)  # fmt: skip
def test_refusals(config, message):
    with pytest.raises(ModelError) as caught:
        read_config(config)
    assert message in caught.value.message
    assert caught.value.hint


def test_original_length_can_be_overridden():
    config = SMALL | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert read_config(config).rope.original_length == 1024
    reading = read_config(config, original_length=512)
    assert reading.rope.original_length == 512
    assert reading.remarks == ()


def test_live_models_agree_with_their_configs():
    model = family_model("phi")
    assert read_config(model.config.to_dict()).rope.rotary_dim == 8


@pytest.mark.parametrize(
    "keys",
    [{}, {"sliding_window": 64}, {"use_sliding_window": True}, {"use_sliding_window": True, "sliding_window": 64}],
    ids=str,
)
@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_the_layers_that_slide_are_those_of_transformers(family, keys):
    config = SMALL | {"model_type": family, "num_hidden_layers": 32, **keys}
    theirs, ours = CONFIG_MAPPING[family].from_dict(dict(config)), read_config(config)
    span = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if span else "full_attention"] * 32
    assert ours.layer_types == tuple(kinds)
    assert ours.sliding_window == (span if "sliding_attention" in kinds else None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"partial_rotary_factor": "half"},
        {"partial_rotary_factor": float("inf")},
        {"sliding_window": "x", "use_sliding_window": True},
        {"rope_theta": [1]},
        {"model_type": ["llama"]},
        {"model_type": "gemma3_text", "sliding_window_pattern": 0},
        {"rope_scaling": {"type": ["yarn"]}},
        {"rope_scaling": {"type": "yarn", "factor": "4x", "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "yarn", "factor": -1, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": -1, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "linear", "factor": 4, "attention_factor": "x"}},
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "original_max_position_embeddings": 64}},
    ],
)
def test_a_config_with_a_wrong_value_is_refused_in_words(wrong):
    with pytest.raises(ModelError):
        read_config(SMALL | {"model_type": "llama"} | wrong)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_factor_of_one_is_no_rescaling(kind):
    """Mistral Small 4 cannot be written without YaRN's keys."""
    scaling = {"rope_type": kind, "factor": 1.0, "original_max_position_embeddings": 64}
    config = family_config("llama", max_position_embeddings=64).to_dict() | {
        "rope_parameters": {**scaling, "rope_theta": 1e4}
    }
    assert read_config(config).rescaled is None
    assert (
        read_config({**config, "rope_parameters": {**scaling, "rope_theta": 1e4, "factor": 2.0}}).rescaled.method
        == kind
    )
