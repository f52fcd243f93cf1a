"""RescaleFactors, the one value that flows through the whole program, and its file format."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from longrope2.console import warn
from longrope2.errors import FactorsError, all_problems
from longrope2.files import CHECKSUM, checksum, public, read_json, write_json
from longrope2.rope import RopeSpec

FILE_FORMAT = "longrope2.factors"
FILE_VERSION = 1
_REQUIRED = ("method", "rotary_dim", "theta", "original_length", "target_length", "long", "short")
MAKE_FACTORS = "write one with: longrope2 factors MODEL --target-length N --method NAME -o FILE"


@dataclass(frozen=True, kw_only=True)
class RescaleFactors:
    """What replaces a model's RoPE: divisors of its frequencies, for short and for long sequences.

    Wrong values cannot be built: the constructor raises FactorsError naming every problem.
    """

    method: str
    """The method or search that made them."""
    rotary_dim: int
    theta: float
    original_length: int
    """Sequences up to this many tokens use the short factors."""
    target_length: int
    """Sequences up to this many tokens use the long factors."""
    long: tuple[float, ...]
    """λ_i for sequences beyond the original window."""
    short: tuple[float, ...]
    """λ_i within the original window: ones, unless the model was rescaled before."""
    long_attention_factor: float = 1.0
    """Multiplies cos and sin of long sequences: the attention temperature."""
    short_attention_factor: float = 1.0
    """The same for short sequences; 1 keeps the original model exactly."""
    critical_dimension: int | None = None
    """d_rcd, where the method has one."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where they come from: model, versions, seed, command."""

    def __post_init__(self) -> None:
        # A caller may hand over lists and ints; the value itself holds tuples of floats, once and for all.
        problems = _problems(self.__dict__)
        if problems:
            raise FactorsError(all_problems(f"factors of method {self.method!r}", problems), hint=MAKE_FACTORS)
        for name in ("long", "short"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        for name in ("theta", "long_attention_factor", "short_attention_factor"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "RescaleFactors":
        return self  # nothing in it can change

    def __reduce__(self) -> tuple[Any, ...]:
        return RescaleFactors.from_json, (self.to_json(),)

    @property
    def spec(self) -> RopeSpec:
        """The RoPE these factors rescale."""
        return RopeSpec(rotary_dim=self.rotary_dim, theta=self.theta, original_length=self.original_length)

    @property
    def extension_ratio(self) -> float:
        """s = target length / original length."""
        return self.target_length / self.original_length

    def inv_freq(self, *, long: bool) -> tuple[float, ...]:
        """The rescaled frequencies θ̂_i = θ_i/λ_i in float64 (Eq. 8)."""
        factors = self.long if long else self.short
        return tuple(frequency / factor for frequency, factor in zip(self.spec.frequencies, factors, strict=True))

    @property
    def switches(self) -> bool:
        """Whether short and long sequences are rotated differently."""
        return (self.short, self.short_attention_factor) != (self.long, self.long_attention_factor)

    def rotates_as(self, other: "RescaleFactors") -> bool:
        """Whether both do the same to a model, whatever method made them."""
        told = ("method", "critical_dimension", "provenance")
        one, two = ({k: v for k, v in factors.to_json().items() if k not in told} for factors in (self, other))
        return one == two

    def long_everywhere(self) -> "RescaleFactors":
        """One RoPE for every sequence, the long one: nothing is left to switch."""
        return replace(self, short=self.long, short_attention_factor=self.long_attention_factor)

    def check_fits(self, spec: RopeSpec, model: str = "the model") -> None:
        """Raise FactorsError unless these factors were made for this RoPE."""
        problems = [
            f"{name} is {getattr(self, name):g} in the factors but {getattr(spec, name):g} in {model}"
            for name in ("rotary_dim", "theta", "original_length")
            if getattr(self, name) != getattr(spec, name)
        ]
        if problems:
            raise FactorsError(
                all_problems(f"these factors were made for another model than {model}", problems),
                hint=f"make its own: longrope2 factors {quote(model)} --target-length N --method NAME -o FILE",
            )

    def made_for_another(self, model: str, revision: str) -> str | None:
        """The model in their provenance, if that is another one; a copy or a download keeps its name or revision."""
        made_for, made_at = self.provenance.get("model"), self.provenance.get("revision")
        if not (isinstance(made_for, str) and isinstance(made_at, str)) or made_at == revision:
            return None
        # A folder is known by a hash of its config, the hub's models by a commit: these say nothing of each other.
        comparable = made_at.startswith("sha256:") == revision.startswith("sha256:")
        same_name = _last_part(made_for) == _last_part(model)
        return None if same_name and not comparable else made_for

    def oddities(self) -> list[str]:
        """What is unusual but allowed, since published factors show it: below 1, or not monotone."""
        found = []
        for name in ("long", "short"):
            values = getattr(self, name)
            below = [i for i, value in enumerate(values) if value < 1]
            falling = [i for i in range(1, len(values)) if values[i] < values[i - 1]]
            if below:
                found.append(f"{name} factors below 1 at dimension {_listing(below)}")
            if falling:
                found.append(f"{name} factors fall at dimension {_listing(falling)}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The content of a factors file."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {
            "long": list(self.long),
            "short": list(self.short),
            "provenance": dict(self.provenance),
        }
        return {"format": FILE_FORMAT, "version": FILE_VERSION, **values}

    def save(self, path: str | Path) -> None:
        """Write a factors file, atomically."""
        content = public(self.to_json())
        write_json(Path(path), {**content, CHECKSUM: checksum(content)})

    @classmethod
    def from_json(cls, content: Any, *, source: str = "factors") -> "RescaleFactors":
        """Read the content of a factors file, or raise FactorsError naming every problem."""
        if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
            raise FactorsError(
                f'{source}: not a factors file (no "format": "{FILE_FORMAT}")',
                hint=MAKE_FACTORS,
            )
        if content.get("version") != FILE_VERSION:
            raise FactorsError(
                f"{source}: version {content.get('version')!r} of the file format, expected {FILE_VERSION}",
                hint="the file was written by another release; install that one, or make the factors again",
            )
        values = {key: value for key, value in content.items() if key not in ("format", "version")}
        problems = _problems(values)
        if problems:
            raise FactorsError(all_problems(source, problems), hint=MAKE_FACTORS)
        return cls(**values)

    @classmethod
    def given(cls, factors: "RescaleFactors | str | Path") -> "RescaleFactors":
        """The value itself, or what a file of it holds."""
        return factors if isinstance(factors, RescaleFactors) else cls.load(factors)

    @classmethod
    def load(cls, path: str | Path, spec: RopeSpec | None = None) -> "RescaleFactors":
        """Read a factors file and, given a spec, check that it was made for that RoPE."""
        path = Path(path)
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise FactorsError(f"{path}: no such file", hint=MAKE_FACTORS) from None
        except UnicodeDecodeError as error:
            raise FactorsError(f"{path}: cannot be read (not a text file)", hint=MAKE_FACTORS) from error
        except OSError as error:
            raise FactorsError(f"{path}: cannot be read ({error.strerror})", hint=MAKE_FACTORS) from error
        except json.JSONDecodeError as error:
            raise FactorsError(
                f"{path}: not valid JSON at line {error.lineno}, column {error.colno} ({error.msg})",
                hint="the file may be cut short; copy it again, or make the factors again",
            ) from error
        except ValueError as error:
            raise FactorsError(f"{path}: not valid JSON ({error})", hint=MAKE_FACTORS) from error
        if isinstance(content, dict):
            _check_sum(path, content)
        factors = cls.from_json(content, source=str(path))
        if spec is not None:
            factors.check_fits(spec)
        return factors


def _check_sum(path: Path, content: dict[str, Any]) -> None:
    """Take the checksum out of a file's content; say so where it has none, and refuse what it does not fit."""
    expected = content.pop(CHECKSUM, None)
    if expected is None:
        warn(f"{path} has no checksum: it was edited by hand, or is from an earlier version or another program")
    elif checksum(content) != expected:
        raise FactorsError(
            f"{path}: changed since it was written (its content is not what its checksum says)",
            hint=f'if you changed it on purpose, delete the line "{CHECKSUM}"; else copy it again, or make the factors '
            "again",
        )


def factors_schema() -> dict[str, Any]:
    """The JSON Schema of a factors file."""
    number, count = {"type": "number", "exclusiveMinimum": 0}, {"type": "integer", "minimum": 1}
    factors = {"type": "array", "items": number}
    properties = {
        "format": {"const": FILE_FORMAT},
        "version": {"const": FILE_VERSION},
        "method": {"type": "string", "minLength": 1},
        "rotary_dim": {"type": "integer", "minimum": 2, "multipleOf": 2},
        "theta": {"type": "number", "exclusiveMinimum": 1},
        "original_length": count,
        "target_length": count,
        "long": factors | {"description": "Divisors of the frequencies beyond the original window."},
        "short": factors | {"description": "The same within the original window."},
        "long_attention_factor": number,
        "short_attention_factor": number,
        "critical_dimension": {"type": ["integer", "null"], "minimum": 0},
        "provenance": {"type": "object"},
        CHECKSUM: {"type": "string", "description": "Delete it to change the file by hand."},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "longrope2 factors",
        "type": "object",
        "properties": properties,
        "required": ["format", "version", *_REQUIRED],
        "additionalProperties": False,
    }


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Everything wrong with the would-be fields of a RescaleFactors, in words."""
    known = {f.name for f in fields(RescaleFactors)}
    problems = [f"key {name!r} is missing" for name in sorted(set(_REQUIRED) - set(values))]
    problems += [f"unknown key {name!r}" for name in sorted(set(values) - known)]

    def check(name: str, expected: str, accepts: Any) -> bool:
        if name in values and not accepts(values[name]):
            problems.append(f"{name} must be {expected}, got {_shorten(values[name])}")
            return False
        return name in values

    check("method", "a non-empty string", lambda v: isinstance(v, str) and v)
    check("provenance", "an object", lambda v: isinstance(v, Mapping))
    check("theta", "a finite number above 1", lambda v: _is_number(v) and v > 1)
    sized = check("rotary_dim", "an even integer of at least 2", lambda v: _is_count(v) and v % 2 == 0)
    lengths = [check(name, "a positive integer", _is_count) for name in ("original_length", "target_length")]
    if all(lengths) and values["target_length"] < values["original_length"]:
        problems.append(f"target_length {values['target_length']} is below original_length {values['original_length']}")
    for name in ("long_attention_factor", "short_attention_factor"):
        check(name, "a finite number above 0", lambda v: _is_number(v) and v > 0)
    for name in ("long", "short"):
        if not check(name, "a list of numbers", lambda v: isinstance(v, list | tuple)):
            continue
        bad = [i for i, v in enumerate(values[name]) if not (_is_number(v) and v > 0)]
        if bad:
            seen = ", ".join(_shorten(values[name][i]) for i in bad[:3])
            problems.append(f"{name} factors must be finite numbers above 0, got {seen} at dimension {_listing(bad)}")
        if sized and len(values[name]) != values["rotary_dim"] // 2:
            problems.append(
                f"{len(values[name])} {name} factors, expected {values['rotary_dim'] // 2} "
                f"for a rotary dimension of {values['rotary_dim']}"
            )
    if sized and values.get("critical_dimension") is not None:
        half = values["rotary_dim"] // 2
        check(
            "critical_dimension",
            f"an integer from 0 to {half}, or null",
            lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= half,
        )
    return problems


def _last_part(model: str) -> str:
    """The name of a folder or hub model without what stands around it."""
    return model.partition("@")[0].rstrip("/").rpartition("/")[2]


def _is_number(value: Any) -> bool:
    # Which neither NaN nor an integer too large for a float is.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _listing(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:5]))
    return shown if len(indices) <= 5 else f"{shown} and {len(indices) - 5} more"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
