"""`longrope2 verify`: run an export in every engine there is, and hold its answers against our own."""

import importlib.util
import inspect
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longrope2.console import ProgressLine
from longrope2.errors import LongRopeError
from longrope2.export.config import VerifyConfig, profile_of
from longrope2.export.engines import Format, ServingEngine, verifiable
from longrope2.export.huggingface import config_problems
from longrope2.export.reference import Answer, Reference
from longrope2.factors import RescaleFactors
from longrope2.models import cached_values
from longrope2.records import Finding, Table, findings_table

TOLERANCE = 5e-3
"""Nats of log-probability: float32 engines come to 1e-5, llama.cpp, which rounds inside, to 3e-3."""
ROUNDED_TOLERANCE = 1.0
"""The most for GGUF files of 16 or 8 bits, with which llama.cpp rounds activations, too; see `_is_right`."""
HOUR = 3600
FEW = 512
"""Tokens of a short prompt, and of those beyond the original window: a CPU takes minutes for that window alone."""
FORWARDS = 8
"""Of about the original window that an engine is verified with, our own counted in."""
STALE = "its cache is stale once it crosses the original window; longrope2.load generates exactly"


@dataclass(frozen=True)
class ProbePrompt:
    """A prompt of random tokens for an engine, and what it stands for."""

    mode: str
    prompt: list[int]
    new_tokens: int = 1


@dataclass(frozen=True)
class Reply:
    """What an engine answered."""

    engine: ServingEngine
    capacity: int | None
    questions: Sequence[ProbePrompt]
    content: dict[str, Any]


@dataclass(frozen=True)
class Verification:
    """What the engines made of an export."""

    path: Path
    factors: RescaleFactors
    findings: tuple[Finding, ...]
    by_formula: bool = False
    """Whether the config has yarn, llama3 or linear scaling in place of factors."""

    @property
    def wrong(self) -> list[Finding]:
        """What must not be."""
        return [finding for finding in self.findings if finding.is_wrong]

    def table(self) -> Table:
        """One row for each engine and mode, and the notes below."""
        factors = self.factors
        kind = factors.method if self.by_formula else profile_of(factors)
        title = (
            f"{self.path}: {kind}, {factors.original_length:,} → {factors.target_length:,} tokens; "
            "largest difference of log-probability from our own forward"
        )
        return findings_table(title, self.findings)


def verify(path: Path, config: VerifyConfig) -> Verification:
    """Ask engines about an export, and compare their answers with our own."""
    reference = Reference(path)
    # Engines first, and only then our own copy of the model: some take all memory of a GPU.
    runs = [run for name, python in list(_chosen(path, config.engines)) for run in _asked(reference, name, python)]
    found = list(_config_finding(reference))
    for run in runs:
        found += run if isinstance(run, list) else _judge(reference, run)
    return Verification(path, reference.factors, tuple(found), reference.by_formula)


