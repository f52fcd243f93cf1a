"""What a config.json states of its RoPE, in whichever keys, and what is wrong with it whatever engine reads it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from longrope2.checking.rotation import NEEDED, Rotation, rotation
from longrope2.errors import LongRopeError, damage, first_line
from longrope2.families import COPY_AGAIN, FULL_ATTENTION, ORIGINAL, head_dim, live_config, read_config
from longrope2.records import Finding

OLDER, NEWER = "rope_scaling", "rope_parameters"
THETA_KEYS = ("rope_theta", "rotary_emb_base")
ALIASES = {"su": "longrope", "mrope": "default"}
CONFIG = "config.json"
NUMBERS = (
    "rope_theta", "factor", ORIGINAL, "attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "partial_rotary_factor", "short_mscale", "long_mscale",
)  # fmt: skip
LLAMA3_WINDOW = 8192
"""The original window of every llama3 config that Meta has released; llama.cpp and mlx-lm assume it."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The RoPE of the full-attention layers as a config.json means it, put together from all of its keys."""

    config: Mapping[str, Any]
    """Of the language model; of a larger model, its text_config."""
    older: Mapping[str, Any]
    """The section `rope_scaling`; empty where there is none."""
    newer: Mapping[str, Any]
    """The section `rope_parameters` of these layers."""
    top_theta: float | None
    """The base that stands outside both."""
    parameters: Mapping[str, Any]
    """All together, in the form of transformers 5."""
    default_theta: float
    """What transformers takes for this family where no base is stated."""
    plain: Any
    """The transformers config without both sections; None where transformers does not know the family."""
    head_dim: int
    window: int

    @property
    def kind(self) -> str:
        """The rope_type."""
        return str(self.parameters["rope_type"])

    @property
    def original(self) -> int | None:
        """The window before scaling, where it is stated."""
        return self.parameters.get(ORIGINAL)

    @property
    def num_dims(self) -> int:
        """How many frequencies there should be."""
        partial = 1.0 if self.kind == "proportional" else float(self.parameters.get("partial_rotary_factor") or 1.0)
        return int(self.head_dim * partial) // 2

    def rotation(self) -> Rotation | None:
        """What the config asks for; None where it asks for nothing that could be computed."""
        if any(_faults_of_values(self)) or any(_faults_of_lists(self)):
            return None
        try:
            return rotation(self.completed(), head_dim=self.head_dim, window=self.window)
        except (KeyError, TypeError, ValueError, OverflowError, LongRopeError):
            return None

    def completed(self) -> dict[str, Any]:
        """The parameters, with the original window that is likely where none is stated."""
        likely = {ORIGINAL: self.likely_original()} if ORIGINAL in NEEDED.get(self.kind, ()) else {}
        return {**self.parameters, **{key: value for key, value in likely.items() if value}}

    def likely_original(self) -> int | None:
        """The window before scaling: as stated, or else by the factor."""
        if self.original:
            return self.original
        if self.kind == "llama3":
            return LLAMA3_WINDOW
        factor = self.parameters.get("factor")
        return round(self.window / factor) if isinstance(factor, int | float) and factor >= 1 else None

    def corrected(self) -> dict[str, Any]:
        """The keys to paste into config.json, in the forms of both generations of transformers."""
        parameters = {"rope_type": self.kind, **{k: v for k, v in self.completed().items() if k != "type"}}
        if self.kind == "longrope" and (stated := self.rotation()) is not None:
            parameters |= {"attention_factor": stated.long_attention}
            parameters |= {"short_mscale": stated.short_attention, "long_mscale": stated.long_attention}
        window, original = self.window, parameters.get(ORIGINAL)
        if self.kind in ("yarn", "longrope") and original and parameters.get("factor"):
            window = round(original * parameters["factor"])
        if self.kind == "longrope" and original:
            parameters["factor"] = window / original
        result: dict[str, Any] = {"max_position_embeddings": window, "rope_theta": parameters["rope_theta"]}
        if self.kind in ("longrope", "llama3") and original:
            result[ORIGINAL] = original
        if (partial := parameters.get("partial_rotary_factor")) is not None:
            result["partial_rotary_factor"] = partial
        if any(finding.is_wrong for finding in _faults_of_attention_span(self)):
            result["sliding_window"] = window
        result[OLDER] = None if self.kind == "default" else {"type": self.kind, **parameters}
        return result | {NEWER: self._nested(parameters)}

    def _nested(self, parameters: dict[str, Any]) -> dict[str, Any]:
        nested = getattr(self.plain, NEWER, None) or {}
        if not isinstance(nested.get(FULL_ATTENTION), Mapping):
            return parameters
        given = self.config.get(NEWER) or {}
        kept = {name: given.get(name, value) for name, value in nested.items()}
        return {**kept, FULL_ATTENTION: parameters}


