"""`longrope2 generate`: a prompt from anywhere becomes text, with what the switch cost."""

import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer
from transformers.generation import stopping_criteria

from longrope2.chat import user_turn
from longrope2.console import warn
from longrope2.errors import DataError, LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.generation.config import GenerateConfig
from longrope2.generation.saved import carries_factors
from longrope2.generation.strategies import Switch
from longrope2.generation.switch import check_switch_length, load
from longrope2.models import check_factors, describe, load_tokenizer
from longrope2.models import load as load_model

DEFAULT_NEW_TOKENS = 256


class _NoReminder(logging.Filter):
    """transformers reminds of a window that is exceeded; `generate` has warned of it by then."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "friendly reminder" not in record.getMessage()


NO_REMINDER = _NoReminder()


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A text, and how it came about."""

    text: str
    remarks: tuple[str, ...]
    """Times, and what happened at the switch, in words."""
    interrupted: bool
    """Whether the user stopped it."""


class Listener(TextStreamer):
    """Hears every token when it comes: notes the time, and passes text on at once if asked to."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.times: list[float] = []
        """When the prompt went in, and when each new token came out."""
        self._tokens: list[int] = []

    @property
    def text(self) -> str:
        """What was generated so far."""
        return str(self.tokenizer.decode(self._tokens, skip_special_tokens=True))

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one new token a call."""
        if self.times:
            self._tokens += value.tolist()
        self.times.append(time.perf_counter())
        if self._on_text is not None:
            super().put(value)

    def end(self) -> None:
        """Pass on what was kept back until its word was whole."""
        if self._on_text is not None:
            super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on a piece of text, with a newline after the last."""
        assert self._on_text is not None
        self._on_text(text + "\n" * stream_end)


def generate(
    model: str,
    prompt: str,
    config: GenerateConfig,
    *,
    factors_file: Path | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a prompt; `on_text` gets the text piece by piece.

    Everything that can be refused is refused before the weights are loaded.
    """
    config.check()
    strategy, switch_length, allow_beyond = config.strategy, config.switch_length, config.allow_beyond
    factors = None if factors_file is None else RescaleFactors.load(factors_file)
    info = describe(model, original_length=factors.original_length if factors else None)
    if factors is not None:
        check_factors(factors, info)
    has_factors = factors is not None or carries_factors(info)
    if not has_factors and (strategy or switch_length):
        raise LongRopeError(
            f"{model} has no factors, so there is nothing to switch to",
            hint="pass --factors FILE, or omit --switch and --switch-length",
        )
    tokenizer = load_tokenizer(info)
    ids = encode(tokenizer, prompt, raw=config.raw)
    window = info.reading.window if factors is None else factors.target_length
    if switch_length is not None:
        check_switch_length(switch_length, window)
    room = _room(len(ids), config.max_new_tokens, window, allow_beyond=allow_beyond, has_factors=has_factors)
    if not has_factors and len(ids) + room > window:
        warn(f"prompt and new tokens come to {len(ids) + room:,} tokens, {model} is made for {window:,}")

    live = load_model(info).model
    options: dict[str, Any] = config.sampling.options()
    if has_factors:
        live = load(live, factors, switch_length=switch_length, strategy=strategy or "recompute")
        options["allow_beyond"] = allow_beyond
    stopping_criteria.logger.addFilter(NO_REMINDER)
    torch.manual_seed(config.sampling.seed)
    listener = Listener(tokenizer, on_text)
    input_ids = torch.tensor([ids], device=live.device)
    end = live.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    pad = end[0] if isinstance(end, list) else end
    interrupted = False
    try:
        live.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=room,
            streamer=listener,
            eos_token_id=end,
            pad_token_id=0 if pad is None else pad,
            **options,
        )
    except KeyboardInterrupt:
        listener.end()  # what was generated so far is the user's
        interrupted = True
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory at a prompt of {len(ids):,} tokens ({live.dtype} on {live.device})",
            hint="use a shorter prompt, or a GPU with more memory",
        ) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise LongRopeError(
            "the model's logits are not finite, so that nothing can be sampled",
            hint="its weights may be damaged, or too large for this dtype",
        ) from error
    remarks = _remarks(Timing(listener.times), len(ids), room, live.longrope2 if has_factors else None)
    return Generated(text=listener.text, remarks=tuple(remarks), interrupted=interrupted)


