"""An option is stated once: in a config class, from which command line, recipes and Python have it."""

import inspect
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack, get_origin, get_type_hints

import pytest
from click.testing import CliRunner

import longrope2
from longrope2.command_options import options_of
from longrope2.errors import LongRopeError, counted
from longrope2.keywords import EvaluateOptions, SearchOptions
from longrope2.options import FileName, Length, broken_limits, build, identity, option, stated, wrong_types
from longrope2.reference import KEYWORDS, keywords, reference

ADDED = """
import importlib, importlib.util, re, sys
from click.testing import CliRunner

spec = importlib.util.find_spec("longrope2.{room}.config")
source = open(spec.origin).read()
line = '    sparkle: int = option(3, "How much it sparkles.", least=1)'
docstring = r'class {kind}\\b.*?\\n    \"\"\".*?\"\"\"\\n'
changed, count = re.subn(docstring, lambda found: found[0] + line + chr(10), source, flags=re.S)
assert count == 1
stage = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
exec(compile(changed, spec.origin, "exec"), stage.__dict__)
importlib.import_module("longrope2.{room}").config = stage

import longrope2
from longrope2.cli import cli
from longrope2.pipeline.recipe import read_recipe
from longrope2.errors import LongRopeError, counted

def message(call):
    try:
        call()
    except LongRopeError as error:
        return str(error)
    raise AssertionError("taken")

help = CliRunner().invoke(cli, [*"{command}".split(), "--help"]).output
assert "--sparkle INTEGER" in help and "How much it sparkles. [default: 3]" in " ".join(help.split()), help
recipe = sys.argv[1]
with open(recipe, "w") as file:
    file.write('model = "tiny"\\ntarget_length = 512\\n[{table}]\\n{needed}sparkle = 5\\n')
assert read_recipe(recipe).{table}["sparkle"] == 5
from longrope2.reference import HEADING, reference
assert "- `--sparkle INTEGER`: How much it sparkles. [default: 3]" in reference(HEADING)
with open(recipe, "w") as file:
    file.write('model = "tiny"\\ntarget_length = 512\\n[{table}]\\nsparkle = "much"\\n')
found = message(lambda: read_recipe(recipe))
assert '{table}: sparkle must be a whole number, got "much"' in found, found
found = message(lambda: {call}sparkle=0))
assert "sparkle must be at least 1, got 0" in found, found
"""
STAGES = {
    "search": ("search", "SearchConfig", "search", "longrope2.search_factors('tiny', 512, "),
    "plan": ("data", "PlanConfig", "data plan", "stage.PlanConfig(target_length=512, original_length=256, "),
    "recall": ("data", "RecallConfig", "data recall", "stage.RecallConfig(lengths=(64,), "),
    "train": ("training", "TrainConfig", "train", "longrope2.train('tiny', 'factors', 'plan', 'output', "),
    "export": ("export", "Exporting", "export", "longrope2.export_model('tiny', 'nowhere', "),
}


@pytest.mark.parametrize("table", STAGES)
def test_an_option_added_in_one_line_is_in_help_recipe_python_and_reference(table, tmp_path):
    room, kind, command, call = STAGES[table]
    needed = "lengths = [64]\\n" if table == "recall" else ""
    script = ADDED.format(table=table, room=room, kind=kind, command=command, call=call, needed=needed)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "recipe.toml")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_reference_lists_the_options_there_are():
    page = (Path(__file__).parent.parent / "docs" / "reference.md").read_text()
    assert reference(page) == page, "run `make reference`"


def test_the_python_functions_have_the_options_there_are():
    assert keywords() == KEYWORDS.read_text(), "run `make reference`"
    given = {name: inspect.signature(getattr(longrope2, name)).parameters["options"].annotation
             for name in ("rescale", "search_factors", "train", "evaluate", "export_model")}  # fmt: skip
    assert given["search_factors"] == Unpack[SearchOptions]
    assert all(get_origin(annotation) is Unpack for annotation in given.values())
    assert get_type_hints(SearchOptions)["space"] == Literal["paper", "wide"]
    assert get_type_hints(EvaluateOptions)["lengths"] == Sequence[int | str]


