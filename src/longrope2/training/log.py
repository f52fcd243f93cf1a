"""What a run leaves for readers: a line of log.jsonl for each step, and training.json. Readers need no torch."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.console import ConsoleTable, ProgressLine, say
from longrope2.errors import MissingExtraError
from longrope2.files import write_text
from longrope2.records import NeedleLine, RecordError, TrainingRecord, parse
from longrope2.shapes import misfit
from longrope2.training.config import ResolvedConfig

if TYPE_CHECKING:
    import torch

    from longrope2.training.loop import StepResult

LOG = "log.jsonl"
RECORD = "training.json"
STEP = {"step": int, "loss": float, "tokens": int, "seconds": float}
"""What the log has of every step; besides, the losses of the kinds of rows that it had."""


def training_table(record: TrainingRecord, folder: Path) -> ConsoleTable:
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
    return ConsoleTable(
        f"{record.steps:,} steps, {record.tokens:,} tokens, {record.seconds:,.0f} s",
        ["", "first", "last"],
        rows,
        f"the model is in {folder}",
    )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    return lines


def needles_in(log: Sequence[dict[str, Any]]) -> list[NeedleLine]:
    """The lines of a log that report needles; damaged ones are passed over."""
    found = []
    for line in (line for line in log if "needles" in line):
        with suppress(RecordError):
            found.append(parse(NeedleLine, line, LOG))
    return found


def steps_in(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a log that report a step; what a kill or a full disk has left of one is passed over."""
    return [line for line in log if misfit(line, STEP | dict.fromkeys(losses_in(line), float)) is None]


def losses_in(line: Mapping[str, Any]) -> dict[str, float]:
    """The losses of a step: of all its rows, and of each kind."""
    return {name: value for name, value in line.items() if name.startswith("loss")}


class LogFile:
    """Lines of JSON, each with the step it belongs to; after a resume the same as without an interruption."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def open_after(self, step: int) -> None:
        """Drop what belongs to later steps, and the line that a kill cut off; a run that starts again drops all."""
        kept = [line for line in read_log(self._path) if step and line["step"] <= step]
        write_text(self._path, "".join(_line(line) for line in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line."""
        self._file.write(_line(values))
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
        wandb: str | None = None,
        settings: Mapping[str, Any],
    ) -> None:
        self._output, self._config, self._device = output, config, device
        self._step_flops, self._peak_flops = step_flops, peak_flops
        self._log = LogFile(output / LOG)
        self._wandb = _wandb_run(wandb, output, settings) if wandb else None
        self._events: Any = None

    def started(self, step: int) -> None:
        """A run begins, or goes on after `step` steps: whatever was logged later has not happened."""
        self._first = step
        self._log.open_after(step)
        self._events = _summary_writer(self._output / "tensorboard", step)
        self._line = ProgressLine(max(self._config.steps - step, 1), "train")

    def step(self, result: "StepResult") -> None:
        """A step is done."""
        values = {
            "loss": result.loss,
            **{f"loss_{kind}": loss for kind, loss in result.loss_by_kind.items()},
            "gradient_norm": result.gradient_norm,
            "learning_rate": self._config.learning_rate_at(result.step - 1),
            "tokens": result.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens / result.seconds,
        }
        if self._peak_flops is not None:
            values["mfu"] = self._step_flops(result.tokens, result.attended) / (result.seconds * self._peak_flops)
        if self._device.type == "cuda":
            import torch

            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / (1 << 30)
        self._write(result.step, values, {f"train/{name}": value for name, value in values.items()})
        self._line.update(result.step - self._first, _sentence(result.step, values, result.loss_by_kind))

    def needles(self, step: int, results: list[dict[str, Any]]) -> None:
        """Needles were tried after a step."""
        flat = {}
        for result in results:
            for name in ("nll", "exact"):
                flat[f"needles_{result['length']}/{name}_at_{result['depth']:g}"] = result[name]
        # JSON knows no infinity.
        finite = [{**result, "nll": result["nll"] if math.isfinite(result["nll"]) else None} for result in results]
        self._write(step, {"needles": finite}, {name: value for name, value in flat.items() if math.isfinite(value)})
        lengths = dict.fromkeys(result["length"] for result in results)
        parts = [
            f"{length:,} tokens " + "/".join(f"{r['exact']:.0%}" for r in results if r["length"] == length)
            for length in lengths
        ]
        depths = "/".join(f"{depth:g}" for depth in dict.fromkeys(result["depth"] for result in results))
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # the progress line, which has no end yet
        say(f"{clear}needles found after step {step} (depths {depths}): {', '.join(parts)}")

    def close(self) -> None:
        """Close files."""
        self._log.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, step: int, values: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        self._log.write({"step": step, **values})
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=step)


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def _sentence(step: int, values: Mapping[str, Any], loss_by_kind: Mapping[str, float]) -> str:
    kinds = ", ".join(f"{kind} {loss:.4f}" for kind, loss in loss_by_kind.items())
    parts = [f"step {step}", f"loss {values['loss']:.4f} ({kinds})", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.0%}")
    if "memory_gib" in values:
        parts.append(f"{values['memory_gib']:.1f} GiB")
    return ", ".join(parts)


def _summary_writer(folder: Path, step: int) -> Any:
    """TensorBoard events, where that is installed; those of later steps are taken back."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _wandb_run(project: str, output: Path, settings: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError(
            "--wandb needs the package 'wandb', which is not installed", hint="pip install wandb"
        ) from error
    # The same id every time, so that a run that goes on stays one run there.
    place = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:8]
    name = f"{output.name}-{place}"
    return wandb.init(project=project, id=name, name=name, resume="allow", dir=str(output), config=dict(settings))
