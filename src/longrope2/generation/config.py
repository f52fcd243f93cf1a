"""What decides a generated text besides the model, its factors and the prompt."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from longrope2.errors import LongRopeError, all_problems
from longrope2.options import FileName, Length, broken_limits, option, wrong_types

Strategy = Literal["recompute", "shadow", "pin"]
LEAST_TEMPERATURE = 1e-6
"""Logits divided by much less are no longer finite."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; greedy unless a temperature or top_p is given."""

    temperature: float | None = option(None, "Sample at this temperature; default: greedy.", metavar="T")
    top_p: float | None = option(
        None, "Sample among the likeliest tokens of this total probability.", metavar="P", above=0, most=1
    )
    seed: int = option(0, "Seed for sampling.", least=0, most=(1 << 63) - 1)

    def options(self) -> dict[str, Any]:
        """For transformers; also where a model's own generation config says otherwise."""
        if self.temperature == 0 or (self.temperature is None and self.top_p is None):
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}


@dataclass(frozen=True, kw_only=True)
class WritingConfig:
    """What `longrope2 generate` and `longrope2 chat` share."""

    max_new_tokens: Length | None = option(None, "Default: 256, or what the window leaves room for.", least=1)
    strategy: Strategy | None = option(
        None,
        "At the switch: recompute the cache, build it ahead in small parts, or use one RoPE for the whole text.",
        flag="--switch",
        usual="recompute",
    )
    switch_length: Length | None = option(
        None, "Tokens above which the long RoPE is used; default: the model's own, or its trained window."
    )
    sampling: Sampling = option(Sampling)
    allow_beyond: bool = option(False, "Allow more tokens than the window, with a warning.", flag="--beyond-window")

    def check(self) -> None:
        """Refuse values that nothing can be generated with."""
        found = wrong_types(self) or broken_limits(self)
        temperature = self.sampling.temperature
        if not found and temperature and not LEAST_TEMPERATURE <= temperature < math.inf:
            found = [f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}, got {temperature:g}"]
        if found:
            raise LongRopeError(all_problems("generation", found), hint="see `longrope2 generate --help`")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(WritingConfig):
    """The options of `longrope2 generate`."""

    prompt: str | None = option(None, "The prompt itself.", metavar="TEXT")
    prompt_file: FileName | None = option(None, "Read the prompt from a file.")
    stream: bool = option(False, "Print text as it is generated.")
    raw: bool = option(False, "Do not use the chat template.")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(WritingConfig):
    """The options of `longrope2 chat`."""

    system: str | None = option(None, "Instructions that come before the first message.", metavar="TEXT")
