"""The steps of an extension: what each one does, what decides its result, and what it leaves behind."""

import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longrope2 import ledger
from longrope2.console import warn
from longrope2.data.config import PACKAGE_BOOKS, Mix, PlanConfig, RecallConfig, Source, chained_buckets
from longrope2.data.corpus import open_corpus
from longrope2.data.plan import read_plan, write_plan
from longrope2.data.recall import write_recall
from longrope2.distributed import world
from longrope2.errors import LongRopeError
from longrope2.evaluation.config import EvaluationConfig, lengths_for
from longrope2.evaluation.evaluate import run_evaluation
from longrope2.export.config import ExportTable, VerifyConfig
from longrope2.export.engines import Format, verifiable
from longrope2.export.export import export
from longrope2.export.verify import verify
from longrope2.figures import length_label
from longrope2.files import write_json, write_text
from longrope2.models import ModelInfo, load_tokenizer, rescale_model, weights_fingerprint
from longrope2.options import identity, stated
from longrope2.pipeline.recipe import RECALL, Recipe
from longrope2.report.gather import gather
from longrope2.report.page import write_report
from longrope2.report.summary import summarise
from longrope2.search.config import SearchConfig, search_config
from longrope2.search.run import run_search
from longrope2.training.config import TrainConfig, train_config
from longrope2.training.train import train

