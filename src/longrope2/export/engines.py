"""What each engine does with an export: which side it chooses when, at which temperature, and how it is started.

The only place that knows: an engine is one row of `ENGINES`. The model card, `verify` with its help, the warnings of
`export` and the tables of the docs all come from these rows, or are checked against them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, Literal

from longrope2.export.probes import probe
from longrope2.factors import RescaleFactors
from longrope2.methods import longrope_temperature

Format = Literal["huggingface", "gguf"]
Advice = Callable[[RescaleFactors, str], Sequence[tuple[str, str]]]
"""From factors and the name of an export: command lines, and what each does at the boundary."""


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """An engine that a model card mentions; fields with defaults are set for engines that `verify` can run."""

    name: str
    title: str
    """The name as its makers write it."""
    format: Format
    advice: Advice
    probe: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Asks it for log-probabilities, in a process of its own: `python FILE FUNCTION JOB.json ANSWERS.json`, with the
    file and the name of this function. The file imports nothing of ours."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Modules that bring it, any of them, each with its pip command."""
    chooses: Literal["length", "switch", "capacity", "long"] = "length"
    """What makes a sequence long: its length in each forward; the same, and its cache is computed again; the window
    the engine was started with; or nothing."""
    plugin: tuple[str, str] | None = None
    """Group and name of the entry point that makes it switch, where the engine's environment has one."""
    temperature: Literal["both", "long", "forced"] = "both"
    """Which attention factors it honours: one per side, the long one on both, or none."""
    context_step: int = 1
    """It rounds the window it is started with up to a multiple of this."""
    families: tuple[str, ...] | None = None
    """Those it runs with the factors, found by trying each; None for all."""
    static_families: tuple[str, ...] = ()
    """Those it runs rightly when both sides are the same."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """By family, what else to know of it there."""

    def is_long(
        self, factors: RescaleFactors, *, length: int, capacity: int | None, switch_length: int | None = None
    ) -> bool:
        """Whether it runs a sequence of that length with the long factors; a plugin may know of a switch length."""
        if self.chooses == "switch":
            return length > (switch_length or factors.original_length)
        if self.chooses == "length":
            return length > factors.original_length
        return self.chooses == "long" or (capacity is not None and capacity > factors.original_length)

    def short_window(self, factors: RescaleFactors) -> int:
        """The largest window for which it still uses the short factors; 0 if there is none."""
        return factors.original_length // self.context_step * self.context_step

    def fault(self, factors: RescaleFactors, family: str) -> str | None:
        """Why it cannot run a model of this family with these factors, if it cannot."""
        short, long = factors.short_attention_factor, factors.long_attention_factor
        forced = forced_temperature(factors)
        if family in self.static_families:
            if not factors.switches:
                return None
            return f"it runs {family} models with one side at every length: use --profile static-long"
        if self.families is not None and family not in self.families:
            return f"it is not known to run {family} models with such factors"
        if self.temperature == "forced" and long != forced:
            profile = "" if short == long else "--profile static-long "  # weights can hold only one temperature
            fault = f"it always applies an attention factor of {forced:.4f}, not {long:g}"
            return f"{fault}: use {profile}--fold-temperature"
        if self.temperature == "long" and short != long:
            fault = f"it knows one attention factor, and applies {long:g} to short sequences too, not {short:g}"
            return f"{fault}: use longrope2.load, or --profile static-long"
        return None

    def card_rows(self, factors: RescaleFactors, family: str, where: str) -> list[tuple[str, str, str]]:
        """For the model card: title, command line, and what that does with these factors in this family."""
        fault = self.fault(factors, family)
        notes = [note for note in (self.remarks.get(family), fault and f"but {fault}") if note]
        return [(self.title, command, "; ".join([text, *notes])) for command, text in self.advice(factors, where)]


def forced_temperature(factors: RescaleFactors) -> float:
    """The attention factor of engines that read none: √(1 + ln s/ln L_train)."""
    return longrope_temperature(factors.extension_ratio, factors.original_length)


def guidance(factors: RescaleFactors, family: str, where: str, format: Format) -> list[tuple[str, str, str]]:
    """For each engine of a format: (title, command, what it does at the boundary) with these factors and family."""
    fitting = [engine for engine in ENGINES.values() if engine.format == format]
    return [row for engine in fitting for row in engine.card_rows(factors, family, where)]


def verifiable(format: Format | None = None) -> dict[str, ServingEngine]:
    """The engines that `verify` can run, of all formats or one, by name."""
    return {
        name: engine for name, engine in ENGINES.items() if engine.probe is not None and format in (None, engine.format)
    }


def _always(factors: RescaleFactors) -> str:
    return f"long factors in every sequence, up to {factors.target_length:,} tokens"


def _own(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    exact = f"exact: switches each row at {factors.original_length:,} tokens and recomputes its cache"
    return [(f'longrope2.load("{where}").generate(...)', exact if factors.switches else _always(factors))]


def _transformers(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    original = f"{factors.original_length:,} tokens"
    switching = (
        f"short up to {original}, long beyond, for a prompt run at once; wrong when a cache crosses {original} while "
        "generating, when short and long rows share a batch, and in chunked prefill"
    )
    command = f'AutoModelForCausalLM.from_pretrained("{where}")'
    return [(command, switching if factors.switches else _always(factors))]


def _vllm(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    exact = "exact where longrope2 is installed beside it: each request switches for itself; without, "
    text = (exact if factors.switches else "") + _always(factors)
    rows = [(f"vllm serve {quote(where)} --max-model-len {factors.target_length}", text)]
    if factors.switches:
        rows.append((f"vllm serve {quote(where)}", f"short factors, window of {factors.original_length:,} tokens"))
    return rows


def _sglang(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    command = f"python -m sglang.launch_server --model-path {quote(where)} --context-length {factors.target_length}"
    mixed = "do not: one long sequence makes the whole batch long, and caches are not recomputed"
    return [(command, mixed if factors.switches else _always(factors))]


def _tgi(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    if factors.switches:
        text = "do not: it rotates the first tokens of one sequence by short factors and the rest by long ones"
    elif factors.long_attention_factor != 1:
        text = "do not: it multiplies frequencies by the attention factor, which is right for 1 alone"
    else:
        key = f'"original_max_position_embeddings": {factors.original_length}'
        text = f"long factors in every sequence, once {key} is added to config.json"
    return [(f"text-generation-launcher --model-id {quote(where)}", text)]


def _mlx(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    return [(f"mlx_lm.generate --model {quote(where)} --prompt ...", "long factors in every sequence")]


def _llama_cpp(factors: RescaleFactors, where: str) -> list[tuple[str, str]]:
    """The contexts worth starting it with; short sequences have a temperature of their own on the command line."""
    short = LLAMA_CPP.short_window(factors) if factors.switches else 0
    ratio = factors.short_attention_factor / factors.long_attention_factor
    modes = [("long", factors.target_length, "")]
    modes += [("short", short, "" if ratio == 1 else f" --yarn-attn-factor {ratio:.6g}")] if short else []
    return [
        (
            f"llama-server -m {quote(where)} -c {context} --parallel 1{flag}",
            f"{side} factors in every sequence, up to {context:,} tokens",
        )
        for side, context, flag in modes
    ]


OWN = ServingEngine(name="longrope2", title="longrope2", format="huggingface", advice=_own)
TRANSFORMERS = ServingEngine(
    name="transformers",
    title="transformers",
    format="huggingface",
    advice=_transformers,
    probe=probe.ask_transformers,
    packages={"transformers": "pip install transformers"},
    chooses="length",
    temperature="long",
    static_families=("phimoe",),  # which takes the short factors at every length
    remarks={"gemma3_text": "not with 5.17 to 5.20, which stop with an error"},
)
VLLM = ServingEngine(
    name="vllm",
    title="vLLM",
    format="huggingface",
    advice=_vllm,
    probe=probe.ask_vllm,
    packages={"vllm": "pip install vllm"},
    chooses="capacity",
    plugin=("vllm.general_plugins", "longrope2"),
    temperature="both",
    families=(
        "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "gemma", "gemma2",
        "gemma3_text", "granite", "stablelm",
    ),
    static_families=("glm", "olmo2", "phi", "smollm3", "starcoder2"),
)  # fmt: skip
SGLANG = ServingEngine(name="sglang", title="SGLang", format="huggingface", advice=_sglang)
TGI = ServingEngine(name="tgi", title="TGI", format="huggingface", advice=_tgi)
MLX = ServingEngine(
    name="mlx",
    title="mlx-lm",
    format="huggingface",
    advice=_mlx,
    probe=probe.ask_mlx,
    packages={"mlx_lm": "pip install mlx-lm"},
    chooses="long",
    temperature="forced",
    families=("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "olmo2", "granite", "smollm3"),
)
LLAMA_CPP = ServingEngine(
    name="llama.cpp",
    title="llama.cpp",
    format="gguf",
    advice=_llama_cpp,
    probe=probe.ask_llama_cpp,
    packages={"xllamacpp": "pip install xllamacpp", "llama_cpp": "pip install llama-cpp-python"},
    chooses="capacity",
    temperature="both",  # the short one by --yarn-attn-factor
    context_step=256,
)
ENGINES = {engine.name: engine for engine in (OWN, TRANSFORMERS, VLLM, SGLANG, TGI, MLX, LLAMA_CPP)}
