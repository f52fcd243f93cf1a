"""LongBench and ∞Bench of lm-evaluation-harness beside ours: where they agree, and where the harness leaves the papers.

The papers' protocols are their authors' code (THUDM/LongBench: config/, pred.py, eval.py, metrics.py;
OpenBMB/InfiniteBench: prompt.py, eval_yarn_mistral.py, compute_scores.py). The harness needs three packages for
LongBench that are not installed; of them only fuzzywuzzy's ratio is used here, which is difflib's in whole hundredths.
"""

import difflib
import importlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from longrope2.evaluation.suite import Setup, cut_at_stop
from longrope2.evaluation.suites import infinitebench, longbench
from longrope2.models import describe, load_tokenizer

lm_eval = pytest.importorskip("lm_eval")
WINDOW = 256
CLASSES = ["City", "Country", "Human being", "Other location"]
QUESTION = {"context": "Berlin is large.", "answers": ["Paris", "the city of Paris"], "all_classes": CLASSES}
CODE = {"context": "def f(y):\n", "answers": ["return y"], "all_classes": None}
BOOK = {"id": 0, "context": "A book.", "answer": ["the sea"], "options": ["land", "the sea", "sky", "hill"]}
FILES = {
    "triviaqa": ("longbench/triviaqa.yaml", "test"),
    "trec": ("longbench/trec.yaml", "test"),
    "lcc": ("longbench/lcc.yaml", "test"),
    "repobench-p": ("longbench/repobench-p.yaml", "test"),
    "longbook_choice_eng": ("infinitebench/infinitebench_longbook_choice_en.yaml", "longbook_choice_en"),
    "kv_retrieval": ("infinitebench/infinitebench_kv_retrieval.yaml", "kv_retrieval"),
}


class Scripted:
    """An engine whose model always gives one answer, up to the stop strings."""

    def __init__(self, tokenizer, answer):
        self.backend = SimpleNamespace(tokenizer=tokenizer, window=WINDOW)
        self.answer, self.samples = answer, []

    def answers(self, samples, label):
        self.samples += samples
        return [cut_at_stop(self.answer, sample.stop) for sample in samples]

    @property
    def prompt(self) -> str:
        prompt = self.samples[0].prompt
        return prompt if isinstance(prompt, str) else self.backend.tokenizer.decode(prompt, skip_special_tokens=True)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(describe("tiny"))


@pytest.fixture(autouse=True)
def packages_of_longbench(monkeypatch):
    ratio = SimpleNamespace(ratio=lambda one, other: round(100 * difflib.SequenceMatcher(None, one, other).ratio()))
    for name, content in (("jieba", {}), ("rouge", {"Rouge": None}), ("fuzzywuzzy", {"fuzz": ratio})):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


def ours(task, row, answer, tokenizer, folder) -> tuple[float, str]:
    (folder / f"{task}.jsonl").write_text(json.dumps({"input": "Where?", **row}) + "\n")
    suite = (longbench if task in longbench.TASKS else infinitebench).SUITE
    setup = Setup(
        tokenizer=tokenizer, lengths=(WINDOW,), tasks=(task,), named=True, samples=1, seed=1, data=folder, books=None,
        chat=False, note=print, cache=folder,
    )  # fmt: skip
    engine = Scripted(tokenizer, answer)
    (found,) = suite.measure(setup, engine).measured
    return found.score, engine.prompt


def theirs(task, row, answer, tokenizer, folder) -> tuple[float, str]:
    """Through the bridge of the suite `short`, with the row in the columns of the data that the harness names."""
    from lm_eval.tasks import TaskManager

    from longrope2.evaluation.harness import EngineModel

    place, split = FILES[task]
    described = Path(lm_eval.tasks.__file__).parent / place
    data = folder / "theirs.jsonl"
    data.write_text(json.dumps({"input": "Where?", "question": "Where?", **row}) + "\n")
    local = {"data_files": {split: str(data)}, "cache_dir": str(folder / "cache")}
    description = {"include": str(described), "task": "t", "dataset_path": "json", "dataset_name": None}
    (folder / "t.yaml").write_text(json.dumps({**description, "dataset_kwargs": local}))
    engine = Scripted(tokenizer, answer)
    loaded = TaskManager(include_defaults=False).load([str(folder / "t.yaml")])
    results = lm_eval.evaluate(EngineModel(engine, max_length=WINDOW), loaded, bootstrap_iters=0)
    return 100 * results["samples"]["t"][0]["score"], engine.prompt


