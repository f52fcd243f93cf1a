"""Sources of any size into a dataset of shards, on the cores of one machine or on a Ray cluster.

Which documents go into which shard depends on the input files and the options alone, and a shard is made by one
process from beginning to end. So the engines, and any number of workers, give the same files byte for byte, and an
interrupted job goes on with the shards that are missing.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import xxhash
from numpy.typing import NDArray

from longrope2.books import Book
from longrope2.console import ProgressLine, roughly, say, warn
from longrope2.data.config import TokeniseConfig
from longrope2.data.corpus import (
    MEGABYTE,
    Encoder,
    batched,
    document_marks,
    encoder_of,
    encoder_state,
    tokenizer_fingerprint,
    writing_tokens,
)
from longrope2.data.dataset import DATASET
from longrope2.data.inputs import InputSource, Portion, PortionReader, Unit, find_sources, plan_units
from longrope2.data.storage import READERS, Folder
from longrope2.errors import DataError, LongRopeError, first_line, require
from longrope2.files import file_digest, package_versions
from longrope2.models import describe, load_tokenizer
from longrope2.options import identity
from longrope2.records import DatasetRecord, LengthCount, Shard, ShardRecord, Table
from longrope2.runfolder import RunFolder, require_same

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_LENGTHS = (8192, 32768, 131072)
"""Where the summary divides lengths if `keep` does not."""
MOST_TOKENS_PER_BYTE, SPARE_TOKENS = 2, 64
"""More tokens for a byte of text than any language has: so many a document can be left out before it is tokenised."""
MOST_DAMAGE = 100
"""Problems that the record of a shard lists, and that a job shows at its end."""
RETRIES = 20
"""Of a shard whose process or node is lost, on Ray: more often, the shard itself is the likely cause."""
SAMPLES, SAMPLE_BYTES = 48, 500_000
"""Places of a source that a forecast reads, and the text it reads at each."""
POOLED = 3
"""Samples of a file that are pooled, if there are so many."""
LEAST_DOCUMENTS = 8
"""Documents of a sample, however long they are."""
BESIDE_SAMPLES = 1.15
"""What writing shards and a fuller memory add to the time that samples take (benchmarks/tokenising.py)."""

Report = Callable[[int, int], None]
"""Called with bytes read and tokens kept, both since the last call."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker needs besides a unit."""

    output: str
    tokenizer: "str | PreTrainedTokenizerBase"
    marks: int
    """Tokens around a document."""
    config: TokeniseConfig

    @property
    def ends(self) -> list[int]:
        """Where each range of lengths ends but the last, which is open."""
        return [kept.up_to for kept in self.config.keep] or list(SHOWN_LENGTHS)

    @property
    def most_tokens(self) -> int | None:
        """A document of more is left out."""
        return self.config.keep[-1].up_to if self.config.keep else None

    def share(self, length: int) -> float:
        """The share to keep of documents of this length, marks included."""
        if not self.config.keep:
            return 1.0
        return next((kept.share for kept in self.config.keep if length <= kept.up_to), 0.0)

    def lot(self, text: str) -> float:
        """A number from 0 to below 1 that the text and the seed decide: a document is kept if it is below its share."""
        return (xxhash.xxh3_64_intdigest(text.encode(), seed=self.config.seed) >> 11) / 2**53  # never 1 itself

    def is_hopeless(self, text: str) -> bool:
        """Whether a document is left out whatever its tokens are."""
        longest = MOST_TOKENS_PER_BYTE * len(text.encode()) + SPARE_TOKENS
        shares = [self.share(length) for length in (*(end for end in self.ends if end < longest), longest)]
        return self.lot(text) >= max(shares)

    def is_kept(self, text: str, tokens: int) -> bool:
        """Whether a document of so many tokens is kept."""
        return self.lot(text) < self.share(tokens + self.marks)


