"""Options, stated once: a field of a config class holds an option's name, type, default, limits and help.

The command line, the tables of a recipe, its JSON Schema and the Python functions derive from these fields. A config
class is a frozen dataclass in a module that imports nothing heavy, so that `--help` answers at once.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from longrope2.errors import LongRopeError, all_problems

Length = Annotated[int, "tokens"]
"""A number of tokens, which may also be given as 32k or 1M."""
FileName = Annotated[str, "file"]
"""The path of a file; the command line refuses an empty one, which would stand for this folder."""
_OPTION = "option"
Config = TypeVar("Config")
UNITS = {"k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True, kw_only=True)
class Option:
    """What there is to say about an option besides its name, type and default."""

    help: str
    usual: str | None = None
    """The default in words, where its value does not say it."""
    flag: str | None = None
    """Its name on the command line, where that is not the field's name."""
    metavar: str | None = None
    repeated: bool = False
    """A list that the command line takes item by item."""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    """Limits that are not allowed themselves."""
    parse: Callable[[str], Any] | None = None
    """How the command line reads a text, where the type does not say it."""
    choices: Callable[[], Collection[str]] | None = None
    """The names that each text must be one of, where the type does not say it."""
    command: bool = True
    """Whether the command line has it."""
    recipe: bool = True
    """Whether a recipe's table has it; the others follow from the recipe as a whole."""
    elastic: bool = False
    """Whether it may change when a job resumes, since it does not change the result."""

    def limits(self, value: float) -> str | None:
        """Which limit a number breaks, in words; None if it breaks none."""
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        high_enough = low is None or (value >= low if self.above is None else value > low)
        low_enough = high is None or (value <= high if self.below is None else value < high)
        if high_enough and low_enough:
            return None
        if high is None:
            return f"must be {'at least' if self.above is None else 'above'} {low:g}"
        if low is None:
            return f"must be {'at most' if self.below is None else 'below'} {_digits(high)}"
        if self.above is None and self.below is None:
            return f"must lie from {low:g} to {_digits(high)}"
        return f"must lie in {'[('[self.above is not None]}{low:g}, {high:g}{'])'[self.below is not None]}"


