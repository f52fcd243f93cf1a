"""What an export should answer: its own weights under our own RoPE, uncached, one sequence at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longrope2.errors import FactorsError, ModelError
from longrope2.export.engines import forced_temperature
from longrope2.export.gguf import GGUFExport
from longrope2.export.huggingface import is_exported_folder, serving_config
from longrope2.factors import RescaleFactors
from longrope2.families import FULL_ATTENTION, RopeReading, accept_mscales, live_config, read_config
from longrope2.generation.saved import FACTORS_FILE, read_factors, read_switch_length
from longrope2.gguf_model import FACTORS_KEY, open_gguf
from longrope2.models import json_object, load_folder
from longrope2.rotary import rescaled

GIVE_EXPORT = (
    "give a folder or a .gguf file with longrope, yarn, llama3 or linear scaling; `longrope2 export` writes them"
)
ONE_ROPE = ("yarn", "llama3", "linear")
"""Rescalings by a formula, the same for sequences of every length."""
SAME = 1e-3
"""Log-probabilities this near each other are those of the same computation."""


@dataclass(frozen=True)
class Answer:
    """What an engine said of the token after others."""

    tokens: Sequence[int]
    long: bool
    """The side it should have been on."""
    logprobs: Mapping[int, float]


def carried_factors(reading: RopeReading) -> RescaleFactors:
    """The factors that a config carries: its lists, or what its formula amounts to; else FactorsError."""
    rescaled = reading.rescaled
    if rescaled is None or rescaled.method not in ONE_ROPE:
        return read_factors(reading)
    original = reading.rope.original_length
    # Some leave the window as it was before: the factor says how far it goes.
    target = max(reading.window, round(original * max(rescaled.factors)))
    return RescaleFactors(
        method=rescaled.method,
        rotary_dim=reading.rope.rotary_dim,
        theta=reading.rope.theta,
        original_length=original,
        target_length=target,
        long=rescaled.factors,
        short=rescaled.factors,
        long_attention_factor=rescaled.attention_factor,
        short_attention_factor=rescaled.attention_factor,
    )


class GGUFOfOthers:
    """A GGUF file that is no export of ours, with the same three values and model."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        values = self._file.config()
        self.factors = carried_factors(read_config(values))
        self.config = live_config(values)
        self.is_rounded = self._file.is_rounded

    def model(self) -> Any:
        """The model in float32."""
        return self._file.model(dtype=torch.float32)


