"""`longrope2 train`: a model, factors and a plan become a folder with the trained model; exact to resume."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from longrope2.console import say
from longrope2.data.plan import read_plan
from longrope2.distributed import World, world
from longrope2.errors import LongRopeError, all_problems
from longrope2.factors import RescaleFactors
from longrope2.files import only_one, refuse_foreign, write_json
from longrope2.models import describe, load
from longrope2.training.checkpoint import FOLDER as CHECKPOINTS
from longrope2.training.checkpoint import step_name
from longrope2.training.config import train_config
from longrope2.training.interrupts import interrupts
from longrope2.training.job import Job, prepare
from longrope2.training.loop import train
from longrope2.training.product import product_problem, write_product
from longrope2.training.progress import LOG, Reporter
from longrope2.training.record import make_record, show_record
from longrope2.training.retrieval import Retrieval
from longrope2.training.rows import PlanRows
from longrope2.training.trainable import add_lora, freeze

PRODUCT = "model"
SETTINGS = "run.json"


def run_train(
    model: str,
    *,
    factors: RescaleFactors | str | Path,
    plan: Path,
    output: Path,
    original_length: int | None = None,
    cache: Path | None = None,
    wandb: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Check everything, then train, or go on where a run was interrupted, and write the model."""
    # DCP says so whenever a single process saves, though it was asked to.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    config = train_config(**options)
    config.check()
    with interrupts(), world(group_size=config.sequence_parallel) as here:
        job = prepare(
            describe(model, original_length=original_length),
            RescaleFactors.given(factors),
            read_plan(plan),
            plan_fingerprint="sha256:" + hashlib.sha256(plan.read_bytes()).hexdigest()[:16],
            cache=cache,
            here=here,
            config=config,
        )
        if not _is_finished(output, job, here):
            with only_one(output if here.is_main else None, "another process is training there"):
                if here.is_main:
                    write_json(output / SETTINGS, job.settings())
                train_job(job, output, here, wandb=wandb)
        if here.is_main:
            show_record(output / PRODUCT, as_json=as_json)


def train_job(job: Job, output: Path, here: World, *, wandb: str | None = None) -> None:
    """Train into a folder, or go on with what is in it, and write the end product."""
    reporter = _reporter(job, output, here, wandb) if here.is_main else None
    try:
        _train_and_write(job, output, here, reporter)
    except torch.OutOfMemoryError as error:
        count = here.num_processes
        raise LongRopeError(
            f"out of memory with rows of {job.plan.config.target_length:,} tokens on {count} "
            f"process{'es' if count > 1 else ''} ({str(error).strip().partition(chr(10))[0]})",
            hint="share rows with --sequence-parallel, use more GPUs, or train less with --lora or --freeze; "
            "--estimate says what is needed",
        ) from error
    finally:
        if reporter is not None:
            reporter.close()


def _train_and_write(job: Job, output: Path, here: World, reporter: Reporter | None) -> None:
    config = job.config
    rows = PlanRows(job.plan, job.corpora, seed=config.seed, long_row_mask=config.long_row_mask)
    hooks: dict[str, Any] = {}
    if reporter is not None:
        hooks = {"started": reporter.started, "report": reporter.step}
    if job.needles:
        note = reporter.needles if reporter is not None else _quiet
        hooks["evaluate"] = Retrieval(job.factors, job.needles, here, every=config.evaluate_every, note=note)
    model = load(job.info, dtype=torch.float32, device=here.device()).model
    if config.lora is not None:
        torch.manual_seed(config.seed)
        add_lora(model, config.lora)
    freeze(model, config.freeze)
    train(
        model,
        job.factors,
        rows,
        config,
        output,
        here,
        kind_of=rows.kind,
        name_row=rows.name,
        **hooks,
    )
    record = make_record(job, output, here) if here.is_main else {}
    dtype = getattr(torch, config.save_dtype)
    write_product(model, job.tokenizer, job.factors, output / PRODUCT, record, here, dtype=dtype)


