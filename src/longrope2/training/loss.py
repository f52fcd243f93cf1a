"""The loss of a row, piece by piece: full logits at 128k would take 67 GB for an 8B model.

Gradients are taken piece by piece, too, while the logits are there, so that nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longrope2.data.loader import IGNORED_LABEL
from longrope2.perplexity import LOGIT_ROWS

CrossEntropy = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over labels, in float32."""
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED_LABEL)


def loss_in_pieces(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    parameters: Sequence[Tensor],
    *,
    loss: CrossEntropy = cross_entropy,
) -> Tensor:
    """The loss summed over positions [N]; `logits` of hidden states [n, D] use `parameters` and nothing else."""
    summed: Tensor = _LossInPieces.apply(logits, loss, labels, hidden, *parameters)
    return summed


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Callable[[Tensor], Tensor],
        loss: CrossEntropy,
        labels: Tensor,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[3:]
        # None for a head that is frozen, as with LoRA: its gradient would take as much memory as itself in float32.
        gradients = [
            torch.zeros_like(x, dtype=torch.float32) if is_wanted else None
            for x, is_wanted in zip(parameters, wanted[1:], strict=True)
        ]
        hidden_gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(labels), LOGIT_ROWS):
            rows = slice(begin, begin + LOGIT_ROWS)
            with torch.set_grad_enabled(any(wanted)):
                leaf = hidden[rows].detach().requires_grad_(wanted[0])
                piece = loss(logits(leaf), labels[rows])
            total += piece.detach()
            leaves = [x for x, is_wanted in zip((leaf, *parameters), wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(piece, leaves) if leaves else ())
            if wanted[0]:
                hidden_gradient[rows] = next(found)
            for gradient in gradients:
                if gradient is not None:
                    gradient += next(found)
        cast = (None if g is None else g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True))
        ctx.save_for_backward(hidden_gradient, *cast)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients = [
            gradient * scale.to(gradient.dtype) if is_wanted else None
            for gradient, is_wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *gradients
