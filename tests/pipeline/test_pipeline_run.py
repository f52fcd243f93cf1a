"""`longrope2 extend` from end to end: skipped when done, run again when changed, the same after every kill."""

import json
import os
import re
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_samples import start, write_recipe

from conftest import killed_in
from longrope2 import describe, evaluate, export_model, extend, ledger, load, train
from longrope2.cli import cli
from longrope2.console import roughly
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.export import verify
from longrope2.factors import RescaleFactors
from longrope2.ledger import Ledger
from longrope2.methods import rescale
from longrope2.pipeline import forecast as forecasting
from longrope2.pipeline.extend import Extension
from longrope2.pipeline.recipe import Recipe
from longrope2.pipeline.stages import Setting, make_steps
from longrope2.report.gather import gather
from longrope2.report.summary import UNTRAINED, summarise
from longrope2.watching import look

ALONE = World(process=0, num_processes=1, local_process=0)
METHODS = ("base", "yarn", ledger.SEARCHED, ledger.AFTER_TRAINING)
EVALUATIONS = [f"evaluate/{method}/{suite}" for method in METHODS for suite in ("niah", "perplexity")]
STEPS = ["search", "data", "train", *EVALUATIONS, "export", "verify", "report"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def recipe(place):
    return write_recipe(place)


@pytest.fixture(scope="module")
def whole(place, recipe, one_thread):
    """An undisturbed run; engines are asked here, since tests/export/test_verify.py asks in processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_ask", lambda engine, _, job, __: engine.probe(job))
        extend(None, place / "whole", config=recipe, cache=place / "cache")
    return place / "whole"


def job(place, recipe, folder, *stages):
    return Extension(None, folder, target_length=None, config=recipe, stages=stages, cache=place / "cache")


def results_of(folder):
    """Everything a run found, without times."""
    scores = {step: json.loads((folder / step / "results.json").read_text())["scores"] for step in EVALUATIONS}
    factors = json.loads((folder / ledger.FACTORS).read_text())
    weights = (folder / ledger.TRAINED / "model.safetensors").read_bytes()
    exported = (folder / "export/tiny-512/model.safetensors").read_bytes()
    rows = (folder / ledger.PLAN).read_text().splitlines()
    return scores, factors, weights, exported, rows


def test_every_stage_leaves_its_result(whole):
    steps = Ledger(whole).steps
    assert list(steps) == STEPS
    assert {entry.state for entry in steps.values()} == {"done"}
    assert (whole / "report/index.html").exists()
    data = gather(whole)
    assert tuple(data.scores) == METHODS
    summary = summarise(data)
    assert summary.columns == ["", "needles 512", "short PPL", "kept"]
    # Within the original window LongRoPE2 is the original until it is trained; YaRN, as published, is not.
    kept = {name: found.perplexity_retention for name, found in summary.methods.items()}
    assert kept["base"] == 100
    assert kept[ledger.SEARCHED] == pytest.approx(100, abs=1e-3)
    assert kept["yarn"] < 90
    assert summary.methods["base"].by_length["niah"] == {"512": 0.0}
    card = (whole / "export/tiny-512/README.md").read_text()
    assert "short_perplexity" in card
    verified = json.loads((whole / ledger.VERIFIED).read_text())["exports"]
    assert {finding["mode"]: finding["verdict"] for finding in verified["export/tiny-512"]}["long"] == "right"
    assert {view.state for view in look(whole)} == {"done"}
    assert look(whole)[-2].text.startswith("right in transformers")


def test_recall_documents_are_in_the_plan(whole):
    header = json.loads((whole / ledger.PLAN).read_text().splitlines()[0])
    assert [source["name"] for source in header["sources"]] == ["texts", "recall"]
    assert len((whole / "data/recall.jsonl").read_text().splitlines()) == 3


def test_done_is_skipped_and_the_table_printed(place, recipe, whole, capfd):
    before = ledger.require_ledger(whole)
    arguments = ["extend", "--config", str(recipe), "-o", str(whole), "--cache", str(place / "cache")]
    started = time.monotonic()
    cli.main([*arguments, "--json"], standalone_mode=False)
    assert time.monotonic() - started < 10
    printed = capfd.readouterr()
    assert json.loads(printed.out)["methods"]["base"]["by_length"]["niah"]["512"] == 0
    assert printed.err.count("done before") == len(STEPS)
    assert ledger.require_ledger(whole) == before
    cli.main(arguments, standalone_mode=False)
    printed = capfd.readouterr().out
    assert "LongRoPE2, trained" in printed
    assert f"report: {whole / 'report/index.html'}" in printed


def test_dry_run_says_what_it_would_take_and_touches_nothing(place, recipe, whole, capfd):
    arguments = ["extend", "--config", str(recipe), "--cache", str(place / "cache"), "--dry-run", "--json", "-o"]
    cli.main([*arguments, str(place / "new")], standalone_mode=False)
    steps = json.loads(capfd.readouterr().out)["steps"]
    assert [step["step"] for step in steps] == STEPS
    assert all(step["state"] == "to do" and step["seconds"] > 0 for step in steps)
    by_name = {step["step"]: step for step in steps}
    # Three checkpoints at most, each with weights and two moments in float32, and the model: 5.9M parameters.
    assert by_name["train"]["disk_gib"] * 2**30 == pytest.approx(5_868_800 * (3 * 12 + 4))
    assert by_name["train"]["note"].startswith("3 steps of 1,024 tokens")
    assert not (place / "new").exists()
    cli.main([*arguments, str(whole)], standalone_mode=False)
    assert {step["state"] for step in json.loads(capfd.readouterr().out)["steps"]} == {"done"}
    more = place / "more.toml"
    more.write_text(recipe.read_text().replace("rows = 6", "rows = 60"))
    cli.main(["extend", "--config", str(more), *arguments[3:], str(whole)], standalone_mode=False)
    notes = {step["step"]: step["note"] for step in json.loads(capfd.readouterr().out)["steps"]}
    assert notes["train"].startswith("30 steps")  # of the plan to come, not of the one that is there
    cli.main([*arguments[:-3], "--dry-run", "-o", str(place / "new")], standalone_mode=False)
    assert "256 → 512 tokens" in capfd.readouterr().out


def test_a_forecast_of_another_machine(recipe, place, capfd):
    arguments = ["extend", "--config", str(recipe), "-o", str(place / "new"), "--gpu", "a100"]
    cli.main([*arguments, "--dry-run"], standalone_mode=False)
    assert re.search(r"together about .+ (seconds|minutes) on one A100 \(250 TFLOP/s", capfd.readouterr().out)
    with pytest.raises(LongRopeError, match="--gpu is for an estimate"):
        cli.main(arguments, standalone_mode=False)


def test_a_forecast_of_days_says_what_to_do_instead(recipe, place, monkeypatch):
    monkeypatch.setattr(forecasting, "_measured_rate", lambda *_: 1e5)
    monkeypatch.setattr(forecasting, "fitting_names", lambda rope, length: [f"{rope.rotary_dim}-{length}"])
    extension = Extension(None, place / "new", config=recipe, stages=("search",), cache=None)
    expected = forecasting.forecast(extension)
    assert sum("--gpu h100" in note for note in expected["notes"]) == 1
    assert "--from collection/64-512 -o FILE`" in expected["notes"][-1]
    assert re.search(
        r"about \d+ (days|years) on one CPU", forecasting.forecast_table(extension.setting, expected).caption
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 seconds"), (1, "1 second"), (100, "100 seconds"), (150, "2.5 minutes"), (3600, "60 minutes"),
     (3 * 3600, "3 hours"), (40 * 3600, "40 hours"), (15_340_780, "178 days"), (2e9, "63 years")],
)  # fmt: skip
def test_times_are_in_units_that_people_count_in(seconds, words):
    assert roughly(seconds) == words


def test_the_space_suits_what_follows(recipe, place):
    """Before training the wide space is ahead, after it the paper's; a recipe may say otherwise."""
    trained = Extension(None, place / "new", config=recipe, stages=(), cache=None)
    assert trained.setting.recipe.search_config().space == "paper"
    assert "search: space paper, since the model is trained (see docs/extend.md)" in trained.notes
    (place / "wide.toml").write_text("target_length = 512")
    untrained = Extension("tiny", place / "new", config=place / "wide.toml", stages=(), cache=None)
    assert untrained.setting.recipe.search_config().space == "wide"
    assert "search: space wide, since the model is not trained (see docs/extend.md)" in untrained.notes
    (place / "own.toml").write_text('target_length = 512\n[search]\nspace = "paper"')
    named = Extension("tiny", place / "new", config=place / "own.toml", stages=(), cache=None)
    assert named.setting.recipe.search_config().space == "paper"
    assert not any("space" in note for note in named.notes)


def test_other_options_run_again_what_depends_on_them(place, recipe, whole):
    changed = write_recipe(place, name="changed.toml", learning_rate=2e-5)
    reasons = job(place, changed, whole).reasons()
    assert list(reasons) == ["train", *EVALUATIONS[6:], "export", "verify", "report"]
    assert reasons["train"] == "learning_rate 1e-05 → 2e-05"
    assert reasons["verify"] == "export changed"
    searched = write_recipe(place, name="searched.toml", iterations=2)
    assert list(job(place, searched, whole).reasons()) == [
        "search", "train", *EVALUATIONS[4:], "export", "verify", "report",
    ]  # fmt: skip


def test_sources_are_told_by_what_they_hold(place, recipe, whole, tmp_path):
    shutil.copytree(place / "texts", tmp_path / "texts")
    (tmp_path / "texts/book.txt").touch()
    moved = tmp_path / "moved.toml"
    moved.write_text(recipe.read_text().replace(str(place / "texts"), f"{tmp_path}/./texts/"))
    assert job(place, moved, whole).reasons() == {}
    (tmp_path / "texts/book.txt").write_text("Another one. " * 10_000)
    assert list(job(place, moved, whole).reasons())[:2] == ["data", "train"]


def test_what_other_options_gave_is_kept_aside(place, recipe, whole, capfd):
    folder = place / "aside"
    folder.mkdir()
    shutil.copytree(whole, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("train", "evaluate"))
    changed = write_recipe(place, name="searched.toml", iterations=2)
    arguments = ["extend", "--config", str(changed), "-o", str(folder), "--stages", "search"]
    cli.main(arguments, standalone_mode=False)
    printed, told = capfd.readouterr()
    assert "warning: search runs again" in told
    assert "(iterations 1 → 2)" in told
    assert "report:" not in printed  # which shows the search before
    assert f"report/index.html was written before this; `longrope2 report {folder}` writes it again" in told
    assert extend(None, folder, config=changed, stages=["search"])["report"] is None
    aside = list((folder / "earlier").iterdir())
    assert [path.name[:7] for path in aside] == ["search-"]
    assert (aside[0] / "factors.json").read_bytes() == (whole / ledger.FACTORS).read_bytes()
    with pytest.raises(LongRopeError, match="export needs train"):
        job(place, changed, folder, "export").run(ALONE)


def test_a_lost_or_damaged_result_is_made_again(place, recipe, whole):
    folder = place / "damaged"
    shutil.copytree(whole, folder)
    (folder / ledger.FACTORS).unlink()
    weights = folder / ledger.TRAINED / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"damaged!")
    reasons = job(place, recipe, folder).reasons()
    assert reasons == {
        "search": f"missing or changed: {ledger.FACTORS}",
        "train": f"missing or changed: {ledger.TRAINED}",
    }
    job(place, recipe, folder, "search", "train").run(ALONE)
    assert results_of(folder) == results_of(whole)
    assert job(place, recipe, folder).reasons() == {}


