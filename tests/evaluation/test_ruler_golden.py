"""Our samples are those of NVIDIA's generator, to the byte."""

import copy
import hashlib
import json

import pytest
from ruler_fixtures import FOLDER, fixture, golden_haystack, neox_tokenizer, question_files

from longrope2 import models
from longrope2.evaluation.ruler import TASKS, generate, make_samples

ONE_OF_EACH_KIND = ["niah_single_1", "niah_multiquery", "niah_multikey_3", "vt", "cwe", "fwe", "qa_1"]
REFERENCE = json.loads((FOLDER / "reference_hashes.json").read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return question_files(tmp_path_factory.mktemp("questions"))


@pytest.fixture(autouse=True)
def same_haystack(monkeypatch):
    """The sentences of the haystack as punkt_tab found them; its data cannot be here."""
    monkeypatch.setattr(generate, "load_haystack", lambda source: golden_haystack())


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = copy.copy(neox_tokenizer())
    tokenizer.chat_template = "[INST] {{ messages[0]['content'] }} [/INST]"
    return tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_samples_equal_those_of_nvidias_generator(task, files):
    samples = make_samples(task, tokenizer=neox_tokenizer(), length=4096, count=3, qa_file=files.get(task))
    made = [
        {"input": s.input, "outputs": s.outputs, "length": s.length, "answer_prefix": s.answer_prefix} for s in samples
    ]
    assert made == fixture("golden_4096")[task]


def hashed(samples):
    rows = [[s.input, s.answer_prefix, s.outputs, s.length] for s in samples]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@pytest.mark.parametrize("task", REFERENCE["short lengths"])
def test_short_lengths_have_other_settings(task, files):
    samples = make_samples(task, tokenizer=neox_tokenizer(), length=2048, count=3, seed=7, qa_file=files.get(task))
    assert hashed(samples) == REFERENCE["short lengths"][task]


@pytest.mark.parametrize("task", ONE_OF_EACH_KIND)
def test_another_tokenizer(task, files):
    tokenizer = models.load_tokenizer(models.describe("tiny"))
    samples = make_samples(task, tokenizer=tokenizer, length=6000, count=2, qa_file=files.get(task))
    assert hashed(samples) == REFERENCE["another tokenizer"][task]


@pytest.mark.parametrize("task", ONE_OF_EACH_KIND)
def test_chat_templates_frame_the_task_and_the_prefix_opens_the_answer(task, files, chat_tokenizer):
    samples = make_samples(
        task, tokenizer=chat_tokenizer, length=4096, count=2, qa_file=files.get(task), chat_template=True
    )
    assert all(s.input.startswith("[INST] ") and s.input.endswith(" [/INST]") for s in samples)
    assert hashed(samples) == REFERENCE["chat"][task]
