"""Tokens a second of `data tokenise` with one and two workers, of `data plan`'s own tokeniser, and of datasets.map.

    python benchmarks/tokenising.py [--megabytes 64] [--model MODEL] [--repeats 3]

All in one run over the same .jsonl files, each in a process of its own, its start included. One worker and two take
turns: rates are those of the median time, the speed-up is the median over neighbours, since a shared machine changes
its speed from minute to minute. The others run once. datasets.map writes Arrow files, too. `forecast` is what
`--dry-run` says of the whole for one worker, as a share of what it was, the command's start included. Needs
`longrope2[eval,train]`, and cores that nobody else uses.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from common import arguments, report

from longrope2.books import read_books

FILES = 8
TODAY = """
import sys
from pathlib import Path
from longrope2.data.config import Source
from longrope2.data.corpus import tokenise
from longrope2.models import describe, load_tokenizer
source, model, cache = sys.argv[1:]
print(sum(tokenise(Source(path=str(path)), load_tokenizer(describe(model)), Path(cache)).num_tokens
          for path in sorted(Path(source).iterdir())))
"""
DATASETS = """
import sys
from datasets import load_dataset
from longrope2.models import describe, load_tokenizer
if __name__ == "__main__":
    source, model, cache = sys.argv[1:]
    tokenizer = load_tokenizer(describe(model))
    data = load_dataset("json", data_files=f"{source}/*.jsonl", split="train", cache_dir=cache)
    encode = lambda rows: {"tokens": tokenizer(rows["text"], add_special_tokens=False, verbose=False).input_ids}
    done = data.map(encode, batched=True, num_proc=2, remove_columns=data.column_names)
    print(sum(len(tokens) for tokens in done["tokens"]))
"""


def corpus(folder: Path, megabytes: int) -> None:
    """Pieces of books of every length up to 200,000 characters, over some files."""
    books = [book.text for book in read_books(held_out=False)]
    size = part = 0
    files = [(folder / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(FILES)]
    while size < megabytes * 1_000_000:
        book = books[part % len(books)]
        length = 1000 * 2 ** (part % 8)
        start = part * 7919 % max(len(book) - length, 1)
        files[part % FILES].write(json.dumps({"text": book[start : start + length]}) + "\n")
        size, part = size + length, part + 1
    for file in files:
        file.close()


def timed(*command: str) -> tuple[float, str]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began, done.stdout


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        source.mkdir()
        corpus(source, options.megabytes)
        every: dict[str, list[float]] = defaultdict(list)
        tokens = {}
        shared = ["data", "tokenise", str(source), "--model", options.model, "--json"]
        shared += ["--shard-size", str(options.megabytes / FILES)]
        for repeat in range(options.repeats):
            for workers in (1, 2):
                output, name = str(Path(place) / f"out{workers}-{repeat}"), f"{workers} workers"
                took, shown = timed("-m", "longrope2", *shared, "-o", output, "--workers", str(workers))
                every[name].append(took)
                shards = json.loads(shown)["shards"]
                tokens[name] = sum(shard["tokens"] for shard in shards)
                shutil.rmtree(output)
        for name, code in {"data plan": TODAY, "datasets.map(num_proc=2)": DATASETS}.items():
            script = Path(place) / "script.py"
            script.write_text(code)
            took, shown = timed(str(script), str(source), options.model, str(Path(place) / "cache"))
            every[name].append(took)
            tokens[name] = int(shown.split()[-1])
        dry = [*shared, "-o", output, "--workers", "1", "--dry-run"]
        forecast = json.loads(timed("-m", "longrope2", *dry)[1])
    assert len({tokens["1 workers"], tokens["2 workers"], tokens["data plan"]}) == 1, tokens
    seconds = {name: statistics.median(found) for name, found in every.items()}
    rates = {name: tokens[name] / seconds[name] for name in seconds}
    speed_ups = [one / two for one, two in zip(every["1 workers"], every["2 workers"], strict=True)]
    report(
        options,
        name="tokenising",
        value=rates["2 workers"],
        unit="tokens a second",
        peer="datasets.map(num_proc=2)",
        peer_value=rates["datasets.map(num_proc=2)"],
        more_is_better=True,
        tokens=tokens["2 workers"],
        megabytes=options.megabytes,
        model=options.model,
        rates=rates,
        seconds=every,
        speed_up_of_two_workers=statistics.median(speed_ups),
        speed_ups=speed_ups,
        forecast={
            "tokens": forecast["tokens"] / tokens["1 workers"],
            "bytes": forecast["bytes"] / sum(shard["bytes"] for shard in shards),
            "seconds": forecast["hours"] * 3600 / seconds["1 workers"],
        },
    )


if __name__ == "__main__":
    main()
