"""Generation across the switch: every logit equals a fresh, uncached forward of its row alone."""

import copy
import json
import logging
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache, StoppingCriteria, TextStreamer

from conftest import FAMILY_OPTIONS, ORIGINAL_LENGTH, TARGET_LENGTH, family_model
from longrope2 import attention
from longrope2.errors import FactorsError, LongRopeError
from longrope2.families import attends_simply
from longrope2.generation import caches, saved, strategies
from longrope2.generation.switch import load, switching
from longrope2.models import decoder_layers
from longrope2.rotary import rescaled
from test_rotary import make_factors, through_transformers, tokens_of

FAMILIES = sorted(FAMILY_OPTIONS)
# The two sides differ in every dimension and in temperature, so nothing wrong can pass for right.
SIDES = {"short_attention_factor": 1.0, "long_attention_factor": 1.3}


def switching_model(family="llama", *, factors=None, **options):
    model = family_model(family)
    return switching(model, factors or make_factors(model, **SIDES), **options)


class Oracle:
    """The same weights without any switch: rows are run alone, uncached, on the side that their length says."""

    def __init__(self, family="llama", *, switch_length=ORIGINAL_LENGTH, factors=None):
        self.model = family_model(family)
        self.factors = factors or make_factors(self.model, **SIDES)
        self.switch_length = switch_length

    def logits(self, row, *, long=None):
        long = len(row) > self.switch_length if long is None else long
        with rescaled(self.model, self.factors, long_rows=long, check=False), torch.no_grad():
            return self.model(input_ids=row[None], use_cache=False).logits[0]

    def check(self, output, mask, *, long_rows=None, tolerance=1e-4):
        """Replay every row of an output of generate at every position it generated."""
        prompt = mask.shape[1]
        for index, sequence in enumerate(output.sequences):
            start = sequence[:prompt][mask[index].bool()]
            for step, together in enumerate(output.logits):
                row = torch.cat((start, sequence[prompt : prompt + step]))
                alone = self.logits(row, long=None if long_rows is None else long_rows[index])[-1]
                error = (together[index] - alone).abs().max() / alone.abs().max()
                assert error < tolerance, f"row {index}, {len(row)} tokens: relative error {error:.1e}"


def batch_of(*lengths, side="left", seed=0):
    """Rows of these lengths, padded to the longest."""
    width = max(lengths)
    rows = [tokens_of(length, seed=seed + i)[0] for i, length in enumerate(lengths)]
    pad = [(width - n, 0) if side == "left" else (0, width - n) for n in lengths]
    ids = torch.stack([torch.nn.functional.pad(row, p) for row, p in zip(rows, pad, strict=True)])
    return ids, (ids != 0).long()


def generate(model, ids, mask=None, new=8, **options):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [ORIGINAL_LENGTH - 3, 2 * ORIGINAL_LENGTH])
def test_long_texts_are_read_in_pieces_without_a_mask(family, length, monkeypatch):
    """Also where they are read again at the switch; a mask of a piece over a million tokens would fit no memory."""
    monkeypatch.setattr(strategies, "READ_TOKENS", 12)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    model, oracle, seen = switching_model(family), Oracle(family), []
    simply = attends_simply(model.config)
    before = model.config._attn_implementation
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(
            lambda _, args, given: seen.append((args[0].shape[1], given.get("attention_mask"))), with_kwargs=True
        )
    ids, mask = batch_of(length)
    oracle.check(generate(model, ids, mask), mask)
    if simply:
        assert max(size for size, _ in seen) == 12
        assert all(given is None for size, given in seen if size > 1)
    assert model.config._attn_implementation == before
    oracle.check(generate(model, *batch_of(length, 20)), batch_of(length, 20)[1])  # padding needs a mask
    oracle.check(generate(model, ids, mask, cache_implementation="static"), mask)  # so does room for more


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["recompute", "shadow"])
def test_every_family_crosses_exactly(family, strategy):
    """One row crosses at once, one later, one never, and one is long from the start."""
    model, oracle = switching_model(family, strategy=strategy, shadow_chunk=4), Oracle(family)
    ids, mask = batch_of(31, 28, 20, 36)
    for cache in ("dynamic", "static"):
        oracle.check(generate(model, ids, mask, cache_implementation=cache), mask)


