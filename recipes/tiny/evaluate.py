"""Measure a tiny base: recall inside its window, failure beyond it, and how far factors alone carry it.

    python recipes/tiny/evaluate.py tiny-base

Everything is measured on books that training never saw and written to evaluation.json in the model's folder.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from recall import read_templates
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from longrope2 import __version__
from longrope2.books import Book, read_books
from longrope2.errors import DataError, LongRopeError
from longrope2.files import package_versions, write_json
from longrope2.methods import ntk, ntk_below, position_interpolation, yarn, yarn_temperature
from longrope2.needles import PAPER_TEMPLATE, NeedleDocument, NeedleTemplate, make_needles
from longrope2.rope import RopeSpec

DEPTHS = tuple(tenth / 10 for tenth in range(11))
SCORED_TAIL = 128  # tokens: plain text beyond the window is scored on the end of each row


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is measured, and on how much."""

    seed: int = 1000
    documents: int = 100
    """Per cell of the retrieval table: one length, one depth, one kind of wording."""
    long_documents: int = 16
    """Per set of factors beyond the window."""
    text_rows: int = 400
    inside: tuple[int, ...] = (64, 128, 192, 256)
    beyond: tuple[int, ...] = (512, 1024, 2048, 4096)
    target_length: int = 4096
    flat_multiples: tuple[float, ...] = (0.75, 1.0, 1.25, 1.5, 2.0)
    ramp_start_stride: int = 2
    tokens_per_batch: int = 65_536


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Rescaling factors under test and where they come from."""

    name: str
    long: tuple[float, ...]
    attention_factor: float
    critical_dimension: int | None = None
    multiple: float | None = None  # f: the factors from the critical dimension on are f·s
    shape: str | None = None  # below it: "ntk", or "ramp" from `ramp_start`
    ramp_start: int | None = None


@dataclass(frozen=True, kw_only=True)
class Score:
    """Mean NLL of the answer's tokens, in nats, and how often all of them come out right."""

    nll: float
    exact: float
    documents: int


def say(message: str) -> None:
    """Progress goes to stderr."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def scaled_rope(model: PreTrainedModel, factors: Factors) -> Iterator[None]:
    """Divide the model's frequencies by the factors inside the block."""
    rotary = model.model.rotary_emb
    original, scaling = rotary.inv_freq, rotary.attention_scaling
    rotary.inv_freq = original / torch.tensor(factors.long, dtype=original.dtype, device=original.device)
    rotary.attention_scaling = factors.attention_factor
    try:
        yield
    finally:
        rotary.inv_freq, rotary.attention_scaling = original, scaling


