"""Recipes: the presets are whole and the paper's, and a wrong one is refused with everything that is wrong."""

import errno
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from longrope2 import ledger
from longrope2.data.config import Mix, PlanConfig, RecallConfig, Source, chained_buckets, parse_tokens
from longrope2.errors import LongRopeError
from longrope2.evaluation.config import EvaluationConfig
from longrope2.models import describe
from longrope2.pipeline import stages
from longrope2.pipeline.recipe import conforms, default_evaluations, presets, read_recipe
from longrope2.pipeline.stages import Setting, make_steps
from longrope2.training.config import train_config

ROOT = Path(__file__).parent.parent.parent


def test_the_folder_recipes_has_what_the_package_has():
    assert {path.stem: path.read_text() for path in (ROOT / "recipes").glob("*.toml")} == presets()


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_resolve(name):
    """Every table is what its command accepts, and buckets fit the trained window."""
    recipe = read_recipe(name)
    assert recipe.search_config().problems() == []
    windows = {"tiny-laptop": 256, "phi3-mini-128k": 2048}
    original = windows.get(name, 8192)
    assert recipe.original_length in (None, original)
    buckets, lengths = chained_buckets(recipe.bucket), {"target_length": recipe.target_length}
    plan = PlanConfig(original_length=original, buckets=buckets, **lengths, **recipe.plan)
    Mix(sources=tuple(Source(**table) for table in recipe.source), plan=plan).check()
    for table in recipe.evaluate:
        EvaluationConfig(**table)
    if recipe.recall:
        config = RecallConfig(**recipe.recall)
        # A document of the target length fills a row of its own bucket, so that it is never cut.
        assert recipe.target_length in config.lengths
        assert buckets[-1].up_to == recipe.target_length
        assert buckets[-2].up_to == recipe.target_length - 1
    assert train_config(**recipe.train).resolved(640).problems() == []


@pytest.mark.parametrize("name", ["llama3-8b-128k", "phi3-mini-128k"])
def test_paper_recipes_are_the_papers(name):
    """Appendix, section 4.1 and table 1: the tokens of each source and of each range of lengths."""
    recipe = read_recipe(name)
    config = recipe.search_config()
    schedule = config.evolution
    assert (schedule.population, schedule.iterations, config.mutation_probability) == (64, 40, 0.3)
    assert (schedule.algorithm, schedule.parents, schedule.mutations, schedule.crossovers) == ("evolution", 32, 16, 16)
    assert (config.documents, config.space, config.depth, config.objective) == (10, "paper", 0.0, "needle")
    assert (config.attention_factor, config.staged) == (1.0, False)
    assert [table["samples"] for table in recipe.evaluate if table["suites"] == ("niah",)] == [10]
    assert (recipe.train["batch_rows"], recipe.train["learning_rate"]) == (64, 2e-5)
    assert recipe.target_length == 131072
    total = parse_tokens(recipe.plan["tokens"])
    quotas = {bucket["name"]: bucket["quota"] for bucket in recipe.bucket}
    in_bucket = {name: total * quota / sum(quotas.values()) for name, quota in quotas.items()}
    assert list(in_bucket.values()) == [3e9, 3e9, 4e9]
    tokens = dict.fromkeys((source["name"] for source in recipe.source), 0.0)
    for bucket, share in in_bucket.items():
        serving = [source for source in recipe.source if bucket in source.get("buckets", quotas)]
        for source in serving:
            tokens[source["name"]] += share * source["weight"] / sum(other["weight"] for other in serving)
    expected = {"RedPajama-v1": 4.5e9, "RedPajama-v2": 2.5e9, "StarCoder": 2e9, "FineWeb-Edu": 1e9}
    assert tokens == pytest.approx(expected)


