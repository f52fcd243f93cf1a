"""Every command that writes a folder keeps to the same rules about whose it is."""

import json
import os
from contextlib import nullcontext

import pytest

import longrope2
from conftest import killed_in
from longrope2 import describe, ledger
from longrope2.calibration.calibrate import calibrate
from longrope2.calibration.config import CalibrationConfig
from longrope2.data.plan import plan_documents
from longrope2.errors import LongRopeError
from longrope2.files import atomic_folder, atomic_path, only_one
from longrope2.methods import rescale
from longrope2.runfolder import RunFolder, differences, require_same

MIX = """
[plan]
target_length = 512
rows = 4

[[source]]
path = "texts.jsonl"

[[bucket]]
up_to = 256
quota = 1

[[bucket]]
up_to = 2048
quota = 1
"""
SMALL = {"documents": 1, "population": 2, "parents": 2, "iterations": 0, "mutations": 1, "crossovers": 0}


class StoppedError(Exception):
    """What a test ends a command with, as soon as its folder has begun."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Factors and a plan for the tiny model."""
    place = tmp_path_factory.mktemp("given")
    rescale("yarn", describe("tiny").rope, 512).save(place / "factors.json")
    texts = [" ".join(f"ship {number} went out to sea" for number in range(size)) for size in (10, 20, 60, 80)]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in 4 * texts))
    (place / "mix.toml").write_text(MIX)
    plan_documents("tiny", place / "plan.jsonl", config=place / "mix.toml", cache=place / "cache")
    return place


def search(given, output, **options):
    longrope2.search_factors("tiny", 512, output, **SMALL, **options)


def train(given, output, **options):
    inputs = {"factors": given / "factors.json", "plan": given / "plan.jsonl", "cache": given / "cache"}
    longrope2.train("tiny", **inputs, output=output, batch_rows=2, steps=1, **options)


def evaluate(given, output, **options):
    options = {"factors": given / "factors.json", "lengths": (256,), "samples": 1, **options}
    longrope2.evaluate("tiny", ["niah"], output, **options)


def run_calibrate(given, output, **options):
    config = CalibrationConfig(**{"lengths": (256,), "documents": 5, **options})
    calibrate("tiny", config, output, factors=given / "factors.json")


def export(given, output):
    longrope2.export_model("tiny", output, factors=given / "factors.json")


def extend(given, output):
    longrope2.extend("tiny", output, target_length=512, stages=["search"])


COMMANDS = {
    "search": search,
    "train": train,
    "evaluate": evaluate,
    "calibrate": run_calibrate,
    "export": export,
    "extend": extend,
}
# Where each one that refuses other options loads or scores, an option, and what the refusal says of it.
OTHERS = {
    "search": ("search.run.scoring", {"seed": 1}, "config.evolution.seed: 0 on disk, 1 now"),
    "train": ("training.train.load", {"seed": 1}, "seed: 0 on disk, 1 now"),
    "evaluate": ("evaluation.evaluate.evaluate", {"switch_length": 300}, "switch_length: 256 on disk, 300 now"),
    "calibrate": ("calibration.calibrate.scoring", {"documents": 6}, "config.documents: 5 on disk, 6 now"),
}
every_command = pytest.mark.parametrize("command", COMMANDS)


