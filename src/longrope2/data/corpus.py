"""Each source tokenised once into an Arrow file, found again by its content and the tokenizer.

Also what a tokenizer puts around a document.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longrope2.books import Book
from longrope2.codec import opens_with_bos
from longrope2.console import ProgressLine, say
from longrope2.data.config import Source
from longrope2.data.sources import content_bytes, content_identity, pinned, read_documents
from longrope2.errors import DataError, counted, require
from longrope2.files import atomic_path, package_versions, public
from longrope2.records import CorpusRecord, Marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAN_AGAIN = "run `longrope2 data plan` again, which makes that file again"
BATCH_CHARACTERS = 1 << 22
BATCH_DOCUMENTS = 1 << 12
MEGABYTE = 1_000_000
PIECE = 1 << 20
"""Characters of a text that a tokenizer is given at a time."""
LONGEST_WORD, CONTEXT = 4096, 64
"""Characters before the end of a piece among which a space is looked for, and characters given with the next piece."""
SPACE = re.compile(r"(?<=\w) (?=\w)")


def document_marks(tokenizer: "PreTrainedTokenizerBase") -> Marks:
    """The tokenizer's own rule: BOS only where it opens texts with one, or where there is no EOS to separate them."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None and eos is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so packed documents would run together",
            hint="set tokenizer.eos_token to the token that ended documents when the model was trained",
        )
    # Not the tokenizer's own padding token: that may have been added later, and the model does not have it then.
    pad = bos if eos is None else eos
    return Marks(bos=bos if eos is None or opens_with_bos(tokenizer) else None, eos=eos, pad=pad)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of everything that decides which tokens a text becomes."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left over from its last caller; not a part of what it is, and never used here.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return "sha256:" + hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


Tokens = list[int] | NDArray[np.int32]
"""Of a document."""
Encoder = Callable[[Sequence[str]], list[Tokens]]


def plain_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """A function from texts to their tokens, no special token among them, on as many threads as allowed."""
    return encoder_of(encoder_state(tokenizer))


