"""Rows of a plan as batches, with full and document masks."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from training_samples import make_sample

from longrope2.data.corpus import open_corpus
from longrope2.data.loader import IGNORED_LABEL, RowLoader, order_of_rows
from longrope2.data.plan import read_plan
from longrope2.training.loop import PlanRows


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    sample = make_sample(tmp_path_factory.mktemp("sample"), window=32, target=64)
    plan = read_plan(sample.folder / "plan.jsonl")
    return plan, [open_corpus(key, sample.folder / "cache") for key in plan.corpus_keys]


def batches(planned, **options):
    rows = PlanRows(*planned, seed=3, **options)
    return [(rows.kind(n), rows(n)) for n in range(len(planned[0]))]


def test_rows_are_those_of_the_loader_in_seeded_order(planned):
    loader = RowLoader(*planned)
    found = batches(planned)
    assert {kind for kind, _ in found} == {"short", "long"}
    order = order_of_rows(planned[0].bucket_of_row, seed=3, epoch=0)
    for index, (kind, batch) in zip(order, found, strict=True):
        row = loader.row(int(index))
        assert kind == row.kind
        assert np.array_equal(batch.tokens[0], row.token_ids)
        assert np.array_equal(batch.positions[0], row.position_ids)
        assert np.array_equal(batch.labels[0], row.labels())
        assert batch.boundaries == [row.cu_seqlens.tolist()]
        assert batch.long_rows.tolist() == [kind == "long"]


def test_a_second_epoch_has_the_same_rows_in_another_order(planned):
    rows, count = PlanRows(*planned, seed=3), len(planned[0])
    epochs = [[tuple(rows(n).tokens[0].tolist()) for n in range(e * count, (e + 1) * count)] for e in range(8)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert any(epoch != epochs[0] for epoch in epochs)


def test_document_masks_part_the_documents_of_long_rows(planned):
    several = 0
    for (kind, ours), (_, full) in zip(batches(planned, long_row_mask="document"), batches(planned), strict=True):
        if kind == "short":
            assert ours.boundaries == full.boundaries
            continue
        assert full.boundaries == [[0, 64]]
        assert torch.equal(full.positions[0], torch.arange(64))
        (ends,) = ours.boundaries
        several += len(ends) > 2
        assert ends[0] == 0
        assert ends[-1] == 64
        for start, stop in pairwise(ends):
            assert torch.equal(ours.positions[0, start:stop], torch.arange(stop - start))
            # The token after a border is never asked for before it.
            assert ours.labels[0, stop - 1] == IGNORED_LABEL
        assert torch.equal(ours.labels, full.labels)
        assert ours.long_rows.tolist() == [True]
    assert several


def test_a_row_is_named_with_its_documents(planned):
    plan, corpora = planned
    rows = PlanRows(*planned, seed=3)
    for number, index in enumerate(order_of_rows(plan.bucket_of_row, seed=3, epoch=0).tolist()):
        name = rows.name(number)
        spans = plan.row(index).spans
        assert name.startswith(f"row {number} of the run ({plan.row(index).kind}, row {index} of the plan, from ")
        titles = {corpora[span.source].title(span.document) for span in spans}
        assert sum(repr(title) in name for title in titles) == min(len(titles), 4)
        assert (f"and {len(titles) - 4} more" in name) == (len(titles) > 4)
