"""Tokenised sources: the same tokens as the tokenizer's own, kept once, rebuilt when damaged."""

import gzip
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_samples import word_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longrope2.books import read_books
from longrope2.data import corpus as corpus_module
from longrope2.data import sources as sources_module
from longrope2.data.config import Source
from longrope2.data.corpus import (
    Marks,
    corpus_key,
    default_cache,
    document_marks,
    encoder_state,
    open_corpus,
    plain_encoder,
    tokenise,
    tokenizer_fingerprint,
)  # fmt: skip
from longrope2.data.sources import content_bytes
from longrope2.errors import DataError, LongRopeError, MissingExtraError
from longrope2.files import atomic_path
from longrope2.models import ASSETS

TEXTS = ["the cat sat", "", "on a mat and saw one dog", "the dog", "cat cat cat <s> cat"]


@pytest.fixture(scope="module")
def tiny():
    return AutoTokenizer.from_pretrained(ASSETS / "tiny")


def write_source(folder: Path, kind: str) -> Source:
    folder.mkdir(exist_ok=True)
    rows = [{"text": text, "title": f"t{i}"} for i, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "folder":
        for index, text in enumerate(TEXTS):
            (folder / f"t{index}.txt").write_text(text)
        return Source(path=str(folder))
    path = folder / f"source.{kind}"
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return Source(path=str(path))


@pytest.mark.parametrize("kind", ["folder", "jsonl", "jsonl.gz", "parquet"])
def test_every_kind_of_source_gives_the_tokenizers_own_tokens(tmp_path, kind, tiny, monkeypatch, capfd):
    monkeypatch.setattr(corpus_module, "BATCH_DOCUMENTS", 2)  # several record batches
    corpus = tokenise(write_source(tmp_path / "s", kind), tiny, tmp_path / "cache")
    expected = [tiny(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in TEXTS]
    assert [corpus.tokens(i).tolist() for i in range(corpus.num_documents)] == expected
    assert corpus.lengths.tolist() == [len(ids) for ids in expected]
    assert corpus.num_tokens == sum(map(len, expected))
    assert [corpus.title(i) for i in range(5)] == ["t0", "t1", "t2", "t3", "t4"]
    assert corpus.tokens(2).dtype == np.int32
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "5 documents" in captured.err


def test_special_tokens_in_a_text_are_plain_text(tiny):
    (ids,) = plain_encoder(tiny)(["a </s> b"])
    assert tiny.eos_token_id not in ids
    assert tiny.decode(ids) == "a </s> b"
    # The caller's tokenizer is left as it was.
    assert tiny.eos_token_id in tiny("a </s> b").input_ids


def test_slow_tokenizers_serve_too():
    class Slow:
        is_fast = False
        bos_token_id = eos_token_id = pad_token_id = 0

        def __call__(self, text, **options):
            assert options["add_special_tokens"] is False
            return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})

        def get_vocab(self):
            return {"a": 97}

    assert plain_encoder(Slow())(["ab", ""]) == [[97, 98], []]
    assert tokenizer_fingerprint(Slow()).startswith("sha256:")


def test_tokenised_once(tmp_path, tiny, monkeypatch):
    source = write_source(tmp_path / "s", "jsonl")
    first = tokenise(source, tiny, tmp_path / "cache")
    monkeypatch.setattr(corpus_module, "_write", lambda *a: pytest.fail("tokenised again"))
    assert tokenise(source, tiny, tmp_path / "cache") == first
    assert open_corpus(first.key, tmp_path / "cache").tokens(0).tolist() == first.tokens(0).tolist()
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".arrow", ".json"]


def test_the_key_knows_content_and_tokenizer(tmp_path, tiny):
    source = write_source(tmp_path / "s", "folder")
    key = corpus_key(source, tiny)
    assert corpus_key(Source(path=source.path, weight=3, upsample=1, name="n", cut=(9,)), tiny) == key
    assert corpus_key(source, word_tokenizer()) != key
    (tmp_path / "s").rename(tmp_path / "moved")
    assert corpus_key(Source(path=str(tmp_path / "moved")), tiny) == key
    file = tmp_path / "moved" / "t0.txt"
    file.write_text("the dog sat")
    assert corpus_key(Source(path=str(tmp_path / "moved")), tiny) != key
    file.write_text(TEXTS[0])
    assert corpus_key(Source(path=str(tmp_path / "moved")), tiny) == key
    file.rename(file.with_name("t9.txt"))
    assert corpus_key(Source(path=str(tmp_path / "moved")), tiny) != key


