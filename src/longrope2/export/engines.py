"""What each engine does with an export: which side it chooses when, at which temperature, and how it is started.

The only place that knows; the model card, `verify` and its expectations all come from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from longrope2.factors import RescaleFactors
from longrope2.families import FAMILIES
from longrope2.methods import longrope_temperature

Format = Literal["huggingface", "gguf"]
CONTEXT_STEP = 256
"""llama.cpp rounds the context up to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that `verify` can run."""

    name: str
    format: Format
    packages: Mapping[str, str]
    """Modules that bring it, any of them, each with its pip command."""
    chooses: Literal["length", "capacity", "long"]
    """What makes a sequence long: its length in each forward, the window the engine was started with, or nothing."""
    temperature: Literal["both", "long", "forced"]
    """Which attention factors it honours: one per side, the long one on both, or none."""

    families: tuple[str, ...] = tuple(FAMILIES)
    """Those it runs with the factors, found by trying each."""
    static_families: tuple[str, ...] = ()
    """Those it runs rightly when both sides are the same."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """By family, what else to know of it there."""

    def is_long(self, factors: RescaleFactors, *, length: int, capacity: int | None) -> bool:
        """Whether it runs a sequence of that length with the long factors."""
        if self.chooses == "length":
            return length > factors.original_length
        return self.chooses == "long" or (capacity is not None and capacity > factors.original_length)

    def fault(self, factors: RescaleFactors, family: str) -> str | None:
        """Why it cannot run a model of this family with these factors, if it cannot."""
        short, long = factors.short_attention_factor, factors.long_attention_factor
        forced = forced_temperature(factors)
        if family in self.static_families:
            if not factors.switches:
                return None
            return f"it runs {family} models by way of transformers: use --profile static-long"
        if family not in self.families:
            return f"it is not known to run {family} models with such factors"
        if self.temperature == "forced" and long != forced:
            profile = "" if short == long else "--profile static-long "  # weights can hold only one temperature
            told = f"it always applies an attention factor of {forced:.4f}, not {long:g}"
            return f"{told}: use {profile}--fold-temperature"
        if self.temperature == "long" and short != long:
            told = f"it knows one attention factor, and applies {long:g} to short sequences too, not {short:g}"
            return f"{told}: use longrope2.load, or --profile static-long"
        return None

    def notes(self, factors: RescaleFactors, family: str) -> list[str]:
        """What the model card adds to its row."""
        fault = self.fault(factors, family)
        found = [self.remarks.get(family), fault and f"but {fault}"]
        return [note for note in found if note]


TRANSFORMERS = Engine(
    name="transformers",
    format="huggingface",
    packages={"transformers": "pip install transformers"},
    chooses="length",
    temperature="long",
    remarks={"gemma3_text": "not with 5.17 to 5.20, which stop in an error"},
)
VLLM = Engine(
    name="vllm",
    format="huggingface",
    packages={"vllm": "pip install vllm"},
    chooses="capacity",
    temperature="both",
    families=(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "phi3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "stablelm",
    ),
    static_families=("glm", "olmo2", "phi", "smollm3", "starcoder2"),
)
MLX = Engine(
    name="mlx",
    format="huggingface",
    packages={"mlx_lm": "pip install mlx-lm"},
    chooses="long",
    temperature="forced",
    families=("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "olmo2", "granite", "smollm3"),
)
LLAMA_CPP = Engine(
    name="llama.cpp",
    format="gguf",
    packages={"xllamacpp": "pip install xllamacpp", "llama_cpp": "pip install llama-cpp-python"},
    chooses="capacity",
    temperature="both",  # the short one by --yarn-attn-factor
)
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (TRANSFORMERS, VLLM, MLX, LLAMA_CPP)}


def forced_temperature(factors: RescaleFactors) -> float:
    """The attention factor of engines that read none: √(1 + ln s/ln L_train)."""
    return longrope_temperature(factors.extension_ratio, factors.original_length)


def short_context(factors: RescaleFactors) -> int:
    """The largest -c for which llama.cpp still uses the short factors; 0 if there is none."""
    return factors.original_length // CONTEXT_STEP * CONTEXT_STEP


def short_temperature_flag(factors: RescaleFactors) -> str:
    """What llama.cpp needs on the command line to run short sequences at their own temperature."""
    ratio = factors.short_attention_factor / factors.long_attention_factor
    return "" if ratio == 1 else f" --yarn-attn-factor {ratio:.6g}"


def guidance(factors: RescaleFactors, family: str, where: str, format: Format) -> list[tuple[str, str, str]]:
    """For each engine: (name, command, what it does at the boundary) with these factors in this family."""
    if format == "gguf":
        return [_llama_cpp(factors, where, *mode) for mode in _llama_cpp_modes(factors)]
    original, target = f"{factors.original_length:,}", f"{factors.target_length:,}"
    static = not factors.switches
    always = f"long factors in every sequence, up to {target} tokens"
    rows = [
        (
            "longrope2",
            f'longrope2.load("{where}").generate(...)',
            always if static else f"exact: switches each row at {original} tokens and recomputes its cache",
        ),
        (
            "transformers",
            f'AutoModelForCausalLM.from_pretrained("{where}")',
            always
            if static
            else f"short up to {original} tokens, long beyond, for a prompt run at once; wrong when a cache crosses "
            f"{original} tokens while generating, when short and long rows share a batch, and in chunked prefill",
        ),
        ("vLLM", f"vllm serve {where} --max-model-len {factors.target_length}", always),
    ]
    if not static:
        rows.append(("vLLM", f"vllm serve {where}", f"short factors, window of {original} tokens"))
    rows += [
        (
            "SGLang",
            f"python -m sglang.launch_server --model-path {where} --context-length {factors.target_length}",
            always if static else "do not: one long sequence makes the whole batch long, and caches are not recomputed",
        ),
        ("TGI", f"text-generation-launcher --model-id {where}", _tgi(factors, static=static)),
        ("mlx-lm", f"mlx_lm.generate --model {where} --prompt ...", "long factors in every sequence"),
    ]
    tried = {"transformers": TRANSFORMERS, "vLLM": VLLM, "mlx-lm": MLX}
    notes = {name: engine.notes(factors, family) for name, engine in tried.items()}
    return [(name, command, "; ".join([text, *notes.get(name, ())])) for name, command, text in rows]


def _tgi(factors: RescaleFactors, *, static: bool) -> str:
    if not static:
        return "do not: it rotates the first tokens of one sequence by short factors and the rest by long ones"
    if factors.long_attention_factor != 1:
        return "do not: it multiplies frequencies by the attention factor, which is right for 1 alone"
    key = f'"original_max_position_embeddings": {factors.original_length}'
    return f"long factors in every sequence, once {key} is added to config.json"


def _llama_cpp_modes(factors: RescaleFactors) -> list[tuple[int, bool]]:
    """Contexts worth starting it with, and whether each is long."""
    modes = [(factors.target_length, True)]
    if factors.switches and short_context(factors):
        modes.append((short_context(factors), False))
    return modes


def _llama_cpp(factors: RescaleFactors, where: str, context: int, long: bool) -> tuple[str, str, str]:
    flag = "" if long else short_temperature_flag(factors)
    text = f"{'long' if long else 'short'} factors in every sequence, up to {context:,} tokens"
    return "llama.cpp", f"llama-server -m {where} -c {context} --parallel 1{flag}", text