def test_arguments_replace_what_the_recipe_says():
    assert read_recipe(None).model == "tiny"
    assert read_recipe("llama3-8b-128k", model="mine", target_length=65536).model == "mine"
    other = read_recipe("phi3-mini-128k", original_length=4096, extend_again=True)
    assert (other.original_length, other.extend_again) == (4096, True)
    assert read_recipe("phi3-mini-128k").original_length == 2048
    bare = read_recipe(None, model="some/model", target_length=1 << 17)
    assert (bare.model, bare.search, bare.source) == ("some/model", {}, ())
    with pytest.raises(LongRopeError, match="the target length is missing"):
        read_recipe(None, model="some/model")


@pytest.mark.parametrize(
    ("original", "target", "expected"),
    [(256, 1024, (256, 512, 1024)), (8192, 131072, (8192, 16384, 32768, 65536, 131072)), (300, 500, (300, 500)),
     (256, 1000, (256, 512, 1000))],
)  # fmt: skip
def test_a_recipe_without_evaluations_measures_both_windows_and_between(original, target, expected):
    needles, books = (EvaluationConfig(**table) for table in default_evaluations(original, target))
    assert (needles.suites, needles.lengths) == (("niah",), expected)
    assert (books.suites, books.lengths) == (("perplexity",), (original,))


def test_an_export_is_called_as_the_model_wherever_the_command_runs(tmp_path, monkeypatch):
    model = shutil.copytree(describe("tiny").location, tmp_path / "mine")
    (model / "below").mkdir()
    for folder, name in ((model, "."), (model / "below", ".."), (tmp_path, "mine"), (tmp_path, "mine/")):
        monkeypatch.chdir(folder)
        recipe = read_recipe(None, model=name, target_length=1024)
        setting = Setting(folder=tmp_path, recipe=recipe, info=describe(recipe.model), cache=None)
        assert make_steps(setting, {"export"})[0].outputs == ("export/mine-1k",)
    setting = Setting(folder=tmp_path, recipe=replace(recipe, model="m.gguf"), info=setting.info, cache=None)
    assert make_steps(setting, {"export"})[0].outputs == ("export/m-1k",)


def test_a_shorter_target_bounds_the_lengths_of_the_recipe():
    notes = []
    recipe = read_recipe("tiny-laptop", target_length=512, note=notes.append)
    assert [table["lengths"] for table in recipe.evaluate] == [(256, 512), (256, 512)]
    assert recipe.recall["lengths"] == (256, 512)
    assert notes[-1] == "evaluate: lengths 256, 1,024 of the recipe, made for a target of 2,048, become 256, 512"
    assert len(notes) == 3


def test_a_longer_target_is_evaluated_where_the_recipes_own_is():
    notes = []
    recipe, own = read_recipe("tiny-laptop", target_length=8192, note=notes.append), read_recipe("tiny-laptop")
    assert [table["lengths"] for table in recipe.evaluate] == [(256, 1024, 2048, 8192), (256, 1024)]
    assert len(notes) == 1
    assert recipe.recall == own.recall  # whose buckets end at the recipe's target
    assert read_recipe("tiny-laptop", target_length=2048, note=notes.append) == own
    assert len(notes) == 1


def test_a_recipe_without_a_target_is_taken_at_its_word(tmp_path):
    (tmp_path / "r.toml").write_text('[[evaluate]]\nsuites = ["niah"]\nlengths = [4096]\n')
    assert read_recipe(tmp_path / "r.toml", target_length=1024).evaluate[0]["lengths"] == (4096,)


def test_a_path_is_looked_for_beside_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "r.toml").write_text('target_length = 512\n[[source]]\npath = "texts"\n[[source]]\npath = "other"\n')
    monkeypatch.chdir("/")
    sources = read_recipe(tmp_path / "r.toml").source
    assert sources == ({"path": str(tmp_path / "texts"), "name": "texts"}, {"path": "other"})


@pytest.mark.parametrize("word", ["books", "recall"])
def test_a_word_is_no_folder_of_that_name(tmp_path, monkeypatch, word):
    """Wherever the command runs; the folder is to be had as ./books."""
    (tmp_path / word).mkdir()
    lines = ["target_length = 512", "[[source]]", f'path = "{word}"', "[[source]]", f'path = "./{word}"']
    (tmp_path / "r.toml").write_text("\n".join(lines))
    for folder, recipe in ((tmp_path, "r.toml"), ("/", tmp_path / "r.toml")):
        monkeypatch.chdir(folder)
        sources = read_recipe(recipe).source
        assert sources == ({"path": word}, {"path": str(tmp_path / word), "name": f"./{word}"})


