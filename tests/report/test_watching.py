"""`longrope2 watch` reads the state of a run from its files, whichever process is writing there."""

import json
from contextlib import ExitStack

import pytest
from report_samples import make_run

from longrope2 import ledger
from longrope2.cli import cli
from longrope2.errors import LongRopeError
from longrope2.ledger import Ledger, run_folder
from longrope2.watching import look


def states(folder):
    return {view.stage: view.state for view in look(folder)}


def test_a_finished_run(tmp_path):
    folder = make_run(tmp_path / "run")
    always = [stage for stage in ledger.STAGES if stage != "calibrate"]  # which a recipe has to ask for
    assert states(folder) == dict.fromkeys(always, "done")
    by_stage = {view.stage: view for view in look(folder)}
    assert by_stage["search"].text == "4,096 tokens, iteration 4 of 4, 10 evaluations, best perplexity 1.3"
    assert by_stage["train"].text.startswith("step 12 of 12, loss 3.083 (short 2.583, long 3.583), 3.2 GiB")
    assert by_stage["evaluate"].text == "10 of 10"


def test_training_under_way_tells_when_it_ends(tmp_path):
    folder = make_run(tmp_path / "run", stages=("search", "data", "train"))
    log = (folder / ledger.TRAINING_LOG).read_text().splitlines()
    (folder / ledger.TRAINING_LOG).write_text("\n".join(log[:4]) + '\n{"step": 5, "lo')  # a line being written
    Ledger(folder).start("train", {"model": {}, "options": {}, "needs": {}})
    with run_folder(folder).alone():
        train = {view.stage: view for view in look(folder)}["train"]
    assert (train.state, train.left) == ("running", 16.0)  # 8 steps of 2 seconds
    assert train.text.startswith("step 4 of 12, loss 3.250")
    train = {view.stage: view for view in look(folder)}["train"]
    assert (train.state, train.left) == ("interrupted", None)
    assert states(folder)["evaluate"] == "waiting"
    with run_folder(folder).alone():  # who looks keeps nobody out
        pass


def test_a_search_under_way_tells_its_best(tmp_path):
    folder = make_run(tmp_path / "run", stages=("search",))
    lines = (folder / ledger.HISTORY).read_text().splitlines(keepends=True)
    earlier = json.dumps({"type": "time", "seconds": 30.0}) + "\n"
    # The first population and an iteration are done, and the next one has begun.
    (folder / ledger.HISTORY).write_text("".join(lines[:9]) + earlier + "{")
    Ledger(folder).start("search", {"model": {}, "options": {}, "needs": {}})
    with run_folder(folder).alone():
        search = look(folder)[0]
    assert search.text == "2,048 tokens, iteration 2 of 4, 3 evaluations, best perplexity 1.75"
    # Three more as long as these two, in an earlier session, and then five that take four times as long.
    assert search.left == 30.0 / 2 * (3 + 5 * 4)
    (folder / ledger.HISTORY).write_text("".join(lines[:17]) + earlier)
    search = look(folder)[0]
    assert search.text == "4,096 tokens, iteration 0 of 4, 5 evaluations, best perplexity 1.3 at 2,048"


def test_evaluations_are_counted(tmp_path):
    folder = make_run(tmp_path / "run", stages=("search", "evaluate"))
    journal = folder / "evaluate/yarn/niah/generations.jsonl"
    journal.write_text(
        "".join(json.dumps({"type": kind}) + "\n" for kind in ("header", "batches", "answer", "answer", "time"))
    )
    Ledger(folder).start("evaluate/yarn/niah", {"model": {}, "options": {}, "needs": {}})
    view = {view.stage: view for view in look(folder)}["evaluate"]
    assert view.text == "9 of 10; yarn/niah: 2 answers"


def test_once_prints_the_table(tmp_path, capsys):
    make_run(tmp_path / "run [b]", stages=("search",))  # which rich would take for markup
    cli.main(["watch", str(tmp_path / "run [b]"), "--once"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "run [b]" in printed
    rows = [line.split()[:2] for line in printed.splitlines()]
    assert [row for row in rows if row[:1] in (["search"], ["train"], ["report"])] == [
        ["search", "done"],
        ["train", "waiting"],
        ["report", "waiting"],
    ]


def test_following_ends_with_the_run(tmp_path, capsys):
    make_run(tmp_path / "run")
    cli.main(["watch", str(tmp_path / "run"), "--every", "0.01"], standalone_mode=False)
    assert "report" in capsys.readouterr().out


def test_following_goes_on_between_two_steps(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", stages=("search",))  # done, and the next one not yet begun
    naps = []
    with ExitStack() as run:
        run.enter_context(run_folder(folder).alone())

        def sleep(seconds):
            naps.append(seconds)
            if len(naps) == 3:
                run.close()

        monkeypatch.setattr("time.sleep", sleep)
        cli.main(["watch", str(folder), "--every", "0.01"], standalone_mode=False)
    assert naps == [0.01] * 3


def test_lines_that_hold_less_are_passed_over(tmp_path):
    folder = make_run(tmp_path / "run", stages=("search", "data", "train"))
    before = look(folder)
    with (folder / ledger.HISTORY).open("a") as journal:
        journal.write('{"type": "iteration"}\n{"type": "iteration", "length": "long"}\n{"type": []}\n')
    with (folder / ledger.TRAINING_LOG).open("a") as log:
        log.write('{"step": 13, "loss": "none", "seconds": 1}\n')
    assert look(folder) == before
    (folder / "train/run.json").write_text('{"config": 3}')
    assert {view.stage: view.text for view in look(folder)}["train"] == ""


@pytest.mark.parametrize(
    ("where", "value", "problem"),
    [
        (("planned",), None, "planned must be a valid array"),
        (("expected",), [], "expected must be an object"),
        (("steps", "search"), {}, "steps.search.state is missing"),
        (("steps", "search", "state"), "lost", "steps.search.state must be 'running' or 'done', got 'lost'"),
        (("steps", "search", "started"), "once", "steps.search.started must be a valid datetime"),
        (("steps", "search", "seconds"), True, "steps.search.seconds must be a valid number"),
        (("steps", "search", "outputs"), {"a": 1}, "outputs.a must be a valid string"),
        (("recipe",), {"methods": 3}, "recipe.methods must be a list of names, got 3"),
        (("format",), "longrope2.other", "format 'longrope2.other', version 1; expected 'longrope2.pipeline', 1"),
    ],
)
def test_a_damaged_ledger_is_named(tmp_path, where, value, problem):
    path = make_run(tmp_path / "run", stages=("search",)) / ledger.LEDGER
    content = json.loads(path.read_text())
    place = content
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(LongRopeError) as caught:
        look(tmp_path / "run")
    assert str(path) in caught.value.message
    assert problem in caught.value.message
    assert Ledger(tmp_path / "run").steps == {}


def test_wrong_input(tmp_path):
    (tmp_path / "p.txt").write_text("")
    with pytest.raises(LongRopeError, match=r"p\.txt: a file, a folder is needed"):
        look(tmp_path / "p.txt")
    with pytest.raises(LongRopeError, match="no run of `longrope2 extend` there"):
        look(tmp_path)
    make_run(tmp_path / "run", stages=())
    for seconds in ("0", "-1", "nan", "inf", "1e300"):
        with pytest.raises(LongRopeError, match="--every must be above 0 and at most 86400 seconds") as caught:
            cli.main(["watch", str(tmp_path / "run"), "--every", seconds], standalone_mode=False)
        assert caught.value.hint
