"""`longrope2 generate` and `chat`: a prompt from anywhere becomes text, with what the switch cost."""

import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer
from transformers.generation import stopping_criteria

from longrope2.chat import render_chat, user_turn
from longrope2.console import say, warn
from longrope2.errors import DataError, LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import MOST_BYTES
from longrope2.generation.config import ChatConfig, GenerateConfig, WritingConfig
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
    tokens: tuple[int, ...]
    """Without what ends a text."""
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
        self.tokens: list[int] = []

    @property
    def text(self) -> str:
        """What was generated so far."""
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one new token a call."""
        if self.times:
            self.tokens += value.tolist()
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


class Writer:
    """A model that continues texts. Everything that can be refused is refused before its weights are loaded."""

    def __init__(self, model: str, config: WritingConfig, *, factors_file: Path | None = None) -> None:
        config.check()
        self._config = config
        self._factors = None if factors_file is None else RescaleFactors.load(factors_file)
        self._info = describe(model, original_length=self._factors.original_length if self._factors else None)
        if self._factors is not None:
            check_factors(self._factors, self._info)
        self._has_factors = self._factors is not None or carries_factors(self._info)
        if not self._has_factors and (config.strategy or config.switch_length):
            raise LongRopeError(
                f"{model} has no factors, so there is nothing to switch to",
                hint="pass --factors FILE, or omit --switch and --switch-length",
            )
        self.tokenizer = load_tokenizer(self._info)
        self.window = self._info.reading.window if self._factors is None else self._factors.target_length
        if config.switch_length is not None:
            check_switch_length(config.switch_length, self.window)
        self._cached: tuple[list[int], Any] = [], None
        """The tokens of the last text, and its cache."""

    @cached_property
    def _live(self) -> Any:
        live = load_model(self._info).model
        if self._has_factors:
            strategy, switch_length = self._config.strategy or "recompute", self._config.switch_length
            live = load(live, self._factors, switch_length=switch_length, strategy=strategy)
        torch.manual_seed(self._config.sampling.seed)
        stopping_criteria.logger.addFilter(NO_REMINDER)
        return live

    def room(self, ids: list[int]) -> int:
        """How many new tokens fit after these, or an error if none do."""
        allow, has_factors = self._config.allow_beyond, self._has_factors
        room = _room(len(ids), self._config.max_new_tokens, self.window, allow_beyond=allow, has_factors=has_factors)
        if not has_factors and len(ids) + room > self.window:
            total = f"prompt and new tokens come to {len(ids) + room:,} tokens"
            warn(f"{total}, {self._info.name} is made for {self.window:,}")
        return room

    def write(self, ids: list[int], *, on_text: Callable[[str], None] | None = None) -> Generated:
        """Continue a text; what an earlier call has read of it is not read again."""
        room, live = self.room(ids), self._live
        options: dict[str, Any] = self._config.sampling.options()
        if self._has_factors:
            options["allow_beyond"] = self._config.allow_beyond
        known, cache = self._cached
        if cache is not None and ids[: len(known)] == known and len(known) < len(ids):
            options["past_key_values"] = cache
        self._cached = [], None
        listener = Listener(self.tokenizer, on_text)
        input_ids = torch.tensor([ids], device=live.device)
        end = live.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        ends = end if isinstance(end, list) else [end]
        interrupted = False
        try:
            found = live.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=room,
                streamer=listener,
                eos_token_id=end,
                pad_token_id=0 if ends[0] is None else ends[0],
                return_dict_in_generate=True,
                **options,
            )
            self._cached = found.sequences[0, :-1].tolist(), found.past_key_values  # the last one was never run
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
        remarks = _remarks(Timing(listener.times), len(ids), room, live.longrope2 if self._has_factors else None)
        tokens = listener.tokens
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        return Generated(text=listener.text, tokens=tuple(tokens), remarks=tuple(remarks), interrupted=interrupted)


def generate(
    model: str,
    prompt: str,
    config: GenerateConfig,
    *,
    factors_file: Path | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a prompt; `on_text` gets the text piece by piece."""
    writer = Writer(model, config, factors_file=factors_file)
    return writer.write(encode(writer.tokenizer, prompt, raw=config.raw), on_text=on_text)


class Chat:
    """A conversation with a model, in its own chat template."""

    def __init__(self, model: str, config: ChatConfig, *, factors_file: Path | None = None) -> None:
        self._writer = Writer(model, config, factors_file=factors_file)
        self._system = config.system
        if not self._writer.tokenizer.chat_template:
            raise LongRopeError(
                f"{model} has no chat template: it continues texts, and does not answer",
                hint="use `longrope2 generate`, or an instruction-tuned model",
            )
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self._turns = [{"role": "system", "content": self._system}] if self._system else []
        self._so_far: tuple[str, list[int]] = "", []
        """The chat as text, and the tokens that the model read and wrote, which are not those of the text always."""

    def answer(self, message: str, on_text: Callable[[str], None]) -> Generated:
        """The model's answer to a message; a message that does not fit is not part of the chat."""
        turns = [*self._turns, {"role": "user", "content": message}]
        text = render_chat(self._writer.tokenizer, turns, add_generation_prompt=True)
        known, ids = self._so_far if text.startswith(self._so_far[0]) else ("", [])
        ids = ids + self._writer.tokenizer(text[len(known) :], add_special_tokens=False, verbose=False).input_ids
        found = self._writer.write(ids, on_text=on_text)
        self._turns = [*turns, {"role": "assistant", "content": found.text}]
        self._so_far = text + found.text, [*ids, *found.tokens]
        return found


HELP = "/file PATH adds a text file to your next message, /clear begins again, /exit or Ctrl-D ends"


def run_chat(chat: Chat, lines: Iterable[str], on_text: Callable[[str], None]) -> None:
    """Answer line by line; problems with a line are reported, and the next one is read."""
    attached = ""
    for line in lines:
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return
        try:
            if command == "/clear":
                chat.clear()
                attached = ""
            elif command == "/file":
                attached += _decoded(Path(rest.strip()).expanduser()) + "\n\n"
                say(f"{len(attached):,} characters go with your next message")
            elif command.startswith("/"):
                say(HELP)
            elif command:
                found = chat.answer(attached + line.strip(), on_text)
                attached = ""
                for remark in found.remarks:
                    say(f"[{remark}]")
        except LongRopeError as error:
            say(f"error: {error}")


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
        if name == "stdin":
            content = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{name}: cannot be read ({error.strerror})", hint="give a text file, --prompt TEXT, or - to read stdin"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if len(content) > MOST_BYTES:  # also of a device that has no end
        raise DataError(f"{name}: more than {MOST_BYTES:,} bytes", hint="no model reads that much: give a part of it")
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