def read_statement(config: Mapping[str, Any]) -> Statement:
    """Put together what a config.json says; ModelError for one that is not usable."""
    with damage(f"the config of this {config.get('model_type')} model is not usable", hint=COPY_AGAIN):
        return _read(config)


def _read(config: Mapping[str, Any]) -> Statement:
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "hidden_size" in inner:
        config = {"model_type": f"{config.get('model_type')}_text", **inner}
    bare = {key: value for key, value in config.items() if key not in (OLDER, NEWER)}
    plain = _plain(bare)
    usual = getattr(plain, NEWER, None) or {}
    usual = usual.get(FULL_ATTENTION, usual)
    older, newer = (_section(config, name) for name in (OLDER, NEWER))
    top_theta = next((float(bare[key]) for key in THETA_KEYS if isinstance(bare.get(key), int | float)), None)
    chosen, other = (newer, older) if _type(older) in (None, "default") and newer else (older, newer)
    kind = _type(chosen) or "default"
    default_theta = float(_plain_theta({k: v for k, v in bare.items() if k not in THETA_KEYS}, plain))
    # A part of the head by "proportional" RoPE is not one by another type.
    is_usual_part = kind == "proportional" or usual.get("rope_type") != "proportional"
    parameters = {
        "partial_rotary_factor": usual.get("partial_rotary_factor") if is_usual_part else None,
        **chosen,
        "rope_type": ALIASES.get(kind, kind),
        "rope_theta": chosen.get("rope_theta") or top_theta or other.get("rope_theta") or default_theta,
    }
    shared = other.get(ORIGINAL) if _type(other) == kind else None
    original = bare.get(ORIGINAL) or chosen.get(ORIGINAL) or shared or getattr(plain, ORIGINAL, None)
    if original and parameters["rope_type"] not in ("default", "proportional"):
        parameters[ORIGINAL] = original
    if parameters["rope_type"] == _type(other):
        parameters = {**other, **parameters}
    return Statement(
        config=config,
        older=older,
        newer=newer,
        top_theta=top_theta,
        parameters={key: value for key, value in parameters.items() if value is not None},
        default_theta=default_theta,
        plain=plain,
        head_dim=_head_dim(config, plain),
        window=int(getattr(plain, "max_position_embeddings", None) or config.get("max_position_embeddings") or 2048),
    )


def faults(statement: Statement) -> Iterator[Finding]:
    """What is wrong with the keys themselves."""
    if wrong := list(_faults_of_values(statement)):
        yield from wrong
        return  # what they mean together is not to be known
    yield from _faults_of_type(statement)
    yield from _faults_of_base(statement)
    yield from _faults_of_lists(statement)
    yield from _faults_of_windows(statement)
    yield from _faults_of_attention_span(statement)


def _faults_of_values(statement: Statement) -> Iterator[Finding]:
    sections = {"the top level": statement.config, OLDER: statement.older, NEWER: statement.newer}
    for place, section in sections.items():
        for key in NUMBERS:
            value = section.get(key)
            if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or value <= 0):
                yield _fault(key, f"{key} in {place} must be a number above 0, got {value!r:.40}")
            elif key == "factor" and value is not None and value < 1:
                yield _fault(key, f"factor in {place} must be at least 1, got {value:g}: it would shrink the window")