def option(default: Any = MISSING, help: str = "", **facts: Any) -> Any:
    """A field that is an option; without a default it must be given. A config class as default: its options, too."""
    metadata = {_OPTION: Option(help=help, **facts)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Stated:
    """An option of a config class."""

    name: str
    hint: Any
    """Its type, with what `Annotated` adds."""
    default: Any
    """MISSING where it must be given."""
    option: Option

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return self.option.flag or "--" + self.name.replace("_", "-")

    def wrong_type(self, value: Any) -> str | None:
        """What to say of a value that is not of its type."""
        if conforms(value, self.hint):
            return None
        return f"{self.name} must be {in_words(self.hint)}, got {in_toml(value)}"

    def broken_limit(self, value: Any) -> str | None:
        """What to say of a value of its type that breaks a limit."""
        numbers = [number for number in (value if isinstance(value, tuple) else [value]) if _is_number(number)]
        broken = next(filter(None, map(self.option.limits, numbers)), None)
        return f"{self.name} {broken}, got {in_toml(value)}" if broken else None

    def unknown_choice(self, value: Any) -> str | None:
        """What to say of a name that it does not know."""
        known = self.option.choices() if self.option.choices else ()
        wrong = [name for name in (value if isinstance(value, tuple) else [value]) if known and name not in known]
        return f"{self.name}: {wrong[0]!r} is not known{_guess(wrong[0], known)}" if wrong else None


def stated(kind: type) -> Iterator[Stated]:
    """The options of a config class, in order; those of a config class inside it stand in its place."""
    for entry, hint in _options(kind):
        if is_dataclass(hint):
            yield from stated(hint)  # type: ignore[arg-type]
        else:
            yield _stated(entry, hint)


def in_recipe(kind: type) -> list[Stated]:
    """The options of a config class that a recipe's table has."""
    return [entry for entry in stated(kind) if entry.option.recipe]


def required(kind: type) -> list[str]:
    """The options of a config class that must be given."""
    return [entry.name for entry in stated(kind) if entry.default is MISSING]


def wrong_types(config: Any) -> list[str]:
    """Every option of a config whose value is not of its type, in words."""
    return [problem for entry, value in _values(config) if (problem := entry.wrong_type(value))]


def broken_limits(config: Any) -> list[str]:
    """Every option of a config that breaks a limit, in words; all have the right type."""
    return [problem for entry, value in _values(config) if (problem := entry.broken_limit(value))]


def identity(config: Any) -> dict[str, Any]:
    """What decides the result: every option by name but the elastic ones."""
    return {entry.name: value for entry, value in _values(config) if not entry.option.elastic}


def wrong_entries(table: Mapping[str, Any], known: Mapping[str, Stated], *, limits: bool = True) -> list[str]:
    """Unknown keys and values of the wrong type in a table of a file, in words; with `limits` also what breaks one."""
    found = []
    for name, given in table.items():
        if name not in known:
            found.append(unknown(name, known))
            continue
        entry = known[name]
        value = plain(given, entry.hint)
        problem = entry.wrong_type(value)
        if limits:
            problem = problem or entry.broken_limit(value) or entry.unknown_choice(value)
        if problem:
            found.append(problem)
    return found


def build(kind: type[Config], subject: str, values: Mapping[str, Any]) -> Config:
    """A config from plain values, as command line, recipes and Python give them; refuses unknown names.

    A list stands for a tuple, a path for its text, "32k" for a length, None for the default. Types and limits are the
    config's own to check.
    """
    known = {entry.name: entry for entry in stated(kind)}
    wrong = [unknown(name, known) for name in values if name not in known]
    values = {name: value for name, value in values.items() if value is not None}
    missing = [name for name in required(kind) if name not in values]
    if wrong or missing:
        hint = f"there are {', '.join(known)}" if wrong else f"give {', '.join(known[name].flag for name in missing)}"
        raise LongRopeError(all_problems(subject, wrong + [f"{name} is missing" for name in missing]), hint=hint)
    return _built(kind, values)


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    given = {}
    for entry, hint in _options(kind):
        if is_dataclass(hint):
            given[entry.name] = _built(hint, values)
        elif entry.name in values:
            given[entry.name] = plain(values[entry.name], hint)
    return kind(**given)


def parse_length(text: str) -> int:
    """A number of tokens: 32768, 32k or 1M, in binary units, as model windows are counted; else ValueError."""
    text = text.strip().lower()
    unit = UNITS.get(text[-1:], 1)
    return int(text[:-1] if unit > 1 else text) * unit


def length_of(value: int | str) -> int:
    """A number of tokens, which may be written as 32k."""
    found = plain(value, Length)
    if not conforms(found, Length) or found < 1:
        raise LongRopeError(f"{value!r} is not a length", hint="write 32768, 32k or 1M")
    return int(found)


def plain(value: Any, hint: Any = Any) -> Any:
    """Lists as tuples, paths as text, lengths as numbers where the type asks for them."""
    kinds = (hint, *get_args(hint))
    if isinstance(value, list | tuple):
        items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
        return tuple(plain(item, *items[:1]) for item in value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, str) and Length in kinds:
        with suppress(ValueError):
            return parse_length(value)
    return str(value) if isinstance(value, Path) else value


def unknown(name: str, known: Collection[str]) -> str:
    """What to say of a name that nothing has."""
    return f"unknown key {name!r}{_guess(name, known)}"


def _guess(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def conforms(value: Any, hint: Any) -> bool:
    """Whether a value is what a field is declared to hold."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return conforms(value, parts[0])
    if origin in (Union, UnionType):
        return any(conforms(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[-1] is Ellipsis:
            return all(conforms(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(map(conforms, value, parts))
    if origin is dict:
        return isinstance(value, dict)
    if hint in (float, int):
        # True is an int in Python, but not here; a whole number may stand for a real one, and NaN for none.
        kinds = (int, float) if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool) and -math.inf < value < math.inf
    return value is None if hint is NoneType else isinstance(value, hint)


def schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a recipe's table: what the options of a config class allow, with their help."""
    entries = in_recipe(kind)
    properties = {}
    for entry in entries:
        facts = {"description": entry.option.help + (f" Default: {entry.option.usual}." if entry.option.usual else "")}
        if entry.default is not MISSING and entry.default is not None:
            facts["default"] = entry.default
        properties[entry.name] = facts | _schema(entry.hint, entry.option)
        if entry.option.choices:
            properties[entry.name]["items"] = {"enum": list(entry.option.choices())}
    return {
        "type": "object",
        "properties": properties,
        "required": [entry.name for entry in entries if entry.default is MISSING],
        "additionalProperties": False,
    }


def _schema(hint: Any, facts: Option) -> dict[str, Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if hint == Length:
        return {"anyOf": [_schema(int, facts), {"type": "string", "pattern": "^[0-9]+[kKmM]?$"}]}
    if origin is Annotated:
        return _schema(parts[0], facts)
    if origin in (Union, UnionType):
        allowed = [_schema(part, facts) for part in parts if part is not NoneType]  # TOML has no null
        return allowed[0] if len(allowed) == 1 else {"anyOf": allowed}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        size = {} if parts[-1] is Ellipsis else {"minItems": len(parts), "maxItems": len(parts)}
        return {"type": "array", "items": _schema(parts[0], facts), **size}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    limits = {"minimum": facts.least, "maximum": facts.most, "exclusiveMinimum": facts.above}
    limits |= {"exclusiveMaximum": facts.below}
    numeric = hint in (int, float)
    return {"type": names.get(hint, "object")} | {k: v for k, v in limits.items() if numeric and v is not None}


def in_words(hint: Any) -> str:
    """What a type allows, as one writes it in TOML."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint == Length:
        return 'a length such as "32k"'
    if origin is Annotated:
        return in_words(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(in_words(part) for part in parts if part is not NoneType))
    if origin is Literal:
        return " or ".join(map(in_toml, parts))
    if origin is tuple:
        size = "" if parts[-1] is Ellipsis else f" of {len(parts)}"
        return f"a list{size} in brackets, each {in_words(parts[0])}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
    return words.get(hint, "a table")


def in_toml(value: Any) -> str:
    """A value as one writes it in TOML."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _values(config: Any) -> Iterator[tuple[Stated, Any]]:
    """The options of a config with their values; those of a config inside it stand in its place."""
    for entry, hint in _options(type(config)):
        value = getattr(config, entry.name)
        if is_dataclass(hint):
            yield from _values(value)
        else:
            yield _stated(entry, hint), value


def _options(kind: Any) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(entry, hints[entry.name]) for entry in fields(kind) if _OPTION in entry.metadata]


def _stated(entry: Field[Any], hint: Any) -> Stated:
    return Stated(entry.name, hint, entry.default, entry.metadata[_OPTION])


def _digits(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.10g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
