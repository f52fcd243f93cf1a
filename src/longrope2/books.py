"""Long texts from anywhere: the package's own books, files, folders or a hub dataset."""

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

from longrope2.errors import DataError, require
from longrope2.files import bounded_lines
from longrope2.records import Kind, parse

KINDS = "a folder of .txt files, a .txt, .jsonl, .jsonl.gz or .parquet file, or a hub dataset as owner/name:split"
FILE_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
MOST_TEXT_BYTES = 1 << 30
JSON_LINES = "a .jsonl file holds one JSON object per line"
TITLE_COLUMNS = ("title", "short_book_title", "name")
HUB_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>\w[\w./-]*))?(:(?P<split>\w[\w.-]*))?", re.ASCII
)

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Book:
    """One long text and where it came from."""

    title: str
    text: str
    source: str  # the file, row or dataset


@dataclass(frozen=True, kw_only=True)
class PackagedBook:
    """One line of the manifest of the package's books."""

    file: str
    title: str
    author: str
    year: int  # of the first publication
    source: str
    characters: int
    sha256: str  # of the text in UTF-8
    held_out: bool  # never used to train the tiny base model


def package_manifest() -> tuple[PackagedBook, ...]:
    """What the package's books are, without reading their texts."""
    entries = json.loads((_package_folder() / "manifest.json").read_text(encoding="utf-8"))
    return tuple(PackagedBook(**entry) for entry in entries)


def read_books(
    source: str | Path | None = None,
    *,
    text_column: str = "text",
    held_out: bool | None = None,
    limit: int | None = None,
) -> Iterator[Book]:
    """Books from `source`, each read only when it is asked for; None means the package's own.

    `text_column` applies to .jsonl, .parquet and hub sources, `held_out` to the package's books alone.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}, at least 1 expected", hint="omit it to read every book")
    return islice(_open(source, text_column, held_out), limit)


def long_enough(
    books: Iterable[Book],
    length: int,
    count_tokens: Callable[[str], int],
    *,
    note: Callable[[str], None],
) -> Iterator[Book]:
    """The books of at least `length` tokens; each shorter one is reported to `note`."""
    longest: tuple[int, str] | None = None
    kept = False
    for book in books:
        tokens = _count_up_to(book.text, length, count_tokens)
        if tokens >= length:
            kept = True
            yield book
            continue
        note(f"skipped '{book.title}': {tokens:,} tokens, {length:,} needed")
        if longest is None or tokens > longest[0]:
            longest = (tokens, book.title)
    if kept:
        return
    if longest is None:
        raise DataError("no books to choose from", hint=f"give {KINDS}")
    raise DataError(
        f"no book is long enough: {length:,} tokens needed, the longest, '{longest[1]}', has {longest[0]:,}",
        hint="give longer books or ask for a shorter length",
    )


def _count_up_to(text: str, length: int, count_tokens: Callable[[str], int]) -> int:
    """The number of tokens of `text`: exact below `length`, otherwise maybe just enough of them."""
    # Few texts have more than six characters a token, so the first try mostly decides. Cutting a word can
    # change its tokens; the margin is far more than one word has.
    margin = 64
    end = 6 * (max(length, 0) + margin)
    while end < len(text):
        tokens = count_tokens(text[:end])
        if tokens >= length + margin:
            return tokens
        end *= 2
    return count_tokens(text)


def _open(source: str | Path | None, text_column: str, held_out: bool | None) -> Iterator[Book]:
    """Find out what `source` is; what is plainly wrong is refused here, before the first book."""
    if source is None:
        return _read_package(held_out)
    path = Path(source).expanduser()
    if isinstance(source, Path) or (source.strip() and path.exists()):
        return _open_path(path, text_column)
    hub_id = HUB_ID.fullmatch(source)
    # `books/emma.txt` could name a dataset too, but is surely a mistyped file.
    if hub_id is not None and not source.lower().endswith(FILE_SUFFIXES):
        split = hub_id["split"] or "train"
        where = f"{hub_id['name']}:{split}"
        return _from_rows(_read_hub(hub_id["name"], split, hub_id["revision"]), text_column, where)
    raise DataError(f"'{source}' is neither a file or folder here nor a hub dataset id", hint=f"give {KINDS}")


def _open_path(path: Path, text_column: str) -> Iterator[Book]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() == ".txt" and file.is_file())
        if not files:
            raise DataError(f"{path}: no .txt file in this folder", hint=f"give {KINDS}")
        return map(_read_text_file, files)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder", hint="check the spelling of the path")
    name = path.name.lower()
    if name.endswith(".txt"):
        return map(_read_text_file, [path])
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _from_rows(read_jsonl(path, dict[str, Any]), text_column, str(path))
    if name.endswith(".parquet"):
        return _from_rows(_read_parquet(path, text_column), text_column, str(path))
    raise DataError(f"{path}: files of this kind cannot be read", hint=f"give {KINDS}")


def _package_folder() -> Traversable:
    return resources.files("longrope2") / "assets" / "books"


def _read_package(held_out: bool | None) -> Iterator[Book]:
    for entry in package_manifest():
        if held_out is not None and entry.held_out != held_out:
            continue
        with (_package_folder() / entry.file).open("rb") as compressed, lzma.open(compressed) as opened:
            yield Book(title=entry.title, text=opened.read().decode("utf-8"), source=entry.source)


def _read_text_file(path: Path) -> Book:
    try:
        check_text_size(path.stat().st_size, str(path))
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", hint="check its permissions") from error
    return book_of_text(data, path.stem, str(path))


def check_text_size(size: int, where: str) -> None:
    """Refuse a text file that would fill the memory."""
    if size > MOST_TEXT_BYTES:
        raise DataError(f"{where}: {size:,} bytes are too many for one text", hint="split it into several files")


def book_of_text(data: bytes, title: str, where: str) -> Book:
    """The book that a text file holds."""
    return _book(title, _decode(data, where).replace("\r\n", "\n").replace("\r", "\n"), where)


def parse_line(line: bytes, kind: type[Kind], where: str, *, hint: str = JSON_LINES) -> Kind:
    """The object in a line of JSON; an error says where the line stands."""
    return parse(kind, _decode(line, where).encode(), where, hint=hint)


def read_jsonl(path: Path, kind: type[Kind], *, hint: str = JSON_LINES) -> Iterator[tuple[str, Kind]]:
    """(its place, the object) of every line of a .jsonl or .jsonl.gz file; an error names the line."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        # Read as bytes, so that a line that is not UTF-8 can be named.
        with opener(path, "rb") as lines:
            for number, line in enumerate(bounded_lines(lines), start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, parse_line(line, kind, where, hint=hint)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})", hint="check that the file is whole") from error


