"""One config.json for every engine: each family as transformers reads it, and the temperature in the weights."""

import copy
import json
from dataclasses import replace
from typing import get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import FAMILY_OPTIONS, ORIGINAL_LENGTH, family_model
from longrope2.errors import LongRopeError, ModelError
from longrope2.export.config import Profile, profiled
from longrope2.export.engines import forced_temperature
from longrope2.export.huggingface import config_problems, serving_config, with_forced_temperature
from longrope2.export.weights import QueryScale
from longrope2.families import read_config
from longrope2.generation.saved import read_factors
from longrope2.rotary import rescaled
from test_rotary import make_factors, tokens_of

LENGTHS = (20, ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, 60)
FACTS = (
    "long",
    "short",
    "theta",
    "original_length",
    "target_length",
    "long_attention_factor",
    "short_attention_factor",
)


def one_temperature(model, temperature=1.0, **changes):
    both = {"short_attention_factor": temperature, "long_attention_factor": temperature}
    return make_factors(model, **{**both, **changes})


def logits(model, length):
    with torch.no_grad():
        return model(tokens_of(length), use_cache=False).logits


class TestTransformers:
    @pytest.mark.parametrize("profile", get_args(Profile))
    @pytest.mark.parametrize("family", FAMILY_OPTIONS)
    def test_every_family_reads_what_was_meant(self, family, profile, tmp_path):
        model = family_model(family)
        factors = profiled(one_temperature(model, 0.9), profile)
        model.save_pretrained(tmp_path)
        config = serving_config(model.config.to_dict(), factors, dtype="float32")
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        read = read_factors(read_config(theirs.config.to_dict()))
        assert {name: getattr(read, name) for name in FACTS} == {name: getattr(factors, name) for name in FACTS}
        expected = {length: logits(theirs, length) for length in LENGTHS}
        with rescaled(model, factors, check=False):
            for length in LENGTHS:
                error = (logits(model, length) - expected[length]).abs().max() / expected[length].abs().max()
                assert error < 2e-4

    def test_keys_that_other_readers_need(self):
        """What transformers 4, vLLM, SGLang and mlx-lm look up; tried by hand against each of them."""
        model = family_model("llama")
        factors = one_temperature(model)
        for profile in get_args(Profile):
            config = serving_config(model.config.to_dict(), profiled(factors, profile), dtype="bfloat16")
            legacy, modern = config["rope_scaling"], config["rope_parameters"]
            assert legacy["type"] == legacy["rope_type"] == modern["rope_type"] == "longrope"
            assert legacy == {"type": "longrope", **modern}
            assert legacy["short_mscale"] == legacy["long_mscale"] == legacy["attention_factor"] == 1.0
            assert config["rope_theta"] == modern["rope_theta"] == 10_000.0
            assert (config["head_dim"], config["max_position_embeddings"]) == (16, 128)
            assert config["torch_dtype"] == config["dtype"] == "bfloat16"
            # At the top it makes transformers 4 switch, and vLLM start with the original window.
            assert config.get("original_max_position_embeddings") == (32 if profile == "dual" else None)

    @pytest.mark.parametrize("family", ["gpt_neox", "phi", "gemma3_text"])
    def test_names_of_single_families(self, family):
        model = family_model(family)
        config = serving_config(model.config.to_dict(), one_temperature(model), dtype="float32")
        expected = {
            "gpt_neox": {"rotary_emb_base": 10_000.0, "rotary_pct": 0.25, "partial_rotary_factor": 0.25},
            "phi": {"partial_rotary_factor": 0.5},
            "gemma3_text": {"rope_local_base_freq": 1_000.0},
        }[family]
        assert expected.items() <= config.items()

    def test_phi3_of_transformers_4_takes_three_keys_or_none(self):
        """With its own temperature it gets exactly those; with another it must refuse, and more keys make it."""
        model = family_model("phi3")
        for temperature, count in ((forced_temperature(one_temperature(model)), 3), (1.0, 11)):
            factors = profiled(one_temperature(model, temperature), "static-long")
            config = serving_config(model.config.to_dict(), factors, dtype="float32")
            assert len(config["rope_scaling"]) == count
            assert config["original_max_position_embeddings"] == ORIGINAL_LENGTH  # it would assume 4096

    def test_the_rest_of_a_config_stays(self):
        source = {**family_model("llama").config.to_dict(), "something": [1], "_name_or_path": "/home/somebody"}
        source["auto_map"] = {"AutoModelForCausalLM": "modeling_odd.Odd"}  # code that is not exported
        source["rope_scaling"] = {"type": "linear", "factor": 2.0}
        before = copy.deepcopy(source)
        config = serving_config(source, one_temperature(family_model("llama")), dtype="float32")
        assert source == before
        assert config["something"] == [1]
        assert not {"_name_or_path", "auto_map"} & config.keys()
        assert config["rope_scaling"]["type"] == "longrope"

    def test_a_switch_length_is_kept_where_there_is_a_switch(self):
        model = family_model("llama")
        dual, static = (profiled(one_temperature(model), profile) for profile in get_args(Profile))
        calibrated = serving_config(model.config.to_dict(), dual, dtype="float32")
        source = {**calibrated, "longrope2": {"switch_length": 24}}
        others = replace(dual, long=tuple(2 * factor for factor in dual.long))
        assert "longrope2" not in serving_config(source, others, dtype="float32")  # of which it says nothing
        assert serving_config(source, dual, dtype="float32")["longrope2"] == {"switch_length": 24}
        assert "longrope2" not in serving_config(source, static, dtype="float32")


