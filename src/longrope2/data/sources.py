"""Where training documents come from, how much each source counts, and what identifies its content."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from longrope2.books import HUB_ID, Book, package_manifest, read_books
from longrope2.errors import DataError, all_problems

PACKAGE_BOOKS = "books"
"""The word for the package's own books, without those held out for searching and testing. It means them always: a
folder of that name is written ./books."""
LARGEST_UPSAMPLE = 16
"""Beyond it the longest document always comes first, and length ** upsample soon is no finite number."""
WEIGHTED = re.compile(r"(?P<path>.+)=(?P<weight>[^=/\\]+)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of documents and its part in the mix."""

    path: str
    """A folder of .txt, a .txt, .jsonl, .jsonl.gz or .parquet file, a hub dataset as owner/name:split, or `books`."""
    weight: float = 1.0
    """Share of the tokens of each bucket, relative to the other sources that serve it."""
    upsample: float = 0.0
    """Within a bucket, documents are drawn in proportion to length ** upsample; 0 draws all alike."""
    text_column: str = "text"
    """For .jsonl, .parquet and hub datasets."""
    name: str = ""
    """As it stands in reports; empty: the path."""
    buckets: tuple[str, ...] = ()
    """Names of the buckets it serves; empty: every one."""
    cut: tuple[int, ...] = ()
    """Cut each text into documents of these lengths in tokens, taken in turn; empty: a text is a document."""

    @property
    def label(self) -> str:
        """The name, or the path where it has none."""
        return self.name or self.path

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        subject = f"source {self.label!r}"
        found = []
        if not self.path.strip():
            found.append("a source has no path")
        if not (math.isfinite(self.weight) and self.weight > 0):
            found.append(f"{subject}: weight must be positive, got {self.weight}")
        if not 0 <= self.upsample <= LARGEST_UPSAMPLE:
            found.append(f"{subject}: upsample must lie from 0 to {LARGEST_UPSAMPLE}, got {self.upsample}")
        if any(length < 8 for length in self.cut):
            found.append(f"{subject}: cut must hold lengths of at least 8 tokens, got {list(self.cut)}")
        return found

    @classmethod
    def parse(cls, text: str) -> "Source":
        """PATH or PATH=WEIGHT, as on the command line."""
        match = None if Path(text).exists() else WEIGHTED.fullmatch(text)
        if match is None:
            return cls(path=text)
        try:
            return cls(path=match["path"], weight=float(match["weight"]))
        except ValueError:
            raise DataError(
                f"source {text!r}: {match['weight']!r} is not a weight", hint="write PATH or PATH=2.5"
            ) from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Source":
        """A source from a config table; what it leaves out keeps its default."""
        wanted: dict[str, tuple[type, ...]] = {
            "path": (str,),
            "weight": (int, float),
            "upsample": (int, float),
            "text_column": (str,),
            "name": (str,),
            "buckets": (list, tuple),
            "cut": (int, list, tuple),
        }
        subject = f"source {values.get('name') or values.get('path') or '?'!r}"
        problems = [f"unknown key {key!r}" for key in values if key not in wanted]
        problems += [
            f"{key} must be {' or '.join(t.__name__ for t in wanted[key][:2])}, got {value!r}"
            for key, value in values.items()
            if key in wanted and (not isinstance(value, wanted[key]) or isinstance(value, bool))
        ]
        if "path" not in values:
            problems.append("path is missing")
        cut = values.get("cut", ())
        cut = (cut,) if isinstance(cut, int) else cut
        if "cut" in values and isinstance(cut, list | tuple) and not all(type(length) is int for length in cut):
            problems.append(f"cut must hold whole numbers, got {list(cut)!r}")
        if problems:
            known = ", ".join(field.name for field in fields(cls))
            raise DataError(all_problems(subject, problems), hint=f"the keys of a source are {known}")
        lists = {"cut": tuple(cut), "buckets": tuple(str(name) for name in values.get("buckets", ()))}
        return cls(**{**values, **lists})


def read_documents(source: Source) -> Iterator[Book]:
    """The documents of a source, each read only when it is asked for."""
    if _is_package(source):
        return read_books(held_out=False)
    return read_books(source.path, text_column=source.text_column)


def content_identity(source: Source) -> dict[str, Any]:
    """What tells this content from any other: names, sizes and hashes of files, or a dataset's commit."""
    if _is_package(source):
        return {"package": [entry.sha256 for entry in package_manifest() if not entry.held_out]}
    path = Path(source.path).expanduser()
    if not path.exists():
        return {**_hub_identity(source.path), "text_column": source.text_column}
    # The same choice that read_books makes, whose other complaints it is left to make.
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() == ".txt") if path.is_dir() else [path]
    entries = []
    for file in files:
        if not file.is_file():
            continue
        try:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})", hint="check its permissions") from error
        # Not the folder's own name: content that only moved is the same content.
        name = file.name if file == path else file.relative_to(path).as_posix()
        entries.append([name, file.stat().st_size, digest])
    return {"files": entries, "text_column": source.text_column}


def content_bytes(source: Source) -> int | None:
    """About how many bytes of text to expect, where that is known before reading."""
    path = Path(source.path).expanduser()
    if _is_package(source):
        return sum(entry.characters for entry in package_manifest() if not entry.held_out)
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.suffix.lower() == ".txt" and file.is_file())
    if path.suffix.lower() in (".txt", ".jsonl") and path.is_file():
        return path.stat().st_size
    return None


def beside(folder: Path, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A source's table whose path is looked for beside its config file first; it is still called as it stands there."""
    path = table.get("path")
    if not isinstance(path, str) or not path.strip() or path == PACKAGE_BOOKS:
        return table
    place = Path(path).expanduser()
    if place.is_absolute() or not (folder / place).exists():
        return table
    # Absolute: otherwise ./books would become the word.
    return {**table, "path": str((folder / place).absolute()), "name": table.get("name") or path}


def _is_package(source: Source) -> bool:
    return source.path == PACKAGE_BOOKS


def _hub_identity(name: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    match = HUB_ID.fullmatch(name)
    if match is None:
        return {"unknown": name}  # read_books says what is wrong with it
    try:
        commit = HfApi().dataset_info(match["name"]).sha
    # Anything may come up from the network or the hub.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"'{name}' is no file or folder here, and as a hub dataset it cannot be reached ({reason})",
            hint="check the spelling (owner/name:split) and the connection",
        ) from error
    return {"dataset": match["name"], "split": match["split"] or "train", "commit": commit}