def test_a_folder_called_as_a_word_decides_nothing(tmp_path, monkeypatch):
    """Otherwise the data would be made again whenever that folder changes."""
    monkeypatch.chdir(tmp_path)
    setting = Setting(folder=tmp_path / "run", recipe=read_recipe("tiny-laptop"), info=describe("tiny"), cache=None)
    before = make_steps(setting, {"data"})[0].options
    for word in ("books", "recall"):
        (tmp_path / word).mkdir()
    assert make_steps(setting, {"data"})[0].options == before


def test_the_repositorys_folder_of_books_does_not_stand_in_for_the_packages():
    assert read_recipe(ROOT / "recipes" / "tiny-laptop.toml").source == read_recipe("tiny-laptop").source


WRONG = """
target_length = "far"
colour = 1
methods = ["yarm"]
description = 2024-01-01
evaluate = 3
[search]
popualtion = 3
documents = "ten"
upper = inf
space = "narrow"
depth = ["start"]
[train]
learning_rate = true
lora = 1.5
betas = [0.9]
compiled = 1
batch_rows = 0
[recall]
lengths = [32]
[[source]]
weight = 2
[[bucket]]
up_to = "8 z"
[export]
formats = ["onnx"]
[verify]
engines = ["transformers", "vlm=/opt/vllm/bin/python"]
"""


LENGTHS = """
target_length = "32k"
original_length = "8K"
[recall]
lengths = ["8k", 16384]
[[source]]
path = "books"
cut = ["2k", 4000]
[[bucket]]
up_to = "8k"
quota = 1
[[bucket]]
up_to = "32k"
quota = 1
[[evaluate]]
suites = ["niah"]
lengths = ["4k", "1M"]
batch_tokens = "1M"
"""


def test_lengths_as_people_write_them(tmp_path):
    (tmp_path / "r.toml").write_text(LENGTHS)
    recipe = read_recipe(tmp_path / "r.toml")
    assert (recipe.target_length, recipe.original_length) == (32768, 8192)
    assert recipe.recall["lengths"] == (8192, 16384)
    assert recipe.evaluate[0]["lengths"] == (4096, 1 << 20)
    assert recipe.evaluate[0]["batch_tokens"] == 1 << 20
    assert recipe.source[0]["cut"] == (2048, 4000)
    assert [(bucket.above, bucket.up_to) for bucket in recipe.plan_config(8192).buckets] == [(0, 8192), (8192, 32768)]


def test_a_misspelt_suite_is_named_beside_the_rest(tmp_path):
    (tmp_path / "r.toml").write_text('[[evaluate]]\nsuites = ["niah", "rular"]\nsamples = 0\nseed = 1.5\n')
    with pytest.raises(LongRopeError) as caught:
        read_recipe(tmp_path / "r.toml")
    assert "evaluate 1: suites: 'rular' is not known, did you mean 'ruler'?" in str(caught.value)
    assert "evaluate 1: samples must be at least 1, got 0" in str(caught.value)


