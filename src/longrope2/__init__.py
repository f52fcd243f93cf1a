"""LongRoPE2: extend the context window of RoPE language models and keep their short-context quality."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrope2.api import evaluate, export_model, rescale, search_factors, train
    from longrope2.checking.check import check
    from longrope2.factors import RescaleFactors
    from longrope2.generation.switch import load
    from longrope2.models import describe
    from longrope2.pipeline.extend import extend
    from longrope2.rotary import rescaled

__version__ = "0.1.0"
__all__ = [
    "RescaleFactors",
    "check",
    "describe",
    "evaluate",
    "export_model",
    "extend",
    "load",
    "rescale",
    "rescaled",
    "search_factors",
    "train",
]
_HOMES = {
    "RescaleFactors": "factors",
    "check": "checking.check",
    "describe": "models",
    "extend": "pipeline.extend",
    "load": "generation.switch",
    "rescaled": "rotary",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that importing the package, as every command does, imports no torch.
    if name in __all__:
        return getattr(import_module(f"longrope2.{_HOMES.get(name, 'api')}"), name)
    raise AttributeError(f"module 'longrope2' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
