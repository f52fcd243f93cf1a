"""The short/long switch in generation: original RoPE while a row fits the original window, rescaled beyond.

A model gets it for good: its `generate` is transformers' own, with every cache on the right side.
"""

from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from longrope2 import models
from longrope2.console import warn
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.families import read_config
from longrope2.generation.caches import Filled, check_kind, note, noted, num_cached, without_padding
from longrope2.generation.config import Strategy
from longrope2.generation.saved import (
    read_factors,
    read_switch_length,
    warn_of_single_attention_factor,
    write_factors,
)
from longrope2.generation.strategies import EndedRows, Run, Switch, step_inputs
from longrope2.rotary import install

STRATEGIES = get_args(Strategy)
EXACT_MODES = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
}


def load(
    model: Any,
    factors: RescaleFactors | str | Path | None = None,
    *,
    switch_length: int | None = None,
    strategy: Strategy = "recompute",
    shadow_chunk: int = 128,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """A transformers model whose `generate` is exact on both sides of the switch.

    `model` is what `longrope2.models.load` takes, or a live model; `factors` a value, a factors file, or None
    for those in the model's own longrope config, with the switch length saved there. A row is long once it attends
    to more than `switch_length` tokens, by default the original window. When it crosses, the `strategy` "recompute"
    runs it again at once, "shadow" does so ahead, `shadow_chunk` tokens a step, and "pin" keeps one side throughout.
    """
    if isinstance(model, str | Path | models.ModelInfo):
        model = models.load(model, dtype=dtype, device=device).model
    if factors is None:
        config = model.config.to_dict()
        factors = read_factors(read_config(config))
        if switch_length is None:
            switch_length = read_switch_length(config)
    return switching(
        model, RescaleFactors.given(factors), switch_length=switch_length, strategy=strategy, shadow_chunk=shadow_chunk
    )


def switching(
    model: Any,
    factors: RescaleFactors,
    *,
    switch_length: int | None = None,
    strategy: Strategy = "recompute",
    shadow_chunk: int = 128,
) -> Any:
    """Put `factors` into a live model for good, and the switch into its `generate`; returns the model.

    A row is long once it attends to more than `switch_length` tokens, by default the original window. When it
    crosses, `recompute` runs it again at once, `shadow` does so ahead, `shadow_chunk` tokens with each of the
    last steps before, and `pin` chooses a side for the whole call by prompt and max_new_tokens. The model's
    config becomes one with these factors and this switch length, so that `save_pretrained` writes them.
    """
    if strategy not in STRATEGIES:
        raise LongRopeError(f"strategy {strategy!r} is not known", hint=f"choose one of {', '.join(STRATEGIES)}")
    switch_length = factors.original_length if switch_length is None else switch_length
    check_switch_length(switch_length, factors.target_length)
    if switch_length != factors.original_length and not factors.switches:
        warn(f"a switch length of {switch_length:,} changes nothing: these factors are one RoPE for every length")
    if shadow_chunk < 1:
        raise LongRopeError(f"shadow_chunk must be at least 1, got {shadow_chunk}")
    factors.check_fits(read_config(model.config.to_dict(), original_length=factors.original_length).rope)
    if isinstance(model, SwitchingModel):
        rotary = model.longrope2.rotary
        rotary.factors = factors
    else:
        rotary = install(model, factors)
        base: Any = type(model)
        model.__class__ = _switching_class(base)
        model.register_forward_pre_hook(choose_rows, with_kwargs=True)
        model.register_forward_hook(note_rows, with_kwargs=True)
    rotary.switch_length = switch_length
    model.longrope2 = Switch(rotary=rotary, switch_length=switch_length, strategy=strategy, shadow_chunk=shadow_chunk)
    write_factors(model.config, factors, switch_length)
    return model


def check_switch_length(switch_length: int, target_length: int) -> None:
    """Refuse a switch length that no row could have or that leaves none for the long side."""
    if not 1 <= switch_length <= target_length:
        raise LongRopeError(
            f"switch_length must lie from 1 to the target length {target_length}, got {switch_length}",
            hint="omit it to switch at the original window; `longrope2 calibrate` measures a better length",
        )


@cache
def _switching_class(base: Any) -> Any:
    """The model's class with our methods before its own, and its own name, which `save_pretrained` writes."""
    return type(base.__name__, (SwitchingModel, base), {"__module__": base.__module__, "__doc__": base.__doc__})


# The real base is the class of the model, which is known only at run time.
_Model: Any = object


class SwitchingModel(_Model):
    """Mixed in before a transformers model class; see `switching`."""

    longrope2: Switch

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, allow_beyond: bool = False, **kwargs: Any) -> Any:
        """As in transformers, and exact on both sides of the switch.

        `allow_beyond` turns the error about more tokens than the factors are made for into a warning.
        """
        input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        _refuse_inputs(input_ids, kwargs)
        padded = _padding_left(input_ids, kwargs)
        switch = self.longrope2
        switch.start(allow_beyond=allow_beyond)
        try:
            result = super().generate(padded, *args, **kwargs)
            if switch.run is not None:
                sequences = result if isinstance(result, Tensor) else result.sequences
                switch.run.note_cache(sequences)
                if padded is not input_ids:
                    copies = len(sequences) // len(input_ids)
                    sequences[:, : input_ids.shape[1]] = input_ids.repeat_interleave(copies, dim=0)
            return result
        finally:
            switch.end()

    def _validate_generation_mode(self, mode: Any, config: Any, mode_kwargs: Any) -> None:
        if mode not in EXACT_MODES:
            raise LongRopeError(
                f"generation mode '{mode.value}' is not exact across the switch, and therefore refused",
                hint="use greedy search, sampling or beams: no assistant_model, no prompt_lookup_num_tokens",
            )
        if config.num_beams > 1 and self.longrope2.strategy == "shadow":
            raise LongRopeError(
                "beam search moves rows between steps, which a cache built ahead cannot follow",
                hint='use strategy "recompute" for beam search, or num_beams=1',
            )
        if config.guidance_scale not in (None, 1):
            raise LongRopeError(
                "guidance runs the model on a second prompt between steps, which the switch does not follow",
                hint="leave guidance_scale at its default",
            )
        super()._validate_generation_mode(mode, config, mode_kwargs)

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **_: Any) -> Any:
        """The choice looks at the whole prompt; what transformers' own chunks show it is only a part."""
        switch, cache = self.longrope2, model_kwargs.get("past_key_values")
        mask, chunk = model_kwargs.get("attention_mask"), generation_config.prefill_chunk_size
        _refuse_parts(input_ids, mask, cache)
        if cache is None and chunk is not None:
            raise LongRopeError("prefill_chunk_size needs a cache", hint="leave use_cache at its default")
        run = switch.run = Run(self, input_ids, mask, generation_config)
        run.check_length(allow_beyond=switch.allow_beyond)
        if cache is not None:
            check_kind(cache)
            run.take(cache, input_ids)
        start, stop = num_cached(cache), input_ids.shape[1]
        outputs = run.advance(self, cache, input_ids, start, stop, chunk=chunk, **_without_cache(model_kwargs))
        if cache is None and getattr(outputs, "past_key_values", None) is not None:
            check_kind(outputs.past_key_values)  # some families make one of their own
        run.before_token(input_ids, cache, attention_mask=mask, position_ids=model_kwargs["position_ids"])
        return outputs

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Not where a cache moves between devices: torch 2.11 dies of its streams in a compiled step."""
        cache = model_kwargs.get("past_key_values")
        moving = bool(getattr(cache, "offloading", False))
        return not moving and bool(super()._valid_auto_compile_criteria(model_kwargs, generation_config))

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> EndedRows:
        ended = self.longrope2.ended = EndedRows(super()._get_stopping_criteria(*args, **kwargs))
        return ended

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Called before every decode step: the moment to switch."""
        run = self.longrope2.run
        if run is not None:
            run.before_token(
                input_ids,
                kwargs.get("past_key_values"),
                attention_mask=kwargs.get("attention_mask"),
                position_ids=kwargs["position_ids"],
            )
        return step_inputs(self, input_ids, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Refused; `generate_batch` and paged caches come this way."""
        raise LongRopeError(
            "continuous batching is not exact across the switch, and therefore refused",
            hint="use generate() with cache_implementation 'dynamic', 'static', 'offloaded' or 'offloaded_static'",
        )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers: a plain folder whose config carries the factors."""
        warn_of_single_attention_factor(self.longrope2.factors)
        super().save_pretrained(*args, **kwargs)


def _refuse_inputs(input_ids: Any, kwargs: dict[str, Any]) -> None:
    if input_ids is None or kwargs.get("inputs_embeds") is not None:
        raise LongRopeError(
            "generation across the switch needs the tokens themselves, to run them again",
            hint="pass input_ids, not inputs_embeds",
        )
    if kwargs.get("custom_generate") is not None:
        raise LongRopeError(
            "custom_generate brings a decoding loop of its own, which may not be exact across the switch",
            hint="use greedy search, sampling or beams",
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise LongRopeError(
            f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}",
            hint="pass the whole conversation as input_ids, also when past_key_values holds a part of it",
        )


def _refuse_parts(input_ids: Tensor, mask: Tensor | None, cache: Any) -> None:
    if num_cached(cache) >= input_ids.shape[1]:
        raise LongRopeError(
            f"past_key_values holds {num_cached(cache)} tokens, but input_ids has only {input_ids.shape[1]}",
            hint="pass the whole conversation as input_ids; past_key_values saves work, not tokens",
        )
    if mask is not None and not bool(mask[:, -1].all()):
        raise LongRopeError(
            "the prompts end in padding, and no attention_mask was passed to say where they end",
            hint="pass the tokenizer's attention_mask, or pad on the left",
        )


def _padding_left(input_ids: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The rows with all padding moved to their left, where new tokens follow the last real one."""
    mask = kwargs.get("attention_mask")
    if mask is None or not bool((mask[:, 1:] < mask[:, :-1]).any()):
        return input_ids
    order = mask.long().argsort(dim=1, stable=True)
    for name in ("attention_mask", "position_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name].gather(1, order)
    return input_ids.gather(1, order)


def _without_cache(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model_kwargs.items() if name != "past_key_values"}


# A plain forward, outside of generate, follows the same rule. These are hooks and not methods, so that the
# signature of `forward`, which transformers inspects, stays the model's own.


def choose_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a plain forward: count each row's attended tokens, and refuse a cache from the other side."""
    switch: Switch = model.longrope2
    if torch.compiler.is_compiling() or switch.run is not None:
        return
    mask, cache = _mask_of(kwargs), kwargs.get("past_key_values")
    # Without a mask the rotary module counts by positions, which then are the tokens themselves.
    switch.rotary.long_rows = None if mask is None else switch.is_long(mask.sum(dim=-1))
    past = num_cached(cache)
    if past == 0:
        return
    new, filled = _new_tokens(args, kwargs), noted(cache)
    if filled is None or not torch.equal(filled.long_rows, _rows_of(switch, new, mask, past)):
        switch.rotary.long_rows = None
        raise LongRopeError(
            f"past_key_values ({past} tokens) was filled on the other side of the switch at "
            f"{switch.switch_length} tokens, or by another model",
            hint="use generate(), which refills it, or run the whole sequence with an empty cache",
        )


def note_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
    """After a plain forward: write on its cache what is in it now."""
    switch: Switch = model.longrope2
    if torch.compiler.is_compiling() or switch.run is not None:
        return
    switch.rotary.long_rows = None
    cache = getattr(outputs, "past_key_values", None)
    if cache is None:
        return
    new, mask, before = _new_tokens(args, kwargs), _mask_of(kwargs), noted(cache)
    past = num_cached(cache) - new.shape[1]
    if new.dim() != 2:  # embeddings: which tokens they were is not known
        note(cache, None)
        return
    tokens = without_padding(new, None if mask is None else mask[:, -new.shape[1] :])
    if past > 0 and before is not None:
        tokens = torch.cat((before.tokens[:, :past], tokens), dim=1)
    note(cache, Filled(tokens=tokens, long_rows=_rows_of(switch, new, mask, past)))


def _mask_of(kwargs: dict[str, Any]) -> Tensor | None:
    """The mask that counts tokens; one with four dimensions says nothing about padding."""
    mask = kwargs.get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _new_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a forward was given: tokens [batch, columns], or embeddings [batch, columns, dims]."""
    tokens = args[0] if args else kwargs.get("input_ids")
    return kwargs["inputs_embeds"] if tokens is None else tokens


def _rows_of(switch: Switch, new: Tensor, mask: Tensor | None, past: int) -> Tensor:
    lengths = torch.full((len(new),), past + new.shape[1]) if mask is None else mask.sum(dim=-1).cpu()
    return switch.is_long(lengths)
