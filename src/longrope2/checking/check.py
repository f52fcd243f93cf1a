"""`longrope2 check`: what each engine will do with a config, whether the live model does it, and the classic faults."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longrope2.checking.readers import READERS, NotKnownError, Reader, Reading, own_reading
from longrope2.checking.rotation import Rotation
from longrope2.checking.statement import (
    NEWER,
    Statement,
    faults,
    quiet_transformers,
    read_statement,
    reason_of,
)
from longrope2.console import say
from longrope2.errors import LongRopeError, ModelError, damage
from longrope2.families import COPY_AGAIN, FULL_ATTENTION, accept_mscales, live_config
from longrope2.generation.saved import write_factors
from longrope2.gguf_model import open_gguf
from longrope2.models import ModelInfo, describe, load_folder, pretrained_source, raw_config
from longrope2.records import Finding, Table, findings_table

if TYPE_CHECKING:
    from torch import nn

LIVE = "live model"
NO_WEIGHTS = "there are no weights here: only the config, and the rotary module that it makes, are checked"


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check found."""

    model: str
    stated: str
    """The RoPE that the config asks for, in words."""
    findings: tuple[Finding, ...]
    corrected: dict[str, Any] | None
    """The keys to paste into config.json so that all engines read them alike; None where nothing needs them."""

    @property
    def wrong(self) -> list[Finding]:
        """What must not be."""
        return [finding for finding in self.findings if finding.is_wrong]

    def table(self) -> Table:
        """One row for each finding, with the evidence below."""
        return findings_table(f"{self.model}: {self.stated}", self.findings, "relative error")

    def lines(self) -> Iterator[str]:
        """The corrected keys, as JSON to paste."""
        if self.corrected is not None:
            yield "keys for config.json, in the forms that both generations of transformers and most engines read:"
            yield json.dumps(self.corrected, indent=1)


def check(model: "str | Path | nn.Module", *, config_only: bool = False) -> CheckReport:
    """Check a folder, a .gguf file, a hub id, or a live transformers model, such as a trainer's.

    Exactly what `longrope2 check` prints: `report.wrong` is empty for a model that rotates as its config says in the
    current engines, and `report.corrected` has the keys to paste otherwise. With `config_only` no weights are loaded.
    """
    accept_mscales()
    with quiet_transformers():
        if isinstance(model, str | Path):
            return _check_named(str(model), config_only=config_only)
        if not hasattr(model, "config"):
            raise ModelError(
                f"{type(model).__name__} has no config: not a transformers model", hint="pass the model, or its folder"
            )
        return _report(type(model).__name__, read_statement(_config_of(model)), model=model)


def _config_of(model: Any) -> dict[str, Any]:
    """The config of a live model; with the factors of one that `longrope2.load` gave, which it has outside of it."""
    from longrope2.checking.live import rotary_modules
    from longrope2.rotary import RescaledRotary

    with suppress(LongRopeError):
        if isinstance(rotary := rotary_modules(model)[0], RescaledRotary):
            config = copy.deepcopy(model.config)
            write_factors(config, rotary.factors, rotary.switch_length or rotary.factors.original_length)
            return config.to_dict()
    return model.config.to_dict()


def _check_named(name: str, *, config_only: bool) -> CheckReport:
    location, config, _ = raw_config(name)
    if "model_type" not in config:
        raise ModelError(f"{name}: config.json has no 'model_type'", hint="is this the folder of a language model?")
    statement = read_statement(config)
    model, reason = None, "skipped (--config-only)"
    if not config_only:
        try:
            model, reason = _loaded(name, location), ""
        except LongRopeError as error:
            reason = error.message
    return _report(name, statement, model=model, no_model=reason, gguf=location if location.endswith(".gguf") else None)


def _loaded(name: str, location: str) -> Any:
    """The model with its weights, as they are stored."""
    info: ModelInfo = describe(name)
    info.refuse_weights()
    if info.is_gguf:
        import torch

        return open_gguf(Path(location)).model(dtype=torch.float32)
    if Path(location).is_dir() and not any(Path(location).glob("*.safetensors")):
        raise ModelError(NO_WEIGHTS)
    source, options = pretrained_source(info)
    say(f"loading {name}")
    return load_folder(name, source, dtype="auto", **options).eval()


def _report(
    name: str, statement: Statement, *, model: Any = None, no_model: str = "", gguf: str | None = None
) -> CheckReport:
    with damage(f"{name}: its config is not usable", hint=COPY_AGAIN):
        return _held_against(name, statement, model, no_model, gguf)


def _held_against(name: str, statement: Statement, model: Any, no_model: str, gguf: str | None) -> CheckReport:
    stated = statement.rotation()
    found = [*faults(statement), *(_faults_of_file(Path(gguf), statement) if gguf else ())]
    live, refused = _live_parameters(statement, model)
    found += _transformers(statement, stated, model, refused)
    readers = READERS if gguf is None else ()
    found += _readings(statement, stated, live, refused, readers)
    found += _proof(model, no_model)
    needs = any(finding.verdict in ("WRONG", "known limit") for finding in found)
    return CheckReport(
        model=name,
        stated=str(stated) if stated else f"{statement.kind}, as its config states it, cannot be computed",
        findings=tuple(found),
        corrected=statement.corrected() if needs and stated and gguf is None else None,
    )


def _live_parameters(statement: Statement, model: Any) -> tuple[Mapping[str, Any], str | None]:
    """The RoPE parameters as transformers holds them, or why it refuses the config."""
    if statement.plain is None:
        return {}, f"it does not know '{statement.config.get('model_type')}' models"
    try:
        config = copy.deepcopy(model.config) if model is not None else live_config(statement.config)
        config.standardize_rope_params()  # again, as vLLM and every rotary module do: it now sees all keys
    except LongRopeError as error:
        return {}, f"it refuses this config: {reason_of(error)}"
    parameters = getattr(config, NEWER, None) or {}
    return parameters.get(FULL_ATTENTION, parameters), None


