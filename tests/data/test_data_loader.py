"""Rows as the model gets them, and an order that needs one integer to resume."""

import numpy as np
import pytest
from data_samples import FIRST_TOKEN, MARKS, STRIDE, MemoryCorpus, plan_of
from hypothesis import given
from hypothesis import strategies as st

from longrope2.data.corpus import Marks
from longrope2.data.loader import RowLoader, order_of_rows
from longrope2.data.plan import build_plan
from longrope2.errors import DataError

TARGET = 64
ALL_MARKS = [MARKS, Marks(bos=None, eos=2, pad=2), Marks(bos=1, eos=None, pad=1)]
RNG = np.random.default_rng(0)
DOCUMENTS = [*RNG.integers(1, 15, 200).tolist(), *RNG.integers(15, 200, 100).tolist()]


def loader(marks: Marks = MARKS, **options) -> RowLoader:
    plan, corpus = plan_of(DOCUMENTS, marks, **options)
    return RowLoader(plan, [corpus])


@pytest.mark.parametrize("marks", ALL_MARKS)
def test_rows_hold_what_the_plan_says(marks):
    rows = loader(marks)
    kinds = set()
    for index, planned in enumerate(rows.plan):
        row = rows.row(index)
        kinds.add(row.kind)
        assert row.token_ids.shape == row.position_ids.shape == row.label_mask.shape == (TARGET,)
        expected = []
        for span in planned.spans:
            expected += [marks.bos] * (marks.bos is not None)
            expected += range(FIRST_TOKEN + STRIDE * span.document + span.start,
                              FIRST_TOKEN + STRIDE * span.document + span.stop)  # fmt: skip
            expected += [marks.eos] * (marks.eos is not None and span.stop == DOCUMENTS[span.document])
        assert row.document_starts[-1] == len(expected)
        expected += [marks.pad] * planned.padding
        assert row.token_ids.tolist() == expected
        assert (row.kind, row.bucket) == (planned.kind, rows.plan.config.buckets[planned.bucket].label)
    assert kinds == {"short", "long"}


@pytest.mark.parametrize("marks", ALL_MARKS)
def test_positions_restart_in_short_rows_and_run_through_long_ones(marks):
    rows = loader(marks)
    for index in range(len(rows)):
        row = rows.row(index)
        if row.kind == "long":
            assert row.position_ids.tolist() == list(range(TARGET))
            assert row.cu_seqlens.tolist() == [0, TARGET]
            continue
        assert row.cu_seqlens.tolist() == sorted({*row.document_starts.tolist(), TARGET})
        for begin, end in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False):
            assert row.position_ids[begin:end].tolist() == list(range(end - begin))
            assert end - begin <= rows.plan.config.original_length


@pytest.mark.parametrize("marks", ALL_MARKS)
def test_labels_never_cross_documents(marks):
    rows = loader(marks)
    for index in range(len(rows)):
        row = rows.row(index)
        # Which piece each place belongs to, by counting; padding belongs to none.
        piece = np.searchsorted(row.document_starts, np.arange(TARGET), side="right")
        piece[row.document_starts[-1] :] = 0
        labels = row.labels()
        for place in range(TARGET):
            same = place + 1 < TARGET and piece[place] == piece[place + 1] != 0
            assert row.label_mask[place] == same
            assert labels[place] == (row.token_ids[place + 1] if same else -100)
        assert row.labels(ignored=-1).min() == -1


def test_padding_is_masked_and_apart():
    plan, corpus = plan_of([12] * 50, max_padding=0.5)  # four documents of 14, 8 tokens left
    row = RowLoader(plan, [corpus]).row(0)
    assert row.document_starts.tolist() == [0, 14, 28, 42, 56]
    assert row.cu_seqlens.tolist() == [0, 14, 28, 42, 56, 64]
    assert row.token_ids[56:].tolist() == [MARKS.pad] * 8
    assert not row.label_mask[55:].any()
    assert row.label_mask[:55].sum() == 55 - 3


def test_a_loader_refuses_other_documents():
    plan, corpus = plan_of(DOCUMENTS)
    with pytest.raises(DataError, match="not those of the plan"):
        RowLoader(plan, [MemoryCorpus(DOCUMENTS, key="other")])
    shorter = RowLoader(plan, [MemoryCorpus([1] * len(DOCUMENTS))])
    with pytest.raises(DataError, match="which is not in the corpus"):
        shorter.row(0)
    fewer = RowLoader(plan, [MemoryCorpus([1])])
    with pytest.raises(DataError, match="which is not in the corpus"):
        fewer.row(0)
    RowLoader(plan, [corpus]).check()
    for loader in (shorter, fewer):
        with pytest.raises(DataError, match="row 0 refers to"):
            loader.check()
    with pytest.raises(DataError, match="asked for, the plan has rows 0 to"):
        RowLoader(plan, [corpus]).row(-1)


@pytest.mark.parametrize(
    ("spans", "padding", "message"),
    [
        ([[0, 0, 0, 60]], 0, "row 0 has 62 tokens, not 64"),
        ([[0, 0, 1, 60]], 1, "row 0 has 62 tokens, not 64"),
        ([[0, 0, 0, 59]], 3, "row 0 has 63 tokens, not 64"),
        ([[0, 0, 0, 60]] * 2, 0, "row 0 is longer than 64"),
    ],
)
def test_a_row_that_does_not_add_up_is_refused(spans, padding, message):
    plan, _ = plan_of(DOCUMENTS)
    parts = {name: getattr(plan, name) for name in ("config", "sources", "corpus_keys", "tokenizer", "marks", "report")}
    wrong = build_plan(buckets=[1], padding=[padding], spans=[np.array(spans, dtype=np.int32)], **parts)
    with pytest.raises(DataError, match=message):
        RowLoader(wrong, [MemoryCorpus([60])]).row(0)
    with pytest.raises(DataError, match=message):
        RowLoader(wrong, [MemoryCorpus([60])]).check()


# The sampler


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 5))
def test_an_epoch_takes_every_row_once_and_every_bucket_evenly(buckets, seed):
    order = order_of_rows(np.array(buckets), seed=seed, epoch=0)
    assert sorted(order.tolist()) == list(range(len(buckets)))
    for bucket in set(buckets):
        share = buckets.count(bucket) / len(buckets)
        taken = np.cumsum(np.array(buckets)[order] == bucket)
        # Of any beginning it has its share, but for one of its own and what others are ahead by.
        assert np.abs(taken - share * np.arange(1, len(buckets) + 1)).max() < 1 + len(set(buckets))


def test_small_steps_hold_all_kinds():
    """With rows in plain random order a quarter of such steps would have no short one."""
    buckets = np.random.default_rng(0).permutation([0] * 192 + [1] * 448)
    steps = buckets[order_of_rows(buckets, seed=0, epoch=0)].reshape(-1, 4)
    assert set((steps == 0).sum(axis=1).tolist()) == {1, 2}  # 1.2 on average


def test_the_order_depends_on_seed_and_epoch():
    buckets = np.zeros(37, dtype=np.int32)
    first = order_of_rows(buckets, seed=3, epoch=0).tolist()
    assert order_of_rows(buckets, seed=3, epoch=0).tolist() == first
    assert order_of_rows(buckets, seed=4, epoch=0).tolist() != first
    assert order_of_rows(buckets, seed=3, epoch=1).tolist() != first