def test_everything_that_is_wrong_is_named(tmp_path):
    (tmp_path / "r.toml").write_text(WRONG)
    with pytest.raises(LongRopeError) as caught:
        read_recipe(tmp_path / "r.toml")
    message = str(caught.value)
    for part in (
        "unknown key 'colour'",
        'target_length must be a length such as "32k", got "far"',
        'description must be a text in quotes, got "2024-01-01"',
        "evaluate must be a list of tables ([[evaluate]]), got 3",
        "search: unknown key 'popualtion', did you mean 'population'?",
        'search: documents must be a whole number, got "ten"',
        "search: upper must be a number, got Infinity",
        'search: space must be "paper" or "wide", got "narrow"',
        'search: depth must be a number or a list in brackets, each a number, got ["start"]',
        "train: learning_rate must be a number, got true",
        "train: lora must be a whole number, got 1.5",
        "train: betas must be a list of 2 in brackets, each a number, got [0.9]",
        "train: compiled must be true or false, got 1",
        "source 1: path is missing",
        'bucket 1: up_to must be a length such as "32k", got "8 z"',
        'export: formats must be a list in brackets, each "huggingface" or "gguf", got ["onnx"]',
        "verify: engine 'vlm' is not known (choose from transformers, ",
        "method 'yarm' is not known",
        "train: batch_rows must be at least 1, got 0",
        "recall: lengths must be at least 64, got [32]",
    ):
        assert part in message
    (tmp_path / "r.toml").write_text('methods = "yarn"')
    with pytest.raises(LongRopeError, match='methods must be a list in brackets, each a text in quotes, got "yarn"'):
        read_recipe(tmp_path / "r.toml")


def test_nothing_in_brackets_is_not_taken_for_everything(tmp_path):
    text = """
target_length = 512
methods = []
bucket = []
[[source]]
path = "books"
buckets = []
[[evaluate]]
suites = ["niah"]
lengths = []
tasks = []
[verify]
engines = []
"""
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(LongRopeError) as caught:
        read_recipe(tmp_path / "r.toml")
    places = ("source 1: buckets", "evaluate 1: lengths", "evaluate 1: tasks", "verify: engines")
    expected = [f"  - {place} is empty (name what it should have, or omit it)" for place in places]
    expected.insert(0, "  - bucket must be a list of tables ([[bucket]]), got []")
    assert caught.value.message.splitlines()[1:] == expected
    (tmp_path / "r.toml").write_text("target_length = 512\nmethods = []")
    assert read_recipe(tmp_path / "r.toml").methods == ()  # nothing to compare with


def test_unreadable_recipes(tmp_path, monkeypatch):
    with pytest.raises(LongRopeError, match="did you mean 'tiny-laptop'"):
        read_recipe("tiny-laptp")
    (tmp_path / "r.toml").write_text("a = ")
    with pytest.raises(LongRopeError, match="not valid TOML"):
        read_recipe(tmp_path / "r.toml")
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LongRopeError, match=r"r.toml: not UTF-8 \(byte 0\)\nhint: a recipe is a TOML file; save it as"):
        read_recipe(tmp_path / "r.toml")

    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(
        LongRopeError, match=r"r.toml: cannot be read \(Permission denied\)\nhint: check its permissions"
    ):
        read_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, True), (True, int, False), (3, float, True), (True, float, False), (3.5, int, False),
        (None, int | None, True), ("a", int | None, False), ((1, 2), tuple[int, ...], True),
        ((1, "a"), tuple[int, ...], False), ((0.9, 0.95), tuple[float, float], True),
        ((1.0,), tuple[float, float], False),
        (3, tuple[int, ...], False), ("x", str, True),
        (math.nan, float, False), (-math.inf, float | None, False), (10**400, int, True),
    ],
)  # fmt: skip
def test_values_conform_to_the_types_of_fields(value, hint, expected):
    assert conforms(value, hint) is expected


def test_one_judge_for_every_row(tmp_path, monkeypatch):
    """The model that is extended judges, also what was made of it by training; a recipe may name another judge."""
    asked = []
    monkeypatch.setattr(stages, "run_evaluation", lambda model, config, *_, **__: asked.append((model, config.judge)))
    setting = Setting(folder=tmp_path, recipe=read_recipe("tiny-laptop"), info=describe("tiny"), cache=None)
    table = {"suites": ("longppl",), "lengths": (256,)}
    for method in (ledger.BASE, ledger.AFTER_TRAINING):
        stages._evaluated(setting, method, tmp_path / method, table, None, trained=True)
    stages._evaluated(setting, ledger.BASE, tmp_path / "other", {**table, "judge": "another"}, None, trained=True)
    assert asked == [("tiny", "tiny"), (str(tmp_path / ledger.TRAINED), "tiny"), ("tiny", "another")]
