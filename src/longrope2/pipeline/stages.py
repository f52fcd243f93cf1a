"""The stages of an extension: what each one refuses before the first begins, what decides its result, what it does."""

import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from longrope2 import ledger
from longrope2.books import read_books
from longrope2.calibration.calibrate import calibrate
from longrope2.calibration.config import CalibrationConfig
from longrope2.console import say
from longrope2.data.config import PACKAGE_BOOKS, Mix, RecallConfig, Source, chained_buckets
from longrope2.data.dataset import reopen
from longrope2.data.plan import Plan, read_plan, write_plan
from longrope2.data.recall import write_recall
from longrope2.data.sources import read_documents
from longrope2.distributed import World
from longrope2.errors import LongRopeError, all_problems, require
from longrope2.evaluation.config import EvaluationConfig, lengths_for
from longrope2.evaluation.evaluate import check_suites, run_evaluation
from longrope2.export.config import ExportTable, VerifyConfig, fitting_profile, profiled, unknown_engine
from longrope2.export.engines import Format, verifiable
from longrope2.export.export import export
from longrope2.export.gguf import WRITTEN_AS, check_architecture
from longrope2.export.huggingface import with_forced_temperature
from longrope2.export.verify import verify
from longrope2.export.weights import SourceModel
from longrope2.factors import RescaleFactors
from longrope2.figures import length_label
from longrope2.methods import rescale
from longrope2.models import ModelInfo, load_tokenizer, rescale_model, skeleton, weights_fingerprint
from longrope2.options import identity, stated
from longrope2.pipeline.recipe import RECALL, Recipe
from longrope2.records import EvaluationRecord, TrainingRecord, VerifyRecord
from longrope2.report.gather import gather
from longrope2.report.page import write_report
from longrope2.report.summary import summarise
from longrope2.search.run import run_search
from longrope2.training.config import TrainConfig, train_config
from longrope2.training.estimate import shape_of
from longrope2.training.train import precision_option, rank_problems, train

DATA_PATHS = ("data", "books")
"""The options of an evaluation that name files."""
CLOSED_FORM = "factors.json"
"""Beside the results of a closed form: its factors, for people."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all stages share."""

    folder: Path
    recipe: Recipe
    info: ModelInfo
    cache: Path | None
    """Where tokenised sources are kept."""
    wandb: str | None = None
    """The project in Weights & Biases that search and training are also logged to."""
    results: dict[str, Any] = field(default_factory=dict)
    """What steps of this session returned, by name; the results of earlier ones are in the folder."""

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the model and the task."""
        return {
            "weights": weights_fingerprint(self.info),
            "original_length": self.info.rope.original_length,
            "target_length": self.recipe.target_length,
            "extend_again": self.recipe.extend_again,
        }

    @property
    def factors_from(self) -> str:
        """The step whose factors the model is extended with."""
        return "search" if self.recipe.calibrate is None else "calibrate"

    @property
    def factors(self) -> RescaleFactors:
        """What the search found, with the switch that was measured, if one was."""
        if self.recipe.calibrate is not None:
            return RescaleFactors.load(self.folder / ledger.CALIBRATED)
        if "search" in self.results:
            found: RescaleFactors = self.results["search"].factors
            return found
        return RescaleFactors.load(self.folder / ledger.FACTORS)

    @property
    def switch_length(self) -> int:
        """Up to where the original RoPE is used: the trained window, unless it is measured."""
        return self.info.rope.original_length if self.recipe.calibrate is None else self.factors.original_length

    @property
    def plan(self) -> Plan:
        """What to train on, row by row."""
        return self.results["data"] if "data" in self.results else read_plan(self.folder / ledger.PLAN)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One piece of work."""

    name: str
    """Its stage, and for one of several in it a path below."""
    needs: tuple[str, ...] = ()
    """Steps whose results it uses."""
    options: Mapping[str, Any]
    """What decides its result, besides the model and what it needs."""
    outputs: tuple[str, ...]
    """Files or folders that are there when it is done."""
    work: Callable[[World], Any]
    together: bool = False
    """Whether every process takes part, or the main one alone."""
    replaces: bool = False
    """Whether it simply writes over what it made before: cheap, and made from what is kept."""

    @property
    def stage(self) -> str:
        """The stage it belongs to."""
        return self.name.partition("/")[0]


def make_steps(setting: Setting, present: Container[str]) -> list[Step]:
    """The steps of the stages that are part of a run, in order."""
    steps: list[Step] = []
    for stage, make in STEPS.items():
        if stage in present:
            steps += make(setting, steps)
    return steps


