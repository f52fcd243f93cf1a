"""Options of commands, from the fields of config classes; and how the command line reads what is given for them."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from click import BadParameter, Choice, argument, option

from longrope2.errors import LongRopeError
from longrope2.options import FileName, Length, Stated, length_of, stated


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """What a function makes of a text."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse; the function says what is wrong."""
        return self.parse(str(value))


class Place(click.Path):
    """A file or folder, with a name: Path takes an empty one, as of a variable that is not set, for this folder."""

    def __init__(self, name: str) -> None:
        super().__init__(path_type=Path)
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty name."""
        return super().convert(_named(value), param, ctx)


def _named(text: str) -> str:
    if text == "":
        raise BadParameter("the name is empty")
    return text


def _tokens(text: str) -> int:
    try:
        return length_of(text)
    except LongRopeError as error:
        raise BadParameter(f"{error.message}; {error.hint}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadParameter(f"{text.strip()!r} is not a number") from None


def _number_or(words: Sequence[str], text: str) -> float | str:
    if text in words:
        return text
    try:
        return float(text)
    except ValueError:
        raise BadParameter(f"{text!r} is neither a number nor {' or '.join(words)}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


LENGTH = Parsed("N", _tokens)
LENGTHS = Parsed("LIST", lambda text: tuple(map(_tokens, text.split(","))))
NAMES = Parsed("LIST", _names)
FLOATS = Parsed("LIST", lambda text: list(map(_number, text.split(","))))
NAME = Parsed("name", _named)
FILE, FOLDER, PLACE = Place("FILE"), Place("FOLDER"), Place("PLACE")

model_argument = argument("model", type=NAME)
original_option = option(
    "--original-length", type=LENGTH, help="The trained window, if the config does not state it, or states it wrongly."
)
factors_option = option(
    "--factors", type=FILE, help="File written by `search` or `factors`; default: the factors in the model's config."
)
switch_length_option = option(
    "--switch-length",
    type=LENGTH,
    help="Tokens above which the long RoPE is used; default: the model's own, or its trained window.",
)
again_option = option("--extend-again", is_flag=True, help="Accept a model that was extended before.")
corpus_option = option(
    "--cache", type=FOLDER, help="Where tokenised sources are kept.  [default: ~/.cache/longrope2/corpus]"
)
wandb_option = option("--wandb", metavar="PROJECT", help="Also log to Weights & Biases.")
json_option = option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def options_of(kind: type, *without: str, from_file: bool = False) -> Callable[[Any], Any]:
    """The options of a config class as those of a command, but for some.

    With `from_file` one that is not given is None: a file may say it.
    """

    def decorate(command: Any) -> Any:
        for entry in reversed(list(stated(kind))):  # a decorator further down comes first
            if entry.option.command and entry.name not in without:
                command = _click_option(entry, from_file=from_file)(command)
        return command

    return decorate


def taken(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a config class, taken out of all that a command was given."""
    return {entry.name: options.pop(entry.name) for entry in stated(kind) if entry.name in options}


def _click_option(entry: Stated, *, from_file: bool) -> Callable[[Any], Any]:
    facts, default, usual = entry.option, entry.default, entry.option.usual
    if from_file:
        unsaid = default in (MISSING, None, ()) or default is False
        default, usual = None, usual if unsaid else str(default)
    kinds = [part for part in _parts(entry.hint) if part is not NoneType]
    flag, settings = entry.flag, dict[str, Any](metavar=facts.metavar)
    if facts.parse is not None:
        settings |= {"multiple": facts.repeated, "type": Parsed("TEXT", facts.parse)}
    elif kinds == [bool]:
        settings = {"is_flag": True} if entry.default is False else {}
        flag += "" if settings else f"/--no-{flag.removeprefix('--')}"
    elif facts.repeated:
        settings |= {"multiple": True, "type": str}
    else:
        settings["type"] = _click_type(kinds)
    if default is MISSING:
        settings["required"] = True
    elif default != ():  # which click would parse; None, as of an option that was not given, is the default, too
        settings |= {"default": default, "show_default": default is not None}
    return option(flag, entry.name, help=facts.help + (f"  [default: {usual}]" if usual else ""), **settings)


def _click_type(kinds: Sequence[Any]) -> Any:
    """What parses the values of a type; an optional one without its None."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words:
        return Choice(words) if float not in kinds else Parsed("NUMBER", partial(_number_or, words))
    (kind,) = [part for part in kinds if get_origin(part) is tuple] or kinds
    known: dict[Any, Any] = {Length: LENGTH, FileName: FILE}
    known |= {tuple[Length, ...]: LENGTHS, tuple[float, ...]: FLOATS, tuple[str, ...]: NAMES}
    if get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Literal:
        return NAMES
    return known.get(kind, kind)


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
