"""Every command that writes something, in a small form, and what its result is, without times."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from forks import Ended, Forks

from longrope2.books import read_books

OUT = "out"
SCALE = int(os.environ.get("FAULTS_SCALE", "1"))
"""How many times more trials than in the tests; see benchmarks/faults.py."""
LONG_SCALE = -(-SCALE // 2)
"""The same for trials that run a command several times."""
COMMANDS = {
    "factors": "factors tiny --target-length 512 --method yarn -o out/f.json",
    "search": "search tiny --target-length 512 --documents 1 --population 2 --parents 2 --iterations 2 --mutations 1 "
    "--crossovers 0 -o out",
    "calibrate": "calibrate tiny --factors f.json --lengths 128,384 --documents 5 -o out",
    "recall": "data recall tiny -o out/recall.jsonl --lengths 512 --documents 4 --needles 2 --books texts",
    "tokenise": "data tokenise texts lines.jsonl --model tiny --shard-size 0.01 --workers 1 -o out",
    "plan": "data plan tiny --config mix.toml -o out/plan.jsonl --cache out/cache",
    "train": "train tiny --factors f.json --plan plan.jsonl -o out --cache cache --steps 3 --batch-rows 1 "
    "--learning-rate 1e-5 --save-every 1",
    "evaluate": "evaluate tiny --factors f.json --suite niah --lengths 256 --samples 1 -o out",
    "export": "export tiny --factors f.json -o out/model",
    "gguf": "export tiny --factors f.json --format gguf -o out/model.gguf",
    "extend": "extend --config recipe.toml -o out --cache cache --stages search,data,train,evaluate,export,report",
}
VOLATILE = ("outputs", "started", "seconds", "tokens_per_second", "memory_gib", "resumed_evaluations", "sessions",
            "checksum", "sum", "training.json")  # checksums of times, the last one in a manifest  # fmt: skip
TEXTS = """
[[source]]
path = "texts"
cut = [200, 400]

[[bucket]]
up_to = 256
quota = 1

[[bucket]]
up_to = 512
quota = 1
"""
MIX = "[plan]\ntarget_length = 512\nrows = 6\nrepeat = true\n" + TEXTS
RECIPE = f"""
model = "tiny"
target_length = 512
methods = ["yarn"]

[search]
documents = 1
population = 2
parents = 2
iterations = 1
mutations = 1
crossovers = 0

[plan]
rows = 4
repeat = true

[train]
batch_rows = 2
learning_rate = 1e-5
save_every = 1

[[evaluate]]
suites = ["niah"]
lengths = [512]
samples = 1
{TEXTS}"""


@contextmanager
def prepared(folder: Path) -> Iterator[Forks]:
    """A folder with what the commands read, and the process to run them."""
    with Forks(folder) as forks:
        _prepare(forks)
        yield forks
    if kept := os.environ.get("FAULTS_COUNTS"):
        Path(kept, f"{folder.parent.name}-{folder.name}-{os.getpid()}.json").write_text(json.dumps(forks.counts))


def damage(path: Path, rng: random.Random) -> str:
    """Change a file as disks, transfers and hands do; says how."""
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    kind = rng.choice(["bit", "digit", "end", "zeros"])
    digits = [found.start() for found in re.finditer(rb"\d", content)] if kind == "digit" else []
    if digits:
        place = rng.choice(digits)
        content[place] = rng.choice([digit for digit in b"0123456789" if digit != content[place]])
    elif kind == "end":
        del content[place:]
    elif kind == "zeros":
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    else:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"{kind} at {place:,}"


def _prepare(forks: Forks) -> None:
    (forks.folder / "texts").mkdir()
    book = next(read_books(held_out=False)).text
    (forks.folder / "texts" / "book.txt").write_text(book[:60_000])
    lines = [json.dumps({"text": book[start : start + 3000]}) + "\n" for start in range(0, 60_000, 3000)]
    (forks.folder / "lines.jsonl").write_text("".join(lines))
    (forks.folder / "mix.toml").write_text(MIX)
    (forks.folder / "recipe.toml").write_text(RECIPE)
    for line in (
        COMMANDS["factors"].replace("out/", ""),
        "data plan tiny --config mix.toml -o plan.jsonl --cache cache",
    ):
        ended = forks.run(line.split())
        assert ended.code == 0, ended.errors


def undisturbed(forks: Forks, name: str) -> tuple[list[str], Ended, dict[str, str]]:
    """A command, how it ends when nothing happens to it, and its result."""
    command, out = COMMANDS[name].split(), forks.folder / OUT
    shutil.rmtree(out, ignore_errors=True)
    whole = forks.run(command)
    assert whole.code == 0, whole.errors
    return command, whole, result_of(out)


def result_of(folder: Path, *, without: Set[Path] = frozenset()) -> dict[str, str]:
    """A digest of each file; what says how long something took is left out, and what is made of it."""
    return {
        str(path.relative_to(folder)): sha256(_lasting(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_volatile(path) and path not in without
    }


def _is_volatile(path: Path) -> bool:
    is_of_times = path.name in ("time.csv", "time.png", "losses.csv", "index.html")
    # A kill may come when all is done but removing the empty mark of what was under way.
    is_mark = path.name.startswith("mark-")
    return is_of_times or is_mark or not {"tensorboard", "checkpoints"}.isdisjoint(path.parts)


def _lasting(path: Path) -> bytes:
    if path.suffix == ".json":
        return json.dumps(_timeless(json.loads(path.read_bytes()))).encode()
    if path.suffix == ".jsonl":
        return "\n".join(json.dumps(_timeless(json.loads(line))) for line in path.read_bytes().splitlines()).encode()
    return path.read_bytes()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_timeless(each) for each in value]
    return value