def _chosen(path: Path, engines: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Engines to ask and the Python of each; None where it is not installed."""
    wanted: Format = "gguf" if path.suffix == ".gguf" else "huggingface"
    known, fitting = verifiable(), verifiable(wanted)
    for text in engines or fitting:
        name, _, python = text.partition("=")
        if name not in known:
            raise LongRopeError(f"engine {name!r} is not known", hint=f"choose from {', '.join(known)}")
        if name not in fitting:
            raise LongRopeError(f"{name} cannot run {path.name}", hint=f"engines for it: {', '.join(fitting)}")
        found = python or (sys.executable if is_installed(known[name]) else None)
        if engines and found is None:
            raise LongRopeError(
                f"{name} is not installed here",
                hint=f"{_pip(known[name])}, or --engine {name}=PYTHON with the Python of another environment",
            )
        yield name, found


def is_installed(engine: ServingEngine) -> bool:
    """Whether this environment has it."""
    return any(importlib.util.find_spec(package) is not None for package in engine.packages)


def _pip(engine: ServingEngine) -> str:
    return " or ".join(engine.packages.values())


def _config_finding(reference: Reference) -> Iterator[Finding]:
    """Whether a folder's config.json still says, in every key, what its factors are."""
    if reference.written is None or reference.expected is None:
        return
    problems = config_problems(reference.written, reference.expected)
    yield Finding("config.json", "every key", None, "WRONG" if problems else "right", "; ".join(problems))


def _asked(reference: Reference, name: str, python: str | None) -> Iterator[Reply | list[Finding]]:
    """An engine's replies, one for each window it is started with; findings in place of those it did not give."""
    engine = verifiable()[name]
    if python is None:
        yield [Finding(name, "-", None, "not checked", f"not installed: {_pip(engine)}")]
        return
    if engine.plugin and reference.factors.switches and _has_plugin(engine.plugin, python):
        engine = replace(engine, chooses="switch")
    for capacity, questions in _runs(engine, reference):
        asking = f"asking {name}" + (f" with a window of {capacity:,} tokens" if capacity else "")
        try:
            content = _ask(engine, python, _job(engine, reference, capacity, questions), asking)
        except LongRopeError as error:
            modes = dict.fromkeys(question.mode for question in questions)
            yield [Finding(name, mode, None, "FAILED", error.message) for mode in modes]
        else:
            yield Reply(engine, capacity, questions, content)


def _has_plugin(entry_point: tuple[str, str], python: str) -> bool:
    """Whether an environment has the plugin that makes an engine switch."""
    code = "import importlib.metadata as m, sys; print(*(e.name for e in m.entry_points(group=sys.argv[1])))"
    group, name = entry_point
    try:
        done = subprocess.run(  # noqa: S603 - a list, no shell
            [python, "-c", code, group], capture_output=True, text=True, errors="replace", timeout=HOUR
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # asking it questions will say why
    return name in done.stdout.split()


def _runs(engine: ServingEngine, reference: Reference) -> Iterator[tuple[int | None, list[ProbePrompt]]]:
    """What to ask, by the window the engine is started with."""
    factors, vocab = reference.factors, reference.config.vocab_size
    original = factors.original_length
    draw = random.Random(0)  # noqa: S311 - no secret
    stream = [draw.randrange(vocab) for _ in range(max(original, reference.switch_length) + FEW)]

    def few(length: int) -> int:
        return min(length // 2, FEW)

    def beyond(length: int) -> list[int]:
        far = min(length + few(length), factors.target_length - 1)
        return sorted({number for number in (length + 1, far) if number > length})

    def question(mode: str, length: int, new_tokens: int = 1) -> ProbePrompt:
        # Each is the beginning of the next, so that one forward of ours answers them all.
        return ProbePrompt(mode, stream[:length], new_tokens)

    long_questions = [question("long", length) for length in beyond(original)]
    if engine.chooses == "length":
        short_questions = [question("short", length) for length in (few(original), original)]
        # The last of these tokens is chosen after original + 1 others.
        yield None, [*short_questions, *long_questions, question("crossing", original - 2, new_tokens=4)]
        return
    if engine.chooses == "switch":
        length = reference.switch_length
        questions = [question("short", few(length), 3), question("short", length)]
        questions += [question("crossing", length - 2, 5), question("crossing", length, 3)]
        questions += [question("long", number, 2) for number in beyond(length)]
        yield min(max(len(one.prompt) + one.new_tokens for one in questions), factors.target_length), questions
        return
    throughout = question("short, long factors", few(original))
    if engine.chooses == "long":
        yield None, [throughout, *long_questions]
        return
    step, short_window = engine.context_step, engine.short_window(factors)
    if short_window:
        yield short_window, [question("short", length) for length in (few(short_window), short_window - 1)]
    yield -(-(max([original, *beyond(original)]) + 1) // step) * step, [throughout, *long_questions]


def _job(
    engine: ServingEngine, reference: Reference, capacity: int | None, questions: Sequence[ProbePrompt]
) -> dict[str, Any]:
    """What the probe reads."""
    factors = reference.factors
    long = engine.is_long(factors, length=0, capacity=capacity)
    return {
        "path": str(reference.path.absolute()),
        "capacity": capacity,
        "switches": engine.chooses == "switch",
        # What llama.cpp is given as --yarn-attn-factor.
        "temperature_ratio": 1.0 if long else factors.short_attention_factor / factors.long_attention_factor,
        "threads": torch.get_num_threads(),
        "cache_bytes": _cache_bytes(reference.config, capacity or 0),
        "prompts": [question.prompt for question in questions],
        "new_tokens": [question.new_tokens for question in questions],
    }


def _ask(engine: ServingEngine, python: str, job: dict[str, Any], label: str) -> dict[str, Any]:
    """Run the probe in a process of its own, with the Python that has the engine."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, answers_file = Path(folder) / "job.json", Path(folder) / "answers.json"
        progress = Path(folder) / "progress"
        job_file.write_text(json.dumps({**job, "progress": str(progress)}))
        assert engine.probe is not None
        command = [python, inspect.getfile(engine.probe), engine.probe.__name__, str(job_file), str(answers_file)]
        try:
            done = _watched(command, Path(folder), progress, [len(prompt) for prompt in job["prompts"]], label)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LongRopeError(f"it could not be run ({error})") from error
        if done.returncode != 0:
            raise LongRopeError(f"it failed: {_reason(done.stdout, done.stderr)}")
        try:
            answers: dict[str, Any] = json.loads(answers_file.read_text())
        except (OSError, ValueError) as error:
            raise LongRopeError(f"it left no answers: {python} cannot import it") from error
        return answers


def _watched(
    command: Sequence[str], folder: Path, progress: Path, lengths: Sequence[int], label: str
) -> "subprocess.CompletedProcess[str]":
    """Run a probe, which notes the number of the prompt it is at, and say how far it is."""
    line, started = ProgressLine(sum(lengths), f"{label}, tokens"), time.monotonic()
    with subprocess.Popen(  # noqa: S603 - a list, no shell
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=folder
    ) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    stdout, stderr = process.communicate(timeout=1)
                    break
                if time.monotonic() - started > HOUR:
                    raise subprocess.TimeoutExpired(list(command), HOUR)
                with suppress(OSError, ValueError):
                    line.update(sum(lengths[: int(progress.read_text())]))
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        line.update(sum(lengths))
    return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)


def _reason(stdout: str, stderr: str) -> str:
    """What an engine says of its failure: the exception it names, or else its last line."""
    # The processes that vLLM starts log the cause; what it raises itself only refers to that.
    if logged := re.search(r"\] ([\w.]*(?:Error|Exception): .+)", stdout):
        return logged[1][:300]
    lines = stderr.strip().splitlines() or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:300]


def _cache_bytes(config: Any, capacity: int) -> int:
    """Room for keys and values of a few sequences, so that no engine takes all memory there is."""
    return 4 * cached_values(config) * 4 * (capacity + 1024)


def _judge(reference: Reference, reply: Reply) -> Iterator[Finding]:
    """Compare answers with the reference, mode by mode."""
    engine, version = reply.engine, reply.content["version"]
    expected = reference.switch_length
    if engine.chooses == "switch" and reply.content["switch_length"] != expected:
        found = reply.content["switch_length"] or "no"
        yield Finding(version, "-", None, "WRONG", f"its plugin has a switch length of {found}, not {expected:,}")
    by_mode: dict[str, list[Answer]] = {}
    for question, answer in zip(reply.questions, reply.content["answers"], strict=True):
        for number, choices in enumerate(answer["logprobs"]):
            tokens = question.prompt + answer["tokens"][:number]
            long = engine.is_long(
                reference.factors, length=len(tokens), capacity=reply.capacity, switch_length=expected
            )
            logprobs = {int(token): value for token, value in choices.items()}
            by_mode.setdefault(question.mode, []).append(Answer(tokens, long, logprobs))
    everything = [answer for answers in by_mode.values() for answer in answers]
    line = ProgressLine(sum(len(answer.tokens) for answer in everything), "our own forward, tokens")
    errors = iter(reference.errors(everything, line.advance))
    for mode, answers in by_mode.items():
        judged = [(answer, next(errors)) for answer in answers]
        worst, error = max(judged, key=lambda each: each[1] if math.isfinite(each[1]) else math.inf)
        if not math.isfinite(error):
            yield Finding(version, mode, None, "WRONG", "its log-probabilities are not finite numbers")
        elif _is_right(reference, judged):
            yield Finding(version, mode, error, "right")
        elif mode == "crossing" and engine.chooses == "length" and profile_of(reference.factors) == "dual":
            yield Finding(version, mode, error, "known limit", STALE)
        else:
            yield Finding(version, mode, error, "WRONG", _explanation(reference, engine, worst))


def _explanation(reference: Reference, engine: ServingEngine, answer: Answer) -> str:
    """What the engine seems to have run instead."""
    errors = reference.errors_of_faults(answer)
    nearest = min(errors, key=lambda name: errors[name])
    fault = None if reference.by_formula else engine.fault(reference.factors, reference.config.model_type)
    causes = [f"nearest to {nearest} (error {errors[nearest]:.1e})", fault]
    return "; ".join(cause for cause in causes if cause)


def _is_right(reference: Reference, judged: Sequence[tuple[Answer, float]]) -> bool:
    """Whether answers with these errors are those of the right computation.

    Rounding to 16 or 8 bits can cost more than any fixed bound that still separates faults. There the answer to the
    shortest prompt must also be twice as near to the right one as to that of any known fault.
    """
    most = max(error for _, error in judged)
    if not reference.is_rounded:
        return most <= TOLERANCE
    answer, error = min(judged, key=lambda each: len(each[0].tokens))
    faults = reference.errors_of_faults(answer).values()
    return most <= ROUNDED_TOLERANCE and all(error <= other / 2 for other in faults)
