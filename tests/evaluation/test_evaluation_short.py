"""Short tasks: the harness gets from our model what it gets from its own, and reads files from a folder."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from longrope2.distributed import World
from longrope2.errors import DataError, LongRopeError
from longrope2.evaluation.backend import TorchBackend
from longrope2.evaluation.engine import EvaluationEngine, EvaluationJournal
from longrope2.evaluation.harness import local_tasks
from longrope2.evaluation.suite import Setup
from longrope2.models import load

pytest.importorskip("lm_eval")
ALONE = World(process=0, num_processes=1, local_process=0)
HELLASWAG = [
    {"activity_label": "Sailing", "ctx_a": f"A man is on boat {number}.", "ctx_b": "he",
     "ctx": f"A man is on boat {number}. he",
     "endings": ["sails away.", "eats the [sea].", "is a number of the house.", "the of."], "label": str(number % 4)}
    for number in range(11)
]  # fmt: skip
MMLU = [
    {"question": f"What is {number} + 1?", "subject": subject, "choices": ["1", "2", "3", "4"], "answer": number % 4}
    for subject in ("anatomy", "virology")
    for number in range(5)
]
GSM8K = [
    {"question": f"What is {number} plus 1?", "answer": f"It is one more.\n#### {number + 1}"} for number in range(7)
]
TRUTHFULQA = (
    "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
    "A,B,Is the sea wet?,Yes,Yes; It is,No; Never,url\n"
    'A,B,"Where, is it?",Here,Here; Here,Here; There;,url\n'
)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "short"
    folder.mkdir()
    files = {"hellaswag_val": HELLASWAG, "mmlu_test": MMLU, "mmlu_dev": MMLU, "gsm8k_test": GSM8K, "gsm8k_train": GSM8K}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "TruthfulQA.csv").write_text(TRUTHFULQA)
    return tmp_path


def engine_of(tiny, path=None) -> EvaluationEngine:
    return EvaluationEngine(TorchBackend(tiny.model, tiny.tokenizer, window=256), EvaluationJournal(path, {}), ALONE)


def setup_of(tiny, data, *tasks, named=True, samples=None) -> Setup:
    return Setup(
        tokenizer=tiny.tokenizer, lengths=(256,), tasks=tasks, named=named, samples=samples, seed=1, data=data,
        books=None, chat=False, note=lambda message: None, cache=Path("unused"),
    )  # fmt: skip


def test_the_same_scores_as_the_harness_with_its_own_model(tiny, data, tmp_path, capsys):
    """Multiple choice with one token and with many, weighted choices, generated answers."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from longrope2.evaluation.suites import short

    tasks = ("mmlu", "hellaswag", "truthfulqa_mc2", "gsm8k")
    journal = tmp_path / "generations.jsonl"
    outcome = short.run(setup_of(tiny, data, *tasks), engine_of(tiny, journal))
    assert "%|" not in capsys.readouterr().err, "a progress bar of the harness"
    found = {measured.task: measured for measured in outcome.measured}
    assert {task: measured.samples for task, measured in found.items()} == {
        "mmlu": 10, "hellaswag": 11, "truthfulqa_mc2": 2, "gsm8k": 7, "average": 30,
    }  # fmt: skip
    theirs = HFLM(pretrained=tiny.model, tokenizer=tiny.tokenizer, max_length=256, batch_size=4)
    notes: list[str] = []
    local = local_tasks(data, tasks, tmp_path / "theirs", notes)
    for task, metric in (("mmlu", "acc"), ("hellaswag", "acc_norm"), ("truthfulqa_mc2", "acc")):
        results = simple_evaluate(
            theirs,
            tasks=local[task],
            num_fewshot=short.EXAMPLES.get(task),
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            fewshot_random_seed=1,
        )
        if task == "hellaswag":
            for document in results["samples"]["hellaswag"]:
                prompt, _ = document["arguments"][0]
                assert prompt.count(document["doc"]["ctx_a"]) == 1, "a question among its own examples"
        scores = [document[metric] for part in results["samples"].values() for document in part]
        assert found[task].score == pytest.approx(100 * sum(scores) / len(scores), rel=1e-4), task
        assert found[task].each.values == pytest.approx(scores, rel=1e-4), task
    assert "hellaswag: examples come from the validation file" in notes[1]
    assert outcome.notes == notes
    # All of it is in the journal, so that nothing is computed again.
    engine = engine_of(tiny, journal)
    engine.backend.score = engine.backend.answer = None
    assert short.run(setup_of(tiny, data, *tasks), engine).measured == outcome.measured


