"""(model, factors, documents) → needle or plain perplexity, without computing what is not asked for.

Needle perplexity looks at the answer's tokens alone, so only their logits are computed, and in the last layer
only their queries. Plain perplexity looks at every token; its logits are computed in pieces.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longrope2.attention import TrailingQueries, our_attention
from longrope2.factors import RescaleFactors
from longrope2.families import attends_simply
from longrope2.intervals import LARGEST_NLL
from longrope2.models import body, decoder_layers
from longrope2.needles import NeedleDocument, PlainDocument
from longrope2.pieces import mlp_in_pieces
from longrope2.rotary import RescaledRotary, is_long, rescaled

Objective = Literal["needle", "plain"]
LOGIT_ROWS = 2048
"""How many positions get their logits at once: full logits at 128k would take 67 GB for an 8B model."""


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of some tokens, in nats."""

    nll: float
    num_tokens: int
    exact: int
    """Answers in which the model's first choice was right at every token."""

    @property
    def perplexity(self) -> float:
        """exp of the mean; infinite where it overflows."""
        mean = self.nll / self.num_tokens
        return math.exp(mean) if mean < LARGEST_NLL else math.inf


def total(scores: Sequence[Score]) -> Score:
    """Documents together: each token counts the same."""
    return Score(
        sum(score.nll for score in scores),
        sum(score.num_tokens for score in scores),
        sum(score.exact for score in scores),
    )


class Scorer:
    """A model set up for scoring; make one with `scoring`."""

    def __init__(self, model: Any, rotary: RescaledRotary, objective: Objective, *, simply: bool) -> None:
        self._model = model
        self._simply = simply
        self._rotary = rotary
        self._objective = objective

    def __call__(self, factors: RescaleFactors, documents: Sequence[NeedleDocument | PlainDocument]) -> list[Score]:
        """Score documents of one length, as one batch."""
        if self._objective == "plain":
            with torch.no_grad():
                return [self._plain(row) for row in self._prepare(factors, documents)]
        return list(map(total, self.answers(factors, [d for d in documents if isinstance(d, NeedleDocument)])))

    def answers(self, factors: RescaleFactors, documents: Sequence[NeedleDocument]) -> list[list[Score]]:
        """Score documents of one length, each answer by itself."""
        tokens = self._prepare(factors, documents)
        # The logits that predict a token stand one position before it.
        first = min(needle.answer[0] for document in documents for needle in document.needles) - 1
        kept = tokens.shape[1] - first
        last = TrailingQueries(decoder_layers(self._model)[-1], kept).installed() if self._simply else nullcontext()
        with torch.no_grad(), last:
            options = {} if self._simply else {"logits_to_keep": kept}
            logits = self._model(input_ids=tokens, use_cache=False, **options).logits
        return [
            [
                score_tokens(logits[row, start - first - 1 : end - first - 1], tokens[row, start:end])
                for start, end in (needle.answer for needle in document.needles)
            ]
            for row, document in enumerate(documents)
        ]

    def _prepare(self, factors: RescaleFactors, documents: Sequence[NeedleDocument | PlainDocument]) -> Tensor:
        """The documents' tokens [B, L], after the model was given the factors and the RoPE of their length."""
        self._rotary.factors = factors
        tokens = torch.tensor([document.token_ids for document in documents], device=self._model.device)
        self._rotary.long_rows = bool(is_long(torch.tensor(tokens.shape[1]), factors))
        return tokens

    def _plain(self, tokens: Tensor) -> Score:
        hidden = body(self._model)(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state
        pieces = []
        for begin in range(0, hidden.shape[1], LOGIT_ROWS):
            piece = hidden[:, begin : begin + LOGIT_ROWS]
            logits = head_logits(self._model, piece)[0]
            pieces.append(score_tokens(logits, tokens[1 + begin : 1 + begin + logits.shape[0]]))
        return total(pieces)


@contextmanager
def scoring(
    model: Any, factors: RescaleFactors, *, objective: Objective = "needle", compiled: bool = False
) -> Iterator[Scorer]:
    """Set a model up for scoring inside the block; factors may change from call to call.

    `compiled` fuses what stands between attention and matrix products. It pays when many documents of one length
    are scored on a GPU, and costs about a minute before the first. Models whose attention is of an own kind keep it,
    and none of this is done.
    """
    with ExitStack() as stack:
        if not attends_simply(model.config):
            yield Scorer(model, stack.enter_context(rescaled(model, factors)), objective, simply=False)
            return
        stack.enter_context(our_attention(model))
        rotary = stack.enter_context(rescaled(model, factors))
        for layer in decoder_layers(model):
            stack.enter_context(mlp_in_pieces(layer))
        if compiled:
            # The last layer runs in two passes and stays as it is.
            for layer in decoder_layers(model)[:-1]:
                stack.enter_context(compiled_layer(layer))
        yield Scorer(model, rotary, objective, simply=True)


@contextmanager
def compiled_layer(layer: Any) -> Iterator[None]:
    """Compile a layer inside the block."""
    layer.compile(dynamic=False)
    try:
        yield
    finally:
        layer._compiled_call_impl = None


def score_tokens(logits: Tensor, tokens: Tensor) -> Score:
    """Tokens [N] given the logits [N, V] that predict them."""
    logits = logits.float()
    nll = F.cross_entropy(logits, tokens, reduction="sum").double().item()
    exact = bool((logits.argmax(-1) == tokens).all().item())
    return Score(nll if math.isfinite(nll) else math.inf, len(tokens), exact)


def head_logits(model: Any, hidden: Any) -> Tensor:
    """Logits of given hidden states through the model's own head, with whatever scaling it applies."""
    from transformers.modeling_outputs import MoeModelOutputWithPast  # a superset of the plain output

    base, given = body(model), MoeModelOutputWithPast(last_hidden_state=hidden)
    given.shared_kv_states = None  # what Gemma 4 hands on beside
    base.forward = lambda *_, **__: given
    try:
        return model(inputs_embeds=hidden, use_cache=False).logits
    finally:
        del base.forward
