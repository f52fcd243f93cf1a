"""Numbers of a run for where people watch many runs: TensorBoard where it is installed, Weights & Biases when asked."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longrope2.errors import MissingExtraError
from longrope2.files import writing_to


class Tracking:
    """Numbers by step; a run that goes on takes back those of later steps."""

    def __init__(self, folder: Path, *, wandb: str | None, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._wandb = _wandb_run(wandb, folder, settings) if wandb else None
        self._events: Any = None

    def begin(self, step: int) -> None:
        """The run starts with this step, or goes on with it."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        with writing_to(place := self._folder / "tensorboard"):
            self._events = SummaryWriter(str(place), purge_step=step)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the numbers of a step."""
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        if self._wandb is not None:
            self._wandb.log(dict(scalars), step=step)

    def close(self) -> None:
        """Close files and connections."""
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def _wandb_run(project: str, folder: Path, settings: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError(
            "--wandb needs the package 'wandb', which is not installed", hint="pip install wandb"
        ) from error
    # The same id every time, so that a run that goes on stays one run there.
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    name = f"{folder.name}-{place}"
    return wandb.init(project=project, id=name, name=name, resume="allow", dir=str(folder), config=dict(settings))
