"""`longrope2 export`: a model and its factors become what an engine serves."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from longrope2.console import say, warn
from longrope2.errors import LongRopeError
from longrope2.export.card import card, is_card, read_results
from longrope2.export.config import ExportConfig, Profile, fitting_profile, profile_of, profiled
from longrope2.export.engines import Format, verifiable
from longrope2.export.gguf import card_path, check_architecture, is_exported_file, write_file
from longrope2.export.huggingface import is_exported_folder, with_forced_temperature, with_provenance, write_folder
from longrope2.export.weights import QueryScale, SourceModel
from longrope2.factors import RescaleFactors
from longrope2.files import package_versions
from longrope2.generation.saved import carries_factors, read_factors, with_origin
from longrope2.models import describe
from longrope2.runfolder import RunFolder

KNOWS_ONE: Mapping[Format, str] = {
    "huggingface": "plain transformers knows only one",
    "gguf": "llama.cpp takes the long one for both unless a flag says otherwise",
}
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and where."""

    path: Path
    profile: Profile
    dtype: str
    factors: RescaleFactors
    """As an engine should run the model, with how they were exported."""
    faults: Mapping[str, str]
    """By engine of this format, why it cannot run the export rightly; the others can."""


def export(
    model: str,
    output: Path,
    config: ExportConfig,
    *,
    factors: RescaleFactors | str | Path | None = None,
    results: Mapping[str, Any] | None = None,
) -> Exported:
    """Write `model` with `factors`, or those it carries, for the engines of a format; see docs/serving.md.

    The card shows `results`, or those of the file that the config names.
    """
    config.check()
    source = SourceModel(describe(model))
    source.info.refuse_weights()
    if results is None and config.results:
        results = read_results(Path(config.results))
    _check_outputs(output, source, format=config.format, force=config.force)
    found = _factors(source, factors, extend_again=config.extend_again)
    profile = config.profile
    if profile == "auto":
        profile = fitting_profile(found, trained=factors is None)
        if profile == "static-long":
            say(
                f"profile static-long: the attention factors of short ({found.short_attention_factor:g}) and long "
                f"({found.long_attention_factor:g}) sequences differ, and {KNOWS_ONE[config.format]}"
            )
            warn(
                f"sequences up to {found.original_length:,} tokens get the rescaled RoPE, too, which changes their "
                "answers; --profile dual keeps the original one there, for longrope2.load, vLLM and llama.cpp"
            )
    wanted = profiled(found, profile)
    exported = with_forced_temperature(wanted) if config.fold_temperature else wanted
    if config.format == "gguf":
        check_architecture(source, exported)

    folded = (wanted.long_attention_factor / exported.long_attention_factor) ** 2
    change = QueryScale(source.config, source.tensors.keys(), folded) if folded != 1 else _unchanged
    precision = config.dtype or _precision(source.dtype)
    how = _provenance(source, profile=profile_of(exported), dtype=precision, folded=folded)
    exported = with_provenance(exported, how)
    text = card(
        _public_name(source.info.name),
        exported,
        family=source.info.reading.family,
        where=output.name,
        format=config.format,
        dtype=precision,
        folded=folded,
        source_card=_source_card(source),
        results=results,
    )
    with room_ends(output):
        if config.format == "gguf":
            write_file(source, exported, output, dtype=precision, change=change, card=text)
        else:
            # A tensor of another precision than most keeps it, unless one is asked for.
            dtypes = {
                name: PRECISIONS[config.dtype or _precision(tensor.dtype)] for name, tensor in source.tensors.items()
            }
            write_folder(source, exported, output, dtype=precision, dtypes=dtypes, change=change, card=text)
    family = source.info.reading.family
    engines = verifiable(config.format)
    faults = {name: fault for name, engine in engines.items() if (fault := engine.fault(exported, family))}
    for name, fault in faults.items():
        warn(f"this export is not right in {name}: {fault}")
    window = f"{exported.original_length:,} → {exported.target_length:,} tokens"
    say(f"wrote {output}: {profile_of(exported)}, {window}, {precision}")
    say(f"check it with: longrope2 verify {quote(str(output))}")
    return Exported(path=output, profile=profile_of(exported), dtype=precision, factors=exported, faults=faults)