def copy_steps(whole, folder, steps):
    """A run of which only these steps are done."""
    for step in steps:
        shutil.copytree(whole / step, folder / step)
    book = ledger.require_ledger(whole)
    replace(book, steps={step: book.steps[step] for step in steps}).save(folder / ledger.LEDGER)
    return folder


def test_what_other_options_gave_is_not_reported_as_this(place, recipe, whole):
    """The search is another one, and what was measured of the factors before is not its result."""
    folder = copy_steps(whole, place / "stale", ["search", *EVALUATIONS[:6]])
    before = summarise(gather(folder))
    assert tuple(before.methods) == METHODS[:3]
    job(place, write_recipe(place, name="searched.toml", iterations=2), folder, "search").run(ALONE)
    (folder / ledger.FACTORS).unlink()
    data = gather(folder)
    after = summarise(data)
    assert [name for name in data.book.steps if name not in data.steps] == EVALUATIONS[4:6]
    assert after.methods == {name: before.methods[name] for name in METHODS[:2]}
    assert after.title == before.title == "tiny, 256 → 512 tokens"
    views = {view.stage: view for view in look(folder)}
    assert (views["evaluate"].state, views["evaluate"].text) == ("waiting", "4 of 6")


def test_the_base_is_measured_as_it_is(tmp_path):
    """Also where it was extended before, and the recipe says another trained window than its config."""
    model = export_model("tiny", tmp_path / "model", factors=rescale("yarn", describe("tiny").rope, 512))
    table = {"suites": ("perplexity",), "tasks": ("full",), "lengths": (64,), "samples": 1}
    recipe = Recipe(model=str(model), target_length=1024, original_length=128, extend_again=True, evaluate=(table,))
    info = describe(model, original_length=128)
    setting = Setting(folder=tmp_path / "run", recipe=recipe, info=info, cache=None)
    make_steps(setting, {"evaluate"})[0].work(ALONE)
    result = json.loads((tmp_path / "run/evaluate/base/perplexity/results.json").read_text())
    assert (result["factors"]["original_length"], result["switch_length"]) == (256, 256)