class TestTheRule:
    def test_the_switch_length_itself_is_still_short(self):
        model, oracle = switching_model(), Oracle()
        ids, mask = batch_of(ORIGINAL_LENGTH)
        output = generate(model, ids, mask, new=2)
        oracle.check(output, mask)
        short, long = (oracle.logits(ids[0], long=side)[-1] for side in (False, True))
        assert torch.allclose(output.logits[0][0], short, atol=1e-4)
        assert not torch.allclose(output.logits[0][0], long, atol=0.1)
        assert model.longrope2.extra_tokens == [0, ORIGINAL_LENGTH]

    def test_one_rope_for_all_has_no_other_side(self, capsys):
        """Nothing is run again, and a cache of any length goes on beyond the original window."""
        factors = make_factors(family_model("llama"), **SIDES).long_everywhere()
        model, oracle = switching_model(factors=factors), Oracle(factors=factors)
        ids, mask = batch_of(ORIGINAL_LENGTH - 1, ORIGINAL_LENGTH - 4)
        first = generate(model, ids, mask, new=8)
        oracle.check(first, mask)
        assert model.longrope2.extra_tokens == [0] * 8
        model(tokens_of(2), past_key_values=(cache := DynamicCache(config=model.config)))
        model(tokens_of(ORIGINAL_LENGTH), past_key_values=cache)
        assert capsys.readouterr().err == ""
        switching_model(factors=factors, switch_length=12)
        assert "a switch length of 12 changes nothing" in capsys.readouterr().err

    def test_another_switch_length(self):
        model, oracle = switching_model(switch_length=12), Oracle(switch_length=12)
        ids, mask = batch_of(10, 8, 20)
        oracle.check(generate(model, ids, mask), mask)
        row = tokens_of(13)[0]
        with torch.no_grad():
            assert torch.allclose(model(row[None]).logits[0], oracle.logits(row), atol=1e-4)

    def test_plain_forwards_count_attended_tokens(self):
        model, oracle = switching_model(), Oracle()
        ids, mask = batch_of(40, 20)
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            together = model(ids, attention_mask=mask, position_ids=positions).logits
            alone = model(ids[:1]).logits
            triangle = torch.full((1, 1, 40, 40), torch.finfo(torch.float32).min).triu(1)
            assert torch.equal(model(ids[:1], attention_mask=triangle).logits, alone)  # it says nothing of padding
        for row in (0, 1):
            expected = oracle.logits(ids[row][mask[row].bool()])
            assert torch.allclose(together[row, -len(expected) :], expected, atol=1e-4)
        assert torch.allclose(alone[0], oracle.logits(ids[0]), atol=1e-4)


