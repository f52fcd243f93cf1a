"""Books from every kind of source, and every way a source can be wrong."""

import gzip
import hashlib
import lzma
import sys
from collections.abc import Iterator
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from longrope2.books import Book, long_enough, package_manifest, read_books
from longrope2.errors import DataError, MissingExtraError


def words(text: str) -> int:
    return len(text.split())


def book(title: str, num_words: int) -> Book:
    return Book(title=title, text="word " * num_words, source="here")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# The package's books


def test_manifest_is_true() -> None:
    folder = resources.files("longrope2") / "assets" / "books"
    entries = package_manifest()
    texts = [read.text for read in read_books()]
    assert len(texts) == len(entries)
    for entry, text in zip(entries, texts, strict=True):
        assert hashlib.sha256(text.encode()).hexdigest() == entry.sha256, entry.title
        assert len(text) == entry.characters, entry.title
        assert 1450 < entry.year < 1929, entry.title
        assert "gutenberg" not in text.lower(), entry.title
        assert "\r" not in text, entry.title
        assert entry.author
        assert entry.source
    stored = {file.name: len(file.read_bytes()) for file in folder.iterdir()}
    assert stored.keys() == {entry.file for entry in entries} | {"manifest.json"}
    assert sum(stored.values()) <= 4_000_000


def test_there_are_enough_packaged_books() -> None:
    entries = package_manifest()
    held_out = [entry for entry in entries if entry.held_out]
    assert len(entries) >= 12
    assert len(held_out) >= 6
    assert len({entry.title for entry in entries}) == len(entries)
    # At four to five characters a token, this many give 128k tokens.
    assert sum(entry.characters > 600_000 for entry in held_out) >= 4


def test_held_out_filters_the_packaged_books() -> None:
    entries = package_manifest()
    for held_out in (True, False):
        expected = [entry.title for entry in entries if entry.held_out is held_out]
        assert [read.title for read in read_books(held_out=held_out)] == expected


def test_packaged_books_are_decompressed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    lzma_open = lzma.open
    monkeypatch.setattr(lzma, "open", lambda file: opened.append(file) or lzma_open(file))
    books = read_books()
    assert not opened
    next(books)
    assert len(opened) == 1
    assert len(list(read_books(limit=2))) == 2
    assert len(opened) == 3


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(DataError, match="limit is 0, at least 1 expected"):
        read_books(limit=0)


# Files and folders


def test_folder_is_read_recursively_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second\r\nline\rend")
    (tmp_path / "a.TXT").write_text("\ufefffirst", encoding="utf-8")
    (tmp_path / "sub" / "c.txt").write_text("third")
    (tmp_path / "notes.md").write_text("not a book")
    books = list(read_books(tmp_path, held_out=True))
    assert [(read.title, read.text) for read in books] == [
        ("a", "first"),
        ("b", "second\nline\nend"),
        ("c", "third"),
    ]
    assert books[1].source == str(tmp_path / "b.txt")
    assert [read.title for read in read_books(str(tmp_path), limit=2)] == ["a", "b"]


def test_folder_is_read_lazily(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    assert [read.title for read in read_books(tmp_path, limit=1)] == ["a"]
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8 \(byte 0 is 0xff\)"):
        list(read_books(tmp_path))


def test_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "Emma.txt"
    path.write_text("Emma Woodhouse, “handsome”", encoding="utf-8")
    expected = [Book(title="Emma", text="Emma Woodhouse, “handsome”", source=str(path))]
    assert list(read_books(path)) == list(read_books(str(path))) == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(read_books("~/Emma.txt")) == expected


def test_a_file_that_exists_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "a.txt").write_text("local")
    monkeypatch.chdir(tmp_path)
    assert [read.text for read in read_books("owner/name")] == ["local"]


