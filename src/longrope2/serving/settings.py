"""Whether a vLLM engine needs the switch, at which length, and what it must not be combined with.

vLLM's own configuration objects are read by attribute, so that nothing here imports vLLM.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import longrope2
from longrope2.errors import LongRopeError, all_problems
from longrope2.families import LONG_MSCALE, SHORT_MSCALE
from longrope2.generation.saved import OWN_KEY, SWITCH_LENGTH, read_switch_length

SWITCH = "switch"
OPTIONS = (SWITCH, SWITCH_LENGTH)
RESOLVED = f"{OWN_KEY}.{SWITCH}"
"""Key of vLLM's `additional_config` under which every process of an engine finds what the first has decided. vLLM puts
this dictionary into the key of its cache of compiled graphs, so that graphs with and without the switch never mix."""
SCHEDULERS = {
    False: "longrope2.serving.vllm_scheduler.SwitchScheduler",
    True: "longrope2.serving.vllm_scheduler.SwitchAsyncScheduler",
}
"""By whether scheduling is asynchronous."""
WORKER = "longrope2.serving.vllm_worker.SwitchWorker"
WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker", WORKER)
"""Those of vLLM that ours can stand for, and ours."""
TURN_OFF = f'--additional-config \'{{"{OWN_KEY}": {{"{SWITCH}": false}}}}\''
WITHOUT = f"or start without the switch, with one RoPE for all lengths: {TURN_OFF}"


@dataclass(frozen=True, kw_only=True)
class SwitchSettings:
    """What an engine that switches must know."""

    switch_length: int
    """Tokens up to which a request is short."""
    original_length: int
    """Tokens of the original window, which vLLM's table of short angles covers."""
    has_other_layers: bool = False
    """Whether the config gives other layers, as those with a sliding window, a RoPE of their own."""

    @property
    def short_rows(self) -> int:
        """Rows of the table of angles that belong to the short side."""
        return max(self.switch_length, self.original_length)

    def to_json(self) -> dict[str, Any]:
        """What the other processes of the engine are sent, with the version of the code that has decided it."""
        return {**asdict(self), "version": longrope2.__version__}


def settings_of(vllm_config: Any) -> SwitchSettings | None:
    """What an engine's first process has decided; None where there is no switch."""
    resolved = _additional(vllm_config).get(RESOLVED)
    if resolved is None:
        return None
    return SwitchSettings(**{entry.name: resolved[entry.name] for entry in fields(SwitchSettings)})