class TestWaysToGenerate:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding(self, side):
        ids, mask = batch_of(30, 24, 33, side=side)
        for passed in (mask, mask.bool()):
            output = generate(switching_model(), ids, passed, new=12)
            assert torch.equal(output.sequences[:, :33], ids)
            Oracle().check(output, mask)

    @pytest.mark.parametrize("strategy", ["recompute", "shadow"])
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_chunked_prefill(self, strategy, cache):
        """The first chunks of a long prompt look short."""
        model, widths = switching_model(strategy=strategy, shadow_chunk=4), []
        model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
        for lengths in ((31, 29), (60, 21)):
            ids, mask = batch_of(*lengths)
            output = generate(model, ids, mask, prefill_chunk_size=7, cache_implementation=cache)
            Oracle().check(output, mask)
        assert max(widths) == 7

    def test_sampling(self):
        ids, mask = batch_of(28)
        torch.manual_seed(5)
        output = generate(switching_model(), ids, mask, do_sample=True, top_k=0, top_p=1.0)
        Oracle().check(output, mask)
        torch.manual_seed(5)
        row, oracle = ids[0], Oracle()
        for _ in range(8):
            drawn = torch.multinomial(oracle.logits(row)[-1:].softmax(-1), 1)
            row = torch.cat((row, drawn[0]))
        assert torch.equal(output.sequences[0], row)

    def test_several_samples_of_a_prompt(self):
        ids, mask = batch_of(30, 26)
        torch.manual_seed(0)
        output = generate(switching_model(), ids, mask, do_sample=True, num_return_sequences=2)
        Oracle().check(output, mask.repeat_interleave(2, dim=0))

    def test_streaming(self):
        class Letters:
            def decode(self, tokens, **_):
                return "".join(chr(0x4E00 + int(token)) for token in tokens)

        class Collect(TextStreamer):
            text = ""

            def on_finalized_text(self, text, stream_end=False):
                self.text += text

        streamer = Collect(Letters(), skip_prompt=True)
        ids, mask = batch_of(30)
        output = generate(switching_model(), ids, mask, streamer=streamer)
        assert streamer.text == Letters().decode(output.sequences[0, 30:])

    def test_without_cache(self):
        ids, mask = batch_of(31, 25)
        Oracle().check(generate(switching_model(), ids, mask, use_cache=False), mask)

    def test_beams_equal_beams_without_cache(self):
        ids, mask = batch_of(30, 27)
        options = {"num_beams": 3, "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
        model = switching_model()
        cached = model.generate(ids, attention_mask=mask, **options)
        assert sum(model.longrope2.extra_tokens) > 0
        assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **options))

    def test_compiled_decode(self):
        """One graph serves both sides of the switch."""
        torch._dynamo.reset()
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph

        compiling = CompileConfig(fullgraph=True, mode=None, backend=backend)
        compiling._compile_all_devices = True
        ids, mask = batch_of(30, 27)
        model = switching_model()
        output = generate(model, ids, mask, cache_implementation="static", compile_config=compiling)
        Oracle().check(output, mask)
        assert len(graphs) == 1
        assert [tokens for tokens in model.longrope2.extra_tokens if tokens] == [32, 35]

    @pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
    @pytest.mark.parametrize("strategy", ["recompute", "shadow"])
    def test_offloaded_caches(self, cache, strategy, monkeypatch):
        """Their book-keeping, without the CUDA streams that transformers wants; test_generation_gpu.py has those."""
        model, oracle, (ids, mask) = switching_model(strategy=strategy), Oracle(), batch_of(31, 28, 36)
        monkeypatch.setattr(torch, "Stream", MagicMock())
        monkeypatch.setattr(torch.cuda, "default_stream", MagicMock())
        oracle.check(generate(model, ids, mask, cache_implementation=cache), mask)


