"""`longrope2 calibrate`: measure, show, write, and store the switch length if asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longrope2.calibration.config import CalibrationConfig
from longrope2.calibration.measure import SCORES, calibrate, require_switch
from longrope2.calibration.rule import in_words
from longrope2.console import say, show_json, show_table, warn
from longrope2.errors import FactorsError, LongRopeError, MissingExtraError
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_calibration
from longrope2.files import check_writable, refuse_foreign, write_json
from longrope2.generation.saved import carries_factors, read_factors, store_switch_length
from longrope2.models import check_factors, describe, load, load_tokenizer
from longrope2.options import build

RESULT = "calibration.json"


def run_calibrate(
    model: str,
    *,
    factors_file: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """`longrope2 calibrate`: measure, write, store if asked, and print."""
    factors = None if factors_file is None else RescaleFactors.load(factors_file)
    info = describe(model, original_length=factors.original_length if factors else None)
    config = build(CalibrationConfig, "calibration options", options)
    if config.store and (factors is not None or not (Path(info.location) / "config.json").is_file()):
        raise LongRopeError(
            "--store writes into the config.json of a folder that has its own factors",
            hint="leave out --store and pass the switch length to `longrope2 generate --switch-length`",
        )
    # Before an 8B model is loaded for nothing.
    if factors is not None:
        require_switch(factors)
        check_factors(factors, info)
    elif not carries_factors(info):
        raise FactorsError(f"no factors were given, and {model} has none of its own", hint="pass --factors FILE")
    config.check(factors.target_length if factors else info.reading.window, load_tokenizer(info))
    if output is not None:
        refuse_foreign(output, "calibrate", RESULT, SCORES, beside=factors_file)
        check_writable(output / RESULT)
    loaded = load(info)
    try:
        result = calibrate(loaded, factors or read_factors(info.reading), config, output)
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory ({loaded.model.dtype} on {loaded.model.device})", hint="name shorter --lengths"
        ) from error
    # On the screen first: a disk that is full takes nothing back. Nor does a screen that has gone (`| head -1`).
    try:
        show_json(result) if as_json else show(result)
    finally:
        if output is not None:
            write_json(output / RESULT, result)
            (output / SCORES).unlink(missing_ok=True)  # they are in the result
            _draw(output, result)
        if config.store:
            store_switch_length(Path(info.location), result["switch_length"])
            say(f"stored switch length {result['switch_length']:,} in {info.location}")


def show(result: Mapping[str, Any]) -> None:
    """Print a calibration as a table with its conclusions."""
    rows = [
        [
            f"{point['length']:,}",
            *(
                text
                for side in ("original", "long")
                for text in (f"{point[side]['nll']:.3f}", f"{point[side]['exact']:.0%}", f"{point[side]['worst']:.0%}")
            ),
            f"{point['gain']:+.3f} ± {point['gain_error']:.3f}",
        ]
        for point in result["points"]
    ]
    columns = ["tokens", *(f"{side} {what}" for side in ("original", "long") for what in ("NLL", "exact", "worst"))]
    show_table(
        f"{result['model']}: answers of needle documents under the original RoPE and the long one ({result['method']})",
        [*columns, "long better by"],
        rows,
        caption="NLL: nats per answer token; exact: answers right in every token; worst: the same at the depth where "
        f"it is least; ±: one standard error over {result['config']['documents']} documents\n" + in_words(result),
    )


def _draw(output: Path, result: Mapping[str, Any]) -> None:
    try:
        draw_calibration(result, output / "calibration.png")
    except MissingExtraError as error:
        warn(f"no figure: {error}")