def _reporter(job: Job, output: Path, here: World, wandb: str | None) -> Reporter:
    config, shape, length = job.config, job.shape, job.plan.config.target_length
    say(
        f"{config.steps:,} steps of {config.batch_rows} rows of {length:,} tokens, "
        f"{config.steps * config.batch_rows / len(job.plan):.2f} epochs of the plan; "
        f"{shape.trained:,} parameters learn, the model has {shape.parameters:,}"
    )
    return Reporter(
        output,
        config,
        shape,
        device=here.device(),
        num_devices=here.num_processes,
        wandb=wandb,
        settings=job.settings(),
    )


def _is_finished(output: Path, job: Job, here: World) -> bool:
    """Whether the folder holds the same run, finished; one with anything else is refused."""
    finished, refusal = here.gather_all(_look_at(output, job) if here.is_main else (False, None))[0]
    if refusal is not None:
        raise refusal
    if finished and here.is_main:
        say(f"{output}: this run is already finished")
    return bool(finished)


def _look_at(output: Path, job: Job) -> tuple[bool, LongRopeError | None]:
    """Whether a folder holds this run, finished; and why it is refused."""
    try:
        return _holds(output, job.identity) and _is_product_whole(output, job), None
    except LongRopeError as error:
        return False, error


def _holds(output: Path, identity: dict[str, Any]) -> bool:
    """Whether this run has begun in a folder."""
    if not output.exists():
        return False
    if not output.is_dir():
        raise LongRopeError(f"{output} is a file, a folder is needed", hint="name a folder, new or empty")
    try:
        before = json.loads((output / SETTINGS).read_text(encoding="utf-8"))["identity"]
        if not isinstance(before, dict):
            raise TypeError(f"identity is {before!r}")
    except FileNotFoundError:
        refuse_foreign(output, "train", SETTINGS)
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LongRopeError(
            f"{output / SETTINGS} cannot be read ({error})",
            hint="use another folder, or copy that file back; what is beside it was not touched",
        ) from error
    _check_kinds(output)
    now = json.loads(json.dumps(identity))  # tuples have become lists in the file, too
    differences = [
        f"{name}: {before.get(name)} there, {now.get(name)} asked for"
        for name in {**now, **before}
        if now.get(name) != before.get(name)
    ]
    if not differences:
        return True
    if not (output / PRODUCT).exists() and not list((output / CHECKPOINTS).glob("step-*")):
        say(f"{output}: a run with other options began there and saved nothing; this one takes its place")
        return False
    raise LongRopeError(
        all_problems(f"{output} holds another run", differences),
        hint="use the same options to go on with it, or another folder",
    )


def _check_kinds(output: Path) -> None:
    """Refuse a file where a folder is needed, and the other way round."""
    folders = [output / name for name in (PRODUCT, CHECKPOINTS) if (output / name).exists()]
    problems = [f"{path} is a file, a folder is needed" for path in folders if not path.is_dir()]
    if (output / LOG).is_dir():
        problems.append(f"{output / LOG} is a folder, a file is needed")
    if problems:
        raise LongRopeError(all_problems(str(output), problems), hint="move it away, and run the same command again")


def _is_product_whole(output: Path, job: Job) -> bool:
    """Whether the trained model is there as asked for; if not, the last checkpoint must be, to write it from."""
    product, steps = output / PRODUCT, job.config.steps
    if not product.exists():
        return False
    problem = product_problem(product, dtype=job.config.save_dtype)
    if problem is None:
        return True
    if not (output / CHECKPOINTS / step_name(steps)).is_dir():
        raise LongRopeError(
            f"{product} is not what was asked for ({problem}), and the checkpoint of step {steps}, from which it could "
            "be written again, is gone",
            hint="leave --save-dtype as it was (`longrope2 export --dtype` converts), or move the model away to train "
            "again",
        )
    say(f"{product}: {problem}; it is written again from the last checkpoint")
    return False


def _quiet(*_: Any) -> None:
    """Say nothing: only the main process talks."""