def test_likelihoods_and_answers_are_those_of_the_harness(tiny):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from longrope2.evaluation.harness import EngineModel

    ours = EngineModel(engine_of(tiny), max_length=256)
    # One by one: in batches its rolling windows come out otherwise than from a plain forward (0.4.13).
    theirs = HFLM(pretrained=tiny.model, tokenizer=tiny.tokenizer, max_length=256, batch_size=1)

    def requests(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    pairs = requests(
        "loglikelihood", ("The sea", " is wide"), ("", "Whales"), ("It was the ", "best"), ("word " * 400, "end of it")
    )
    for (nll, greedy), (expected, exact) in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert nll == pytest.approx(expected, rel=1e-4)
        assert greedy == exact
    texts = requests("loglikelihood_rolling", ("Call me Ishmael.",), ("the whale " * 300,))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-4)
    options = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    prompts = requests("generate_until", ("Once upon a time", options), ("The captain of the ship", options))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)
    with pytest.raises(LongRopeError, match="answers here are greedy"):
        ours.generate_until(requests("generate_until", ("x", {"until": [], "do_sample": True, "temperature": 1.0})))


def test_tasks_without_files_are_left_out_and_named(tiny, data):
    from longrope2.evaluation.suites import short

    (data / "short" / "gsm8k_train.jsonl").unlink()
    setup = setup_of(tiny, data, "gsm8k", "truthfulqa_mc2", named=False, samples=1)
    outcome = short.run(setup, engine_of(tiny))
    assert [measured.task for measured in outcome.measured] == ["truthfulqa_mc2"]
    assert outcome.measured[0].samples == 1
    assert "short: without gsm8k, which has no file in --data" in outcome.notes


