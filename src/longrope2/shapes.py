"""Whether a value from a JSON file has the shape that its reader relies on."""

import math
from types import UnionType
from typing import Any


def misfit(value: Any, shape: Any, where: str = "") -> str | None:
    """Where a value differs from a shape, in words; None where it fits.

    A shape is a type, a union of types, [shape] for a list, {"key": shape} for an object that has these keys and maybe
    others, or {...: shape} for one whose values all have one shape.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return _wrong(where, "an object", value)
        inside = dict.fromkeys(value, shape[...]) if ... in shape else shape
        missing = next((key for key in inside if key not in value), None)
        if missing is not None:
            return f"{_below(where, missing)} is missing"
        parts = [(_below(where, key), value[key], part) for key, part in inside.items()]
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return _wrong(where, "a list", value)
        parts = [(_below(where, number), item, shape[0]) for number, item in enumerate(value)]
    else:
        return None if _is_a(value, shape) else _wrong(where, _name(shape), value)
    return next((found for place, item, part in parts if (found := misfit(item, part, place))), None)


def _is_a(value: Any, kind: type | UnionType) -> bool:
    if isinstance(value, bool):  # an int in Python, but not in JSON
        return kind is bool
    if isinstance(value, float) and not math.isfinite(value):  # not valid JSON, though Python accepts it
        return False
    # A whole number may stand for a real one.
    return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))


def _below(where: str, part: object) -> str:
    return f"{where}.{part}" if where else str(part)


def _name(kind: type | UnionType) -> str:
    return str(kind) if isinstance(kind, UnionType) else kind.__name__


def _wrong(where: str, wanted: str, value: Any) -> str:
    return f"{where or 'the whole'} must be {wanted}, got {str(value)[:40]!r}"
