"""One call of `generate`: how long every row is, when it crosses the switch, and the work that takes."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationMixin

from longrope2.console import warn
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.generation.caches import (
    Filled,
    blank_like,
    empty,
    note,
    noted,
    num_cached,
    replace_rows,
    without_padding,
)
from longrope2.rotary import RescaledRotary, is_long

Strategy = Literal["recompute", "shadow", "pin"]
# Not the model's own method: Phi-3's drops its cache by a rule that counts padding.
step_inputs: Any = GenerationMixin.prepare_inputs_for_generation
STRATEGIES: tuple[Strategy, ...] = ("recompute", "shadow", "pin")


@dataclass(kw_only=True)
class Switch:
    """How a model chooses between short and long RoPE; `model.longrope2` of a switching model."""

    rotary: RescaledRotary
    switch_length: int
    """A row is long once it attends to more tokens than this."""
    strategy: Strategy
    """What happens to the cached keys and values of a row that crosses."""
    shadow_chunk: int
    """Tokens per row and decode step that `shadow` spends on the coming cache."""
    allow_beyond: bool = False
    """Whether the `generate` under way may grow beyond the target length."""
    run: "Run | None" = None
    """The call of `generate` that is under way."""
    extra_tokens: list[int] = field(default_factory=list)
    """For each decode step of the latest `generate`: tokens of one row run again for the switch."""

    @property
    def factors(self) -> RescaleFactors:
        """What the model rotates by."""
        return self.rotary.factors

    def is_long(self, lengths: Tensor) -> Tensor:
        """The switch rule, with this model's switch length."""
        return is_long(lengths, self.factors, self.switch_length)

    def start(self, *, allow_beyond: bool) -> None:
        """A call of `generate` begins; its run follows once the prompt is known."""
        self.run, self.extra_tokens, self.allow_beyond = None, [], allow_beyond

    def end(self) -> None:
        """It has ended, well or not: plain forwards choose for themselves again."""
        self.run = self.rotary.long_rows = None


