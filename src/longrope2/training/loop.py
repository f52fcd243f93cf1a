"""The training loop: one step after another over the rows of a plan, exact to resume."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from longrope2.console import quiet, say
from longrope2.data.corpus import Corpus
from longrope2.data.loader import IGNORED_LABEL, Row, RowLoader, order_of_rows
from longrope2.data.plan import Plan
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import package_versions
from longrope2.interrupts import interrupts
from longrope2.records import CheckpointRecord, RowKind
from longrope2.training.checkpoint import FOLDER, Checkpoints
from longrope2.training.config import Level, LongRowMask, ResolvedConfig
from longrope2.training.host import RESERVED, host_share
from longrope2.training.mixed import Batch, MixedWindowModel, mixed_window
from longrope2.training.optimizer import CompactAdamW, clip, state_bytes
from longrope2.training.parallel import own_part, sequence_parallel, shard
from longrope2.training.positions import DrawnPositions
from longrope2.training.trainable import is_matrix

KINDS = ("short", "long")
NAMED_ROWS, NAMED_DOCUMENTS = 3, 4
"""How many an error names before it only counts them."""


class PlanRows:
    """Row by number: the plan's rows in a seeded order, then all again in another one.

    Nothing but the number decides which row it is, so that a run may resume on more or fewer processes.
    """

    def __init__(
        self,
        plan: Plan,
        corpora: Sequence[Corpus],
        *,
        seed: int,
        long_row_mask: LongRowMask = "full",
        draw: DrawnPositions | None = None,
    ) -> None:
        self._loader = RowLoader(plan, corpora)
        self._corpora = corpora
        # Two: a step may lie across the border of two epochs.
        self._order = lru_cache(maxsize=2)(partial(order_of_rows, plan.bucket_of_row, seed=seed))
        self._long_row_mask = long_row_mask
        self._draw = draw

    def __call__(self, number: int) -> Batch:
        """The row, as a batch of one."""
        row = self._loader.row(self._index(number))
        if row.kind == "long" and self._long_row_mask == "document":
            row = _documents_apart(row)
        if self._draw is not None:
            row = replace(row, position_ids=self._draw(number, row.cu_seqlens.tolist()))
        return Batch(
            tokens=torch.from_numpy(row.token_ids)[None],
            positions=torch.from_numpy(row.position_ids)[None],
            labels=torch.from_numpy(row.labels())[None],
            long_rows=torch.tensor([row.kind == "long"]),
            boundaries=[row.cu_seqlens.tolist()],
        )

    def prepare(self, numbers: range) -> None:
        """Have what these rows need brought here, in the background."""
        self._loader.prepare([self._index(number) for number in numbers])

    def kind(self, number: int) -> RowKind:
        """Short or long, whatever RoPE it is trained with."""
        return self._loader.plan.row(self._index(number)).kind

    def name(self, number: int) -> str:
        """Where a row comes from, in words."""
        index = self._index(number)
        planned = self._loader.plan.row(index)
        titles = dict.fromkeys(self._corpora[span.source].title(span.document) for span in planned.spans)
        shown = ", ".join(repr(title) for title in list(titles)[:NAMED_DOCUMENTS])
        more = f" and {len(titles) - NAMED_DOCUMENTS} more" if len(titles) > NAMED_DOCUMENTS else ""
        return f"row {number} of the run ({planned.kind}, row {index} of the plan, from {shown}{more})"

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self._loader))
        return int(self._order(epoch=epoch)[place])


def _documents_apart(row: Row) -> Row:
    """A long row as the released code trains it: positions and attention begin again at each document."""
    borders = sorted({*row.document_starts.tolist(), len(row.token_ids)})
    positions = np.concatenate([np.arange(stop - start) for start, stop in pairwise(borders)])
    return replace(row, position_ids=positions, cu_seqlens=np.array(borders, dtype=np.int32))


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    step: int
    loss: float
    """Mean over the step's labels, whatever rows they stood in."""
    loss_by_kind: dict[str, float]
    gradient_norm: float
    tokens: int
    attended: int
    """Pairs of query and key that attention looked at, in one layer without a window."""
    seconds: float
    broken_rows: tuple[int, ...] = ()
    """Numbers of the rows whose loss is not finite."""