def _transformers(statement: Statement, stated: Rotation | None, model: Any, refused: str | None) -> Iterator[Finding]:
    """What the installed transformers does: the rotary module of the model, or the one of its config, is run."""
    import transformers

    from longrope2.checking.live import bare_module, measured, rotary_modules, rounded_to

    engine = f"transformers {transformers.__version__}"
    if refused is not None:
        known = statement.plain is not None
        yield Finding(engine, "run", None, "FAILED" if known else "not checked", refused)
        return
    if stated is None:
        yield Finding(engine, "run", None, "not checked", "there is nothing to hold it against")
        return
    try:
        module = rotary_modules(model)[0] if model is not None else bare_module(live_config(statement.config))
    except Exception as error:  # whatever transformers raises for a model that it cannot build
        reason = (
            error.message if isinstance(error, LongRopeError) else f"it cannot build the model ({reason_of(error)})"
        )
        yield Finding(engine, "run", None, "not checked", reason)
        return
    try:
        found = measured(module, stated)
    except LongRopeError as error:
        yield Finding(engine, "run", None, "not checked", error.message)
    except Exception as error:  # whatever the module raises for such a config
        yield Finding(engine, "run", None, "FAILED", f"its rotary module stops: {reason_of(error)}")
    else:
        yield _compared(engine, "run", Reading(found, statement.window, rounded_to(module)), stated, is_current=True)


def _readings(
    statement: Statement,
    stated: Rotation | None,
    live: Mapping[str, Any],
    refused: str | None,
    readers: tuple[Reader, ...],
) -> Iterator[Finding]:
    """What each engine reads; versions that read the same share a row."""
    if stated is None:
        return
    own = Reader("longrope2", "", "", own_reading, is_current=True)
    for engine, versions in groupby((own, *readers), key=lambda reader: reader.engine):
        rows: list[tuple[str, str, Finding]] = []
        for reader in versions:
            if engine == "vLLM" and (refused is not None or "rope_type" not in live):
                note = (
                    f"it reads with transformers, and {refused or 'its layers are of other kinds than are known here'}"
                )
                failed = refused is not None and statement.plain is not None
                finding = Finding(engine, "read", None, "FAILED" if failed else "not checked", note)
            else:
                finding = _read(reader, statement, stated, live)
            if rows and _same(rows[-1][2], finding):
                rows[-1] = (rows[-1][0], reader.last, finding)
            else:
                rows.append((reader.first, reader.last, finding))
        for first, last, finding in rows:
            span = first if first == last else f"{first} to {last}"
            yield replace(finding, engine=f"{engine} {span}".strip())


def _same(one: Finding, two: Finding) -> bool:
    return one.note == two.note and one.is_wrong == two.is_wrong


def _read(reader: Reader, statement: Statement, stated: Rotation, live: Mapping[str, Any]) -> Finding:
    try:
        reading = reader.read(statement, live)
    except NotKnownError as error:
        return Finding(reader.engine, "read", None, "not checked", str(error))
    except (KeyError, TypeError, ValueError, OverflowError, LongRopeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else reason_of(error)
        return Finding(
            reader.engine, "read", None, "FAILED" if reader.is_current else "known limit", f"it stops: {reason}"
        )
    return _compared(reader.engine, "read", reading, stated, is_current=reader.is_current)


def _compared(engine: str, mode: str, reading: Reading, stated: Rotation, *, is_current: bool) -> Finding:
    """A reading held against what the config asks for."""
    differences, error = reading.rotation.differences(stated), reading.rotation.error(stated)
    told = f"{reading.rotation}; window {reading.window:,}" + (f"; {reading.remark}" if reading.remark else "")
    if not differences:
        return Finding(engine, mode, error, "right", told)
    # Where a config asks for two attention factors, transformers has only one to give.
    one_temperature = stated.short_attention != stated.long_attention and all(
        "attention factor of short" in text for text in differences
    )
    limited = not is_current or (mode == "run" and one_temperature)
    verdict: Literal["known limit", "WRONG"] = "known limit" if limited else "WRONG"
    return Finding(engine, mode, error, verdict, f"{'; '.join(differences)} (it runs {told})")


def _proof(model: Any, no_model: str) -> Iterator[Finding]:
    if model is None:
        yield Finding(LIVE, "zero angles", None, "not checked", no_model)
        return
    from longrope2.checking.live import rotary_modules
    from longrope2.rotary import prove_rotation

    try:
        prove_rotation(model, rotary_modules(model))
    except LongRopeError as error:
        yield Finding(LIVE, "zero angles", None, "WRONG", error.message)
    except Exception as error:  # whatever its forward raises with such a RoPE
        yield Finding(LIVE, "zero angles", None, "FAILED", f"its forward stops: {reason_of(error)}")
    else:
        text = "with angles of zero it is blind to positions: its rotary module is all that rotates"
        yield Finding(LIVE, "zero angles", None, "right", text)


def _faults_of_file(path: Path, statement: Statement) -> Iterator[Finding]:
    """What a GGUF file says besides what a config.json could."""
    factor = open_gguf(path).value("rope.scaling.factor")
    if statement.kind == "longrope" and factor not in (None, 0, 1):
        yield Finding(
            path.name,
            "rope.scaling.factor",
            None,
            "WRONG",
            f"it has factors for each dimension and rope.scaling.factor = {factor:g}: llama.cpp divides every "
            "frequency by both, so the window is scaled twice",
        )
