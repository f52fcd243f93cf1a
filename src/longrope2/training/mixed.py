"""The model of mixed context window training: short and long rows in one batch, each with its own RoPE.

A short row holds many documents: original RoPE, positions that restart at each one, no attention across them. A
long row is one window of the target length: rescaled RoPE and full attention over the row.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longrope2.attention import documents, our_attention
from longrope2.data.loader import IGNORED_LABEL
from longrope2.factors import RescaleFactors
from longrope2.perplexity import LOGIT_ROWS, head_logits
from longrope2.rotary import RescaledRotary, rescaled


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

    def __init__(self, model: Any, rotary: RescaledRotary) -> None:
        super().__init__()
        self.model = model
        self._steering = (rotary,)  # in a tuple: it is part of the model already

    @contextmanager
    def rows_of(self, batch: Batch) -> Iterator[None]:
        """Steer RoPE and attention by a batch; its backward pass belongs inside, too."""
        self._steering[0].long_rows = batch.long_rows
        with documents(batch.boundaries):
            yield

    def logits(self, batch: Batch) -> Tensor:
        """All logits [B, S, V]: for tests and short rows."""
        return self.model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits

    def forward(self, batch: Batch) -> Tensor:
        """The sum of the loss over the batch's labels, never holding more than a piece of the logits."""
        base = self.model.base_model
        hidden = base(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).last_hidden_state
        flat, labels = hidden.flatten(0, 1), batch.labels.flatten()
        total = flat.new_zeros((), dtype=torch.float32)
        for piece, targets in zip(flat.split(LOGIT_ROWS), labels.split(LOGIT_ROWS), strict=True):
            total = total + checkpoint(self._piece_loss, piece, targets, use_reentrant=False)
        return total

    def _piece_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = head_logits(self.model, hidden[None])[0]
        return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED_LABEL)


@contextmanager
def mixed_window(model: Any, factors: RescaleFactors) -> Iterator[MixedWindowModel]:
    """Let a model take mixed rows inside the block; it is as before afterwards, but for what it learned."""
    with ExitStack() as stack:
        stack.enter_context(our_attention(model))
        rotary = stack.enter_context(rescaled(model, factors))
        yield MixedWindowModel(model, rotary)
