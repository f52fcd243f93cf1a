"""Short tasks through lm-evaluation-harness: its prompts and metrics, our model, batches and journal."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longrope2.errors import LongRopeError, chosen, require
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.results import accuracy, digest, with_averages
from longrope2.evaluation.suite import Setup, Suite, SuiteOutcome
from longrope2.records import Measured

NAME = "short"
# What the paper reports, and with how many examples the field runs them; the others say so themselves.
PAPER = {
    "mmlu": "MMLU", "mmlu_pro": "MMLU-Pro", "hellaswag": "HellaSwag", "truthfulqa_mc2": "TruthfulQA", "gsm8k": "GSM8K"
}  # fmt: skip
# Those in which small models are above chance, so that they have something to lose.
SMALL = {"lambada_openai": "LAMBADA", "piqa": "PIQA", "arc_easy": "ARC-easy"}
EXAMPLES = {"mmlu": 5, "hellaswag": 10}
METRICS = {
    "hellaswag": "acc_norm", "mmlu_pro": "exact_match", "gsm8k": "exact_match", "lambada_openai": "acc",
    "piqa": "acc_norm", "arc_easy": "acc_norm",
}  # fmt: skip
WINDOW = 4096


def run(setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """Each task on its own, within the paper's 4,096 tokens."""
    lm_eval = require("lm_eval", extra="eval", purpose="suite short")
    from lm_eval.tasks import TaskManager

    from longrope2.evaluation.harness import EngineModel, local_tasks

    notes: list[str] = []
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder, _without_bars():
        local = local_tasks(setup.data, setup.tasks, Path(folder), notes) if setup.data else {}
        others = [task for task in setup.tasks if task not in local]
        if local and not setup.named:
            notes += [f"{NAME}: without {task}, which has no file in --data" for task in others]
            others = []
        # The index of all its tasks takes many seconds to build.
        manager = TaskManager(include_defaults=bool(others))
        chosen("task", others, manager.all_tasks)
        model = EngineModel(engine, max_length=min(WINDOW, engine.backend.window))
        for task in (task for task in setup.tasks if task in local or task in others):
            model.label = f"short {task}"
            try:
                loaded = manager.load(local.get(task, [task]))
                for part in loaded["tasks"].values():
                    _prepare(part, EXAMPLES.get(task), setup.seed)
                results = lm_eval.evaluate(
                    model,
                    loaded,
                    limit=setup.samples,
                    apply_chat_template=setup.chat,
                    fewshot_as_multiturn=setup.chat,
                    bootstrap_iters=0,
                )
            # The harness leaves whatever the hub and its data files raise as it is; too few examples fail an assertion.
            except (OSError, ConnectionError, ValueError, AssertionError) as error:
                reason = (str(error).splitlines() or [""])[0]
                hint = "check its files in --data"
                if task not in local:
                    hint = "without a connection, put its file into --data DIR: see docs/evaluation.md"
                message = f"short task {task} cannot be run ({type(error).__name__}: {reason})"
                raise LongRopeError(message, hint=hint) from error
            measured.append(_measure(task, results["samples"]))
    for note in notes:
        setup.note(note)
    return SuiteOutcome(measured=with_averages(measured), notes=notes)


@contextmanager
def _without_bars() -> Iterator[None]:
    """The harness and its data library draw bars for every step of every task; ours says how far the whole is."""
    bar = require("tqdm", extra="eval", purpose="suite short").tqdm
    before = bar.__init__
    bar.__init__ = lambda self, *arguments, **options: before(self, *arguments, **(options | {"disable": True}))
    try:
        yield
    finally:
        bar.__init__ = before


def _prepare(task: Any, examples: int | None, seed: int) -> None:
    """How many examples stand before a question, and which; a task that has decided on none keeps none."""
    decided = task.get_config("num_fewshot")
    if decided != 0 and examples is not None:
        decided = examples
    task.set_config(key="num_fewshot", value=decided or 0)
    task.set_fewshot_seed(seed=seed)


def _measure(task: str, samples: dict[str, list[dict[str, Any]]]) -> Measured:
    """The mean over all documents; those of a group's tasks count the same, as the harness weighs them."""
    # A task's filters read the same answer in different ways; the first one is the strict one.
    documents = [each for part in samples.values() for each in part if each["filter"] == part[0]["filter"]]
    metric = METRICS.get(task) or _first_metric(documents[0])
    scores = [_number(document.get(metric)) for document in documents]
    if any(not 0 <= score <= 1 for score in scores):
        raise LongRopeError(
            f"short task {task}: its metric {metric} is not a score between 0 and 1", hint="run it with lm_eval itself"
        )
    asked = digest([document["prompt_hash"] for document in documents])
    return accuracy(scores, suite=NAME, task=task, length=None, metric=metric, asked=asked)


def _number(value: Any) -> float:
    """A score; NaN for what only makes one together with those of other documents."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _first_metric(document: dict[str, Any]) -> str:
    names: Sequence[str] = document["metrics"]
    return names[0]


SUITE = Suite(
    name=NAME,
    title="Short tasks",
    tasks=tuple(PAPER),
    run=run,
    any_task=True,
    is_retention=True,
    scores_texts=True,
    heads=PAPER | SMALL,
    note="any task of lm-evaluation-harness",
    row="`mmlu`, `mmlu_pro`, `hellaswag`, `truthfulqa_mc2`, `gsm8k`; by name `lambada_openai`, `piqa`, `arc_easy` or "
    "any task of lm-evaluation-harness | its own | up to 4,096 tokens | its files",
    files="`mmlu_test.jsonl` and `mmlu_dev.jsonl`, `hellaswag_val.jsonl` (and `hellaswag_train.jsonl`), "
    "`TruthfulQA.csv`, `gsm8k_test.jsonl` and `gsm8k_train.jsonl`, `lambada_openai_test.jsonl`, `piqa_val.jsonl`, "
    "`arc_easy_test.jsonl` or `arc_easy_val.jsonl`; `.gz` too",
)
