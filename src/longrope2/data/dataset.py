"""The shards that `data tokenise` has written, as one corpus; each is opened when a document of it is needed."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longrope2.data.config import Source
from longrope2.data.corpus import Corpus, default_cache, open_corpus, tokenise, tokenizer_fingerprint
from longrope2.data.storage import READERS, URL, Folder
from longrope2.errors import DataError
from longrope2.files import atomic_path, file_digest, write_text
from longrope2.records import DatasetRecord, Shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATASET = "dataset.json"
SELECTED = re.compile(r"(?P<place>.+):(?P<name>[\w.-]+)")
OPEN_SHARDS = 64
"""Shards that are kept open: each takes a file handle and addresses, but hardly any memory."""
LONGEST_PLACE = 4096
"""Characters of a path that systems take, and of addresses that stores do."""
AGAIN = "run `longrope2 data tokenise` again, which makes what is missing"


@dataclass(frozen=True, kw_only=True)
class Dataset(Corpus):
    """A corpus whose documents lie in shards; those of an object store are copied here when first needed."""

    folder: Folder
    shards: tuple[Shard, ...]
    tokenizer: str
    """Its fingerprint."""

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, special tokens not counted."""
        with ThreadPoolExecutor(READERS) as pool:
            return np.concatenate(list(pool.map(self._lengths, self.shards)), dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def tokens(self, document: int) -> NDArray[np.int32]:
        """The token ids of a document, without copying and without special tokens."""
        shard, within = self._place(document)
        return self._open(shard).tokens(within)

    def fetch(self, document: int) -> None:
        """Copy the shard of a document from its store."""
        self._open(self._place(document)[0])

    def title(self, document: int) -> str:
        """The title of a document."""
        shard, within = self._place(document)
        return self._open(shard).title(within)

    def is_whole(self) -> bool:
        """Whether every byte on this machine is as it was written; a store's shards are checked when they come."""
        here = [(self.path / f"{shard.shard}.arrow", shard) for shard in self.shards]
        return all(file_digest(path) == shard.digest for path, shard in here if self.is_local or path.exists())

    @property
    def remedy(self) -> str:
        """What to do where it is damaged: make the shards again, or copy them again."""
        return AGAIN if self.is_local else f"delete {self.path}: its files are copies, made again when needed"

    @property
    def is_local(self) -> bool:
        """Whether its shards need not be copied."""
        return self.folder.local is not None

    def _place(self, document: int) -> tuple[int, int]:
        """The number of a document's shard, and its own number there."""
        shard = int(np.searchsorted(self._starts, document, side="right")) - 1
        return shard, document - int(self._starts[shard])

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The number of the first document of each shard."""
        return np.cumsum([0, *(shard.documents for shard in self.shards[:-1])], dtype=np.int64)

    @cached_property
    def _open(self) -> Callable[[int], Corpus]:
        return lru_cache(maxsize=OPEN_SHARDS)(self._opened)

    def _opened(self, number: int) -> Corpus:
        shard = self.shards[number]
        path = self.path / f"{shard.shard}.arrow"
        if not path.is_file() or path.stat().st_size != shard.bytes:
            if self.is_local:
                raise DataError(f"{path}: missing or incomplete, {shard.bytes:,} bytes expected", hint=AGAIN)
            self._copy(shard, path)
        return Corpus(key=shard.shard, path=path, num_documents=shard.documents, num_tokens=shard.tokens)

    def _copy(self, shard: Shard, path: Path) -> None:
        with atomic_path(path) as partial:
            self.folder.fetch(path.name, partial)
            if file_digest(partial) != shard.digest:
                raise DataError(f"{self.folder.place}/{path.name}: damaged", hint=f"delete it, and {AGAIN}")

    def _lengths(self, shard: Shard) -> NDArray[np.uint32]:
        name = f"{shard.shard}.npy"
        where = f"{self.folder.place}/{name}"
        try:
            with self.folder.reading(name) as path:
                if file_digest(path) != shard.lengths_digest:
                    raise DataError(f"{where}: damaged", hint=AGAIN)
                found: NDArray[np.uint32] = np.load(path, allow_pickle=False)
                return found
        except FileNotFoundError as error:
            raise DataError(f"{where}: missing", hint=AGAIN) from error


def open_dataset(place: str, copies: Path) -> Dataset:
    """The dataset at a path or URL; PLACE:NAME is one source of it. Shards of a store are copied into `copies`."""
    match = SELECTED.fullmatch(place)
    where, name = (match["place"], match["name"]) if match else (place, None)
    folder = Folder(where)
    try:
        with folder.reading(DATASET) as path:
            record = DatasetRecord.load(path, hint=AGAIN)
    except FileNotFoundError as error:
        raise DataError(f"{where}: no dataset there", hint="`longrope2 data tokenise` writes datasets") from error
    if not record.shards:
        raise DataError(f"{where}: not complete", hint=AGAIN)
    if name is not None:
        if name not in record.sources:
            raise DataError(f"{where}: no source {name!r}", hint=f"there are {', '.join(record.sources)}")
        record = replace(record, shards=tuple(shard for shard in record.shards if shard.source == name))
    return Dataset(
        key=record.key,
        path=folder.local or copies / record.key,
        num_documents=sum(shard.documents for shard in record.shards),
        num_tokens=sum(shard.tokens for shard in record.shards),
        tokenizer=record.tokenizer,
        folder=folder,
        shards=record.shards,
    )


def is_dataset(place: str) -> bool:
    """Whether a source is a dataset: a URL, or a folder that `data tokenise` has written."""
    match = SELECTED.fullmatch(place)
    folders = [place, *([match["place"]] if match else [])]
    return bool(URL.fullmatch(place)) or any((Path(each).expanduser() / DATASET).is_file() for each in folders)


def corpus_of(source: Source, tokenizer: "PreTrainedTokenizerBase", cache: Path | None = None) -> Corpus:
    """A source's tokens: of a dataset, from the cache, or made now."""
    if not is_dataset(source.path):
        return tokenise(source, tokenizer, cache)
    cache = cache or default_cache()
    dataset = open_dataset(source.path, cache)
    if dataset.tokenizer != tokenizer_fingerprint(tokenizer):
        raise DataError(
            f"source {source.label!r}: tokenised by another tokenizer than this model's",
            hint="run `longrope2 data tokenise` with this model",
        )
    # Absolute, for training may be started elsewhere; and beside the other tokens, since plans name no places.
    place = source.path if URL.fullmatch(source.path) else str(Path(source.path).expanduser().absolute())
    write_text(_pointer(dataset.key, cache), place)
    return dataset


def reopen(key: str, cache: Path | None = None) -> Corpus:
    """The tokens that a plan was made of, by their key."""
    cache = cache or default_cache()
    pointer = _pointer(key, cache)
    if not pointer.is_file():
        return open_corpus(key, cache)
    try:
        place = pointer.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        place = "\0"
    if "\0" in place or len(place) > LONGEST_PLACE:
        raise DataError(f"{pointer}: damaged", hint="plan again")
    dataset = open_dataset(place, cache)
    if dataset.key != key:
        raise DataError(f"{dataset.folder.place}: no longer the dataset of the plan", hint="plan again")
    return dataset


def _pointer(key: str, cache: Path) -> Path:
    """The file that says where a dataset lies."""
    return cache / f"{key}.dataset"
