"""What re-rotating cached keys at the switch loses against running the row again, on trained models.

    python benchmarks/switch_approximation.py                       # the tiny model: switch-approximation
    python benchmarks/switch_approximation.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2 \\
        --factors results/search/smollm2/wide-32k-factors.json        # on a GPU: switch-approximation-smollm2

Each needle document is cut where the window ends: what comes before fills a cache with short RoPE, what comes
after, the answer included, is run with long RoPE on a cache that is exact, re-rotated, or left stale. All of it
is teacher-forced, so the guesses at an answer are those of greedy decoding for as long as they are right.
"""

from pathlib import Path

import torch
from common import arguments, report
from torch import Tensor

from longrope2.books import read_books
from longrope2.factors import RescaleFactors
from longrope2.methods import rescale
from longrope2.models import load
from longrope2.needles import NeedleDocument, make_needles
from longrope2.rotary import RescaledRotary, rescaled

FRACTIONS = (1.03125, 1.125, 1.25, 2.0)
"""Lengths of the documents, in original windows."""
SEED = 11
POSITIONS = 1024
"""How many positions have their distributions compared at once: whole ones would fill the memory."""
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
def logits_after(model, rotary: RescaledRotary, tokens: Tensor, window: int, way: str) -> Tensor:
    """After the switch, position by position: [batch, length - window, vocabulary]."""
    if way == "exact":
        rotary.long_rows = True
        return model(input_ids=tokens, use_cache=False, logits_to_keep=tokens.shape[1] - window).logits
    rotary.long_rows = False
    cache = model(input_ids=tokens[:, :window], use_cache=True, logits_to_keep=1).past_key_values
    if way == "re-rotated":
        rerotate(cache, rotary, torch.arange(window, device=tokens.device)[None])
    rotary.long_rows = True
    return model(input_ids=tokens[:, window:], past_key_values=cache, use_cache=True).logits


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL from exact by position: [batch, length]."""
    pieces = []
    for ours, theirs in zip(exact.split(POSITIONS, dim=1), other.split(POSITIONS, dim=1), strict=True):
        p, q = (logits.double().log_softmax(dim=-1) for logits in (ours, theirs))
        pieces.append((p.exp() * (p - q)).sum(dim=-1))
    return torch.cat(pieces, dim=1)


def measure(
    model, rotary: RescaledRotary, documents: list[NeedleDocument], window: int, batch_size: int
) -> dict[str, dict[str, float]]:
    """Mean KL from exact, over all positions after the switch and over the answers; and the greedy answers.

    `same` is the share of documents with the same answer as exact, `right` with the right one.
    """
    kl = {way: [] for way in WAYS}
    answer_kl = {way: [] for way in WAYS}
    same, right = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0)
    for first in range(0, len(documents), batch_size):
        batch = documents[first : first + batch_size]
        tokens = torch.tensor([document.token_ids for document in batch], device=model.device)
        exact = logits_after(model, rotary, tokens, window, "exact")
        for way in WAYS:
            found = exact if way == "exact" else logits_after(model, rotary, tokens, window, way)
            distance = divergence(exact, found)
            for row, document in enumerate(batch):
                # Position p predicts token p + 1; the last one predicts nothing that is asked for.
                start = document.needle.answer[0] - 1 - window
                assert start >= 0, "the answer must lie wholly behind the switch"
                guesses, exact_guesses = (logits[row, start:-1].argmax(dim=-1) for logits in (found, exact))
                same[way] += torch.equal(guesses, exact_guesses)
                right[way] += torch.equal(guesses, tokens[row, document.needle.answer[0] :])
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
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--factors", type=Path, help="default: yarn-rcd, four windows, at dimension 9")
    parser.add_argument("--name", help="appended to the name of the result")
    parser.add_argument("--documents", type=int, default=96, help="for each length")
    parser.add_argument("--batch-size", type=int, help="default: 16 for the tiny model, else 1")
    parser.add_argument("--books", help="default: the package's held-out books")
    parser.add_argument("--device", help="default: a GPU if there is one; the tiny model runs on the CPU")
    options = parser.parse_args()

    tiny = options.model == "tiny"
    # In float32 everywhere: the distance between distributions would else be mostly that of rounding.
    loaded = load(options.model, device=options.device or ("cpu" if tiny else None), dtype=torch.float32)
    rope = loaded.info.rope
    if options.factors is None:
        factors = rescale("yarn-rcd", rope, 4 * rope.original_length, critical_dimension=9)
    else:
        factors = RescaleFactors.load(options.factors, rope)
    books = list(read_books(options.books, held_out=True))
    results = {}
    with rescaled(loaded.model, factors) as rotary:
        for length in (round(fraction * rope.original_length) for fraction in FRACTIONS):
            documents = make_needles(
                loaded.tokenizer, books, length=length, count=options.documents, seed=SEED, depth="uniform"
            )
            results[str(length)] = measure(
                loaded.model, rotary, documents, rope.original_length, options.batch_size or (16 if tiny else 1)
            )
            print(length, results[str(length)], flush=True)

    def mean(way: str, name: str) -> float:
        return sum(result[way][name] for result in results.values()) / len(results)

    report(
        options,
        name="switch-approximation" + (f"-{options.name}" if options.name else ""),
        value=mean("re-rotated", "kl"),
        unit="nats of KL from exact",
        peer="stale cache, as transformers leaves it",
        peer_value=mean("stale", "kl"),
        means={way: {name: mean(way, name) for name in ("kl", "answer_kl", "same", "right")} for way in WAYS},
        documents_per_length=options.documents,
        model=loaded.info.name if tiny else Path(loaded.info.location).name,
        method=factors.method,
        by_length=results,
    )


if __name__ == "__main__":
    main()
