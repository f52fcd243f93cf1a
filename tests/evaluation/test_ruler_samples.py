"""What holds for every sample, the cache of samples, and what is refused."""

import json
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
from ruler_fixtures import neox_tokenizer, question_files

from longrope2.errors import DataError, LongRopeError
from longrope2.evaluation.ruler import TASKS, cache, counting, make_all, make_samples, unavailable
from longrope2.evaluation.ruler.questions import QuestionMaker
from longrope2.evaluation.ruler.sizing import TokenCounter
from longrope2.evaluation.suite import Frame, chat_frame

NO_QUESTIONS = [name for name, task in TASKS.items() if task.question_file is None]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return question_files(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("cache")
    samples = make_all(
        list(TASKS), tokenizer=neox_tokenizer(), lengths=[4096], count=2, cache=folder, qa_files=files, workers=1
    )
    return folder, samples


def test_the_tasks_are_rulers_in_its_order():
    assert list(TASKS) == [
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    ]  # fmt: skip
    assert [task.tokens_to_generate for task in TASKS.values()] == [128] * 8 + [30, 120, 50, 32, 32]
    assert [task.metric for task in TASKS.values()] == ["all"] * 11 + ["part"] * 2


def test_no_sample_is_longer_than_asked_and_its_length_is_counted(made):
    for (task, length), samples in made[1].items():
        for sample in samples:
            tokens = len(neox_tokenizer().tokenize(sample.prompt))
            assert sample.length == tokens + TASKS[task].tokens_to_generate <= length
            assert sample.length > 0.5 * length  # a whole step shorter at most


def test_the_answers_are_in_the_input(made):
    for (task, _), samples in made[1].items():
        for sample in samples:
            # HotpotQA also asks for a yes or no.
            assert task == "qa_2" or all(answer in sample.input for answer in sample.outputs)
            assert len(sample.outputs) == len(set(sample.outputs)) or TASKS[task].question_file


def test_each_needle_is_hidden_once_under_its_own_key(made):
    for (task, _), samples in made[1].items():
        if (setup := TASKS[task].needles) is None:
            continue
        for sample in samples:
            needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", sample.input)
            asked = {key for key, value in needles if value in sample.outputs}
            assert len(asked) == setup.queries
            assert Counter(key for key, _ in needles if key in asked) == dict.fromkeys(asked, setup.values)
            assert all(key in sample.answer_prefix for key in asked)


def test_frequent_words_are_the_most_frequent(made):
    for sample in made[1]["fwe", 4096]:
        counts = Counter(re.findall(r"\b[a-z]{6}\b", sample.input.split("words. ", 1)[1].split("\n")[0]))
        assert [word for word, _ in counts.most_common(3)] == sample.outputs
    for sample in made[1]["cwe", 4096]:
        counts = Counter(re.findall(r"\d+\. (\S+)", sample.input.rsplit("Memorize", 1)[1]))
        assert {word for word, count in counts.items() if count == 30} == set(sample.outputs)


def test_the_chain_leads_to_all_variables(made):
    for sample in made[1]["vt", 4096]:
        value = re.search(r"assigned the value (\d+), they are", sample.answer_prefix)[1]
        assignments = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", sample.input.rsplit("Memorize", 1)[1]))
        found = {value}
        for _ in sample.outputs:
            found |= {name for name, source in assignments.items() if source in found}
        assert found - {value} == set(sample.outputs)


def test_a_second_time_the_files_are_only_read(made, files, monkeypatch):
    folder, samples = made
    monkeypatch.setattr(cache, "make", lambda request: pytest.fail("made again"))
    again = make_all(list(TASKS), tokenizer=neox_tokenizer(), lengths=[4096], count=2, cache=folder, qa_files=files)
    assert again == samples
    assert len(list(folder.iterdir())) == len(TASKS)


def test_made_by_two_processes_the_files_are_the_same(made, tmp_path, capfd):
    folder, _ = made
    tasks = ["niah_single_2", "vt", "fwe"]
    make_all(tasks, tokenizer=neox_tokenizer(), lengths=[4096], count=2, cache=tmp_path, workers=2)
    assert len(list(tmp_path.iterdir())) == len(tasks)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes()
    assert "RULER samples 3/3" in capfd.readouterr().err


def test_every_input_has_its_own_file(made, tmp_path, files):
    """Whatever changes the samples changes the name of their file."""
    folder, _ = made
    names = {file.name for file in folder.iterdir()}
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"text": "other essays"}))
    request = cache.Request(
        task="cwe", length=4096, count=2, seed=42, counter=TokenCounter.of(neox_tokenizer()), frame=Frame(),
        haystack=None, english_words=None,
    )  # fmt: skip

    def name(essays="", **changes):
        return cache._file_name(cache.replace(request, **changes), essays)

    assert name() in names
    variants = [
        name(seed=43), name(count=3), name(length=4097), name(frame=Frame("a", "b")), name(english_words=other),
        name(task="qa_1", qa_file=files["qa_1"]), name(task="qa_1", qa_file=other),
        name("x", task="niah_single_2"), name("y", task="niah_single_2"), name(counter=TokenCounter("{}")),
    ]  # fmt: skip
    assert len({name(), *variants}) == len(variants) + 1