@dataclass
class _Counts:
    """What has become of the documents of a unit."""

    job: Job
    lengths: list[int]
    left_out: int
    damaged: list[str]
    skipped: int = 0

    def readable(self, found: Book | DataError) -> TypeGuard[Book]:
        """Whether this is a document; what cannot be read is counted, or refused."""
        if isinstance(found, Book):
            return True
        if self.job.config.damaged == "refuse":
            raise DataError(found.message, hint=f"{found.hint}, or use --damaged skip")
        self.skipped += 1
        if self.skipped <= MOST_DAMAGE:
            self.damaged.append(found.message)
        return False

    def add(self, books: Sequence[Book], encode: Encoder) -> tuple[list[Book], list[NDArray[np.int32]]]:
        """The documents among these that are kept, and their tokens."""
        hopeful = [book for book in books if not self.job.config.keep or not self.job.is_hopeless(book.text)]
        # One by one: other processes have the other cores. As arrays: a list takes ten times the memory of its tokens.
        encoded = [np.asarray(encode([book.text])[0], dtype=np.int32) for book in hopeful]
        kept = [
            (book, ids) for book, ids in zip(hopeful, encoded, strict=True) if self.job.is_kept(book.text, len(ids))
        ]
        self.left_out += len(books) - len(kept)
        self.lengths += [len(ids) for _, ids in kept]
        return [book for book, _ in kept], [ids for _, ids in kept]

    def by_length(self) -> tuple[LengthCount, ...]:
        """The documents kept, by range of length."""
        ends: list[int | None] = [*self.job.ends, None]
        tokens = np.array(self.lengths, dtype=np.int64)
        place = np.searchsorted(np.array(self.job.ends), tokens + self.job.marks, side="left")
        return tuple(
            LengthCount(up_to=end, documents=int((place == i).sum()), tokens=int(tokens[place == i].sum()))
            for i, end in enumerate(ends)
        )


def write_shard(unit: Unit, job: Job, report: Report = lambda *_: None) -> Shard:
    """Tokenise a unit into its shard, whole or absent; the record is written last."""
    counts = _Counts(job, [], 0, [])
    output, encode = Folder(job.output), _encoder(job.tokenizer, job.most_tokens)
    done = 0
    with output.writing(f"{unit.shard}.arrow") as path:
        with writing_tokens(path) as write:
            for read, books in _read(unit, job, counts):
                kept, tokens = counts.add(books, encode)
                if kept:
                    write(kept, tokens)
                report(read - done, sum(map(len, tokens)))
                done = read
        size, digest = path.stat().st_size, file_digest(path)
    with output.writing(f"{unit.shard}.npy") as path:
        with path.open("wb") as file:
            np.save(file, np.array(counts.lengths, dtype=np.uint32))
        lengths_digest = file_digest(path)
    shard = Shard(
        shard=unit.shard,
        source=unit.source,
        first=unit.portions[0].file.name,
        last=unit.portions[-1].file.name,
        input_bytes=unit.bytes,
        documents=len(counts.lengths),
        tokens=sum(counts.lengths),
        bytes=size,
        digest=digest,
        lengths_digest=lengths_digest,
        lengths=counts.by_length(),
        left_out=counts.left_out,
        skipped=counts.skipped,
        damaged=tuple(counts.damaged),
    )
    with output.writing(f"{unit.shard}.json") as path:
        ShardRecord(**vars(shard)).save(path)
    return shard


def _read(unit: Unit, job: Job, counts: _Counts) -> Iterator[tuple[int, list[Book]]]:
    """Bytes read so far and the next documents, a batch at a time; a batch may reach over several files."""
    place = [0]

    def documents() -> Iterator[Book]:
        before = 0
        for portion in unit.portions:
            reader = PortionReader(portion, job.config.text_column)
            for found in reader:
                place[0] = before + reader.consumed
                if counts.readable(found):
                    yield found
            before += portion.bytes
            place[0] = before

    for books in batched(documents()):
        yield place[0], books
    yield unit.bytes, []


@lru_cache(maxsize=1)
def _encoder(tokenizer: "str | PreTrainedTokenizerBase", most: int | None) -> Encoder:
    return encoder_of(tokenizer, most)


