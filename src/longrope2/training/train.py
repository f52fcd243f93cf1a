"""The stage `train`: a model, factors and a plan become a folder with the trained model; exact to resume.

In this order: check everything that can be checked without weights (`prepare`), see what the folder holds, train
(`loop.py`), and write the model with a record of the run.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from longrope2.console import quiet, say, warn
from longrope2.data.corpus import Corpus, tokenizer_fingerprint
from longrope2.data.dataset import reopen
from longrope2.data.loader import RowLoader
from longrope2.data.plan import Plan, read_plan
from longrope2.distributed import World
from longrope2.errors import DataError, LongRopeError, ModelError, all_problems, counted, require
from longrope2.factors import RescaleFactors
from longrope2.files import atomic_folder, fingerprint, package_versions
from longrope2.generation.saved import FACTORS_FILE, warn_of_single_attention_factor, write_factors
from longrope2.interrupts import interrupts
from longrope2.models import (
    ModelInfo,
    check_factors,
    check_manifest,
    describe,
    load,
    load_tokenizer,
    skeleton,
    weights_fingerprint,
    write_manifest,
)
from longrope2.needles import NeedleDocument
from longrope2.options import identity
from longrope2.records import NeedleLine, RecordError, StepLine, TrainingRecord, TrainingSettings, parse
from longrope2.rope import STANDSTILL
from longrope2.rotary import rescaled
from longrope2.runfolder import RunFolder, differences, require_same
from longrope2.tracking import Tracking
from longrope2.training.checkpoint import FOLDER as CHECKPOINTS
from longrope2.training.checkpoint import step_name
from longrope2.training.config import LEVELS, MemoryLevel, ResolvedConfig, TrainConfig, cannot_start
from longrope2.training.estimate import (
    GIB,
    ModelShape,
    host_memory_of,
    known_gpu,
    memory_of,
    possible_levels,
    shape_of,
)
from longrope2.training.four_bit import freeze_in_four_bits
from longrope2.training.host import RESERVED, host_share
from longrope2.training.log import LOG, RECORD, StepReporter, read_log
from longrope2.training.loop import PlanRows, train_loop
from longrope2.training.positions import DrawnPositions
from longrope2.training.retrieval import Retrieval, needle_documents
from longrope2.training.trainable import add_lora, freeze, merged

MODEL = "model"
SETTINGS = "run.json"
PRECISION = "precision"
"""Of the weights, in the settings of a run where it is not float32."""
_folder = partial(RunFolder, command="train", verb="training", marks=(SETTINGS,))
INDEX = "model.safetensors.index.json"
SHARD_SIZE = "5GB"
LARGE_BYTES = 2 * 10**9


def train(
    model: str,
    config: TrainConfig,
    output: Path,
    here: World,
    *,
    factors: RescaleFactors | str | Path,
    plan: Plan | Path,
    original_length: int | None = None,
    cache: Path | None = None,
    wandb: str | None = None,
) -> TrainingRecord:
    """Train into a folder, or go on where a run was interrupted.

    The trained model is then in `output`/model, with the record that is returned.
    """
    # DCP says so whenever a single process saves, though it was asked to.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    config.check()
    here = here.groups_of(config.sequence_parallel)
    with interrupts():
        run = prepare(
            describe(model, original_length=original_length),
            RescaleFactors.given(factors),
            plan if isinstance(plan, Plan) else read_plan(plan),
            config,
            cache=cache,
            here=here,
            precision=here.gather_all(_precision_of(output) if here.is_main else None)[0],
        )
        record, refusal = here.gather_all(_look_at(output, run) if here.is_main else None)[0]
        if refusal is not None:
            raise refusal
        if record is None:
            with _folder(output if here.is_main else None).alone():
                if here.is_main:
                    run.settings().save(output / SETTINGS)
                record = _train_and_write(run, output, here, wandb)
        elif here.is_main:
            say(f"{output}: this run is already finished")
        return record


# Checks


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run that has been checked and may start."""

    info: ModelInfo
    factors: RescaleFactors
    plan: Plan
    corpora: Sequence[Corpus]
    tokenizer: Any
    shape: ModelShape
    needles: Sequence[NeedleDocument]
    config: ResolvedConfig
    identity: dict[str, Any]
    """What must be the same for a run to go on."""

    def settings(self) -> TrainingSettings:
        """What is saved beside the checkpoints."""
        return TrainingSettings(identity=self.identity, config=self.config.to_json(), versions=_versions())