class TestEndedRows:
    """Rows that end early continue as padding, which is never read: no work for them."""

    def ending_first(self, model, ids, mask):
        """Options with an end token that the first row says at once and no other row ever."""
        first, *others = (row[ids.shape[1] :].tolist() for row in generate(model, ids, mask, new=14).sequences)
        assert all(first[0] not in other for other in others)
        return {"new": 14, "eos_token_id": first[0]}

    def swapped_rows(self, monkeypatch):
        swapped = []

        def replace_rows(cache, rows, source):
            swapped.append(rows)
            caches.replace_rows(cache, rows, source)

        monkeypatch.setattr(strategies, "replace_rows", replace_rows)
        return swapped

    @pytest.mark.parametrize("strategy", ["recompute", "shadow"])
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_they_do_not_cross(self, strategy, cache, monkeypatch):
        model, (ids, mask) = switching_model(strategy=strategy, shadow_chunk=16), batch_of(30, 24)
        options = self.ending_first(model, ids, mask)
        swapped = self.swapped_rows(monkeypatch)
        output = generate(model, ids, mask, cache_implementation=cache, **options)
        assert output.sequences.shape[1] == 44
        assert (output.sequences[0, 31:] == 0).all()
        assert swapped == [[1]]
        Oracle().check(type(output)(sequences=output.sequences[1:], logits=[x[1:] for x in output.logits]), mask[1:])
        if strategy == "recompute":
            assert [tokens for tokens in model.longrope2.extra_tokens if tokens] == [38]

    @pytest.mark.parametrize("strategy", ["recompute", "shadow"])
    def test_their_cache_says_so(self, strategy):
        """Two rows that would cross together; the cache, cropped to before the switch, is right for both."""
        model, (ids, mask) = switching_model(strategy=strategy, shadow_chunk=2), batch_of(24, 24, seed=2)
        output = generate(model, ids, mask, **self.ending_first(model, ids, mask))
        for columns in (36, 28):
            cache = copy.deepcopy(output.past_key_values)
            cache.crop(columns - cache.get_seq_length())
            again = torch.cat((output.sequences[:, :columns], tokens_of(1).expand(2, 1)), dim=1)
            ones = torch.ones_like(again)  # the padding too: transformers would mask it
            Oracle().check(generate(model, again, ones, past_key_values=cache, new=2), ones)

    def test_rows_that_another_criterion_stops_go_on_and_cross(self):
        """Without an end token transformers returns what such rows go on to say."""

        class FirstRow(StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                return torch.arange(len(input_ids)) == 0

        ids, mask = batch_of(30, 24)
        output = generate(switching_model(), ids, mask, new=14, stopping_criteria=[FirstRow()])
        Oracle().check(output, mask)


class TestConversations:
    """Caches that live longer than one call."""

    @pytest.mark.parametrize("strategy", ["recompute", "shadow", "pin"])
    @pytest.mark.parametrize("chunk", [None, 5])
    def test_crossing_between_turns(self, strategy, chunk):
        model = switching_model(strategy=strategy, shadow_chunk=4)
        ids, mask = batch_of(20, 18)
        cache = DynamicCache(config=model.config)
        for new_tokens in (3, 14, 5):  # within the window, across it, beyond it
            output = generate(model, ids, mask, new=4, past_key_values=cache, prefill_chunk_size=chunk)
            if strategy != "pin":
                Oracle().check(output, mask)
            more, _ = batch_of(new_tokens, new_tokens, seed=new_tokens)
            ids = torch.cat((output.sequences, more), dim=1)
            mask = torch.cat((mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.long)), dim=1)

    def test_static_cache(self):
        model = switching_model()
        ids, mask = batch_of(26)
        cache = StaticCache(config=model.config, max_cache_len=60)
        first = generate(model, ids, mask, new=4, past_key_values=cache)
        ids = torch.cat((first.sequences, tokens_of(9, seed=3)), dim=1)
        output = generate(model, ids, past_key_values=cache)
        Oracle().check(output, torch.ones_like(ids))

    def test_work_is_saved_when_the_cache_fits(self):
        model, (ids, mask) = switching_model(), batch_of(20)
        first = generate(model, ids, mask, new=4)
        ran = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs: ran.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        more = torch.cat((first.sequences, tokens_of(3)), dim=1)
        generate(model, more, past_key_values=first.past_key_values, new=1)
        assert ran == [4]  # the last token of the first turn, and three new ones

    def test_a_batch_padded_anew(self):
        """Longer turns shift the shorter rows against their cache; transformers would not notice."""
        model, (ids, mask) = switching_model(), batch_of(20, 14)
        first = generate(model, ids, mask, new=4)
        short = first.sequences[1][6:]
        ids, mask = first.sequences[:1], torch.ones(2, 30, dtype=torch.long)
        ids = torch.cat((torch.cat((ids[0], tokens_of(6)[0]))[None], torch.nn.functional.pad(short, (12, 0))[None]))
        mask[1, :12] = 0
        Oracle().check(generate(model, ids, mask, past_key_values=first.past_key_values), mask)

    def test_another_conversation_with_an_old_cache(self):
        model, (ids, mask) = switching_model(), batch_of(20)
        first = generate(model, ids, mask, new=4)
        other = tokens_of(30, seed=9)
        Oracle().check(generate(model, other, past_key_values=first.past_key_values), torch.ones_like(other))

    def test_a_prefix_cached_by_a_plain_forward(self):
        model, ids = switching_model(), tokens_of(30)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :18], past_key_values=cache)
            model(ids[:, 18:20], past_key_values=cache)
        assert torch.equal(caches.noted(cache).tokens, ids[:, :20])
        Oracle().check(generate(model, ids, past_key_values=copy.deepcopy(cache)), torch.ones_like(ids))
        Oracle().check(generate(model, ids, past_key_values=cache), torch.ones_like(ids))

    def test_a_cropped_cache_goes_back_to_the_short_side(self):
        model, ids = switching_model(), tokens_of(36)
        output = generate(model, ids, new=2)
        output.past_key_values.crop(-20)
        again = ids[:, :25]
        Oracle().check(generate(model, again, past_key_values=output.past_key_values), torch.ones_like(again))

    def test_a_manual_loop_is_stopped_at_the_switch(self):
        model, ids = switching_model(), tokens_of(ORIGINAL_LENGTH)
        with torch.no_grad():
            cache = model(ids[:, :-1]).past_key_values
            cache = model(ids[:, -1:], past_key_values=cache).past_key_values
            with pytest.raises(LongRopeError, match="filled on the other side of the switch"):
                model(ids[:, -1:], past_key_values=cache)
            assert model.longrope2.rotary.long_rows is None


