"""The files of a source, wherever they lie, in portions that make a shard each; and the documents of a portion."""

import gzip
import io
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.utils import glob_translate

from longrope2.books import (
    HUB_ID,
    TITLE_COLUMNS,
    Book,
    book_of_row,
    book_of_text,
    check_text_size,
    no_column,
    parse_line,
)
from longrope2.data.sources import hub_identity
from longrope2.data.storage import READERS, URL, file_system, files_below, url_of
from longrope2.errors import DataError, all_problems, damage, first_line, require
from longrope2.files import MOST_BYTES, fingerprint

SUFFIX = re.compile(r"\.(?P<kind>txt|parquet|jsonl|jsonl?\.gz|jsonl?\.zst)$", re.IGNORECASE)
KINDS = "a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, a folder of them, or a hub dataset as owner/name:split"
COMPRESSION = 3
"""Bytes of text, about, in a byte of a compressed file."""
NAMED = re.compile(r"(?P<name>[\w.-]+)=(?P<path>.+)")
ZSTD_AHEAD = 1 << 15
"""Bytes that Arrow has read but not yet decoded, on average: it reads 64 KiB at a time."""
READ_AHEAD = 1 << 20
"""Bytes to ask a store for at a time."""
PARQUET_ROWS, PARQUET_BYTES = 32, 1 << 22
"""Documents to read at once, and about how much text: whole row groups can be gigabytes of it."""


@dataclass(frozen=True)
class InputFile:
    """A file of a source."""

    name: str
    """Within its source."""
    url: str
    size: int
    version: str
    """What changes with the content: an object store's tag, or the time of the last change."""

    @property
    def kind(self) -> str:
        """What its name ends with."""
        found = SUFFIX.search(self.name)
        assert found is not None
        return found["kind"].lower()


@dataclass(frozen=True)
class InputSource:
    """A source and its files, in the order of their names."""

    name: str
    files: tuple[InputFile, ...]
    hub: Mapping[str, str] = field(default_factory=dict)
    """Of what lies on the hub: dataset, split where one is named, and commit."""

    def identity(self) -> dict[str, Any]:
        """What distinguishes this content from any other, without reading it."""
        return {
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "digest": fingerprint([[file.name, file.size, file.version] for file in self.files]),
            **self.hub,
        }


@dataclass(frozen=True)
class Portion:
    """A file, or a part of one: lines that begin at some of its bytes, or some of its row groups."""

    file: InputFile
    begin: int
    end: int
    bytes: int
    """Of the file that it takes up."""

    @property
    def text_bytes(self) -> int:
        """Bytes of text, about."""
        return self.bytes * (1 if self.file.kind in ("txt", "jsonl") else COMPRESSION)


@dataclass(frozen=True)
class Unit:
    """What one shard is made of."""

    shard: str
    source: str
    portions: tuple[Portion, ...]

    @property
    def bytes(self) -> int:
        """Of the files that it takes up."""
        return sum(portion.bytes for portion in self.portions)

    @property
    def text_bytes(self) -> int:
        """Bytes of text, about."""
        return sum(portion.text_bytes for portion in self.portions)


def find_sources(texts: Sequence[str], commits: Mapping[str, str] | None = None) -> list[InputSource]:
    """Sources as on the command line, PATH or NAME=PATH; without a name the last part of the path is theirs.

    `commits` are those at which to read sources of the hub, by name; by default the newest ones.
    """
    found, problems = [], []
    for text in texts:
        match = NAMED.fullmatch(text)
        name, path = (match["name"], match["path"]) if match else ("", text)
        name = name or _default_name(path)
        try:
            found.append(InputSource(name, *_find_files(path, (commits or {}).get(name))))
        except DataError as error:
            problems.append(error)
    if problems:
        raise DataError(all_problems("sources", [error.message for error in problems]), hint=problems[0].hint)
    names = [source.name for source in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two sources are called {', '.join(twice)}", hint="give each a name of its own: NAME=PATH")
    return found


def _default_name(path: str) -> str:
    hub = HUB_ID.fullmatch(path)
    plain = [part for part in PurePosixPath(hub["name"] if hub else path).parts if "*" not in part and part != "/"]
    return SUFFIX.sub("", plain[-1]) if plain else path


Found = tuple[tuple[InputFile, ...], Mapping[str, str]]
"""The files of a source, and where they lie on the hub."""


def _find_files(path: str, commit: str | None) -> Found:
    hub: Mapping[str, str] = {}
    with damage(f"{path}: cannot be listed", hint="check the address and the credentials", kind=DataError):
        system, root = file_system(path)
        try:
            if path.startswith("hf://"):
                root, hub = _pinned(system, path, commit)
            folder = str(PurePosixPath(root.partition("*")[0] + "x").parent) if "*" in root else root
            # Not isdir() and isfile(), for which a store that does not answer has neither.
            is_folder = system.info(folder)["type"] == "directory"
        except (FileNotFoundError, NotADirectoryError) as error:
            if URL.fullmatch(path) is None and HUB_ID.fullmatch(path):
                return _hub_files(path, commit)
            raise DataError(f"{path}: no such file or folder", hint=f"give {KINDS}") from error
        if is_folder:
            depth = root.removeprefix(folder).count("/") if "*" in root and "**" not in root else None
            matches = re.compile(glob_translate(root)).match if "*" in root else bool
            entries = [entry for entry in files_below(system, folder, depth) if matches(entry["name"])]
        else:
            entries, folder = [system.info(root)], str(PurePosixPath(root).parent)
    files = [
        _file(entry, str(PurePosixPath(entry["name"]).relative_to(folder)), url_of(entry["name"], system, path))
        for entry in entries
    ]
    return _usable([replace(file, version=hub.get("commit", file.version)) for file in files], path), hub


def _pinned(system: Any, path: str, commit: str | None) -> tuple[str, Mapping[str, str]]:
    """A path of hf:// at one commit, and what to record of it."""
    place = system.resolve_path(path)
    if not hasattr(place, "repo_id"):
        return place.unresolve(), {}  # a bucket, which has no commits
    from huggingface_hub import HfApi

    commit = commit or HfApi().repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha
    kind = {"dataset": "datasets/", "space": "spaces/"}.get(place.repo_type, "")
    root = f"{kind}{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/")
    return root, {"dataset": f"{kind}{place.repo_id}".removeprefix("datasets/"), "commit": str(commit)}