@pytest.mark.parametrize("name", ["books.jsonl", "books.jsonl.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = '{"text": "one", "title": "First"}\n\n{"body": "x", "text": "two", "title": ""}\n'
    path.write_bytes(gzip.compress(lines.encode(), mtime=0) if name.endswith("gz") else lines.encode())
    assert list(read_books(path)) == [
        Book(title="First", text="one", source=f"{path}, line 1"),
        Book(title=f"{path}, line 3", text="two", source=f"{path}, line 3"),
    ]


def test_jsonl_is_read_lazily(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "books.jsonl", '{"text": "one"}', "{broken")
    assert [read.text for read in read_books(path, limit=1)] == ["one"]


def test_parquet(tmp_path: Path) -> None:
    rows = [{"short_book_title": f"Book {i}", "body": f"text {i}", "other": i} for i in range(20)]
    path = write_parquet(tmp_path / "books.parquet", rows)
    books = list(read_books(path, text_column="body"))
    assert [read.text for read in books] == [f"text {i}" for i in range(20)]
    assert books[19] == Book(title="Book 19", text="text 19", source=f"{path}, row 20")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("books.jsonl", b'{"text": "one"}\n{"text": \n', r"books\.jsonl, line 2: invalid JSON"),
        ("books.jsonl", b"[" * 100_000, r"line 1: invalid JSON: recursion limit exceeded"),
        ("books.jsonl", b'{"text": "one"}\n["two"]\n', r"line 2: the whole must be an object"),
        ("books.jsonl", b'\n{"text": "\xe9"}\n', r"line 2: not UTF-8 \(byte 10 is 0xe9\)"),
        ("books.jsonl", b'{"text": "\\u0000"}\n', r"line 1: not text: it contains NUL"),
        (
            "books.jsonl",
            b'{"text": "\\ud83d"}\n',
            r"line 1: invalid JSON: .*(surrogate|hex escape)",
        ),
        ("books.jsonl", b'{"title": "A", "body": "b"}\n', r"line 1: no column 'text', only title, body\nhint: rename"),
        ("books.jsonl", b"{}\n", r"line 1: no column 'text', only none at all"),
        ("books.jsonl", b'{"text": null}\n', r"line 1: column 'text' holds a NoneType, a string expected"),
        ("books.jsonl", b"\n", r"books\.jsonl: no rows"),
        ("books.jsonl.gz", b'{"text": "one"}\n', r"books\.jsonl\.gz: cannot be read"),
        ("books.jsonl.gz", gzip.compress(b'{"text": "one"}\n', mtime=0)[:-9], r"books\.jsonl\.gz: cannot be read"),
        ("book.txt", b"caf\xe9", r"book\.txt: not UTF-8 \(byte 3 is 0xe9\)"),
        ("book.txt", b"GIF\x00\x01", r"book\.txt: not text: it contains NUL characters"),
        ("books.parquet", b"not parquet", r"books\.parquet: not a readable parquet file"),
        ("books.pdf", b"%PDF", r"books\.pdf: files of this kind cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_books(tmp_path / name))
    assert caught.value.hint


def test_parquet_without_the_column_or_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "books.parquet", [{"title": "A", "body": "b"}])
    with pytest.raises(DataError, match=r"books\.parquet: no column 'text', only title, body"):
        list(read_books(path))
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(DataError, match=r"books\.parquet: no rows"):
        list(read_books(path))


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "book.txt").write_text("secret")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"book\.txt: cannot be read \(Permission denied\)"):
        list(read_books(tmp_path / "book.txt"))


# These are refused at the call, before the first book is asked for.
def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read_books(tmp_path / "missing")
    with pytest.raises(DataError, match=r"no \.txt file in this folder"):
        read_books(tmp_path)


@pytest.mark.parametrize(
    "source",
    ["", " ", "emma", "a/b/c", "books/emma.txt", "books/all.jsonl.gz", "./owner/name", "owner/name:"],
)
def test_neither_a_path_nor_a_hub_id(source: str) -> None:
    with pytest.raises(DataError, match="neither a file or folder here nor a hub dataset id") as caught:
        read_books(source)
    assert "owner/name:split" in str(caught.value)