def test_without_lengths_all_methods_are_measured_at_those_of_the_target(tmp_path):
    table = {"suites": ("perplexity",), "samples": 1}
    recipe = Recipe(model="tiny", target_length=1024, methods=("yarn",), evaluate=(table,))
    setting = Setting(folder=tmp_path / "run", recipe=recipe, info=describe("tiny"), cache=None)
    asked = []
    for step in make_steps(setting, {"evaluate"})[:2]:
        step.work(ALONE)
        values = json.loads((setting.folder / step.outputs[0]).read_text())["values"]
        asked.append({place: found["asked"] for place, found in values.items()})
    assert asked[0] == asked[1]
    assert list(asked[0]) == ["perplexity/full/1024", "perplexity/sliding/1024"]


def test_without_training_the_model_itself_is_exported(place, recipe, whole):
    folder = copy_steps(whole, place / "untrained", ["search"])
    found = extend(None, folder, config=recipe, cache=place / "cache", stages=["search"])
    assert (found["methods"], found["report"]) == ({}, None)
    with pytest.raises(LongRopeError, match="verify needs export"):
        job(place, recipe, folder, "verify").run(ALONE)
    rest = job(place, recipe, folder, "export", "report")
    assert list(rest.reasons()) == ["export", "report"]
    rest.run(ALONE)
    trained, untrained = (json.loads((path / "export/tiny-512/config.json").read_text()) for path in (whole, folder))
    assert untrained["rope_parameters"] == trained["rope_parameters"]
    assert (folder / "report/index.html").exists()


