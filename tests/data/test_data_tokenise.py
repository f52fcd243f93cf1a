"""Shards: the same bytes by any engine and number of workers, whole or absent, and the same plan as from files."""

import gzip
import json
import multiprocessing.spawn
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from longrope2.books import read_books
from longrope2.cli import cli
from longrope2.data import corpus as corpus_module
from longrope2.data import dataset as dataset_module
from longrope2.data import inputs as inputs_module
from longrope2.data import storage as storage_module
from longrope2.data import tokenise as tokenise_module
from longrope2.data.config import TokeniseConfig, parse_kept
from longrope2.data.corpus import plain_encoder
from longrope2.data.dataset import open_dataset
from longrope2.data.inputs import find_sources, plan_units
from longrope2.data.loader import RowLoader
from longrope2.data.plan import plan_documents, read_plan
from longrope2.data.tokenise import forecast_dataset, summary, tokenise_sources
from longrope2.errors import DataError, LongRopeError
from longrope2.models import ASSETS


@pytest.fixture(scope="module")
def tiny():
    return AutoTokenizer.from_pretrained(ASSETS / "tiny")


@pytest.fixture(scope="module")
def texts():
    """Pieces of books, most of them short and a few long."""
    rng = np.random.default_rng(0)
    book = next(read_books(held_out=False)).text
    lengths = np.minimum((rng.pareto(1.2, 150) + 1) * 250, 20_000).astype(int)
    starts = rng.integers(0, len(book) - 20_000, len(lengths))
    return [book[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def write(path: Path, texts: list[str]) -> Path:
    """A file of some kind, or a folder of text files, that holds these documents."""
    lines = "".join(json.dumps({"text": text, "title": f"t{i}"}) + "\n" for i, text in enumerate(texts)).encode()
    name = path.name
    if not path.suffix:
        path.mkdir(parents=True)
        for index, text in enumerate(texts):
            (path / f"{index:04}.txt").write_text(text)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        path.write_bytes(lines)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif name.endswith(".zst"):
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(lines)
    else:
        rows = [{"text": text, "title": f"t{i}"} for i, text in enumerate(texts)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    return path


def make(sources, output, **options):
    return tokenise_sources("tiny", [str(source) for source in sources], str(output), TokeniseConfig(**options))


def documents(output, name=""):
    dataset = open_dataset(f"{output}{name}", Path(output) / "copies")
    assert dataset.lengths.tolist() == [len(dataset.tokens(i)) for i in range(dataset.num_documents)]
    return [dataset.tokens(i).tolist() for i in range(dataset.num_documents)]


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


KINDS = ["folder", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_any_size_hold_the_tokenizers_own_tokens(tmp_path, kind, tiny, texts):
    texts = [*texts[:60], "", "a </s> é\n"]
    source = write(tmp_path / kind, texts)
    expected = [tiny(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in texts]
    shards = []
    for size in (100.0, 0.02, 0.0071):
        record = make([source], tmp_path / f"o{size}", shard_size=size, workers=1)
        assert documents(tmp_path / f"o{size}") == expected
        shards.append(len(record.shards))
    assert shards[0] == 1
    assert kind.endswith((".gz", ".zst")) or shards[2] > shards[1] > 1  # compressed files are not cut
    dataset = open_dataset(str(tmp_path / "o0.02"), tmp_path)
    assert dataset.title(3) == ("0003" if kind == "folder" else "t3")


def test_lines_are_cut_at_every_byte_and_none_is_lost(tmp_path):
    """The border of two shards may fall anywhere: within a line, on its end, or within a character."""
    lines = ["a", "é", "", "abc", "  x"]
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines).encode())
    for size in range(1, path.stat().st_size + 2):
        units = plan_units(find_sources([str(path)]), size)
        readers = [inputs_module.PortionReader(p, "text") for unit in units for p in unit.portions]
        assert [book.text for reader in readers for book in reader] == lines


def test_a_line_over_many_portions_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs_module, "MOST_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 32_000_000}) + '\n{"text": "y"}\n')
    units = plan_units(find_sources([str(path)]), 2_000_000)
    portions = [portion for unit in units for portion in unit.portions]
    assert len(portions) > 10
    skip, skipped = inputs_module._skip_line, []
    monkeypatch.setattr(inputs_module, "_skip_line", lambda *given: skipped.append(skip(*given)) or skipped[-1])
    found = [book for portion in portions for book in inputs_module.PortionReader(portion, "text")]
    assert [getattr(book, "text", "too long") for book in found] == ["too long", "y"]
    assert sum(skipped) < 2 * path.stat().st_size


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, texts):
    for number, kind in enumerate(KINDS):
        write(tmp_path / "in" / kind, texts[number * 30 : number * 30 + 30])
    sources = [f"all={tmp_path / 'in'}", f"lines={tmp_path / 'in' / 'a.jsonl'}"]
    one = make(sources, tmp_path / "one", shard_size=0.02, workers=1)
    two = make(sources, tmp_path / "two", shard_size=0.02, workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert one == two
    assert len(one.shards) > 8
    assert documents(tmp_path / "one", ":lines") == documents(tmp_path / "one")[-30:]
    with pytest.raises(DataError, match="no source 'web'"):
        open_dataset(f"{tmp_path / 'one'}:web", tmp_path)
    # Nothing that is published names a folder of this machine.
    assert not [name for name, data in content(tmp_path / "one").items() if str(tmp_path).encode() in data]


def test_the_largest_shards_are_begun_first(tmp_path, texts):
    """In the order of the files, one worker would begin the largest when the others have nothing left to do."""
    for name, count in {"a.jsonl": 5, "b.jsonl.gz": 40, "c.jsonl": 60}.items():
        write(tmp_path / "in" / name, texts[:count])
    units = plan_units(find_sources([str(tmp_path / "in")]), 20_000)
    sizes = {unit.shard: unit.text_bytes for unit in units}
    _, job = tokenise_module._job("tiny", str(tmp_path / "out"), TokeniseConfig(workers=1))
    begun = [sizes[shard.shard] for shard in tokenise_module._make(units, job)]
    assert begun == sorted(begun, reverse=True) != list(sizes.values())


def test_a_killed_job_goes_on_with_the_missing_shards(tmp_path, texts):
    source = write(tmp_path / "a.jsonl", texts * 3)
    arguments = ["data", "tokenise", str(source), "--model", "tiny", "--shard-size", "0.05"]
    make([source], tmp_path / "whole", shard_size=0.05, workers=1)
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "longrope2", *arguments, "-o", str(output), "--workers", "2"]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while len(list(output.glob("*.json"))) < 4:  # dataset.json and three shards
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()  # ends when the workers have let go of the pipe, which nobody has told to end
    assert not (set(content(output)) >= set(content(tmp_path / "whole")))
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("0*.json")}
    with pytest.raises(DataError, match="not complete"):
        open_dataset(str(output), tmp_path)
    assert CliRunner().invoke(cli, [*arguments, "-o", str(output), "--workers", "1"]).exit_code == 0
    assert content(output) == content(tmp_path / "whole")
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("0*.json")}
    assert {name: after[name] for name in before} == before
    assert not list(output.glob(".*partial*"))


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_reported(tmp_path, texts, monkeypatch):
    source = write(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(tokenise_module, "_work", die)
    with pytest.raises(LongRopeError, match="a worker process has died"):
        make([source], tmp_path / "out", shard_size=0.05, workers=2)


@pytest.fixture
def deadline():
    """A test that hangs fails after a minute."""

    def fail(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_worker_that_dies_at_its_start_is_reported(tmp_path, texts, deadline):
    """It reads nothing of what it is sent, which for a tokenizer is more than a pipe holds."""
    source = write(tmp_path / "a.jsonl", texts)
    resource_tracker.ensure_running()  # it is started by the same program
    program = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable("/bin/false")
    try:
        with pytest.raises(LongRopeError, match="a worker process has died"):
            make([source], tmp_path / "out", shard_size=0.05, workers=2)
    finally:
        multiprocessing.set_executable(program)


def test_a_damaged_shard_is_made_again(tmp_path, texts):
    source = write(tmp_path / "a.jsonl", texts)
    make([source], tmp_path / "out", shard_size=0.03, workers=1)
    expected = content(tmp_path / "out")
    (tmp_path / "out" / "000001.arrow").write_bytes(b"")
    with pytest.raises(DataError, match=r"000001.arrow: missing or incomplete"):
        documents(tmp_path / "out")
    (tmp_path / "out" / "000002.npy").unlink()
    for name in ("000003.arrow", "000004.npy"):  # of the same size
        path = tmp_path / "out" / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    make([source], tmp_path / "out", shard_size=0.03, workers=1)
    assert content(tmp_path / "out") == expected


def test_other_inputs_or_options_are_refused(tmp_path, texts):
    source = write(tmp_path / "a.jsonl", texts[:20])
    make([source], tmp_path / "out", workers=1)
    with pytest.raises(DataError, match=r"config.seed: 0 on disk, 1 now"):
        make([source], tmp_path / "out", workers=1, seed=1)
    os.utime(source, (1, 1))
    with pytest.raises(DataError, match=r"sources.a.digest"):
        make([source], tmp_path / "out", workers=1)
    with pytest.raises(DataError, match="lengths must rise"):
        TokeniseConfig(keep=parse_kept("8k:1,4k:1"))
    with pytest.raises(DataError, match="not a share"):
        TokeniseConfig(keep=parse_kept("8k:2"))
    with pytest.raises(DataError, match="is not a range of lengths"):
        parse_kept("8k")


def damaged_folder(folder, texts):
    write(folder / "a.jsonl", texts[:10])
    with (folder / "a.jsonl").open("ab") as file:
        file.write(b'{"text": "cut\n{"text": "\xff"}\n{"other": 1}\n' + json.dumps({"text": texts[10]}).encode())
    write(folder / "b.jsonl.gz", texts[11:60])
    whole = (folder / "b.jsonl.gz").read_bytes()
    (folder / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "c.parquet").write_bytes(b"PAR1 and nothing else")
    (folder / "d.jsonl.zst").write_bytes(b"not zstd")
    (folder / "e.txt").write_bytes(b"\xff\xfe")
    write(folder / "f.parquet", texts[60:70])
    (folder / "g.jsonl.gz").touch()
    (folder / "h.jsonl.zst").touch()


def test_damage_is_named_and_skipped_or_refused(tmp_path, tiny, texts, capsys, monkeypatch):
    damaged_folder(tmp_path / "in", texts)
    with pytest.raises(DataError, match=r"a.jsonl, byte \d+") as refused:
        make([tmp_path / "in"], tmp_path / "out", workers=1)
    assert "--damaged skip" in refused.value.hint
    with pytest.raises(DataError) as foreseen:
        forecast_dataset("tiny", [str(tmp_path / "in")], TokeniseConfig())
    assert str(foreseen.value) == str(refused.value)
    record = make([tmp_path / "in"], tmp_path / "out", workers=1, damaged="skip")
    foreseen = forecast_dataset("tiny", [str(tmp_path / "in")], TokeniseConfig(damaged="skip"))
    assert foreseen.tokens == sum(shard.tokens for shard in record.shards)
    problems = record.shards[0].damaged
    assert record.shards[0].skipped == len(problems)
    assert [problem.partition(",")[0].partition(":")[0] for problem in problems] == [
        *["a.jsonl"] * 3, "b.jsonl.gz", "c.parquet", "d.jsonl.zst", "e.txt", "g.jsonl.gz", "h.jsonl.zst"
    ]  # fmt: skip
    error = capsys.readouterr().err
    assert all(problem in error for problem in problems)
    assert "9 files or lines could not be read" in error
    encoded = documents(tmp_path / "out")
    first = [tiny(text, add_special_tokens=False).input_ids for text in texts[:11]]
    assert encoded[:11] == first
    assert encoded[-10:] == [tiny(text, add_special_tokens=False).input_ids for text in texts[60:70]]
    monkeypatch.setattr(tokenise_module, "MOST_DAMAGE", 2)
    few = make([tmp_path / "in"], tmp_path / "few", workers=1, damaged="skip")
    assert (few.shards[0].skipped, few.shards[0].damaged) == (9, problems[:2])
    error = capsys.readouterr().err
    assert error.count("skipped: ") == 2
    assert "9 files or lines could not be read" in error
    with pytest.raises(DataError, match=r"a.jsonl, byte \d+"):  # what was allowed before is not allowed now
        make([tmp_path / "in"], tmp_path / "out", workers=1)


def test_documents_are_kept_by_their_length(tmp_path, tiny, texts, monkeypatch):
    texts = [*texts, *(text[:100] for text in texts)]
    source = write(tmp_path / "a.jsonl", texts)
    options = {"workers": 1, "keep": parse_kept("64:0,512:0.4,1024:1")}
    encoded_texts = []
    encode = plain_encoder(tiny)
    monkeypatch.setattr(
        tokenise_module, "_encoder", lambda *_: lambda batch: encoded_texts.extend(batch) or encode(batch)
    )
    record = make([source], tmp_path / "out", **options)
    kept = documents(tmp_path / "out")
    sizes = [len(ids) + 1 + 1 for ids in kept]  # BOS and EOS
    every = [tiny(text, add_special_tokens=False).input_ids for text in texts]
    between = [ids for ids in every if 64 < len(ids) + 2 <= 512]
    assert [ids for ids in kept if len(ids) + 2 > 512] == [ids for ids in every if 512 < len(ids) + 2 <= 1024]
    assert min(sizes) > 64
    count = sum(size <= 512 for size in sizes)
    assert abs(count / len(between) - 0.4) < 3 * (0.24 / len(between)) ** 0.5
    assert record.shards[0].left_out == len(texts) - len(kept)
    assert [entry.documents for entry in record.shards[0].lengths] == [0, count, len(kept) - count, 0]
    # Many that cannot be kept are not tokenised, and the result is the same as if all were.
    assert len(encoded_texts) < 0.8 * len(texts)
    monkeypatch.setattr(tokenise_module.Job, "is_hopeless", lambda *_: False)
    make([source], tmp_path / "all", **options)
    assert content(tmp_path / "all") == content(tmp_path / "out")
    make([source], tmp_path / "other", **options, seed=1)
    assert documents(tmp_path / "other") != kept


def test_a_huge_document_that_is_left_out_is_not_tokenised_to_its_end(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(corpus_module, "PIECE", 5000)
    encoded = []
    real = corpus_module._whole_encoder
    monkeypatch.setattr(
        corpus_module, "_whole_encoder", lambda state: lambda batch: encoded.extend(batch) or real(state)(batch)
    )
    monkeypatch.setattr(tokenise_module, "_encoder", tokenise_module._encoder.__wrapped__)
    huge = " ".join(texts)
    source = write(tmp_path / "a.jsonl", [texts[0], huge, texts[1]])
    record = make([source], tmp_path / "out", workers=1, keep=parse_kept("64k:1"))
    assert len(documents(tmp_path / "out")) == 3  # it fits
    whole = sum(map(len, encoded))
    encoded.clear()
    record = make([source], tmp_path / "few", workers=1, keep=parse_kept("8k:1"))
    assert record.shards[0].left_out == 1
    assert sum(map(len, encoded)) < whole / 2


def test_long_documents_of_a_table_are_read_one_by_one(tmp_path, texts, monkeypatch):
    """As many at once as short ones would be gigabytes."""
    monkeypatch.setattr(inputs_module, "PARQUET_BYTES", 2000)
    sizes = []
    read = pyarrow.parquet.ParquetFile.iter_batches

    def iter_batches(self, **options):
        for batch in read(self, **options):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", iter_batches)
    for name, length in {"long": 3000, "short": 100}.items():
        write(tmp_path / f"{name}.parquet", [text[:length].ljust(length, ".") for text in texts[:20]])
    make([tmp_path / "long.parquet"], tmp_path / "a", workers=1)
    assert sizes == [1] * 20
    make([tmp_path / "short.parquet"], tmp_path / "b", workers=1)
    assert max(sizes) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_forecasts_the_real_one(tmp_path, kind, texts, monkeypatch):
    """Within 15%, from a sample."""
    for part in range(3):
        write(tmp_path / "in" / f"{part}{kind}", texts[part::3])
    sources = [tmp_path / "in"]
    monkeypatch.setattr(tokenise_module, "SAMPLES", 12)
    monkeypatch.setattr(tokenise_module, "SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(inputs_module, "ZSTD_AHEAD", 0)
    read = []
    real = tokenise_module._Counts.add
    monkeypatch.setattr(
        tokenise_module._Counts, "add", lambda self, books, e: read.extend(books) or real(self, books, e)
    )
    forecast = forecast_dataset("tiny", [str(source) for source in sources], TokeniseConfig())
    assert not (tmp_path / "out").exists()
    sampled = len(read)
    record = make(sources, tmp_path / "out", workers=1)
    found = summary(record)
    tokens = sum(source.tokens for source in found)
    assert sampled < len(texts) or kind.endswith((".gz", ".zst", ".parquet"))
    assert abs(forecast.tokens / tokens - 1) < 0.15
    assert abs(forecast.bytes / sum(shard.bytes for shard in record.shards) - 1) < 0.15
    assert forecast.hours > 0


@pytest.mark.parametrize("kind", ["folder", ".jsonl"])
def test_a_dry_run_knows_files_of_different_documents(tmp_path, kind, texts, monkeypatch):
    """A small file of short documents must not count as much as a large one of long documents."""
    book = next(read_books(held_out=False)).text
    for number, (length, count) in enumerate([(300, 40), (700, 60), (3000, 200)]):
        write(tmp_path / "in" / f"{number}{kind}", [book[700 * i : 700 * i + length] for i in range(count)])
    monkeypatch.setattr(tokenise_module, "SAMPLES", 12)
    monkeypatch.setattr(tokenise_module, "SAMPLE_BYTES", 12_000)
    config = {"workers": 1, "keep": parse_kept("128:0.2,2k:1")}
    forecast = forecast_dataset("tiny", [str(tmp_path / "in")], TokeniseConfig(**config))
    record = make([tmp_path / "in"], tmp_path / "out", **config)
    (found,) = summary(record)
    assert abs(forecast.tokens / found.tokens - 1) < 0.15
    assert abs(forecast.sources[0].documents / found.documents - 1) < 0.15


@pytest.mark.parametrize("files", [2, 5])
def test_a_dry_run_knows_documents_longer_than_a_sample(tmp_path, files, monkeypatch):
    """Of which `keep` leaves out the longest: a sample that ends early must not stand for as many as one of those."""
    rng = np.random.default_rng(0)
    book = next(read_books(held_out=False)).text
    lengths = np.exp(rng.uniform(np.log(30), np.log(6000), 600)).astype(int)
    starts = rng.integers(0, len(book) - 6000, len(lengths))
    texts = [book[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    for number in range(files):
        write(tmp_path / "in" / f"{number:02}.jsonl", texts[number::files])
    monkeypatch.setattr(tokenise_module, "SAMPLES", 24)
    monkeypatch.setattr(tokenise_module, "SAMPLE_BYTES", 1500)
    config = {"workers": 1, "keep": parse_kept("900:1")}
    forecast = forecast_dataset("tiny", [str(tmp_path / "in")], TokeniseConfig(**config))
    (found,) = summary(make([tmp_path / "in"], tmp_path / "out", **config))
    assert found.left_out > 50
    assert abs(forecast.tokens / found.tokens - 1) < 0.15


def rows_of(model_plan, cache):
    loader = RowLoader.open(model_plan, cache)
    loader.check()
    return [loader.row(i) for i in range(len(loader))]


@pytest.mark.parametrize("place", ["here", "memory://shards"])
def test_files_and_shards_give_the_same_plan(tmp_path, texts, place, monkeypatch):
    """Also where the shards lie in a store, from where they come when a row needs them."""
    monkeypatch.setattr(dataset_module, "OPEN_SHARDS", 2)
    folder, lines = write(tmp_path / "books", texts[:90]), write(tmp_path / "web.jsonl", texts[90:])
    output = str(tmp_path / "shards") if place == "here" else place
    make([folder, lines], output, shard_size=0.03, workers=1)
    options = {"target_length": 512, "buckets": None, "over_long": "cut", "cache": tmp_path / "cache"}
    files = plan_documents("tiny", tmp_path / "a.jsonl", sources=parsed(folder, f"{lines}=2"), **options)
    plan = plan_documents("tiny", tmp_path / "b.jsonl", sources=parsed(f"{output}:books", f"{output}:web=2"), **options)
    for name in ("bucket_of_row", "padding", "first_span", "spans"):
        assert np.array_equal(getattr(files, name), getattr(plan, name)), name
    copies = list((tmp_path / "cache").glob("*/*.arrow"))
    assert not copies  # a plan needs the lengths alone
    read = read_plan(tmp_path / "b.jsonl")
    ahead = RowLoader.open(read, tmp_path / "cache")
    ahead.prepare([0, 1])
    ahead._background.shutdown()
    # The shards of these two rows alone are copied.
    spans = [span for index in (0, 1) for span in read.row(index).spans]
    needed = {(span.source, ahead._corpora[span.source]._place(span.document)[0]) for span in spans}
    copies = {path.name for path in (tmp_path / "cache").glob("*/*.arrow")}
    shards = {ahead._corpora[source].shards[number].shard + ".arrow" for source, number in needed}
    assert copies == (set() if place == "here" else shards)
    assert len(needed) < sum(len(corpus.shards) for corpus in ahead._corpora)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_module.Dataset, "_copy", lambda *_: pytest.fail("not copied before"))
        assert len(ahead.row(0).token_ids) == len(ahead.row(1).token_ids) == 512
    for one, other in zip(rows_of(files, tmp_path / "cache"), rows_of(read, tmp_path / "cache"), strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
    if place != "here":
        copies = list((tmp_path / "cache").glob("*/*.arrow"))
        assert copies
        copies[0].write_bytes(b"x" * copies[0].stat().st_size)
        damaged = [corpus for corpus in RowLoader.open(read, tmp_path / "cache")._corpora if not corpus.is_whole()]
        assert [corpus.remedy for corpus in damaged] == [f"delete {copies[0].parent}: its files are copies, made again "
                                                         "when needed"]  # fmt: skip
    every = plan_documents("tiny", tmp_path / "c.jsonl", sources=parsed(output), **options)
    assert every.report.sources[0].corpus_documents == len(texts)


def parsed(*texts):
    from longrope2.data.config import Source

    return tuple(Source.parse(str(text)) for text in texts)


def test_the_dataset_of_another_tokenizer_is_refused(tmp_path, texts, monkeypatch):
    source = write(tmp_path / "a.jsonl", texts[:20])
    make([source], tmp_path / "out", workers=1)
    monkeypatch.setattr(dataset_module, "tokenizer_fingerprint", lambda _: "sha256:other")
    with pytest.raises(DataError, match="another tokenizer"):
        plan_documents("tiny", tmp_path / "p.jsonl", sources=parsed(tmp_path / "out"), target_length=512)


@pytest.mark.parametrize("damage", ["lengths", "record", "missing lengths"])
def test_a_damaged_dataset_is_refused(tmp_path, texts, damage):
    source = write(tmp_path / "a.jsonl", texts[:20])
    make([source], tmp_path / "out", workers=1)
    lengths = tmp_path / "out" / "000000.npy"
    if damage == "record":
        record = tmp_path / "out" / "dataset.json"
        record.write_text(record.read_text().replace('"documents": 20', '"documents": 21'))
    elif damage == "lengths":
        lengths.write_bytes(lengths.read_bytes()[:-1] + b"\1")
    else:
        lengths.unlink()
    with pytest.raises(DataError, match=r"damaged|missing"):
        documents(tmp_path / "out")


@pytest.mark.parametrize("content", [b"/data/\0", b"/data/\xff", b"/data/" * 1000])
def test_a_damaged_note_of_where_a_dataset_lies_is_refused(tmp_path, content):
    (tmp_path / "key.dataset").write_bytes(content)
    with pytest.raises(DataError, match=r"key\.dataset: damaged\nhint: plan again"):
        dataset_module.reopen("key", tmp_path)


def test_sources_that_cannot_be_are_named_together(tmp_path, texts):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"(?s)2 problems.*nowhere.*none of 0 files"):
        find_sources([str(tmp_path / "nowhere" / "x.txt"), str(tmp_path / "empty")])
    source = write(tmp_path / "a.jsonl", texts[:2])
    with pytest.raises(DataError, match="two sources are called a"):
        find_sources([str(source), str(tmp_path / "*.jsonl") + "", f"a={source}"][::2])
    assert [source.name for source in find_sources([f"{tmp_path}/*.jsonl", f"b={source}"])] == [tmp_path.name, "b"]


@pytest.mark.parametrize(
    ("place", "package", "command"),
    [
        ("abfs://container/x", "adlfs", "pip install 'fsspec[abfs]'"),
        ("gs://bucket/x", "gcsfs", "pip install 'fsspec[gs]'"),
    ],
)
def test_the_package_of_a_store_is_named(place, package, command, monkeypatch):
    def without(address):
        raise NotImplementedError("Got GCS URI but Arrow compiled without GCS support")

    arrow = SimpleNamespace(FileSystem=SimpleNamespace(from_uri=without))
    monkeypatch.setattr(storage_module, "require", lambda *_, **__: arrow)
    with pytest.raises(DataError, match=f"{place}: .*{package}") as missing:
        find_sources([place])
    assert missing.value.hint == command


def test_a_store_that_stops_answering_is_not_taken_for_empty(texts, tmp_path, monkeypatch):
    memory, _ = storage_module.file_system("memory://x")
    for folder in ("a", "b"):
        memory.put_file(str(write(tmp_path / "a.jsonl", texts[:2])), f"/answers/{folder}/a.jsonl")
    assert len(find_sources(["memory://answers"])[0].files) == 2
    listed = memory.ls

    def ls(path, **options):
        if path.endswith("/b"):
            raise OSError("connection reset")
        return listed(path, **options)

    monkeypatch.setattr(memory, "ls", ls)
    with pytest.raises(DataError, match=r"memory://answers: cannot be listed \(connection reset\)"):
        find_sources(["memory://answers"])
    monkeypatch.setattr(memory, "info", lambda _: ls("/b"))
    for place in ("memory://answers", "memory://answers/a/a.jsonl"):
        with pytest.raises(DataError, match="cannot be listed"):
            find_sources([place])
    with pytest.raises(DataError, match="memory://out: cannot be listed"):
        make([tmp_path / "a.jsonl"], "memory://out", workers=1)


def test_the_command_shows_what_was_made(tmp_path, texts):
    source = write(tmp_path / "a.jsonl", texts[:20])
    arguments = ["data", "tokenise", str(source), "--model", "tiny", "-o", str(tmp_path / "out"), "--workers", "1"]
    dry = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert "nothing was written" in dry.stdout
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(cli, [*arguments, "--keep", "128:1,64k:1"])
    assert done.exit_code == 0, done.stderr
    record = json.loads((tmp_path / "out" / "dataset.json").read_text())
    tokens = sum(shard["tokens"] for shard in record["shards"])
    assert re.search(rf"tokenising, MB 1/1 \[.*taken\] 1 of 1 shards, {tokens:,} tokens, [\d,]+ a second", done.stderr)
    by_source, by_length = done.stdout.split("tokens by document length")
    assert f"{tokens:,}" in by_source
    assert re.search(r"1-128 +129-65,536 +over 65,536", by_length)
    assert all(f" {count['tokens']:,} " in by_length for count in record["shards"][0]["lengths"])
    record = json.loads(CliRunner().invoke(cli, [*arguments, "--keep", "128:1,64k:1", "--json"]).stdout)
    assert record["shards"][0]["documents"] == 20
