"""What is generated: a part of docs/reference.md, keywords.py (the types of Python's options), docs/collection.md."""

import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from longrope2.cli import cli
from longrope2.collection import collection_page
from longrope2.evaluation.config import EvaluationConfig
from longrope2.export.config import ExportConfig
from longrope2.files import write_text
from longrope2.methods import METHODS
from longrope2.options import Length, Stated, in_recipe, in_toml, stated
from longrope2.pipeline.recipe import TABLES, Recipe
from longrope2.search.config import SearchConfig
from longrope2.training.config import TrainConfig

HEADING = "## Options\n"
"""Everything below it is generated."""
INTRODUCTION = "`make reference` writes this list from the same classes that `--help` and recipes come from."
KEYS = (
    "The keys of a recipe's table are options of its command, with underscores for dashes ({renamed}). At the top, "
    "{shared} are as for `extend`. Keys that are no options:"
)
COMMANDS = {"": "extend", "plan": "data plan", "recall": "data recall"}
"""Of tables that do not have the name of their command; the first is the top of a recipe."""
WIDTH = 120
KEYWORDS = Path(__file__).with_name("keywords.py")
KEYWORDS_HEAD = '''"""The options of the Python functions, with their types; `make reference` writes this file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict
'''
PARAMETERS = ("target_length", "suites")
"""Options that are parameters of a function themselves."""


def reference(page: str) -> str:
    """The page with its generated part as it should be."""
    kept, heading, _ = page.partition(HEADING)
    commands = dict(_commands(cli, click.Context(cli, info_name="longrope2", **cli.context_settings)))
    parts = [INTRODUCTION, *(part for context in commands.values() for part in _command(context))]
    parts += _keys({name: _names(context.command) for name, context in commands.items()})
    return kept + heading + "\n" + "\n\n".join(parts) + "\n"


def _commands(group: click.Group, parent: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Every command by its words."""
    for name, command in group.commands.items():
        context = click.Context(command, parent=parent, info_name=name)
        if isinstance(command, click.Group):
            yield from _commands(command, context)
        else:
            yield context.command_path.removeprefix("longrope2 "), context


def _command(context: click.Context) -> Iterator[str]:
    command = context.command
    arguments = " ".join(command.collect_usage_pieces(context)[1:])
    yield f"### {context.command_path.removeprefix('longrope2 ')}"
    yield f"`{context.command_path} {arguments}`: {command.get_short_help_str(limit=WIDTH)}"
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    if records:
        yield "\n".join(_line(*record) for record in records if record is not None)


def _names(command: click.Command) -> set[str | None]:
    return {parameter.name for parameter in command.params}


def _keys(commands: dict[str, set[str | None]]) -> Iterator[str]:
    """Which keys of a recipe are options, and what the others mean."""
    renamed = {entry.flag: entry.name for kind in TABLES.values() for entry in in_recipe(kind) if entry.option.flag}
    text = KEYS.format(
        renamed=", ".join(f"`{flag}` is `{name}`" for flag, name in renamed.items()),
        shared=", ".join(f"`{entry.name}`" for entry in in_recipe(Recipe) if entry.name in commands["extend"]),
    )
    yield "### Keys of a recipe"
    yield textwrap.fill(text, WIDTH, break_on_hyphens=False)
    yield "\n".join(
        _line(f"{table}.{entry.name}" if table else entry.name, _described(entry))
        for table, kind in {"": Recipe, **TABLES}.items()
        for entry in in_recipe(kind)
        if entry.name not in commands.get(COMMANDS.get(table, table), ())
    )


def _described(entry: Stated) -> str:
    """An option's help with its default, as `--help` has it."""
    usual = entry.option.usual or (None if entry.default in (MISSING, None, (), "") else in_toml(entry.default))
    mark = "required" if entry.default is MISSING else f"default: {usual}" if usual else ""
    return entry.option.help + (f"  [{mark}]" if mark else "")


def _line(name: str, text: str) -> str:
    """An item of a list; asterisks in a help text are no markup."""
    line = f"- `{name}`: {' '.join(text.split())}".replace("*", "\\*")
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def keywords() -> str:
    """The text of keywords.py."""
    kinds = {"Search": SearchConfig, "Train": TrainConfig, "Evaluate": EvaluationConfig, "Export": ExportConfig}
    tables = {
        name: {entry.name: entry.hint for entry in stated(kind) if entry.name not in PARAMETERS}
        for name, kind in kinds.items()
    }
    return "\n\n".join(
        [KEYWORDS_HEAD, *(_typed(name, hints) for name, hints in ({"Rescale": _of_methods()} | tables).items())]
    )


def _of_methods() -> dict[str, Any]:
    """What any method takes."""
    found: dict[str, Any] = {}
    for method in METHODS.values():
        hints = get_type_hints(method.rescaling)
        names = [
            each.name
            for each in inspect.signature(method.rescaling).parameters.values()
            if each.kind == each.KEYWORD_ONLY
        ]
        found |= {name: hints[name] for name in names}
    return found


def _typed(name: str, hints: Mapping[str, Any]) -> str:
    lines = [f"    {option}: {_annotation(hint)}" for option, hint in hints.items()]
    return "\n".join([f"class {name}Options(TypedDict, total=False):", *lines]) + "\n"


def _annotation(hint: Any) -> str:
    """A type as Python takes it: lists for tuples, paths for their text, "32k" for a length."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint == Length:
        return "int | str"
    if origin is Annotated:
        return _annotation(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(_annotation, parts)))
    if origin is Literal:
        return f"Literal[{', '.join(map(in_toml, parts))}]"
    if origin is not None:
        return f"Sequence[{'str' if parts[0] is str else _annotation(parts[0])}]"
    return {str: "str | Path", NoneType: "None"}.get(hint, hint.__name__)


if __name__ == "__main__":
    write_text(KEYWORDS, keywords())
    place = Path(sys.argv[1])
    write_text(place, reference(place.read_text(encoding="utf-8")))
    listed = place.with_name("collection.md")
    write_text(listed, collection_page(listed.read_text(encoding="utf-8")))
