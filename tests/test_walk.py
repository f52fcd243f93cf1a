"""Every causal language model of transformers is in the box where docs/models.md has it."""

import copy
import re
from pathlib import Path

import pytest
import torch

from longrope2.errors import LongRopeError, RotaryError
from longrope2.families import STILL, read_config
from longrope2.generation.saved import read_factors, write_factors
from longrope2.generation.switch import switching
from longrope2.rotary import rescaled
from walk import (
    REFUSED,
    SEARCH,
    SUPPORTED,
    WINDOW,
    Verdict,
    check_export,
    judge,
    logits,
    model_types,
    off,
    page,
    rotating_kinds,
    tiny_config,
    tiny_factors,
    tiny_model,
    tokens_of,
)

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
# One of each kind: complex numbers, a part of the head, axes of positions, zero frequencies, layers without RoPE, other
# states beside and within layers of attention, refusals.
SAMPLE = [
    "deepseek_v2",
    "mistral4",
    "qwen3_5_text",
    "gemma4_text",
    "llama4_text",
    "falcon_h1",
    "lfm2",
    "minimax",
    "gptj",
]


def boxes() -> dict[str, Verdict]:
    """What the docs say."""
    text = DOCS.read_text().partition("## All model types")[2]
    table, _, rest = text.partition("### For search")
    found = {}
    for line in re.findall(r"^\| `.*", table, re.M):
        cells = [cell.strip() for cell in line.split("|")]
        if cells[1] != "`model_type`":
            found[cells[1].strip("`")] = Verdict(SUPPORTED, cells[3])
    for box, part in zip((SEARCH, REFUSED), rest.split("### Refused"), strict=True):
        for item in re.findall(r"^- (.*?)(?=^- |\Z)", part, re.M | re.S):
            reason, _, names = " ".join(item.split()).rpartition(": ")
            found |= dict.fromkeys(re.findall(r"`([^`]*)`", names), Verdict(box, reason))
    return found


def test_the_docs_are_as_they_are_written_by_the_walk():
    assert page(DOCS.read_text(), boxes()) == DOCS.read_text(), "run make families"


def test_the_docs_name_every_class():
    assert sorted(boxes()) == model_types(), "another transformers version: run make families"


def test_the_families_that_people_ask_for_are_supported():
    asked = (
        "olmo3 ministral3 mistral4 qwen3_5_text qwen3_5_moe_text qwen3_next gemma4_text gemma3n_text llama4_text "
        "seed_oss exaone4 apertus hunyuan_v1_dense ernie4_5 ernie4_5_moe glm4_moe deepseek_v2 deepseek_v3 minimax_m2 "
        "nemotron arcee granitemoe granitemoehybrid phimoe nanochat lfm2 falcon_h1 smollm3"
    )
    found = boxes()
    assert {name: found[name].box for name in asked.split()} == dict.fromkeys(asked.split(), SUPPORTED)
    assert sum(verdict.box == SUPPORTED for verdict in found.values()) >= 60


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_of_the_walk(model_type):
    assert judge(model_type) == boxes()[model_type]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(model_types()) - set(SAMPLE)))
def test_the_whole_walk(model_type):
    assert judge(model_type) == boxes()[model_type]