def _read_parquet(path: Path, text_column: str) -> Iterator[tuple[str, Row]]:
    arrow = require("pyarrow", extra="eval", purpose="reading parquet files")
    parquet = require("pyarrow.parquet", extra="eval", purpose="reading parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_column not in names:
                raise no_column(text_column, names, str(path))
            columns = [name for name in names if name == text_column or name in TITLE_COLUMNS]
            # Whole row groups can be gigabytes of text; a few books at a time suffice.
            batches = file.iter_batches(batch_size=8, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}, row {number}", row
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({error})", hint="write it again") from error


def _read_hub(name: str, split: str, revision: str | None) -> Iterator[tuple[str, Row]]:
    datasets = require("datasets", extra="eval", purpose="reading a hub dataset")
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True, revision=revision)
        for number, row in enumerate(rows, start=1):
            yield f"{name}:{split}, row {number}", row
    # Anything may come up from the network, the hub or the dataset's own files.
    except Exception as error:
        raise DataError(
            f"'{name}' is not a file or folder here, and as a hub dataset its split '{split}' cannot be read "
            f"({type(error).__name__}: {error})",
            hint="check the spelling, the split (owner/name:split) and the connection",
        ) from error


def _from_rows(rows: Iterable[tuple[str, Row]], text_column: str, source: str) -> Iterator[Book]:
    empty = True
    for where, row in rows:
        empty = False
        yield book_of_row(row, text_column, where)
    if empty:
        raise DataError(f"{source}: no rows", hint=f"give {KINDS}")


def book_of_row(row: Row, text_column: str, where: str) -> Book:
    """The book in a row of a table, whose text stands in `text_column`."""
    if text_column not in row:
        raise no_column(text_column, row, where)
    text = row[text_column]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: column '{text_column}' holds a {type(text).__name__}, a string expected",
            hint=_rename(text_column),
        )
    title = next((str(row[column]) for column in TITLE_COLUMNS if row.get(column)), where)
    return _book(title, text, where)


def _book(title: str, text: str, source: str) -> Book:
    """A book whose text any tokenizer will take."""
    if "\0" in text:
        raise DataError(f"{source}: not text: it contains NUL characters", hint="give plain text in UTF-8")
    return Book(title=title, text=text, source=source)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 (byte {error.start:,} is 0x{data[error.start]:02x})",
            hint="convert it: iconv -f LATIN1 -t UTF-8 old.txt > new.txt",
        ) from error


def no_column(text_column: str, columns: Iterable[str], where: str) -> DataError:
    """The error for a table that has no such column."""
    return DataError(
        f"{where}: no column '{text_column}', only {', '.join(columns) or 'none at all'}",
        hint=_rename(text_column),
    )


def _rename(text_column: str) -> str:
    return f"rename the column of the text to '{text_column}'; a [[source]] of a plan may name another (text_column)"
