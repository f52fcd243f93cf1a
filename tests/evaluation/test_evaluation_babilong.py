"""BABILong: stories that a reader of the facts solves, hidden in order and evenly, within the length."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from longrope2.distributed import World
from longrope2.errors import DataError
from longrope2.evaluation.babi import STORY_SIZES, make_story
from longrope2.evaluation.engine import EvaluationEngine, EvaluationJournal
from longrope2.evaluation.suite import Setup, encode
from longrope2.evaluation.suites import babilong
from longrope2.models import describe, load_tokenizer

WHO, WHERE, WHAT = "Daniel|John|Mary|Sandra", "bathroom|bedroom|garden|hallway|kitchen|office", "apple|football|milk"
FACT = re.compile(
    rf"\b({WHO}) (?:(?:went|went back|moved|journeyed|travelled) to the ({WHERE})"
    rf"|(?:got|took|grabbed|picked up) the ({WHAT})(?: there)?"
    rf"|(?:dropped|discarded|left|put down) the ({WHAT})(?: there)?)\."
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(describe("tiny"))


def setup_of(tokenizer, **options) -> Setup:
    defaults = {
        "lengths": (1500,), "tasks": babilong.TASKS, "named": False, "samples": 4, "seed": 42, "data": None,
        "books": None, "chat": False, "note": lambda message: None, "cache": Path("unused"),
    }  # fmt: skip
    return Setup(tokenizer=tokenizer, **{**defaults, **options})


def solve(text: str, question: str) -> str:
    """Answer from the facts alone, read backwards: no state of a world, as different from the generator as can be."""
    facts = [match.groups() for match in FACT.finditer(text)]

    def where(who: str, before: int) -> str | None:
        """The last room that a person went to."""
        return next((fact[1] for fact in reversed(facts[:before]) if fact[0] == who and fact[1]), None)

    def location(thing: str, before: int) -> str | None:
        """Of a thing: its last holder's, now or when it was left."""
        for place in range(before - 1, -1, -1):
            who, _, taken, left = facts[place]
            if left == thing:
                # An unseen person holds it where it was found.
                return where(who, place) or location(thing, place)
            if taken == thing:
                return where(who, before) or location(thing, place)
        return None

    if person := re.fullmatch(rf"Where is ({WHO})\?", question):
        return where(person[1], len(facts))
    if thing := re.fullmatch(rf"Where is the ({WHAT})\?", question):
        return location(thing[1], len(facts))
    thing, room = re.fullmatch(rf"Where was the ({WHAT}) before the ({WHERE})\?", question).groups()
    trail = [location(thing, before) for before in range(len(facts) + 1)]
    end = max(place for place, known in enumerate(trail) if known == room)
    return next(known for known in reversed(trail[:end]) if known != room)


def question_of(prompt: str) -> str:
    return re.search(r"Question: (.*\?)", prompt)[1]


def context_of(prompt: str) -> str:
    return re.search(r"<context>\n(.*)\n</context>", prompt, re.S)[1]


@pytest.mark.parametrize("task", babilong.TASKS)
def test_the_facts_answer_the_question(task):
    """The generator takes its answers from the state of a world, the solver from what was said."""
    answers, sizes = Counter(), set()
    for number in range(400):
        story = make_story(task, random.Random(number))
        assert all(FACT.fullmatch(fact) for fact in story.facts)
        assert solve(" ".join(story.facts), story.question) == story.answer, story
        answers[story.answer] += 1
        sizes.add(len(story.facts))
    assert min(answers.values()) > 400 / 6 / 2, "rooms are asked for about equally often"
    assert len(answers) == 6
    assert sizes <= set(STORY_SIZES[task])
    assert max(sizes) == max(STORY_SIZES[task])


def test_a_story_of_bAbI_itself():
    """The solver knows the published task: lines of its first tasks, with their answers."""
    story = (
        "Mary moved to the bathroom. Sandra journeyed to the bedroom. Mary got the football there. John went to the "
    )
    story += "kitchen. Mary went back to the kitchen. Mary went back to the garden."
    assert solve(story, "Where is the football?") == "garden"
    story += " Sandra went back to the office. Mary dropped the football. John got the milk there."
    assert solve(story, "Where is the football?") == "garden"
    assert solve(story, "Where was the football before the garden?") == "kitchen"
    assert solve(story, "Where is the milk?") == "kitchen"
    assert solve(story, "Where is Sandra?") == "office"


class Reader:
    """A model that reads the facts."""

    window, batch_rows = 1 << 20, 8

    def __init__(self, tokenizer, answer=solve) -> None:
        self.tokenizer, self._answer = tokenizer, answer

    def batch_tokens(self) -> int:
        return 1 << 20

    def answer(self, prompts) -> list[str]:
        texts = [self.tokenizer.decode(prompt.token_ids, skip_special_tokens=True) for prompt in prompts]
        return [f" It is the {self._answer(context_of(text), question_of(text))}" for text in texts]