class Reference:
    """An exported model through our own eyes; its weights are loaded when they are first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: dict[str, Any] | None = None
        self._file: GGUFExport | GGUFOfOthers
        """A folder's config.json, as it is."""
        self.expected: dict[str, Any] | None = None
        """What an export would have written there; None for folders made by other means."""
        self.recorded_switch_length: int | None = None
        self.is_rounded = False
        """Whether engines compute in less than float32; folders are always run in that."""
        self.config: Any
        """The transformers config of the model."""
        accept_mscales()
        if not path.exists():
            raise ModelError(f"{path}: no such file or folder", hint=GIVE_EXPORT)
        if path.suffix == ".gguf":
            ours = open_gguf(path).value(FACTORS_KEY) is not None
            self._file = GGUFExport(path) if ours else GGUFOfOthers(path)
            self.config, self.factors, self.is_rounded = self._file.config, self._file.factors, self._file.is_rounded
        elif path.is_dir():
            self._read_folder()
        else:
            raise ModelError(f"{path}: a file, and not a .gguf one", hint=GIVE_EXPORT)

    def _read_folder(self) -> None:
        file, own = self.path / "config.json", self.path / FACTORS_FILE
        written = json_object(file, hint=GIVE_EXPORT)
        if "model_type" not in written:
            raise ModelError(f"{file}: not the config of a model", hint=GIVE_EXPORT)
        self.written = written
        try:
            self.factors = RescaleFactors.load(own) if own.is_file() else carried_factors(read_config(written))
        except FactorsError as error:
            raise FactorsError(error.message, hint=GIVE_EXPORT) from error
        self.recorded_switch_length = read_switch_length(written)
        if is_exported_folder(self.path):
            self.expected = serving_config(written, self.factors, dtype="float32")
        self.config = live_config(self.expected or written)

    @property
    def by_formula(self) -> bool:
        """Whether its config has a formula, rather than factors as engines read them."""
        parameters = self.config.rope_parameters or {}
        return parameters.get(FULL_ATTENTION, parameters).get("rope_type") in ONE_ROPE

    @property
    def switch_length(self) -> int:
        """Tokens up to which a sequence is short, for what knows more than the original window."""
        return self.recorded_switch_length or self.factors.original_length

    @cached_property
    def model(self) -> Any:
        """The model in float32, on a GPU where there is one."""
        model = self._file.model() if self.path.suffix == ".gguf" else self._load_folder()
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def _load_folder(self) -> Any:
        options = {"local_files_only": True, "trust_remote_code": False}
        return load_folder(str(self.path), self.path, config=self.config, dtype=torch.float32, **options)

    def logprobs(self, tokens: Sequence[int], *, long: bool, factors: RescaleFactors | None = None) -> torch.Tensor:
        """Of the token after `tokens`, on one side of the switch; `factors` may be others than the model's."""
        return self._logprobs_after([len(tokens)], tokens, long=long, factors=factors)[0]

    def _logprobs_after(
        self, lengths: Sequence[int], tokens: Sequence[int], *, long: bool, factors: RescaleFactors | None = None
    ) -> torch.Tensor:
        """The same after each of these numbers of tokens."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        kept = torch.tensor(lengths, device=self.model.device) - 1
        with rescaled(self.model, factors or self.factors, long_rows=long, check=False), torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0]
        return logits.float().log_softmax(-1).cpu()

    def errors(self, answers: Sequence[Answer], progress: Callable[[int], None] = lambda tokens: None) -> list[float]:
        """The largest difference of each over the choices that an engine named.

        One forward serves all answers of a side with whose tokens those of the longest begin.
        """
        found: dict[int, float] = {}
        for number in sorted(range(len(answers)), key=lambda number: -len(answers[number].tokens)):
            if number in found:
                continue
            longest = answers[number]
            alike = [
                other
                for other, answer in enumerate(answers)
                if other not in found
                and answer.long == longest.long
                and answer.tokens == longest.tokens[: len(answer.tokens)]
            ]
            lengths = [len(answers[other].tokens) for other in alike]
            expected = self._logprobs_after(lengths, longest.tokens, long=longest.long)
            for other, right in zip(alike, expected, strict=True):
                found[other] = _distance(right, answers[other])
            progress(sum(lengths))
        return [found[number] for number in range(len(answers))]

    def errors_of_faults(self, answer: Answer) -> dict[str, float]:
        """The same if something else should have been run, for everything that would make a difference."""
        errors, right = {}, self.logprobs(answer.tokens, long=answer.long)
        for name, long, factors in self._faults():
            other = self.logprobs(answer.tokens, long=long, factors=factors)
            if float((other - right).abs().max()) > SAME:
                errors[name] = _distance(other, answer)
        return errors

    def _faults(self) -> list[tuple[str, bool, RescaleFactors]]:
        """Ways in which engines have run such models; one of them is right."""
        ones = (1.0,) * len(self.factors.short)
        plain = replace(self.factors, short=ones)
        sides = [("long factors", True, self.factors), ("short factors", False, self.factors)]
        temperatures = sorted({1.0, self.factors.long_attention_factor, forced_temperature(self.factors)})
        return [
            (f"{name} at an attention factor of {temperature:.4f}", long, _at_temperature(factors, temperature))
            for name, long, factors in [*sides, ("plain RoPE", False, plain)]
            for temperature in temperatures
        ]


def _distance(expected: torch.Tensor, answer: Answer) -> float:
    named, values = list(answer.logprobs.keys()), torch.tensor(list(answer.logprobs.values()))
    return float((expected[named] - values).abs().max())


def _at_temperature(factors: RescaleFactors, temperature: float) -> RescaleFactors:
    return replace(factors, short_attention_factor=temperature, long_attention_factor=temperature)
