"""Planning time and peak memory over simulated datasets: the mix of the paper, at 1e8, 1e9 and 1e10 tokens.

    python benchmarks/planning.py [--tokens 1e8 1e9 1e10]

Each size runs in a process of its own, over a dataset of one shard for each 5M tokens to plan (2,000 for 1e10). Its
records and lengths are on disk, which is all that a plan reads of a dataset; tokens it has none. The sources have the
lengths of web pages, code and books, and the plan draws two thirds of them. The peer is the time that growth in
proportion to the tokens would take from the smallest size, both in seconds of the processor: other work on the machine
changes the rest.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, report

from longrope2.data.config import Mix, PlanConfig, Source
from longrope2.data.dataset import DATASET, open_dataset
from longrope2.data.plan import make_plan
from longrope2.files import file_digest
from longrope2.records import DatasetRecord, LengthCount, Marks, Shard

MARKS = Marks(bos=1, eos=2, pad=0)
WINDOW, TARGET = 8192, 131072
SOURCES = {"web": (6.6, 1.1), "code": (7.0, 1.3), "books": (11.0, 0.8)}
"""Mean and deviation of the logarithm of lengths."""
SHARES = {"web": 0.35, "code": 0.1, "books": 0.55}
SHARD_TOKENS = 5_000_000


def lengths_of(source: str, tokens: int) -> Any:
    mean, deviation = SOURCES[source]
    rng = np.random.default_rng(len(source))
    count = int(1.2 * tokens / np.exp(mean + deviation**2 / 2)) + 1000
    lengths = rng.lognormal(mean, deviation, count).astype(np.uint32) + 1
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def write_dataset(folder: Path, tokens: int) -> int:
    """What `data tokenise` would have written, without the tokens; returns how many shards."""
    shards: list[Shard] = []
    for source, part in SHARES.items():
        lengths = lengths_of(source, int(1.5 * tokens * part))
        for some in np.array_split(lengths, max(round(tokens * part / SHARD_TOKENS), 1)):
            name = f"{len(shards):06}"
            np.save(folder / f"{name}.npy", some)
            count = LengthCount(up_to=None, documents=len(some), tokens=int(some.sum()))
            shard = Shard(
                shard=name, source=source, first="", last="", input_bytes=0, documents=count.documents,
                tokens=count.tokens, bytes=0, digest=name, lengths_digest=file_digest(folder / f"{name}.npy"),
                lengths=(count,), left_out=0, skipped=0, damaged=(),
            )  # fmt: skip
            shards.append(shard)
    record = DatasetRecord(
        tokenizer="", config={}, sources={name: {} for name in SHARES}, versions={}, shards=tuple(shards)
    )
    record.save(folder / DATASET)
    return len(shards)


def measure(tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        return measure_in(Path(place), tokens)


def measure_in(folder: Path, tokens: int) -> dict[str, Any]:
    shards = write_dataset(folder, tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, processor = time.monotonic(), time.process_time()
    corpora = [open_dataset(f"{folder}:{name}", folder) for name in SHARES]
    config = PlanConfig(target_length=TARGET, original_length=WINDOW, rows=tokens // TARGET)
    plan = make_plan(Mix(sources=tuple(Source(path=name) for name in SHARES), plan=config), corpora, marks=MARKS)
    seconds = time.monotonic() - began
    plan.save(folder / "plan.jsonl")
    saved = time.monotonic() - began - seconds
    return {
        "tokens": tokens,
        "shards": shards,
        "documents": sum(corpus.num_documents for corpus in corpora),
        "rows": len(plan),
        "spans": len(plan.spans),
        "seconds": seconds,
        "seconds_to_save": saved,
        "processor_seconds": time.process_time() - processor,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes_before": before * 1024,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e8, 1e9, 1e10])
    parser.add_argument("--one", type=float, help="measure this size in this process, and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(int(options.one))))
        return
    found = []
    for tokens in options.tokens:
        run = subprocess.run([sys.executable, __file__, "--one", str(tokens)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout))
        print(found[-1], flush=True)
    first, last = found[0], found[-1]
    report(
        options,
        name="planning",
        value=last["processor_seconds"],
        unit=f"processor seconds for {last['tokens']:.0e} tokens",
        peer=f"linear growth from {first['tokens']:.0e} tokens",
        peer_value=first["processor_seconds"] * last["tokens"] / first["tokens"],
        measured=found,
    )


if __name__ == "__main__":
    main()
