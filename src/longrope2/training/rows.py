"""The rows of a plan as batches for training, by their number in the run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch

from longrope2.data.config import RowKind
from longrope2.data.corpus import Corpus
from longrope2.data.loader import Row, RowLoader, order_of_rows
from longrope2.data.plan import Plan
from longrope2.training.config import LongRowMask
from longrope2.training.mixed import Batch

NAMED_DOCUMENTS = 4


class PlanRows:
    """Row by number: the plan's rows in a seeded order, then all again in another one.

    Nothing but the number decides which row it is, so that a run may resume on more or fewer processes.
    """

    def __init__(
        self,
        plan: Plan,
        corpora: Sequence[Corpus],
        *,
        seed: int,
        long_row_mask: LongRowMask = "full",
    ) -> None:
        self._loader = RowLoader(plan, corpora)
        self._corpora = corpora
        # Two: a step may lie across the border of two epochs.
        self._order = lru_cache(maxsize=2)(partial(order_of_rows, plan.bucket_of_row, seed=seed))
        self._long_row_mask = long_row_mask

    def __call__(self, number: int) -> Batch:
        """The row, as a batch of one."""
        row = self._loader.row(self._index(number))
        if row.kind == "long" and self._long_row_mask == "document":
            row = _documents_apart(row)
        return Batch(
            tokens=torch.from_numpy(row.token_ids)[None],
            positions=torch.from_numpy(row.position_ids)[None],
            labels=torch.from_numpy(row.labels())[None],
            long_rows=torch.tensor([row.kind == "long"]),
            boundaries=[row.cu_seqlens.tolist()],
        )

    def kind(self, number: int) -> RowKind:
        """Short or long, whatever RoPE it is trained with."""
        return self._loader.plan.row(self._index(number)).kind

    def name(self, number: int) -> str:
        """Where a row comes from, in words."""
        index = self._index(number)
        planned = self._loader.plan.row(index)
        titles = dict.fromkeys(self._corpora[span.source].title(span.document) for span in planned.spans)
        shown = ", ".join(repr(title) for title in list(titles)[:NAMED_DOCUMENTS])
        more = f" and {len(titles) - NAMED_DOCUMENTS} more" if len(titles) > NAMED_DOCUMENTS else ""
        return f"row {number} of the run ({planned.kind}, row {index} of the plan, from {shown}{more})"

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self._loader))
        return int(self._order(epoch=epoch)[place])


def _documents_apart(row: Row) -> Row:
    """A long row as the released code trains it: positions and attention begin anew at each document."""
    borders = sorted({*row.document_starts.tolist(), len(row.token_ids)})
    positions = np.concatenate([np.arange(stop - start) for start, stop in pairwise(borders)])
    return replace(row, position_ids=positions, cu_seqlens=np.array(borders, dtype=np.int32))