class TestProblems:
    @pytest.mark.parametrize(
        "path",
        [
            "rope_theta", "head_dim", "max_position_embeddings", "original_max_position_embeddings", "rope_parameters",
            "rope_scaling", "rope_parameters.long_factor", "rope_parameters.attention_factor",
            "rope_parameters.short_mscale", "rope_parameters.original_max_position_embeddings", "rope_scaling.type",
            "rope_scaling.rope_type", "rope_scaling.short_factor", "rope_scaling.long_mscale",
            "rope_scaling.rope_theta", "rope_scaling.original_max_position_embeddings", "rope_scaling.attention_factor",
        ],
    )  # fmt: skip
    def test_every_key_is_missed(self, path):
        model = family_model("llama")
        expected = serving_config(model.config.to_dict(), one_temperature(model), dtype="float32")
        assert config_problems(copy.deepcopy(expected), expected) == []
        config = copy.deepcopy(expected)
        *inner, last = path.split(".")
        del (config[inner[0]] if inner else config)[last]
        assert config_problems(config, expected) == [f"{path} is missing"]

    def test_other_values(self):
        model = family_model("llama")
        expected = serving_config(
            model.config.to_dict(), profiled(one_temperature(model), "static-long"), dtype="float32"
        )
        config = copy.deepcopy(expected)
        config["original_max_position_embeddings"] = 32
        config["rope_theta"] = 500.0
        config["rope_scaling"]["long_factor"][3] = 7.0
        assert config_problems(config, expected) == [
            "rope_theta is 500.0, not 10000.0",
            "original_max_position_embeddings should not be there",
            "rope_scaling.long_factor differs from the factors",
        ]


class TestFolding:
    CASES = (
        *((family, {}) for family in FAMILY_OPTIONS if family != "smollm3"),
        ("smollm3", {"num_hidden_layers": 4}),  # the last of them has no RoPE
        ("phi", {"qk_layernorm": True}),
        ("stablelm", {"qk_layernorm": True}),
    )

    @pytest.mark.parametrize(("family", "options"), CASES)
    def test_folded_weights_under_the_forced_temperature_are_the_same_model(self, family, options):
        model = family_model(family, **options)
        wanted = one_temperature(model, 0.9)
        forced = with_forced_temperature(wanted)
        with rescaled(model, wanted, check=False):
            expected = [logits(model, length) for length in (20, 60)]
        with rescaled(model, forced, check=False):
            unfolded = [logits(model, length) for length in (20, 60)]
        state = model.state_dict()
        ratio = (wanted.long_attention_factor / forced.long_attention_factor) ** 2
        scale = QueryScale(model.config.to_dict(), state.keys(), ratio)
        model.load_state_dict({name: scale(name, tensor) for name, tensor in state.items()})
        with rescaled(model, forced, check=False):
            folded = [logits(model, length) for length in (20, 60)]
        for right, before, after in zip(expected, unfolded, folded, strict=True):
            assert (after - right).abs().max() < 2e-5 * right.abs().max()
            assert (before - right).abs().max() > 1e-2 * right.abs().max()

    def test_two_temperatures_cannot_be_folded(self):
        factors = make_factors(family_model("llama"), short_attention_factor=1.0, long_attention_factor=1.2)
        with pytest.raises(LongRopeError, match=r"short \(1\) and long \(1.2\) sequences differ"):
            with_forced_temperature(factors)
        assert with_forced_temperature(profiled(factors, "static-long")).short == factors.long

    def test_unknown_names_are_refused(self):
        config = AutoConfig.for_model("llama").to_dict() | {"num_hidden_layers": 2}
        with pytest.raises(ModelError, match="queries of layer 1 are not where"):
            QueryScale(config, ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.odd.weight"], 0.9)
