"""Where training documents come from, and what identifies its content."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from longrope2.books import HUB_ID, Book, package_manifest, read_books
from longrope2.data.config import PACKAGE_BOOKS, Source
from longrope2.errors import DataError

COMMIT = re.compile(r"[0-9a-f]{40}")


def read_documents(source: Source) -> Iterator[Book]:
    """The documents of a source, each read only when it is asked for."""
    if _is_package(source):
        return read_books(held_out=False)
    return read_books(source.path, text_column=source.text_column)


def content_identity(source: Source) -> dict[str, Any]:
    """What distinguishes this content from any other: names, sizes and hashes of files, or a dataset's commit."""
    if _is_package(source):
        return {"package": [entry.sha256 for entry in package_manifest() if not entry.held_out]}
    path = Path(source.path).expanduser()
    if not path.exists():
        return {**hub_identity(source.path), "text_column": source.text_column}
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


def _is_package(source: Source) -> bool:
    return source.path == PACKAGE_BOOKS


def pinned(source: Source) -> Source:
    """The same source; one of the hub at the commit that is the newest now, whatever happens there meanwhile."""
    if _is_package(source) or Path(source.path).expanduser().exists():
        return source
    identity = hub_identity(source.path)
    if "commit" not in identity:
        return source
    return replace(source, path="{dataset}@{commit}:{split}".format(**identity), name=source.label)


def hub_identity(name: str, commit: str | None = None) -> dict[str, Any]:
    """A hub dataset and split at a commit: by default the newest one, or that of the revision in the name."""
    from huggingface_hub import HfApi

    match = HUB_ID.fullmatch(name)
    if match is None:
        return {"unknown": name}  # read_books says what is wrong with it
    revision = match["revision"]
    if commit is None and revision is not None and COMMIT.fullmatch(revision):
        commit = revision
    try:
        commit = commit or HfApi().dataset_info(match["name"], revision=revision).sha
    # Anything may come up from the network or the hub.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"'{name}' is not a file or folder here, and as a hub dataset it cannot be reached ({reason})",
            hint="check the spelling (owner/name:split) and the connection",
        ) from error
    return {"dataset": match["name"], "split": match["split"] or "train", "commit": commit}