@pytest.mark.parametrize("texts", [False, True])
def test_an_export_with_another_rope_in_short_sequences_is_measured_as_it_is(place, recipe, whole, texts):
    """With a temperature plain transformers needs one RoPE; rows of the search and of training have two."""
    text = recipe.read_text().replace('["yarn"]', "[]")
    text = text.replace("[search]\n", '[search]\nattention_factor = "released"\n')
    if texts:
        text += '[export]\nprofile = "static-long"\n'
    else:
        text = text.partition("[recall]")[0] + "[[evaluate]]" + text.rpartition("[[evaluate]]")[2]
    (place / "warm.toml").write_text(text)
    folder = place / f"warm-{texts}"
    stages = ("search", *(("data", "train") if texts else ()), "evaluate", "export")
    extend(None, folder, config=place / "warm.toml", stages=stages, cache=place / "cache")
    summary = summarise(gather(folder))
    kept = {name: found.short_perplexity for name, found in summary.methods.items()}
    ours = ledger.AFTER_TRAINING if texts else ledger.SEARCHED
    assert kept[ledger.EXPORTED] > 1.05 * kept[ours]
    options = {"tasks": ("full",), "lengths": (256,), "samples": 3}
    alone = evaluate(folder / "export/tiny-512", ("perplexity",), place / f"alone-{texts}", **options)
    assert alone["scores"][0]["score"] == pytest.approx(kept[ledger.EXPORTED], rel=1e-3)
    assert "as exported" in summary.caption