def test_the_fingerprint_forgets_who_called_last():
    tokenizer = word_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("the cat sat on a mat", truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    assert plain_encoder(tokenizer)(["the cat sat"]) == [[3, 4, 5]]


def cut_off(arrow: Path, record: Path) -> None:
    arrow.write_bytes(arrow.read_bytes()[:-30])


def flip_a_byte(arrow: Path, record: Path) -> None:
    content = bytearray(arrow.read_bytes())
    content[len(content) // 2] ^= 1
    arrow.write_bytes(content)


def lose_the_arrow_file(arrow: Path, record: Path) -> None:
    arrow.unlink()


def lose_the_record(arrow: Path, record: Path) -> None:
    record.unlink()


def damage_the_record(arrow: Path, record: Path) -> None:
    record.write_text('{"bytes": "many"}')


@pytest.mark.parametrize("damage", [cut_off, flip_a_byte, lose_the_arrow_file, lose_the_record, damage_the_record])
def test_a_damaged_cache_is_rebuilt(tmp_path, tiny, damage):
    source = write_source(tmp_path / "s", "jsonl")
    corpus = tokenise(source, tiny, tmp_path / "cache")
    whole = corpus.path.read_bytes()
    damage(corpus.path, corpus.path.with_suffix(".json"))
    if damage is not flip_a_byte:
        with pytest.raises(DataError) as error:
            open_corpus(corpus.key, tmp_path / "cache")
        assert "data plan" in str(error.value.hint)
    again = tokenise(source, tiny, tmp_path / "cache")
    assert again.path.read_bytes() == whole
    assert again.tokens(2).tolist() == plain_encoder(tiny)([TEXTS[2]])[0]


def test_a_file_that_is_no_arrow_is_named(tmp_path, tiny):
    corpus = tokenise(write_source(tmp_path / "s", "jsonl"), tiny, tmp_path / "cache")
    corpus.path.write_bytes(b"x" * corpus.path.stat().st_size)
    with pytest.raises(DataError, match="not a readable Arrow file"):
        _ = open_corpus(corpus.key, tmp_path / "cache").lengths


def test_an_interrupted_tokenisation_leaves_nothing(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(corpus_module, "BATCH_DOCUMENTS", 1)
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": "the cat"}\n{"text": 7}\n')
    with pytest.raises(DataError, match="line 2: column 'text' holds a int"):
        tokenise(Source(path=str(path)), tiny, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_kills_left_is_written_over(tmp_path, tiny):
    source, cache = write_source(tmp_path / "s", "jsonl"), tmp_path / "cache"
    code = """
import os, signal, sys
from pathlib import Path
from transformers import AutoTokenizer
from longrope2.data import corpus
from longrope2.data.config import Source
source, tokenizer, cache = sys.argv[1:]
corpus._checksum = lambda _: os.kill(os.getpid(), signal.SIGKILL)
corpus.tokenise(Source(path=source), AutoTokenizer.from_pretrained(tokenizer), Path(cache))
"""
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", code, source.path, ASSETS / "tiny", cache])
        assert ended.returncode == -signal.SIGKILL
        assert len(list(cache.iterdir())) == 1
    corpus = tokenise(source, tiny, cache)
    assert {path.name for path in cache.iterdir()} == {f"{corpus.key}.arrow", f"{corpus.key}.json"}


def test_two_processes_do_not_tokenise_one_source_at_once(tmp_path, tiny):
    source = write_source(tmp_path / "s", "jsonl")
    writing = atomic_path(tmp_path / f"{corpus_key(source, tiny)}.arrow")
    with pytest.raises(LongRopeError, match="another process is tokenising"), writing:
        tokenise(source, tiny, tmp_path)


def test_sources_without_text_are_refused(tmp_path, tiny):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="1 document, no token in any"):
        tokenise(Source(path=str(tmp_path / "empty.txt")), tiny, tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"no \.txt file in this folder"):
        tokenise(Source(path=str(tmp_path / "folder")), tiny, tmp_path / "cache")
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        tokenise(Source(path=str(tmp_path / "none.jsonl")), tiny, tmp_path / "cache")
    with pytest.raises(DataError, match="neither a file or folder here nor a hub dataset id"):
        tokenise(Source(path="no such thing"), tiny, tmp_path / "cache")


def test_an_unreadable_file_is_refused(tmp_path, tiny, monkeypatch):
    source = write_source(tmp_path / "s", "jsonl")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources_module.hashlib, "file_digest", refuse)
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
        corpus_key(source, tiny)


def trained(model, trainer, pre_tokenizer, normalizer=None):
    """A small tokenizer of a kind, trained on a book; a normalizer takes the place of what divided its words."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(BOOK[:200_000].splitlines(), trainer)
    if normalizer is not None:
        tokenizer = Tokenizer(tokenizer.model)
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BOOK = next(read_books(held_out=False)).text
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS_OF_TOKENIZERS = {
    "GPT-2": lambda: trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=800, show_progress=False), pre_tokenizers.ByteLevel(False)
    ),
    "Llama 3": lambda: trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=800, show_progress=False),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
    ),
    "Llama 2": lambda: trained(
        models.BPE(byte_fallback=True, unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=800, show_progress=False, special_tokens=["<unk>"]),
        pre_tokenizers.Metaspace(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "across words": lambda: trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=800, show_progress=False), pre_tokenizers.Split("\n", "isolated")
    ),
    "T5": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=800, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
    ),
}


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
def test_a_long_text_has_the_same_tokens_in_pieces(kind, monkeypatch):
    tokenizer = KINDS_OF_TOKENIZERS[kind]()
    text = BOOK[100_000:160_000]
    (whole,) = plain_encoder(tokenizer)([text])
    given = []
    real = corpus_module._whole_encoder

    def watched(state):
        encode = real(state)
        return lambda texts: given.extend(texts) or encode(texts)

    monkeypatch.setattr(corpus_module, "_whole_encoder", watched)
    monkeypatch.setattr(corpus_module, "PIECE", 1000)
    short, pieces = plain_encoder(tokenizer)([text[:900], text])
    assert pieces.tolist() == whole
    assert short == real(encoder_state(tokenizer))([text[:900]])[0]
    assert max(map(len, given)) <= 1000 + corpus_module.CONTEXT
    # Nowhere to cut: still every character, in the same order.
    (run,) = plain_encoder(tokenizer)(["word" * 1000])
    assert re.sub("[ ▁]", "", tokenizer.decode(run)) == "word" * 1000


def test_a_hub_dataset_is_known_by_its_commit(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    commit, read = "a" * 40, []

    class Hub:
        def dataset_info(self, name, revision):
            assert (name, revision) in [("owner/name", None), ("owner/name", "v1.0")]
            if commit is None:
                raise ConnectionError("no route\nsecond line")
            return type("Info", (), {"sha": commit})

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: read.append(k["revision"]) or iter([{"text": t} for t in TEXTS])
    )
    source, tokenizer = Source(path="owner/name:test"), word_tokenizer()
    corpus = tokenise(source, tokenizer, tmp_path)
    assert corpus.num_documents == 5
    assert read == [commit]  # the commit of the key, also where the hub has moved on since
    assert corpus_key(Source(path="owner/name@v1.0:test"), tokenizer) == corpus.key
    assert corpus_key(Source(path=f"owner/name@{'b' * 40}:test"), tokenizer) != corpus.key
    assert corpus_key(Source(path="owner/name"), tokenizer) != corpus.key
    assert corpus_key(Source(path="owner/name:test", text_column="summary"), tokenizer) != corpus.key
    commit = "b" * 40
    assert corpus_key(source, tokenizer) != corpus.key
    commit = None
    with pytest.raises(DataError, match=r"cannot be reached \(no route\)"):
        corpus_key(source, tokenizer)


def test_the_packages_books_are_those_not_held_out(monkeypatch, tmp_path):
    from longrope2.data.sources import read_documents

    titles = [book.title for book in read_documents(Source(path="books"))]
    assert "Emma" in titles
    assert "Husks" not in titles
    assert content_bytes(Source(path="books")) > 4_000_000
    key = corpus_key(Source(path="books"), word_tokenizer())
    assert len(key) == 32
    # Also where a folder has that name, which is to be had as ./books.
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "mine.txt").write_text("Mine.")
    monkeypatch.chdir(tmp_path)
    assert corpus_key(Source(path="books"), word_tokenizer()) == key
    assert [book.title for book in read_documents(Source(path="./books"))] == ["mine"]


def test_pyarrow_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match="a tokenised corpus needs the package 'pyarrow'"):
        tokenise(write_source(tmp_path / "s", "folder"), word_tokenizer(), tmp_path / "cache")


def test_the_default_cache_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_cache() == tmp_path / ".cache" / "longrope2" / "corpus"


# Marks


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Marks(bos=0, eos=1, pad=1)),
        ({"opens": False}, Marks(bos=None, eos=1, pad=1)),
        ({"bos": False}, Marks(bos=None, eos=1, pad=1)),
        ({"eos": False}, Marks(bos=0, eos=None, pad=0)),
        ({"eos": False, "opens": False}, Marks(bos=0, eos=None, pad=0)),
    ],
)
def test_marks_follow_the_tokenizers_rule(options, expected):
    assert document_marks(word_tokenizer(**options)) == expected


def test_a_tokenizer_without_marks_is_refused():
    with pytest.raises(DataError, match="neither a BOS nor an EOS token") as error:
        document_marks(word_tokenizer(bos=False, eos=False))
    assert "eos_token" in error.value.hint


def test_a_padding_token_that_was_added_later_is_not_used():
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # which the model has not
    assert document_marks(tokenizer).pad == tokenizer.eos_token_id


# Sources in words


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [("a/b", "a/b", 1.0), ("a=b=2.5", "a=b", 2.5), ("books=1e-1", "books", 0.1), ("x=y/z", "x=y/z", 1.0)],
)
def test_sources_on_the_command_line(text, path, weight):
    assert Source.parse(text) == Source(path=path, weight=weight)


def test_a_path_that_exists_wins_over_a_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=2").mkdir()
    assert Source.parse("a=2") == Source(path="a=2")
    with pytest.raises(DataError, match="'much' is not a weight"):
        Source.parse("a=much")


def test_one_length_to_cut_to_or_several():
    assert Source(path="p", cut=64) == Source(path="p", cut=(64,))
    assert Source(path="p", cut=64).cut_lengths == (64,)
    assert Source(path="p", cut=("x",), upsample="far").problems() == [
        "source 'p': upsample must be a number, got \"far\"",
        "source 'p': cut must be a length such as \"32k\" or a list in brackets, each a length such as "
        '"32k", got ["x"]',
    ]