class TestStrategies:
    def test_shadow_spreads_what_recompute_does_at_once(self):
        ids, mask = batch_of(12)
        recompute, shadow = switching_model(), switching_model(strategy="shadow", shadow_chunk=4)
        expected, spread = (generate(model, ids, mask, new=30) for model in (recompute, shadow))
        Oracle().check(spread, mask)
        assert torch.equal(spread.sequences, expected.sequences)
        assert max(recompute.longrope2.extra_tokens) == sum(recompute.longrope2.extra_tokens) == ORIGINAL_LENGTH
        assert max(shadow.longrope2.extra_tokens) == 4
        assert sum(shadow.longrope2.extra_tokens) == ORIGINAL_LENGTH
        # Steps 13 to 20 attend to 26 … 33 tokens: the eight chunks end with the step that crosses.
        assert [i for i, n in enumerate(shadow.longrope2.extra_tokens) if n] == list(range(14, 22))

    @pytest.mark.parametrize("chunk", [None, 5])
    def test_what_the_prompt_leaves_too_few_steps_for_is_run_with_the_prompt(self, chunk):
        model, (ids, mask) = switching_model(strategy="shadow", shadow_chunk=3), batch_of(28)
        Oracle().check(generate(model, ids, mask, new=10, prefill_chunk_size=chunk), mask)
        assert model.longrope2.extra_tokens == [18, 3, 3, 3, 3, 2, 0, 0, 0, 0]

    def test_shadow_builds_nothing_for_a_switch_that_cannot_come(self):
        model, (ids, mask) = switching_model(strategy="shadow", shadow_chunk=4), batch_of(25)
        generate(model, ids, mask, new=8)  # the last token is never attended to
        assert sum(model.longrope2.extra_tokens) == 0

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_pin_keeps_one_side(self, cache):
        model, (ids, mask) = switching_model(strategy="pin"), batch_of(30, 20)
        output = generate(model, ids, mask, new=10, cache_implementation=cache)
        Oracle().check(output, mask, long_rows=[True, False])
        assert sum(model.longrope2.extra_tokens) == 0
        Oracle().check(generate(model, ids, mask, new=3), mask, long_rows=[False, False])

    def test_switching_again_replaces_factors_and_strategy(self):
        model = switching_model()
        other = make_factors(family_model("llama"), long=(9.0,) * 8)
        assert switching(model, other, strategy="shadow") is model
        ids, mask = batch_of(30)
        Oracle(factors=other).check(generate(model, ids, mask), mask)


@settings(max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    chunk=st.sampled_from([None, 1, 3, 8, 50]),
    cache=st.sampled_from(["dynamic", "static"]),
    strategy=st.sampled_from(["recompute", "shadow"]),
    shadow_chunk=st.integers(1, 9),
    switch_length=st.integers(1, 40),
    new=st.integers(1, 8),
    family=st.sampled_from(["llama", "gemma3_text"]),
)
def test_property_any_batch_is_exact(lengths, side, chunk, cache, strategy, shadow_chunk, switch_length, new, family):
    model = switching_model(family, strategy=strategy, shadow_chunk=shadow_chunk, switch_length=switch_length)
    ids, mask = batch_of(*lengths, side=side)
    output = generate(model, ids, mask, new=new, prefill_chunk_size=chunk, cache_implementation=cache)
    Oracle(family, switch_length=switch_length).check(output, mask)


class TestPlainTransformersIsWrong:
    """Why all this exists. The day one of these fails, transformers has learnt it."""

    def wrong(self, *lengths, **options):
        factors = make_factors(family_model("llama"))
        ids, mask = batch_of(*lengths)
        output = generate(through_transformers("llama", factors), ids, mask, **options)
        with pytest.raises(AssertionError, match="relative error"):
            Oracle(factors=factors).check(output, mask)

    def test_on_a_cache_that_crosses(self):
        self.wrong(30)

    def test_on_a_mixed_batch(self):
        self.wrong(50, 10, new=1)

    def test_in_chunked_prefill(self):
        self.wrong(50, new=1, prefill_chunk_size=20)

    def test_but_right_on_one_side(self):
        factors = make_factors(family_model("llama"))
        ids, mask = batch_of(20)
        Oracle(factors=factors).check(generate(through_transformers("llama", factors), ids, mask), mask)