def _hub_files(name: str, commit: str | None) -> Found:
    """The files of a hub dataset's split, at a commit: by default the one that is the newest now."""
    datasets = require("datasets", extra="eval", purpose="reading a hub dataset")
    identity = hub_identity(name, commit)
    where, split = f"{name} at {identity['commit']}", identity["split"]
    with damage(f"{where}: cannot be read", hint="check the spelling and the connection", kind=DataError):
        builder = datasets.load_dataset_builder(identity["dataset"], revision=identity["commit"])
        splits = builder.config.data_files or {}
        if split not in splits:
            raise DataError(f"{where}: no split {split!r}", hint=f"there are {', '.join(map(str, splits)) or 'none'}")
        files = []
        for url in map(str, splits[split]):
            system, path = file_system(url)
            inside = url.partition("@")[2].partition("/")[2] or PurePosixPath(url).name
            files.append(replace(_file(system.info(path), inside, url), version=identity["commit"]))
    return _usable(files, name), identity


def _file(entry: dict[str, Any], name: str, url: str) -> InputFile:
    version = next((str(entry[key]) for key in ("ETag", "etag", "md5Hash", "mtime") if entry.get(key)), "")
    return InputFile(name, url, int(entry["size"] or 0), version)


def _usable(files: Sequence[InputFile], path: str) -> tuple[InputFile, ...]:
    known = sorted((file for file in files if SUFFIX.search(file.name)), key=lambda file: file.name.split("/"))
    if not known:
        raise DataError(f"{path}: none of {len(files):,} files there can be read", hint=f"give {KINDS}")
    return tuple(known)


def plan_units(sources: Sequence[InputSource], shard_bytes: int) -> list[Unit]:
    """Which portions make which shard: decided by the files and this size alone."""
    units: list[Unit] = []

    def close(source: str, portions: list[Portion]) -> None:
        if portions:
            units.append(Unit(f"{len(units):06}", source, tuple(portions)))

    with ThreadPoolExecutor(READERS) as pool:
        for source in sources:
            gathered: list[Portion] = []
            size = 0
            for portion in chain.from_iterable(pool.map(_split, source.files, repeat(shard_bytes))):
                if gathered and size + portion.text_bytes > shard_bytes:
                    close(source.name, gathered)
                    gathered, size = [], 0
                gathered.append(portion)
                size += portion.text_bytes
            close(source.name, gathered)
    return units


def _split(file: InputFile, shard_bytes: int) -> list[Portion]:
    """A file whose lines or row groups can be read apart, in portions of about a shard."""
    whole = Portion(file, 0, file.size, file.size)
    if file.kind == "jsonl":
        edges = [*range(0, max(file.size, 1), shard_bytes), file.size]
        return [Portion(file, begin, end, end - begin) for begin, end in pairwise(edges)]
    if file.kind != "parquet":
        return [whole]
    try:
        with _opened(file) as raw:
            metadata = require("pyarrow.parquet", extra="train", purpose="reading parquet files").read_metadata(raw)
    except (OSError, ValueError):  # a damaged one is reported when its turn comes
        return [replace(whole, end=0)]
    sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    portions, begin = [], 0
    share = file.size / max(sum(sizes), 1)
    for number in range(len(sizes)):
        if number + 1 == len(sizes) or sum(sizes[begin : number + 2]) * share * COMPRESSION > shard_bytes:
            portions.append(Portion(file, begin, number + 1, round(sum(sizes[begin : number + 1]) * share)))
            begin = number + 1
    return portions or [replace(whole, end=0)]


