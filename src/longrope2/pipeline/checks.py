"""Everything that a recipe says, checked before the first step starts: by building what the stages will build."""

import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longrope2.books import read_books
from longrope2.data.config import Mix, RecallConfig, Source
from longrope2.data.sources import read_documents
from longrope2.errors import LongRopeError, all_problems, require
from longrope2.evaluation.config import EvaluationConfig
from longrope2.evaluation.evaluate import check_suites
from longrope2.export.config import ExportTable, VerifyConfig, profiled
from longrope2.export.engines import verifiable
from longrope2.export.gguf import ARCHITECTURES, check_architecture
from longrope2.export.huggingface import with_forced_temperature
from longrope2.export.weights import SourceModel
from longrope2.methods import rescale
from longrope2.models import load_tokenizer, rescale_model
from longrope2.pipeline.recipe import RECALL
from longrope2.pipeline.steps import Setting, recipe_plan, recipe_search, recipe_sources
from longrope2.training.config import train_config
from longrope2.training.estimate import shape_of, skeleton
from longrope2.training.train import rank_problems


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


def _search(setting: Setting) -> Iterator[str]:
    config = recipe_search(setting.recipe)
    yield from config.problems()
    yield from _complaints(read_books, config.books)


def _data(setting: Setting) -> Iterator[str]:
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
    sources = recipe_sources(recipe, Path(RECALL))
    try:
        plan = recipe_plan(setting)
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


def _train(setting: Setting) -> Iterator[str]:
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


def _evaluate(setting: Setting) -> Iterator[str]:
    if not setting.recipe.evaluate:
        return
    tokenizer = load_tokenizer(setting.info)
    for number, table in enumerate(setting.recipe.evaluate, 1):
        for problem in _complaints(_check_table, table, setting.recipe.target_length, tokenizer):
            yield f"table {number}: {problem}"


def _check_table(table: Mapping[str, Any], window: int, tokenizer: Any) -> None:
    """As `longrope2 evaluate` begins; every method but the base, which is asked beyond its window, has this one."""
    check_suites(EvaluationConfig(**table), window, tokenizer)


def _export(setting: Setting) -> Iterator[str]:
    recipe, info = setting.recipe, setting.info
    options, config = ExportTable(**recipe.export), recipe_search(recipe)
    if config.problems():
        return  # reported for the search
    temperature = config.temperature(info.rope, recipe.target_length)
    base = rescale_model(info, "none", recipe.target_length, extend_again=recipe.extend_again)
    factors = profiled(replace(base, long_attention_factor=temperature or 1.0), options.profile)
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
        if on_disk or info.reading.family not in ARCHITECTURES:  # weights are not downloaded to be looked at
            yield from _complaints(check_architecture, SourceModel(info), factors)


def _verify(setting: Setting) -> Iterator[str]:
    formats = ExportTable(**setting.recipe.export).formats
    for text in VerifyConfig(**setting.recipe.verify).engines:
        name, _, python = text.partition("=")
        engine = verifiable().get(name)
        if engine is None:
            yield f"engine {name!r} is not known (choose from {', '.join(verifiable())})"
        elif engine.format not in formats:
            yield f"{name} runs the format {engine.format}, and [export] formats has {', '.join(formats)}"
        elif python and shutil.which(python) is None:
            yield f"{name}={python}: no such program"
        elif not python and not any(find_spec(package) for package in engine.packages):
            commands = " or ".join(engine.packages.values())
            yield f"{name} is not installed here ({commands}, or {name}=PYTHON of another place)"


CHECKS: Mapping[str, Callable[[Setting], Iterator[str]]] = {
    "search": _search,
    "data": _data,
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "verify": _verify,
}