class TestSaving:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_plain_transformers_reads_what_is_saved(self, family, tmp_path, capsys):
        factors = make_factors(family_model(family), short_attention_factor=1.2, long_attention_factor=1.2)
        model = switching_model(family, factors=factors)
        model.save_pretrained(tmp_path)
        assert "warning" not in capsys.readouterr().err
        assert not list(tmp_path.glob("*.py"))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert type(plain).__name__ == type(model).__name__
        assert plain.config.max_position_embeddings == TARGET_LENGTH
        before, after = model.state_dict(), plain.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        with torch.no_grad():
            for length in (ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1):
                row = tokens_of(length)
                ours, theirs = model(row).logits, plain(row).logits
                assert (ours - theirs).abs().max() / theirs.abs().max() < 2e-4
        again = load(plain)
        same = ("long", "short", "original_length", "target_length", "theta", "rotary_dim")
        assert all(getattr(again.longrope2.factors, name) == getattr(factors, name) for name in same)
        ids, mask = batch_of(31, 20)
        Oracle(family, factors=factors).check(generate(again, ids, mask, new=4), mask)

    def test_two_attention_factors_are_kept_with_a_warning(self, tmp_path, capsys, caplog):
        logging.getLogger("transformers").addHandler(caplog.handler)  # it does not hand its records up
        model = switching_model()
        model.save_pretrained(tmp_path)
        assert "plain transformers knows one attention factor" in capsys.readouterr().err
        again = load(AutoModelForCausalLM.from_pretrained(tmp_path))
        factors = again.longrope2.factors
        assert (factors.short_attention_factor, factors.long_attention_factor) == (1.0, 1.3)
        assert "Unrecognized keys" not in caplog.text
        model.config.rope_parameters["surprise"] = 1
        model.config.validate_rope()
        assert "Unrecognized keys" in caplog.text
        logging.getLogger("transformers").removeHandler(caplog.handler)

    def test_the_tiny_model_from_disk(self, tmp_path):
        from longrope2 import models
        from longrope2.methods import rescale

        info = models.describe("tiny")
        factors = rescale("yarn-rcd", info.rope, 1024, critical_dimension=9)
        factors.save(tmp_path / "factors.json")
        model = load("tiny", tmp_path / "factors.json", device="cpu")
        assert model.longrope2.factors == factors
        models.load("tiny", device="cpu").tokenizer.save_pretrained(tmp_path / "saved")
        model.save_pretrained(tmp_path / "saved")
        assert load(tmp_path / "saved", device="cpu").longrope2.factors.long == factors.long


