"""What a run leaves for readers: a line of log.jsonl for each step, and training.json. Readers need no torch."""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.console import ProgressLine, say
from longrope2.errors import counted
from longrope2.files import is_sealed, naming, open_to_append, sealed_line, unsealed, write_text
from longrope2.records import NeedleLine, RecordError, StepLine, Table, TrainingRecord, as_json, parse
from longrope2.tracking import Tracking
from longrope2.training.config import ResolvedConfig

if TYPE_CHECKING:
    import torch

    from longrope2.training.loop import StepResult

LOG = "log.jsonl"
RECORD = "training.json"
LOG_SECONDS = 15.0
"""Between two lines of progress in a file."""
LogLine = StepLine | NeedleLine


def training_table(record: TrainingRecord, folder: Path) -> Table:
    """How far a training came; the model is in `folder`."""
    rows = []
    if record.losses:
        first, last = record.losses["first"], record.losses["last"]
        # A step need not have rows of both kinds.
        rows += [
            [name, *(f"{end[name]:.4f}" if name in end else "-" for end in (first, last))] for name in first | last
        ]
    if record.needles:
        before, after = (
            {
                f"needles found at {needle.length:,} tokens, depth {needle.depth:g}": needle.exact
                for needle in line.needles
            }
            for line in (record.needles["first"], record.needles["last"])
        )
        rows += [[name, f"{before[name]:.0%}" if name in before else "-", f"{after[name]:.0%}"] for name in after]
    return Table(
        title=f"{counted(record.steps, 'step')}, {record.tokens:,} tokens, {record.seconds:,.0f} s",
        columns=["", "first", "last"],
        rows=rows,
        caption=f"the model is in {folder}",
    )


def read_log(path: Path) -> list[LogLine]:
    """The whole lines of a log; what a kill or a full disk has left of one is passed over."""
    lines: list[LogLine] = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with suppress(RecordError, ValueError):
            text = unsealed(line) if is_sealed(line) else line
            lines.append(parse(LogLine, text, LOG))  # type: ignore[arg-type]
    return lines


def read_steps(path: Path) -> list[StepLine]:
    """The lines of a log that report a step."""
    return [line for line in read_log(path) if isinstance(line, StepLine)]


class LogFile:
    """Lines of JSON, each with the step it belongs to; after a resume the same as without an interruption."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def open_after(self, step: int) -> None:
        """Drop what belongs to later steps, and the line that a kill cut off; a run that starts again drops all."""
        kept = [line for line in read_log(self._path) if step and line.step <= step]
        write_text(self._path, "".join(_line(line) for line in kept))
        self._file = open_to_append(self._path)

    def write(self, line: LogLine) -> None:
        """Add a line."""
        with naming(self._path):
            self._file.write(_line(line))
            self._file.flush()

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()


class StepReporter:
    """Reports each step of the main process: a line for people, the log, TensorBoard, Weights & Biases."""

    def __init__(
        self,
        output: Path,
        config: ResolvedConfig,
        *,
        device: "torch.device",
        step_flops: Callable[[int, int], float],
        peak_flops: float | None,
        tracking: Tracking,
    ) -> None:
        self._config, self._device = config, device
        self._step_flops, self._peak_flops = step_flops, peak_flops
        self._log = LogFile(output / LOG)
        self._tracking = tracking

    def started(self, step: int) -> None:
        """A run begins, or goes on after `step` steps: whatever was logged later has not happened."""
        self._first = step
        self._log.open_after(step)
        self._tracking.begin(step + 1)
        self._line, self._text = ProgressLine(max(self._config.steps - step, 1), "train", log_every=LOG_SECONDS), ""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)  # a search before it may have taken more

    def within(self, steps: float) -> None:
        """So many steps are done, the last in part: one of many long rows takes minutes."""
        self._line.update(steps - self._first, self._text)

    def step(self, result: "StepResult") -> None:
        """A step is done."""
        mfu = memory = None
        if self._peak_flops is not None:
            mfu = self._step_flops(result.tokens, result.attended) / (result.seconds * self._peak_flops)
        if self._device.type == "cuda":
            import torch

            memory = torch.cuda.max_memory_allocated(self._device) / (1 << 30)
        line = StepLine(
            step=result.step,
            loss=result.loss,
            loss_short=result.loss_by_kind.get("short"),
            loss_long=result.loss_by_kind.get("long"),
            gradient_norm=result.gradient_norm,
            learning_rate=self._config.learning_rate_at(result.step - 1),
            tokens=result.tokens,
            seconds=result.seconds,
            tokens_per_second=result.tokens / result.seconds,
            mfu=mfu,
            memory_gib=memory,
        )
        self._write(line, {f"train/{name}": value for name, value in as_json(line).items() if name != "step"})
        self._text = _sentence(line)
        self._line.update(result.step - self._first, self._text)

    def needles(self, line: NeedleLine) -> None:
        """Needles were tried after a step."""
        trials = line.needles
        flat = {
            f"needles_{trial.length}/{name}_at_{trial.depth:g}": value
            for trial in trials
            for name, value in (("nll", trial.nll), ("exact", trial.exact))
            if value is not None
        }
        self._write(line, flat)
        parts = [
            f"{length:,} tokens " + "/".join(f"{trial.exact:.0%}" for trial in trials if trial.length == length)
            for length in dict.fromkeys(trial.length for trial in trials)
        ]
        depths = "/".join(f"{depth:g}" for depth in dict.fromkeys(trial.depth for trial in trials))
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # the progress line, which has no end yet
        say(f"{clear}needles found after step {line.step} (depths {depths}): {', '.join(parts)}")

    def close(self) -> None:
        """Close files."""
        self._log.close()
        self._tracking.close()

    def _write(self, line: LogLine, scalars: Mapping[str, float]) -> None:
        self._log.write(line)
        self._tracking.log(scalars, line.step)


def _line(line: LogLine) -> str:
    return sealed_line(as_json(line))


def _sentence(line: StepLine) -> str:
    kinds = ", ".join(
        f"{name.removeprefix('loss_')} {loss:.4f}" for name, loss in line.losses.items() if name != "loss"
    )
    parts = [f"step {line.step}", f"loss {line.loss:.4f} ({kinds})", f"{line.tokens_per_second:,.0f} tokens/s"]
    if line.mfu is not None:
        parts.append(f"MFU {line.mfu:.0%}")
    if line.memory_gib is not None:
        parts.append(f"{line.memory_gib:.1f} GiB")
    return ", ".join(parts)
