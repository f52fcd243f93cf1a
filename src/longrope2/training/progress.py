"""What a run says while it trains: a line for people, a line of JSON for each step, TensorBoard, Weights & Biases."""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longrope2.console import ProgressLine, say
from longrope2.errors import MissingExtraError
from longrope2.files import write_text
from longrope2.shapes import misfit
from longrope2.training.config import ResolvedConfig
from longrope2.training.gpus import GIB, known_gpu
from longrope2.training.loop import StepResult
from longrope2.training.shape import Shape

LOG = "log.jsonl"
STEP = {"step": int, "loss": float, "tokens": int, "seconds": float}
"""What the log has of every step; besides, the losses of the kinds of rows that it had."""


class Reporter:
    """Tells of each step; for the main process of a run."""

    def __init__(
        self,
        output: Path,
        config: ResolvedConfig,
        shape: Shape,
        *,
        device: torch.device,
        num_devices: int,
        wandb: str | None = None,
        settings: Mapping[str, Any],
    ) -> None:
        self._output = output
        self._config = config
        self._shape = shape
        self._device = device
        gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak = gpu.peak * 1e12 * num_devices if gpu else None
        self._log = Log(output / LOG)
        self._wandb = _wandb_run(wandb, output, settings) if wandb else None
        self._events: Any = None

    def started(self, step: int) -> None:
        """A run begins, or goes on after `step` steps: whatever was logged later has not happened."""
        self._first = step
        self._log.open_after(step)
        self._events = _summary_writer(self._output / "tensorboard", step)
        self._line = ProgressLine(max(self._config.steps - step, 1), "train")

    def step(self, result: StepResult) -> None:
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
        if self._peak is not None:
            flops = self._shape.step_flops(result.tokens, result.attended)
            values["mfu"] = flops / (result.seconds * self._peak)
        if self._device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
        self._tell(result.step, values, {f"train/{name}": value for name, value in values.items()})
        self._line.update(result.step - self._first, _sentence(result.step, values, result.loss_by_kind))

    def needles(self, step: int, results: list[dict[str, Any]]) -> None:
        """Needles were tried after a step."""
        flat = {}
        for result in results:
            for name in ("nll", "exact"):
                flat[f"needles_{result['length']}/{name}_at_{result['depth']:g}"] = result[name]
        # JSON knows no infinity.
        finite = [{**result, "nll": _finite(result["nll"])} for result in results]
        self._tell(step, {"needles": finite}, {name: value for name, value in flat.items() if math.isfinite(value)})
        lengths = dict.fromkeys(result["length"] for result in results)
        parts = [
            f"{length:,} tokens " + "/".join(f"{r['exact']:.0%}" for r in results if r["length"] == length)
            for length in lengths
        ]
        depths = "/".join(f"{depth:g}" for depth in dict.fromkeys(result["depth"] for result in results))
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # the progress line, which has no end yet
        say(f"{clear}needles found after step {step} (depths {depths}): {', '.join(parts)}")

    def close(self) -> None:
        """Give files back."""
        self._log.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _tell(self, step: int, values: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        self._log.write({"step": step, **values})
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=step)


class Log:
    """Lines of JSON, each with the step it belongs to; after a resume the same as without an interruption."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def open_after(self, step: int) -> None:
        """Drop what belongs to later steps, and the line that a kill cut off; a run that starts anew drops all."""
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


def steps_in(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a log that tell of a step; what a kill or a full disk has left of one is passed over."""
    return [line for line in log if misfit(line, STEP | dict.fromkeys(losses_in(line), float)) is None]


def losses_in(line: Mapping[str, Any]) -> dict[str, float]:
    """The losses of a step: of all its rows, and of each kind."""
    return {name: value for name, value in line.items() if name.startswith("loss")}


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