def prepare(
    info: ModelInfo,
    factors: RescaleFactors,
    plan: Plan,
    stated: TrainConfig,
    *,
    cache: Path | None,
    here: World,
    precision: str | None = None,
) -> TrainingRun:
    """Refuse what cannot be trained before any weight is loaded; a run that has begun keeps its precision."""
    check_factors(factors, info)
    config = stated.resolved(len(plan), groups=here.size)
    empty_model, tokenizer = skeleton(info), load_tokenizer(info)
    model_config = empty_model.config.get_text_config()
    problems = config.problems()
    problems += _misfits(plan, factors, tokenizer, model_config)
    problems += _wrong_rows(plan, factors, config)
    problems += _uneven(config, plan, model_config, here)
    problems += rank_problems(config, model_config)
    if problems:
        raise cannot_start(problems)
    if config.lora:
        require("peft", extra="train", purpose="LoRA")
    if config.window == "single":
        # What the model learns is what it must be run with, within the original window too.
        factors = factors.long_everywhere()
    elif here.is_main:
        _warn_of_other_short_side(info, factors)
    corpora = [reopen(key, cache) for key in plan.corpus_keys]
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
            note=say if here.is_main else quiet,
        )
    shape = shape_of(empty_model, info, freeze=config.freeze, lora=config.lora, also=config.also)
    config = replace(config, memory=_chosen_memory(config, shape, plan.config.target_length, precision, here))
    return TrainingRun(
        info=info,
        factors=factors,
        plan=plan,
        corpora=corpora,
        tokenizer=tokenizer,
        shape=shape,
        needles=needles,
        config=config,
        identity={
            "weights": weights_fingerprint(info),
            "factors": fingerprint({k: v for k, v in factors.to_json().items() if k != "provenance"}),
            "plan": plan.fingerprint,
            **identity(config),
            **precision_option(config, here.device().type),
        },
    )


def precision_option(config: TrainConfig, device: str = "cpu") -> dict[str, str]:
    """The precision of the weights where it is not float32, as runs that must not be mixed state it."""
    precision = config.precision(config.level, device)
    return {} if precision == "float32" else {PRECISION: precision}


def _chosen_memory(
    config: ResolvedConfig, shape: ModelShape, length: int, precision: str | None, here: World
) -> MemoryLevel:
    """The cheapest level that fits every GPU at hand, of those that go on with the precision of a run."""
    levels, device = possible_levels(config), here.device()
    if config.memory == "auto" and precision is not None:
        levels = [name for name in levels if config.precision(LEVELS[name], device.type) == precision] or levels
    if device.type == "cpu" or len(levels) == 1:
        return levels[0]
    here_is = torch.cuda.get_device_properties(device).total_memory, host_share(here.num_processes)
    found = here.gather_all(here_is)
    gpu, host = (RESERVED * min(sizes) for sizes in zip(*found, strict=True))
    for name in levels:
        level, tokens = LEVELS[name], length // config.sequence_parallel
        held = memory_of(
            shape,
            tokens,
            here.num_processes,
            level,
            recompute=config.recompute is not False,
            compiled=config.compiled,
            accumulates=config.batch_rows > here.size,
            host=host,
        )
        needed = sum(held.values())
        beside = sum(host_memory_of(shape, tokens, here.num_processes, level, host=host).values())
        if needed <= gpu and beside <= host:
            break
    if here.is_main:
        verdict = "" if needed <= gpu else "; nothing fits by the estimate, and this needs least"
        say(
            f"--memory {name}: about {needed / GIB:.0f} of {gpu / GIB:.0f} GiB on each GPU"
            f"{f', {beside / GIB:.0f} GiB of host memory for each' if beside else ''}{verdict}"
        )
    return name


