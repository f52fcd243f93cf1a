"""Rows of the original length: positions drawn from the long window (PoSE, randomized), and no rotation (DroPE)."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from training_samples import WINDOW, make_sample, weights
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from longrope2.data.corpus import open_corpus
from longrope2.data.loader import IGNORED_LABEL
from longrope2.data.plan import plan_documents, read_plan
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.generation.saved import write_factors
from longrope2.models import describe, load, rescale_model
from longrope2.training.loop import PlanRows
from longrope2.training.mixed import mixed_window
from longrope2.training.positions import DrawnPositions, scattered, skipping

LONG = 4 * WINDOW
DRAWN = ("pose", "random")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """With a plan of rows of the trained window, and factors of one RoPE for a window four times that."""
    sample = make_sample(tmp_path_factory.mktemp("sample"))
    plan = {"target_length": WINDOW, "rows": 24, "buckets": ()}
    sources = {"config": sample.folder / "mix.toml", "cache": sample.folder / "cache"}
    (sample.folder / "mix.toml").write_text((sample.folder / "mix.toml").read_text().partition("[[bucket]]")[0])
    plan_documents(str(sample.model), sample.folder / "short.jsonl", **sources, **plan)
    for method in ("yarn", "drope"):
        rescale_model(describe(sample.model), method, LONG).save(sample.folder / f"{method}.json")
    rescale_model(describe(sample.model), "yarn", 96).save(sample.folder / "near.json")
    return sample


@pytest.fixture(scope="module")
def planned(sample):
    plan = read_plan(sample.folder / "short.jsonl")
    return plan, [open_corpus(key, sample.folder / "cache") for key in plan.corpus_keys]


def options(sample, method="yarn", **others):
    return {"plan": sample.folder / "short.jsonl", "factors": sample.folder / f"{method}.json", "window": "single",
            **others}  # fmt: skip


def drawing(how, rows=40, row_length=WINDOW, target_length=LONG, seed=3):
    return DrawnPositions(how=how, row_length=row_length, target_length=target_length, rows=rows, seed=seed)


def test_rows_are_as_long_as_the_trained_window(planned):
    plan, _ = planned
    assert {row.kind for row in plan} == {"short"}
    assert plan.config.target_length == plan.config.original_length == WINDOW
    assert sum(len(row.spans) > 1 for row in plan) > 5


def pose_by_its_authors(length, limit):
    """Transcribed from dwzhu-pku/PoSE, src/train_pose.py, for a text that fits the window."""
    left_end = random.randint(1, (length + 1) // 2)
    positions = torch.arange(length)
    positions[left_end:] += random.randint(0, limit - length)
    return tuple(positions.tolist())


def test_pose_is_its_authors():
    rng = np.random.default_rng(0)
    random.seed(0)
    ours = Counter(tuple(skipping(7, 11, rng).tolist()) for _ in range(40_000))
    theirs = Counter(pose_by_its_authors(7, 11) for _ in range(40_000))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4 * 4 + 1  # a skip of 0 is the same wherever it is
    for positions in ours:
        assert ours[positions] == pytest.approx(theirs[positions], abs=5 * np.sqrt(2 * theirs[positions]))


def test_scattered_positions_are_any_in_order():
    rng = np.random.default_rng(0)
    found = Counter(tuple(scattered(3, 6, rng).tolist()) for _ in range(20_000))
    assert len(found) == 20  # 6 over 3, all alike
    assert all(a < b < c for a, b, c in found)
    assert all(count == pytest.approx(1000, abs=5 * np.sqrt(1000)) for count in found.values())
    assert scattered(6, 6, rng).tolist() == list(range(6))
    assert skipping(6, 6, rng).tolist() == list(range(6))
    assert skipping(1, 4, rng).tolist() == [0]


def test_the_range_grows_as_published():
    """8k → 10k → 12k → 16k → 16k, in fifths of the run."""
    draw = drawing("random", rows=50, row_length=8192, target_length=16384)
    highest = [max(int(draw(number, [0, 8192]).max()) for number in range(i, i + 10)) for i in range(0, 60, 10)]
    limits = [8192, 10240, 12288, 16384, 16384, 16384]
    assert all(limit - 12 < most + 1 <= limit for most, limit in zip(highest, limits, strict=True))


@pytest.mark.parametrize("how", DRAWN)
def test_documents_are_drawn_apart_and_a_number_decides(planned, how):
    plain = PlanRows(*planned, seed=3)
    rows, again = (PlanRows(*planned, seed=3, draw=drawing(how)) for _ in range(2))
    beyond = different = 0
    for number in reversed(range(40)):
        batch, before = rows(number), plain(number)
        assert torch.equal(batch.tokens, before.tokens)
        assert torch.equal(batch.labels, before.labels)
        assert batch.boundaries == before.boundaries
        for start, stop in pairwise(batch.boundaries[0]):
            document = batch.positions[0, start:stop]
            assert bool((document.diff() > 0).all())
            assert 0 <= int(document[0]) < LONG
            assert int(document[-1]) < LONG
            beyond += int(document[-1]) >= WINDOW
            if how == "pose":
                assert int((document.diff() > 1).sum()) <= 1
                assert int(document[0]) == 0
        assert torch.equal(batch.positions, again(number).positions)
        different += not torch.equal(batch.positions, rows(number + 1).positions)
    assert beyond > 20
    assert different == 40


def unrotated_attention(monkeypatch):
    """As SakanaAI/DroPE does it: cos of ones and sin of zeros for every layer."""
    forward = LlamaAttention.forward

    def without(self, hidden_states, position_embeddings, *args, **kwargs):
        cos, sin = position_embeddings
        return forward(self, hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", without)


@pytest.mark.parametrize("how", [*DRAWN, "drope"])
def test_the_loss_is_that_of_transformers_on_every_document_alone(sample, planned, how, monkeypatch, tmp_path):
    method = "drope" if how == "drope" else "yarn"
    factors = RescaleFactors.load(sample.folder / f"{method}.json").long_everywhere()
    rows = PlanRows(*planned, seed=0, draw=None if how == "drope" else drawing(how))
    model = load(sample.model, device="cpu", dtype=torch.float32).model
    losses = []
    with mixed_window(model, factors) as mixed, torch.no_grad():
        for number in range(30, 34):
            batch = rows(number)
            with mixed.rows_of(batch):
                losses.append(float(mixed(batch)))
    if how == "drope":
        oracle = AutoModelForCausalLM.from_pretrained(sample.model)
        unrotated_attention(monkeypatch)
    else:
        model = AutoModelForCausalLM.from_pretrained(sample.model)
        write_factors(model.config, factors, factors.original_length)
        model.save_pretrained(tmp_path)
        oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    for number, loss in zip(range(30, 34), losses, strict=True):
        batch, expected = rows(number), 0.0
        for start, stop in pairwise(batch.boundaries[0]):
            part = slice(start, stop)
            with torch.no_grad():
                logits = oracle(
                    batch.tokens[:, part],
                    position_ids=batch.positions[:, part],
                    attention_mask=torch.ones(1, stop - start),
                    use_cache=False,
                ).logits
            labels = batch.labels[0, part]
            expected += float(
                torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum", ignore_index=IGNORED_LABEL)
            )
        assert loss == pytest.approx(expected, rel=2e-5)


class BrokenOffError(Exception):
    pass


@pytest.mark.parametrize("positions", DRAWN)
def test_a_run_resumes_bit_for_bit(sample, tmp_path, monkeypatch, positions):
    wanted = options(sample, positions=positions)
    whole = weights(sample.run(tmp_path / "whole", **wanted))
    plain = weights(
        sample.run(tmp_path / "other", **options(sample, positions="pose" if positions == "random" else "random"))
    )
    assert any(not torch.equal(whole[name], plain[name]) for name in whole)

    def stop(self, result):
        if result.step == 3:
            raise BrokenOffError

    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.log.StepReporter.step", stop)
        with pytest.raises(BrokenOffError):
            sample.run(tmp_path / "parts", **wanted)
    parts = weights(sample.run(tmp_path / "parts", **wanted))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_drope_is_trained_and_runs_in_plain_transformers(sample, tmp_path, monkeypatch):
    folder = sample.run(tmp_path / "run", **options(sample, "drope"))
    trained = AutoModelForCausalLM.from_pretrained(folder)
    assert trained.config.max_position_embeddings == LONG
    tokens = torch.arange(3, 3 + 3 * WINDOW)[None]
    with torch.no_grad():
        found = trained(tokens, use_cache=False).logits
        far = trained(tokens, position_ids=torch.arange(tokens.shape[1])[None] + 99, use_cache=False).logits
        unrotated_attention(monkeypatch)
        expected = trained(tokens, use_cache=False).logits
    assert torch.equal(found, expected)
    assert torch.equal(found, far)
    before, after = weights(sample.model), weights(folder)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "row"}, f"target_length is {WINDOW}, that of the factors {LONG}"),
        ({"window": "mixed"}, "positions pose need window single"),
        ({"method": "drope", "positions": "row", "window": "mixed"}, "--window single"),
        ({"positions": "chunks"}, "positions must be"),
        ({"factors": "near.json", "plan": "plan.jsonl"}, "target_length is 128, that of the factors 96"),
    ],
)  # fmt: skip
def test_what_nothing_would_learn_from_is_refused(sample, tmp_path, changes, message):
    named = {name: sample.folder / value for name, value in changes.items() if name in ("factors", "plan")}
    wanted = options(sample, **{"positions": "pose", **changes, **named})
    with pytest.raises(LongRopeError, match=message):
        sample.run(tmp_path / "run", **wanted)
