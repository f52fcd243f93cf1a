"""A recipe: everything that decides an extension, in one TOML file; some come with the package."""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from longrope2 import ledger
from longrope2.console import say
from longrope2.data.config import Bucket, PlanConfig, RecallConfig, Source, beside, chained_buckets
from longrope2.errors import LongRopeError, all_problems
from longrope2.evaluation.config import EvaluationConfig
from longrope2.export.config import ExportTable, VerifyConfig
from longrope2.methods import METHODS
from longrope2.models import TINY
from longrope2.options import (
    Length,
    conforms,
    in_recipe,
    in_toml,
    in_words,
    option,
    plain,
    schema,
    unknown,
    wrong_entries,
)
from longrope2.search.config import SearchConfig, search_config
from longrope2.training.config import TrainConfig

DEFAULT_PRESET = "tiny-laptop"
"""The recipe of the model that comes with the package."""
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
CLOSED_FORMS = [name for name in METHODS if name != ledger.AFTER_TRAINING]
RECALL = "recall"
"""The path of a source that stands for the documents of [recall], whatever folders there are."""
Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to do with which model; tables hold what the file says, and defaults are those of each command."""

    model: str = option(TINY, "Folder with config.json, .gguf file, hub id, or the word tiny.")
    target_length: Length = option(help="Window to reach, in tokens.", least=1)
    original_length: Length | None = option(
        None, "The trained window, if the config does not state it, or states it wrongly.", least=1
    )
    extend_again: bool = option(False, "Accept a model that was extended before.")
    methods: tuple[str, ...] = option(("pi", "ntk", "yarn"), "Closed forms to compare with.")
    description: str = option("", "Free text for readers of the recipe.")
    search: Table = field(default_factory=dict)
    plan: Table = field(default_factory=dict)
    source: tuple[Table, ...] = ()
    bucket: tuple[Table, ...] = ()
    recall: Table | None = None
    """Makes recall documents, which are then the source `recall`."""
    train: Table = field(default_factory=dict)
    evaluate: tuple[Table, ...] = ()
    export: Table = field(default_factory=dict)
    verify: Table = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it says anything of training; without it a model is extended by the search alone."""
        return any((self.source, self.bucket, self.plan, self.train, self.recall is not None))

    def search_config(self) -> SearchConfig:
        """What [search] says; the space, where it does not say, is the one that suits what follows.

        Before training the wide space finds far more needles, after it the paper's does (docs/results.md).
        """
        suits = {} if self.trains or self.search.get("method") == "longrope" else {"space": "wide"}
        return search_config(target_length=self.target_length, **{**suits, **self.search})

    def plan_config(self, original_length: int) -> PlanConfig:
        """What [plan] and [[bucket]] say."""
        return PlanConfig(
            target_length=self.target_length,
            original_length=original_length,
            buckets=chained_buckets(self.bucket),
            **self.plan,
        )

    def sources(self, recall: Path) -> tuple[Source, ...]:
        """What [[source]] says; the documents of [recall] are in the file `recall`."""
        return tuple(
            Source(**({"name": RECALL, **table, "path": str(recall)} if table["path"] == RECALL else table))
            for table in self.source
        )


def default_evaluations(original_length: int, target_length: int) -> tuple[Table, ...]:
    """What a recipe without [[evaluate]] measures: needles by length, and what is kept in the trained window."""
    lengths = [original_length]
    while 2 * lengths[-1] < target_length:
        lengths.append(2 * lengths[-1])
    return (
        {"suites": ("niah",), "lengths": (*lengths, target_length), "samples": 2},
        {"suites": ("perplexity",), "lengths": (original_length,), "tasks": ("full",)},
    )


TABLES: dict[str, type] = {
    "search": SearchConfig,
    "plan": PlanConfig,
    "source": Source,
    "bucket": Bucket,
    "recall": RecallConfig,
    "train": TrainConfig,
    "evaluate": EvaluationConfig,
    "export": ExportTable,
    "verify": VerifyConfig,
}
"""Whose options a table holds: those of the command of that stage."""


