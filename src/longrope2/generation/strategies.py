"""One call of `generate`: how long every row is, when it crosses the switch, and what each strategy does then."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList

from longrope2.attention import our_attention
from longrope2.console import warn
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.families import attends_simply
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
from longrope2.generation.config import Strategy
from longrope2.pieces import READ_TOKENS
from longrope2.rotary import RescaledRotary, is_long

# Not the model's own method: Phi-3's drops its cache by a rule that counts padding.
step_inputs: Any = GenerationMixin.prepare_inputs_for_generation


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
    ended: "EndedRows | None" = None
    """Which rows of the `generate` under way have ended."""
    run: "Run | None" = None
    """The call of `generate` that is under way."""
    extra_tokens: list[int] = field(default_factory=list)
    """For each new token of the latest `generate`: how many tokens of a row were run again before it, for the
    switch. The first one comes from the prompt."""

    @property
    def factors(self) -> RescaleFactors:
        """What the model rotates by."""
        return self.rotary.factors

    def is_long(self, lengths: Tensor) -> Tensor:
        """The switch rule, with this model's switch length."""
        return is_long(lengths, self.factors, self.switch_length)

    def start(self, *, allow_beyond: bool) -> None:
        """A call of `generate` begins; its run follows once the prompt is known."""
        self.run, self.ended, self.extra_tokens, self.allow_beyond = None, None, [], allow_beyond

    def end(self) -> None:
        """It has ended, well or not: plain forwards choose for themselves again."""
        self.run = self.ended = self.rotary.long_rows = None