@dataclass(frozen=True, kw_only=True)
class Inner:
    rounds: int = option(2, "Rounds.", least=1, most=(1 << 63) - 1)
    share: float = option(0.5, "Share.", above=0, most=1)
    rest: float = option(0.5, "Rest.", least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Outer:
    length: Length = option(help="Tokens.")
    word: Literal["a", "b"] | None = option(None, "A word.", usual="a")
    warmth: float | Literal["searched"] = option(1.0, "Warmth.", least=0, most=2)
    depths: tuple[float, ...] = option((), "Depths.", least=0, most=1)
    names: tuple[str, ...] = option((), "Names.", flag="--name", repeated=True)
    switch: bool | None = option(None, "Or not.")
    quick: bool = option(False, "Quick.", elastic=True)
    source: FileName | None = option(None, "Source.")
    inner: Inner = option(Inner)


def test_configs_inside_a_config_are_flat_from_outside():
    made = build(Outer, "outer", {"length": 8, "rounds": 3, "depths": [0.5], "names": [Path("x")]})
    assert made == Outer(length=8, depths=(0.5,), names=("x",), inner=Inner(rounds=3))
    assert [entry.name for entry in stated(Outer)][-3:] == ["rounds", "share", "rest"]
    assert identity(made) == {
        "length": 8, "word": None, "warmth": 1.0, "depths": (0.5,), "names": ("x",), "switch": None, "source": None,
        "rounds": 3, "share": 0.5, "rest": 0.5,
    }  # fmt: skip


def test_every_wrong_name_type_and_limit_is_named():
    with pytest.raises(LongRopeError) as caught:
        build(Outer, "outer", {"round": 3, "speed": 1})
    assert "unknown key 'round', did you mean 'rounds'?" in caught.value.message
    assert "unknown key 'speed'" in caught.value.message
    assert "length is missing" in caught.value.message
    wrong = Outer(length=True, word="c", warmth="hot", depths=(0.5, "x"), inner=Inner(rounds=1.5, share=float("nan")))
    assert wrong_types(wrong) == [
        'length must be a length such as "32k", got true',
        'word must be "a" or "b", got "c"',
        'warmth must be a number or "searched", got "hot"',
        'depths must be a list in brackets, each a number, got [0.5, "x"]',
        "rounds must be a whole number, got 1.5",
        "share must be a number, got NaN",
    ]
    outside = Outer(length=8, warmth=3.0, depths=(0.5, 2.0), inner=Inner(rounds=0, share=0.0, rest=1.0))
    assert wrong_types(outside) == []
    assert broken_limits(outside) == [
        "warmth must lie from 0 to 2, got 3.0",
        "depths must lie from 0 to 1, got [0.5, 2.0]",
        f"rounds must lie from 1 to {(1 << 63) - 1}, got 0",
        "share must lie in (0, 1], got 0.0",
        "rest must lie in [0, 1), got 1.0",
    ]


def test_the_command_line_parses_every_type():
    import click

    found = {}
    command = click.command()(options_of(Outer, "share", "rest")(lambda **values: found.update(values)))
    given = "--length 8k --word b --warmth searched --depths 0,0.5 --name x --name y --no-switch --quick --rounds 4"
    result = CliRunner().invoke(command, [*given.split(), "--source", "a/b"])
    assert result.exit_code == 0, result.output
    assert found == {
        "length": 8192, "word": "b", "warmth": "searched", "depths": [0.0, 0.5], "names": ("x", "y"), "switch": False,
        "quick": True, "rounds": 4, "source": Path("a/b"),
    }  # fmt: skip
    for wrong in ("--length x", "--length 8 --word c", "--length 8 --warmth hot", "--length 8 --source=", ""):
        assert CliRunner().invoke(command, wrong.split()).exit_code == 2


def test_what_a_file_may_say_is_none_unless_given():
    import click

    @dataclass(frozen=True, kw_only=True)
    class Mixed(Inner):
        length: Length = option(help="Tokens.")
        start: int = option(0, "Start.")
        quick: bool = option(False, "Quick.")
        sizes: tuple[int, ...] = option((), "Sizes.", flag="--size", repeated=True, parse=lambda text: len(text))

    found = {}
    command = click.command()(options_of(Mixed, from_file=True)(lambda **values: found.update(values)))
    assert CliRunner().invoke(command, ["--size", "abc", "--size", ""]).exit_code == 0
    assert found == {"length": None, "start": None, "quick": None, "rounds": None, "share": None, "rest": None,
                     "sizes": (3, 0)}  # fmt: skip
    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "--start INTEGER Start. [default: 0]" in shown
    assert "--quick Quick. --size" in shown
    assert "--length N Tokens. --start" in shown


def test_one_thing_is_not_many():
    assert [counted(number, "document") for number in (0, 1, 2000)] == ["0 documents", "1 document", "2,000 documents"]