class TestOddities:
    def test_attention_that_yarn_rescales_a_second_time_keeps_its_scale(self):
        """DeepSeek's attention reads mscale_all_dim and factor itself; without them, scores are off by 1.3."""
        yarn = {
            "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": WINDOW,
        }  # fmt: skip
        config = tiny_config("deepseek_v3", yarn, max_position_embeddings=4 * WINDOW)
        assert read_config(config.to_dict()).rescaled.method == "yarn"
        check_export(config)

    def test_queries_that_are_scaled_by_the_original_window(self):
        config = tiny_config("ministral3").to_dict()
        assert read_config(config).rope.original_length == WINDOW
        with pytest.raises(LongRopeError, match=f"original window in its config, {WINDOW} tokens"):
            read_config(config, original_length=16)

    def test_frequencies_at_zero_stay_there(self):
        """Gemma 4 rotates a quarter of a head, with the frequencies of the whole: a smaller head of a smaller base."""
        config = tiny_config("gemma4_text")
        factors, reading = tiny_factors(config), read_config(config.to_dict())
        inv_freq = tiny_model(config).model.rotary_emb.full_attention_inv_freq
        counts = int((inv_freq > 0).sum()), int((inv_freq == 0).sum())
        assert (reading.rope.num_dims, reading.num_still) == (4, 12) == counts
        torch.testing.assert_close(torch.tensor(reading.rope.frequencies), inv_freq[:4])
        write_factors(config, factors, WINDOW)
        written = config.rope_parameters["full_attention"]
        assert written["long_factor"] == [*factors.long, *[STILL] * 12]
        assert written["rope_theta"] == 10_000.0
        assert read_factors(read_config(config.to_dict())).rotates_as(factors)
        written, tokens = tiny_model(config), tokens_of(60)
        ours = logits(switching(tiny_model(tiny_config("gemma4_text")), factors), tokens)
        assert off(ours, logits(written, tokens)) < 1e-5
        with rescaled(written, factors):  # frequencies divided by STILL are known again
            assert off(ours, logits(written, tokens)) < 1e-5

    @pytest.mark.parametrize("model_type", ["qwen3_next", "zamba2"])
    def test_a_static_cache_beside_the_states_of_a_hybrid(self, model_type):
        config = tiny_config(model_type)
        rows = torch.cat((tokens_of(30, 1), tokens_of(30, 2)))
        outputs = [
            switching(tiny_model(config), tiny_factors(config)).generate(
                rows, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True, cache_implementation=kind,
            )
            for kind in ("static", "dynamic")
        ]  # fmt: skip
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        assert off(torch.stack(outputs[0].logits), torch.stack(outputs[1].logits)) < 1e-4

    def test_layers_without_rope_are_found_not_listed(self):
        assert rotating_kinds(tiny_config("cohere2")) == {"sliding_attention"}
        assert rotating_kinds(tiny_config("gemma3_text")) == {"full_attention"}
        assert rotating_kinds(tiny_config("lfm2")) == {"full_attention"}


class TestLiveModels:
    """What a config cannot promise, the live model is asked."""

    def test_frequencies_other_than_those_of_the_config(self):
        config = tiny_config("llama")
        model = tiny_model(config)
        model.model.rotary_emb.inv_freq *= 1.05
        with pytest.raises(RotaryError, match="rotates by other frequencies than its config says"):
            switching(model, tiny_factors(config))

    def test_several_modules_that_agree(self):
        config = tiny_config("granite_swa")
        model, factors, tokens = tiny_model(config), tiny_factors(config), tokens_of(60)
        modules = model.model.rotary_emb, model.model.rotary_embs[0]
        before = logits(model, tokens)
        with rescaled(model, factors) as rotary:
            assert model.model.rotary_embs[0] is model.model.rotary_emb is rotary
            assert off(logits(model, tokens), before) > 1e-2
        assert (model.model.rotary_emb, model.model.rotary_embs[0]) == modules
        modules[1].inv_freq *= 2
        with pytest.raises(RotaryError, match="has 2 rotary modules, expected one"), rescaled(model, factors):
            pass

    def test_layers_with_a_rope_of_their_own_are_proved_too(self):
        """Gemma 3's sliding layers keep their module; a layer that rotates by a third one does not pass."""
        config = tiny_config("gemma3_text")
        model, factors = tiny_model(config), tiny_factors(config)
        secret, layer = copy.deepcopy(model.model.rotary_emb), model.model.layers[0]
        forward = layer.forward

        def rotate_alone(hidden_states, position_ids=None, position_embeddings=None, **options):
            own = secret(hidden_states, position_ids, "sliding_attention")
            return forward(hidden_states, position_ids=position_ids, position_embeddings=own, **options)

        layer.forward = rotate_alone
        with pytest.raises(RotaryError, match="some layers rotate alone"), rescaled(model, factors):
            pass


def test_a_cache_of_a_familys_own_is_refused():
    config = tiny_config("minimax")
    model = switching(tiny_model(config), tiny_factors(config))
    with pytest.raises(LongRopeError, match="MiniMaxCache is not exact across the switch, since it keeps more"):
        model.generate(tokens_of(30), max_new_tokens=8)