class Run:
    """The rows of one `generate`: lengths on the host, so that no decode step waits for the device."""

    def __init__(self, model: Any, input_ids: Tensor, mask: Tensor | None, config: Any) -> None:
        """`config`: transformers' generation config, resolved."""
        self.model = model
        self.switch: Switch = model.longrope2
        self.chunk: int | None = config.prefill_chunk_size
        self.returns_cache_rows = config.num_beams == 1
        self.prompt_mask = mask
        self.prompt_columns = input_ids.shape[1]
        # The width of the batch at the last forward: the last token is never run.
        self.last_columns: int = config.max_length - 1
        self.cache: Any = None
        self.prompt_lengths = torch.full((len(input_ids),), self.prompt_columns)
        if mask is not None:
            self.prompt_lengths = mask.sum(dim=-1).cpu()
        at_choice = self.last_columns if self.switch.strategy == "pin" else self.prompt_columns
        self.long_rows = self.switch.is_long(self.lengths(at_choice))
        # Long caches under construction, by the width of the batch at which their rows will cross.
        self.shadows: dict[int, Any] = {}
        # One tensor for the whole run: a compiled decode step keeps reading it.
        self._device_rows = self.long_rows.to(model.device)
        self.switch.rotary.long_rows = self._device_rows

    def lengths(self, columns: int) -> Tensor:
        """Tokens each row attends to when the batch is this wide."""
        return self.prompt_lengths + (columns - self.prompt_columns)

    def take(self, cache: Any, input_ids: Tensor) -> None:
        """Go on with a cache from before if it holds this conversation on the right side; else refill it."""
        self.cache, filled = cache, noted(cache)
        tokens = without_padding(input_ids, self.prompt_mask)
        if num_cached(cache) and not (filled and filled.serves(tokens, self.long_rows, num_cached(cache))):
            empty(cache)
        note(cache, None)  # unknown until this call has ended well

    def note_cache(self, sequences: Tensor) -> None:
        """At the end, write on the cache what is in it."""
        if self.cache is None or not self.returns_cache_rows:
            return
        mask = None
        if self.prompt_mask is not None:
            new = sequences.shape[1] - self.prompt_columns
            mask = torch.nn.functional.pad(self.prompt_mask.long(), (0, new), value=1)
        tokens = without_padding(sequences, mask)[:, : num_cached(self.cache)]
        note(self.cache, Filled(tokens=tokens.clone(), long_rows=self.long_rows))

    def advance(
        self,
        cache: Any,
        input_ids: Tensor,
        stop: int,
        *,
        chunk: int | None = None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        **inputs: Any,
    ) -> Any:
        """Run the columns from the end of the cache to `stop`, in chunks; returns the last outputs."""
        start, outputs = num_cached(cache), None
        while start < stop:
            end = stop if chunk is None else min(start + chunk, stop)
            outputs = self.model(
                **step_inputs(
                    self.model,
                    input_ids[:, start:end],
                    past_key_values=cache,
                    attention_mask=None if attention_mask is None else attention_mask[:, :end],
                    position_ids=position_ids[:, start:end],
                    **inputs,
                ),
                return_dict=True,
            )
            start = end
        return outputs

    def before_step(self, input_ids: Tensor, cache: Any, **inputs: Any) -> None:
        """Make the cache fit the next decode step: `input_ids` is the whole batch, its last column not yet run."""
        columns = input_ids.shape[1]
        if self.switch.strategy == "pin":
            return
        long_now = self.switch.is_long(self.lengths(columns))
        crossing = (long_now & ~self.long_rows).nonzero().flatten().tolist()
        extra = 0
        if cache is not None:
            if self.switch.strategy == "shadow":
                extra = self._grow_shadows(columns, input_ids, cache, **inputs)
            elif crossing:
                extra = self._recompute(crossing, input_ids, cache, **inputs)
        if crossing:
            self.long_rows = long_now
            self._device_rows.copy_(long_now)
        self.switch.extra_tokens.append(extra)

    def _recompute(self, rows: list[int], input_ids: Tensor, cache: Any, **inputs: Any) -> int:
        """The paper's way: run the crossing rows again, all at once."""
        stop = input_ids.shape[1] - 1
        if len(rows) == len(input_ids):
            empty(cache)  # one cache in memory, not two
            self._run_long(rows, cache, input_ids, stop, **inputs)
        else:
            fresh = blank_like(cache)
            self._run_long(rows, fresh, input_ids, stop, **inputs)
            replace_rows(cache, rows, fresh)
        return stop

    def _grow_shadows(self, columns: int, input_ids: Tensor, cache: Any, **inputs: Any) -> int:
        """Run a chunk for every row whose switch is near, and swap in the caches of those who cross now."""
        most, chunk = 0, self.switch.shadow_chunk
        for crossing_columns, rows in self._coming(columns).items():
            done = num_cached(self.shadows.get(crossing_columns))
            needed = crossing_columns - 1 - done
            steps_left = crossing_columns - columns + 1  # this step and the one that crosses included
            if needed > (steps_left - 1) * chunk:
                shadow = self.shadows.setdefault(crossing_columns, blank_like(cache))
                # More than a chunk only if the prompt left too few steps; then evenly over those there are.
                amount = min(max(chunk, math.ceil(needed / steps_left)), needed, columns - done)
                self._run_long(rows, shadow, input_ids, done + amount, **inputs)
                most = max(most, amount)
            if crossing_columns == columns:
                replace_rows(cache, rows, self.shadows.pop(columns))
        return most

    def _coming(self, columns: int) -> dict[int, list[int]]:
        """The rows that cross from now on within this call, by the width of the batch when they do."""
        coming: dict[int, list[int]] = {}
        lengths = self.lengths(columns).tolist()
        for row, length in enumerate(lengths):
            crossing_columns = columns + self.switch.switch_length + 1 - length
            if not self.long_rows[row] and crossing_columns <= self.last_columns:
                coming.setdefault(crossing_columns, []).append(row)
        return coming

    def _run_long(
        self,
        rows: list[int],
        cache: Any,
        input_ids: Tensor,
        stop: int,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor,
    ) -> None:
        rotary = self.switch.rotary
        rotary.long_rows = True
        try:
            self.advance(
                cache,
                input_ids[rows],
                stop,
                chunk=self.chunk,
                attention_mask=None if attention_mask is None else attention_mask[rows],
                position_ids=position_ids if len(position_ids) == 1 else position_ids[rows],
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            rotary.long_rows = self._device_rows

    def check_length(self, *, allow_beyond: bool) -> None:
        """Refuse, or with `allow_beyond` only warn about, more tokens than the factors are made for."""
        longest = int(self.lengths(self.last_columns + 1).max())
        target = self.switch.factors.target_length
        if longest <= target:
            return
        message = f"prompt and new tokens come to {longest:,} tokens, the factors are made for {target:,}"
        if not allow_beyond:
            raise LongRopeError(message, hint="lower max_new_tokens, or pass allow_beyond=True")
        warn(message)