def tokenise_sources(model: str, sources: Sequence[str], output: str, config: TokeniseConfig) -> DatasetRecord:
    """Write a dataset, or what is missing of it."""
    tokenizer, job = _job(model, output, config)
    folder = Folder(output)
    # A source of the hub is read to the end at the commit at which it was begun.
    before = _record(folder)
    commits = {name: facts["commit"] for name, facts in before.sources.items() if "commit" in facts} if before else {}
    found = find_sources(sources, commits)
    run = RunFolder(folder.local, "data tokenise", "writing a dataset", (DATASET,))
    run.check()
    with run.alone():
        units = plan_units(found, round(config.shard_size * MEGABYTE))
        record = DatasetRecord(
            tokenizer=tokenizer,
            config={**identity(config), "keep": [asdict(kept) for kept in config.keep]},
            sources={source.name: source.identity() for source in found},
            versions=package_versions("numpy", "pyarrow", "tokenizers", "transformers"),
        )
        whole = _begun(folder, record, units, config)
        missing = [unit for unit in units if unit.shard not in whole]
        if whole and missing:
            say(f"{len(whole):,} of {len(units):,} shards are there; {len(missing):,} to make")
        if missing:
            whole |= {shard.shard: shard for shard in _make(missing, job)}
        record = replace(record, shards=tuple(whole[unit.shard] for unit in units))
        if not any(shard.tokens for shard in record.shards):
            raise DataError("no document was kept", hint="check --keep and the files")
        _save(folder, record)
    skipped = sum(shard.skipped for shard in record.shards)
    for problem in [problem for shard in record.shards for problem in shard.damaged][:MOST_DAMAGE]:
        warn(f"skipped: {problem}")
    if skipped:
        warn(f"{skipped:,} files or lines could not be read and were skipped")
    return record


def _job(model: str, output: str, config: TokeniseConfig) -> tuple[str, Job]:
    """The fingerprint of a model's tokenizer, and what workers need."""
    tokenizer = load_tokenizer(describe(model))
    marks = document_marks(tokenizer).size(0, ends=True)
    here = Folder(output).local
    # Absolute, for workers on Ray may have another working directory.
    place = output if here is None else str(here.absolute())
    return tokenizer_fingerprint(tokenizer), Job(
        output=place, tokenizer=encoder_state(tokenizer), marks=marks, config=config
    )


def _record(folder: Folder) -> DatasetRecord | None:
    """What a folder says of the dataset that was begun there."""
    if DATASET not in folder.sizes():
        return None
    with folder.reading(DATASET) as path:
        return DatasetRecord.load(path, hint="delete the folder, or name another")


def _begun(folder: Folder, record: DatasetRecord, units: Sequence[Unit], config: TokeniseConfig) -> dict[str, Shard]:
    """The shards that are whole; a dataset of other inputs or options is refused."""
    before = _record(folder)
    if before is None:
        _save(folder, record)
        return {}
    now = {name: getattr(record, name) for name in ("tokenizer", "config", "sources")}
    require_same(
        {name: getattr(before, name) for name in now},
        now,
        f"{folder.place}: begun with other sources or options",
        hint="use another folder, or the same options as before",
        error=DataError,
    )
    listed, sizes = {shard.shard: shard for shard in before.shards}, folder.sizes()

    def found(unit: Unit) -> Shard | None:
        shard = listed.get(unit.shard)
        with suppress(LongRopeError, FileNotFoundError):
            if shard is None:
                with folder.reading(f"{unit.shard}.json") as path:
                    shard = Shard(**vars(ShardRecord.load(path)))
            is_allowed = config.damaged == "skip" or not shard.skipped
            return shard if is_allowed and _is_whole(folder, shard, sizes) else None
        return None

    with ThreadPoolExecutor(READERS) as pool:
        return {shard.shard: shard for shard in pool.map(found, units) if shard is not None}


def _is_whole(folder: Folder, shard: Shard, sizes: Mapping[str, int]) -> bool:
    """Whether a shard is as it was written: by every byte if it is on this machine, by size if it is in a store."""
    arrow, lengths, record = (f"{shard.shard}{suffix}" for suffix in (".arrow", ".npy", ".json"))
    if sizes.get(arrow) != shard.bytes or lengths not in sizes or record not in sizes:
        return False
    here = folder.local
    digests = {arrow: shard.digest, lengths: shard.lengths_digest}
    return here is None or all(file_digest(here / name) == digest for name, digest in digests.items())


