"""What re-rotating cached keys at the switch loses against running the row again, on the trained tiny model.

Each needle document is cut where the window ends: what comes before fills a cache with short RoPE, what comes
after, the answer included, is run with long RoPE on a cache that is exact, re-rotated, or left stale. All of it
is teacher-forced, so the guesses at an answer are those of greedy decoding for as long as they are right.
"""

import torch
from common import arguments, report
from torch import Tensor

from longrope2.books import read_books
from longrope2.methods import rescale
from longrope2.models import load
from longrope2.needles import NeedleDocument, make_needles
from longrope2.rotary import RescaledRotary, rescaled

LENGTHS = (264, 288, 320, 512)
DOCUMENTS, BATCH, SEED = 96, 16, 11
WAYS = ("exact", "re-rotated", "stale")


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys [batch, heads, length, dims] in the layout of halves."""
    first, second = keys.chunk(2, dim=-1)
    return keys * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def rerotate(cache, rotary: RescaledRotary, positions: Tensor) -> None:
    """Turn cached keys from the short to the long RoPE, as if nothing else depended on it."""
    tables = {}
    for rotary.long_rows in (False, True):
        tables[rotary.long_rows] = rotary(torch.zeros(1, dtype=torch.float32), positions)
    (short_cos, short_sin), long = tables[False], tables[True]
    scale = rotary.factors.short_attention_factor**2
    for layer in cache.layers:
        layer.keys = rotate(rotate(layer.keys, short_cos, -short_sin) / scale, *long)


@torch.no_grad()
def log_probabilities(model, rotary: RescaledRotary, tokens: Tensor, window: int, way: str) -> Tensor:
    """After the switch, position by position: [batch, length - window, vocabulary]."""
    if way == "exact":
        rotary.long_rows = True
        logits = model(input_ids=tokens, use_cache=False).logits[:, window:]
    else:
        rotary.long_rows = False
        cache = model(input_ids=tokens[:, :window], use_cache=True).past_key_values
        if way == "re-rotated":
            rerotate(cache, rotary, torch.arange(window)[None])
        rotary.long_rows = True
        logits = model(input_ids=tokens[:, window:], past_key_values=cache, use_cache=True).logits
    return logits.double().log_softmax(dim=-1)


def measure(model, rotary: RescaledRotary, documents: list[NeedleDocument], window: int) -> dict[str, dict[str, float]]:
    """Mean KL from exact, over all positions after the switch and over the answers; and the greedy answers.

    `same` is the share of documents with the same answer as exact, `right` with the right one.
    """
    kl = {way: [] for way in WAYS}
    answer_kl = {way: [] for way in WAYS}
    same, right = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0)
    for first in range(0, len(documents), BATCH):
        batch = documents[first : first + BATCH]
        tokens = torch.tensor([document.token_ids for document in batch])
        found = {way: log_probabilities(model, rotary, tokens, window, way) for way in WAYS}
        for way in WAYS:
            distance = (found["exact"].exp() * (found["exact"] - found[way])).sum(dim=-1)
            for row, document in enumerate(batch):
                # Position p predicts token p + 1; the last one predicts nothing that is asked for.
                start = document.answer_start - 1 - window
                assert start >= 0, "the answer must lie wholly behind the switch"
                guesses, exact = (found[name][row, start:-1].argmax(dim=-1) for name in (way, "exact"))
                same[way] += torch.equal(guesses, exact)
                right[way] += torch.equal(guesses, tokens[row, document.answer_start :])
                kl[way].append(distance[row, :-1].mean().item())
                answer_kl[way].append(distance[row, start:-1].mean().item())
    count = len(documents)
    return {
        way: {
            "kl": sum(kl[way]) / count,
            "answer_kl": sum(answer_kl[way]) / count,
            "same": same[way] / count,
            "right": right[way] / count,
        }
        for way in WAYS
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    loaded = load("tiny", device="cpu")
    factors = rescale("yarn-rcd", loaded.info.rope, 1024, critical_dimension=9)
    books = list(read_books(held_out=True))
    results = {}
    with rescaled(loaded.model, factors) as rotary:
        for length in LENGTHS:
            documents = make_needles(
                loaded.tokenizer, books, length=length, count=DOCUMENTS, seed=SEED, depth="uniform"
            )
            results[str(length)] = measure(loaded.model, rotary, documents, factors.original_length)
            print(length, results[str(length)], flush=True)

    def mean(way: str, name: str) -> float:
        return sum(result[way][name] for result in results.values()) / len(results)

    report(
        options,
        name="switch-approximation",
        value=mean("re-rotated", "kl"),
        unit="nats of KL from exact",
        peer="stale cache, as transformers leaves it",
        peer_value=mean("stale", "kl"),
        means={way: {name: mean(way, name) for name in ("kl", "answer_kl", "same", "right")} for way in WAYS},
        documents_per_length=DOCUMENTS,
        by_length=results,
    )


if __name__ == "__main__":
    main()
