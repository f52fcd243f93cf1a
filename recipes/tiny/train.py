"""Train the tiny base model from nothing: tokenizer, data, curriculum and weights, in minutes on one GPU.

    python recipes/tiny/train.py --output tiny-base

The result is a LLaMA of 6M parameters with a window of 256 tokens that repeats any number hidden in that
window. That is what makes it a test bed for context extension: whatever it fails to find beyond its window,
RoPE lost. The curriculum is what makes it work; started on several needles at once, it hardly learns recall.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from recall import BOS, EOS, LAWS, Batches, RecallMaker, Step, TokenStream, Wording, make_keys, read_templates
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from longrope2 import __version__
from longrope2.books import Book, read_books
from longrope2.errors import LongRopeError
from longrope2.files import package_versions, write_json
from longrope2.needles import ADJECTIVES, NOUNS

DISTANCE_BIN = 16  # tokens, of the histogram in training.json


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of the curriculum."""

    steps: int
    lengths: tuple[int, ...]  # one is drawn for each step: all rows of a batch have one length
    needle_counts: tuple[int, ...]  # one is drawn for each recall document


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Everything that decides what comes out, but for the books."""

    seed: int = 0
    distances: str = "skewed"
    # Model.
    window: int = 256
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    num_key_value_heads: int = 4
    rope_theta: float = 10_000.0
    # Curriculum. Long rows are drawn more often, since they hold fewer answers.
    stages: tuple[Stage, ...] = (
        Stage(steps=800, lengths=(128,), needle_counts=(1,)),
        Stage(steps=2000, lengths=(64, 128, 192, 256, 256, 256), needle_counts=(1,)),
        Stage(steps=3000, lengths=(64, 128, 192, 256, 256, 256), needle_counts=(1, 1, 2, 3)),
    )
    tokens_per_step: int = 65_536
    answer_weight: float = 10.0
    """A document has 256 tokens of text and 7 of answer; unweighted, recall takes far longer to appear."""
    # Optimiser.
    learning_rate: float = 1e-3
    final_learning_rate: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    gradient_clip: float = 1.0
    # Data and reports.
    key_pool: int = 30_000
    book_characters: int | None = None
    """Read no more than this of each book; None reads all."""
    probe_documents: int = 64
    report_every: int = 100

    def scaled(self, factor: float) -> "TinyConfig":
        """The same curriculum with `factor` times the steps."""
        stages = [replace(stage, steps=max(1, round(stage.steps * factor))) for stage in self.stages]
        warmup = max(1, round(self.warmup_steps * min(1.0, factor)))
        return replace(self, stages=tuple(stages), warmup_steps=warmup)

    def smoke(self) -> "TinyConfig":
        """Twenty steps of a few rows: shows in seconds that everything fits together, and learns nothing."""
        steps = (6, 6, 8)
        stages = tuple(replace(stage, steps=n) for stage, n in zip(self.stages, steps, strict=True))
        return replace(
            self,
            stages=stages,
            tokens_per_step=512,
            warmup_steps=5,
            key_pool=2000,
            book_characters=200_000,
            probe_documents=2,
            report_every=10,
        )

    def schedule(self) -> list[Step]:
        """What each step is made of, from the first to the last."""
        rng = np.random.default_rng(self.seed)
        return [
            Step(length=length, rows=self.tokens_per_step // length, needle_counts=stage.needle_counts)
            for stage in self.stages
            for length in rng.choice(stage.lengths, stage.steps).tolist()
        ]

    def learning_rate_at(self, step: int) -> float:
        """Warm-up, then constant until the last stage, which decays along a cosine."""
        decay_steps = self.stages[-1].steps
        decay_start = sum(stage.steps for stage in self.stages) - decay_steps
        if step < decay_start:
            return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - decay_start) / decay_steps))
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * cosine


def say(message: str) -> None:
    """Progress goes to stderr."""
    print(message, file=sys.stderr, flush=True)


def train_tokenizer(books: Sequence[Book], vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, so that a number has as many tokens as digits.

    The pre-tokenizer is SmolLM's, which every inference engine knows. The words of needle keys are made as
    frequent as a common word, so that a key takes few of the window's tokens.
    """
    keys = "".join(f" {adjective}-{noun}" for adjective, noun in zip(ADJECTIVES, NOUNS, strict=True))
    repeats = sum(len(book.text) for book in books) // 20_000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*(book.text for book in books), *[keys] * repeats], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def make_model(config: TinyConfig, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """An untrained model in float32."""
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.window,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            attention_bias=False,
            bos_token_id=tokenizer.token_to_id(BOS),
            eos_token_id=tokenizer.token_to_id(EOS),
        )
    )