# The hub


class FakeHub:
    """Stands for datasets.load_dataset: endless rows, of which it counts those taken."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.taken = 0

    def __call__(self, name: str, **options: Any) -> Iterator[dict[str, Any]]:
        self.calls.append((name, options))
        return self._rows()

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number in count():
            self.taken += 1
            yield {"title": f"Book {number}", "text": f"text {number}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(datasets, "load_dataset", fake)
    return fake


def test_hub_dataset_is_streamed(hub: FakeHub) -> None:
    books = list(read_books("owner/some.name", limit=10))
    assert hub.calls == [("owner/some.name", {"split": "train", "streaming": True, "revision": None})]
    assert hub.taken == 10
    assert books[9] == Book(title="Book 9", text="text 9", source="owner/some.name:train, row 10")


def test_hub_split(hub: FakeHub) -> None:
    (first,) = read_books("owner/name@v1.0:validation", limit=1)
    assert hub.calls == [("owner/name", {"split": "validation", "streaming": True, "revision": "v1.0"})]
    assert first.source == "owner/name:validation, row 1"


def test_hub_errors(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
    with pytest.raises(DataError, match="owner/name:train, row 1: no column 'content', only title, text"):
        next(read_books("owner/name", text_column="content"))

    def missing(name: str, **options: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(DataError, match=r"'owner/name' is not a file or folder here, .* 'test' .*doesn't exist"):
        next(read_books("owner/name:test"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **options: [])
    with pytest.raises(DataError, match="owner/name:train: no rows"):
        next(read_books("owner/name"))


@pytest.mark.parametrize(("package", "source"), [("datasets", "owner/name"), ("pyarrow", "books.parquet")])
def test_a_missing_package_is_named(package: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books.parquet").touch()
    # None makes an import fail as if the package were not installed.
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'longrope2\[eval\]'"):
        next(read_books(source))


# Long enough


def test_short_books_are_skipped_and_noted() -> None:
    notes: list[str] = []
    books = [book("Short", 1234), book("Exact", 4096), book("Long", 100_000)]
    kept = list(long_enough(books, 4096, words, note=notes.append))
    assert [each.title for each in kept] == ["Exact", "Long"]
    assert notes == ["skipped 'Short': 1,234 tokens, 4,096 needed"]


def test_a_book_is_counted_no_further_than_needed() -> None:
    counted: list[int] = []

    def count_words(text: str) -> int:
        counted.append(len(text))
        return words(text)

    assert list(long_enough([book("Huge", 1_000_000)], 1000, count_words, note=print))
    assert sum(counted) < 10_000


@pytest.mark.parametrize("num_words", [999, 1000, 1001])
def test_sparse_text_is_counted_to_the_end(num_words: int) -> None:
    # Far more characters a token than the first try allows for.
    sparse = Book(title="Sparse", text=("word" + " " * 60) * num_words, source="here")
    notes: list[str] = []
    kept = long_enough([sparse, book("Long", 2000)], 1000, words, note=notes.append)
    assert [each.title for each in kept] == (["Sparse", "Long"] if num_words >= 1000 else ["Long"])
    assert notes == ([] if num_words >= 1000 else ["skipped 'Sparse': 999 tokens, 1,000 needed"])


def test_no_book_is_long_enough() -> None:
    notes: list[str] = []
    books = [book("Short", 10), book("Longest", 1234), book("Middle", 500)]
    with pytest.raises(DataError, match="4,096 tokens needed, the longest, 'Longest', has 1,234") as caught:
        list(long_enough(books, 4096, words, note=notes.append))
    assert caught.value.hint
    assert len(notes) == 3
    with pytest.raises(DataError, match="no books to choose from"):
        list(long_enough([], 4096, words, note=notes.append))


def test_long_enough_is_lazy(hub: FakeHub) -> None:
    books = long_enough(read_books("owner/name"), 2, words, note=print)
    assert next(books).title == "Book 0"
    assert hub.taken == 1
