"""The Python interface: each command as a function that takes and returns values, and prints nothing on stdout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from longrope2.distributed import world
from longrope2.evaluation.config import evaluation_config
from longrope2.evaluation.evaluate import BackendName, run_evaluation
from longrope2.export.config import ExportConfig
from longrope2.export.export import export
from longrope2.factors import RescaleFactors
from longrope2.keywords import EvaluateOptions, ExportOptions, RescaleOptions, SearchOptions, TrainOptions
from longrope2.models import ModelInfo, describe, rescale_model
from longrope2.options import build, length_of
from longrope2.search.config import search_config
from longrope2.search.run import run_search
from longrope2.training import train as training
from longrope2.training.config import train_config


def rescale(
    model: str | Path | ModelInfo,
    method: str,
    target_length: int | str,
    *,
    extend_again: bool = False,
    **options: Unpack[RescaleOptions],
) -> RescaleFactors:
    """Factors of a closed form for a model, such as ntk or yarn.

    Options are those of the method: `critical_dimension` for the -rcd ones and longrope2, which also takes
    `right_factors` and `attention_factor`; `onset` and `base` for cope and hardclip.
    """
    info = model if isinstance(model, ModelInfo) else describe(model)
    return rescale_model(info, method, length_of(target_length), extend_again=extend_again, **options)


def search_factors(
    model: str | Path | ModelInfo,
    target_length: int | str,
    output: str | Path | None = None,
    *,
    extend_again: bool = False,
    wandb: str | None = None,
    **options: Unpack[SearchOptions],
) -> RescaleFactors:
    """Search the critical dimension and the factors by needle perplexity.

    Options are those of `longrope2 search`, underscores for dashes; `--compile` is `compiled=True`, and another trained
    window comes with `describe(model, original_length=…)` as the model. With a folder as `output`, the same
    call resumes a search that was interrupted.
    """
    info = model if isinstance(model, ModelInfo) else describe(model)
    config = search_config(target_length=target_length, **options)
    with world() as here:
        return run_search(info, config, _path(output), here, extend_again=extend_again, wandb=wandb).factors


def train(
    model: str | Path,
    factors: RescaleFactors | str | Path,
    plan: str | Path,
    output: str | Path,
    *,
    original_length: int | None = None,
    cache: str | Path | None = None,
    wandb: str | None = None,
    **options: Unpack[TrainOptions],
) -> Path:
    """Train with both RoPEs on a plan of `longrope2 data plan`; returns the folder of the trained model.

    Options are those of `longrope2 train`, underscores for dashes; `--compile` is `compiled=True`. The same call
    resumes after an interruption.
    """
    config = train_config(**options)
    with world() as here:
        training.train(
            str(model),
            config,
            Path(output),
            here,
            factors=factors,
            plan=Path(plan),
            original_length=original_length,
            cache=_path(cache),
            wandb=wandb,
        )
    return Path(output) / training.MODEL


def evaluate(
    model: str | Path,
    suites: Sequence[str],
    output: str | Path,
    *,
    factors: RescaleFactors | str | Path | None = None,
    backend: BackendName = "torch",
    switch_length: int | None = None,
    original_length: int | None = None,
    name: str | None = None,
    cache: str | Path | None = None,
    **options: Unpack[EvaluateOptions],
) -> dict[str, Any]:
    """Measure a model; returns the content of results.json.

    Without factors it runs as its config says. Options are those of `longrope2 evaluate`: `lengths`, `samples`,
    `tasks`, `data`, `books`, … The same call resumes after an interruption.
    """
    config = evaluation_config(suites=tuple(suites), **options)
    with world() as here:
        record = run_evaluation(
            str(model),
            config,
            Path(output),
            here,
            factors=factors,
            backend=backend,
            switch_length=switch_length,
            original_length=original_length,
            name=name,
            cache=_path(cache),
        )
    return record.to_json()


def export_model(
    model: str | Path,
    output: str | Path,
    *,
    factors: RescaleFactors | str | Path | None = None,
    **options: Unpack[ExportOptions],
) -> Path:
    """Write a model with its factors for transformers, vLLM, llama.cpp and others; returns where it is.

    Without factors the model must carry its own. Options are those of `longrope2 export`: `profile`, `format`, …
    """
    return export(str(model), Path(output), build(ExportConfig, "export options", options), factors=factors).path


def _path(place: str | Path | None) -> Path | None:
    return None if place is None else Path(place)
