"""What decides an export, or its verification, besides the model and its factors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from longrope2.errors import LongRopeError, all_problems
from longrope2.export.engines import Format, verifiable
from longrope2.factors import RescaleFactors
from longrope2.options import FileName, broken_limits, option, stated, wrong_types

Profile = Literal["dual", "static-long"]
Precision = Literal["float32", "float16", "bfloat16", "q8_0"]


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """What is the same for every format."""

    profile: Profile | Literal["auto"] = option(
        "auto",
        "dual: the original RoPE in short sequences; static-long: the rescaled RoPE in all sequences; auto: dual where "
        "plain transformers can run it.",
    )
    dtype: Precision | None = option(None, "Default: as the model is stored. q8_0 is for GGUF.")
    fold_temperature: bool = option(
        False, "Put the attention factor into the weights, for engines that force their own."
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Exporting):
    """One export, as `longrope2 export` and `export_model` make it."""

    format: Format = option(
        "huggingface", "A folder for transformers, vLLM, SGLang and mlx-lm, or a file for llama.cpp."
    )
    results: FileName | None = option(None, "JSON to show on the model card.")
    extend_again: bool = option(False, "Replace the factors that the model carries.")
    force: bool = option(False, "Replace an earlier export; other files are never replaced.")

    def check(self) -> None:
        """Refuse options that no export can have."""
        if found := wrong_types(self) or broken_limits(self):
            raise LongRopeError(all_problems("export options", found), hint="see `longrope2 export --help`")
        if self.dtype == "q8_0" and self.format != "gguf":
            raise LongRopeError(
                f"--dtype {self.dtype} is a format of GGUF", hint="use --format gguf, or --dtype bfloat16"
            )


@dataclass(frozen=True, kw_only=True)
class ExportTable(Exporting):
    """The table [export] of a recipe, which may name several formats."""

    formats: tuple[Format, ...] = option(("huggingface",), "Formats to write, one export each.")

    def exports(self, *, extend_again: bool) -> Iterator[ExportConfig]:
        """One export for each format, in place of what an interruption has left."""
        shared = {entry.name: getattr(self, entry.name) for entry in stated(Exporting)}
        for format in self.formats:
            yield ExportConfig(**shared, format=format, extend_again=extend_again, force=True)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Which engines to ask."""

    engines: tuple[str, ...] = option(
        (),
        f"{' or '.join(', '.join(verifiable()).rsplit(', ', 1))}, in this or another environment; may be repeated. "
        "Default: all found.",
        flag="--engine",
        metavar="NAME[=PYTHON]",
        repeated=True,
    )


def unknown_engine(asked: str) -> str | None:
    """What to say of NAME or NAME=PYTHON if `verify` does not know that engine."""
    name = asked.partition("=")[0]
    return None if name in verifiable() else f"engine {name!r} is not known (choose from {', '.join(verifiable())})"


def fitting_profile(factors: RescaleFactors, *, trained: bool) -> Profile:
    """The profile that plain transformers runs rightly; raises where a model was trained for what it cannot run."""
    short, long = factors.short_attention_factor, factors.long_attention_factor
    if not factors.switches or short == long:
        return "dual"
    if trained:
        raise LongRopeError(
            f"this model uses an attention factor of {short:g} in short sequences and {long:g} in long ones, and plain "
            "transformers knows only one",
            hint="choose: --profile dual is wrong there in short sequences, and right in longrope2.load, vLLM and "
            "llama.cpp; --profile static-long gives up the original RoPE, and is right there, too",
        )
    return "static-long"


def profiled(factors: RescaleFactors, profile: Profile) -> RescaleFactors:
    """The factors a profile exports: both sides, or the long one in every sequence."""
    return factors if profile == "dual" else factors.long_everywhere()


def profile_of(factors: RescaleFactors) -> Profile:
    """Which profile exported factors belong to."""
    return "dual" if factors.switches else "static-long"
