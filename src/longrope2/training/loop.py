"""The training loop: one step after another over the rows of a plan, exact to resume."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longrope2.console import say
from longrope2.data.loader import IGNORED_LABEL
from longrope2.distributed import World
from longrope2.errors import LongRopeError, below_minimum
from longrope2.factors import RescaleFactors
from longrope2.files import package_versions
from longrope2.training.checkpoint import Checkpoints
from longrope2.training.mixed import Batch, MixedWindowModel, mixed_window
from longrope2.training.parallel import own_part, sequence_parallel, shard

KINDS = ("short", "long")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How weights are updated; the defaults are the paper's, where it names them."""

    steps: int
    batch_rows: int = 64
    """Rows of one step, over all processes."""
    learning_rate: float = 2e-5
    """The peak; a cosine brings it down to zero."""
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """On matrices only."""
    gradient_clip: float = 1.0
    save_every: int = 100
    keep: int = 2
    """How many checkpoints stay on disk."""
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        found = below_minimum(self, steps=1, batch_rows=1, warmup_steps=0, save_every=1, keep=1)
        if not self.learning_rate > 0:
            found.append(f"learning_rate must be positive, got {self.learning_rate}")
        return found

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero at the last step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    step: int
    loss: float
    """Mean over the step's labels, whatever rows they stood in."""
    loss_by_kind: dict[str, float]
    gradient_norm: float
    tokens: int
    seconds: float


def train(
    model: Any,
    factors: RescaleFactors,
    rows: Callable[[int], Batch],
    config: TrainConfig,
    output: Path,
    here: World,
    *,
    report: Callable[[StepResult], None] = lambda _: None,
) -> list[StepResult]:
    """Train `model` in place; `rows(i)` is the i-th row of the run, as a batch of one.

    Goes on from the newest checkpoint in `output`. Rows are a pure function of their number, so that resuming needs
    one integer and any number of processes sees the same data.
    """
    device = next(model.parameters()).device
    record = {"config": asdict(config), "versions": package_versions("torch", "transformers")}
    results = []
    with mixed_window(model, factors) as mixed, sequence_parallel(here):
        shard(mixed, here)
        optimizer = make_optimizer(mixed, config)
        checkpoints = Checkpoints(output / "checkpoints", keep=config.keep, here=here)
        resumed = checkpoints.load_latest(mixed, optimizer)
        first = resumed["step"] if resumed else 0
        if resumed and here.is_main:
            say(f"resuming after step {first}")
        mixed.train()
        for step in range(first, config.steps):
            numbers = range(step * config.batch_rows + here.rank, (step + 1) * config.batch_rows, here.size)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate_at(step)
            batches = [own_part(rows(n), here).to(device) for n in numbers]
            result = train_step(mixed, optimizer, batches, config, step, here)
            if not math.isfinite(result.loss) or not math.isfinite(result.gradient_norm):
                checkpoints.finish()
                raise LongRopeError(
                    f"the loss is no longer finite at step {step + 1} (rows {numbers.start}–{numbers[-1]} of the run)",
                    hint="the last checkpoint is good: lower the learning rate, or look at those rows",
                )
            results.append(result)
            report(result)
            if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
                checkpoints.save(step + 1, mixed, optimizer, record)
        checkpoints.finish()
        mixed.eval()
    return results


def train_step(
    mixed: MixedWindowModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    config: TrainConfig,
    step: int,
    here: World,
) -> StepResult:
    """One update from this process's rows; the loss is the mean over the labels of all processes."""
    started = time.perf_counter()
    kinds = [KINDS[bool(batch.long_rows[0])] for batch in batches]
    sums, counts = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    for batch, kind in zip(batches, kinds, strict=True):
        counts[kind] += int((batch.labels != IGNORED_LABEL).sum())
    all_counts = _summed(here.gather_all(counts))
    count = sum(all_counts.values())
    for batch, kind in zip(batches, kinds, strict=True):
        with mixed.rows_of(batch):
            loss = mixed(batch)
            # Sharded gradients are averaged over processes; their sum is wanted.
            (loss * here.num_processes / count).backward()
        sums[kind] += float(loss.detach())
    norm = float(_full(nn.utils.clip_grad_norm_(mixed.parameters(), config.gradient_clip)))
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    all_sums = _summed(here.gather_all(sums))
    return StepResult(
        step=step + 1,
        loss=sum(all_sums.values()) / count,
        loss_by_kind={kind: all_sums[kind] / n for kind, n in all_counts.items() if n},
        gradient_norm=norm,
        tokens=sum(batch.tokens.numel() for batch in batches) * here.num_processes,
        seconds=time.perf_counter() - started,
    )


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = trained[0].is_cuda
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def _summed(by_process: Sequence[dict[str, float]]) -> dict[str, float]:
    """What each process has of every kind of row, together."""
    return {kind: sum(values[kind] for values in by_process) for kind in KINDS}


def _full(value: torch.Tensor) -> torch.Tensor:
    """A norm of sharded gradients is a sharded number."""
    return value.full_tensor() if isinstance(value, DTensor) else value