class Evaluator:
    """A model, its tokenizer and the books to ask about."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        books: Sequence[Book],
        config: EvaluationConfig,
    ) -> None:
        self.model, self.tokenizer, self.books, self.config = model, tokenizer, books, config
        rope = model.config
        self.spec = RopeSpec(
            rotary_dim=rope.head_dim,
            theta=rope.rope_parameters["rope_theta"],
            original_length=rope.max_position_embeddings,
        )

    @torch.no_grad()
    def answer_scores(self, documents: Sequence[NeedleDocument]) -> tuple[torch.Tensor, torch.Tensor]:
        """Per document of one length: mean answer NLL, and whether greedy decoding gives the whole answer.

        The most likely token at every place of the true answer is the greedy continuation exactly when it is
        the true token at all of them, so one forward gives both.
        """
        rows = max(1, self.config.tokens_per_batch // len(documents[0].token_ids))
        nlls, exact = [], []
        for i in range(0, len(documents), rows):
            batch = documents[i : i + rows]
            ids = torch.tensor([document.token_ids for document in batch], device=self.model.device)
            answer_length = ids.shape[1] - batch[0].needle.answer[0]
            answers = ids[:, -answer_length:]
            hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, -answer_length - 1 : -1]
            logits = self.model.lm_head(hidden).float()
            nlls.append(F.cross_entropy(logits.mT, answers, reduction="none").mean(1))
            exact.append((logits.argmax(-1) == answers).all(1))
        return torch.cat(nlls).cpu(), torch.cat(exact).float().cpu()

    def score(self, documents: Sequence[NeedleDocument]) -> Score:
        """The mean over documents."""
        nlls, exact = self.answer_scores(documents)
        return Score(nll=nlls.mean().item(), exact=exact.mean().item(), documents=len(documents))

    def retrieval(self, which: str, length: int) -> dict:
        """Exact rates by depth for the training or held-out wordings that fit into `length` tokens."""
        wordings = [fitted for t in read_templates(which) if (fitted := self._fit(t, length)) is not None]
        if not wordings:
            return {"length": length, "wordings": 0}
        each = math.ceil(self.config.documents / len(wordings))
        totals = {depth: [0.0, 0.0, 0] for depth in DEPTHS}
        for number, template in enumerate(wordings):
            documents = self._needles(template, length, DEPTHS, each * len(DEPTHS), offset=number)
            nlls, exact = self.answer_scores(documents)
            for place, depth in enumerate(DEPTHS):  # documents take the depths in turn
                totals[depth][0] += exact[place :: len(DEPTHS)].sum().item()
                totals[depth][1] += nlls[place :: len(DEPTHS)].sum().item()
                totals[depth][2] += each
        count = sum(total[2] for total in totals.values())
        return {
            "length": length,
            "wordings": len(wordings),
            "documents_per_depth": each * len(wordings),
            "exact": sum(total[0] for total in totals.values()) / count,
            "nll": sum(total[1] for total in totals.values()) / count,
            "exact_by_depth": {f"{depth:g}": total[0] / total[2] for depth, total in totals.items()},
        }

    @torch.no_grad()
    def text_nll(self, length: int, *, scored: int, rows: int) -> float:
        """Mean NLL, in nats, of the last `scored` tokens of rows of plain text of held-out books."""
        scored = min(scored, length - 1)  # nothing predicts the first token
        total, count = 0.0, 0
        per_book = math.ceil(rows / len(self.books))
        for tokens in self._book_tokens:
            if len(tokens) < length:
                continue
            starts = torch.linspace(0, len(tokens) - length, per_book).long().tolist()
            ids = torch.stack([tokens[start : start + length] for start in starts])
            ids[:, 0] = self.tokenizer.bos_token_id
            for batch in ids.split(max(1, self.config.tokens_per_batch // length)):
                batch = batch.to(self.model.device)
                hidden = self.model.model(batch, use_cache=False).last_hidden_state[:, -scored - 1 : -1]
                logits = self.model.lm_head(hidden).float()
                total += F.cross_entropy(logits.mT, batch[:, -scored:], reduction="sum").item()
                count += batch[:, -scored:].numel()
        return total / count

    @cached_property
    def _book_tokens(self) -> list[torch.Tensor]:
        texts = [book.text for book in self.books]
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        return [torch.tensor(tokens) for tokens in encoded]

    def beyond_window(self) -> list[dict]:
        """What the untouched model does at lengths it never saw."""
        results = []
        for length in (self.spec.original_length, *self.config.beyond):
            result = {"length": length}
            for name, depths in (("start", (0.0,)), ("any_depth", DEPTHS)):
                documents = self._needles(PAPER_TEMPLATE, length, depths, self.config.long_documents)
                result[name] = asdict(self.score(documents))
            rows = max(len(self.books), self.config.long_documents)
            result["text_nll"] = self.text_nll(length, scored=SCORED_TAIL, rows=rows)
            say(f"  {length} tokens, untouched: {result}")
            results.append(result)
        return results

    def extension(self) -> dict:
        """Every closed form and a grid of factors at the target length, needle at the start, no training."""
        length = self.config.target_length
        documents = self._needles(PAPER_TEMPLATE, length, (0.0,), self.config.long_documents)
        results: list[tuple[Factors, Score]] = []
        candidates = [*closed_forms(self.spec, length), *self.grid()]
        started = time.perf_counter()
        for number, factors in enumerate(candidates, 1):
            with scaled_rope(self.model, factors):
                results.append((factors, self.score(documents)))
            if number % 20 == 0:
                left = (time.perf_counter() - started) / number * (len(candidates) - number)
                say(f"  {number}/{len(candidates)} sets of factors, {left:.0f} s left")
        # The best of many on a few documents is partly luck, so the winners are asked again on others.
        fresh = {
            depth: self._needles(PAPER_TEMPLATE, length, (depth,), self.config.long_documents, offset=500)
            for depth in (0.0, 0.25, 0.5, 0.75, 0.95)
        }
        finalists = []
        for shape in (None, "ntk", "ramp"):  # None: the closed forms
            of_shape = [result for result in results if result[0].shape == shape]
            factors, score = min(of_shape, key=lambda result: result[1].nll)
            with scaled_rope(self.model, factors):
                by_depth = {f"{depth:g}": asdict(self.score(docs)) for depth, docs in fresh.items()}
            finalists.append({**asdict(factors), **asdict(score), "fresh": by_depth})
        rows = [{**asdict(factors), **asdict(score)} for factors, score in results]
        for row in rows:
            del row["long"]  # name and numbers say it all; only the finalists keep their factors
        return {
            "target_length": length,
            "ratio": self.spec.extension_ratio(length),
            "critical_dimension": self.spec.critical_dimension,
            "ten_period_dimension": self.spec.ten_period_dimension,
            "results": sorted(rows, key=lambda row: row["nll"]),
            "finalists": finalists,
        }

    def grid(self) -> Iterator[Factors]:
        """Flat factors f·s from the critical dimension on; below it NTK, or a ramp of 1/λ from some start."""
        s = self.spec.extension_ratio(self.config.target_length)
        for c in range(self.spec.ten_period_dimension, self.spec.critical_dimension + 1):
            for f in self.config.flat_multiples:
                flat = (f * s,) * (self.spec.num_dims - c)
                common = {
                    "attention_factor": yarn_temperature(s),
                    "critical_dimension": c,
                    "multiple": f,
                }
                left = tuple(ntk_below(f * s, c))
                yield Factors(name=f"ntk below {c}, {f:g}·s", long=left + flat, shape="ntk", **common)
                for a in range(0, c, self.config.ramp_start_stride):
                    weights = [max(0.0, (i - a) / (c - a)) for i in range(c)]
                    left = tuple(1 / (1 - weight + weight / (f * s)) for weight in weights)
                    name = f"ramp {a}–{c}, {f:g}·s"
                    yield Factors(name=name, long=left + flat, shape="ramp", ramp_start=a, **common)

    def _needles(
        self,
        template: NeedleTemplate,
        length: int,
        depths: Sequence[float],
        count: int,
        *,
        offset: int = 0,
    ) -> list[NeedleDocument]:
        seed = self.config.seed + offset
        return make_needles(
            self.tokenizer,
            self.books,
            length=length,
            count=count,
            seed=seed,
            depth=depths,
            template=template,
        )

    def _fit(self, template: dict[str, str], length: int) -> NeedleTemplate | None:
        """The template, without its instruction where that takes too much room; None if it does not fit."""
        full = NeedleTemplate(**template)
        for candidate in (full, replace(full, instruction="")):
            try:
                self._needles(candidate, length, (0.5,), 16)
            except DataError:
                continue
            return candidate
        return None


def closed_forms(spec: RopeSpec, length: int) -> Iterator[Factors]:
    """The known methods as published, and each with and without YaRN's temperature."""
    temperature = yarn_temperature(spec.extension_ratio(length))
    for name, factors in (
        ("none", (1.0,) * spec.num_dims),
        ("PI", position_interpolation(spec, length).factors),
        ("NTK", ntk(spec, length).factors),
        ("YaRN", yarn(spec, length).factors),
    ):
        published = temperature if name == "YaRN" else 1.0
        yield Factors(name=name, long=tuple(factors), attention_factor=published)
        other, change = (1.0, "without") if name == "YaRN" else (temperature, "with")
        yield Factors(name=f"{name} {change} temperature", long=tuple(factors), attention_factor=other)


