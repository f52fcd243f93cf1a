"""The smallest extension that goes through every stage, and how to start it as a process."""

import os
import subprocess
import sys
from pathlib import Path

from longrope2.books import read_books

RECIPE = """
model = "tiny"
target_length = 512
methods = ["yarn"]

[search]
documents = 1
population = 2
parents = 2
iterations = {iterations}
mutations = 1
crossovers = 0

[recall]
lengths = [512]
documents = 3
needles = 2
books = "{texts}"

[plan]
rows = 6
repeat = true

[[source]]
path = "texts"
cut = [200, 400]
buckets = ["short", "books"]

[[source]]
path = "recall"
buckets = ["recall"]

[[bucket]]
name = "short"
up_to = 256
quota = 1

[[bucket]]
name = "books"
up_to = 511
quota = 1

[[bucket]]
name = "recall"
up_to = 512
quota = 1

[train]
batch_rows = 2
learning_rate = {learning_rate}
save_every = 1
save_dtype = "float32"

[[evaluate]]
suites = ["niah"]
lengths = [512]
samples = 1
batch_tokens = 2048

[[evaluate]]
suites = ["perplexity"]
tasks = ["full"]
lengths = [256]
samples = 3
"""


def write_recipe(folder: Path, *, name: str = "small.toml", iterations: int = 1, learning_rate: float = 1e-5) -> Path:
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    if not (texts / "book.txt").exists():
        (texts / "book.txt").write_text(next(read_books(held_out=False)).text[:60_000])
    path = folder / name
    path.write_text(RECIPE.format(texts=texts, iterations=iterations, learning_rate=learning_rate))
    return path


def start(recipe: Path, output: Path, *options: str, processes: int = 1) -> subprocess.Popen:
    """`longrope2 extend` as a process of its own, or as several."""
    command = ["extend", "--config", recipe, "-o", output, "--cache", recipe.parent / "cache", *options]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "longrope2", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=recipe.parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
