"""A recipe: everything that decides an extension, in one TOML file; some come with the package."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from longrope2 import ledger
from longrope2.calibration.config import CalibrationConfig
from longrope2.console import say
from longrope2.data.config import Bucket, PlanConfig, RecallConfig, Source, beside, chained_buckets, ending_at
from longrope2.errors import LongRopeError, all_problems
from longrope2.evaluation.config import EvaluationConfig
from longrope2.export.config import ExportTable, VerifyConfig, unknown_engine
from longrope2.files import parse_toml, read_bounded
from longrope2.methods import METHODS
from longrope2.models import TINY
from longrope2.options import (
    Length,
    Stated,
    conforms,
    in_recipe,
    in_toml,
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
    calibrate: Table | None = None
    """Measures where to switch: training, and all that follows, goes by it. None: at the trained window."""
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

        Before training the wide space finds far more needles; after it the paper's does on SmolLM2 (docs/results.md).
        """
        suits = {} if self.trains or self.search.get("method") == "longrope" else {"space": "wide"}
        return search_config(target_length=self.target_length, **{**suits, **self.search})

    def calibration_config(self) -> CalibrationConfig:
        """What [calibrate] says; the books are those of the search where it names none."""
        return CalibrationConfig(**{"books": self.search.get("books"), **(self.calibrate or {})})

    def plan_config(self, switch_length: int) -> PlanConfig:
        """What [plan] and [[bucket]] say; a bucket that reaches over the switch ends there, and the next begins there.

        Nobody can know a switch that is measured when they write buckets.
        """
        buckets = chained_buckets(self.bucket)
        return PlanConfig(
            target_length=self.target_length,
            original_length=switch_length,
            buckets=buckets if self.calibrate is None else ending_at(switch_length, buckets),
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
    "calibrate": CalibrationConfig,
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


def table_keys() -> dict[str, dict[str, Stated]]:
    """The options of each table."""
    return {table: {entry.name: entry for entry in in_recipe(kind)} for table, kind in TABLES.items()}


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
            values = parse_toml(text)
        except ValueError as error:  # also of an integer that is too long
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
            return str(path), read_bounded(path).decode(), path.parent
        except OSError as error:
            raise LongRopeError(f"{path}: cannot be read ({error.strerror})", hint="check its permissions") from error
        except UnicodeDecodeError as error:
            raise LongRopeError(
                f"{path}: not UTF-8 (byte {error.start:,})", hint="a recipe is a TOML file; save it as UTF-8"
            ) from error
        except ValueError as error:
            raise LongRopeError(f"{path}: {error}", hint="a recipe is a TOML file") from error
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
    """The file's content as configs take it; every wrong key and value is named at once.

    What breaks a limit is named beside them. Alone it is left to the checks of the stages, which know more.
    """
    if _problems(values, limits=False):
        listed = ", ".join(entry.name for entry in fields(Recipe))
        problems = all_problems(where, _problems(values, limits=True))
        raise LongRopeError(problems, hint=f"a recipe knows {listed}; see docs/extend.md")
    known, tables = _top_keys(), table_keys()
    return {
        key: _read(value, tables[key]) if key in tables else plain(value, known[key].hint)
        for key, value in values.items()
    }


def _problems(values: Table, *, limits: bool) -> list[str]:
    known, tables = _top_keys(), table_keys()
    found = []
    for key, value in values.items():
        if key not in known and key not in tables:
            found.append(unknown(key, [*known, *tables]))
        elif key in known:
            found += wrong_entries({key: value}, known, limits=limits)
        elif not _is_of_tables(key, value):
            found.append(f"{key} must be {_table_in_words(key)}, got {in_toml(value)}")
        else:
            for number, table in enumerate(value if _is_list(key) else [value]):
                subject = f"{key} {number + 1}" if _is_list(key) else key
                wrong = wrong_entries(table, tables[key], limits=limits)
                # Commands take an empty list for their default, and so for more than nothing.
                empty = [name for name, given in table.items() if name in tables[key] and given == []]
                wrong += [f"{name} is empty (name what it should have, or omit it)" for name in empty]
                wrong += [f"{name} is missing" for name in _required(key) if name not in table]
                found += [f"{subject}: {problem}" for problem in wrong]
    methods = values.get("methods", ())
    if conforms(plain(methods), known["methods"].hint):
        found += [f"method {name!r} is not known" for name in methods if name not in CLOSED_FORMS]
        found += [f"method {name!r} is named twice" for name in sorted(set(methods)) if methods.count(name) > 1]
    verify = values.get("verify")
    engines = verify.get("engines", ()) if isinstance(verify, dict) else ()
    if limits and conforms(plain(engines), tables["verify"]["engines"].hint):
        found += [f"verify: {problem}" for problem in map(unknown_engine, engines) if problem]
    return found


def _top_keys() -> dict[str, Stated]:
    return {entry.name: entry for entry in in_recipe(Recipe)}


def _is_of_tables(key: str, value: Any) -> bool:
    if not _is_list(key):
        return isinstance(value, dict)
    return isinstance(value, list) and value != [] and all(isinstance(table, dict) for table in value)


def _read(value: Any, known: Mapping[str, Stated]) -> Any:
    """A table, or a list of them, with its values as a config takes them."""
    if isinstance(value, list):
        return tuple(_read(table, known) for table in value)
    return {name: plain(given, known[name].hint if name in known else Any) for name, given in value.items()}


def _required(key: str) -> list[str]:
    """What a table must have, since there is no default for it."""
    return [entry.name for entry in in_recipe(TABLES[key]) if entry.default is MISSING]


def _is_list(key: str) -> bool:
    return key in ("source", "bucket", "evaluate")


def _table_in_words(key: str) -> str:
    return f"a list of tables ([[{key}]])" if _is_list(key) else f"a table ([{key}])"
