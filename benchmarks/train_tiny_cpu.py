"""Training on a laptop: the tiny model, rows of 16 times its window, 60 steps of 8k tokens, on two threads.

The peer is what one writes first: transformers' own forward with longrope in the config, full logits, and a dense
mask for the documents of short rows; the same rows, fewer steps.
"""

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from common import arguments, report
from transformers import AutoModelForCausalLM

from longrope2 import train
from longrope2.data.corpus import open_corpus
from longrope2.data.plan import Plan, plan_documents
from longrope2.factors import RescaleFactors
from longrope2.generation.saved import FACTORS_FILE
from longrope2.models import describe, rescale_model
from longrope2.training.config import TrainConfig
from longrope2.training.log import LOG, read_steps
from longrope2.training.loop import PlanRows, make_optimizer
from longrope2.training.mixed import Batch
from longrope2.training.train import MODEL

LENGTH, ROWS, STEPS, PEER_STEPS, LEARNING_RATE = 4096, 2, 60, 6, 1e-4
LIMIT_SECONDS = 300
MIX = f"""
[plan]
target_length = {LENGTH}
rows = {ROWS * STEPS}

[[source]]
path = "books"
cut = [200, 200, 200, 1600, 200, 5000]
"""


def plain_loop(folder: Path, rows: PlanRows) -> float:
    """Tokens per second of a plain loop over the same rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = make_optimizer(model, TrainConfig(steps=PEER_STEPS, learning_rate=LEARNING_RATE).resolved())
    for step in range(1 + PEER_STEPS):
        if step == 1:  # the first one warms up
            started = time.perf_counter()
        batches = [rows(ROWS * step + number) for number in range(ROWS)]
        count = sum(int((batch.labels >= 0).sum()) for batch in batches)
        for batch in batches:
            logits = model(
                batch.tokens, position_ids=batch.positions, attention_mask=dense_mask(batch), use_cache=False
            ).logits
            (F.cross_entropy(logits[0].float(), batch.labels[0], reduction="sum") / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return PEER_STEPS * ROWS * LENGTH / (time.perf_counter() - started)


def dense_mask(batch: Batch) -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for start, stop in pairwise(batch.boundaries[0]):
        mask[start:stop, start:stop] = True
    return mask.tril()[None, None]


def make_plan(folder: Path) -> Plan:
    (folder / "mix.toml").write_text(MIX)
    return plan_documents("tiny", folder / "plan.jsonl", config=folder / "mix.toml", cache=folder / "cache")


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = make_plan(folder)
        rescale_model(describe("tiny"), "yarn", LENGTH).save(folder / FACTORS_FILE)
        started = time.perf_counter()
        train(
            "tiny",
            factors=folder / FACTORS_FILE,
            plan=folder / "plan.jsonl",
            output=folder / "run",
            cache=folder / "cache",
            batch_rows=ROWS,
            learning_rate=LEARNING_RATE,
        )
        seconds = time.perf_counter() - started
        log = read_steps(folder / "run" / LOG)
        trained = RescaleFactors.load(folder / "run" / MODEL / FACTORS_FILE)
        assert len(log) == STEPS
        assert trained.target_length == LENGTH
        corpora = [open_corpus(key, folder / "cache") for key in plan.corpus_keys]
        peer = plain_loop(folder / "run" / MODEL, PlanRows(plan, corpora, seed=0))
    report(
        options,
        name="train-tiny-cpu",
        value=sum(line.tokens for line in log) / sum(line.seconds for line in log),
        unit="tokens/s",
        peer="a plain transformers loop: full logits, dense masks for short rows",
        peer_value=peer,
        more_is_better=True,
        length=LENGTH,
        steps=STEPS,
        tokens_per_step=ROWS * LENGTH,
        seconds_with_set_up_and_saving=seconds,
        limit_seconds=LIMIT_SECONDS,
        first_loss=log[0].loss,
        last_loss=log[-1].loss,
    )


if __name__ == "__main__":
    main()
