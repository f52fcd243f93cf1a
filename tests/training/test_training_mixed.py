"""The proofs of mixed rows: packed documents are as if alone, short rows the base, long rows longrope."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import FAMILY_OPTIONS, family_model
from longrope2 import perplexity
from longrope2.data.loader import IGNORED_LABEL
from longrope2.training.mixed import ATTENTION_OPERATIONS, Batch, loss_in_pieces, mixed_window
from test_rotary import make_factors, through_transformers

FAMILIES = sorted(FAMILY_OPTIONS)
ROW = 48
LENGTHS = [10, 6, 32]  # documents of the short row


def tokens_of(length, seed):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


def labels_of(tokens, ends):
    labels = torch.cat((tokens[1:], torch.tensor([IGNORED_LABEL])))
    labels[[end - 1 for end in ends[1:]]] = IGNORED_LABEL
    return labels


def mixed_batch():
    """A short row of three documents and a long row, in one batch."""
    ends = [0, 10, 16, 48]
    short, long = tokens_of(ROW, 0), tokens_of(ROW, 1)
    return Batch(
        tokens=torch.stack((short, long)),
        positions=torch.stack((torch.cat([torch.arange(n) for n in LENGTHS]), torch.arange(ROW))),
        labels=torch.stack((labels_of(short, ends), labels_of(long, [0, ROW]))),
        long_rows=torch.tensor([False, True]),
        boundaries=[ends, [0, ROW]],
    )


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(ours, theirs, tolerance=2e-4):
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3)


@pytest.fixture
def pieces_of_logits(monkeypatch):
    monkeypatch.setattr("longrope2.training.mixed.LOGIT_ROWS", 20)
    assert perplexity.LOGIT_ROWS > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_each_document_is_alone(family):
    model = family_model(family)
    factors = make_factors(model, short=(1.0,) * len(make_factors(model).long), long_attention_factor=1.2,
                           short_attention_factor=1.0)  # fmt: skip
    batch = mixed_batch()
    with torch.no_grad():
        alone, start = [], 0
        for length in LENGTHS:  # the untouched base model, document by document
            document = batch.tokens[:1, start : start + length]
            alone.append(model(document, use_cache=False).logits)
            start += length
        theirs = through_transformers(family, factors)
        long = theirs(batch.tokens[1:], use_cache=False).logits
        with mixed_window(model, factors) as mixed, mixed.rows_of(batch):
            together = mixed.logits(batch)
    assert_close(together[:1], torch.cat(alone, dim=1))
    assert_close(together[1:], long)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_documents_alone(family, recompute, pieces_of_logits):
    model = family_model(family)
    factors = make_factors(model, short=(1.0,) * len(make_factors(model).long))
    batch = mixed_batch()
    start, total = 0, torch.zeros(())
    for length in LENGTHS:
        document = batch.tokens[:1, start : start + length]
        logits = model(document, use_cache=False).logits
        total = total + F.cross_entropy(logits[0, :-1], document[0, 1:], reduction="sum")
        start += length
    total.backward()
    expected = gradients(model)
    theirs = through_transformers(family, factors)
    long_logits = theirs(batch.tokens[1:], use_cache=False).logits
    long_loss = F.cross_entropy(long_logits[0, :-1], batch.tokens[1, 1:], reduction="sum")
    long_loss.backward()
    expected_long = gradients(theirs)

    model.train()
    with mixed_window(model, factors, recompute=recompute) as mixed, mixed.rows_of(batch):
        loss = mixed(batch)
        loss.backward()
    ours = gradients(model)
    assert loss.item() == pytest.approx((total + long_loss).item(), rel=1e-4)
    for name, gradient in ours.items():
        assert_close(gradient, expected[name] + expected_long[name], tolerance=1e-3)


def test_a_frozen_head_takes_no_memory_for_gradients():
    """It has a row for every token of the vocabulary, and LoRA freezes it."""
    hidden, head = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8)
    labels = torch.arange(6)
    loss = loss_in_pieces(lambda piece: piece @ head.T, hidden, labels, [head])
    _, kept = loss.grad_fn.saved_tensors
    assert kept is None
    expected = torch.autograd.grad(F.cross_entropy(hidden @ head.T, labels, reduction="sum"), hidden)
    assert_close(torch.autograd.grad(loss, hidden)[0], expected[0])


class Counter(TorchDispatchMode):
    """Counts attention and matrix products that really run."""

    def __init__(self):
        super().__init__()
        self.counts = {"attention": 0, "products": 0}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts["attention"] += operation.name() in ATTENTION_OPERATIONS
        self.counts["products"] += operation.name() in ("aten::mm", "aten::addmm")
        return operation(*args, **(kwargs or {}))


def test_recomputing_spares_attention():
    counts = {}
    for recompute in (False, True):
        model = family_model("llama").train()
        batch = mixed_batch()
        with mixed_window(model, make_factors(model), recompute=recompute) as mixed, mixed.rows_of(batch):
            loss = mixed(batch)
            with Counter() as forward:
                loss = mixed(batch)
            with Counter() as backward:
                loss.backward()
        counts[recompute] = (forward.counts, backward.counts)
    without, with_it = counts[False], counts[True]
    assert without[0] == with_it[0]
    assert with_it[0]["attention"] > 0
    assert with_it[1]["attention"] == without[1]["attention"] == 0
    assert with_it[1]["products"] > without[1]["products"]


def test_leaking_across_documents_would_be_seen():
    """The test above can fail: without boundaries the short row's logits differ."""
    model = family_model("llama")
    factors = make_factors(model)
    batch = mixed_batch()
    leaky = Batch(**{**batch.__dict__, "boundaries": [[0, ROW], [0, ROW]]})
    with torch.no_grad(), mixed_window(model, factors) as mixed:
        with mixed.rows_of(batch):
            right = mixed.logits(batch)
        with mixed.rows_of(leaky):
            wrong = mixed.logits(leaky)
    assert (right[0, 10:] - wrong[0, 10:]).abs().max() > 0.1
    assert torch.equal(right[1], wrong[1])
    assert batch.to(torch.device("cpu")).boundaries == batch.boundaries