def _faults_of_type(statement: Statement) -> Iterator[Finding]:
    kind, older, newer = statement.kind, _type(statement.older), _type(statement.newer)
    if kind not in NEEDED:
        yield _fault("rope_type", f"rope_type {kind!r} is none of {', '.join(NEEDED)}")
        return
    for name, section in ((OLDER, statement.older), (NEWER, statement.newer)):
        both = [str(section[key]) for key in ("type", "rope_type") if section.get(key)]
        if len({ALIASES.get(each, each) for each in both}) > 1:
            yield _fault(
                "rope_type",
                f"{name} says type {both[0]!r} and rope_type {both[1]!r}: vLLM stops, transformers takes the last",
            )
    if older and newer and ALIASES.get(older, older) != ALIASES.get(newer, newer):
        yield _fault(
            "sections",
            f"rope_scaling says {older!r} and rope_parameters {newer!r}: transformers 5 and vLLM take the first, "
            "llama.cpp's converter the second",
        )
    written = str(statement.config.get("transformers_version", ""))
    if written.startswith("4.") and not statement.older and newer not in (None, "default"):
        yield _fault(
            "sections",
            f"{newer!r} stands in rope_parameters alone, and the file is of transformers {written}, which knows only "
            "rope_scaling: there it does nothing",
        )
    missing = [key for key in NEEDED[kind] if key != ORIGINAL and statement.parameters.get(key) is None]
    if missing:
        yield _fault("keys", f"{kind} needs {', '.join(missing)}, and the config has none")


def _faults_of_base(statement: Statement) -> Iterator[Finding]:
    stated = {
        "the top level": statement.top_theta,
        OLDER: statement.older.get("rope_theta"),
        NEWER: statement.newer.get("rope_theta"),
    }
    values = {place: float(value) for place, value in stated.items() if isinstance(value, int | float)}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{value:,.0f} in {place}" for place, value in values.items())
        yield _fault("rope_theta", f"the base is stated more than once, and differently: {listed}")
    nulls = [name for name in (OLDER, NEWER) if getattr(statement, _FIELDS[name]).get("rope_theta", 0) is None]
    if nulls and not values:
        yield _fault(
            "rope_theta",
            f"rope_theta is null in {nulls[0]}: it is lost (the family's default is {statement.default_theta:,.0f})",
        )


def _faults_of_lists(statement: Statement) -> Iterator[Finding]:
    if statement.kind != "longrope":
        return
    expected = statement.num_dims
    for key in ("short_factor", "long_factor"):
        values = statement.parameters.get(key)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != expected:
            count = f"{len(values)} numbers" if isinstance(values, list) else repr(values)[:40]
            yield _fault(
                key,
                f"{key} has {count}, and the model rotates {expected} pairs (a head of {statement.head_dim}): one "
                "factor for each is needed",
            )
        elif not all(isinstance(value, int | float) and value > 0 for value in values):
            yield _fault(key, f"{key} holds values that are not numbers above 0")


