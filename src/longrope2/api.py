"""The Python interface: each command as a function that takes and gives values, and prints nothing on stdout."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from longrope2.distributed import world
from longrope2.evaluation.results import RESULTS
from longrope2.evaluation.run import run_evaluation
from longrope2.export.config import Profile
from longrope2.export.engines import Format
from longrope2.export.run import export
from longrope2.factors import RescaleFactors
from longrope2.models import ModelInfo, describe, rescale_model
from longrope2.models import load as load_model
from longrope2.search.evolution import EvolutionConfig
from longrope2.search.run import SearchConfig, check, search
from longrope2.training.run import PRODUCT, run_train


def rescale(
    model: str | Path | ModelInfo, method: str, target_length: int, *, extend_again: bool = False, **options: Any
) -> RescaleFactors:
    """Factors of a closed form for a model: pi, ntk, yarn, llama3, …; options are those of the method."""
    info = model if isinstance(model, ModelInfo) else describe(model)
    return rescale_model(info, method, target_length, extend_again=extend_again, **options)


def search_factors(
    model: str | Path | ModelInfo,
    target_length: int,
    output: str | Path | None = None,
    *,
    extend_again: bool = False,
    **options: Any,
) -> RescaleFactors:
    """Search the critical dimension and the factors; options are those of `longrope2 search`.

    With a folder as `output` the search can be interrupted: the same call goes on where it was.
    """
    info = model if isinstance(model, ModelInfo) else describe(model)
    info.refuse_rescaled(extend_again=extend_again)
    schedule = {f.name: options.pop(f.name) for f in fields(EvolutionConfig) if f.name in options}
    config = SearchConfig(target_length=target_length, evolution=EvolutionConfig(**schedule), **options)
    check(config, info.rope)
    with world() as here:
        return search(load_model(info, device=here.device()), config, _path(output), here)


def train(
    model: str | Path,
    factors: RescaleFactors | str | Path,
    plan: str | Path,
    output: str | Path,
    *,
    cache: str | Path | None = None,
    **options: Any,
) -> Path:
    """Train with both RoPEs on a plan of `longrope2 data plan`; returns the folder of the trained model.

    Options are those of `longrope2 train`. The same call goes on after an interruption.
    """
    output = Path(output)
    if isinstance(factors, RescaleFactors):
        path = output.with_name(f"{output.name}.factors.json")
        factors.save(path)
        factors = path
    with contextlib.redirect_stdout(sys.stderr):
        run_train(str(model), factors=Path(factors), plan=Path(plan), output=output, cache=_path(cache), **options)
    return output / PRODUCT


def evaluate(
    model: str | Path,
    suites: Sequence[str],
    output: str | Path,
    *,
    factors: str | Path | None = None,
    cache: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure a model; returns the content of results.json. Options are those of `longrope2 evaluate`."""
    fixed = {"original_length": None, "switch_length": None, "backend_name": "torch", "name": None}
    with contextlib.redirect_stdout(sys.stderr):
        run_evaluation(
            str(model),
            Path(output),
            factors_file=_path(factors),
            cache=_path(cache),
            as_json=False,
            **{**fixed, **options, "suites": tuple(suites)},
        )
    result: dict[str, Any] = json.loads((Path(output) / RESULTS).read_text(encoding="utf-8"))
    return result


def export_model(
    model: str | Path,
    output: str | Path,
    *,
    factors: RescaleFactors | str | Path | None = None,
    profile: Profile = "dual",
    format: Format = "huggingface",
    **options: Any,
) -> Path:
    """Write a model with its factors for transformers, vLLM, llama.cpp and others; returns where it is."""
    export(str(model), Path(output), factors=factors, profile=profile, format=format, **options)
    return Path(output)


def _path(place: str | Path | None) -> Path | None:
    return None if place is None else Path(place)