def test_without_texts_all_but_training_is_done_and_it_can_be_added(place, recipe, whole, capfd):
    head, evaluations = recipe.read_text().partition("[recall]")[0], recipe.read_text().partition("[[evaluate]]")[1:]
    bare = place / "bare.toml"
    head = head.replace("[search]\n", '[search]\nspace = "paper"\n')  # as with texts
    bare.write_text(head + "".join(evaluations) + '[verify]\nengines = ["transformers"]\n')
    folder = copy_steps(whole, place / "bare", ["search", *EVALUATIONS[:6]])
    arguments = ["extend", "--config", str(bare), "-o", str(folder), "--cache", str(place / "cache")]
    cli.main([*arguments, "--dry-run"], standalone_mode=False)
    forecast = capfd.readouterr().out
    assert forecast.count(UNTRAINED) == 1
    assert "train" not in forecast.replace(UNTRAINED, "")
    cli.main(arguments, standalone_mode=False)
    printed = capfd.readouterr()
    assert printed.err.startswith(UNTRAINED)
    assert printed.err.endswith(f"{UNTRAINED}\n")
    assert printed.err.count("done before") == 7
    assert "LongRoPE2, factors only" in printed.out
    assert UNTRAINED[1:] in (folder / ledger.PAGE).read_text()
    assert {view.state for view in look(folder)} == {"done"}
    # Texts are added: what the search and the evaluations found is kept.
    with_texts = job(place, recipe, folder)
    assert list(with_texts.reasons()) == ["data", "train", *EVALUATIONS[6:], "export", "verify", "report"]
    assert [note.partition(",")[0] for note in with_texts.notes] == ["search: space paper"]
    with pytest.raises(LongRopeError, match="begun with texts to train on, and this recipe names no"):
        job(place, bare, whole)


def test_nothing_that_is_written_names_this_machine(place, whole):
    """But for the names of TensorBoard's files, which hold the host."""
    words = {str(Path.home()), socket.gethostname(), str(Path.cwd()), *place.parts}  # a pickle has a path in parts
    words = {word for word in words if len(word) > 4}  # a shorter one may be anywhere
    files = [path for path in whole.rglob("*") if path.is_file() and "tensorboard" not in path.parts]
    assert len(files) > 40
    files += (place / "cache").iterdir()
    found = [
        (str(path.relative_to(place)), word) for path in files for word in words if word.encode() in path.read_bytes()
    ]
    assert found == []


def test_a_run_that_was_copied_goes_on_there(place, recipe, whole):
    copied = shutil.copytree(whole, place / "somewhere" / "else")
    assert job(place, recipe, copied).reasons() == {}
    shutil.rmtree(copied / "train" / "model")
    assert "train" in job(place, recipe, copied).reasons()
    job(place, recipe, copied, "train").run(ALONE)
    assert results_of(copied) == results_of(whole)