def _save(folder: Folder, record: DatasetRecord) -> None:
    with folder.writing(DATASET) as path:
        record.save(path)


class _Progress:
    """Megabytes read of those to read, with tokens and shards so far."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._total = max(round(sum(unit.bytes for unit in units) / MEGABYTE), 1)
        self._line = ProgressLine(self._total, "tokenising, MB")
        self._shards, self._units = 0, len(units)
        self._read = self._tokens = 0
        self._began = time.monotonic()

    def __call__(self, size: int, tokens: int) -> None:
        self._read, self._tokens = self._read + size, self._tokens + tokens
        # The last megabyte is only reached with the last shard.
        self._show(min(self._read / MEGABYTE, self._total - 1))

    def shard(self) -> None:
        self._shards += 1
        if self._shards == self._units:
            self._show(self._total)

    def _show(self, megabytes: float) -> None:
        rate = self._tokens / max(time.monotonic() - self._began, 1e-3)
        shards = f"{self._shards:,} of {self._units:,} shards"
        self._line.update(megabytes, f"{shards}, {self._tokens:,} tokens, {rate:,.0f} a second")


def _make(units: Sequence[Unit], job: Job) -> Iterator[Shard]:
    """The shards of some units in the order they are ready, with progress."""
    progress = _Progress(units)
    # Largest first: a large one begun last would keep one worker busy while the others have nothing left to do.
    largest_first = sorted(units, key=lambda unit: -unit.text_bytes)
    for shard in (_on_ray if job.config.engine == "ray" else _on_this_machine)(largest_first, job, progress):
        progress.shard()
        yield shard


def _on_this_machine(units: Sequence[Unit], job: Job, report: Report) -> Iterator[Shard]:
    workers = min(job.config.workers or os.cpu_count() or 1, len(units))
    if workers <= 1:
        yield from (write_shard(unit, job, report) for unit in units)
        return
    # Not forked: the tokenizer's threads, and connections to stores, do not survive that.
    context = multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory() as folder:
        # Megabytes, so through a file: what fills the pipe of a new process blocks this one for ever if that is killed.
        shared = Path(folder) / "tokenizer.json"
        if isinstance(job.tokenizer, str):
            shared.write_text(job.tokenizer, encoding="utf-8")
            job = replace(job, tokenizer="")
        pool = ProcessPoolExecutor(workers, context, initializer=_begin_work, initargs=(job, shared, reports))
        try:
            try:
                running = {pool.submit(_work, unit) for unit in units}
            except OSError as error:  # one worker died while the next was being started
                raise BrokenProcessPool from error
            while running:
                done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                while not reports.empty():
                    report(*reports.get())
                yield from (future.result() for future in done)
        except BrokenProcessPool as error:
            raise LongRopeError(
                "a worker process has died (killed, or out of memory)",
                hint="run the same command again, which makes the missing shards; --workers sets how many run at once",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()


_worker: dict[str, Any] = {}
"""The job of this worker process, and where it reports."""


def _begin_work(job: Job, shared: Path, reports: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which ends the others
    if not job.tokenizer:
        job = replace(job, tokenizer=shared.read_text(encoding="utf-8"))
    _worker.update(job=job, reports=reports)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when the main process has been killed: nobody else would end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _work(unit: Unit) -> Shard:
    reports = _worker["reports"]
    return write_shard(unit, _worker["job"], lambda size, tokens: reports.put((size, tokens)))


def _on_ray(units: Sequence[Unit], job: Job, report: Report) -> Iterator[Shard]:
    """Each unit is a task of Ray, which runs it again if its process or node is lost."""
    ray = require("ray", extra="cluster", purpose="--engine ray")
    is_ours = not ray.is_initialized()
    if is_ours:
        # The cluster of this machine or of RAY_ADDRESS; where there is none, Ray starts one here.
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(write_shard)
        shared = ray.put(job)
        waiting, running = list(reversed(units)), dict[Any, Unit]()
        while waiting or running:
            # Asked each time: nodes come and go.
            workers = job.config.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(running) < workers:
                unit = waiting.pop()
                running[task.remote(unit, shared)] = unit
            (ready,), _ = ray.wait(list(running), num_returns=1)
            unit = running.pop(ready)
            shard = _ray_result(ray, ready, unit)
            report(unit.bytes, shard.tokens)
            yield shard
    finally:
        if is_ours:
            ray.shutdown()


def _ray_result(ray: Any, ready: Any, unit: Unit) -> Shard:
    try:
        return ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, LongRopeError):
            raise error.cause from None
        if isinstance(error.cause, ray.exceptions.RaySystemError):  # it could not read its arguments
            raise LongRopeError(
                f"a node of the cluster cannot run this package ({first_line(error.cause)})",
                hint="install the same version of longrope2 on every node",
            ) from error
        raise
    except ray.exceptions.RayError as error:
        raise LongRopeError(
            f"shard {unit.shard}: its process has died {RETRIES + 1} times ({first_line(error)})",
            hint="check the memory of the nodes; the same command makes the missing shards",
        ) from error


@dataclass(frozen=True, kw_only=True)
class SourceSummary:
    """What a source has given, or will give by what a sample of it gave."""

    source: str
    files: int
    input_bytes: int
    documents: int
    tokens: int
    lengths: tuple[LengthCount, ...]
    left_out: int
    bytes: int
    """Of its shards."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a whole job will give and take, by what a sample of it did."""

    sources: tuple[SourceSummary, ...]
    tokens: int
    bytes: int
    workers: int
    hours: float