def _misfits(plan: Plan, factors: RescaleFactors, tokenizer: Any, model_config: Any) -> list[str]:
    """Where plan, factors and model do not belong together."""
    found = []
    if (window := plan.config.original_length) != factors.original_length:
        found.append(f"the plan's original_length is {window:,}, that of the factors {factors.original_length:,}")
    if plan.tokenizer and plan.tokenizer != tokenizer_fingerprint(tokenizer):
        found.append("the plan was made with another tokenizer than the model's")
    # Tokens that were added to a tokenizer later, and that the model has not, never come out of a plain text.
    marks = (plan.marks.bos, plan.marks.eos, plan.marks.pad)
    most = max(tokenizer.vocab_size, *(mark + 1 for mark in marks if mark is not None))
    if most > model_config.vocab_size:
        found.append(f"the tokenizer uses {most:,} tokens, the model has {model_config.vocab_size:,}")
    return found


def _wrong_rows(plan: Plan, factors: RescaleFactors, config: ResolvedConfig) -> list[str]:
    """Rows of another length than the window to reach, where that is not what was wanted."""
    length, target = plan.config.target_length, factors.target_length
    drawn, one_rope = config.positions != "row", config.window == "single" or not factors.switches
    if length > target or (length < target and not drawn and min(factors.long) < STANDSTILL):
        return [
            f"the plan's target_length is {length:,}, that of the factors {target:,} "
            "(shorter rows are for --positions pose or random, and for factors of drope)"
        ]
    if length < target and not one_rope:
        return ["rows as short as these keep the original RoPE, and none learns the other one; use --window single"]
    return []


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


def rank_problems(config: TrainConfig, model_config: Any) -> list[str]:
    """Whether low-rank additions would be larger than the model they are added to."""
    width = model_config.hidden_size
    if (config.lora or 0) <= width:
        return []
    return [f"lora must be a rank of at most {width:,}, the model's width, got {config.lora:,}"]