def test_an_engine_that_is_wrong_ends_in_exit_code_1(place, recipe, whole, capfd, monkeypatch):
    folder = copy_steps(whole, place / "wrong", ["search", "data", "train", *EVALUATIONS, "export"])

    def ask(engine, _, job, __):
        content = engine.probe(job)
        for answer in content["answers"]:
            answer["logprobs"] = [{token: value - 1 for token, value in step.items()} for step in answer["logprobs"]]
        return content

    monkeypatch.setattr(verify, "_ask", ask)
    arguments = ["extend", "--config", str(recipe), "-o", str(folder), "--cache", str(place / "cache"), "--json"]
    for _ in range(2):  # a second run does nothing, and says the same
        assert cli.main([*arguments, "--stages", "verify"], standalone_mode=False) == 1
        printed = capfd.readouterr()
        wrong = json.loads(printed.out)["wrong"]
        assert wrong[0].startswith("export/tiny-512 in transformers")
        assert wrong[0] in printed.err.splitlines()
    (view,) = (view for view in look(folder) if view.stage == "verify")
    assert view.text.startswith(f"WRONG: {wrong[0]}")


DAMAGE = {  # what it leaves of a ledger, and what is said of it
    "emptied": (
        lambda text: '{"format": "longrope2.pipeline", "version": 1}',
        r"damaged: 7 problems\n  - model is missing",
    ),
    "version": (
        lambda text: text.replace('"version": 1', '"version": 7', 1),
        "version 7; expected 'longrope2.pipeline', 1",
    ),
    "format": (lambda text: text.replace('"longrope2.pipeline"', '"longrope2.other"', 1), "format 'longrope2.other'"),
    "changed": (
        lambda text: text.replace('"sessions": 1', '"sessions": 3', 1),
        "its content is not what its checksum says",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_ledger_is_no_run_to_watch_or_report(whole, tmp_path, damage, message):
    (tmp_path / ledger.LEDGER).write_text(damage((whole / ledger.LEDGER).read_text()))
    for command in (["watch", "--once"], ["report"]):
        with pytest.raises(LongRopeError, match=message):
            cli.main([*command, str(tmp_path)], standalone_mode=False)


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[pytest.mark.slow] if name != "changed" else []) for name in DAMAGE]
)
def test_a_lost_ledger_is_made_again_and_nothing_is_done_twice(place, recipe, whole, tmp_path, capfd, damage):
    folder, copy = shutil.copytree(whole, tmp_path / "run"), whole
    (folder / ledger.LEDGER).write_text(DAMAGE[damage][0]((whole / ledger.LEDGER).read_text()))
    kept = [folder / ledger.HISTORY, folder / ledger.TRAINED / "model.safetensors", folder / ledger.TRAINING_LOG]
    kept += [folder / step / "generations.jsonl" for step in EVALUATIONS[::2]]
    before = [(path.stat().st_ino, path.read_bytes()) for path in kept]
    job(place, recipe, folder, "search", "data", "train", "evaluate", "export").run(ALONE)
    assert "kept as pipeline.json.damaged" in capfd.readouterr().err
    assert [(path.stat().st_ino, path.read_bytes()) for path in kept] == before
    assert results_of(folder) == results_of(copy)
    assert sorted(path.name.partition("-")[0] for path in (folder / "earlier").iterdir()) == ["data", "export"]
    assert list(job(place, recipe, folder).reasons()) == ["verify", "report"]