def _faults_of_windows(statement: Statement) -> Iterator[Finding]:
    kind, window, factor = statement.kind, statement.window, statement.parameters.get("factor")
    places = {
        "the top level": statement.config.get(ORIGINAL),
        OLDER: statement.older.get(ORIGINAL),
        NEWER: statement.newer.get(ORIGINAL),
    }
    values = {place: value for place, value in places.items() if isinstance(value, int | float)}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{value:,} in {place}" for place, value in values.items())
        yield _fault(ORIGINAL, f"the original window is stated more than once, and differently: {listed}")
    if ORIGINAL not in NEEDED.get(kind, ()):
        return
    if not statement.original:
        likely = statement.likely_original()
        guess = "and nothing tells what it was"
        if kind == "llama3":
            guess = f"where Meta's models have {LLAMA3_WINDOW:,}"
        elif likely:
            guess = f"where the factor of {factor:g} makes it {likely:,}, if {window:,} is the extended window"
        yield _fault(
            ORIGINAL,
            f"the original window is stated nowhere: transformers 5 and vLLM take max_position_embeddings = {window:,} "
            f"for it, {guess}",
        )
        return
    original = statement.original
    if kind == "llama3" and original >= window:
        yield _fault(
            "max_position_embeddings",
            f"the original window of {original:,} is not below max_position_embeddings = {window:,}",
        )
    elif original > window:
        yield _fault(
            "max_position_embeddings",
            f"max_position_embeddings = {window:,} is below the original window of {original:,}",
        )
    if kind in ("yarn", "longrope") and isinstance(factor, int | float) and window > 1.001 * original * factor:
        twice = ", as if the window had been scaled twice" if abs(window / original / factor**2 - 1) < 1e-3 else ""
        yield _fault(
            "max_position_embeddings",
            f"max_position_embeddings = {window:,} is beyond {factor:g} times the original window of {original:,}, "
            f"which is {round(original * factor):,}{twice}",
        )


def _faults_of_attention_span(statement: Statement) -> Iterator[Finding]:
    if statement.kind in ("default", "proportional"):
        return
    bare = {key: value for key, value in statement.config.items() if key not in (OLDER, NEWER, ORIGINAL)}
    try:
        reading = read_config(bare)
    except LongRopeError:
        return  # of a family whose layers are not known here
    original, span = statement.likely_original() or statement.window, reading.sliding_window
    if span and FULL_ATTENTION not in reading.layer_types and span < statement.window:
        text = (
            f"every layer attends to the last {span:,} tokens only: no distance is ever above that, and "
            f"{statement.kind} scaling to {statement.window:,} tokens"
        )
        if span <= original:
            yield _fault(
                "sliding_window",
                f"{text} changes nothing but the {original:,} that were trained; with the corrected keys every layer "
                "sees all of them, which the model has to be trained for",
            )
        else:
            yield Finding(CONFIG, "sliding_window", None, "known limit", f"{text} reaches no farther")


def _fault(what: str, note: str) -> Finding:
    return Finding(CONFIG, what, None, "WRONG", note)


_FIELDS = {OLDER: "older", NEWER: "newer"}


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    if not isinstance(found, Mapping):
        return {}
    inner = found.get(FULL_ATTENTION, found)
    return dict(inner) if isinstance(inner, Mapping) else {}


def _type(section: Mapping[str, Any]) -> str | None:
    found = section.get("rope_type") or section.get("type")
    return str(found) if found else ("default" if section else None)


def _head_dim(config: Mapping[str, Any], plain: Any) -> int:
    """The size of a head in the full-attention layers; Gemma 4 has another one in the others."""
    if plain is not None:
        varies = getattr(plain, "is_heterogeneous", False)
        return head_dim(plain.per_layer_config[FULL_ATTENTION] if varies else plain)
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _plain(bare: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if bare.get("model_type") not in CONFIG_MAPPING:
        return None
    with quiet_transformers():
        return live_config(bare)


def _plain_theta(bare: Mapping[str, Any], plain: Any) -> float:
    usual = getattr(_plain(bare) if plain is not None else None, NEWER, None) or {}
    usual = usual.get(FULL_ATTENTION, usual)
    return usual.get("rope_theta") or 10_000.0


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without what transformers logs of odd keys: the findings say it."""
    from transformers.utils import logging as library  # whose first use sets the level

    level = library.get_verbosity()
    library.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library.set_verbosity(level)


def reason_of(error: BaseException) -> str:
    """What a library says of a config that it refuses."""
    cause = error.__cause__ or error
    if isinstance(cause, KeyError) and cause.args:  # which would be shown in quotes
        cause = ValueError(cause.args[0])
    first = first_line(cause)
    # Validators of transformers name themselves in the first line, and say below what is wrong.
    return first_line(ValueError(" ".join(str(cause).split()))) if first.endswith(":") else first