def check_recipe(setting: Setting, stages: Container[str]) -> None:
    """Refuse a recipe that one of these stages would refuse later; all problems in one message."""
    recipe, info = setting.recipe, setting.info
    rescale("none", info.rope, recipe.target_length)  # all else goes by the target length
    problems = [
        problem
        for method in recipe.methods
        for problem in _complaints(rescale_model, info, method, recipe.target_length, extend_again=recipe.extend_again)
    ]
    for stage, check in CHECKS.items():
        if stage in stages:
            problems += [f"{stage}: {problem}" for problem in check(setting)]
    if problems:
        raise LongRopeError(
            all_problems("this extension cannot start", problems),
            hint="fix the recipe (--show-recipe NAME prints one of the package); --dry-run checks it, too",
        )


def _complaints(build: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """The error of building something, with its hint unless that is about the command line."""
    try:
        build(*arguments, **options)
    except LongRopeError as error:
        message = error.message.replace("\n  - ", "; ")
        return [f"{message} ({error.hint})" if error.hint and "--" not in error.hint else message]
    return []


def by_content(options: Mapping[str, Any], *paths: str) -> dict[str, Any]:
    """Options with local files identified by their content: moved, or spelled another way, they are the same."""
    known = {name: ledger.output_digest(Path(options[name]).expanduser()) for name in paths if options.get(name)}
    return {**options, **{name: digest for name, digest in known.items() if digest is not None}}


# Search


def _check_search(setting: Setting) -> Iterator[str]:
    config = setting.recipe.search_config()
    yield from config.problems()
    yield from _complaints(read_books, config.books)


def _search(setting: Setting, _: Sequence[Step]) -> Iterator[Step]:
    config, again = setting.recipe.search_config(), setting.recipe.extend_again
    yield Step(
        name="search",
        options=by_content(identity(config), "books"),
        outputs=(ledger.FACTORS, ledger.SEARCH),
        work=partial(
            run_search, setting.info, config, setting.folder / "search", extend_again=again, wandb=setting.wandb
        ),
        together=True,
    )


# Calibration


def _check_calibrate(setting: Setting) -> Iterator[str]:
    recipe = setting.recipe
    if recipe.calibrate is None:
        yield "the recipe has no table [calibrate]"
        return
    yield from _complaints(recipe.calibration_config().check, recipe.target_length, load_tokenizer(setting.info))
    if _trains_one_rope(recipe) or (not recipe.search_config().problems() and _gives_up_original(setting)):
        yield "a model with one RoPE at every length has no switch ([calibrate] goes with two)"
    for bucket, following in pairwise(chained_buckets(recipe.bucket)):
        if bucket.up_to <= setting.info.rope.original_length and bucket.up_to < following.above:
            yield (
                f"bucket {following.label} must begin where bucket {bucket.label} ends, or documents that are longer "
                "than the switch, which is not known yet, may be in neither"
            )


def _calibrate(setting: Setting, _: Sequence[Step]) -> Iterator[Step]:
    if setting.recipe.calibrate is None:
        return  # done before, by a recipe that had the table
    config = setting.recipe.calibration_config()
    yield Step(
        name="calibrate",
        needs=("search",),
        options=by_content(identity(config), "books"),
        outputs=(ledger.CALIBRATED, ledger.CALIBRATION),
        work=partial(_calibrated, setting, config),
    )


def _calibrated(setting: Setting, config: CalibrationConfig, _: World) -> None:
    path = setting.folder / ledger.FACTORS
    record = calibrate(setting.info.name, config, (setting.folder / ledger.CALIBRATION).parent, factors=path)
    say(f"{record.in_words()}\nswitch: {record.within_window:,} tokens (at most the trained window)")
    factors = replace(RescaleFactors.load(path), original_length=record.within_window)
    factors.save(setting.folder / ledger.CALIBRATED)


# Data


def _check_data(setting: Setting) -> Iterator[str]:
    recipe = setting.recipe
    yield from _complaints(require, "pyarrow", extra="train", purpose="a tokenised corpus")
    if not recipe.source:
        yield (
            "no source of documents to train on (name them in a recipe, --config FILE, [[source]]; "
            "a recipe without plan, bucket, recall and train extends the model without training)"
        )
    if any(source["path"] == RECALL for source in recipe.source) != (recipe.recall is not None):
        yield 'the table [recall] and a source with path = "recall" go together, and one of them is missing'
    if recipe.recall is not None:
        yield from _complaints(RecallConfig, **recipe.recall)
        yield from _complaints(read_books, recipe.recall.get("books"))
    sources = recipe.sources(Path(RECALL))
    try:
        plan = recipe.plan_config(setting.info.rope.original_length)
    except LongRopeError as error:
        yield error.message.replace("\n  - ", "; ")
    else:
        if sources:
            yield from _complaints(Mix(sources=sources, plan=plan).check)
    yield from _missing_sources(sources)


def _missing_sources(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if source.path == RECALL:
            continue  # made when its time comes
        path = Path(source.path).expanduser()
        if "/" in source.path and not path.exists() and path.parent.is_dir():
            # It could name a dataset, too, but not where its folder is.
            yield f"source {source.label!r}: no such file or folder"
        else:
            yield from (f"source {source.label!r}: {text}" for text in _complaints(read_documents, source))


def _data(setting: Setting, _: Sequence[Step]) -> Iterator[Step]:
    recipe = setting.recipe
    options = {
        "plan": recipe.plan,
        "source": [
            source if source["path"] in (PACKAGE_BOOKS, RECALL) else by_content(source, "path")
            for source in recipe.source
        ],
        "bucket": list(recipe.bucket),
        "recall": by_content(recipe.recall or {}, "books"),
    }
    needs = () if recipe.calibrate is None else ("calibrate",)
    yield Step(name="data", needs=needs, options=options, outputs=(ledger.PLAN,), work=partial(_plan, setting))


def _plan(setting: Setting, _: World) -> Plan:
    """Write the recall documents, and plan what to train on."""
    recipe, info = setting.recipe, setting.info
    recall = setting.folder.absolute() / ledger.RECALL_DOCUMENTS
    if recipe.recall is not None:
        write_recall(load_tokenizer(info), RecallConfig(**recipe.recall), recall)
    mix = Mix(sources=recipe.sources(recall), plan=recipe.plan_config(setting.switch_length))
    return write_plan(info, mix, setting.folder / ledger.PLAN, setting.cache)


def plan_is_usable(setting: Setting, *, whole: bool) -> bool:
    """Whether the tokenised sources of the plan are still in the cache; `whole` also reads every byte of them."""
    try:
        corpora = [reopen(key, setting.cache) for key in setting.plan.corpus_keys]
        return not whole or all(corpus.is_whole() for corpus in corpora)
    except LongRopeError:
        return False


# Training


def _check_train(setting: Setting) -> Iterator[str]:
    recipe, info = setting.recipe, setting.info
    config = train_config(**recipe.train)
    yield from config.problems()
    empty_model = skeleton(info)
    model = empty_model.config.get_text_config()
    yield from rank_problems(config, model)
    if config.lora:
        yield from _complaints(require, "peft", extra="train", purpose="LoRA")
    yield from _complaints(shape_of, empty_model, info, freeze=config.freeze)
    size, heads = max(config.sequence_parallel, 1), model.num_attention_heads
    if recipe.target_length % size or heads % size:
        yield f"{recipe.target_length:,} tokens and {heads} heads cannot be shared evenly by {size} (sequence_parallel)"
    if config.evaluate_every:
        yield from _complaints(read_books, config.books)


def _trains_one_rope(recipe: Recipe) -> bool:
    """Whether the rescaled RoPE is trained in short sequences, too."""
    return recipe.trains and train_config(**recipe.train).window == "single"


def _train(setting: Setting, _: Sequence[Step]) -> Iterator[Step]:
    elastic = {entry.name for entry in stated(TrainConfig) if entry.option.elastic}
    options = {name: value for name, value in setting.recipe.train.items() if name not in elastic}
    options |= precision_option(train_config(**setting.recipe.train))
    yield Step(
        name="train",
        needs=(setting.factors_from, "data"),
        options=options,
        outputs=(ledger.TRAINED,),
        work=partial(_trained, setting),
        together=True,
    )


def _trained(setting: Setting, here: World) -> TrainingRecord:
    factors = setting.factors
    return train(
        setting.info.name,
        train_config(**setting.recipe.train),
        setting.folder / ledger.TRAIN,
        here,
        factors=factors,
        plan=setting.plan,
        original_length=factors.original_length,
        cache=setting.cache,
        wandb=setting.wandb,
    )


# Evaluations


def _check_evaluate(setting: Setting) -> Iterator[str]:
    if not setting.recipe.evaluate:
        return
    # Every method has the window of the target but the base, which is asked beyond its own.
    window, tokenizer = setting.recipe.target_length, load_tokenizer(setting.info)

    def check(table: Mapping[str, Any]) -> None:
        check_suites(EvaluationConfig(**table), setting.info.name, window, tokenizer)

    for number, table in enumerate(setting.recipe.evaluate, 1):
        yield from (f"table {number}: {problem}" for problem in _complaints(check, table))


def _evaluate(setting: Setting, before: Sequence[Step]) -> Iterator[Step]:
    recipe = setting.recipe
    needs = {ledger.SEARCHED: (setting.factors_from,), ledger.AFTER_TRAINING: ("train",)}
    trained = [ledger.AFTER_TRAINING] if any(step.name == "train" for step in before) else []
    tables: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for number, table in enumerate(recipe.evaluate, 1):
        name = "+".join(table.get("suites", ())) or "nothing"
        # Once for all methods: the data may take long to read.
        tables[f"{name}-{number}" if name in tables else name] = table, by_content(table, *DATA_PATHS)
    exported = [ledger.EXPORTED] if _gives_up_original(setting) else []
    needs[ledger.EXPORTED] = needs[(trained or [ledger.SEARCHED])[0]]
    for method in (ledger.BASE, *recipe.methods, ledger.SEARCHED, *trained, *exported):
        for name, (table, options) in tables.items():
            place = f"{ledger.EVALUATE}/{method}/{name}"
            yield Step(
                name=place,
                needs=needs.get(method, ()),
                options=options,
                outputs=(f"{place}/results.json",),
                work=partial(_evaluated, setting, method, setting.folder / place, table, trained=bool(trained)),
                together=True,
            )


def _evaluated(
    setting: Setting, method: str, output: Path, table: Mapping[str, Any], here: World, *, trained: bool
) -> EvaluationRecord:
    """One method with one set of suites: the base as it is, closed forms as published, LongRoPE2 with its switch.

    As published, closed forms have one RoPE for all lengths; so has an export that plain transformers can run, where
    the two sides need other temperatures.
    """
    recipe, model = setting.recipe, setting.info.name
    factors, closed_form, switch_length = None, None, None
    if method == ledger.SEARCHED:
        factors = setting.factors
    elif method == ledger.AFTER_TRAINING:
        model = str(setting.folder / ledger.TRAINED)
    elif method == ledger.EXPORTED:
        model, factors = (str(setting.folder / ledger.TRAINED), None) if trained else (model, setting.factors)
        profile = ExportTable(**recipe.export).profile
        if profile == "static-long" or fitting_profile(setting.factors, trained=False) == "static-long":
            switch_length = 1  # every sequence is a long one
    elif method != ledger.BASE:
        made = rescale_model(setting.info, method, recipe.target_length, extend_again=recipe.extend_again)
        factors = closed_form = made.long_everywhere()
    # The same for all, or the base would be measured within its own window only, and its perplexity on other texts.
    lengths = table.get("lengths") or lengths_for(EvaluationConfig(**table), recipe.target_length)
    # One judge for all, too: the model that is extended.
    options = {"judge": setting.info.name, **table, "lengths": lengths}
    result = run_evaluation(
        model,
        EvaluationConfig(**options, beyond_window=method == ledger.BASE),
        output,
        here,
        factors=factors,
        original_length=None if factors is None else factors.original_length,  # a model as it is has its own
        switch_length=switch_length,
        name=method,
        cache=setting.folder / ledger.EVALUATE / "samples",
    )
    if closed_form is not None and here.is_main:
        closed_form.save(output / CLOSED_FORM)
    return result


# Export


def _gives_up_original(setting: Setting) -> bool:
    """Whether the export will have the rescaled RoPE in short sequences, too, other than what was measured before."""
    recipe = setting.recipe
    if _trains_one_rope(recipe):
        return False  # so it was trained
    profile = ExportTable(**recipe.export).profile
    temperature = recipe.search_config().temperature(setting.info.rope, recipe.target_length)
    return profile == "static-long" or (profile == "auto" and temperature != 1.0)


def _check_export(setting: Setting) -> Iterator[str]:
    recipe, info = setting.recipe, setting.info
    options, config = ExportTable(**recipe.export), recipe.search_config()
    if config.problems():
        return  # reported for the search
    temperature = config.temperature(info.rope, recipe.target_length)
    base = rescale_model(info, "none", recipe.target_length, extend_again=recipe.extend_again)
    factors = replace(base, long_attention_factor=temperature or 1.0)
    if options.profile != "auto":
        factors = profiled(factors, options.profile)
    elif recipe.trains and train_config(**recipe.train).window == "mixed" and temperature != 1.0:
        yield (
            "a model trained with a temperature in long sequences alone is wrong in plain transformers "
            "(name the profile here, or set attention_factor = 1 in [search])"
        )
    else:
        factors = profiled(factors, fitting_profile(factors, trained=False))
    if options.fold_temperature:
        if temperature is None and options.profile == "dual":
            yield "fold_temperature needs one attention factor, and the search looks for one of long sequences alone"
        else:
            yield from _complaints(with_forced_temperature, factors)
    if options.dtype == "q8_0" and "huggingface" in options.formats:
        yield "dtype q8_0 is a format of GGUF, and formats has huggingface, too"
    if "gguf" in options.formats:
        yield from _complaints(require, "gguf", extra="export", purpose="writing a GGUF file")
        on_disk = Path(info.location).exists()
        if on_disk or info.reading.family not in WRITTEN_AS:  # weights are not downloaded to be looked at
            yield from _complaints(check_architecture, SourceModel(info), factors)


def _export(setting: Setting, before: Sequence[Step]) -> Iterator[Step]:
    """Without training the model itself is exported with the factors found."""
    options = ExportTable(**setting.recipe.export)
    model_name = Path(setting.recipe.model).name.removesuffix(".gguf")
    name = f"{model_name}-{length_label(setting.recipe.target_length)}"
    outputs = {format: f"{ledger.EXPORT}/{name}{'.gguf' if format == 'gguf' else ''}" for format in options.formats}
    source = "train" if any(step.name == "train" for step in before) else setting.factors_from
    evaluations = [step.name for step in before if step.stage == "evaluate"]
    trained, measured = source == "train", bool(evaluations)
    yield Step(
        name="export",
        needs=(source, *evaluations),
        options=identity(options),
        outputs=tuple(outputs.values()),
        work=partial(_exported, setting, options, outputs, trained=trained, measured=measured),
    )


def _exported(
    setting: Setting, options: ExportTable, outputs: Mapping[Format, str], _: World, *, trained: bool, measured: bool
) -> None:
    results = summarise(gather(setting.folder)).to_json() if measured else None
    for config in options.exports(extend_again=setting.recipe.extend_again):
        export(
            str(setting.folder / ledger.TRAINED) if trained else setting.info.name,
            setting.folder / outputs[config.format],
            config,
            factors=None if trained else setting.factors,
            results=results,
        )


# Verification and report


def _check_verify(setting: Setting) -> Iterator[str]:
    formats = ExportTable(**setting.recipe.export).formats
    for text in VerifyConfig(**setting.recipe.verify).engines:
        if unknown := unknown_engine(text):
            yield unknown
            continue
        name, _, python = text.partition("=")
        engine = verifiable()[name]
        if engine.format not in formats:
            yield f"{name} runs the format {engine.format}, and [export] formats has {', '.join(formats)}"
        elif python and shutil.which(python) is None:
            yield f"{name}={python}: no such program"
        elif not python and not any(find_spec(package) for package in engine.packages):
            commands = " or ".join(engine.packages.values())
            yield f"{name} is not installed here ({commands}, or {name}=PYTHON of another place)"


def _verify(setting: Setting, before: Sequence[Step]) -> Iterator[Step]:
    config = VerifyConfig(**setting.recipe.verify)
    exported = [place for step in before if step.name == "export" for place in step.outputs]
    yield Step(
        name="verify",
        needs=("export",),
        options=identity(config),
        outputs=(ledger.VERIFIED,),
        work=partial(_verified, setting, config, exported),
    )


def _verified(setting: Setting, config: VerifyConfig, exported: Sequence[str], _: World) -> None:
    """Keep the engines' answers; wrong ones are reported when all is done, and do not undo the export."""
    found = {}
    for place in exported:
        format: Format = "gguf" if place.endswith(".gguf") else "huggingface"
        fitting = tuple(engine for engine in config.engines if engine.partition("=")[0] in verifiable(format))
        if fitting or not config.engines:
            found[place] = verify(setting.folder / place, VerifyConfig(engines=fitting))
    VerifyRecord(exports={place: result.findings for place, result in found.items()}).save(
        setting.folder / ledger.VERIFIED
    )


def _report(setting: Setting, before: Sequence[Step]) -> Iterator[Step]:
    yield Step(
        name="report",
        needs=tuple(step.name for step in before),
        options={},
        outputs=(ledger.PAGE,),
        work=lambda _: write_report(setting.folder),
        replaces=True,
    )


CHECKS: Mapping[str, Callable[[Setting], Iterator[str]]] = {
    "search": _check_search,
    "calibrate": _check_calibrate,
    "data": _check_data,
    "train": _check_train,
    "evaluate": _check_evaluate,
    "export": _check_export,
    "verify": _check_verify,
}
STEPS: Mapping[str, Callable[[Setting, Sequence[Step]], Iterator[Step]]] = {
    "search": _search,
    "calibrate": _calibrate,
    "data": _data,
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "verify": _verify,
    "report": _report,
}
"""Of each stage, in order, given the steps before it."""
