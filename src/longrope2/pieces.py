"""How much of a long row goes through a model at once.

MLPs treat tokens one by one, and their inner width is what needs most memory at 128k.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

READ_TOKENS = 131_072
"""How many tokens of a text are read by one forward; of a longer text a cache keeps what was read before."""
MLP_ROWS = 32_768
"""How many positions go through an MLP at once."""


@contextmanager
def mlp_in_pieces(layer: Any, *, compiled: bool = False) -> Iterator[None]:
    """Let a layer's MLP take long rows piece by piece; with gradients each piece is computed again for them.

    `compiled` compiles the MLP by itself, since a compiler cannot see through the pieces.
    """
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        yield
        return
    before = mlp.__dict__.get("forward")  # where it is in pieces already: needles are scored while a model trains
    forward = torch.compile(mlp.forward, dynamic=False) if compiled else mlp.forward

    def forward_in_pieces(hidden: Tensor) -> Any:
        if hidden.shape[1] <= MLP_ROWS:
            return forward(hidden)
        beside: list[Any] = []

        def run(piece: Tensor) -> Tensor:
            output = forward(piece.contiguous())
            if isinstance(output, Tensor):
                return output
            # Mixtures of experts may return routing weights beside the output; nothing here reads them.
            beside[:] = output[1:]
            return output[0]

        if torch.is_grad_enabled():
            output = torch.compiler.disable(_with_gradients)(run, mlp, hidden)
        else:
            output = torch.cat([run(piece) for piece in hidden.split(MLP_ROWS, dim=1)], dim=1)
        return (output, *beside) if beside else output

    mlp.forward = forward_in_pieces
    try:
        yield
    finally:
        del mlp.forward
        if before is not None:
            mlp.forward = before


def _with_gradients(run: Callable[[Tensor], Tensor], mlp: nn.Module, hidden: Tensor) -> Tensor:
    # Kept by an operation before the MLP: a checkpointed layer that runs again stops there.
    kept = _Kept.apply(hidden, torch.empty(0, requires_grad=True))
    output: Tensor = _Pieces.apply(run, mlp, kept.grad_fn, kept, *mlp.parameters())
    return output


class _Kept(torch.autograd.Function):
    """The same tensor, kept for `_Pieces`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], mlp: nn.Module, keeper: Any, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.run, ctx.mlp, ctx.keeper = run, mlp, keeper
        ctx.random_state = _random_state(hidden.device)  # a few MLPs have dropout
        return torch.cat([run(piece) for piece in hidden.split(MLP_ROWS, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.keeper.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        # The same tensors as before, in the state that sharding gives them for a backward pass.
        parameters = [p for p, is_wanted in zip(ctx.mlp.parameters(), wanted, strict=True) if is_wanted]
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        hidden_gradient = torch.empty_like(hidden)
        with _again(hidden.device, ctx.random_state):
            for begin in range(0, hidden.shape[1], MLP_ROWS):
                rows = slice(begin, begin + MLP_ROWS)
                with torch.enable_grad():
                    leaf = hidden[:, rows].detach().requires_grad_()
                    output = ctx.run(leaf)
                # Experts that no token of a piece meets have no gradient there.
                found = torch.autograd.grad(output, (leaf, *parameters), gradient[:, rows], allow_unused=True)
                hidden_gradient[:, rows] = found[0]
                for total, part in zip(sums, found[1:], strict=True):
                    if part is not None:
                        total += part
        gradients = iter(total.to(p.dtype) for total, p in zip(sums, parameters, strict=True))
        return None, None, None, hidden_gradient, *(next(gradients) if is_wanted else None for is_wanted in wanted)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _again(device: torch.device, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Draw the same random numbers as before inside the block."""
    own, on_gpu = state
    with torch.random.fork_rng([] if on_gpu is None else [device]):
        torch.set_rng_state(own)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
        yield