def test_too_few_examples_is_one_message(tiny, data):
    from longrope2.evaluation.suites import short

    for name in ("test", "dev"):
        rows = [row for row in MMLU if row["subject"] == "anatomy"][:2]
        (data / "short" / f"mmlu_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(LongRopeError, match=r"short task mmlu cannot be run .* number of fewshot samples"):
        short.run(setup_of(tiny, data, "mmlu"), engine_of(tiny))


@pytest.mark.parametrize("packed", [False, True])
def test_truthfulqa_choices(packed, data, tmp_path):
    file = data / "short" / "TruthfulQA.csv"
    if packed:
        (data / "short" / "TruthfulQA.csv.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    (path,) = local_tasks(data, ["truthfulqa_mc2"], tmp_path / "made", [])["truthfulqa_mc2"]
    rows = (Path(path).parent / "truthfulqa_mc2-validation.jsonl").read_text().splitlines()
    first, second = map(json.loads, rows)
    assert first["mc2_targets"] == {"choices": ["Yes", "It is", "No", "Never"], "labels": [1, 1, 0, 0]}
    assert first["mc1_targets"] == {"choices": ["Yes", "No", "Never"], "labels": [1, 0, 0]}
    assert second["mc2_targets"] == {"choices": ["Here", "There"], "labels": [1, 0]}


@pytest.mark.parametrize(
    ("task", "name", "row", "message"),
    [
        ("mmlu", "mmlu_test", {**MMLU[0], "answer": -1}, "line 1: answer must be 0, 1, 2 or 3, got '-1'"),
        ("mmlu", "mmlu_dev", {**MMLU[0], "choices": ["1", "2"]}, "line 1: 2 problems\n  - choices.2 is missing"),
        (
            "hellaswag",
            "hellaswag_val",
            {**HELLASWAG[0], "label": ""},
            "line 1: label must be '0', '1', '2', '3', 0, 1,",
        ),
        ("hellaswag", "hellaswag_val", {**HELLASWAG[0], "endings": [1, "2", "3", "4"]}, "line 1: endings.0 must be a "),
    ],
)
def test_questions_without_a_right_answer_are_named(task, name, row, message, data, tmp_path):
    (data / "short" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{name}.jsonl, {message}"):
        local_tasks(data, [task], tmp_path / "made", [])


def test_a_metric_of_all_documents_together_is_refused():
    from longrope2.evaluation.suites.short import _measure

    document = {"filter": "none", "metrics": ["word_perplexity"], "word_perplexity": (-3.0, 5), "prompt_hash": "h"}
    with pytest.raises(LongRopeError, match="its metric word_perplexity is not a score between 0 and 1"):
        _measure("wikitext", {"wikitext": [document]})


def test_every_task_of_a_group_counts_by_its_own_first_filter():
    from longrope2.evaluation.suites.short import _measure

    def documents(filter, score):
        return [{"filter": filter, "metrics": ["acc"], "acc": score, "prompt_hash": "h"}] * 2

    found = _measure("group", {"one": documents("none", 1.0), "two": documents("strict", 0.0) + documents("lax", 1.0)})
    assert (found.score, found.samples) == (50.0, 4)


def test_wrong_files_are_named(data, tmp_path):
    file = data / "short" / "hellaswag_val.jsonl"
    file.write_text(json.dumps(HELLASWAG[0]) + "\n" + json.dumps({"label": "1"}) + "\n")
    with pytest.raises(DataError, match=r"hellaswag_val.jsonl, line 2: 4 problems\n  - activity_label is missing"):
        local_tasks(data, ["hellaswag"], tmp_path / "made", [])
    (data / "short" / "mmlu_dev.jsonl").write_text(json.dumps(MMLU[0]) + "\n")
    with pytest.raises(DataError, match=r"subjects without examples in mmlu_dev.jsonl, or unknown: virology"):
        local_tasks(data, ["mmlu"], tmp_path / "made", [])
    for rows, message in (("", "no rows"), ("A,B,Why?,So,So,,url", "row 2: a right and a wrong answer expected")):
        (data / "short" / "TruthfulQA.csv").write_text(TRUTHFULQA.splitlines()[0] + "\n" + rows)
        with pytest.raises(DataError, match=rf"TruthfulQA.csv(:|,) {message}"):
            local_tasks(data, ["truthfulqa_mc2"], tmp_path / "made", [])
    (data / "short" / "TruthfulQA.csv").write_bytes(b"Question\n\xff\n")
    with pytest.raises(DataError, match=r"TruthfulQA.csv: cannot be read"):
        local_tasks(data, ["truthfulqa_mc2"], tmp_path / "made", [])
    (data / "short" / "TruthfulQA.csv").write_text("Question,Answer\nWhy?,So\n")
    with pytest.raises(DataError, match=r"TruthfulQA.csv, row 2: not as TruthfulQA.csv is published"):
        local_tasks(data, ["truthfulqa_mc2"], tmp_path / "made", [])


LAMBADA = [
    {"text": "The sea was wide, and over the sea came the old captain with his ship and the ship"},
    {"context": "Call me Ishmael, said the man. And the man was called", "continuation": "Ishmael"},
    {"text": "the whale and the whale and the whale and the whale and the whale"},
    {"text": "It was a dark night, and the wind was in the trees of the forest"},
]
PIQA = [
    {"goal": goal, "sol1": first, "sol2": second, "label": label}
    for goal, first, second, label in (
        ("To sail", "set the sails.", "of.", 0),
        ("Boil water", "it is a very long answer to what was asked", "fire", 1),
        ("Read", "a book", "a book of the sea and the land", 0),
        ("Go home", "walk", "swim in the number of the house", 1),
    )
]
ARC = [
    {"id": "1", "question": "What sinks?", "answerKey": "A",
     "choices": {"text": ["the stone that lies in the sea", "wood", "an iron"], "label": ["A", "B", "C"]}},
    {"id": "2", "question": "What burns?", "answerKey": "1",
     "choices": {"text": ["dry wood", "the water of the sea", "a", "the"], "label": ["1", "2", "3", "4"]}},
    {"id": "3", "question": "Where do whales live?", "answerKey": "C",
     "choices": {"text": ["house", "in the house of the old man", "in the sea", "no"], "label": ["A", "B", "C", "D"]}},
]  # fmt: skip


@torch.no_grad()
def plain_likelihood(tiny, prompt: str, answer: str) -> tuple[float, bool]:
    """Of an answer after a prompt, and whether each of its tokens is the first choice: one forward for each token."""
    before, ids = (tiny.tokenizer(text).input_ids for text in (prompt, prompt + answer))
    likelihood, greedy = 0.0, True
    for place in range(len(before), len(ids)):
        logits = tiny.model(torch.tensor([ids[:place]])).logits[0, -1].double()
        likelihood += float(logits[ids[place]] - logits.exp().sum().log())
        greedy &= int(logits.argmax()) == ids[place]
    return likelihood, greedy


def test_last_words_and_choices_against_plain_forwards(tiny, data):
    """LAMBADA, PIQA and ARC-easy: accuracies from likelihoods that the harness has no part in."""
    from longrope2.evaluation.suites import short

    for name, rows in (("lambada_openai_test", LAMBADA), ("piqa_val", PIQA), ("arc_easy_val", ARC)):
        (data / "short" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = short.run(setup_of(tiny, data, "lambada_openai", "piqa", "arc_easy"), engine_of(tiny))
    found = {measured.task: measured for measured in outcome.measured}

    def best(prompt: str, choices: list[str]) -> int:
        """By likelihood over characters."""
        each = [plain_likelihood(tiny, f"Question: {prompt}\nAnswer:", f" {choice}")[0] for choice in choices]
        means = [likelihood / len(choice) for likelihood, choice in zip(each, choices, strict=True)]
        unlike.append(means.index(max(means)) != each.index(max(each)))
        return means.index(max(means))

    unlike: list[bool] = []
    texts = [row.get("text") or f"{row['context']} {row['continuation']}" for row in LAMBADA]
    words = [float(plain_likelihood(tiny, *(t[: t.rindex(" ")], t[t.rindex(" ") :]))[1]) for t in texts]
    piqa = [float(best(row["goal"], [row["sol1"], row["sol2"]]) == row["label"]) for row in PIQA]
    arc = [
        float(best(row["question"], row["choices"]["text"]) == row["choices"]["label"].index(row["answerKey"]))
        for row in ARC
    ]
    assert list(found["lambada_openai"].each.values) == words
    assert list(found["piqa"].each.values) == piqa
    assert list(found["arc_easy"].each.values) == arc
    assert any(unlike), "rows for which the two accuracies differ"
    assert all(0 < sum(scores) < len(scores) for scores in (words, piqa, arc)), (words, piqa, arc)
    assert {task: found[task].metric for task in found if task != "average"} == {
        "lambada_openai": "acc", "piqa": "acc_norm", "arc_easy": "acc_norm",
    }  # fmt: skip
    assert any("those of the validation file" in note for note in outcome.notes)


@pytest.mark.parametrize(
    ("task", "name", "row", "message"),
    [
        ("lambada_openai", "lambada_openai_test", {"context": "x"}, "row 1: a passage and its last word expected"),
        ("lambada_openai", "lambada_openai_test", {"text": "word"}, "row 1: a passage and its last word expected"),
        ("piqa", "piqa_val", {**PIQA[0], "label": 2}, "line 1: label must be 0 or 1, got '2'"),
        ("arc_easy", "arc_easy_val", {**ARC[0], "answerKey": "D"}, "row 1: 'D' does not name one of its choices"),
    ],
)
def test_rows_that_cannot_be_scored_are_named(task, name, row, message, data, tmp_path):
    (data / "short" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{name}.jsonl, {message}"):
        local_tasks(data, [task], tmp_path / "made", [])