def forecast_dataset(model: str, sources: Sequence[str], config: TokeniseConfig) -> Forecast:
    """Tokenise samples of each source, and say what the whole will be; writes nothing."""
    _, job = _job(model, "", config)
    each, seconds = zip(*(_forecast(source, job) for source in find_sources(sources)), strict=True)
    workers = config.workers or os.cpu_count() or 1
    return Forecast(
        sources=each,
        tokens=sum(source.tokens for source in each),
        bytes=sum(source.bytes for source in each),
        workers=workers,
        hours=sum(seconds) / workers / 3600,
    )


def _forecast(source: InputSource, job: Job) -> tuple[SourceSummary, float]:
    """What a source will give, and the seconds it will take one worker."""
    total = sum(file.size for file in source.files)
    encode = _encoder(job.tokenizer, job.most_tokens)
    is_all = total <= SAMPLES * SAMPLE_BYTES
    found = SourceSummary(
        source=source.name, files=len(source.files), input_bytes=total, documents=0, tokens=0, left_out=0, bytes=0,
        lengths=_Counts(job, [], 0, []).by_length(),
    )  # fmt: skip
    seconds = 0.0
    for stands_for, portions in [(total, _portions(source, total))] if is_all else _samples(source, total):
        counts = _Counts(job, [], 0, [])
        read = strings = 0
        began = time.monotonic()
        for portion in portions:
            reader = PortionReader(portion, job.config.text_column)
            size = documents = 0
            for book in reader:
                if counts.readable(book):
                    kept, _ = counts.add([book], encode)
                    strings += sum(len(each.title) + len(each.source) + 12 for each in kept)
                    size, documents = size + len(book.text), documents + 1
                if size >= SAMPLE_BYTES and documents >= LEAST_DOCUMENTS and not is_all:
                    break
            read += reader.consumed
        scale = stands_for / max(read, 1)
        seconds += (time.monotonic() - began) * scale * BESIDE_SAMPLES
        found = replace(
            found,
            documents=found.documents + round(len(counts.lengths) * scale),
            tokens=found.tokens + round(sum(counts.lengths) * scale),
            lengths=tuple(
                replace(
                    before,
                    documents=before.documents + round(count.documents * scale),
                    tokens=before.tokens + round(count.tokens * scale),
                )
                for before, count in zip(found.lengths, counts.by_length(), strict=True)
            ),
            left_out=found.left_out + round(counts.left_out * scale),
            bytes=found.bytes + round((4 * sum(counts.lengths) + strings) * scale),
        )
    return found, seconds


