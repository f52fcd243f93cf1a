"""Tokens a second of the row loader over shards: on a local disk, and first and again over a server that speaks S3.

    python benchmarks/loading.py [--tokens 20e6] [--s3 s3://bucket/folder]

The peer is ten times what training SmolLM2 on an H200 takes, 100k tokens a second. `--s3` names an empty place of a
store (AWS_ENDPOINT_URL and credentials as usual); `moto_server` is one for this machine.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments, report
from tokenising import corpus

from longrope2.data.config import Source
from longrope2.data.loader import RowLoader, order_of_rows
from longrope2.data.plan import plan_documents

NEEDED = 10 * 100_000


def rate(plan: Path, cache: Path, tokens: int) -> float:
    """Rows as training takes them, until there were enough tokens."""
    from longrope2.data.plan import read_plan

    made = read_plan(plan)
    loader = RowLoader.open(made, cache)
    began, seen, epoch = time.monotonic(), 0, 0
    while seen < tokens:
        for index in order_of_rows(made.bucket_of_row, seed=0, epoch=epoch):
            seen += len(loader.row(int(index)).token_ids)
            if seen >= tokens:
                break
        epoch += 1
    return seen / (time.monotonic() - began)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=float, default=20e6)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--s3", help="an empty place of a store; without it, the local disk alone is measured")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as place:
        source, cache = Path(place) / "source", Path(place) / "cache"
        source.mkdir()
        corpus(source, options.megabytes)
        for name, output in {"local": str(Path(place) / "out"), "store": options.s3}.items():
            if output is None:
                continue
            command = ["-m", "longrope2", "data", "tokenise", str(source), "--model", "tiny", "-o", output]
            subprocess.run([sys.executable, *command, "--shard-size", "8"], check=True, stdout=subprocess.DEVNULL)
            plan = Path(place) / f"{name}.jsonl"
            plan_documents("tiny", plan, cache=cache, sources=(Source(path=output),), target_length=32768)
            found[name] = rate(plan, cache, int(options.tokens))
            found[f"{name}, again"] = rate(plan, cache, int(options.tokens))
    report(
        options,
        name="loading",
        value=min(found.values()),
        unit="tokens a second, the slowest",
        peer="ten times the need of SmolLM2 on an H200",
        peer_value=NEEDED,
        more_is_better=True,
        rates=found,
    )


if __name__ == "__main__":
    main()
