"""Planning time and peak memory over simulated datasets: the mix of the paper, at 1e8, 1e9 and 1e10 tokens.

    python benchmarks/planning.py [--tokens 1e8 1e9 1e10]

Each size runs in a process of its own. Lengths alone are simulated, which is all that a plan reads of a dataset: three
sources with the lengths of web pages, code and books, from which the plan draws two thirds. The peer is the time that
growth in proportion to the tokens would take from the smallest size.
"""

import json
import resource
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, report

from longrope2.data.config import Mix, PlanConfig, Source
from longrope2.data.corpus import Corpus
from longrope2.data.plan import make_plan
from longrope2.records import Marks

MARKS = Marks(bos=1, eos=2, pad=0)
WINDOW, TARGET = 8192, 131072
SOURCES = {"web": (6.6, 1.1), "code": (7.0, 1.3), "books": (11.0, 0.8)}
"""Mean and deviation of the logarithm of lengths."""


class Simulated(Corpus):
    """Documents that have lengths, and no tokens."""

    @cached_property
    def lengths(self) -> Any:
        mean, deviation = SOURCES[self.key]
        rng = np.random.default_rng(len(self.key))
        count = int(1.2 * self.num_tokens / np.exp(mean + deviation**2 / 2)) + 1000
        lengths = rng.lognormal(mean, deviation, count).astype(np.int64) + 1
        return lengths[: int(np.searchsorted(np.cumsum(lengths), self.num_tokens)) + 1]


def measure(tokens: int) -> dict[str, Any]:
    share = {"web": 0.35, "code": 0.1, "books": 0.55}
    corpora = [
        Simulated(key=name, path=Path(name), num_documents=0, num_tokens=int(1.5 * tokens * part))
        for name, part in share.items()
    ]
    for corpus in corpora:
        object.__setattr__(corpus, "num_documents", len(corpus.lengths))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    config = PlanConfig(target_length=TARGET, original_length=WINDOW, rows=tokens // TARGET)
    plan = make_plan(Mix(sources=tuple(Source(path=name) for name in share), plan=config), corpora, marks=MARKS)
    seconds = time.monotonic() - began
    plan.save(Path("/dev/shm" if Path("/dev/shm").is_dir() else ".") / "planning-benchmark.jsonl")
    saved = time.monotonic() - began - seconds
    (Path("/dev/shm" if Path("/dev/shm").is_dir() else ".") / "planning-benchmark.jsonl").unlink()
    return {
        "tokens": tokens,
        "documents": sum(corpus.num_documents for corpus in corpora),
        "rows": len(plan),
        "spans": len(plan.spans),
        "seconds": seconds,
        "seconds_to_save": saved,
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
        value=last["seconds"] + last["seconds_to_save"],
        unit=f"seconds for {last['tokens']:.0e} tokens",
        peer=f"linear growth from {first['tokens']:.0e} tokens",
        peer_value=(first["seconds"] + first["seconds_to_save"]) * last["tokens"] / first["tokens"],
        measured=found,
    )


if __name__ == "__main__":
    main()
