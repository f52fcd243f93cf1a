"""A training run that has been checked: model, factors, plan and options that belong together."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrope2.console import say, warn
from longrope2.data.corpus import Corpus, open_corpus, tokenizer_fingerprint
from longrope2.data.loader import RowLoader
from longrope2.data.plan import Plan
from longrope2.distributed import World
from longrope2.errors import DataError, LongRopeError, require
from longrope2.factors import RescaleFactors
from longrope2.files import package_versions
from longrope2.models import ModelInfo, check_factors, load_tokenizer, weights_fingerprint
from longrope2.needles import NeedleDocument
from longrope2.options import identity
from longrope2.training.config import ResolvedConfig, TrainConfig, cannot_start
from longrope2.training.retrieval import needle_documents
from longrope2.training.shape import Shape, shape_of, skeleton

LARGE_BYTES = 2 * 10**9


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that has been checked and may start."""

    info: ModelInfo
    factors: RescaleFactors
    plan: Plan
    corpora: Sequence[Corpus]
    tokenizer: Any
    shape: Shape
    needles: Sequence[NeedleDocument]
    config: ResolvedConfig
    identity: dict[str, Any]
    """What must be the same for a run to go on."""

    def settings(self) -> dict[str, Any]:
        """What is saved beside the checkpoints."""
        return {"identity": self.identity, "config": self.config.to_json(), "versions": versions()}


def prepare(
    info: ModelInfo,
    factors: RescaleFactors,
    plan: Plan,
    *,
    plan_fingerprint: str,
    cache: Path | None,
    here: World,
    config: TrainConfig,
) -> Job:
    """Refuse what cannot be trained before any weight is loaded."""
    config.check()
    check_factors(factors, info)
    config = config.resolved(len(plan), groups=here.size)
    bones = skeleton(info)
    tokenizer = load_tokenizer(info)
    problems = config.problems()
    problems += _misfits(plan, factors, tokenizer, bones.config.get_text_config())
    problems += _uneven(config, plan, bones.config.get_text_config(), here)
    width = bones.config.get_text_config().hidden_size
    if (config.lora or 0) > width:
        problems.append(f"lora must be a rank of at most {width:,}, the model's width, got {config.lora:,}")
    if problems:
        raise cannot_start(problems)
    if config.lora:
        require("peft", extra="train", purpose="LoRA")
    if config.window == "single":
        # What the model learns is what it must be run with, within the original window too.
        factors = factors.long_everywhere()
    elif here.is_main:
        _warn_of_other_short_side(info, factors)
    corpora = [open_corpus(key, cache) for key in plan.corpus_keys]
    if damage := here.gather_all(_damage(plan, corpora) if here.is_main else None)[0]:
        raise damage
    needles: list[NeedleDocument] = []
    if config.evaluate_every:
        needles = needle_documents(
            tokenizer,
            factors,
            count=config.evaluate_documents,
            books=config.books,
            seed=config.seed,
            note=say if here.is_main else lambda _: None,
        )
    return Job(
        info=info,
        factors=factors,
        plan=plan,
        corpora=corpora,
        tokenizer=tokenizer,
        shape=shape_of(bones, info, freeze=config.freeze, lora=config.lora),
        needles=needles,
        config=config,
        identity={
            "weights": weights_fingerprint(info),
            "factors": _digest({k: v for k, v in factors.to_json().items() if k != "provenance"}),
            "plan": plan_fingerprint,
            **identity(config),
        },
    )


def _misfits(plan: Plan, factors: RescaleFactors, tokenizer: Any, model_config: Any) -> list[str]:
    """Where plan, factors and model do not belong together."""
    found = [
        f"the plan's {name} is {getattr(plan.config, name):,}, that of the factors {getattr(factors, name):,}"
        for name in ("target_length", "original_length")
        if getattr(plan.config, name) != getattr(factors, name)
    ]
    if plan.tokenizer and plan.tokenizer != tokenizer_fingerprint(tokenizer):
        found.append("the plan was made with another tokenizer than the model's")
    # Tokens that were added to a tokenizer later, and that the model has not, never come out of a plain text.
    marks = (plan.marks.bos, plan.marks.eos, plan.marks.pad)
    most = max(tokenizer.vocab_size, *(mark + 1 for mark in marks if mark is not None))
    if most > model_config.vocab_size:
        found.append(f"the tokenizer uses {most:,} tokens, the model has {model_config.vocab_size:,}")
    return found


def _uneven(config: ResolvedConfig, plan: Plan, model_config: Any, here: World) -> list[str]:
    """What cannot be shared evenly by the processes."""
    found = []
    size, length, heads = config.sequence_parallel, plan.config.target_length, model_config.num_attention_heads
    if length % size:
        found.append(f"rows of {length:,} tokens cannot be shared evenly by {size} processes (sequence_parallel)")
    if heads % size:
        found.append(f"{heads} attention heads cannot be shared evenly by {size} processes (sequence_parallel)")
    if config.batch_rows % here.size:
        groups = "processes" if size == 1 else f"groups of {size} processes"
        found.append(f"{config.batch_rows} rows of a step (batch_rows) cannot be shared by {here.size} {groups}")
    return found


def _damage(plan: Plan, corpora: Sequence[Corpus]) -> LongRopeError | None:
    """What is wrong with the tokens of a plan: bytes that have changed, rows that cannot be built from them."""
    size = sum(corpus.path.stat().st_size for corpus in corpora)
    if size > LARGE_BYTES:
        say(f"checking {size / 1e9:.0f} GB of tokens, about a second for each")
    try:
        for corpus in corpora:
            if not corpus.is_whole():
                raise DataError(
                    f"{corpus.path}: damaged, its bytes are not those that were written",
                    hint="run `longrope2 data plan` again, which makes it anew",
                )
        RowLoader(plan, corpora).check()
    except LongRopeError as error:
        return error
    return None


def _warn_of_other_short_side(info: ModelInfo, factors: RescaleFactors) -> None:
    rescaled = info.reading.rescaled
    own = rescaled.factors if rescaled else (1.0,) * len(factors.short)
    if any(abs(a - b) > 1e-6 * b for a, b in zip(factors.short, own, strict=True)):
        warn(f"the short factors are not those {info.name} has now: short rows will not see its own RoPE")


def versions() -> dict[str, str]:
    """Of what computes."""
    return package_versions("torch", "transformers", "peft")


def _digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