def table_keys() -> dict[str, dict[str, Any]]:
    """The keys of each table with their types."""
    return {table: {entry.name: entry.hint for entry in in_recipe(kind)} for table, kind in TABLES.items()}


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, with which editors complete and check one."""
    tables = {table: schema(kind) for table, kind in TABLES.items()}
    whole = schema(Recipe)
    whole["properties"] |= {
        table: {"type": "array", "items": content} if _is_list(table) else content for table, content in tables.items()
    }
    whole["properties"]["methods"]["items"] = {"enum": CLOSED_FORMS}
    # The command line may give what is missing.
    return {"$schema": SCHEMA, "title": "longrope2 recipe", **whole, "required": []}


def read_recipe(
    name: str | Path | None,
    *,
    model: str | None = None,
    target_length: int | None = None,
    original_length: int | None = None,
    extend_again: bool = False,
    note: Callable[[str], None] = say,
) -> Recipe:
    """A recipe by file or preset name; what is given of the rest replaces its own.

    Without a name it is the preset of the tiny model, or each command's defaults for any other model. Another target
    than the recipe's own also changes the lengths that it measures and writes documents of, which is noted.
    """
    if name is None and model in (None, TINY):
        name = DEFAULT_PRESET
    values: Table = {}
    if name is not None:
        where, text, folder = find_recipe(name)
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also of an integer that is too long
            raise LongRopeError(
                f"{where}: not valid TOML ({error})", hint="see docs/extend.md for an example"
            ) from error
        values = _checked(values, where)
        values["source"] = tuple(
            source if folder is None or source["path"] == RECALL else beside(folder, source)
            for source in values.get("source", ())
        )
    if target_length is not None and values.get("target_length", target_length) != target_length:
        _fit_lengths(values, target_length, note)
    given = {
        "model": model,
        "target_length": target_length,
        "original_length": original_length,
        "extend_again": extend_again or None,
    }
    values |= {key: value for key, value in given.items() if value is not None}
    if "target_length" not in values:
        raise LongRopeError("the target length is missing", hint="give --target-length, e.g. 128k")
    recipe = Recipe(**values)
    if Path(recipe.model).name in ("", ".."):  # the folder we are in, or above: exports and pages need its name
        return replace(recipe, model=str(Path(recipe.model).resolve()))
    return recipe


def _fit_lengths(values: Table, target: int, note: Callable[[str], None]) -> None:
    """No length is beyond the target, and what is evaluated at the recipe's own target is so at this one, too."""
    own = values["target_length"]
    for key in ("recall", "evaluate"):
        tables = values.get(key, ()) if _is_list(key) else filter(None, [values.get(key)])
        for table in tables:
            lengths = table.get("lengths", ())
            reached = (target,) if key == "evaluate" and own in lengths else ()
            fitting = tuple(dict.fromkeys((*(min(length, target) for length in lengths), *reached)))
            if fitting != lengths:
                table["lengths"] = fitting
                was, now = (", ".join(f"{length:,}" for length in each) for each in (lengths, fitting))
                note(f"{key}: lengths {was} of the recipe, made for a target of {own:,}, become {now}")


def presets() -> dict[str, str]:
    """Names and texts of the recipes in the package."""
    folder = resources.files("longrope2") / "recipes"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


def find_recipe(name: str | Path) -> tuple[str, str, Path | None]:
    """What to call a recipe, its text, and the folder its paths are relative to."""
    path = Path(name)
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8"), path.parent
        except OSError as error:
            raise LongRopeError(f"{path}: cannot be read ({error.strerror})", hint="check its permissions") from error
        except UnicodeDecodeError as error:
            raise LongRopeError(
                f"{path}: not UTF-8 (byte {error.start:,})", hint="a recipe is a TOML file; save it as UTF-8"
            ) from error
    known = presets()
    if str(name) in known:
        return f"recipe {name}", known[str(name)], None
    near = difflib.get_close_matches(str(name), known, n=1)
    guess = f"did you mean '{near[0]}'? " if near else ""
    raise LongRopeError(
        f"{name}: neither a file nor a recipe of the package",
        hint=f"{guess}there are {', '.join(known)}; `longrope2 extend --show-recipe NAME` prints one",
    )


def _checked(values: Table, where: str) -> Table:
    """The file's content with lists as tuples; every wrong key and value is named at once."""
    top = get_type_hints(Recipe)
    tables = table_keys()
    problems = [unknown(key, top) for key in values if key not in top]
    checked: Table = {}
    for key, value in values.items():
        if key not in top:
            continue
        hint = Table if key in tables and not _is_list(key) else top[key]
        checked[key] = plain(value)
        if not conforms(checked[key], hint) or (_is_list(key) and not value):
            problems.append(f"{key} must be {_table_in_words(key, hint)}, got {in_toml(value)}")
            continue
        for number, table in enumerate(checked[key] if _is_list(key) else [checked[key]] if key in tables else []):
            subject = f"{key} {number + 1}" if _is_list(key) else key
            problems += _wrong_entries(subject, table, tables[key])
            problems += [f"{subject}: {name} is missing" for name in _required(key) if name not in table]
    methods = checked.get("methods", ())
    if conforms(methods, top["methods"]):
        problems += [f"method {name!r} is not known" for name in methods if name not in CLOSED_FORMS]
        problems += [f"method {name!r} is named twice" for name in sorted(set(methods)) if methods.count(name) > 1]
    if problems:
        known = ", ".join(f.name for f in fields(Recipe))
        raise LongRopeError(all_problems(where, problems), hint=f"a recipe knows {known}; see docs/extend.md")
    return checked


def _required(key: str) -> list[str]:
    """What a table must have, since there is no default for it."""
    return [entry.name for entry in in_recipe(TABLES[key]) if entry.default is MISSING]


def _is_list(key: str) -> bool:
    return key in ("source", "bucket", "evaluate")


def _wrong_entries(subject: str, table: Table, hints: Mapping[str, Any]) -> list[str]:
    # Commands take an empty list for their default, and so for more than nothing.
    empty = [name for name, value in table.items() if name in hints and value == ()]
    return wrong_entries(subject, table, hints) + [
        f"{subject}: {name} is empty (name what it should have, or omit it)" for name in empty
    ]


def _table_in_words(key: str, hint: Any) -> str:
    if _is_list(key):
        return f"a list of tables ([[{key}]])"
    return f"a table ([{key}])" if hint == Table else in_words(hint)
