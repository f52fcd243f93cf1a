"""LoRA and freezing: what learns, and that merged weights are the trained model."""

import sys

import pytest
import torch
from training_samples import make_sample, weights

from conftest import family_model
from longrope2.errors import LongRopeError, MissingExtraError
from longrope2.training.train import full_state
from longrope2.training.trainable import add_lora, freeze, matching, merged


def tokens():
    return torch.arange(3, 40)[None]


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "gpt_neox", "qwen3_moe"])
def test_merged_weights_are_the_model_with_its_additions(family):
    """Against peft's own forward pass, on layers with and without bias."""
    model, plain = family_model(family), family_model(family)
    with torch.no_grad():
        before = model(tokens()).logits
    torch.manual_seed(0)
    add_lora(model, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, before)  # additions start at zero
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (".lora_" in name)
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
        expected = model(tokens()).logits
        assert (expected - before).abs().max() > 0.1
        plain.load_state_dict(full_state(model, torch.float32))
        torch.testing.assert_close(plain(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    assert not hasattr(model.get_output_embeddings(), "lora_A")


def test_a_model_without_additions_is_merged_as_it_is():
    model = family_model("llama")
    state = model.state_dict()
    assert all(merged(state, model)[name] is tensor for name, tensor in state.items())


def test_patterns():
    model = family_model("llama", tie_word_embeddings=True)
    assert matching(model, []) == set()
    assert matching(model, ["*norm*"]) == {name for name, _ in model.named_parameters() if "norm" in name}
    freeze(model, ["lm_head.weight"])
    assert not model.model.embed_tokens.weight.requires_grad  # one weight, two names
    assert model.model.norm.weight.requires_grad
    with pytest.raises(LongRopeError, match=r"'\*\.lora' names no parameter") as caught:
        freeze(model, ["*norm*", "*.lora"])
    assert "model.embed_tokens.weight" in caught.value.hint
    with pytest.raises(LongRopeError, match="leaves no parameter"):
        freeze(model, ["model.*"])  # the head is a part of it by its other name


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return make_sample(tmp_path_factory.mktemp("sample"))


def test_lora_through_a_run_resumes_and_ends_merged(sample, tmp_path, monkeypatch):
    before = weights(sample.model)
    whole = weights(sample.run(tmp_path / "whole", lora=4))
    assert set(whole) == set(before)
    changed = {name for name in before if not torch.equal(before[name], whole[name])}
    assert changed == {name for name in before if "_proj." in name}

    class BrokenOffError(Exception):
        pass

    def stop(self, result):
        if result.step == 3:
            raise BrokenOffError

    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.log.StepReporter.step", stop)
        with pytest.raises(BrokenOffError):
            sample.run(tmp_path / "parts", lora=4)
    parts = weights(sample.run(tmp_path / "parts", lora=4))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_lora_without_peft_names_the_command(sample, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="peft") as caught:
        sample.run(tmp_path / "run", lora=4)
    assert caught.value.hint == "pip install 'longrope2[train]'"