def _portions(source: InputSource, size: int) -> list[Portion]:
    return [portion for unit in plan_units([source], max(size, 1)) for portion in unit.portions]


def _samples(source: InputSource, total: int) -> Iterator[tuple[float, list[Portion]]]:
    """Portions spread over a source, each time with the bytes that they stand for."""
    every = _portions(source, total // SAMPLES)
    texts = [portion for portion in every if portion.file.kind == "txt"]
    if texts:
        # Evenly over the files, not their bytes: each is a document, and long ones must not come more often.
        size = sum(portion.bytes for portion in texts)
        begins = (np.arange(SAMPLES) * len(texts) / SAMPLES).astype(int)
        chosen = {begin + place for begin in begins for place in range(max(SAMPLE_BYTES * len(texts) // size, 1))}
        yield size, [texts[place] for place in sorted(chosen) if place < len(texts)]
    others = [portion for portion in every if portion.file.kind != "txt"]
    if others:
        # Evenly over the bytes: a small file of short documents counts less than a large one of long documents.
        ends = np.cumsum([portion.bytes for portion in others])
        places = (np.arange(SAMPLES) + 0.5) / SAMPLES * ends[-1]
        places, times = np.unique(np.searchsorted(ends, places, side="right"), return_counts=True)
        files = Counter(others[place].file for place in places)

        def like(chosen: tuple[int, int]) -> object:
            """The same for samples that are pooled."""
            file = others[chosen[0]].file
            return file if files[file] >= POOLED else chosen

        # A sample that ends early holds short documents, and one of long documents goes on to their end: pooled, each
        # counts by what it read. Not those of several files, since a large one is chosen more often already.
        for _, same in groupby(zip(places.tolist(), times.tolist(), strict=True), like):
            pooled = list(same)
            yield sum(count for _, count in pooled) * ends[-1] / SAMPLES, [others[place] for place, _ in pooled]


def summary_tables(sources: Sequence[SourceSummary]) -> tuple[Table, Table]:
    """Documents, tokens and bytes by source, and tokens by length."""
    ends = [count.up_to for count in sources[0].lengths]
    lower = [0, *(end for end in ends if end is not None)]
    labels = [
        f"{low + 1:,}-{end:,}" if end is not None else f"over {low:,}" for low, end in zip(lower, ends, strict=True)
    ]
    by_source = Table(
        title="by source",
        columns=["source", "files", "input GB", "documents", "left out", "tokens", "shards GB"],
        rows=[
            [
                each.source,
                f"{each.files:,}",
                f"{each.input_bytes / 1e9:.3f}",
                f"{each.documents:,}",
                f"{each.left_out:,}",
                f"{each.tokens:,}",
                f"{each.bytes / 1e9:.3f}",
            ]
            for each in sources
        ],
    )
    by_length = Table(
        title="tokens by document length, BOS and EOS included",
        columns=["source", *labels],
        rows=[[each.source, *(f"{count.tokens:,}" for count in each.lengths)] for each in sources],
    )
    return by_source, by_length


def forecast_line(forecast: Forecast) -> str:
    """A forecast in a sentence."""
    return (
        f"about {forecast.tokens / 1e9:.3g}B tokens, {forecast.bytes / 1e9:.3g} GB of shards, "
        f"{roughly(forecast.hours * 3600)} with {forecast.workers} workers (nothing was written)"
    )


def summary(record: DatasetRecord) -> list[SourceSummary]:
    """What a dataset has, source by source."""
    found = []
    for name, facts in record.sources.items():
        shards = [shard for shard in record.shards if shard.source == name]
        found.append(
            SourceSummary(
                source=name,
                files=facts["files"],
                input_bytes=facts["bytes"],
                documents=sum(shard.documents for shard in shards),
                tokens=sum(shard.tokens for shard in shards),
                lengths=tuple(
                    LengthCount(
                        up_to=same[0].up_to,
                        documents=sum(count.documents for count in same),
                        tokens=sum(count.tokens for count in same),
                    )
                    for same in zip(*(shard.lengths for shard in shards), strict=True)
                ),
                left_out=sum(shard.left_out for shard in shards),
                bytes=sum(shard.bytes for shard in shards),
            )
        )
    return found
