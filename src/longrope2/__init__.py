"""LongRoPE2: extend the context window of any RoPE language model and keep its short-context quality."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrope2.generation import load

__version__ = "0.1.0"
__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # Lazily, so that importing the package, as every command does, imports no torch.
    if name == "load":
        from longrope2.generation import load

        return load
    raise AttributeError(f"module 'longrope2' has no attribute {name!r}")