def _damage(plan: Plan, corpora: Sequence[Corpus]) -> LongRopeError | None:
    """What is wrong with the tokens of a plan: bytes that have changed, rows that cannot be built from them."""
    size = sum(corpus.num_bytes for corpus in corpora)
    if size > LARGE_BYTES:
        say(f"checking {size / 1e9:.0f} GB of tokens, about a second for each")
    try:
        for corpus in corpora:
            if not corpus.is_whole():
                raise DataError(
                    f"{corpus.path}: damaged, its bytes are not those that were written",
                    hint=corpus.remedy,
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


def _versions() -> dict[str, str]:
    return package_versions("torch", "transformers", "peft")


# The folder


def _look_at(output: Path, run: TrainingRun) -> tuple[TrainingRecord | None, LongRopeError | None]:
    """The record of this run where a folder holds it, finished; and why the folder is refused."""
    try:
        return (_finished(output, run) if _holds(output, run.identity) else None), None
    except LongRopeError as error:
        return None, error


def _holds(output: Path, wanted: dict[str, Any]) -> bool:
    """Whether this run has begun in a folder; one with anything else is refused."""
    _folder(output).refuse_foreign()
    try:
        hint = "use another folder, or copy that file back; what is beside it was not touched"
        before = TrainingSettings.load(output / SETTINGS, hint=hint).identity
    except FileNotFoundError:
        return False
    _check_kinds(output)
    if not _has_saved(output) and differences(before, wanted):
        say(f"{output}: a run with other options began there and saved nothing; this one takes its place")
        return False
    hint = "use the same options to go on with it, or another folder"
    require_same(before, wanted, f"{output} holds another run", hint=hint)
    return True


def _has_saved(output: Path) -> bool:
    return (output / MODEL).exists() or any((output / CHECKPOINTS).glob("step-*"))


def _precision_of(output: Path) -> str | None:
    """The precision of the weights of a run that has saved something; None where there is none."""
    try:
        return (
            TrainingSettings.load(output / SETTINGS).identity.get(PRECISION, "float32") if _has_saved(output) else None
        )
    except (OSError, RecordError):
        return None  # refused later, with a reason


def _check_kinds(output: Path) -> None:
    """Refuse a file where a folder is needed, and the other way round."""
    folders = [output / name for name in (MODEL, CHECKPOINTS) if (output / name).exists()]
    problems = [f"{path} is a file, a folder is needed" for path in folders if not path.is_dir()]
    if (output / LOG).is_dir():
        problems.append(f"{output / LOG} is a folder, a file is needed")
    if problems:
        raise LongRopeError(all_problems(str(output), problems), hint="move it away, and run the same command again")


def _finished(output: Path, run: TrainingRun) -> TrainingRecord | None:
    """The record of a trained model that is there as asked for; if not, the last checkpoint must be."""
    folder, steps = output / MODEL, run.config.steps
    if not folder.exists():
        return None
    try:
        return read_record(folder, dtype=run.config.save_dtype)
    except (ModelError, RecordError) as error:
        problem = error.message
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        problem = str(error)
    if not (output / CHECKPOINTS / step_name(steps)).is_dir():
        raise LongRopeError(
            f"{folder} is not what was asked for ({problem}), and the checkpoint of step {steps}, from which it could "
            "be written again, is gone",
            hint="leave --save-dtype as it was (`longrope2 export --dtype` converts), or move the model away to train "
            "again",
        )
    say(f"{folder}: {problem}; it is written again from the last checkpoint")
    return None


def read_record(folder: Path, *, dtype: str) -> TrainingRecord:
    """The record in the folder of a trained model; refuses one that is not whole, or has weights of another type."""
    check_manifest(folder)
    for name in (FACTORS_FILE, "config.json", "tokenizer_config.json"):
        parse(dict[str, Any], (folder / name).read_bytes(), name)
    record = TrainingRecord.load(folder / RECORD)
    index, files = folder / INDEX, ["model.safetensors"]
    if index.exists():
        files = parse(dict[str, Any], index.read_bytes(), INDEX)["weight_map"].values()
    for name in set(files):
        with safe_open(folder / name, framework="pt"):  # refuses one whose size is not what its header says
            pass
    if (saved := record.config["save_dtype"]) != dtype:
        raise ValueError(f"its weights are {saved}, {dtype} is asked for")
    return record


# Training


def _train_and_write(run: TrainingRun, output: Path, here: World, wandb: str | None) -> TrainingRecord:
    """Train into a folder, or go on with what is in it, and write the model."""
    reporter = _reporter(run, output, here, wandb) if here.is_main else None
    try:
        model = _trained(run, output, here, reporter)
        record: TrainingRecord = here.gather_all(_record(run, output, here) if here.is_main else None)[0]
        write_model(model, run, output / MODEL, record, here)
        return record
    except torch.OutOfMemoryError as error:
        count = here.num_processes
        raise LongRopeError(
            f"out of memory with rows of {run.plan.config.target_length:,} tokens on {count} "
            f"process{'es' if count > 1 else ''} ({str(error).strip().partition(chr(10))[0]})",
            hint="try --memory least, share rows with --sequence-parallel, use more GPUs, or train less with --lora or "
            "--freeze; --estimate says what is needed",
        ) from error
    finally:
        if reporter is not None:
            reporter.close()


def _reporter(run: TrainingRun, output: Path, here: World, wandb: str | None) -> StepReporter:
    config, shape, device = run.config, run.shape, here.device()
    say(
        f"{counted(config.steps, 'step')} of {counted(config.batch_rows, 'row')} of "
        f"{run.plan.config.target_length:,} tokens, "
        f"{config.steps * config.batch_rows / len(run.plan):.2f} epochs of the plan; "
        f"{shape.trained:,} parameters learn, the model has {shape.parameters:,}"
    )
    gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return StepReporter(
        output,
        config,
        device=device,
        step_flops=shape.step_flops,
        peak_flops=gpu.peak * 1e12 * here.num_processes if gpu else None,
        tracking=Tracking(output, wandb=wandb, settings=run.settings().to_json()),
    )


def _trained(run: TrainingRun, output: Path, here: World, reporter: StepReporter | None) -> Any:
    """The model after the last step."""
    config = run.config
    draw = None
    if config.positions != "row":
        draw = DrawnPositions(
            how=config.positions,
            row_length=run.plan.config.target_length,
            target_length=run.factors.target_length,
            rows=config.steps * config.batch_rows,
            seed=config.seed,
        )
    rows = PlanRows(run.plan, run.corpora, seed=config.seed, long_row_mask=config.long_row_mask, draw=draw)
    hooks: dict[str, Any] = {}
    if reporter is not None:
        hooks = {"started": reporter.started, "within": reporter.within, "report": reporter.step}
    if run.needles:
        note = reporter.needles if reporter is not None else quiet
        hooks["evaluate"] = Retrieval(run.factors, run.needles, here, every=config.evaluate_every, note=note)
    device = here.device()
    dtype = torch.float32 if config.precision(config.level, device.type) == "float32" else torch.bfloat16
    # Several processes read the same pages of its files, and none needs room for all of it on its GPU. Nor does what
    # becomes a quarter of its size.
    in_host = here.num_processes > 1 or config.level.four_bit
    model = load(run.info, dtype=dtype, device="cpu" if in_host else device).model
    with rescaled(model, run.factors):
        pass  # proves that they take effect, while the model is as it was: in one precision, and nothing packed
    if config.lora is not None:
        torch.manual_seed(config.seed)
        add_lora(model, config.lora, config.also)
    if config.level.four_bit:
        freeze_in_four_bits(model, device)
    freeze(model, config.freeze)
    hooks |= {"kind_of": rows.kind, "name_row": rows.name, "prepare": rows.prepare}
    train_loop(model, run.factors, rows, config, output, here, device=device, **hooks)
    return model


# The result


def _record(run: TrainingRun, output: Path, here: World) -> TrainingRecord:
    """What goes into the model's folder, from the run and the log of all its steps."""
    log = read_log(output / LOG)
    steps = [line for line in log if isinstance(line, StepLine)]
    if (lost := run.config.steps - len(steps)) > 0:
        warn(
            f"{output / LOG} lacks {lost} of {run.config.steps} steps: tokens, seconds and losses in {RECORD} "
            "are those of the others; the weights are not touched by that"
        )
    needles = [line for line in log if isinstance(line, NeedleLine)]
    info, factors, plan = run.info, run.factors, run.plan
    return TrainingRecord(
        model={"name": info.name, "revision": info.revision, "weights": run.identity["weights"]},
        factors={
            "fingerprint": run.identity["factors"],
            "method": factors.method,
            "original_length": factors.original_length,
            "target_length": factors.target_length,
        },
        plan={
            "fingerprint": run.identity["plan"],
            "rows": len(plan),
            "row_length": plan.config.target_length,
            "seed": plan.config.seed,
            "sources": [source.label for source in plan.sources],
        },
        config=run.config.to_json(),
        versions=_versions(),
        processes=here.num_processes,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        steps=run.config.steps,
        tokens=sum(line.tokens for line in steps),
        seconds=sum(line.seconds for line in steps),
        losses={"first": steps[0].losses, "last": steps[-1].losses} if steps else {},
        needles={"first": needles[0], "last": needles[-1]} if needles else {},
    )


def write_model(model: Any, run: TrainingRun, folder: Path, record: TrainingRecord, here: World) -> None:
    """Write a plain transformers folder with longrope in its config, whole or not at all.

    Every process takes part, since each may hold a part of the weights.
    """
    dtype: torch.dtype = getattr(torch, run.config.save_dtype)
    state = full_state(model, dtype)
    if not here.is_main:
        return
    factors, tokenizer = run.factors, run.tokenizer
    try:
        with atomic_folder(folder) as temporary:  # what is there is damaged, or of another dtype
            warn_of_single_attention_factor(factors)
            write_factors(model.config, factors, factors.original_length)
            model.save_pretrained(temporary, state_dict=state, max_shard_size=SHARD_SIZE)
            model.config.dtype = dtype  # the one of the weights in the folder; training keeps float32
            model.config.save_pretrained(temporary)
            tokenizer.model_max_length = factors.target_length
            tokenizer.save_pretrained(temporary)
            factors.save(temporary / FACTORS_FILE)
            record.save(temporary / RECORD)
            write_manifest(temporary)
    except (OSError, SafetensorError) as error:
        raise LongRopeError(
            f"{folder}: the trained model cannot be written ({error})",
            hint="free some space and run the same command again: the last checkpoint has all steps",
        ) from error


def full_state(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights on the CPU, additions merged in; on the main process only, empty elsewhere."""
    gathered: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not gathered:
        return {}
    state = {name: tensor.to(dtype) for name, tensor in merged(gathered, model).items()}
    # By now a weight that two modules share is two; transformers writes it once if it is one tensor.
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            state[name] = state[first]
    return state
