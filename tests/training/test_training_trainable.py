"""LoRA and freezing: what learns, and that merged weights are the trained model."""

import sys

import pytest
import torch
from training_samples import make_sample, weights

from conftest import family_model
from longrope2 import export_model
from longrope2.data.loader import IGNORED_LABEL
from longrope2.errors import LongRopeError, MissingExtraError
from longrope2.training.mixed import Batch, mixed_window
from longrope2.training.train import full_state
from longrope2.training.trainable import add_lora, freeze, matching, merged
from test_rotary import make_factors


def tokens():
    return torch.arange(3, 40)[None]


@pytest.mark.parametrize("also", [(), ("norms", "embeddings")])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "gpt_neox", "qwen3_moe"])
def test_merged_weights_are_the_model_with_its_additions(family, also):
    """Against peft's own forward pass, on layers with and without bias."""
    model, plain = family_model(family), family_model(family)
    with torch.no_grad():
        before = model(tokens()).logits
    torch.manual_seed(0)
    add_lora(model, 4, also)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, before)  # additions start at zero
        for name, parameter in model.named_parameters():
            beside = bool(also) and ("norm" in name or "embed_in" in name or "embed_tokens" in name)
            assert parameter.requires_grad == (".lora_" in name or beside), name
            if ".lora_B." in name or beside:
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


class BrokenOffError(Exception):
    pass


def stop_after_three(self, result):
    if result.step == 3:
        raise BrokenOffError


def test_lora_through_a_run_resumes_and_ends_merged(sample, tmp_path, monkeypatch):
    before = weights(sample.model)
    whole = weights(sample.run(tmp_path / "whole", lora=4))
    assert set(whole) == set(before)
    changed = {name for name in before if not torch.equal(before[name], whole[name])}
    assert changed == {name for name in before if "_proj." in name}

    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.log.StepReporter.step", stop_after_three)
        with pytest.raises(BrokenOffError):
            sample.run(tmp_path / "parts", lora=4)
    parts = weights(sample.run(tmp_path / "parts", lora=4))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("tied", [True, False])
def test_norms_and_embeddings_learn_beside_additions(tmp_path, monkeypatch, tied):
    """Through a run that breaks off: what changed, bit for bit the same as in one piece, and exported as it is."""
    sample = make_sample(tmp_path / "sample", tie_word_embeddings=tied)
    options = {"lora": 4, "also": ("norms", "embeddings")}
    before, folder = weights(sample.model), sample.run(tmp_path / "whole", **options)
    whole = weights(folder)
    changed = {name for name in before if not torch.equal(before[name], whole[name])}
    assert changed == {name for name in before if "_proj." in name or "norm" in name or "embed_tokens" in name}
    assert ("lm_head.weight" in before) != tied
    monkeypatch.setattr("longrope2.training.log.StepReporter.step", stop_after_three)
    with pytest.raises(BrokenOffError):
        sample.run(tmp_path / "parts", **options)
    monkeypatch.undo()
    parts = weights(sample.run(tmp_path / "parts", **options))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    export_model(folder, tmp_path / "exported")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(tmp_path / "exported").items())
    assert sum(tensor.numel() for tensor in whole.values()) == sum(t.numel() for t in before.values())


@pytest.mark.parametrize("tied", [True, False])
def test_their_gradients_are_those_of_transformers(tied):
    """The head's gradient is taken piece by piece; a tied embedding gets it from both its places."""
    model = family_model("llama", tie_word_embeddings=tied)
    torch.manual_seed(0)
    add_lora(model, 4, ("norms", "embeddings"))
    factors = make_factors(model, short=(1.0,) * len(make_factors(model).long))
    labels = torch.cat((tokens()[:, 1:], torch.full((1, 1), IGNORED_LABEL)), dim=1)
    batch = Batch(
        tokens=tokens(),
        positions=torch.arange(tokens().shape[1])[None],
        labels=labels,
        long_rows=torch.tensor([False]),
        boundaries=[[0, tokens().shape[1]]],
    )
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    count = tokens().shape[1] - 1
    expected = {name: p.grad * count for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with mixed_window(model, factors) as mixed, mixed.rows_of(batch):
        mixed(batch).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert "model.embed_tokens.weight" in found
    assert ("lm_head.weight" in found) is False
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4 * float(expected[name].abs().max()))


@pytest.mark.slow
def test_they_learn_the_same_on_two_processes(tmp_path):
    """Spread over processes, a layer holds weights that learn and others that do not."""
    sample = make_sample(tmp_path / "sample", tie_word_embeddings=True)
    one = weights(sample.run(tmp_path / "one", lora=4, also=("norms", "embeddings")))
    two = sample.start(tmp_path / "two", processes=2, lora=4, also="norms,embeddings")
    assert two.wait(timeout=240) == 0, two.stderr.read()
    for name, tensor in weights(tmp_path / "two" / "model").items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-4, atol=1e-5, msg=name)


def test_what_learns_beside_is_for_lora(sample, tmp_path):
    with pytest.raises(LongRopeError, match="also is for lora"):
        sample.run(tmp_path / "run", also=("norms",))
    with pytest.raises(LongRopeError, match=r'also must be .*"norms" or "embeddings", got \["heads"\]'):
        sample.run(tmp_path / "run", lora=4, also=("heads",))


def test_lora_without_peft_names_the_command(sample, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="peft") as caught:
        sample.run(tmp_path / "run", lora=4)
    assert caught.value.hint == "pip install 'longrope2[train]'"