class EndedRows(StoppingCriteriaList):
    """transformers' criteria, which also remember the rows that have ended and go on as padding."""

    rows: Tensor | None = None
    """[batch] bool, on the device; None before the first token."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """As in transformers: the rows that end with their last token."""
        done = super().__call__(input_ids, scores, **kwargs)
        self.rows = done if self.rows is None else self.rows | done
        return done

    def among(self, rows: list[int]) -> set[int]:
        """Those of `rows` that have ended; waits for the device, so it is asked only before extra work."""
        # Without an end token transformers lets rows go on that another criterion has stopped.
        if self.rows is None or not any(hasattr(criterion, "eos_token_id") for criterion in self):
            return set()
        ended = self.rows.tolist()
        return {row for row in rows if ended[row]}


class Run:
    """The rows of one `generate`: lengths on the host, so that no decode step waits for the device."""

    def __init__(self, model: Any, input_ids: Tensor, mask: Tensor | None, config: Any) -> None:
        """`config`: transformers' generation config, resolved."""
        self.model = model
        self.switch: Switch = model.longrope2
        self.chunk: int | None = config.prefill_chunk_size
        self.has_beams = config.num_beams > 1
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
        self.crossings = {} if self.switch.strategy == "pin" else self._crossings()
        self.schedule = Schedule(self.crossings if self.switch.strategy == "shadow" else {}, self.switch.shadow_chunk)
        # One tensor for the whole run: a compiled decode step keeps reading it.
        self._device_rows = self.long_rows.to(model.device)
        self.switch.rotary.long_rows = self._device_rows

    def lengths(self, columns: int) -> Tensor:
        """Tokens each row attends to when the batch is this wide."""
        return self.prompt_lengths + (columns - self.prompt_columns)

    def _crossings(self) -> dict[int, list[int]]:
        """The rows that cross within this call, by the width of the batch when they do."""
        crossings: dict[int, list[int]] = {}
        for row, length in enumerate(self.prompt_lengths.tolist()):
            columns = self.prompt_columns + self.switch.switch_length + 1 - length
            if not self.long_rows[row] and columns <= self.last_columns:
                crossings.setdefault(columns, []).append(row)
        return crossings

    def take(self, cache: Any, input_ids: Tensor) -> None:
        """Continue an earlier cache if it holds this conversation on the right side; else refill it."""
        self.cache, filled = cache, noted(cache)
        tokens = without_padding(input_ids, self.prompt_mask)
        if num_cached(cache) and not (filled and filled.serves(tokens, self.long_rows, num_cached(cache))):
            empty(cache)
        note(cache, None)  # unknown until this call has ended well

    def note_cache(self, sequences: Tensor) -> None:
        """At the end, write on the cache what is in it."""
        if self.cache is None or self.has_beams:
            return
        mask = None
        if self.prompt_mask is not None:
            new = sequences.shape[1] - self.prompt_columns
            mask = torch.nn.functional.pad(self.prompt_mask.long(), (0, new), value=1)
        tokens = without_padding(sequences, mask)[:, : num_cached(self.cache)]
        note(self.cache, Filled(tokens=tokens.clone(), long_rows=self.long_rows))

    def advance(
        self,
        forward: Any,
        cache: Any,
        input_ids: Tensor,
        start: int,
        stop: int,
        *,
        chunk: int | None = None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        **inputs: Any,
    ) -> Any:
        """Run the columns from `start`, the end of the cache, to `stop`, in chunks; returns the last outputs."""
        outputs = None
        attention: AbstractContextManager[None] = nullcontext()
        if chunk is None and stop - start > READ_TOKENS and _needs_no_mask(self.model, cache, attention_mask):
            chunk, attention = READ_TOKENS, our_attention(self.model)
        with attention:
            while start < stop:
                end = stop if chunk is None else min(start + chunk, stop)
                outputs = forward(
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

    def before_token(self, input_ids: Tensor, cache: Any, **inputs: Any) -> None:
        """Make the cache fit the next forward: `input_ids` is the whole batch, its last column not yet run.

        Called for the prompt too, once its columns have all been run: `shadow` may have to begin with it.
        """
        extra = 0
        if self.switch.strategy == "shadow" and cache is not None:
            extra = self._grow_shadows(input_ids, cache, **inputs)
        elif rows := self._going_on(self.crossings.get(input_ids.shape[1], [])):
            if cache is not None:
                extra = self._recompute(rows, input_ids, cache, **inputs)
            self._turn_long(rows)
        self.switch.extra_tokens.append(extra)

    def _turn_long(self, rows: list[int]) -> None:
        self.long_rows[rows] = True
        self._device_rows.copy_(self.long_rows)

    def _going_on(self, rows: list[int]) -> list[int]:
        """Those of `rows` that have not ended; what follows in the others is padding."""
        ended = self.switch.ended
        if not rows or ended is None or self.has_beams or len(self.long_rows) == 1:  # a lone row ends the call
            return rows
        gone = ended.among(rows)
        return [row for row in rows if row not in gone]

    def _recompute(self, rows: list[int], input_ids: Tensor, cache: Any, **inputs: Any) -> int:
        """The paper's way: run the crossing rows again, all at once."""
        stop = input_ids.shape[1] - 1
        if len(rows) == len(input_ids):
            empty(cache)  # one cache in memory, not two
            self._run_long(rows, cache, input_ids, 0, stop, **inputs)
        else:
            fresh = blank_like(cache)
            self._run_long(rows, fresh, input_ids, 0, stop, **inputs)
            replace_rows(cache, rows, fresh)
        return stop

    def _grow_shadows(self, input_ids: Tensor, cache: Any, **inputs: Any) -> int:
        """Run what is due of the caches built ahead, and swap in those whose rows cross now."""
        columns, extra = input_ids.shape[1], 0
        for shadow, stop in self.schedule.due(columns):
            if not self._going_on(shadow.rows):
                self.schedule.drop(shadow)
                continue
            if shadow.cache is None:
                shadow.cache = blank_like(cache)
            self._run_long(shadow.rows, shadow.cache, input_ids, shadow.done, stop, **inputs)
            extra += stop - shadow.done
            shadow.done = stop
            if shadow.crossing == columns:
                replace_rows(cache, shadow.rows, shadow.cache)
                self._turn_long(shadow.rows)
        return extra

    def _run_long(
        self,
        rows: list[int],
        cache: Any,
        input_ids: Tensor,
        start: int,
        stop: int,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor,
    ) -> None:
        def chosen(tensor: Tensor) -> Tensor:
            # All rows are the common case, and choosing by index makes the host wait for the device.
            return tensor if len(rows) == len(input_ids) or len(tensor) == 1 else tensor[rows]

        rotary = self.switch.rotary
        rotary.long_rows = True
        try:
            self.advance(
                self.model.base_model,  # logits are not needed
                cache,
                chosen(input_ids),
                start,
                stop,
                chunk=self.chunk,
                attention_mask=None if attention_mask is None else chosen(attention_mask),
                position_ids=chosen(position_ids),
                use_cache=True,
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


def _needs_no_mask(model: Any, cache: Any, mask: Tensor | None) -> bool:
    """Whether our attention can take the place of the model's: no padding, and a cache that holds nothing else."""
    dynamic = cache is not None and all(type(layer).__name__.startswith("Dynamic") for layer in cache.layers)
    return dynamic and attends_simply(model.config) and (mask is None or bool(mask.all()))


# When the long cache of a row that is about to cross gets built: in chunks, as late as possible, never late.


@dataclass(kw_only=True)
class Shadow:
    """A long cache under construction, for rows that cross together."""

    rows: list[int]
    crossing: int
    """The width of the batch at which they cross; the cache must then hold one column less."""
    done: int = 0
    """Columns in it so far: counted here, since a static cache keeps its count on the device."""
    cache: Any = None
    """None until its first chunk."""

    def chunks_left(self, chunk: int) -> int:
        """Forwards it still takes."""
        return math.ceil((self.crossing - 1 - self.done) / chunk)


class Schedule:
    """Which columns to run again with which step, so that a step runs one chunk of one cache.

    Earliest crossing first, and nothing before it must be: a row may end before it crosses. What a prompt
    leaves too few steps for is run with the prompt, where a reader waits anyway. Several chunks meet in a step
    only if rows cross within a few tokens of each other, since their last tokens are not known before.
    """

    def __init__(self, crossings: Mapping[int, list[int]], chunk: int) -> None:
        """`crossings`: rows by the width of the batch at which they cross."""
        self._chunk = chunk
        self._coming = [Shadow(rows=rows, crossing=crossing) for crossing, rows in sorted(crossings.items())]
        self._wake_up()

    def due(self, columns: int) -> Iterator[tuple[Shadow, int]]:
        """For a batch this wide: caches to grow now, and the column to grow each to; those that cross, finished.

        The caller sets `done`, and drops those whose rows have ended.
        """
        if columns < self._wake:
            return
        chunks = columns - self._wake + 1
        for shadow in tuple(self._coming):
            stop = self._stop(shadow, columns, chunks)
            chunks -= math.ceil((stop - shadow.done) / self._chunk)
            if shadow.crossing == columns:
                self._coming.remove(shadow)
                yield shadow, stop
            elif stop > shadow.done:
                yield shadow, stop
        self._wake_up()

    def _stop(self, shadow: Shadow, columns: int, chunks: int) -> int:
        """How far a cache can be grown by this many chunks, of tokens that are known; whole chunks but the last."""
        end = shadow.crossing - 1
        if shadow.crossing == columns:
            return end
        stop = min(shadow.done + max(chunks, 0) * self._chunk, end, columns)
        return stop if stop == end else stop - (stop - shadow.done) % self._chunk

    def drop(self, shadow: Shadow) -> None:
        """Forget a cache that is no longer needed."""
        shadow.cache = None
        if shadow in self._coming:
            self._coming.remove(shadow)

    def _wake_up(self) -> None:
        """Find the width from which on a chunk a step only just suffices."""
        self._wake = sys.maxsize
        chunks = 0
        for shadow in self._coming:
            chunks += shadow.chunks_left(self._chunk)
            # A chunk with each step from here to the crossing, that one included. A finished cache waits for it.
            self._wake = min(self._wake, shadow.crossing - max(chunks, 1) + 1)
