"""`longrope2 watch`: how far a run is, read from its files alone, so that it works on any run and disturbs none."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from longrope2 import ledger
from longrope2.console import duration
from longrope2.errors import LongRopeError, counted
from longrope2.journal import TIME
from longrope2.records import CalibrationRecord, RecordError, RunRecord, TrainingSettings, VerifyRecord, parse
from longrope2.training.log import read_steps

RECENT = 20
"""Steps whose mean time predicts the end of training."""
DAY = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class JournalLine:
    """What is read of a journal: lines have some of it, by their type. Others are passed over, as one being written."""

    EXTRA: ClassVar[str] = "ignore"

    type: str
    stages: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    perplexity: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class View:
    """One stage as it stands."""

    stage: str
    state: str
    """done, running, interrupted, or waiting"""
    seconds: float | None
    left: float | None
    """Seconds until it ends, where that is known."""
    text: str


def look(folder: Path) -> list[View]:
    """Every stage of a run, in order."""
    book = ledger.require_ledger(folder)
    at_work = ledger.run_folder(folder).is_at_work()
    return [_view(folder, book, stage, at_work=at_work) for stage in _stages(book)]


def _stages(book: RunRecord) -> list[str]:
    present = {name.partition("/")[0] for name in (*book.planned, *book.current)}
    return [stage for stage in ledger.STAGES if stage in present]


def _view(folder: Path, book: RunRecord, stage: str, *, at_work: bool) -> View:
    planned = [name for name in book.planned if name.partition("/")[0] == stage]
    # What other options gave is made again.
    entries = {name: entry for name, entry in book.current.items() if name.partition("/")[0] == stage}
    running = [name for name, entry in entries.items() if not entry.is_done]
    done = len(entries) - len(running)
    seconds = sum(entry.seconds for entry in entries.values()) if entries else None
    left, text = None, ""
    if running:
        state = "running" if at_work else "interrupted"
        name = running[0]
        seconds = (seconds or 0.0) + (ledger.age(entries[name]) if at_work else 0.0)
        left, text = _progress(folder, stage, name)
        left = left if at_work else None
    elif done and done >= len(planned):
        state = "done"
        text = _result(folder, stage)
    else:
        state = "waiting"
    if len(planned) > 1:
        text = f"{done} of {len(planned)}" + (f"; {text}" if text else "")
    return View(stage=stage, state=state, seconds=seconds, left=left, text=text)


def _progress(folder: Path, stage: str, name: str) -> tuple[float | None, str]:
    """Seconds left, and a note on a step that is not done."""
    if stage == "search":
        return _searching(folder / ledger.HISTORY)
    if stage == "train":
        return _training(folder)
    if stage == "evaluate":
        kinds = ("answer", "likelihood")
        answers = sum(1 for line in _lines(folder / name / "generations.jsonl") if line.type in kinds)
        return None, f"{name.partition('/')[2]}: {answers:,} answers"
    return None, ""


def _result(folder: Path, stage: str) -> str:
    if stage == "search":
        return _searching(folder / ledger.HISTORY)[1]
    if stage == "calibrate":
        with suppress(LongRopeError, OSError):
            return f"switch at {CalibrationRecord.load(folder / ledger.CALIBRATION).within_window:,} tokens"
    if stage == "train":
        return _training(folder)[1]
    if stage == "verify":
        with suppress(LongRopeError, OSError):
            return VerifyRecord.load(folder / ledger.VERIFIED).verdict
    return str(folder / ledger.PAGE) if stage == "report" else ""


def _searching(path: Path) -> tuple[float | None, str]:
    """From the journal: how the last iteration ended."""
    lengths: tuple[int, ...] = ()
    iterations, evaluations, spent = 0, 0, 0.0
    ended = []
    for line in _lines(path):
        if line.type == "header":
            with suppress(KeyError, TypeError, ValueError):
                iterations, lengths = int(line.config["evolution"]["iterations"]), line.stages
        elif line.type == "iteration" and line.length:
            ended.append(line)
        elif line.type == "evaluation":
            evaluations += 1
        elif line.type == TIME:
            spent += line.seconds
    if not lengths:
        return None, ""
    done = len(ended)
    # The iteration under way, or the last one.
    stage, iteration = divmod(min(done, len(lengths) * (iterations + 1) - 1), iterations + 1)
    text = f"{lengths[stage]:,} tokens, iteration {iteration} of {iterations}, {counted(evaluations, 'evaluation')}"
    if ended and ended[-1].perplexity is not None:
        text += f", best perplexity {ended[-1].perplexity:.4g}"
        if ended[-1].length != lengths[stage]:
            text += f" at {ended[-1].length:,}"
    # Of all sessions. A stage takes about four times as long as the one of half its length.
    shares = [4.0**number for number in range(len(lengths)) for _ in range(iterations + 1)]
    left = spent * sum(shares[done:]) / sum(shares[:done]) if done and spent else None
    return left, text


def _training(folder: Path) -> tuple[float | None, str]:
    log = read_steps(folder / ledger.TRAINING_LOG)
    try:
        steps = int(TrainingSettings.load(folder / ledger.TRAIN / "run.json").config["train"]["steps"])
    except (FileNotFoundError, RecordError, KeyError, TypeError, ValueError):
        return None, ""
    if not log:
        return None, f"step 0 of {steps}"
    last, recent = log[-1], log[-RECENT:]
    kinds = ", ".join(
        f"{name.removeprefix('loss_')} {loss:.3f}" for name, loss in last.losses.items() if name != "loss"
    )
    text = f"step {last.step} of {steps}, loss {last.loss:.3f} ({kinds})"
    if last.memory_gib is not None:
        text += f", {last.memory_gib:.1f} GiB of GPU memory"
    left = sum(line.seconds for line in recent) / len(recent) * (steps - last.step)
    return left, text


def _lines(path: Path) -> Iterator[JournalLine]:
    """The whole lines of a journal that a process may still be writing."""
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                with suppress(RecordError):
                    yield parse(JournalLine, line, str(path))


def run_watch(folder: Path, *, once: bool, every: float) -> None:
    """`longrope2 watch`: print the view, or keep it up to date until the run ends."""
    from rich.console import Console
    from rich.live import Live

    if not 0 < every <= DAY:
        raise LongRopeError(
            f"--every must be above 0 and at most {DAY} seconds, got {every}",
            hint="omit it to use the default of 2 seconds",
        )
    views = look(folder)
    console = Console(highlight=False)
    if once:
        if not console.is_terminal:
            console = Console(highlight=False, width=160)
        console.print(_table(folder, views))
        return
    try:
        with Live(_table(folder, views), console=console, auto_refresh=False) as live:
            while ledger.run_folder(folder).is_at_work():  # also between two steps, where none is running
                time.sleep(every)
                live.update(_table(folder, look(folder)), refresh=True)
            live.update(_table(folder, look(folder)), refresh=True)  # how it ended
    except KeyboardInterrupt:
        return  # the usual way to leave


def _table(folder: Path, views: list[View]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    colours = {"done": "green", "running": "cyan", "interrupted": "yellow", "waiting": "dim"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=escape(folder.name), title_justify="left")
    for column, justify in (("stage", "left"), ("state", "left"), ("time", "right"), ("left", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for view in views:
        table.add_row(
            view.stage,
            f"[{colours[view.state]}]{view.state}[/]",
            "" if view.seconds is None else duration(view.seconds),
            "" if view.left is None or view.state == "done" else duration(view.left),
            escape(view.text),
        )
    return table