def test_a_damaged_file_is_named_with_its_line(made, tmp_path):
    folder, _ = made
    whole = next(folder.glob("vt-4096*")).read_text().splitlines()
    for broken in (whole[1][:-20], '{"index": 1}', "[]"):
        file = tmp_path / "vt.jsonl"
        file.write_text(f"{whole[0]}\n{broken}\n")
        with pytest.raises(DataError, match=r"vt\.jsonl, line 2"):
            cache.read_samples(file, 2)
    file.write_text(f"{whole[0]}\n")
    with pytest.raises(DataError, match=r"vt\.jsonl: 1 sample, 2 expected") as caught:
        cache.read_samples(file, 2)
    assert "made again" in caught.value.hint


def test_a_killed_process_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cache.ProcessPoolExecutor, "submit", lambda *a: (_ for _ in ()).throw(cache.BrokenProcessPool())
    )
    with pytest.raises(LongRopeError, match="died"):
        make_all(["vt", "fwe"], tokenizer=neox_tokenizer(), lengths=[4096], count=1, cache=tmp_path, workers=2)


def test_no_process_outlives_a_killed_caller():
    script = """
import os, signal
from longrope2.evaluation.ruler.cache import _pool
_pool(2).submit(os.getpid).result()
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Returns when the last process that may still write to the pipes has ended.
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multiquery", "fwe"])
def test_lengths_below_rulers_smallest_haystack(task):
    samples = make_samples(task, tokenizer=neox_tokenizer(), length=512, count=3)
    assert all(300 < sample.length <= 512 for sample in samples)


@pytest.mark.parametrize("task", NO_QUESTIONS)
def test_a_length_without_room_is_refused(task):
    with pytest.raises(DataError, match=f"{task}.*tokens") as error:
        make_samples(task, tokenizer=neox_tokenizer(), length=160, count=1)
    assert error.value.hint


def test_the_documents_around_a_question_are_first_those_of_its_article(files):
    maker = QuestionMaker(TASKS["qa_1"], seed=0, frame=str, file=files["qa_1"])
    question = maker._questions[0]
    own, related = set(question.documents), set(question.related)
    assert len(related) > 2
    for size in range(1, len(related) + 5):
        chosen = maker._choose(question, size)
        assert len(chosen) == len(set(chosen)) == size
        assert own <= set(chosen)
        assert len(related & set(chosen)) == min(size - 1, len(related))


def test_questions_keep_their_own_documents(files):
    with pytest.raises(DataError, match="at least"):
        make_samples("qa_2", tokenizer=neox_tokenizer(), length=512, count=1, qa_file=files["qa_2"])
    sample = make_samples("qa_1", tokenizer=neox_tokenizer(), length=512, count=1, qa_file=files["qa_1"])[0]
    assert "France" in sample.input


def test_what_is_missing_is_said_with_its_origin(tmp_path, files):
    assert list(unavailable({})) == ["qa_1", "qa_2"]
    assert "rajpurkar" in unavailable({"qa_2": tmp_path})["qa_1"]
    assert unavailable(files) == {}
    with pytest.raises(DataError, match="qa_2 needs a file") as error:
        make_samples("qa_2", tokenizer=neox_tokenizer(), length=4096, count=1)
    assert "hotpotqa.github.io" in error.value.hint


def test_bad_requests(tmp_path, files):
    def make(task="vt", **changes):
        return make_samples(task, **{"tokenizer": neox_tokenizer(), "length": 4096, "count": 1, **changes})

    with pytest.raises(DataError, match="no task 'vtt'"):
        make("vtt")
    with pytest.raises(DataError, match="0 samples"):
        make(count=0)
    with pytest.raises(DataError, match="questions, 9 asked for"):
        make("qa_1", count=9, qa_file=files["qa_1"])
    with pytest.raises(DataError, match="not in the format of hotpotqa"):
        make("qa_2", qa_file=files["qa_1"])
    with pytest.raises(DataError, match="not a readable JSON file"):
        make("qa_1", qa_file=tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"absent\.json: cannot be read"):
        make_all(["cwe"], tokenizer=neox_tokenizer(), lengths=[4096], count=1, cache=tmp_path,
                 english_words=tmp_path / "absent.json")  # fmt: skip


def test_more_common_words_than_wonderwords_has(tmp_path):
    """Near 128k: RULER's own list if it is given, else the words of the package's books."""
    maker = counting.CommonWordsMaker(length=131_072, seed=42, frame=Frame(), english_words=None)
    assert maker.possible(20_000)
    assert not maker.possible(200_000)
    assert len(set(maker.draw(9_000, 0).outputs)) == 10
    file = tmp_path / "english_words.json"
    file.write_text(json.dumps({str(i): f"word{i}" for i in range(9_500)}))
    own = counting.CommonWordsMaker(length=131_072, seed=42, frame=Frame(), english_words=file)
    assert all(word.startswith("word") for word in own.draw(9_000, 0).outputs)
    assert not own.possible(9_501)
    file.write_text('{"1": 2}')
    wrong = counting.CommonWordsMaker(length=131_072, seed=42, frame=Frame(), english_words=file)
    with pytest.raises(DataError, match="english_words"):
        wrong.possible(9_000)


class SlowTokenizer:
    """A tokenizer that is none of the fast ones."""

    bos_token_id, bos_token = 1, "<s>"
    chat_template = "{{ messages }}"

    def tokenize(self, text):
        return text.split()

    def get_vocab(self):
        return {"a": 0}

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": [1, 5]})

    def apply_chat_template(self, messages, **options):
        return f"<s>User: {messages[0]['content']}\nModel:"


def test_any_tokenizer_can_count():
    counter = TokenCounter.of(SlowTokenizer())
    assert counter("one two three") == 3
    assert counter.fingerprint != TokenCounter.of(neox_tokenizer()).fingerprint
    assert TokenCounter.of(neox_tokenizer())("one two three") == len(neox_tokenizer().tokenize("one two three"))


def test_the_chat_frame_leaves_bos_to_the_tokenizer():
    assert chat_frame(SlowTokenizer()) == Frame("User: ", "\nModel:")
    tokenizer = SlowTokenizer()
    tokenizer.bos_token_id = None
    assert chat_frame(tokenizer) == Frame("<s>User: ", "\nModel:")


def test_no_chat_template_no_chat():
    with pytest.raises(DataError, match="no chat template"):
        make_samples("vt", tokenizer=neox_tokenizer(), length=4096, count=1, chat_template=True)
    tokenizer = SlowTokenizer()
    tokenizer.apply_chat_template = lambda messages, **options: "nothing"
    with pytest.raises(DataError, match="does not show"):
        chat_frame(tokenizer)