def evaluate(folder: Path, books: Sequence[Book], config: EvaluationConfig, device: str) -> dict:
    """All measurements of one model, in float32."""
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    evaluator = Evaluator(model, tokenizer, books, config)
    window = evaluator.spec.original_length
    retrieval = {}
    for which in ("train", "held_out"):
        retrieval[which] = []
        for length in config.inside:
            result = evaluator.retrieval(which, length)
            say(f"{result['wordings']} {which} wordings at {length} tokens: exact {result.get('exact')}")
            retrieval[which].append(result)
    nll = evaluator.text_nll(window, scored=window, rows=config.text_rows)
    say(f"held-out text at {window} tokens: perplexity {math.exp(nll):.2f}")
    beyond = evaluator.beyond_window()
    extension = evaluator.extension()
    for best in extension["finalists"]:
        say(f"{best['name']}: nll {best['nll']:.3f}, exact {best['exact']:.2f}")
    in_bfloat16 = None
    if device.startswith("cuda"):  # what a server would run; slow on most CPUs, and not to be trusted on some
        model.to(torch.bfloat16)
        in_bfloat16 = evaluator.retrieval("train", window)
    return {
        "config": asdict(config),
        "device": torch.cuda.get_device_name(0) if device.startswith("cuda") else "cpu",
        "versions": {
            "longrope2": __version__,
            **package_versions("torch", "transformers", "tokenizers", "numpy"),
        },
        "books": [book.title for book in books],
        "retrieval": retrieval,
        "retrieval_bfloat16": in_bfloat16,
        "text": {"length": window, "nll": nll, "perplexity": math.exp(nll)},
        "beyond_window": beyond,
        "extension": extension,
        "seconds": time.perf_counter() - started,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, evaluate, save."""
    defaults = EvaluationConfig()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder that train.py wrote")
    parser.add_argument("--books", help="held-out books; default: those of the package")
    parser.add_argument("--documents", type=int, default=defaults.documents, help="per length, depth and wordings")
    parser.add_argument("--long-documents", type=int, default=defaults.long_documents, help="beyond the window")
    parser.add_argument("--ramp-start-stride", type=int, default=defaults.ramp_start_stride)
    parser.add_argument("--target-length", type=int, default=defaults.target_length)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="default: evaluation.json in the model's folder")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    config = EvaluationConfig(
        documents=options.documents,
        long_documents=options.long_documents,
        ramp_start_stride=options.ramp_start_stride,
        target_length=options.target_length,
    )
    try:
        books = list(read_books(options.books, held_out=None if options.books else True))
        record = evaluate(options.model, books, config, options.device)
        write_json(options.output or options.model / "evaluation.json", record)
    except LongRopeError as error:
        say(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
