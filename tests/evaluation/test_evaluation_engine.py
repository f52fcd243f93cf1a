"""Batches, journal, several processes and kills: the same answers whatever happens on the way."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import as_torchrun
from longrope2.cli import main
from longrope2.distributed import World
from longrope2.errors import DataError
from longrope2.evaluation.engine import EvaluationEngine, EvaluationJournal, plan_answers, plan_scores
from longrope2.evaluation.suite import Sample, TextSpan
from longrope2.journal import JournalError
from longrope2.models import ASSETS
from longrope2.perplexity import Score

ALONE = World(process=0, num_processes=1, local_process=0)
# Small batches, so that there are many to be interrupted between.
OPTIONS = ["evaluate", "tiny", "--suite", "niah,perplexity,longppl", "--lengths", "256", "--samples", "1"]
OPTIONS += ["--tasks", "full", "--batch-tokens", "512"]


class Echo:
    """Answers with the last token of a prompt; scores a span by its sum."""

    window = 100
    batch_rows = 4

    def __init__(self, fail_at=None):
        self.batches, self.fail_at = [], fail_at

    def tokenizer(self, texts, **_):
        return type("Encoding", (), {"input_ids": [[ord(letter) for letter in text] for text in texts]})

    def batch_tokens(self):
        return 64

    def answer(self, prompts):
        if len(self.batches) == self.fail_at:
            raise RuntimeError("power cut")
        self.batches.append([bytes(prompt.token_ids).decode() for prompt in prompts])
        return [chr(prompt.token_ids[-1]) * prompt.max_new_tokens for prompt in prompts]

    def score(self, spans):
        self.batches.append([list(span.token_ids) for span in spans])
        return [Score(float(sum(span.token_ids)), 1, exact=False) for span in spans]


def sample(text, *, task="t", length=20, index=0, new_tokens=2, **options) -> Sample:
    return Sample(
        suite="s", task=task, length=length, index=index, prompt=text, references=("x",), max_new_tokens=new_tokens,
        score=lambda answer, references: float(answer.startswith(references[0])), **options,
    )  # fmt: skip


def engine(backend, path=None, header=None, **options) -> EvaluationEngine:
    return EvaluationEngine(backend, EvaluationJournal(path, header or {"model": "m"}), ALONE, **options)


def entries(path, kind="answer") -> list[dict]:
    return [entry for entry in map(json.loads, path.read_text().splitlines()) if entry["type"] == kind]


# Plans


def test_batches_are_of_one_length_and_the_longest_come_first():
    samples = [
        sample(f"{task}{index}", task=task, length=length, index=index)
        for task, length, count in (("a", 10, 5), ("b", 10, 2), ("a", 30, 3))
        for index in range(count)
    ]
    batches = plan_answers(samples, batch_tokens=40, batch_rows=3)
    assert batches == [[7], [8], [9], [0, 5, 1], [6, 2, 3], [4]]
    # A length that does not fit runs alone.
    assert plan_answers(samples[7:], batch_tokens=8, batch_rows=3) == [[0], [1], [2]]


def test_a_batch_does_not_wait_for_another_kind_of_answer():
    """Of 13 tasks of RULER five end early; in batches of all tasks, each step would still run for them."""
    new = {"a": 128, "b": 30, "c": 128, "d": 30}
    samples = [sample(task, task=task, new_tokens=new[task]) for task in "abcd" for _ in range(4)]
    batches = plan_answers(samples, batch_tokens=1000, batch_rows=4)
    assert [{samples[index].max_new_tokens for index in batch} for batch in batches] == [{128}, {128}, {30}, {30}]


def test_more_samples_leave_earlier_batches_alone():
    def keys(count):
        samples = [
            sample(f"{task}{index}", task=task, index=index, new_tokens=new)
            for task, new in (("a", 8), ("b", 8), ("c", 4))
            for index in range(count)
        ]
        return [[samples[index].key for index in batch] for batch in plan_answers(samples, 60, 3)]

    known, more = keys(6), keys(12)
    assert [batch for batch in more if batch in known] == known
    assert len(more) == 2 * len(known)


def test_spans_of_like_length_share_a_forward():
    lengths = [3, 9, 4, 10, 3, 30]
    spans = [TextSpan(token_ids=[1] * length, start=1) for length in lengths]
    batches = plan_scores(spans, 20)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert [[lengths[index] for index in batch] for batch in batches] == [[30], [10, 9], [4, 3, 3]]


# Progress


def test_progress_moves_inside_a_batch_and_ends_once(monkeypatch):
    class Reading(Echo):
        def answer(self, prompts):
            for _ in prompts:
                self.on_read(900)
            return super().answer(prompts)

    seen = []

    class Line:
        def __init__(self, total, label):
            assert total == 4

        def update(self, done):
            seen.append(done)

    monkeypatch.setattr("longrope2.evaluation.engine.ProgressLine", Line)
    samples = [sample(letter, length=1150, index=index) for index, letter in enumerate("abc")]
    engine(Reading(), batch_tokens=2300).answers(samples, "l")
    # Two batches, of two prompts and one; what rounds to the whole before the end is not the end.
    assert seen == [0.9, 1.8, 2.3, 3.2, 4]


# The journal


def test_answers_are_kept_with_what_is_needed_to_read_them(tmp_path):
    path = tmp_path / "generations.jsonl"
    samples = [sample("x", index=0), sample("y", index=1, details={"depth": 0.5})]
    assert engine(Echo(), path).answers(samples, "l") == ["xx", "yy"]
    first, second = entries(path)
    assert first["sample"] == "s/t/20/0"
    assert (first["answer"], first["score"], first["references"]) == ("xx", 1.0, ["x"])
    assert (second["score"], second["details"]) == (0.0, {"depth": 0.5})


def test_nothing_is_computed_twice_and_a_batch_cut_short_runs_again_whole(tmp_path):
    path = tmp_path / "generations.jsonl"
    samples = [sample(f"{index}", index=index) for index in range(9)]
    failing = Echo(fail_at=2)
    with pytest.raises(RuntimeError, match="power cut"):
        engine(failing, path).answers(samples, "l")
    assert len(entries(path)) == 6
    # As if the kill had come in the middle of writing the second batch.
    lines = path.read_bytes().split(b"\n")
    assert json.loads(lines[5])["type"] == "time"  # after each batch
    path.write_bytes(b"\n".join(lines[:7]) + b"\n" + lines[7][:20])
    going_on = Echo()
    answers = engine(going_on, path).answers(samples, "l")
    assert answers == [str(index) * 2 for index in range(9)]
    assert going_on.batches == [["3", "4", "5"], ["6", "7", "8"]]  # the same neighbours as before
    assert [entry["sample"] for entry in entries(path)] == [f"s/t/20/{index}" for index in range(9)]
    done = Echo()
    assert engine(done, path).answers(samples, "l") == answers
    assert done.batches == []


def test_likelihoods_are_kept_too(tmp_path):
    path = tmp_path / "generations.jsonl"
    spans = [TextSpan(token_ids=[1, 2], start=1), TextSpan(token_ids=[1, 3], start=1)]
    first = engine(Echo(), path).scores(spans, "l")
    again = Echo()
    assert engine(again, path).scores(spans, "l") == first
    assert again.batches == []
    small = Echo()
    engine(small, batch_tokens=2).scores(spans, "l")
    assert len(small.batches) == 2  # as many tokens as --batch-tokens allows, where memory is short
    infinite = Echo()
    infinite.score = lambda spans: [Score(float("inf"), 1, exact=False) for _ in spans]
    spans = [TextSpan(token_ids=[9, 9], start=1)]
    assert engine(infinite, path).scores(spans, "l") == engine(again, path).scores(spans, "l")


def test_batches_stay_as_they_were_though_memory_is_not(tmp_path):
    path = tmp_path / "generations.jsonl"
    samples = [sample(f"{index}", index=index) for index in range(4)]
    engine(Echo(), path).answers(samples[:1], "l")
    other = Echo()
    other.batch_tokens = lambda: 20
    engine(other, path).answers(samples, "l")
    assert other.batches == [["0", "1", "2"], ["3"]]
    asked = Echo()
    engine(asked, path, batch_tokens=40).answers([sample(f"n{i}", index=i) for i in range(3)], "l")
    assert [len(batch) for batch in asked.batches] == [2, 1]


def test_a_journal_of_another_model_is_refused(tmp_path):
    path = tmp_path / "generations.jsonl"
    engine(Echo(), path, {"model": "m", "factors": {"method": "yarn"}})
    with pytest.raises(
        JournalError, match=r"belongs to another evaluation: factors.method: 'yarn' on disk, 'ntk' now"
    ) as e:
        engine(Echo(), path, {"model": "m", "factors": {"method": "ntk"}})
    assert e.value.hint == "evaluate into another folder, or delete this one"
    path.write_text(path.read_text() + '{"type": "answer", "id": "1"}\n')
    with pytest.raises(JournalError, match="line 3 is damaged"):
        engine(Echo(), path, {"model": "m", "factors": {"method": "yarn"}})


# The window


def test_answers_end_where_the_window_ends():
    backend = Echo()
    assert engine(backend).answers([sample("a" * 99, new_tokens=5)], "l") == ["aa"]
    assert engine(backend).answers([sample("b" * 100, new_tokens=5)], "l") == ["b"]
    with pytest.raises(DataError, match=r"s/t/20/0: its prompt has 101 tokens, the model's window 100") as caught:
        engine(backend).answers([sample("c" * 101)], "l")
    assert "--beyond-window" in caught.value.hint
    assert engine(backend, beyond_window=True).answers([sample("d" * 300, new_tokens=5)], "l") == ["ddddd"]


def test_an_answer_that_the_window_cut_is_none_beyond_it(tmp_path):
    path = tmp_path / "generations.jsonl"
    samples = [sample("a" * 99, new_tokens=5, may_be_cut=True), sample("b", new_tokens=5, index=1)]
    cut, whole = ["aa", "bbbbb"], ["aaaaa", "bbbbb"]
    first, beyond, again = Echo(), Echo(), Echo()
    assert engine(first, path).answers(samples, "l") == cut
    assert engine(beyond, path, beyond_window=True).answers(samples, "l") == whole
    assert len(entries(path)) == 3  # what cannot be cut is known
    assert engine(again, path).answers(samples, "l") == cut
    assert engine(again, path, beyond_window=True).answers(samples, "l") == whole
    assert again.batches == []


def test_a_prompt_may_be_tokens():
    backend = Echo()
    assert engine(backend).answers([sample((65, 66))], "l") == ["BB"]
    assert sample((65, 66)).digest() != sample((65, 67)).digest()
    assert sample("a", stop=("\n",)).digest() != sample("a").digest()


# The whole command


def in_this_process(*options) -> None:
    """`longrope2` with these options, with one thread as the processes below have: sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["longrope2", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            main()
    torch.set_num_threads(threads)
    assert not ended.value.code


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What an evaluation of the tiny model gives when nothing happens."""
    folder = tmp_path_factory.mktemp("reference")
    in_this_process(*OPTIONS, "-o", folder)
    return folder


def start(folder, **variables) -> subprocess.Popen:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "longrope2", *OPTIONS, "-o", str(folder)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process) -> tuple[int, str]:
    try:
        _, error = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, error


def same_results(folder, reference) -> None:
    found, expected = (json.loads((place / "results.json").read_text()) for place in (folder, reference))
    assert found["scores"] == expected["scores"]
    assert found["grids"] == expected["grids"]
    assert found["values"] == expected["values"]
    for kind in ("answer", "likelihood"):
        lines, others = (entries(place / "generations.jsonl", kind) for place in (folder, reference))
        assert sorted(lines, key=lambda entry: entry["id"]) == sorted(others, key=lambda entry: entry["id"])


def test_the_tiny_model_finds_its_needles(reference):
    result = json.loads((reference / "results.json").read_text())
    (niah,) = [score for score in result["scores"] if score["suite"] == "niah"]
    assert (niah["score"], niah["samples"]) == (100.0, 11)
    assert result["grids"]["niah"]["lengths"] == [256]
    assert result["values"]["niah/niah/256"]["values"] == [1.0] * 11
    (book,) = [score for score in result["scores"] if score["suite"] == "perplexity"]
    losses = result["values"]["perplexity/full/256"]["values"]
    assert len(losses) == book["samples"]
    assert book["score"] == pytest.approx(math.exp(sum(losses) / len(losses)))
    assert (reference / "niah.png").stat().st_size > 1000


def test_kill_9_and_go_on(reference, tmp_path):
    process = start(tmp_path)
    journal = tmp_path / "generations.jsonl"
    end = time.monotonic() + 90
    while not (journal.exists() and journal.read_bytes().count(b'"answer"') >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    assert journal.read_bytes().count(b'"type": "answer"') < len(entries(reference / "generations.jsonl"))
    assert not (tmp_path / "results.json").exists()
    in_this_process(*OPTIONS, "-o", tmp_path)
    same_results(tmp_path, reference)


def test_a_model_that_was_moved_is_the_same_model(reference, tmp_path):
    folder = shutil.copytree(reference, tmp_path / "out")
    model = shutil.copytree(ASSETS / "tiny", tmp_path / "moved")
    before = (folder / "generations.jsonl").read_bytes()
    in_this_process(*(str(model) if option == "tiny" else option for option in OPTIONS), "-o", folder)
    assert (folder / "generations.jsonl").read_bytes() == before
    seconds = sum(entry["seconds"] for entry in entries(folder / "generations.jsonl", "time"))
    assert 0 < seconds < json.loads((folder / "results.json").read_text())["seconds"]
    same_results(folder, reference)


def test_two_processes_give_the_same_scores(reference, tmp_path):
    workers = [start(tmp_path, **told) for told in as_torchrun()]
    for code, error in [finish(worker) for worker in workers]:
        assert code == 0, error
    same_results(tmp_path, reference)
    assert json.loads((tmp_path / "results.json").read_text())["processes"] == 2
