"""What the decode benchmarks share: the LLaMA-3-8B shape or the tiny model, and a clock for every new token."""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import arguments
from shapes import in_bfloat16, llama3_8b
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from longrope2.factors import RescaleFactors
from longrope2.families import read_config
from longrope2.methods import rescale
from longrope2.models import load


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: one model, its switch, and how far to go on either side of it."""

    suffix: str
    clock: str
    factors: RescaleFactors
    shadow_chunk: int
    """Tokens run ahead with a step: about what costs as much as the step itself."""

    @property
    def switch_length(self) -> int:
        return self.factors.original_length

    @property
    def shadow_steps(self) -> int:
        """Steps that building the long cache takes."""
        return -(-self.switch_length // self.shadow_chunk)


class Clock(BaseStreamer):
    """Notes when the prompt went in and when each token came out; transformers waits for the device first.

    On the CPU, with one thread, it reads the time of this process: that of the wall on a machine with nothing else
    to do, and not disturbed where there is.
    """

    def __init__(self, device: torch.device) -> None:
        self._now = time.process_time if device.type == "cpu" else time.perf_counter
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(self._now())

    def end(self) -> None:
        pass


def decode_arguments(description: str | None) -> argparse.ArgumentParser:
    parser = arguments(description)
    parser.add_argument("--tiny", action="store_true", help="the tiny model on the CPU instead of an 8B shape")
    parser.add_argument("--repeats", type=int, help="default: 3, for the tiny model 5")
    parser.add_argument("--shadow-chunk", type=int, help="default: 128, for the tiny model 8")
    return parser


def num_repeats(options: argparse.Namespace) -> int:
    return options.repeats or (5 if options.tiny else 3)


def build(options: argparse.Namespace) -> tuple[Any, Setting]:
    """A model, the same one at every call, and its setting."""
    if options.tiny:
        torch.set_num_threads(1)  # the model is so small that two would mostly wait for each other
        loaded = load("tiny", device="cpu")
        factors = rescale("yarn", loaded.info.rope, 4096)
        return loaded.model, Setting(
            suffix="tiny-cpu", clock="CPU time of one thread", factors=factors, shadow_chunk=options.shadow_chunk or 8
        )
    model = in_bfloat16(llama3_8b)
    factors = rescale("yarn", read_config(model.config.to_dict()).rope, 131_072)
    return model, Setting(suffix="8b", clock="wall", factors=factors, shadow_chunk=options.shadow_chunk or 128)


def prompt_of(model: Any, length: int) -> Tensor:
    """The same random tokens at every call."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, model.config.vocab_size, (1, length), generator=generator).to(model.device)


def seconds_per_token(model: Any, prompt: Tensor, new: int, **options: Any) -> tuple[list[float], Any]:
    """What each new token took, the first one with its prompt; and the output of generate."""
    clock = Clock(model.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
        return_dict_in_generate=True,
        **options,
    )
    return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)], output


def cache_gib(cache: Any) -> float:
    """Memory of the keys and values in a cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**30