DATA_PATHS = ("data", "books")
"""The options of an evaluation that name files."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all steps share."""

    folder: Path
    recipe: Recipe
    info: ModelInfo
    cache: Path | None
    """Where tokenised sources are kept."""

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the model and the task."""
        return {
            "weights": weights_fingerprint(self.info),
            "original_length": self.info.rope.original_length,
            "target_length": self.recipe.target_length,
            "extend_again": self.recipe.extend_again,
        }


@dataclass(frozen=True, kw_only=True)
class Step:
    """One piece of work."""

    name: str
    """Its stage, and for one of several in it a path below."""
    needs: tuple[str, ...]
    """Steps whose results it reads."""
    options: Mapping[str, Any]
    """What decides its result, besides the model and what it needs."""
    outputs: tuple[str, ...]
    """Files or folders that are there when it is done."""
    work: Callable[[], None]
    together: bool = False
    """Whether every process takes part, or the main one alone."""
    replaces: bool = False
    """Whether it simply writes over what it made before: cheap, and made from what is kept."""

    @property
    def stage(self) -> str:
        """The stage it belongs to."""
        return self.name.partition("/")[0]


def make_steps(setting: Setting, present: Container[str]) -> list[Step]:
    """The steps of the stages that are part of a run, in order.

    Without training the model itself is exported with the factors found.
    """
    trains = "train" in present
    everything = [_search_step(setting)] if "search" in present else []
    if "data" in present:
        everything.append(_data_step(setting))
    if trains:
        everything.append(_train_step(setting))
    evaluations = list(_evaluate_steps(setting, trains=trains)) if "evaluate" in present else []
    everything += evaluations
    exporting = _export_step(setting, "train" if trains else "search", tuple(step.name for step in evaluations))
    if "export" in present:
        everything.append(exporting)
    if "verify" in present:
        everything.append(
            Step(
                name="verify",
                needs=("export",),
                options=identity(VerifyConfig(**setting.recipe.verify)),
                outputs=(ledger.VERIFIED,),
                work=partial(_verify, setting, exporting.outputs),
            )
        )
    if "report" in present:
        everything.append(
            Step(
                name="report",
                needs=tuple(step.name for step in everything),
                options={},
                outputs=(ledger.PAGE,),
                work=partial(_report, setting),
                replaces=True,
            )
        )
    return everything


def recipe_search(recipe: Recipe) -> SearchConfig:
    """The configuration of the table [search]."""
    return search_config(target_length=recipe.target_length, **recipe.search)


def _search_step(setting: Setting) -> Step:
    config = recipe_search(setting.recipe)

    def work() -> None:
        with world() as here:
            run_search(setting.info, config, setting.folder / "search", here, extend_again=setting.recipe.extend_again)

    options = by_content(identity(config), "books")
    outputs = (ledger.FACTORS, ledger.SEARCH)
    return Step(name="search", needs=(), options=options, outputs=outputs, work=work, together=True)


def _data_step(setting: Setting) -> Step:
    recipe = setting.recipe
    options: dict[str, Any] = {
        "plan": recipe.plan,
        "source": [
            source if source["path"] in (PACKAGE_BOOKS, RECALL) else by_content(source, "path")
            for source in recipe.source
        ],
        "bucket": list(recipe.bucket),
        "recall": by_content(recipe.recall or {}, "books"),
    }
    work = partial(_make_data, setting)
    return Step(name="data", needs=(), options=options, outputs=(ledger.PLAN,), work=work)


def recipe_plan(setting: Setting) -> PlanConfig:
    """The configuration of the tables [plan] and [[bucket]]."""
    recipe = setting.recipe
    return PlanConfig(
        target_length=recipe.target_length,
        original_length=setting.info.rope.original_length,
        buckets=chained_buckets(recipe.bucket),
        **recipe.plan,
    )


def recipe_sources(recipe: Recipe, recall: Path) -> tuple[Source, ...]:
    """Those of the tables [[source]]; the documents of [recall] lie in `recall`."""
    return tuple(Source(**table) for table in _source_tables(recipe, recall))


def _source_tables(recipe: Recipe, recall: Path) -> list[dict[str, Any]]:
    return [
        {"name": RECALL, **source, "path": str(recall)} if source["path"] == RECALL else source
        for source in recipe.source
    ]


def _mix_text(recipe: Recipe, recall: Path) -> str:
    """What `longrope2 data plan --config` takes; the documents of [recall] lie in `recall`."""
    sources = _source_tables(recipe, recall)
    return _toml({"plan": recipe.plan, "source": sources, "bucket": list(recipe.bucket)})


def _make_data(setting: Setting) -> None:
    recipe, folder = setting.recipe, setting.folder / "data"
    recall = folder.absolute() / "recall.jsonl"
    if recipe.recall is not None:
        write_recall(load_tokenizer(setting.info), RecallConfig(**recipe.recall), recall)
    write_text(folder / "mix.toml", _mix_text(recipe, recall))  # for people: no step reads it
    mix = Mix(sources=recipe_sources(recipe, recall), plan=recipe_plan(setting))
    write_plan(setting.info, mix, setting.folder / ledger.PLAN, setting.cache)


def _train_step(setting: Setting) -> Step:
    recipe = setting.recipe

    def work() -> None:
        with world() as here:
            train(
                setting.info.name,
                train_config(**recipe.train),
                setting.folder / ledger.TRAIN,
                here,
                factors=setting.folder / ledger.FACTORS,
                plan=setting.folder / ledger.PLAN,
                original_length=recipe.original_length,
                cache=setting.cache,
            )

    elastic = {entry.name for entry in stated(TrainConfig) if entry.option.elastic}
    options = {name: value for name, value in recipe.train.items() if name not in elastic}
    return Step(
        name="train",
        needs=("search", "data"),
        options=options,
        outputs=(ledger.TRAINED,),
        work=work,
        together=True,
    )


def _evaluate_steps(setting: Setting, *, trains: bool) -> Iterator[Step]:
    recipe = setting.recipe
    needs = {ledger.SEARCHED: ("search",), ledger.AFTER_TRAINING: ("train",)}
    methods = [ledger.BASE, *recipe.methods, ledger.SEARCHED, *([ledger.AFTER_TRAINING] if trains else [])]
    tables: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for number, table in enumerate(recipe.evaluate, 1):
        name = "+".join(table.get("suites", ())) or "nothing"
        # Once for all methods: the data may take long to read.
        tables[f"{name}-{number}" if name in tables else name] = table, by_content(table, *DATA_PATHS)
    for method in methods:
        for name, (table, options) in tables.items():
            place = f"{ledger.EVALUATE}/{method}/{name}"
            yield Step(
                name=place,
                needs=needs.get(method, ()),
                options=options,
                outputs=(f"{place}/results.json",),
                work=partial(_evaluate, setting, method, setting.folder / place, table),
                together=True,
            )


def _evaluate(setting: Setting, method: str, output: Path, table: Mapping[str, Any]) -> None:
    """One method with one set of suites: the base as it is, closed forms as published, LongRoPE2 with its switch.

    As published, closed forms have one RoPE for all lengths.
    """
    recipe, model = setting.recipe, setting.info.name
    factors: Path | None = None
    if method == ledger.SEARCHED:
        factors = setting.folder / ledger.FACTORS
    elif method == ledger.AFTER_TRAINING:
        model = str(setting.folder / ledger.TRAINED)
    elif method != ledger.BASE:
        factors = output / "factors.json"
        with world() as here:
            if here.is_main:
                made = rescale_model(setting.info, method, recipe.target_length, extend_again=recipe.extend_again)
                made.long_everywhere().save(factors)
            here.gather_all(None)
    # The same for all, or the base would be measured within its own window only, and its perplexity on other texts.
    lengths = table.get("lengths") or lengths_for(EvaluationConfig(**table), recipe.target_length)
    with world() as here:
        run_evaluation(
            model,
            EvaluationConfig(**{**table, "lengths": lengths}, beyond_window=method == ledger.BASE),
            output,
            here,
            factors=factors,
            original_length=None if factors is None else recipe.original_length,  # a model as it is has its own
            name=method,
            cache=setting.folder / ledger.EVALUATE / "samples",
        )


def _export_step(setting: Setting, model: str, evaluations: tuple[str, ...]) -> Step:
    options = ExportTable(**setting.recipe.export)
    model_name = Path(setting.recipe.model).name.removesuffix(".gguf")
    name = f"{model_name}-{length_label(setting.recipe.target_length)}"
    outputs = {format: f"{ledger.EXPORT}/{name}{'.gguf' if format == 'gguf' else ''}" for format in options.formats}

    def work() -> None:
        trained = model == "train"
        results = setting.folder / ledger.EXPORT / "results.json"
        write_json(results, summarise(gather(setting.folder)).to_json())
        shown = str(results) if evaluations else None
        for config in options.exports(results=shown, extend_again=setting.recipe.extend_again):
            export(
                str(setting.folder / ledger.TRAINED) if trained else setting.info.name,
                setting.folder / outputs[config.format],
                config,
                factors=None if trained else setting.folder / ledger.FACTORS,
            )

    return Step(
        name="export",
        needs=(model, *evaluations),
        options=identity(options),
        outputs=tuple(outputs.values()),
        work=work,
    )


def _verify(setting: Setting, exported: tuple[str, ...]) -> None:
    """Keep the engines' answers; a wrong answer is reported, and does not undo the export."""
    engines = VerifyConfig(**setting.recipe.verify).engines
    found = {}
    for place in exported:
        format: Format = "gguf" if place.endswith(".gguf") else "huggingface"
        fitting = tuple(engine for engine in engines if engine.partition("=")[0] in verifiable(format))
        if fitting or not engines:
            found[place] = verify(setting.folder / place, VerifyConfig(engines=fitting))
    write_json(setting.folder / ledger.VERIFIED, {place: result.to_json() for place, result in found.items()})
    for place, result in found.items():
        for finding in result.wrong:
            warn(f"{place} in {finding.engine}, {finding.mode}: {finding.verdict}. {finding.note}")