def encoder_state(tokenizer: "PreTrainedTokenizerBase") -> "str | PreTrainedTokenizerBase":
    """What another process needs to make the same tokens: of a fast tokenizer its JSON, which loads at once."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer


def encoder_of(state: "str | PreTrainedTokenizerBase", most: int | None = None) -> Encoder:
    """The encoder of a tokenizer's state, which takes texts of any length.

    A text of more tokens than `most` may be given up after these, so that a huge one costs little.
    """
    encode = _whole_encoder(state)

    def encode_any(texts: Sequence[str]) -> list[Tokens]:
        if all(len(text) <= PIECE for text in texts):
            return encode(texts)
        return [
            np.concatenate(list(_pieces(text, encode, most))) if len(text) > PIECE else encode([text])[0]
            for text in texts
        ]

    return encode_any


def _pieces(text: str, encode: Encoder, most: int | None) -> Iterator[NDArray[np.int32]]:
    """The tokens of a long text piece by piece, as they are in the whole."""
    start = given = 0
    while start < len(text) and (most is None or given <= most):
        end = len(text) if len(text) <= start + PIECE else _cut(text, start, encode)
        # Some tokenizers put a space before the first word they are given: that one is cut off again.
        follows, tokens = _after(text, max(start - CONTEXT, 0), start, end, encode)
        piece = np.asarray(tokens if follows else encode([text[start:end]])[0], dtype=np.int32)
        yield piece
        start, given = end, given + len(piece)


def _cut(text: str, start: int, encode: Encoder) -> int:
    """The end of a piece: before a space between two words, where no token has a part in both."""
    end = start + PIECE
    spaces = [found.start() for found in SPACE.finditer(text, max(end - LONGEST_WORD, start + 1), end)]
    for space in reversed(spaces):
        if _after(text, max(space - CONTEXT, 0), space, space + CONTEXT, encode)[0]:
            return space
    return spaces[-1] if spaces else end


def _after(text: str, begin: int, border: int, end: int, encode: Encoder) -> tuple[bool, Tokens]:
    """Whether what stands before a border has the same tokens with what follows, and the tokens of the latter."""
    (before,), (whole,) = encode([text[begin:border]]), encode([text[begin:end]])
    return whole[: len(before)] == before, whole[len(before) :]


def _whole_encoder(state: "str | PreTrainedTokenizerBase") -> Encoder:
    """The same for texts that are not too long: a tokenizer takes a hundred times the memory of its text."""
    if not isinstance(state, str):
        tokenizer = state

        def encode_slowly(texts: Sequence[str]) -> list[Tokens]:
            options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
            return [tokenizer(text, verbose=False, **options).input_ids for text in texts]

        return encode_slowly

    from tokenizers import Tokenizer

    # A copy, since these settings would otherwise stay behind on the caller's tokenizer.
    backend = Tokenizer.from_str(state)
    backend.no_truncation()
    backend.no_padding()
    # A text that contains "<s>" means the three characters, not the special token.
    backend.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[Tokens]:
        # Without offsets, which are not needed here, it is 1.7 times as fast.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


def default_cache() -> Path:
    """Where tokenised sources are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "longrope2" / "corpus"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One tokenised source: documents by number, straight from the memory-mapped file."""

    key: str
    """Hash of content, tokenizer and format; also the name of the file."""
    path: Path
    num_documents: int
    num_tokens: int

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, special tokens not counted."""
        return np.concatenate([np.diff(offsets) for _, offsets in self._batches]).astype(np.int64)

    @property
    def num_bytes(self) -> int:
        """Of its file."""
        return self.path.stat().st_size

    def tokens(self, document: int) -> NDArray[np.int32]:
        """The token ids of a document, without copying and without special tokens."""
        batch = int(np.searchsorted(self._starts, document, side="right")) - 1
        values, offsets = self._batches[batch]
        within = document - int(self._starts[batch])
        return values[offsets[within] : offsets[within + 1]]

    @property
    def is_local(self) -> bool:
        """Whether all documents lie on this machine."""
        return True

    def fetch(self, document: int) -> None:
        """Bring a document to this machine, where it is already."""

    def title(self, document: int) -> str:
        """The title of a document."""
        return str(self._table.column("title")[document].as_py())

    def is_whole(self) -> bool:
        """Whether every byte is as it was written; reads the whole file."""
        return _checksum(self.path) == _record(self.key, self.path.parent).crc32

    @property
    def remedy(self) -> str:
        """What to do where it is damaged."""
        return PLAN_AGAIN

    @cached_property
    def _table(self) -> Any:
        arrow = require("pyarrow", extra="train", purpose="a tokenised corpus")
        try:
            return arrow.ipc.open_file(arrow.memory_map(str(self.path))).read_all()
        except (OSError, arrow.ArrowException) as error:
            raise DataError(
                f"{self.path}: not a readable Arrow file ({error})",
                hint="delete it and run `longrope2 data plan` again, which makes that file again",
            ) from error

    @cached_property
    def _batches(self) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Values and offsets of each record batch, as views of the file."""
        chunks = self._table.column("tokens").chunks
        return [(_view(chunk.values), _view(chunk.offsets)) for chunk in chunks]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The number of the first document of each record batch."""
        counts = [len(offsets) - 1 for _, offsets in self._batches]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def corpus_key(source: Source, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The name under which this content, tokenised by this tokenizer, is kept."""
    identity = {
        "format": CorpusRecord.VERSION,
        "content": content_identity(source),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def tokenise(source: Source, tokenizer: "PreTrainedTokenizerBase", cache: Path | None = None) -> Corpus:
    """The tokenised source, from the cache where it is whole there; otherwise made now, with progress."""
    cache = cache or default_cache()
    source = pinned(source)
    key = corpus_key(source, tokenizer)
    try:
        corpus = open_corpus(key, cache)
    except DataError as error:
        if (cache / f"{key}.json").exists():
            say(f"{error.message}; tokenising {source.label} again")
    else:
        if corpus.is_whole():
            return corpus
        say(f"{corpus.path}: damaged; tokenising {source.label} again")
    _write(source, tokenizer, key, cache)
    return open_corpus(key, cache)


def open_corpus(key: str, cache: Path | None = None) -> Corpus:
    """A tokenised source that must be in the cache; its size is checked, its bytes are not."""
    cache = cache or default_cache()
    path = cache / f"{key}.arrow"
    record = _record(key, cache)
    if not path.is_file() or path.stat().st_size != record.bytes:
        raise DataError(
            f"{path}: missing or incomplete, {record.bytes:,} bytes expected",
            hint=PLAN_AGAIN,
        )
    return Corpus(key=key, path=path, num_documents=record.documents, num_tokens=record.tokens)


def _record(key: str, cache: Path) -> CorpusRecord:
    try:
        return CorpusRecord.load(cache / f"{key}.json", hint=PLAN_AGAIN)
    except FileNotFoundError as error:
        raise DataError(
            f"{cache}: no tokenised source {key} there",
            hint="name the folder that `longrope2 data plan` kept it in, or run that command again",
        ) from error


def _write(source: Source, tokenizer: "PreTrainedTokenizerBase", key: str, cache: Path) -> None:
    refusal = f"another process is tokenising {source.label} there"
    with atomic_path(cache / f"{key}.arrow", refusal=refusal) as partial:
        documents, tokens = _write_arrow(source, tokenizer, partial)
        size, checksum = partial.stat().st_size, _checksum(partial)
    # Written last: a kill before this line leaves an Arrow file that is not taken for complete.
    CorpusRecord(
        source=source.label,
        documents=documents,
        tokens=tokens,
        bytes=size,
        crc32=checksum,
        tokenizer=tokenizer_fingerprint(tokenizer),
        versions=package_versions("tokenizers", "transformers", "pyarrow"),
    ).save(cache / f"{key}.json")


def _write_arrow(source: Source, tokenizer: "PreTrainedTokenizerBase", path: Path) -> tuple[int, int]:
    """Tokenise a source into a file; returns how many documents and tokens it has."""
    encode = plain_encoder(tokenizer)
    documents = tokens = 0
    progress = _Progress(source)
    with writing_tokens(path) as write:
        for books in batched(read_documents(source)):
            encoded = encode([book.text for book in books])
            write(books, encoded)
            documents, tokens = documents + len(books), tokens + sum(map(len, encoded))
            progress.update(books, documents, tokens)
    if tokens == 0:
        raise DataError(
            f"source {source.label!r}: {counted(documents, 'document')}, no token in any",
            hint="omit this source, or check its files",
        )
    progress.finish(documents, tokens)
    return documents, tokens


@contextmanager
def writing_tokens(path: Path) -> Iterator[Callable[[Sequence[Book], Sequence[Tokens]], None]]:
    """A function that adds some documents and their tokens to a new Arrow file, as one record batch."""
    arrow = require("pyarrow", extra="train", purpose="a tokenised corpus")
    schema = arrow.schema(
        [("tokens", arrow.list_(arrow.int32())), ("title", arrow.string()), ("source", arrow.string())]
    )

    def write(books: Sequence[Book], encoded: Sequence[Tokens]) -> None:
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
        values = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in encoded])
        columns = [
            arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(values)),
            arrow.array([book.title for book in books], arrow.string()),
            arrow.array(public([book.source for book in books]), arrow.string()),
        ]
        writer.write_batch(arrow.record_batch(columns, schema=schema))

    with path.open("wb") as file, arrow.ipc.new_file(file, schema) as writer:
        yield write


def _view(array: Any) -> NDArray[np.int32]:
    """The numbers of an Arrow array where they lie; its own `to_numpy` imports pandas, and swallows a Ctrl-C then."""
    if not len(array):
        return np.empty(0, dtype=np.int32)
    return np.frombuffer(array.buffers()[1], dtype=np.int32, count=len(array), offset=4 * array.offset)


def batched(books: Iterator[Book]) -> Iterator[list[Book]]:
    """Groups large enough to keep every thread busy and small enough for memory."""
    batch: list[Book] = []
    characters = 0
    for book in books:
        batch.append(book)
        characters += len(book.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


class _Progress:
    """Megabytes done of those expected, or just done where their number is not known."""

    def __init__(self, source: Source) -> None:
        expected = content_bytes(source)
        self._label = f"tokenising {source.label}, MB"
        self._total = None if expected is None else max(1, -(-expected // MEGABYTE))
        self._line = ProgressLine(self._total or 1, self._label)
        self._bytes = 0

    def update(self, books: list[Book], documents: int, tokens: int) -> None:
        self._bytes += sum(len(book.text.encode()) for book in books)
        text = f"{counted(documents, 'document')}, {tokens:,} tokens"
        if self._total is None:
            say(f"{self._label} {self._bytes // MEGABYTE}: {text}")
        else:
            # A file holds more than its texts, so the last megabyte is only reached at the end.
            self._line.update(min(self._bytes // MEGABYTE, self._total - 1), text)

    def finish(self, documents: int, tokens: int) -> None:
        if self._total is not None:
            self._line.update(self._total, f"{counted(documents, 'document')}, {tokens:,} tokens")