def train_loop(
    model: Any,
    factors: RescaleFactors,
    rows: Callable[[int], Batch],
    config: ResolvedConfig,
    output: Path,
    here: World,
    *,
    device: torch.device | None = None,
    kind_of: Callable[[int], str] | None = None,
    name_row: Callable[[int], str] = "row {} of the run".format,
    prepare: Callable[[range], None] = quiet,
    started: Callable[[int], None] = quiet,
    within: Callable[[float], None] = quiet,
    report: Callable[[StepResult], None] = quiet,
    evaluate: Callable[[MixedWindowModel, int], None] = quiet,
) -> list[StepResult]:
    """Train `model` in place; `rows(i)` is the i-th row of the run, as a batch of one.

    Resumes from the newest checkpoint in `output`. Rows are a pure function of their number, so that resuming needs
    one integer and any number of processes sees the same data.

    It is trained on `device`, by default where it is; that the factors take effect must have been proved before. A row
    is of the kind its RoPE says, unless `kind_of` knows better; `name_row` names it in errors. `prepare` hears which
    rows the next step will ask for. `started` hears after how many steps the run goes on, and `within`, after each row,
    how many steps are done, with a part of the one under way. `evaluate` may use the model between steps, all
    processes at once; it is called before the first step and after each one, before that step's checkpoint. Ctrl-C
    lets the step under way end and saves a checkpoint.
    """
    device = device or next(model.parameters()).device
    train, versions = config.to_json()["train"], package_versions("torch", "transformers")
    results = []
    level = config.level
    recompute = (device.type == "cuda" or level.frugal) if config.recompute is None else config.recompute
    with (
        interrupts() as interrupt,
        mixed_window(
            model,
            factors,
            recompute=recompute,
            compiled=config.compiled,
            level=level,
            host_room=room_for_inputs(model, level, here),
            check=False,
        ) as mixed,
        sequence_parallel(here),
    ):
        shard(mixed, here, device.type)
        optimizer = make_optimizer(mixed, config)
        checkpoints = Checkpoints(output / FOLDER, keep=config.keep, here=here, in_background=not level.states_in_host)
        resumed = checkpoints.load_latest(mixed, optimizer)
        first = resumed.step if resumed else 0
        if resumed and here.is_main:
            say(f"resuming after step {first}")
        started(first)
        mixed.train()
        if first == 0:
            evaluate(mixed, 0)
        with interrupt.deferred():
            for step in range(first, config.steps):
                # Dropout, where a model has it, must not depend on where a run was interrupted.
                torch.manual_seed((config.seed * 1_000_003 + step) % 2**63)
                numbers = own_rows(config, step, here)
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate_at(step)
                batches = [own_part(rows(n), here).to(device) for n in numbers]
                prepare(own_rows(config, step + 1, here))
                kinds = [kind_of(n) for n in numbers] if kind_of else None
                result = train_step(mixed, optimizer, batches, config, step, here, kinds=kinds, within=within)
                if not math.isfinite(result.loss) or not math.isfinite(result.gradient_norm):
                    checkpoints.finish()
                    raise _not_finite(result, config, name_row)
                results.append(result)
                report(result)
                evaluate(mixed, step + 1)
                # All processes stop at the same step: a checkpoint needs every one of them.
                stopping = any(here.gather_all(interrupt.asked))
                if stopping or (step + 1) % config.save_every == 0 or step + 1 == config.steps:
                    record = CheckpointRecord(step=step + 1, config=train, versions=versions)
                    checkpoints.save(record, mixed, optimizer)
                if stopping:
                    checkpoints.finish()
                    raise KeyboardInterrupt
        checkpoints.finish()
        mixed.eval()
    return results


def room_for_inputs(model: nn.Module, level: Level, here: World) -> float:
    """Bytes of host memory that the layer inputs of this process may take."""
    states = state_bytes(model) / here.num_processes if level.states_in_host else 0
    return RESERVED * host_share(here.num_processes) - states