def losses(
    hidden: Tensor, head: Tensor, ids: Tensor, answers: Tensor, answer_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss to minimise; and for the report the mean loss on book rows and on answers.

    `hidden` is [row, position, channel]; `ids` and `answers`, true on digits to find, are [row, position].
    """
    logits = F.linear(hidden, head).float()
    # Rolling instead of cutting keeps every shape a multiple of 64; the last column has no target.
    nll = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none")
    nll = nll.view_as(ids)[:, :-1]
    is_answer = answers[:, 1:].float()
    weights = 1 + (answer_weight - 1) * is_answer
    loss = (nll * weights).sum() / weights.sum()
    reported = nll.detach()
    text = reported[: len(reported) // 2].mean()
    return loss, text, (reported * is_answer).sum() / is_answer.sum()


def make_optimizer(model: nn.Module, config: TinyConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    on_gpu = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=on_gpu)


class Probes:
    """Recall documents that training never sees, to watch retrieval by length; distances are uniform."""

    def __init__(self, maker: RecallMaker, unseen: Sequence[Wording], config: TinyConfig) -> None:
        lengths = sorted({length for stage in config.stages for length in stage.lengths})
        makers = {str(length): (replace(maker, law="uniform"), length) for length in lengths}
        makers["unseen wording"] = (replace(maker, law="uniform", wordings=unseen), lengths[-1])
        step = {"rows": config.probe_documents, "needle_counts": config.stages[-1].needle_counts}
        self.batches = {
            name: Batches(maker, [Step(length=length, **step)], seed=f"probe {name}", text=False)[0][:2]
            for name, (maker, length) in makers.items()
        }

    @torch.no_grad()
    def run(self, model: LlamaForCausalLM, device: torch.device) -> dict[str, float]:
        """How often all seven digits come out right, by length and for wordings kept out of training."""
        rates = {}
        for name, (ids, answers) in self.batches.items():
            ids, answers = ids.to(device).long(), answers.to(device)
            predicted = model(ids, use_cache=False).logits.argmax(-1).roll(1, 1)
            rates[name] = ((predicted == ids) | ~answers).all(1).float().mean().item()
        return rates


def train(
    config: TinyConfig, books: Sequence[Book], *, device: torch.device, compiled: bool, workers: int
) -> tuple[LlamaForCausalLM, Tokenizer, dict]:
    """Run the whole curriculum. Returns model, tokenizer and the record for training.json."""
    started = time.perf_counter()
    tokenizer = train_tokenizer(books, config.vocab_size)
    stream = TokenStream.from_books(tokenizer, books, window=config.window)
    maker = RecallMaker(
        stream=stream,
        wordings=[Wording.compile(tokenizer, template) for template in read_templates("train")],
        keys=make_keys(tokenizer, books, count=config.key_pool, seed=config.seed),
        digits=[tokenizer.token_to_id(digit) for digit in "0123456789"],
        bos=tokenizer.token_to_id(BOS),
        eos=tokenizer.token_to_id(EOS),
        window=config.window,
        law=config.distances,
    )
    unseen = [Wording.compile(tokenizer, template) for template in read_templates("held_out")]
    probes = Probes(maker, unseen, config)
    schedule = config.schedule()
    loader = DataLoader(
        Batches(maker, schedule, seed=f"train {config.seed}"),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)  # the workers fork here, before anything touches the GPU
    prepared = time.perf_counter()
    say(f"{len(stream.tokens):,} tokens of {len(books)} books ready after {prepared - started:.0f} s")

    model = make_model(config, tokenizer).to(device)
    optimizer = make_optimizer(model, config)
    parameters = list(model.parameters())
    compute_losses = losses
    if compiled:
        # Layer by layer: the six share one graph per length, which compiles in seconds, and the causal mask
        # stays outside, where transformers sees that the fast kernel needs none.
        torch._dynamo.config.suppress_errors = True  # where no compiler works, run uncompiled
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        compute_losses = torch.compile(losses, dynamic=False)

    def low_precision() -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    stage_of = [number for number, stage in enumerate(config.stages, 1) for _ in range(stage.steps)]
    all_distances = np.zeros(config.window + 1, np.int64)
    log: list[dict] = []
    running = torch.zeros(2, device=device)
    last_time, last_step = time.perf_counter(), 0
    for step, (ids, answers, distances) in enumerate(batches):
        all_distances += np.bincount(distances.numpy(), minlength=len(all_distances))
        ids = ids.to(device, non_blocking=True).long()
        answers = answers.to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        with low_precision():
            hidden = model.model(ids, use_cache=False).last_hidden_state
            loss, text_loss, answer_loss = compute_losses(
                hidden, model.lm_head.weight, ids, answers, config.answer_weight
            )
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Adding on the device: reading a number here would make the GPU wait at every step.
        running += torch.stack([text_loss, answer_loss])

        done = step + 1
        if done % config.report_every == 0 or done == len(schedule):
            text, answer = (running / (done - last_step)).tolist()
            if not math.isfinite(text + answer):
                raise LongRopeError(f"the loss is no longer finite at step {done}", hint="try another --seed")
            now = time.perf_counter()
            rate = (done - last_step) / (now - last_time)
            with low_precision(), torch.compiler.set_stance("force_eager"):
                retrieval = probes.run(model, device)
            log.append({"step": done, "text_loss": text, "answer_loss": answer, "retrieval": retrieval})
            shown = " ".join(f"{name}: {value:.2f}" for name, value in retrieval.items())
            say(
                f"step {done}/{len(schedule)} stage {stage_of[step]} text {text:.3f} answers {answer:.4f} | "
                f"exact {shown} | {rate:.1f} steps/s, {(len(schedule) - done) / rate:.0f} s left"
            )
            running.zero_()
            last_time, last_step = time.perf_counter(), done

    finished = time.perf_counter()
    record = {
        "config": asdict(config),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {
            "longrope2": __version__,
            **package_versions("torch", "transformers", "tokenizers", "numpy"),
        },
        "parameters": sum(p.numel() for p in parameters),
        "books": [{"title": book.title, "source": Path(book.source).name} for book in books],
        "book_tokens": len(stream.tokens),
        "trained_tokens": sum(step.length * step.rows for step in schedule),
        "seconds": {"preparation": prepared - started, "training": finished - prepared},
        "distances": describe_distances(all_distances),
        "log": log,
    }
    return model, tokenizer, record


def describe_distances(counts: np.ndarray) -> dict:
    """Histogram and quartiles of how far before the answer the needle's value stood; `counts` is by token."""
    cumulative = np.cumsum(counts) / counts.sum()
    padded = np.zeros(math.ceil(len(counts) / DISTANCE_BIN) * DISTANCE_BIN, np.int64)
    padded[: len(counts)] = counts
    return {
        "bin_width": DISTANCE_BIN,
        "counts": padded.reshape(-1, DISTANCE_BIN).sum(1).tolist(),
        "quartiles": [int(np.searchsorted(cumulative, quarter)) for quarter in (0.25, 0.5, 0.75)],
        "longest": int(np.flatnonzero(counts).max()),
    }


def save(output: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, record: dict) -> None:
    """Write the folder that plain transformers loads; every file is whole or absent."""
    # The name of the class that both old and new transformers know.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".saving-") as name:
        folder = Path(name)
        model.to("cpu", torch.bfloat16).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        mode = (folder / "config.json").stat().st_mode  # safetensors makes private files
        for file in list(folder.iterdir()):
            file.chmod(mode)
            file.replace(output / file.name)
    write_json(output / "training.json", record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--books", help="folder of .txt files or any other source; default: the package's books")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--distances", choices=LAWS, default="skewed", help="law of needle distances")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="multiply the steps of every stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--workers", type=int, help="processes that make batches; default: by cores")
    parser.add_argument("--smoke", action="store_true", help="20 tiny steps, to test the script")
    options = parser.parse_args(arguments)

    config = TinyConfig(seed=options.seed, distances=options.distances)
    config = (config.smoke() if options.smoke else config).scaled(options.steps_scale)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    workers = options.workers
    if workers is None:
        workers = min(6, max(1, (os.cpu_count() or 1) - 2)) if on_gpu else 0
    # The tokenizer runs its threads before the workers fork, and never in them: nothing to warn about.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    torch.set_float32_matmul_precision("high")
    disable_progress_bar()
    try:
        books = list(read_books(options.books, held_out=None if options.books else False))
        if config.book_characters is not None:
            books = [replace(book, text=book.text[: config.book_characters]) for book in books]
        compiled = on_gpu and not options.no_compile
        model, tokenizer, record = train(config, books, device=device, compiled=compiled, workers=workers)
        save(options.output, model, tokenizer, record)
    except LongRopeError as error:
        say(f"error: {error}")
        return 2
    say(f"saved to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