def _check_outputs(output: Path, source: SourceModel, *, format: Format, force: bool) -> None:
    is_folder = format == "huggingface"
    if is_folder == (output.suffix == ".gguf"):
        raise LongRopeError(
            f"{output}: the name of a GGUF file ends in .gguf, and that of a folder does not",
            hint="add --format gguf" if is_folder else f"use -o {output}.gguf, or omit --format gguf",
        )
    ours = {output: is_exported_folder} if is_folder else {output: is_exported_file, card_path(output): is_card}
    force = force or not output.exists()  # a card without its file is what a kill has left
    for place, is_ours in ours.items():
        check_output(place, source=source.info.location, force=force, is_folder=is_folder, is_ours=is_ours)


def _factors(source: SourceModel, given: RescaleFactors | str | Path | None, *, extend_again: bool) -> RescaleFactors:
    """The factors to export; given ones never silently replace others that the model carries."""
    info = source.info
    carried = read_factors(info.reading) if carries_factors(info) else None
    if given is None:
        if carried is None:
            raise LongRopeError(
                f"{info.name} carries no factors, and none were given",
                hint="add --factors FILE; `longrope2 search` and `longrope2 factors` write such files",
            )
        return with_origin(source.folder, carried) if source.folder else carried
    factors = RescaleFactors.given(given)
    # The factors state the original window, also if a config does not state it, or states it wrongly.
    factors.check_fits(replace(info.rope, original_length=factors.original_length), info.name)
    if carried is None or not carried.rotates_as(factors):
        info.refuse_rescaled(extend_again=extend_again)
    return factors


def _provenance(source: SourceModel, **how: object) -> dict[str, object]:
    origin = {"model": _public_name(source.info.name), "revision": source.info.revision}
    return {**origin, "versions": package_versions("torch"), **how}


def _precision(dtype: torch.dtype) -> str:
    return next((name for name, known in PRECISIONS.items() if known == dtype), "float32")


def _unchanged(_: str, tensor: Tensor) -> Tensor:
    return tensor


def _public_name(model: str) -> str:
    """A hub id as it is, and the last part of a path: a card should not show local folders."""
    return Path(model).resolve().name if Path(model).exists() else model


def _source_card(source: SourceModel) -> str | None:
    file = source.folder / "README.md" if source.folder else None
    return file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else None


class ExportFolder(RunFolder):
    """Replaced as a whole: all of it has to be an export, hidden files included."""

    def _is_foreign(self, path: Path) -> bool:
        return any(path.iterdir()) and not is_exported_folder(path)


def check_output(output: Path, *, source: str, force: bool, is_folder: bool, is_ours: Callable[[Path], bool]) -> None:
    """Raise unless `output` may be written: it is free, or an earlier export and `force` is given."""
    if output.exists() and Path(source).exists() and Path(source).resolve().is_relative_to(output.resolve()):
        raise LongRopeError(f"{output} is the model itself, or holds it", hint="write the export to another place")
    if is_folder and output.is_dir() and (output.is_mount() or Path.cwd().is_relative_to(output.resolve())):
        raise LongRopeError(
            f"{output} is a mount point, or the folder that you are in: it cannot be replaced as a whole",
            hint=f"name a folder in it, such as -o {output / 'model'}",
        )
    if not output.exists() or (is_folder and output.is_dir() and not any(output.iterdir())):
        return
    if is_folder:
        ExportFolder(output, "export", "exporting", ()).refuse_foreign()
    elif output.is_dir():
        raise LongRopeError(f"{output} is a folder", hint="name another place with -o")
    elif not is_ours(output):
        raise LongRopeError(
            f"{output} is not an export of longrope2, and is never replaced", hint="name another place with -o"
        )
    if not force:
        raise LongRopeError(f"{output} exists already", hint="--force replaces it")


@contextmanager
def room_ends(output: Path) -> Iterator[None]:
    """Report a full disk or quota while writing; safetensors and numpy do not raise it as ENOSPC."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's own words, with the path
        raise LongRopeError(
            f"{output}: cannot be written ({error})", hint="make room, or name another disk with -o"
        ) from error
