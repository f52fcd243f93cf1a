"""Small exports, engines of vLLM that run them, and what every token's log-probabilities should have been."""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conftest import family_model
from longrope2 import export_model
from longrope2.export.reference import Reference
from longrope2.generation.saved import store_switch_length
from longrope2.rotary import rescaled
from test_rotary import make_factors

ORIGINAL, WINDOW, VOCABULARY = 64, 512, 128
BLOCK = 32
"""Tokens of a block of the cache: the fewest that vLLM takes on a CPU."""
TWO_TEMPERATURES = {"short_attention_factor": 1.0, "long_attention_factor": 1.2}
EXACT = 1e-3
"""Nats. The models' own rounding comes to 2e-4 and any fault to several."""
OFF = {"additional_config": {"longrope2": {"switch": False}}}
"""Plain vLLM."""


def export_family(folder: Path, family: str = "llama", *, switch_length: int | None = None, **changes: Any) -> Path:
    """A dual export of a random model, whose sides differ in every dimension and in temperature."""
    # vLLM's attention on a CPU takes no smaller heads.
    shape = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": ORIGINAL, "vocab_size": VOCABULARY}
    model = family_model(family, **{**shape, **changes})
    model.save_pretrained(folder / "base")
    factors = make_factors(model, original_length=ORIGINAL, target_length=WINDOW, **TWO_TEMPERATURES)
    export_model(str(folder / "base"), folder / "dual", factors=factors, profile="dual")
    shutil.rmtree(folder / "base")
    if switch_length is not None:
        store_switch_length(folder / "dual", switch_length)
    return folder / "dual"


@contextmanager
def allow_async() -> Iterator[None]:
    """vLLM schedules synchronously on a CPU, where nothing is gained by the other way; it can do both, if it is let."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def update_all_but_that(vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(update_all_but_that)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = update


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """vLLM with blocks and batches so small that everything happens: chunks, mixed batches, full caches."""
    import vllm

    torch.set_num_threads(1)  # of which a model so small makes the best use
    defaults = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": WINDOW, "seed": 0, "max_num_seqs": 8,
        "max_num_batched_tokens": 48, "enforce_eager": True, "block_size": BLOCK, "max_logprobs": VOCABULARY,
        "kv_cache_memory_bytes": 1 << 27, "disable_log_stats": False,
    }  # fmt: skip
    here = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    defaults |= {"distributed_executor_backend": "uni"} if here else {}
    with allow_async() if options.get("async_scheduling") else nullcontext():
        running = vllm.LLM(model=str(model), **{**defaults, **options})
    try:
        yield running
    finally:
        running.llm_engine.engine_core.shutdown()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    prompt: list[int]
    new_tokens: int
    options: dict[str, Any] = field(default_factory=dict)


def parameters_of(one: Ask, **options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    common = {"temperature": 1.0, "ignore_eos": True, "logprobs": VOCABULARY, "detokenize": False}
    common["output_kind"] = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{**common, "max_tokens": one.new_tokens, **options, **one.options})


def ask(running: Any, asks: Sequence[Ask], **options: Any) -> list[Any]:
    """Answers with the log-probabilities of all tokens at every step."""
    prompts = [{"prompt_token_ids": one.prompt} for one in asks]
    return running.generate(prompts, [parameters_of(one) for one in asks], use_tqdm=False, **options)


def ask_one_by_one(
    running: Any, asks: Sequence[Ask], draw: random.Random, after_step: Callable[[Any], None] = lambda engine: None
) -> dict[str, Any]:
    """The same for requests that come at random times, each under its number."""
    engine, coming, found = running.llm_engine, list(enumerate(asks)), {}
    while coming or engine.has_unfinished_requests():
        while coming and draw.random() < 0.3:
            number, one = coming.pop(0)
            engine.add_request(str(number), {"prompt_token_ids": one.prompt}, parameters_of(one))
        found |= {output.request_id: output for output in engine.step() if output.finished}
        after_step(engine)
    return found


class Oracle:
    """Our own forward of an export: uncached, one sequence at a time, in float32."""

    def __init__(self, folder: Path, switch_length: int | None = None) -> None:
        reference = Reference(folder)
        self.model, self._factors = reference.model, reference.factors
        self.switch_length = switch_length or reference.switch_length
        self._known: dict[tuple[tuple[int, ...], bool], torch.Tensor] = {}

    def after_each(self, tokens: list[int], *, long: bool) -> torch.Tensor:
        """Log-probabilities of the next token after each of these, all on one side."""
        key = (tuple(tokens), long)
        if key not in self._known:
            with rescaled(self.model, self._factors, long_rows=long, check=False), torch.no_grad():
                logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            self._known[key] = logits.float().log_softmax(-1)
        return self._known[key]

    def errors(self, output: Any) -> Iterator[tuple[bool, float]]:
        """For each new token: whether it should be of the long side, and how far all probabilities are off."""
        prompt = list(output.prompt_token_ids)
        for answer in output.outputs:
            tokens = prompt + list(answer.token_ids)
            for step, choices in enumerate(answer.logprobs):
                length = len(prompt) + step
                long = length > self.switch_length
                found = torch.tensor([choices[token].logprob for token in range(VOCABULARY)])
                yield long, float((found - self.after_each(tokens[:-1], long=long)[length - 1]).abs().max())

    def prompt_error(self, output: Any) -> float:
        """The same of the tokens of a prompt, which is on one side as a whole."""
        prompt = list(output.prompt_token_ids)
        expected = self.after_each(prompt, long=len(prompt) > self.switch_length)
        steps = enumerate(output.prompt_logprobs[1:])
        return max(abs(c.logprob - float(expected[i, token])) for i, step in steps for token, c in step.items())

    def worst(self, outputs: Sequence[Any]) -> dict[str, float]:
        """The largest error of each side."""
        errors = [error for output in outputs for error in self.errors(output)]
        assert all(error == error for _, error in errors)
        return {
            side: max((error for long, error in errors if long == (side == "long")), default=0.0)
            for side in ("short", "long")
        }

    def is_exact(self, outputs: Sequence[Any]) -> bool:
        """Whether every token of every answer is right."""
        return max(self.worst(outputs).values()) < EXACT


def tokens_of(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


def requests_around(length: int, *, seed: int = 0, window: int = WINDOW) -> list[Ask]:
    """Below the switch, ending and beginning at it, crossing it and above it; half of them with a common prefix."""
    draw = random.Random(seed)
    shared = tokens_of(draw, 4 * length)
    asks = []
    for size in (8, length // 2, length - 20):
        asks.append(Ask(prompt=tokens_of(draw, size), new_tokens=12))
        asks.append(Ask(prompt=shared[:size] + tokens_of(draw, 3), new_tokens=12))
    asks += [Ask(prompt=tokens_of(draw, length - 9), new_tokens=new) for new in (9, 10, 11)]
    for size in (length - 30, length - 2, length, length + 1):
        asks.append(Ask(prompt=tokens_of(draw, size), new_tokens=40))
        asks.append(Ask(prompt=shared[:size], new_tokens=40))
    for size in (2 * length + 5, window - 100):
        asks.append(Ask(prompt=tokens_of(draw, size), new_tokens=20))
        asks.append(Ask(prompt=shared[: min(size, 3 * length)] + tokens_of(draw, 3), new_tokens=20))
    draw.shuffle(asks)
    return asks


def counters(running: Any) -> dict[str, float]:
    """What the engine counts."""
    return {metric.name: metric.value for metric in running.get_metrics() if hasattr(metric, "value")}