def test_a_strange_folder_and_a_second_process_are_refused(place, recipe, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LongRopeError, match="neither empty nor a run"):
        job(place, recipe, tmp_path, "search")
    with pytest.raises(LongRopeError, match=r"notes\.txt is a file, a folder is needed"):
        job(place, recipe, tmp_path / "notes.txt", "search")
    (tmp_path / "notes.txt").rename(tmp_path / ".notes.txt")
    own = shutil.copy(recipe, tmp_path / "recipe.toml")
    with ledger.run_folder(tmp_path).alone(), pytest.raises(LongRopeError, match="another process is at work"):
        job(place, own, tmp_path, "search").run(ALONE)
    with pytest.raises(LongRopeError, match="train needs search and data"):
        job(place, recipe, tmp_path / "new", "train")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("fails", r"pipeline\.json: removed, or damaged, while search was at work"),
        ("writes", r"pipeline\.json: removed, or damaged, while search was at work"),
        ("ends", r"search/factors\.json: removed as soon as it was made"),
    ],
)
def test_a_run_removed_while_a_step_is_at_work_ends_with_a_message(then, told, tmp_path, monkeypatch):
    from longrope2.pipeline import stages

    def removed(*_, **__):
        shutil.rmtree(tmp_path / "r")
        if then == "fails":
            (tmp_path / "r" / ledger.HISTORY).stat()
        if then == "writes":  # as steps do that make their folder where it is missing
            (tmp_path / "r" / "search").mkdir(parents=True)
            for name in (ledger.FACTORS, ledger.SEARCH):
                (tmp_path / "r" / name).write_text("{}")

    monkeypatch.setattr(stages, "run_search", removed)
    with pytest.raises(LongRopeError, match=told):
        extend("tiny", tmp_path / "r", target_length=512, stages=["search"])


@pytest.mark.slow
def test_two_processes_find_the_same(place, recipe, whole):
    process = start(recipe, place / "two", processes=2)
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert output.count("LongRoPE2, trained") == 1
    one, two = (json.loads((folder / ledger.FACTORS).read_text()) for folder in (whole, place / "two"))
    assert two == one
    assert list(Ledger(place / "two").steps) == STEPS


def test_training_as_a_function_gives_the_folder_of_the_model(place, whole, tmp_path):
    factors = RescaleFactors.load(whole / ledger.FACTORS)
    folder = train("tiny", factors, whole / ledger.PLAN, tmp_path / "t", cache=place / "cache", steps=1, batch_rows=1)
    assert load(folder).longrope2.factors.long == factors.long


DONE = ("search", "data", "train")


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("done", [pytest.param((), marks=pytest.mark.slow), DONE], ids=["twice", "once"])
def test_killed_again_and_again_it_ends_with_the_same(place, recipe, whole, capfd, done):
    """A real kill in training, then one in an evaluation; the search has a test of its own."""
    folder = copy_steps(whole, place / f"killed-{len(done)}", done) if done else place / "killed"
    stages = ("--stages", "search,data,train,evaluate,export,report")
    journal = folder / EVALUATIONS[0] / "generations.jsonl"
    moments = {
        "train": lambda: (folder / "train/checkpoints/step-1").exists() or lines_in(folder / ledger.TRAINING_LOG) > 0,
        EVALUATIONS[0]: lambda: lines_in(journal) > 4,
    }
    for step, has_come in ((step, moment) for step, moment in moments.items() if step not in done):
        process = start(recipe, folder, *stages)
        while not has_come():
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        entry = Ledger(folder).steps[step]
        assert entry.state == "running", "the kill came too late"
        assert {view.stage: view.state for view in look(folder)}[step.partition("/")[0]] == "interrupted"
    capfd.readouterr()
    left = killed_in(folder / "report" / "needles")
    arguments = ["extend", "--config", str(recipe), "-o", str(folder), "--cache", str(place / "cache")]
    cli.main([*arguments, *stages], standalone_mode=False)
    printed = capfd.readouterr()
    assert not left.exists()
    assert f"{EVALUATIONS[0]} goes on (interrupted)" in printed.err
    assert "search: done before" in printed.err
    assert "LongRoPE2, trained" in printed.out
    assert results_of(folder) == results_of(whole)
    assert summarise(gather(folder)).to_json() == summarise(gather(whole)).to_json()
    assert done or Ledger(folder).steps["train"].sessions == 2