def resolve(vllm_config: Any) -> SwitchSettings | None:
    """Whether an engine has to switch; refuses wrong options."""
    model = vllm_config.model_config
    if model is None or getattr(model, "is_submodel_config", False):
        return None
    every = rope_parameters(model.hf_text_config)
    ropes = [rope for rope in every if _has_two_sides(rope)]
    if not ropes:
        return None
    options = _options(vllm_config)
    if options.get(SWITCH) is False:
        return None
    originals = {int(rope["original_max_position_embeddings"]) for rope in ropes}
    if len(originals) > 1:
        raise LongRopeError(f"layers with different original windows {sorted(originals)} cannot switch", hint=WITHOUT)
    original = originals.pop()
    length = options.get(SWITCH_LENGTH) or read_switch_length(model.hf_text_config.to_dict()) or original
    # vLLM itself takes the short side of a window up to the original one, and the long side of any other.
    if model.max_model_len <= min(length, original):
        return None
    return SwitchSettings(switch_length=length, original_length=original, has_other_layers=len(ropes) < len(every))


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """The RoPEs of a transformers config: one, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]


def _has_two_sides(rope: Mapping[str, Any]) -> bool:
    if rope.get("rope_type") != "longrope":
        return False
    factors = list(rope["short_factor"]), list(rope["long_factor"])
    return factors[0] != factors[1] or rope.get(SHORT_MSCALE) != rope.get(LONG_MSCALE)


def _additional(vllm_config: Any) -> Mapping[str, Any]:
    found = vllm_config.additional_config
    return found if isinstance(found, Mapping) else {}


def _options(vllm_config: Any) -> Mapping[str, Any]:
    """What the user says under our key of `--additional-config`."""
    options = _additional(vllm_config).get(OWN_KEY, {})
    where, hint = f"{OWN_KEY} in --additional-config", f'for example {{"{OWN_KEY}": {{"{SWITCH_LENGTH}": 6144}}}}'
    if not isinstance(options, Mapping):
        raise LongRopeError(f"{where} must be an object with {' or '.join(OPTIONS)}, got {options!r}", hint=hint)
    problems = [f"{name!r} is not known, expected {' or '.join(OPTIONS)}" for name in options if name not in OPTIONS]
    if not isinstance(options.get(SWITCH, True), bool):
        problems.append(f"{SWITCH} must be true or false, got {options[SWITCH]!r}")
    length = options.get(SWITCH_LENGTH, 1)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        problems.append(f"{SWITCH_LENGTH} must be a positive number of tokens, got {length!r}")
    if problems:
        raise LongRopeError(all_problems(where, problems), hint=hint)
    return options


def refuse_unsupported(vllm_config: Any, settings: SwitchSettings) -> None:
    """Refuse everything with which answers could be wrong, or for which nobody has shown that they are right."""
    if problems := list(_problems(vllm_config, settings)):
        raise LongRopeError(
            all_problems("longrope2 cannot switch RoPE for each request in this engine", problems),
            hint=f"leave that out, {WITHOUT}",
        )


def _problems(vllm_config: Any, settings: SwitchSettings) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ropes = rope_parameters(model.hf_text_config)
    if not all(_has_two_sides(rope) for rope in ropes if rope.get("rope_type") == "longrope"):
        yield "a model with longrope factors for one side in some layers, for two in others, is not supported"
    used = {
        "speculative decoding": vllm_config.speculative_config,
        "a KV connector (--kv-transfer-config, --kv-offloading-size)": vllm_config.kv_transfer_config,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "micro-batches (--enable-dbo)": parallel.use_ubatching,
        "a multi-modal model": model.is_multimodal_model,
        "an encoder-decoder model": model.is_encoder_decoder,
        "a model with state-space layers": model.is_hybrid,
        "a pooling model": model.runner_type != "generate",
        "a diffusion model": getattr(vllm_config, "diffusion_config", None),
        "M-RoPE": model.uses_mrope,
    }
    yield from (f"{name} is not supported" for name, found in used.items() if found)
    if model.using_transformers_backend():
        yield "vLLM runs this model through transformers, which has one RoPE for a batch: export it with static-long"
    window = model.hf_text_config.max_position_embeddings
    if settings.switch_length > window:
        yield f"a switch length of {settings.switch_length:,} exceeds the model's window of {window:,} tokens"
    if model.max_model_len > window:
        yield f"--max-model-len {model.max_model_len:,} exceeds the model's window of {window:,} tokens"
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler is not None and scheduler not in SCHEDULERS.values():
        yield f"--scheduler-cls {scheduler} stands where the plugin's own must"
    if parallel.worker_cls not in WORKERS:
        yield f"--worker-cls {parallel.worker_cls} stands where the plugin's own must"
    if not isinstance(vllm_config.additional_config, dict):
        yield f"additional_config must be a dictionary, got {type(vllm_config.additional_config).__name__}"


def refuse_layers(found: str) -> None:
    """For a model whose layers turn out to be others than its config promises."""
    raise LongRopeError(
        f"longrope2 cannot switch RoPE for each request in this model: {found}",
        hint=f"export it with --profile static-long, {WITHOUT}",
    )


def check_methods(owner: Any, expected: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a vLLM whose methods, those that we override or call, have other first parameters than we expect."""
    problems = []
    for name, wanted in expected.items():
        method = getattr(owner, name, None)
        found = tuple(inspect.signature(method).parameters) if callable(method) else None
        if found is None or found[: len(wanted)] != wanted:
            problems.append(f"{name} {'is missing' if found is None else f'takes {found}'}, expected {wanted}")
    if problems:
        raise LongRopeError(
            all_problems(
                "longrope2 cannot switch RoPE for each request in this vLLM, which is not as released", problems
            ),
            hint=f"install a release of vLLM, {WITHOUT}",
        )


def apply(vllm_config: Any, settings: SwitchSettings) -> None:
    """Name our scheduler and worker, which vLLM imports by name, and leave them the settings."""
    vllm_config.additional_config[RESOLVED] = settings.to_json()
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    vllm_config.parallel_config.worker_cls = WORKER