class TestRefusals:
    def refused(self, match, *args, model=None, **options):
        with pytest.raises(LongRopeError, match=match) as caught:
            generate(model or switching_model(), *args, **options)
        assert caught.value.hint

    def test_assisted_decoding(self):
        self.refused("'assisted_generation' is not exact", tokens_of(9), assistant_model=family_model("llama"))
        self.refused("'assisted_generation' is not exact", tokens_of(9), prompt_lookup_num_tokens=3)

    def test_beams_with_shadow(self):
        self.refused("beam search moves rows", tokens_of(9), num_beams=2, model=switching_model(strategy="shadow"))

    def test_growing_beyond_the_target(self, capsys):
        model, ids = switching_model(), tokens_of(TARGET_LENGTH - 2)
        self.refused("come to 129 tokens, the factors are made for 128", ids, new=3, model=model)
        generate(model, ids, new=2)
        capsys.readouterr()
        Oracle().check(generate(model, ids, new=3, allow_beyond=True), torch.ones_like(ids))
        assert "warning: prompt and new tokens come to 129" in capsys.readouterr().err

    def test_padding_does_not_count_towards_the_target(self):
        ids, mask = torch.nn.functional.pad(tokens_of(20), (120, 0)), torch.zeros(1, 140, dtype=torch.long)
        mask[:, 120:] = 1
        Oracle().check(generate(switching_model(), ids, mask), mask)

    def test_only_the_new_tokens_of_a_conversation(self):
        model, ids = switching_model(), tokens_of(20)
        cache = generate(model, ids, new=4).past_key_values
        self.refused("input_ids has only 3", ids[:, :3], model=model, past_key_values=cache)
        self.refused("attention_mask has shape", ids[:, :3], torch.ones(1, 26), model=model, past_key_values=cache)

    def test_unknown_padding_on_the_right(self):
        self.refused("end in padding", batch_of(20, 10, side="right")[0])

    def test_embeddings(self):
        model, embeddings = switching_model(), torch.zeros(1, 4, 64)
        with pytest.raises(LongRopeError, match="needs the tokens themselves"):
            model.generate(inputs_embeds=embeddings)
        with torch.no_grad(), pytest.raises(LongRopeError, match="or by another model"):
            model(tokens_of(1), past_key_values=model(inputs_embeds=embeddings).past_key_values)

    def test_other_loops(self):
        self.refused("a second prompt between steps", tokens_of(9), guidance_scale=1.5)
        self.refused("a decoding loop of its own", tokens_of(9), custom_generate="owner/name")

    def test_other_caches(self):
        class OddCache(DynamicCache):
            pass

        cache = OddCache(config=family_model("llama").config)
        cache.layers[0].__class__ = type("QuantizedLayer", (type(cache.layers[0]),), {})
        self.refused("not exact across the switch", tokens_of(9), past_key_values=cache)
        self.refused("continuous batching", tokens_of(9), cache_implementation="paged")

    def test_chunks_without_a_cache(self):
        self.refused("prefill_chunk_size needs a cache", tokens_of(9), use_cache=False, prefill_chunk_size=3)

    def test_bad_options(self):
        with pytest.raises(LongRopeError, match="'guess' is not known"):
            switching_model(strategy="guess")
        with pytest.raises(LongRopeError, match="switch_length must lie from 1 to"):
            switching_model(switch_length=TARGET_LENGTH + 1)
        with pytest.raises(LongRopeError, match="shadow_chunk must be at least 1"):
            switching_model(shadow_chunk=0)
        with pytest.raises(FactorsError, match="has no factors of its own"):
            load(family_model("llama"))
        with pytest.raises(FactorsError, match="made for another model"):
            switching(family_model("llama"), make_factors(family_model("llama"), theta=500.0))

    def test_an_error_leaves_the_model_usable(self):
        model, (ids, mask) = switching_model(), batch_of(31)

        class Fails(TextStreamer):
            def put(self, value):
                raise KeyError

        with pytest.raises(KeyError):
            generate(model, ids, mask, streamer=Fails(None))
        assert model.longrope2.run is None
        Oracle().check(generate(model, ids, mask), mask)

    @pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
    def test_the_switch_length_is_kept(self, family, tmp_path):
        switching_model(family, switch_length=20).save_pretrained(tmp_path)
        again = load(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
        assert again.longrope2.switch_length == 20
        ids, mask = batch_of(18)
        Oracle(family, switch_length=20).check(generate(again, ids, mask, new=5), mask)
        given = load(again, switch_length=25)
        assert given.longrope2.switch_length == 25
        # Other factors know nothing of it, and the original window needs no mention.
        assert switching(again, again.longrope2.factors).longrope2.switch_length == ORIGINAL_LENGTH
        again.save_pretrained(tmp_path)
        assert "longrope2" not in json.loads((tmp_path / "config.json").read_text())

    @pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
    def test_saved_without_what_transformers_cannot_read(self, family, tmp_path):
        """A config may say head_dim null, as Mixtral's, and name code of the original's repository."""
        model = family_model(family)
        model.config.head_dim, model.config.auto_map = None, {"AutoModelForCausalLM": "modeling_odd.Odd"}
        switching(model, make_factors(model, **SIDES)).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["head_dim"] == 16
        assert "auto_map" not in config

    def test_a_switch_length_stored_in_a_folder(self, tmp_path):
        switching_model().save_pretrained(tmp_path)
        before = json.loads((tmp_path / "config.json").read_text())
        saved.store_switch_length(tmp_path, 20)
        assert load(AutoModelForCausalLM.from_pretrained(tmp_path)).longrope2.switch_length == 20
        saved.store_switch_length(tmp_path, ORIGINAL_LENGTH)
        assert json.loads((tmp_path / "config.json").read_text()) == before
        with pytest.raises(LongRopeError, match=r"no config\.json to store"):
            saved.store_switch_length(tmp_path / "nowhere", 20)

    @pytest.mark.parametrize("value", ["20", 2.5, True])
    def test_a_stored_switch_length_that_is_no_number(self, value):
        with pytest.raises(FactorsError, match="must be a number of tokens"):
            saved.read_switch_length({"longrope2": {"switch_length": value}})
