"""A small model folder, factors and a plan, shared by the tests of `longrope2 train`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from conftest import family_model
from longrope2 import train
from longrope2.data.plan import plan_documents
from longrope2.models import ASSETS, describe, rescale_model
from longrope2.needles import NOUNS
from longrope2.records import as_json
from longrope2.training.log import LOG, read_log

WINDOW, TARGET = 64, 128
WORDS = "the old man went down to the sea and saw a ship that came from far away".split()  # noqa: SIM905


def mix(window: int, target: int) -> str:
    return f"""
        [plan]
        target_length = {target}
        rows = 24

        [[source]]
        path = "notes.jsonl"

        [[source]]
        path = "stories.jsonl"

        [[bucket]]
        up_to = {window}
        quota = 1

        [[bucket]]
        up_to = {4 * target}
        quota = 1
        """


@dataclass(frozen=True)
class Sample:
    """Where everything is."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "base"

    def arguments(self, output: Path, **options):
        """What `train` takes."""
        paths = {"factors": self.folder / "factors.json", "plan": self.folder / "plan.jsonl", "output": output}
        return {**paths, "cache": self.folder / "cache", "batch_rows": 4, "steps": 4, "learning_rate": 1e-2,
                "save_every": 2, "save_dtype": "float32", **options}  # fmt: skip

    def run(self, output: Path, **options) -> Path:
        """Train in this process; returns the folder of the model."""
        return train(self.model, **self.arguments(output, **options))

    def command(self, output: Path, *, processes: int = 1, **options) -> list[str]:
        """The same as a command line."""
        words = []
        for name, value in self.arguments(output, **options).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return [*launcher, "-m", "longrope2", "train", str(self.model), *words]

    def start(self, output: Path, **options) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(self.command(output, **options), env=environment, stderr=subprocess.PIPE, text=True)


def make_sample(folder: Path, *, window: int = WINDOW, target: int = TARGET, family: str = "llama", **overrides):
    """A model with the tiny one's tokenizer, NTK factors, and a plan of short and long documents."""
    options = {"vocab_size": 4096, "max_position_embeddings": window, "initializer_range": 0.1, "bos_token_id": 0,
               "eos_token_id": 1, "pad_token_id": None, **overrides}  # fmt: skip
    model = family_model(family, **options)
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(ASSETS / "tiny").save_pretrained(folder / "base")
    rng = np.random.default_rng(0)
    for name, mean in (("notes", window // 4), ("stories", target)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(150):
                words = [NOUNS[number % len(NOUNS)], *rng.choice(WORDS, rng.integers(mean // 2, mean))]
                text = " ".join(words)
                file.write(json.dumps({"text": text}) + "\n")
    (folder / "mix.toml").write_text(mix(window, target))
    plan_documents(str(folder / "base"), folder / "plan.jsonl", config=folder / "mix.toml", cache=folder / "cache")
    rescale_model(describe(folder / "base"), "ntk", target).save(folder / "factors.json")
    return Sample(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a folder of safetensors."""
    from safetensors.torch import load_file

    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def log_without_times(output: Path) -> list[dict]:
    """What must be the same in two runs that are otherwise the same."""
    times = ("seconds", "tokens_per_second", "mfu", "memory_gib")
    return [{k: v for k, v in as_json(line).items() if k not in times} for line in read_log(output / LOG)]