def test_a_reader_of_the_facts_has_all_right(tokenizer):
    def measure(reader) -> dict[str, float]:
        here = World(process=0, num_processes=1, local_process=0)
        engine = EvaluationEngine(reader, EvaluationJournal(None, {}), here)
        return {score.task: score.score for score in babilong.SUITE.measure(setup_of(tokenizer), engine).measured}

    assert measure(Reader(tokenizer)) == {"qa1": 100, "qa2": 100, "qa3": 100, "average": 100}
    assert measure(Reader(tokenizer, lambda *_: "garden"))["average"] < 60


@pytest.mark.parametrize("length", [1100, 2500])
def test_facts_keep_their_order_within_the_length(length, tokenizer):
    for task in babilong.TASKS:
        for index, sample in enumerate(babilong.babilong_samples(setup_of(tokenizer, samples=6), task, length)):
            used = len(encode(tokenizer, sample.prompt)) + sample.max_new_tokens
            assert length - 200 < used <= length
            story = make_story(task, random.Random(f"42 {task} {index}"))
            assert [match[0] for match in FACT.finditer(context_of(sample.prompt))] == list(story.facts)
            assert sample.references == (story.answer,)
            assert sample.prompt.endswith(f"</context>\n\nQuestion: {story.question}\nAnswer:")
    again = babilong.babilong_samples(setup_of(tokenizer, samples=1), "qa3", length)
    assert again[0].prompt == babilong.babilong_samples(setup_of(tokenizer), "qa3", length)[0].prompt


def test_facts_stand_anywhere_with_the_same_chance(tokenizer):
    """Ten equal parts of the context, and the gaps between few sentences: chi-square with 9 and 4 degrees."""
    parts = Counter()
    for sample in babilong.babilong_samples(setup_of(tokenizer, samples=60), "qa1", 1200):
        context = context_of(sample.prompt)
        parts.update(min(9, 10 * match.start() // len(context)) for match in FACT.finditer(context))
    expected = sum(parts.values()) / 10
    assert sum((parts[part] - expected) ** 2 / expected for part in range(10)) < 27.9  # p = 0.001
    rng, gaps = random.Random(1), Counter()
    for _ in range(1000):
        text = list(babilong.hidden(["x"], [rng.random()], ["a", "b", "c", "d"]))
        gaps[text.index("x")] += 1
    assert sum((gaps[gap] - 200) ** 2 / 200 for gap in range(5)) < 18.5


@pytest.mark.parametrize(
    ("answer", "question", "score"),
    [
        (" Mary is now in the kitchen", "Where is Mary?", 1),
        ("KITCHEN. Then the garden", "Where is Mary?", 1),  # the first sentence only
        ("kitchen or garden", "Where is Mary?", 0),
        ("garden", "Where is Mary?", 0),
        ("kitchen <example> garden", "Where is Mary?", 1),
        ("kitchen <context> garden", "Where is Mary?", 1),
        ("Before the office the milk was in the kitchen", "Where was the milk before the office?", 1),
        ("the office", "Where was the milk before the office?", 0),
        ("", "Where is Mary?", 0),
    ],
)
def test_one_room_must_be_named(answer, question, score):
    assert babilong.only_room(answer, ["kitchen"], question=question) == score


def test_in_a_chat_the_question_ends_the_turn():
    tokenizer = load_tokenizer(describe("tiny"))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    (sample,) = babilong.babilong_samples(setup_of(tokenizer, samples=1, chat=True), "qa1", 1100)
    assert sample.prompt.startswith("[user] Somewhere in a long text")
    assert re.search(r"Question: Where is \w+\?\n\[assistant\]$", sample.prompt)
    assert len(encode(tokenizer, sample.prompt)) + sample.max_new_tokens <= 1100


def test_no_room_for_a_story_and_no_books_for_a_length(tokenizer, tmp_path):
    with pytest.raises(DataError, match="sample of 300 tokens has no room for its story") as caught:
        babilong.check(setup_of(tokenizer, lengths=(4000, 300)))
    least = int(caught.value.hint.split()[-1])
    babilong.check(setup_of(tokenizer, lengths=(4000, least)))
    for task in babilong.TASKS:
        assert len(babilong.babilong_samples(setup_of(tokenizer), task, least)) == 4
    with pytest.raises(DataError, match=f"of {least - 1} tokens has no room"):
        babilong.check(setup_of(tokenizer, lengths=(4000, least - 1)))
    with pytest.raises(DataError, match="of 300 tokens has no room"):
        babilong.babilong_samples(setup_of(tokenizer), "qa3", 300)
    (tmp_path / "short.txt").write_text("A short book of one sentence and no more than that. " * 40)
    with pytest.raises(DataError, match=r"the books have no [\d,]+ tokens in sentences for a sample of babilong"):
        babilong.check(setup_of(tokenizer, lengths=(4000,), books=str(tmp_path / "short.txt")))
