"""The options of training: what a user states, and what follows from the plan."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from longrope2.errors import LongRopeError, all_problems
from longrope2.options import Length, broken_limits, build, option, wrong_types

LongRowMask = Literal["full", "document"]
Also = Literal["norms", "embeddings"]
Positions = Literal["row", "pose", "random"]
MemoryLevel = Literal["plain", "host", "small", "least", "4bit"]
Memory = Literal["auto", MemoryLevel]
BATCH_ROWS = 64
LARGEST_WARMUP = 10


@dataclass(frozen=True, kw_only=True)
class Level:
    """What a run does to need less memory on its GPU."""

    compact: bool = False
    """Weights and gradients in bfloat16, moments in 8 bits; with LoRA the frozen weights in bfloat16."""
    states_in_host: bool = False
    """The optimizer's state waits in host memory."""
    frugal: bool = False
    """Layer inputs wait in host memory, and MLPs take long rows in pieces."""
    keeps_attention: bool = True
    """Where layers are computed again, attention is not."""
    four_bit: bool = False
    """For LoRA: the frozen weights of linear layers in 4 bits."""


LEVELS: Mapping[MemoryLevel, Level] = {
    "plain": Level(),
    "host": Level(states_in_host=True, frugal=True),
    "small": Level(compact=True, frugal=True),
    "least": Level(compact=True, states_in_host=True, frugal=True, keeps_attention=False),
    "4bit": Level(compact=True, states_in_host=True, frugal=True, keeps_attention=False, four_bit=True),
}
"""From the cheapest to what fits most."""


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How weights are updated; the defaults are the paper's, where it names them."""

    steps: int | None = option(None, "Default: one epoch of the plan.", metavar="N", least=1)
    batch_rows: int | None = option(
        None, "Rows per step.", usual=f"{BATCH_ROWS}, or all rows if fewer", metavar="N", least=1
    )
    learning_rate: float = option(2e-5, "Peak rate; a cosine brings it to zero.", above=0)
    warmup_steps: int | None = option(
        None, f"Default: a tenth of the steps, at most {LARGEST_WARMUP}.", metavar="N", least=0
    )
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW's.", command=False, least=0, below=1)
    weight_decay: float = option(0.1, "On matrices only.", least=0)
    gradient_clip: float = option(1.0, "Largest norm of the gradient.", above=0)
    save_every: int = option(100, "Steps between checkpoints.", metavar="N", least=1, elastic=True)
    keep: int = option(2, "Checkpoints that stay on disk.", least=1, elastic=True)
    seed: int = option(0, "Order of the rows; LoRA's first values.", least=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(UpdateConfig):
    """Everything that decides a run, besides model, factors and plan; elastic: what does not change what is learned.

    Steps, rows of a step and warm-up that are None follow from the plan: see `resolved`.
    """

    window: Literal["mixed", "single"] = option(
        "mixed", "single: short rows with the rescaled RoPE, too (the paper's ablation)."
    )
    long_row_mask: LongRowMask = option(
        "full", "document: keep the documents of long rows apart, as the released code does."
    )
    positions: Positions = option(
        "row",
        "Positions of each document: counted; pose: a skip into the target window; random: drawn from it, in order.",
    )
    lora: int | None = option(
        None, "Train low-rank additions, merged into the weights at the end.", metavar="RANK", least=1
    )
    also: tuple[Also, ...] = option(
        (), "What else learns with LoRA, comma-separated: norms, embeddings (as in LongLoRA)."
    )
    freeze: tuple[str, ...] = option(
        (), "Parameters to leave unchanged, e.g. '*mlp*'; may be repeated.", metavar="PATTERN", repeated=True
    )
    evaluate_every: int = option(0, "Steps between needle tests; 0: none.", metavar="N", least=0, elastic=True)
    evaluate_documents: int = option(6, "Needle documents for each length.", least=1, elastic=True)
    books: str | None = option(
        None, "Books around the needles; default: the package's.", metavar="SOURCE", elastic=True
    )
    sequence_parallel: int = option(1, "Processes that share each row.", least=1, elastic=True)
    memory: Memory = option(
        "auto",
        "plain: all on the GPU in float32 (frozen weights of LoRA in bfloat16); host: states and layer inputs in host "
        "memory; small: bfloat16 weights, "
        "8-bit moments; least: both; 4bit: and frozen weights of LoRA in 4 bits; auto: the first that fits.",
        elastic=True,
    )
    recompute: bool | None = option(None, "Compute layers twice to save memory; default: on GPUs.", elastic=True)
    compiled: bool = option(
        False, "Fuse operations: faster on a GPU after the first steps.", flag="--compile", elastic=True
    )
    save_dtype: Literal["bfloat16", "float16", "float32"] = option(
        "bfloat16", "Precision of the finished model.", elastic=True
    )

    def problems(self) -> list[str]:
        """Problems with this configuration, one message each."""
        if wrong := wrong_types(self):
            return wrong
        found = broken_limits(self)
        if self.steps is not None and self.warmup_steps is not None and 0 < self.steps < self.warmup_steps:
            found.append(f"warmup_steps must be at most steps ({self.steps}), got {self.warmup_steps}")
        if self.lora is not None and self.freeze:
            found.append("lora freezes the whole model already; omit freeze")
        if self.also and self.lora is None:
            found.append("also is for lora: without it everything learns that freeze does not name")
        if self.positions != "row" and self.window != "single":
            found.append(f"positions {self.positions} need window single: short rows would keep the original RoPE")
        if self.recompute is False and self.level.frugal:
            found.append(f"memory {self.memory} needs recompute: layers keep no more than their input")
        if self.lora is None and self.level.four_bit:
            found.append(f"memory {self.memory} is for lora: weights of 4 bits cannot learn")
        return found

    @property
    def level(self) -> Level:
        """What `memory` stands for; plain until something else was chosen."""
        return LEVELS["plain" if self.memory == "auto" else self.memory]

    def precision(self, level: Level, device: str = "cpu") -> str:
        """In what weights are held: a run keeps to it."""
        if level.four_bit:
            return "4 bits"
        # GPUs compute in bfloat16 at every level, so weights that never change need no more.
        frozen_on_gpu = self.lora is not None and device == "cuda"
        return "bfloat16" if level.compact or frozen_on_gpu else "float32"

    def check(self) -> None:
        """Refuse what cannot be trained with any plan."""
        if problems := self.problems():
            raise cannot_start(problems)

    def resolved(self, plan_rows: int | None = None, *, groups: int = 1) -> "ResolvedConfig":
        """With what follows from the plan: one epoch of it, in steps of 64 rows or of all there are.

        Each of `groups` groups of processes takes equally many rows.
        """
        if plan_rows == 0:
            raise LongRopeError("the plan has no rows", hint="`longrope2 data plan` makes one from your documents")
        batch_rows, steps, warmup_steps = self.batch_rows, self.steps, self.warmup_steps
        if batch_rows is None:
            most = BATCH_ROWS if plan_rows is None else min(BATCH_ROWS, plan_rows)
            batch_rows = max(most // groups, 1) * groups
        if steps is None:
            # Without a plan their number is not known yet, and no warm-up is too long for it.
            steps = max((warmup_steps or 1) if plan_rows is None else plan_rows // max(batch_rows, 1), 1)
        if warmup_steps is None:
            warmup_steps = min(LARGEST_WARMUP, max(steps // 10, 1))
        found = {"batch_rows": batch_rows, "steps": steps, "warmup_steps": warmup_steps}
        return ResolvedConfig(**{field.name: getattr(self, field.name) for field in fields(self)} | found)

    def to_json(self) -> dict[str, Any]:
        """As files have it: how weights are updated is a table of its own."""
        values = asdict(self)
        return {"train": {field.name: values.pop(field.name) for field in fields(UpdateConfig)}, **values}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """A configuration in which nothing is left to follow from the plan."""

    if TYPE_CHECKING:  # no fields of its own: narrower types
        steps: int
        batch_rows: int
        warmup_steps: int

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine that would be zero at the step after the last."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
    """What an estimate is made for, besides the run itself."""

    gpus: int = option(1, "Number of GPUs for --estimate.", least=1)
    gpu: Literal["h200", "h100", "a100"] = option("h200", "Kind of GPU for --estimate.")
    target_length: Length | None = option(None, "Length of the rows for --estimate without a plan.")


def train_config(**options: Any) -> TrainConfig:
    """A configuration from options, as command line, recipes and Python give them."""
    return build(TrainConfig, "training options", options)


def cannot_start(problems: list[str]) -> LongRopeError:
    """What to raise for a run that must not start."""
    return LongRopeError(all_problems("this run cannot start", problems), hint="`longrope2 train --help`")
