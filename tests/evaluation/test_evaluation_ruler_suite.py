"""RULER as a suite: what it runs, what it leaves out, and what it says about that."""

import gzip
import json

import pytest
from ruler_fixtures import question_files

from longrope2.distributed import World
from longrope2.errors import DataError
from longrope2.evaluation.suite import Setup
from longrope2.evaluation.suites import ruler
from longrope2.models import describe, load_tokenizer


class Knowing:
    """An engine whose model knows every answer of a task, or none."""

    here = World(process=0, num_processes=1, local_process=0)

    def __init__(self, knows):
        self.knows, self.samples = knows, []

    def answers(self, samples, label):
        self.samples += samples
        return [" ".join(sample.references) if sample.task in self.knows else "no idea" for sample in samples]


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Samples are made in this process: starting others takes longer."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def setup_of(tmp_path, *tasks, **options) -> Setup:
    defaults = {
        "lengths": (1024, 960), "named": True, "samples": 2, "seed": 42, "data": None, "books": None, "chat": False,
        "note": lambda message: None, "cache": tmp_path / "samples",
    }  # fmt: skip
    return Setup(tokenizer=load_tokenizer(describe("tiny")), tasks=tasks, **{**defaults, **options})


def test_tasks_without_questions_are_left_out_and_named(tmp_path):
    engine = Knowing({"vt"})
    said = []
    outcome = ruler.run(setup_of(tmp_path, "vt", "fwe", "qa_1", note=said.append), engine)
    found = [(part.length, part.task, part.score, part.samples) for part in outcome.measured]
    assert found == [
        (1024, "vt", 100.0, 2), (1024, "fwe", 0.0, 2), (1024, "average", 50.0, 4),
        (960, "vt", 100.0, 2), (960, "fwe", 0.0, 2), (960, "average", 50.0, 4),
    ]  # fmt: skip
    assert len(outcome.notes) == 1
    assert "without qa_1" in outcome.notes[0]
    assert "dev-v2.0.json" in outcome.notes[0]
    assert said == outcome.notes
    sample = engine.samples[0]
    assert sample.key == "ruler/vt/1024/0"
    assert sample.max_new_tokens == 30
    assert sample.prompt.endswith("they are: ")
    files = sorted(path.stat().st_mtime_ns for path in (tmp_path / "samples").iterdir())
    ruler.run(setup_of(tmp_path, "vt", "fwe"), engine)
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "samples").iterdir()) == files  # made once


def test_files_are_found_packed_and_by_either_name(tmp_path):
    folder = tmp_path / "data" / "ruler"
    folder.mkdir(parents=True)
    with gzip.open(folder / "dev-v2.0.json.gz", "wt") as file:
        json.dump({}, file)
    (folder / "hotpotqa.json").write_text("[]")
    assert ruler._find(folder, ruler.QUESTIONS["qa_1"]) == folder / "dev-v2.0.json.gz"
    assert ruler._find(folder, ruler.QUESTIONS["qa_2"]) == folder / "hotpotqa.json"
    assert ruler._find(None, ("x",)) is None
    with pytest.raises(DataError, match=r"dev-v2.0.json.gz: not in the format of squad"):
        ruler.run(setup_of(tmp_path, "qa_1", data=tmp_path / "data"), Knowing(set()))


@pytest.mark.parametrize(("samples", "asked"), [(9, "9"), (None, "100")])
def test_too_few_questions_are_known_before_the_model_is_loaded(tmp_path, samples, asked):
    question_files(tmp_path)
    with pytest.raises(DataError, match=rf"squad\.json: \d questions, {asked} asked for"):
        ruler.check(setup_of(tmp_path, "qa_1", samples=samples, data=tmp_path))


def test_a_later_question_without_room_is_known_before_the_model_is_loaded(tmp_path):
    """HotpotQA's questions have ten documents each, some of which take more than 2k tokens together."""
    contexts = [[["Title", ["Few words."]]], [["Other", ["Many words. " * 300]]]]
    rows = [{"question": "Who?", "answer": "He", "context": context} for context in contexts]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(rows))
    ruler.check(setup_of(tmp_path, "qa_2", samples=1, data=tmp_path))
    with pytest.raises(DataError, match=r"qa_2 at 960 tokens: a sample takes at least 1,[\d,]+ tokens"):
        ruler.check(setup_of(tmp_path, "qa_2", data=tmp_path))


def test_nothing_to_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"nothing of RULER can be run: qa_2 needs HotpotQA's") as caught:
        ruler.run(setup_of(tmp_path, "qa_2"), Knowing(set()))
    assert "--data" in caught.value.hint