def train_step(
    mixed: MixedWindowModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    config: ResolvedConfig,
    step: int,
    here: World,
    *,
    kinds: Sequence[str] | None = None,
    within: Callable[[float], None] = quiet,
) -> StepResult:
    """One update from this process's rows; the loss is the mean over the labels of all processes."""
    started = time.perf_counter()
    kinds = [KINDS[bool(batch.long_rows[0])] for batch in batches] if kinds is None else kinds
    own = [(kind, int((batch.labels != IGNORED_LABEL).sum())) for kind, batch in zip(kinds, batches, strict=True)]
    # Processes of a group hold parts of the same rows, but each knows the borders of all.
    pairs = sum(_attended(ends) for batch in batches for ends in batch.boundaries) if here.member == 0 else 0
    everyone = here.gather_all((own, pairs))
    counts = _by_kind(entry for entries, _ in everyone for entry in entries)
    count = sum(counts.values())
    losses = []
    for done, batch in enumerate(batches, start=1):
        with mixed.rows_of(batch):
            loss = mixed(batch)
            # Sharded gradients are averaged over processes; their sum is wanted.
            (loss * here.num_processes / count).backward()
        losses.append(loss.detach())
        within(step + done / (len(batches) + 1))  # the update is the last part
    norm = clip(mixed.parameters(), optimizer, config.gradient_clip)
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    sums = [(kind, float(loss)) for kind, loss in zip(kinds, losses, strict=True)]
    numbered = zip(own_rows(config, step, here), losses, strict=False)
    broken = [number for number, loss in numbered if not math.isfinite(loss)]
    gathered = here.gather_all((sums, broken))
    all_sums = _by_kind(entry for entries, _ in gathered for entry in entries)
    return StepResult(
        step=step + 1,
        loss=sum(all_sums.values()) / count,
        loss_by_kind={kind: all_sums[kind] / n for kind, n in counts.items() if n},
        gradient_norm=norm,
        tokens=sum(batch.tokens.numel() for batch in batches) * here.num_processes,
        attended=sum(pairs for _, pairs in everyone),
        seconds=time.perf_counter() - started,
        broken_rows=tuple(sorted({number for _, numbers in gathered for number in numbers})),
    )


def own_rows(config: ResolvedConfig, step: int, here: World) -> range:
    """The numbers of the rows that this process's group takes in a step."""
    return range(step * config.batch_rows + here.rank, (step + 1) * config.batch_rows, here.size)


def make_optimizer(model: nn.Module, config: ResolvedConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if is_matrix(name, p)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained.items() if not is_matrix(name, p)], "weight_decay": 0.0},
    ]
    in_host = config.level.states_in_host
    if in_host or any(p.dtype == torch.bfloat16 for p in trained.values()):
        return CompactAdamW(groups, lr=config.learning_rate, betas=config.betas, in_host=in_host)
    fused = next(iter(trained.values())).is_cuda
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def _not_finite(result: StepResult, config: ResolvedConfig, name_row: Callable[[int], str]) -> LongRopeError:
    """Names the rows where it happened, as far as one can know."""
    broken = result.broken_rows
    if not broken:
        first = (result.step - 1) * config.batch_rows
        where = f"rows {first} to {first + config.batch_rows - 1} of the run, each of which has a finite loss"
    else:
        where = "; ".join(name_row(number) for number in broken[:NAMED_ROWS])
        if len(broken) > NAMED_ROWS:
            where += f"; and {len(broken) - NAMED_ROWS} more of {config.batch_rows} rows"
    return LongRopeError(
        f"the {'loss' if broken else 'gradient'} is no longer finite at step {result.step}: {where}",
        hint="the last checkpoint is good: lower the learning rate, or look at those documents",
    )


def _by_kind(entries: Iterable[tuple[str, float]]) -> dict[str, float]:
    """What all rows of each kind have together."""
    sums = dict.fromkeys(KINDS, 0.0)
    for kind, value in entries:
        sums[kind] += value
    return sums


def _attended(ends: Sequence[int]) -> int:
    return sum((stop - start) * (stop - start + 1) // 2 for start, stop in pairwise(ends))