def read_prompt(config: GenerateConfig, argument: str | None = None) -> str:
    """The prompt from the one place that was named; `argument` and the file may be '-' for stdin."""
    ways = "give --prompt TEXT, --prompt-file FILE, or - to read stdin"
    if argument not in (None, "-"):
        raise LongRopeError(f"{argument!r} after the model is not understood", hint=ways)
    named = [source for source in (config.prompt, config.prompt_file, argument) if source is not None]
    if len(named) != 1:
        raise LongRopeError("several prompts given" if named else "no prompt given", hint=ways)
    text = _decoded(Path(named[0])) if config.prompt is None else config.prompt
    if not text.strip():
        raise DataError("the prompt is empty", hint=ways)
    return text


def _decoded(file: Path) -> str:
    name = "stdin" if str(file) == "-" else str(file)
    try:
        content = sys.stdin.buffer.read() if name == "stdin" else file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{name}: cannot be read ({error.strerror})", hint="give a text file, --prompt TEXT, or - to read stdin"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DataError(f"{name}: not a text file in UTF-8", hint="a prompt is plain text")
    return text


def encode(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """The prompt as one turn of a chat where the tokenizer has a template for that, else as plain text."""
    if tokenizer.chat_template and not raw:
        return list(tokenizer(user_turn(tokenizer, prompt), add_special_tokens=False, verbose=False).input_ids)
    return list(tokenizer(prompt, verbose=False).input_ids)


def _room(prompt: int, wanted: int | None, window: int, *, allow_beyond: bool, has_factors: bool) -> int:
    """How many new tokens to ask for, or an error if they do not fit the window."""
    left = window - prompt
    if allow_beyond or left >= (wanted or 1):
        return wanted or (DEFAULT_NEW_TOKENS if allow_beyond else min(DEFAULT_NEW_TOKENS, left))
    kind = "extended window" if has_factors else "window"
    hints = [f"--max-new-tokens {left}" if left > 0 else "a shorter prompt"]
    hints += [] if has_factors else ["--factors FILE for a longer window"]
    hints += ["--beyond-window to try all the same"]
    what = f"the prompt has {prompt:,} tokens"
    what += f", and {wanted:,} new ones are asked for" if left > 0 else ""
    raise LongRopeError(f"{what}: more than the {kind} of {window:,}", hint=", or ".join(hints))


@dataclass(frozen=True)
class Timing:
    """When the prompt went in and when each new token came out, in seconds."""

    times: list[float]
    gaps: list[float] = field(init=False)
    """What each new token took; the first one includes reading the prompt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", [b - a for a, b in zip(self.times, self.times[1:], strict=False)])

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, without the prompt; None before the second token."""
        decoding = sum(self.gaps[1:])
        return (len(self.gaps) - 1) / decoding if decoding else None

    def cost(self, extra_tokens: list[int]) -> tuple[float, float, float]:
        """Of the switch: seconds in all, the slowest token with work for it, and a usual token without."""
        decoding = list(zip(self.gaps[1:], extra_tokens[1:], strict=False))
        busy = [gap for gap, extra in decoding if extra]
        usual = statistics.median([gap for gap, extra in decoding if not extra] or [0.0])
        return max(0.0, sum(busy) - usual * len(busy)), max(busy, default=0.0), usual


def _remarks(timing: Timing, prompt: int, room: int, switch: Switch | None) -> Iterator[str]:
    if not timing.gaps:
        return
    speed = timing.tokens_per_second
    yield (
        f"prompt of {prompt:,} tokens, first new one after {timing.gaps[0]:.2f} s; "
        f"{len(timing.gaps):,} new tokens" + ("" if speed is None else f", {speed:.1f} tokens/s")
    )
    if switch is not None:
        yield _switch_note(timing, prompt, room, switch)


def _switch_note(timing: Timing, prompt: int, room: int, switch: Switch) -> str:
    if not switch.factors.switches:
        return "one RoPE at every length: there was nothing to switch"
    limit = f"{switch.switch_length:,} tokens"
    if switch.strategy == "pin":
        side = "long" if prompt + room - 1 > switch.switch_length else "original"  # the last one is never run
        return f"{side} RoPE throughout, pinned by prompt and --max-new-tokens; the switch length is {limit}"
    if prompt > switch.switch_length:
        return f"long RoPE from the start: the prompt is above the switch length of {limit}"
    crossing = switch.switch_length + 1 - prompt  # index of the first new token that long RoPE computed
    if crossing >= len(timing.gaps):
        return f"original RoPE throughout: the switch length of {limit} was not exceeded"
    seconds, slowest, usual = timing.cost(switch.extra_tokens)
    note = (
        f"switched to long RoPE after {limit}, at new token {crossing + 1:,}: {switch.strategy} took "
        f"{seconds:.2f} s; the slowest token {slowest:.3f} s, a usual one {usual:.3f} s"
    )
    with_prompt = switch.extra_tokens[0]
    return note + (f"; {with_prompt:,} tokens were run ahead with the prompt" if with_prompt else "")