def held(command, folder):
    """What another process at work in a folder holds."""
    if command == "extend":
        return ledger.run_folder(folder).alone()
    return atomic_folder(folder) if command == "export" else only_one(folder, "")


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@every_command
def test_a_foreign_folder_is_refused_and_untouched(command, given, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    (tmp_path / "thesis" / ".draft.partial-1").write_text("mine, too")
    before = content(tmp_path)
    with pytest.raises(LongRopeError, match=f"thesis: neither empty nor a run of `longrope2 {command}`") as caught:
        COMMANDS[command](given, tmp_path / "thesis")
    assert caught.value.hint == "use another folder, or an empty one"
    assert content(tmp_path) == before


@every_command
def test_a_file_is_refused(command, given, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LongRopeError, match=r"notes\.txt is a file, a folder is needed"):
        COMMANDS[command](given, tmp_path / "notes.txt")
    assert content(tmp_path) == {tmp_path / "notes.txt": b"mine"}


@every_command
def test_a_second_process_is_refused_while_the_first_is_at_work(command, given, tmp_path):
    folder = tmp_path / "run"
    with held(command, folder):
        before = content(tmp_path)
        with pytest.raises(LongRopeError, match=r"another process is (\w+ (there|it)|at work there)"):
            COMMANDS[command](given, folder)
        assert content(tmp_path) == before


@every_command
def test_a_place_that_cannot_be_written_is_refused(command, given, tmp_path, monkeypatch):
    monkeypatch.setattr("longrope2.export.huggingface.check_room", lambda *_: None)
    (tmp_path / "closed").mkdir(mode=0o500)
    is_open = os.access(tmp_path / "closed", os.W_OK)  # as it is to root, who may not write into /proc either
    place = "/proc" if is_open else tmp_path / "closed"
    with pytest.raises(LongRopeError, match=r"cannot be written \(") as caught:
        COMMANDS[command](given, type(tmp_path)(place) / "run")
    assert "give another path" in caught.value.hint


@pytest.mark.parametrize("command", OTHERS)
def test_other_options_are_refused_and_named(command, given, tmp_path, monkeypatch):
    """An extension makes again what they change, and an export is replaced with --force only."""
    stop, other, difference = OTHERS[command]

    def stopped(*_, **__):
        raise StoppedError

    monkeypatch.setattr(f"longrope2.{stop}", stopped)
    run = COMMANDS[command]
    with pytest.raises(StoppedError):
        run(given, tmp_path / "run")
    if command == "train":
        (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)  # worth keeping
    before = content(tmp_path)
    with pytest.raises(LongRopeError, match=rf"(?s)run\S* (belongs to|holds) another .*{difference}\n") as caught:
        run(given, tmp_path / "run", **other)
    assert "another folder" in caught.value.hint
    assert content(tmp_path) == before
    with pytest.raises(StoppedError):
        run(given, tmp_path / "run")


def test_what_kills_left_goes_and_what_others_write_stays(tmp_path):
    (tmp_path / "deep").mkdir()
    folder = RunFolder(tmp_path, "search", "searching", ("search.json",))
    killed_in(tmp_path / "deep" / "f")
    assert not folder.is_at_work()
    with atomic_path(tmp_path / "deep" / "g.json") as under_way, folder.alone():
        assert folder.is_at_work()
        assert list((tmp_path / "deep").iterdir()) == [under_way.parent]
    assert not folder.is_at_work()


def test_without_a_path_everything_is_allowed():
    folder = RunFolder(None, "search", "searching", ("search.json",))
    folder.check()
    with folder.alone(), folder.alone():
        assert not folder.is_at_work()


def test_the_file_that_a_run_is_made_from_may_lie_there(tmp_path):
    own = tmp_path / "recipe.toml"
    own.touch()
    folder = RunFolder(tmp_path, "extend", "at work", ("pipeline.json",), beside=own)
    folder.check()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(LongRopeError, match="neither empty nor a run of `longrope2 extend`"):
        folder.check()
    (tmp_path / "pipeline.json").touch()
    folder.check()


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"a": [1, 2]}, {"a": (1, 2)}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a.c": (2, 3)}),
        ({"a": 1}, {"b": 2}, {"b": (None, 2), "a": (1, None)}),
        ({"model": "x", "weights": 1}, {"model": "y", "weights": 1}, {}),  # the same model, moved
        ({"model": "x", "weights": 1}, {"model": "y", "weights": 2}, {"model": ("x", "y"), "weights": (1, 2)}),
    ],
)
def test_differences(before, now, found):
    assert differences(before, now) == found
    refused = pytest.raises(LongRopeError, match="another run: ") if found else nullcontext()
    with refused:
        require_same(before, now, "another run", hint="…")