def _report(setting: Setting) -> None:
    write_report(setting.folder)


def plan_is_usable(setting: Setting, *, whole: bool) -> bool:
    """Whether the tokenised sources of the plan are still in the cache; `whole` also reads every byte of them."""
    try:
        keys = read_plan(setting.folder / ledger.PLAN).corpus_keys
        corpora = [open_corpus(key, setting.cache) for key in keys]
        return not whole or all(corpus.is_whole() for corpus in corpora)
    except LongRopeError:
        return False


def by_content(options: Mapping[str, Any], *paths: str) -> dict[str, Any]:
    """Options with local files identified by their content: moved, or spelled another way, they are the same."""
    known = {name: ledger.output_digest(Path(options[name]).expanduser()) for name in paths if options.get(name)}
    return {**options, **{name: digest for name, digest in known.items() if digest is not None}}


def _toml(tables: Mapping[str, Any]) -> str:
    """Tables and lists of tables of plain values, as text; JSON writes those values just as TOML does."""
    lines: list[str] = []
    for name, value in tables.items():
        heading, parts = (f"[[{name}]]", value) if isinstance(value, list) else (f"[{name}]", [value])
        for table in parts:
            lines += [heading, *(f"{key} = {json.dumps(item, ensure_ascii=False)}" for key, item in table.items()), ""]
    return "\n".join(lines)