@pytest.mark.parametrize(
    ("task", "row", "answer", "ours_is", "theirs_is"),
    [
        # Alike.
        ("triviaqa", QUESTION, "Paris", 100, 100),
        ("triviaqa", QUESTION, "Paris of France", 67, 67),
        ("trec", {**QUESTION, "answers": ["City"]}, "City or Country", 50, 50),
        ("lcc", CODE, "return x\nmore", 88, 88),
        ("longbook_choice_eng", BOOK, "B", 100, 100),
        # eval.py drops the newlines before an answer and takes its first line; the harness stops at the first newline.
        ("triviaqa", QUESTION, "\nParis\nmore", 100, 0),
        ("trec", {**QUESTION, "answers": ["City"]}, "\nCity", 100, 0),
        # metrics.py takes a line of spaces for the line of code; the harness goes on to the next.
        ("lcc", CODE, "    \nreturn y", 17, 100),
        ("repobench-p", CODE, "    \nreturn y", 17, 100),
        # compute_scores.py takes the letter an answer begins with; the harness takes the last one in it.
        ("longbook_choice_eng", BOOK, "B, since A is wrong", 100, 0),
        ("longbook_choice_eng", BOOK, "A or B", 0, 100),
        ("longbook_choice_eng", BOOK, "the sea", 100, 0),  # the option itself counts
        ("longbook_choice_eng", BOOK, "\nB", 100, 0),
    ],
)  # fmt: skip
def test_scores(task, row, answer, ours_is, theirs_is, tokenizer, tmp_path):
    assert ours(task, row, answer, tokenizer, tmp_path)[0] == pytest.approx(ours_is, abs=0.5)
    assert theirs(task, row, answer, tokenizer, tmp_path)[0] == pytest.approx(theirs_is, abs=0.5)


ENDS = {
    "trec": ("Berlin is large.\nWhere?", "Berlin is large.\nWhere?"),
    "triviaqa": ("Berlin is large.\n\nWhere?", "Berlin is large.\nWhere?"),
    "lcc": ("def f(y):\nNext line of code:\n", "def f(y):\nNext line of code:"),
    "repobench-p": ("def f(y):\nWhere?Next line of code:\n", "def f(y):\nWhere?Next line of code:"),
    "longbook_choice_eng": (
        "Where?\nA. land\nB. the sea\nC. sky\nD. hill\n\nThe letter of the correct answer is",  # for base models
        "Don't say anything else.\nA. land\nB. the sea\nC. sky\nD. hill",  # for chat models
    ),
}


@pytest.mark.parametrize("task", ENDS)
def test_prompts(task, tokenizer, tmp_path):
    row = BOOK if task == "longbook_choice_eng" else QUESTION if task in ("trec", "triviaqa") else CODE
    prompts = [make(task, row, "x", tokenizer, tmp_path)[1] for make in (ours, theirs)]
    for prompt, end in zip(prompts, ENDS[task], strict=True):
        assert prompt.endswith(end)


@pytest.mark.parametrize("task", ["triviaqa", "lcc", "longbook_choice_eng"])
def test_what_is_too_long_loses_its_middle_there_its_beginning(task, tokenizer, tmp_path):
    """And with its beginning the instruction; pred.py and eval_yarn_mistral.py keep both ends."""
    row = {**(BOOK if task == "longbook_choice_eng" else CODE), "context": "first " + "word " * 900}
    beginning = "Read the book" if task == "longbook_choice_eng" else longbench.TASKS.get(task).prompt[:20]
    (_, kept), (_, cut) = (make(task, row, "x", tokenizer, tmp_path) for make in (ours, theirs))
    assert kept.startswith(beginning)
    assert beginning not in cut
    assert "first" not in cut


def test_key_values_are_asked_alike_but_only_at_the_length_of_their_file(tokenizer, tmp_path):
    setup = Setup(
        tokenizer=tokenizer, lengths=(WINDOW,), tasks=("kv_retrieval",), named=True, samples=1, seed=1, data=None,
        books=None, chat=False, note=print, cache=tmp_path,
    )  # fmt: skip
    (sample,) = infinitebench.key_value_samples(setup, WINDOW)
    instruction, context, question = sample.prompt.split("\n\n", 2)
    row = {"context": context, "input": question.lstrip("\n"), "answer": list(sample.references)}
    score, prompt = theirs("kv_retrieval", row, f'"{sample.references[0]}"', tokenizer, tmp_path)
    assert score == 100
    assert prompt.split() == sample.prompt.split()
    longer = context.replace("{", "{" + '"key": "value", ' * 100)
    _, prompt = theirs("kv_retrieval", {**row, "context": longer}, "x", tokenizer, tmp_path)
    assert instruction not in prompt  # ours has as many pairs as fit


def test_metrics_agree_where_they_are_the_same():
    """On random answers of one line, with words, articles, marks and names of classes in them."""
    metrics = importlib.import_module("lm_eval.tasks.longbench.metrics")
    infinite = importlib.import_module("lm_eval.tasks.infinitebench.utils")
    rng = random.Random(0)
    words = ["the", "A", "City,", "Country", "Other location", "Paris", "x-1", '"x-1"', "x-1}", "paris!", "return y"]
    for _ in range(300):
        answer = " ".join(rng.choices(words, k=rng.randrange(6)))
        references = [" ".join(rng.choices(words, k=rng.randrange(1, 3))) for _ in range(2)]
        doc = {"answers": references, "all_classes": CLASSES}
        assert longbench.f1(answer, references) == pytest.approx(metrics.get_qa_f1_score(doc, [answer])["qa_f1_score"])
        doc["answers"] = [rng.choice(CLASSES)]
        found = metrics.get_classification_score(doc, [answer])["classification_score"]
        assert longbench.class_right(answer, doc["answers"], CLASSES) == found
        found = metrics.get_code_sim_score({"answers": references}, [answer])["code_sim_score"]
        assert longbench.edit_similarity(answer, references) == pytest.approx(found)
        assert (
            infinitebench.value_found(answer, ["x-1"])
            == (infinite.process_results_kv({"answer": ["x-1"]}, [answer])["score"])
        )
