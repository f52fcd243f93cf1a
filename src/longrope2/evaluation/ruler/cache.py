"""Samples of many tasks and lengths: made in parallel, kept on disk, made once."""

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.console import ProgressLine
from longrope2.errors import DataError, LongRopeError, counted
from longrope2.evaluation.ruler.generate import Request, RulerSample, check, make
from longrope2.evaluation.ruler.haystack import haystack_fingerprint
from longrope2.evaluation.ruler.tasks import TASKS
from longrope2.files import atomic_path, package_versions
from longrope2.records import parse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # of the samples on disk; raised when the same request gives others


def make_all(
    tasks: Sequence[str],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    lengths: Sequence[int],
    count: int,
    cache: Path,
    seed: int = 42,
    haystack: str | Path | None = None,
    qa_files: Mapping[str, Path] | None = None,
    english_words: Path | None = None,
    chat_template: bool = False,
    workers: int | None = None,
) -> dict[tuple[str, int], list[RulerSample]]:
    """The samples of every task at every length; those already in the folder `cache` are only read.

    `qa_files` gives the file of `qa_1` and of `qa_2`. `workers` processes share the work (None: one per core).
    """
    files = dict(qa_files or {})
    for task in tasks:
        for length in lengths:
            check(task, length=length, count=count, qa_file=files.get(task))
    common = Request.of(
        tokenizer, chat_template=chat_template, count=count, seed=seed, haystack=haystack, english_words=english_words
    )
    # The longest first, so that no process is left with one at the end.
    requests = [
        replace(common, task=task, length=length, qa_file=files.get(task))
        for length in sorted(lengths, reverse=True)
        for task in tasks
    ]
    essays = haystack_fingerprint(haystack) if any(TASKS[task].needs_essay for task in tasks) else ""
    paths = {(request.task, request.length): cache / _file_name(request, essays) for request in requests}
    missing = [(request, path) for request in requests if not (path := paths[request.task, request.length]).exists()]
    if missing:
        progress = ProgressLine(len(missing), "RULER samples")
        for done, request in enumerate(_written(missing, min(workers or os.cpu_count() or 1, len(missing))), start=1):
            progress.update(done, f"{request.task} at {request.length:,}")
    return {key: read_samples(path, count) for key, path in paths.items()}


def read_samples(path: Path, count: int) -> list[RulerSample]:
    """The samples of a file in the cache, as many as were made."""
    hint, samples = "delete the file; it will be made again", []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            samples.append(parse(RulerSample, line, f"{path}, line {number}", hint=hint))
    if len(samples) != count:
        raise DataError(f"{path}: {counted(len(samples), 'sample')}, {count} expected", hint=hint)
    return samples


def _written(missing: Sequence[tuple[Request, Path]], workers: int) -> Iterator[Request]:
    """The requests, each when its file is there."""
    if workers == 1:
        for request, path in missing:
            _write(request, path)
            yield request
        return
    pool = _pool(workers)
    try:
        jobs = {pool.submit(_write, request, path): request for request, path in missing}
        for job in as_completed(jobs):
            job.result()
            yield jobs[job]
    except BrokenProcessPool as error:
        raise LongRopeError(
            "a process that made RULER samples died", hint="memory may have run out: use fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    # Not forked: the caller may hold threads and a GPU.
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    """In each process of the pool: end without a word at Ctrl-C, and when the caller is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    caller = parent_process()
    assert caller is not None
    caller.join()  # otherwise they would wait for work for ever
    os._exit(1)


def _write(request: Request, path: Path) -> None:
    samples = make(request)
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")


def _file_name(request: Request, essays: str) -> str:
    """A name that only a request for the same samples has."""
    facts: dict[str, Any] = {
        "format": FORMAT,
        "request": [request.task, request.length, request.count, request.seed],
        "frame": asdict(request.frame),
        "tokenizer": request.counter.fingerprint,
        "versions": package_versions("wonderwords", "nltk"),
    }
    if TASKS[request.task].needs_essay:
        facts["haystack"] = essays
    if request.qa_file is not None:
        facts["questions"] = _file_hash(request.qa_file)
    if request.english_words is not None and request.task == "cwe":
        facts["words"] = _file_hash(request.english_words)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{request.task}-{request.length}x{request.count}-{digest[:16]}.jsonl"


def _file_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", hint="check the path") from error
