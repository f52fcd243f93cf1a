"""RULER at 32k on SmolLM2-135M, 13 tasks × 20 samples: our engine against plain `generate`, prompt by prompt.

    python benchmarks/ruler_smollm2.py MODEL.gguf --samples runs/ruler-32k --make --data DIR   # once, on any machine
    python benchmarks/ruler_smollm2.py MODEL.gguf --samples runs/ruler-32k

The peer runs the first few samples of every task; its time for all of them is extrapolated task by task.
"""

import json
import tempfile
import time
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from common import RESULTS, arguments, report

from longrope2.distributed import World
from longrope2.evaluation.backend import TorchBackend
from longrope2.evaluation.engine import EvaluationEngine, EvaluationJournal
from longrope2.evaluation.ruler import TASKS, make_samples, score
from longrope2.evaluation.ruler.generate import RulerSample
from longrope2.evaluation.suite import Sample, read_rows
from longrope2.factors import RescaleFactors
from longrope2.generation.switch import load as load_switching
from longrope2.models import describe, load, load_tokenizer
from longrope2.rotary import rescaled

FACTORS = RESULTS.parent / "search" / "smollm2" / "wide-32k-factors.json"
QUESTIONS = {"qa_1": "squad.json.gz", "qa_2": "hotpotqa.json.gz"}
ALONE = World(process=0, num_processes=1, local_process=0)


def now() -> float:
    """Seconds, once the device has done all it was asked for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make(options) -> None:
    """Write the samples of every task into a folder, so that the machine that measures needs no generator."""
    tokenizer = load_tokenizer(describe(options.model))
    options.samples.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        file = options.data / QUESTIONS[task] if task in QUESTIONS else None
        samples = make_samples(task, tokenizer=tokenizer, length=options.length, count=options.count, qa_file=file)
        lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
        (options.samples / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(task, len(samples), flush=True)


def read(options) -> list[Sample]:
    return [
        Sample(
            suite="ruler", task=task, length=options.length, index=row.index,
            prompt=row.input + row.answer_prefix, references=tuple(row.outputs),
            max_new_tokens=TASKS[task].tokens_to_generate, score=partial(score, task),
        )
        for task in TASKS
        for row in islice(read_rows(options.samples / f"{task}.jsonl", RulerSample, source="--make"), options.count)
    ]  # fmt: skip


def mean_score(samples: list[Sample], answers: list[str]) -> float:
    """In percent, every task counting the same."""
    by_task: dict[str, list[float]] = {}
    for sample, answer in zip(samples, answers, strict=True):
        by_task.setdefault(sample.task, []).append(sample.score(answer, sample.references))
    return 100 * sum(sum(scores) / len(scores) for scores in by_task.values()) / len(by_task)


def ours(model, tokenizer, factors: RescaleFactors, samples: list[Sample]) -> tuple[float, list[str]]:
    """Seconds of everything from text to kept answers."""
    backend = TorchBackend(load_switching(model, factors), tokenizer, window=factors.target_length)
    with tempfile.TemporaryDirectory() as folder:
        warm = EvaluationEngine(backend, EvaluationJournal(None, {}), ALONE)
        warm.answers(samples[:1], "warm-up")  # chooses the attention kernel
        engine = EvaluationEngine(backend, EvaluationJournal(Path(folder) / "generations.jsonl", {}), ALONE)
        start = now()
        answers = engine.answers(samples, "ours")
        return now() - start, answers


def peer(model, tokenizer, factors: RescaleFactors, samples: list[Sample], count: int) -> tuple[float, dict[str, str]]:
    """Seconds that plain `generate` would take for all samples, and its answers to the first of each task."""
    total, answers = 0.0, {}
    with rescaled(model, factors, long_rows=True):
        for task in TASKS:
            own = [sample for sample in samples if sample.task == task]
            seconds = []
            for number, sample in enumerate([own[0], *own[:count]]):  # the first one warms up
                inputs = tokenizer(sample.prompt, return_tensors="pt").to(model.device)
                start = now()
                output = model.generate(
                    **inputs, max_new_tokens=sample.max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
                )
                if number:
                    seconds.append(now() - start)
                answers[sample.key] = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            print(task, f"{sum(seconds) / len(seconds):.2f} s a sample", flush=True)
            total += sum(seconds) / len(seconds) * len(own)
    return total, answers


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--samples", type=Path, required=True, help="folder of <task>.jsonl")
    parser.add_argument("--make", action="store_true", help="write those files and do nothing else")
    parser.add_argument("--data", type=Path, default=Path(), help="for --make: folder of SQuAD and HotpotQA files")
    parser.add_argument("--factors", type=Path, default=FACTORS)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--peer-count", type=int, default=2, help="samples of each task that the peer runs")
    options = parser.parse_args()
    if options.make:
        make(options)
        return
    factors = RescaleFactors.load(options.factors)
    samples = read(options)
    plain = load(options.model)
    model_peer, tokenizer = plain.model, plain.tokenizer
    seconds, answers = ours(load(options.model).model, tokenizer, factors, samples)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    print(f"ours: {seconds:.1f} s, mean score {mean_score(samples, answers):.2f}", flush=True)
    torch.cuda.empty_cache()
    peer_seconds, peer_answers = peer(model_peer, tokenizer, factors, samples, options.peer_count)
    both = [(sample, answer) for sample, answer in zip(samples, answers, strict=True) if sample.key in peer_answers]
    report(
        options,
        name="ruler-smollm2-32k",
        value=seconds,
        unit="seconds",
        peer="transformers generate, one prompt at a time (SDPA)",
        peer_value=peer_seconds,
        peer_extrapolated_from=len(peer_answers),
        samples=len(samples),
        length=options.length,
        mean_score=mean_score(samples, answers),
        compared_answers=len(both),
        equal_answers=sum(answer == peer_answers[sample.key] for sample, answer in both),
        score_on_compared=mean_score([sample for sample, _ in both], [answer for _, answer in both]),
        peer_score_on_compared=mean_score([sample for sample, _ in both], [peer_answers[s.key] for s, _ in both]),
        peak_gib=peak,
    )


if __name__ == "__main__":
    main()