class PortionReader:
    """The documents of a portion one by one, and in place of what cannot be read the error that says so."""

    def __init__(self, portion: Portion, text_column: str) -> None:
        self._portion, self._text_column = portion, text_column
        self.consumed = 0
        """Bytes of the file read so far."""

    def __iter__(self) -> Iterator[Book | DataError]:
        file = self._portion.file
        readers = {"txt": self._text, "parquet": self._table}
        try:
            with _opened(file) as raw:
                yield from readers.get(file.kind, self._lines)(raw)
        except DataError as error:
            yield error
        # Anything may come up from the network, a decoder or Arrow, most of whose errors are of these kinds.
        except (OSError, EOFError, ValueError, zlib.error, KeyError, NotImplementedError) as error:
            yield DataError(f"{file.name}: cannot be read ({first_line(error)})", hint="check that the file is whole")
        self.consumed = self._portion.bytes

    def _text(self, raw: Any) -> Iterator[Book | DataError]:
        file = self._portion.file
        check_text_size(file.size, file.name)
        self.consumed = self._portion.bytes
        yield book_of_text(raw.read(), PurePosixPath(file.name).stem, file.name)

    def _lines(self, raw: Any) -> Iterator[Book | DataError]:
        """Lines that begin within the portion; one that cannot be read leaves the others as they are."""
        begin, end, kind = self._portion.begin, self._portion.end, self._portion.file.kind
        is_whole = kind != "jsonl"
        if is_whole and not self._portion.bytes:  # which decoders take for a file of no lines
            name = self._portion.file.name
            raise DataError(f"{name}: no bytes, which a compressed file has", hint="check that the file is whole")
        lines = _decompressed(raw, kind) if is_whole else raw
        ahead = ZSTD_AHEAD if kind.endswith(".zst") else 0
        place = max(begin - 1, 0)
        if begin:
            lines.seek(place)  # the byte before: where it ends a line, the first line begins right here
            place += _skip_line(lines, end - place)
        first = place
        while is_whole or place < end:
            where = f"{self._portion.file.name}, byte {place}"
            line = lines.readline(MOST_BYTES + 1)
            if not line:
                return
            place += len(line)
            self.consumed = min(max(raw.tell() - first - ahead, 0), self._portion.bytes)
            if len(line) > MOST_BYTES:
                place += _skip_line(lines, math.inf if is_whole else end - place)
                yield DataError(f"{where}: a line of more than {MOST_BYTES:,} bytes", hint="split the document")
            elif line.strip():
                yield self._book(line, where)

    def _table(self, raw: Any) -> Iterator[Book | DataError]:
        file, column = self._portion.file, self._text_column
        parquet = require("pyarrow.parquet", extra="train", purpose="reading parquet files")
        with parquet.ParquetFile(raw) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise no_column(column, names, file.name)
            groups = list(range(self._portion.begin, self._portion.end))
            before = sum(table.metadata.row_group(number).num_rows for number in range(self._portion.begin))
            total = sum(_column_bytes(table.metadata.row_group(number), column) for number in groups)
            columns = [name for name in names if name == column or name in TITLE_COLUMNS]
            count = sum(table.metadata.row_group(number).num_rows for number in groups)
            at_once = min(max(PARQUET_BYTES * count // max(total, 1), 1), PARQUET_ROWS)
            batches = table.iter_batches(batch_size=at_once, row_groups=groups, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            size = 0
            for number, row in enumerate(rows, start=1):
                size += len(str(row[column]).encode())
                self.consumed = min(self._portion.bytes * size // max(total, 1), self._portion.bytes)
                yield self._book(row, f"{file.name}, row {before + number}")

    def _book(self, row: bytes | dict[str, Any], where: str) -> Book | DataError:
        try:
            if isinstance(row, bytes):
                row = parse_line(row, dict[str, Any], where)
            return book_of_row(row, self._text_column, where)
        except DataError as error:
            return error


def _opened(file: InputFile) -> Any:
    if file.url.startswith("file://"):
        return Path(file.url.removeprefix("file://")).open("rb")
    system, path = file_system(file.url)
    return io.BufferedReader(_Remote(system.open(path, "rb")), READ_AHEAD)


class _Remote(io.RawIOBase):
    """A file in a store, whose own lines may come byte by byte."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._file.seek(offset, whence)
        return int(self._file.tell())

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompressed(raw: Any, kind: str) -> Any:
    if kind.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    arrow = require("pyarrow", extra="train", purpose="reading .zst files")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd"))


def _skip_line(lines: Any, most: float) -> int:
    """Read on behind the end of the line, or these many bytes where it goes on; returns how many bytes that were."""
    skipped = 0
    while skipped < most and (piece := lines.readline(1 << 20)):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _column_bytes(group: Any, name: str) -> int:
    """Bytes of a column of a row group, before compression."""
    columns = [group.column(number) for number in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == name)
