"""Plans: rows of exact length, documents whole and never used twice, quotas kept, everything accounted for."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from data_samples import MARKS, MemoryCorpus, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from longrope2.data.config import Bucket, Mix, PlanConfig, Source, chained_buckets, default_buckets, ending_at
from longrope2.data.corpus import Marks
from longrope2.data.packing import Piece, apportion, fill_short, make_pieces, rows_within
from longrope2.data.plan import Plan, make_plan, read_plan
from longrope2.errors import DataError

TARGET, ORIGINAL = 64, 16
ALL_MARKS = [MARKS, Marks(bos=None, eos=2, pad=2), Marks(bos=1, eos=None, pad=1)]

lengths = st.lists(st.one_of(st.integers(0, 14), st.integers(15, 60), st.integers(60, 300)), min_size=1, max_size=120)
marks_in_use = st.sampled_from(ALL_MARKS)


def planned(lengths: list[int], marks: Marks, **options) -> tuple[Plan, MemoryCorpus] | None:
    """A plan, or None where the documents are too few for one."""
    try:
        return plan_of(lengths, marks, **options)
    except DataError as error:
        if "not one row" in error.message or "no document in any bucket" in error.message:
            return None
        raise


def size(plan: Plan, corpus: MemoryCorpus, span) -> int:
    return plan.marks.size(span.stop - span.start, ends=span.stop == corpus.lengths[span.document])


@settings(max_examples=150)
@given(lengths, marks_in_use, st.integers(0, 3), st.sampled_from(["cut", "drop"]))
def test_rows_are_exact_and_documents_used_once(lengths, marks, seed, over_long):
    result = planned(lengths, marks, seed=seed, over_long=over_long)
    if result is None:
        return
    plan, corpus = result
    used = Counter()
    for row in plan:
        assert sum(size(plan, corpus, span) for span in row.spans) + row.padding == TARGET
        assert row.spans
        for span in row.spans:
            assert 0 <= span.start < span.stop <= corpus.lengths[span.document]
            used.update((span.document, token) for token in range(span.start, span.stop))
    assert max(used.values()) == 1


@settings(max_examples=150)
@given(lengths, marks_in_use, st.integers(0, 3))
def test_short_rows_hold_whole_short_documents_but_for_the_one_cut_last(lengths, marks, seed):
    result = planned(lengths, marks, seed=seed)
    if result is None:
        return
    plan, corpus = result
    cut = 0
    for row in plan:
        length_of = [marks.size(int(corpus.lengths[span.document]), ends=True) for span in row.spans]
        if row.kind == "long":
            assert min(length_of) > ORIGINAL
            continue
        assert max(length_of) <= ORIGINAL
        assert all(span.start == 0 for span in row.spans)
        cut_here = [span for span in row.spans if span.stop < corpus.lengths[span.document]]
        assert cut_here in ([], [row.spans[-1]])
        cut += len(cut_here)
        assert row.padding <= 2  # what cannot hold BOS and a token; 1% of this small row is nothing
    if all(row.kind == "short" for row in plan):
        assert plan.report.sources[0].truncated == cut


@settings(max_examples=150)
@given(lengths, marks_in_use, st.integers(0, 3), st.one_of(st.none(), st.integers(1, 20)))
def test_everything_is_accounted_for(lengths, marks, seed, rows):
    result = planned(lengths, marks, seed=seed, rows=rows)
    if result is None:
        return
    plan, corpus = result
    report = plan.report
    spans = [span for row in plan for span in row.spans]
    assert report.tokens == len(plan) * TARGET
    assert report.document_tokens == sum(span.stop - span.start for span in spans)
    assert report.padding == sum(row.padding for row in plan)
    assert report.document_tokens + report.mark_tokens + report.padding == report.tokens
    assert sum(cell.tokens for cell in report.cells) == report.document_tokens
    assert sum(bucket.rows for bucket in report.buckets) == len(plan)
    (source,) = report.sources
    dropped = sum(drop["tokens"] for drop in source.dropped.values())
    parts = [source.placed_tokens, source.truncated_tokens, source.unused_tokens, dropped]
    assert min(parts) >= 0
    assert sum(parts) == sum(lengths) == corpus.num_tokens


def short_rows(*pieces: tuple[int, int]) -> list[tuple[list[tuple[int, int, int]], int]]:
    """Rows of pieces with BOS and EOS around them, as (start, size): (piece, start, stop) of each, and padding."""
    made = [Piece(0, n, start, start + size - 2, size, True) for n, (start, size) in enumerate(pieces)]
    config = PlanConfig(target_length=TARGET, original_length=ORIGINAL, max_padding=0)
    rows = fill_short(made, MARKS, config)
    return [([(part.serial, part.start, part.stop) for part in parts], gap) for parts, gap in rows]


def test_the_smallest_that_does_not_fit_is_cut_wherever_it_starts():
    whole = [(0, 14)] * 4  # which leave 8 tokens
    ((parts, padding),) = short_rows(*whole, (50, 12), (100, 9))
    assert parts[:4] == [(n, 0, 12) for n in range(4)]
    assert (parts[4:], padding) == ([(5, 100, 106)], 1)  # BOS and six tokens: the seventh misses its EOS


def test_no_cut_leaves_a_document_without_tokens():
    assert short_rows(*[(0, 7)] * 9, (0, 12)) == [([(n, 0, 5) for n in range(9)], 1)]
    assert short_rows(*[(0, 7)] * 8, (0, 6), (0, 3)) == [([*((n, 0, 5) for n in range(8)), (8, 0, 4)], 2)]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_quotas_are_met_within_one_row(seed, rows):
    rng = np.random.default_rng(seed)
    many = [*rng.integers(1, 14, 900), *rng.integers(18, 47, 400), *rng.integers(49, 98, 200)]
    plan, _ = plan_of([int(n) for n in many], rows=rows, seed=seed)
    assert len(plan) == rows
    for bucket in plan.report.buckets:
        assert abs(bucket.rows - rows * bucket.quota_share) < 1
        assert bucket.rows == bucket.rows_wanted
    assert not any("bucket" in warning for warning in plan.report.warnings)


def test_without_a_number_of_rows_the_scarcest_bucket_decides():
    plan, _ = plan_of([10] * 60 + [30] * 100 + [80] * 100)
    short, middle, top = (bucket.rows for bucket in plan.report.buckets)
    assert short == 60 // 6  # five whole documents a row, and a sixth that is cut
    assert abs(middle - short) <= 1
    assert abs(top - short * 4 / 3) <= 1
    assert any("bucket 1-16 has the fewest documents" in warning for warning in plan.report.warnings)


def test_same_seed_same_plan_other_seed_other_plan(tmp_path):
    documents = [*range(1, 15)] * 20 + [*range(20, 90)] * 5
    first, again, other = (plan_of(documents, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again
    assert list(first) != list(other)
    for name, plan in (("a", first), ("b", again)):
        plan.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_kinds_are_interleaved():
    plan, _ = plan_of([10] * 400 + [30] * 200 + [80] * 100)
    kinds = [row.kind for row in plan]
    assert sum(a != b for a, b in pairwise(kinds)) > len(kinds) / 5


def test_many_short_documents_leave_hardly_any_padding():
    rng = np.random.default_rng(0)
    documents = np.clip(rng.lognormal(6.5, 1.2, 20_000), 1, 8000).astype(int).tolist()
    plan, corpus = plan_of(documents, target_length=131072, original_length=8192)
    assert plan.report.padding_share < 0.001
    assert all(row.padding <= 0.01 * 131072 for row in plan)
    assert plan.report.sources[0].truncated_tokens < 0.001 * corpus.num_tokens


def test_documents_that_fit_badly_are_cut_rather_than_padded():
    documents = [40] * 400  # with BOS and EOS 42; 23 fit into 1000 and leave 34
    plan, _ = plan_of(documents, target_length=1000, original_length=100, buckets=(Bucket(up_to=100, quota=1),))
    (source,) = plan.report.sources
    assert source.truncated == len(plan) == 16
    assert source.truncated_tokens == 16 * (40 - 33)
    assert plan.report.padding == 0
    padded, _ = plan_of(
        documents,
        target_length=1000,
        original_length=100,
        buckets=(Bucket(up_to=100, quota=1),),
        max_padding=0.05,
    )
    assert padded.report.sources[0].truncated == 0
    assert padded.report.padding_share == pytest.approx(0.034)
    assert any("are padding" in warning for warning in padded.report.warnings)


def test_long_documents_go_on_in_the_next_row():
    plan, _ = plan_of([98] * 3, buckets=(Bucket(above=16, up_to=100, quota=1),))
    spans = sorted(span for row in plan for span in row.spans)
    assert len(plan) == 4
    assert [(span.document, span.start) for span in spans if span.start == 0] == [(0, 0), (1, 0), (2, 0)]
    for before, after in pairwise(spans):
        assert after.start in (0, before.stop)


def test_a_long_document_that_just_fits_is_whole():
    plan, _ = plan_of([TARGET - 2] * 3, buckets=(Bucket(above=16, up_to=100, quota=1),))
    assert sorted(row.spans for row in plan) == [((0, document, 0, TARGET - 2),) for document in range(3)]


def test_over_long_documents_are_cut_evenly_or_dropped():
    buckets = (Bucket(above=16, up_to=50, quota=1), Bucket(above=50, up_to=100, quota=1))
    cut, _ = plan_of([1000], buckets=buckets, rows=5)
    assert cut.report.sources[0].dropped == {}
    assert cut.report.cells[0].tokens == 0  # pieces are more than half of the top, so all are in that bucket
    assert cut.report.cells[1].tokens > 0
    config = PlanConfig(target_length=TARGET, original_length=ORIGINAL, buckets=buckets)
    pieces = make_pieces(Source(path="memory"), np.array([98, 99]), MARKS, config)  # the first just fits
    assert list(zip(pieces.document, pieces.start, pieces.stop, strict=True)) == [(0, 0, 98), (1, 0, 49), (1, 49, 99)]
    with pytest.raises(DataError, match="no document in any bucket: 1 document of 1,002 to 1,002 tokens"):
        plan_of([1000], buckets=buckets, over_long="drop")


def test_a_source_can_be_cut_to_lengths():
    plan, _ = plan_of([5000], source=Source(path="memory", cut=(16, 40, 90)))
    assert {bucket.rows > 0 for bucket in plan.report.buckets} == {True}
    assert max(s.stop - s.start for row in plan if row.kind == "short" for s in row.spans) == 14
    assert plan.report.sources[0].dropped == {}


def test_dropped_documents_are_told_by_reason():
    buckets = (Bucket(above=4, up_to=16, quota=1), Bucket(above=40, up_to=80, quota=1))
    documents = [0, 1, 2, 30, 31, 32, 200] + [12] * 50 + [60] * 20
    plan, _ = plan_of(documents, buckets=buckets, over_long="drop")
    assert {reason: drop["documents"] for reason, drop in plan.report.sources[0].dropped.items()} == {
        "empty": 1,
        "too short": 2,
        "between buckets": 3,
        "too long": 1,
    }


def two_sources(first: Source, second: Source, *lengths: list[int], **options) -> Plan:
    corpora = [MemoryCorpus(documents, key=str(i)) for i, documents in enumerate(lengths)]
    config = PlanConfig(target_length=TARGET, original_length=ORIGINAL, **options)
    return make_plan(Mix(sources=(first, second), plan=config), corpora, marks=MARKS)


def shares(plan: Plan) -> dict[tuple[str, str], float]:
    cells = plan.report.cells
    of_bucket = Counter()
    for cell in cells:
        of_bucket[cell.bucket] += cell.tokens
    return {(cell.source, cell.bucket): cell.tokens / of_bucket[cell.bucket] for cell in cells}


def test_sources_keep_their_weight_in_every_bucket():
    rng = np.random.default_rng(0)
    mixed = [[*rng.integers(2, 14, 3000).tolist(), *rng.integers(20, 90, 2000).tolist()] for _ in range(2)]
    plan = two_sources(Source(path="a", weight=3), Source(path="b"), *mixed, rows=200)
    assert plan.report.warnings == ()
    for (source, _), share in shares(plan).items():
        assert share == pytest.approx({"a": 0.75, "b": 0.25}[source], abs=0.04)


def test_a_source_serves_only_its_buckets():
    plan = two_sources(
        Source(path="a", buckets=("1-16",)), Source(path="b"), [10] * 200 + [30] * 200, [10] * 200 + [30] * 200,
        rows=20, buckets=(Bucket(up_to=16, quota=1), Bucket(above=16, up_to=50, quota=1)),
    )  # fmt: skip
    assert shares(plan)["a", "17-50"] == 0
    assert plan.report.sources[0].dropped["bucket not served"]["documents"] == 200
    assert plan.report.warnings == ()


def test_a_source_without_or_out_of_documents_is_warned_of():
    plan = two_sources(Source(path="a"), Source(path="b"), [10] * 400, [10] * 5 + [30] * 200 + [80] * 90, rows=30)
    warnings = "\n".join(plan.report.warnings)
    assert "source a has no document in bucket 17-50; the others take its 50%" in warnings
    assert "source b ran out of documents in bucket 1-16" in warnings


def test_upsampling_prefers_long_documents():
    documents = [*range(18, 46)] * 40
    means = []
    for upsample in (0.0, 2.0):
        plan, corpus = plan_of(
            documents,
            source=Source(path="memory", upsample=upsample),
            buckets=(Bucket(above=16, up_to=48, quota=1),),
            rows=100,
        )
        used = {span.document for row in plan for span in row.spans}
        means.append(np.mean([corpus.lengths[document] for document in used]))
    assert means[1] > means[0] + 3


def test_a_plan_that_would_never_end_is_refused():
    """Also where one source of two has next to nothing."""
    with pytest.raises(DataError, match=r"its 12 tokens would be repeated [\d,]+ times, at most 10,000"):
        plan_of([10], rows=10_000, repeat=True, buckets=(Bucket(up_to=16, quota=1),))
    sources = (Source(path="few"), Source(path="many", weight=3))
    config = PlanConfig(
        target_length=TARGET, original_length=ORIGINAL, rows=10_000, repeat=True, buckets=(Bucket(up_to=16, quota=1),)
    )
    with pytest.raises(DataError, match=r"source few: its 12 tokens would be repeated 13,333 times"):
        make_plan(Mix(plan=config, sources=sources), [MemoryCorpus([10]), MemoryCorpus([10] * 5000)], marks=MARKS)


def test_a_bucket_that_cannot_be_filled_is_warned_of_or_repeated():
    documents = [10] * 100 + [30] * 100 + [80] * 5
    plan, _ = plan_of(documents, rows=30)
    assert len(plan) < 30
    assert any(
        "bucket 51-100: 6 of 12 rows; its documents have 410 tokens, 768 are needed "
        "(add documents of that length, or use --repeat)" in warning
        for warning in plan.report.warnings
    )
    repeated, _ = plan_of(documents, rows=30, repeat=True)
    assert len(repeated) == 30
    assert repeated.report.sources[0].most_uses == 2
    assert any("documents repeat, some up to 2 times" in warning for warning in repeated.report.warnings)


def test_an_empty_bucket_leaves_the_others():
    plan, _ = plan_of([30] * 100 + [80] * 100)
    assert {row.kind for row in plan} == {"long"}
    advice = "; cut = [8] in the table of a source cuts longer texts"
    empty = f"bucket 1-16: its documents do not fill one row, so the plan is without it{advice}"
    assert empty in plan.report.warnings
    short, _ = plan_of([30] * 100 + [80] * 100, rows=30)
    assert any(warning.endswith(f"use --repeat{advice})") for warning in short.report.warnings)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (6144, [(0, 4096), (4096, 6144), (6144, 32768)]),  # the bucket that reaches over it, and the next one
        (4096, [(0, 4096), (4096, 8192), (8192, 32768)]),
        (3072, [(0, 3072), (3072, 8192), (8192, 32768)]),
        (20000, [(0, 4096), (4096, 8192), (8192, 20000)]),  # the last one has none after it
    ],
)
def test_buckets_can_end_at_a_length(length, expected):
    buckets = chained_buckets([{"up_to": end, "quota": 1} for end in (4096, 8192, 32768)])
    assert [(bucket.above, bucket.up_to) for bucket in ending_at(length, buckets)] == expected
    apart = (Bucket(up_to=4096, quota=1), Bucket(above=5000, up_to=8192, quota=2))
    assert [(bucket.above, bucket.up_to) for bucket in ending_at(3072, apart)] == [(0, 3072), (5000, 8192)]


def test_default_buckets_are_the_papers():
    assert PlanConfig(target_length=131072, original_length=8192).least_piece == 128
    buckets = default_buckets(8192, 131072)
    assert [bucket.up_to for bucket in buckets] == [8 << 10, 100 << 10, 200 << 10]
    assert [bucket.quota for bucket in buckets] == [3, 3, 4]
    assert [bucket.above for bucket in buckets] == [0, 8 << 10, 100 << 10]
    assert [bucket.quota for bucket in default_buckets(8192, 10_000)] == [3, 7]


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_apportioning_is_exact_and_fair(rows, quotas):
    shares = apportion(rows, quotas)
    assert sum(shares) == rows
    assert all(abs(n - rows * quota / sum(quotas)) < 1 for n, quota in zip(shares, quotas, strict=True))
    assert rows_within(shares, quotas) >= rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_length": 15}, "target_length must not be below the trained window of 16, got 15"),
        ({"target_length": 10**30}, "target_length must be at most 2,?147,?483,?647"),
        ({"original_length": 4}, "original_length must be at least 8, got 4"),
        ({"rows": 0}, "not one row wanted"),
        ({"rows": 10**27}, "at most 100,000,000 rows can be planned, got 1,000,000,000,000,000,000,000,000,000"),
        ({"repeat": True}, "repeat needs a number of tokens"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"over_long": "keep"}, 'over_long must be "cut" or "drop", got "keep"'),
        ({"max_padding": 1.0}, r"max_padding must lie in \[0, 1\), got 1.0"),
        ({"buckets": (Bucket(up_to=16, quota=0),)}, "bucket 1-16: quota must be above 0, got 0"),
        ({"buckets": (Bucket(up_to="16", quota=1),)}, 'bucket 1: up_to must be a length such as "32k", got "16"'),
        ({"rows": 5, "tokens": "9k"}, "both tokens and rows are given"),
        ({"buckets": (Bucket(up_to=32, quota=1),)}, "must not reach over the trained window of 16"),
        ({"buckets": (Bucket(above=32, up_to=20, quota=1),)}, "must end above its start, got 32 to 20"),
        ({"buckets": (Bucket(up_to=16, quota=1), Bucket(above=8, up_to=12, quota=1))}, "starts before the previous"),
        ({"buckets": (Bucket(up_to=8, quota=1), Bucket(up_to=8, quota=1))}, "two buckets are called '1-8'"),
        ({"buckets": (Bucket(up_to=2, quota=1),)}, "bucket 1-2: the last one must reach 8 tokens, got 2"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused(options, message):
    with pytest.raises(DataError, match=message) as error:
        plan_of([10] * 50, **options)
    assert error.value.hint


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no source given"),
        ([Source(path=" ")], "a source has no path"),
        ([Source(path="a", weight=0)], "source 'a': weight must be above 0, got 0"),
        ([Source(path="a", upsample=-1)], "source 'a': upsample must lie from 0 to 16, got -1"),
        ([Source(path="a", upsample=1e6)], "source 'a': upsample must lie from 0 to 16, got 1000000"),
        ([Source(path="a", upsample=float("nan"))], "upsample must be a number, got NaN"),
        ([Source(path="a", cut=(3,))], r"cut must be at least 8, got \[3\]"),
        ([Source(path="a"), Source(path="a")], "two sources are called 'a'"),
        ([Source(path="a", buckets=("long",))], "no bucket is called 'long'"),
    ],
)
def test_wrong_sources_are_refused(sources, message):
    config = PlanConfig(target_length=TARGET, original_length=ORIGINAL)
    mix = Mix(sources=tuple(sources), plan=config)
    with pytest.raises(DataError, match=message) as caught:
        make_plan(mix, [MemoryCorpus([10])] * len(sources), marks=MARKS)
    assert ("name of its own" in caught.value.hint) == message.startswith("two sources")


def test_too_few_documents_for_one_row():
    with pytest.raises(DataError, match="not one row of 64 tokens could be filled: the documents have 24"):
        plan_of([10, 10])


# The file


@pytest.fixture
def saved(tmp_path):
    plan, _ = plan_of([10] * 60 + [30] * 60 + [80] * 60)
    plan.save(tmp_path / "plan.jsonl")
    return plan, tmp_path / "plan.jsonl"


def test_a_plan_is_read_back(saved):
    plan, path = saved
    assert read_plan(path) == plan
    assert read_plan(path).fingerprint == plan.fingerprint
    header = json.loads(path.read_text().splitlines()[0])
    assert header["config"]["seed"] == 0
    assert header["versions"]["longrope2"]
    with pytest.raises(DataError, match=f"row {len(plan)} asked for, the plan has rows 0 to {len(plan) - 1}"):
        plan.row(len(plan))


def damage(line: int, old: str, new: str):
    def apply(lines: list[str]) -> list[str]:
        assert old in lines[line - 1]
        return [text.replace(old, new, 1) if number == line else text for number, text in enumerate(lines, 1)]

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "plan.jsonl: damaged: invalid JSON"),
        (lambda lines: ["[]"], "the whole must be an object"),
        (damage(1, '"version": 1', '"version": 9'), "format 'longrope2-plan', version 9; expected 'longrope2-plan', 1"),
        (damage(1, '"marks"', '"marx"'), "plan.jsonl: damaged: 2 problems\n  - marks is missing\n"),
        (damage(1, '"bos": 1', '"bos": 2'), "its content is not what its checksum says"),
        (damage(3, '"padding":', '"padding":1'), "damaged, its rows are not those that were written"),
        (damage(3, '"spans":[[0,', '"spans":[[7,'), "line 3 is damaged"),
        (damage(3, '"spans":[[0,', '"spans":[[0,-'), "line 3 is damaged"),
        (damage(4, '"spans":[[', '"spans":[[1,'), "line 4 is damaged"),
        (damage(5, "}", ""), "line 5 is damaged"),
        (damage(5, '"padding":', '"padding":9'), "line 5 is damaged"),
        (damage(6, '"bucket":"', '"bucket":"x'), "line 6 is damaged"),
        (lambda lines: lines[:-1], "rows, but the header says"),
    ],
)
def test_a_damaged_plan_is_refused(saved, change, message):
    _, path = saved
    lines = change(path.read_text().splitlines())
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(DataError, match=message) as error:
        read_plan(path)
    assert error.value.hint


def test_a_missing_plan_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_plan(tmp_path / "none")
