"""The model of mixed context window training: short and long rows in one batch, each with its own RoPE.

A short row holds many documents: original RoPE, positions that restart at each one, no attention across them. A
long row is one window of the target length: rescaled RoPE and full attention over the row.

The loss of a row is taken piece by piece: full logits at 128k would take 67 GB for an 8B model. So are its gradients,
while the logits are there, so that nothing is computed twice.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from longrope2.attention import documents, our_attention
from longrope2.data.loader import IGNORED_LABEL
from longrope2.factors import RescaleFactors
from longrope2.families import attends_simply
from longrope2.models import body, decoder_layers
from longrope2.perplexity import LOGIT_ROWS, compiled_layer, head_logits
from longrope2.pieces import mlp_in_pieces
from longrope2.rotary import RescaledRotary, rescaled
from longrope2.training.config import LEVELS, Level
from longrope2.training.host import HostInputs

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
ATTENTION_OPERATIONS = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
    }
)
"""What every kernel of `kernels.py` ends in."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one length; B rows of S tokens."""

    tokens: Tensor
    """[B, S]"""
    positions: Tensor
    """[B, S]: restart at each document of a short row."""
    labels: Tensor
    """[B, S]: the next token, already shifted; IGNORED_LABEL after a document's last token."""
    long_rows: Tensor
    """[B] bool: which rows use the rescaled RoPE."""
    boundaries: Sequence[Sequence[int]]
    """For each row 0 and where its documents end; 0 and S for a row that attends as a whole."""

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        return Batch(
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            labels=self.labels.to(device),
            long_rows=self.long_rows.to(device),
            boundaries=self.boundaries,
        )


class MixedWindowModel(nn.Module):
    """A model set up for mixed rows, as one module from rows to loss; make one with `mixed_window`."""

    def __init__(self, model: Any, rotary: RescaledRotary, loss: CrossEntropy, *, simply: bool) -> None:
        super().__init__()
        self.model = model
        self.simply = simply
        """Whether documents share a row; else each is run alone, with the attention of the model's own."""
        self._loss = loss
        self._steering = (rotary,)  # in a tuple, or torch would list it a second time: it is a part of `model`

    @contextmanager
    def rows_of(self, batch: Batch) -> Iterator[None]:
        """Steer RoPE and attention by a batch; its backward pass belongs inside, too."""
        self._steering[0].long_rows = batch.long_rows
        with documents(batch.boundaries):
            yield

    def logits(self, batch: Batch) -> Tensor:
        """All logits [B, S, V]: for tests and short rows."""
        found = [output.logits.flatten(0, 1) for output in self._outputs(self.model, batch)]
        return torch.cat(found).view(*batch.tokens.shape, -1)

    def _outputs(self, model: Any, batch: Batch) -> Iterator[Any]:
        """Of all rows at once, or document by document: states of a hybrid layer would run across documents."""
        if self.simply:
            yield model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False)
            return
        for row, ends in enumerate(batch.boundaries):
            self._steering[0].long_rows = batch.long_rows[row : row + 1]
            for start, end in pairwise(ends):
                part = slice(row, row + 1), slice(start, end)
                yield model(input_ids=batch.tokens[part], position_ids=batch.positions[part], use_cache=False)

    def forward(self, batch: Batch) -> Tensor:
        """The sum of the loss over the batch's labels, never holding more than a piece of the logits."""
        hidden = [output.last_hidden_state.flatten(0, 1) for output in self._outputs(body(self.model), batch)]
        return loss_in_pieces(
            lambda piece: head_logits(self.model, piece[None])[0],
            torch.cat(hidden) if len(hidden) > 1 else hidden[0],
            batch.labels.flatten(),
            head_parameters(self.model),
            loss=self._loss,
        )


def head_parameters(model: Any) -> list[Tensor]:
    """What makes logits of hidden states: the output embedding, which may be tied, and what few have beside."""
    inside = set(map(id, body(model).parameters()))
    beside = (parameter for parameter in model.parameters() if id(parameter) not in inside)
    return list(dict.fromkeys([*model.get_output_embeddings().parameters(), *beside]))


@contextmanager
def mixed_window(
    model: Any,
    factors: RescaleFactors,
    *,
    recompute: bool = False,
    compiled: bool = False,
    level: Level = LEVELS["plain"],
    host_room: float = math.inf,
    check: bool = True,
) -> Iterator[MixedWindowModel]:
    """Let a model take mixed rows inside the block; it is as before afterwards, but for what it learned.

    With `recompute` a layer keeps its input and what attention gave, and computes the rest again when it is needed:
    the least memory that does not pay for attention twice. `compiled` fuses what stands between matrix products,
    which pays on a GPU after the first steps. `level` may ask for less memory than that; layer inputs then take at most
    `host_room` bytes of host memory. `check` proves that the factors take effect.
    """
    simply = attends_simply(model.config)
    with ExitStack() as stack:
        if simply:
            stack.enter_context(our_attention(model))
        rotary = stack.enter_context(rescaled(model, factors, check=check))
        if recompute:
            stack.enter_context(_recomputing(model, level, host_room))
        if level.frugal:
            for layer in decoder_layers(model):
                stack.enter_context(mlp_in_pieces(layer, compiled=compiled))
        if compiled and simply:
            for layer in decoder_layers(model):
                stack.enter_context(compiled_layer(layer))
        loss = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy
        yield MixedWindowModel(model, rotary, loss, simply=simply)


@contextmanager
def _recomputing(model: Any, level: Level, host_room: float) -> Iterator[None]:
    def policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = getattr(operation, "name", str)() in ATTENTION_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if level.keeps_attention:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(options)
    if level.frugal:
        inputs = HostInputs(host_room)
        for layer in decoder_layers(model):
            layer._gradient_checkpointing_func = inputs.around(layer._gradient_checkpointing_func)
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


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
