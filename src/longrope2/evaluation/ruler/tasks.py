"""The 13 tasks of RULER: their wording, configuration and metric, as NVIDIA publishes them.

Wording is benchmark data: a changed comma makes scores incomparable.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DOCUMENT = "Document {number}:\n{document}"
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")

Haystack = Literal["noise", "essay", "needle"]
Needle = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True, kw_only=True)
class NeedleSetup:
    """What is hidden in which haystack."""

    haystack: Haystack
    key: Needle = "words"
    value: Needle = "numbers"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1

    @property
    def single_answer(self) -> bool:
        """Whether the question is put in the singular."""
        return self.queries * self.values == 1


@dataclass(frozen=True, kw_only=True)
class RulerTask:
    """One task: its prompt is the template and then the answer prefix, which the model continues."""

    name: str
    template: str
    answer_prefix: str
    tokens_to_generate: int
    metric: Literal["all", "part"] = "all"  # the share of the references found, or whether any of them is
    needles: NeedleSetup | None = None
    question_file: str | None = None  # which questions it needs

    @property
    def needs_essay(self) -> bool:
        """Whether its haystack is running text."""
        return self.needles is not None and self.needles.haystack == "essay"


def _needle_task(name: str, setup: NeedleSetup) -> RulerTask:
    template = (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n{context}\n"
        "What are all the special magic {kind} for {query} mentioned in the provided text?"
    )
    answer_prefix = " The special magic {kind} for {query} mentioned in the provided text are"
    if setup.single_answer:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        answer_prefix = answer_prefix.replace("are", "is")
    return RulerTask(name=name, template=template, answer_prefix=answer_prefix, tokens_to_generate=128, needles=setup)


def _question_task(name: str, file: str) -> RulerTask:
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    return RulerTask(
        name=name,
        template=f"{order}\n\nThe following are given documents.\n\n{{context}}\n\n{order}\n\nQuestion: {{query}}",
        answer_prefix=" Answer:",
        tokens_to_generate=32,
        metric="part",
        question_file=file,
    )


VARIABLE_TRACKING = RulerTask(
    name="vt",
    template=(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {query} in the text above."
    ),
    answer_prefix=(
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        "the value {query}, they are: "
    ),
    tokens_to_generate=30,
)
COMMON_WORDS = RulerTask(
    name="cwe",
    template=(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\n"
        "Question: What are the 10 most common words in the above list?"
    ),
    answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
    tokens_to_generate=120,
)
FREQUENT_WORDS = RulerTask(
    name="fwe",
    template=(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    ),
    answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
    tokens_to_generate=50,
)

TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        _needle_task("niah_single_1", NeedleSetup(haystack="noise")),
        _needle_task("niah_single_2", NeedleSetup(haystack="essay")),
        _needle_task("niah_single_3", NeedleSetup(haystack="essay", value="uuids")),
        _needle_task("niah_multikey_1", NeedleSetup(haystack="essay", keys=4)),
        _needle_task("niah_multikey_2", NeedleSetup(haystack="needle")),
        _needle_task("niah_multikey_3", NeedleSetup(haystack="needle", key="uuids", value="uuids")),
        _needle_task("niah_multivalue", NeedleSetup(haystack="essay", values=4)),
        _needle_task("niah_multiquery", NeedleSetup(haystack="essay", keys=4, queries=4)),
        VARIABLE_TRACKING,
        COMMON_WORDS,
        FREQUENT_WORDS,
        _question_task("qa_1", "squad"),
        _question_task("qa_2", "hotpotqa"),
    )
}


def score(task: str, prediction: str, outputs: Sequence[str]) -> float:
    """The score of one answer, 0 to 1: the share of the references found in it; for QA, whether any is found."""
    answer = clean(prediction).lower()
    found = [output.lower() in answer for output in outputs]
    return float(any(found)) if TASKS[task].metric == "part" else sum(found) / len(found)


def clean(prediction: str) -> str:
    """The answer as it is compared: control characters become newlines."""
    return CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip()
