"""What runs the model: our own forwards, each row on its side of the switch, or vLLM, for speed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longrope2 import models
from longrope2.attention import our_attention
from longrope2.console import quiet
from longrope2.errors import LongRopeError, require
from longrope2.evaluation.decoding import RowsCache, one_token_each, rows_attention
from longrope2.evaluation.results import digest
from longrope2.evaluation.suite import Prompt, TextSpan, cut_at_stop
from longrope2.factors import RescaleFactors
from longrope2.families import attends_simply, stretches_with_length
from longrope2.generation.saved import carries_factors
from longrope2.generation.strategies import Switch
from longrope2.generation.switch import load as load_switching
from longrope2.models import ModelInfo, body, cached_values, pretrained_source
from longrope2.perplexity import LOGIT_ROWS, Score, head_logits, score_tokens, total
from longrope2.pieces import READ_TOKENS
from longrope2.serving.settings import settings_of

# Of the memory that is free once the weights are loaded, the rest being for activations.
CACHE_SHARE = 0.5
CPU_BATCH_TOKENS = 1 << 15
# Enough to hide the cost of starting kernels for a small model, few enough to leave work for every process.
BATCH_ROWS = 128
ONE_SIDE = (
    "vLLM used the long factors at every length, since its window exceeds the original one and its environment lacks "
    "the plugin of longrope2"
)
Piece = TypeVar("Piece")


class TorchBackend:
    """A transformers model, switching (`longrope2.load`) or plain."""

    batch_rows = BATCH_ROWS

    def __init__(self, model: Any, tokenizer: Any, *, window: int) -> None:
        self.model, self.tokenizer, self.window = model, tokenizer, window
        self.on_read: Callable[[int], None] = quiet
        self._switch: Switch | None = getattr(model, "longrope2", None)
        declared = model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        self._ends = {end for end in (*declared, tokenizer.eos_token_id) if end is not None}

    def batch_tokens(self) -> int:
        """As many as fit into half of the free memory of a GPU; on a CPU enough to keep it busy."""
        if self.model.device.type != "cuda":
            return CPU_BATCH_TOKENS
        per_token = cached_values(self.model.config.get_text_config()) * self.model.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(self.model.device)
        return int(CACHE_SHARE * free) // per_token

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        """Rows that may cross the switch while they answer go through `generate`, the others together."""
        simply = attends_simply(self.model.config)
        crossing = [row for row, prompt in enumerate(prompts) if not simply or self._may_cross(prompt)]
        together = [row for row in range(len(prompts)) if row not in crossing]
        with self._out_of_memory("answering", max(len(prompt.token_ids) for prompt in prompts)):
            tokens: dict[int, list[int]] = {row: self._generate(prompts[row]) for row in crossing}
            if together:
                tokens |= zip(together, self._decode([prompts[row] for row in together]), strict=True)
        return [self._text(tokens[row], prompt.stop) for row, prompt in enumerate(prompts)]

    def score(self, spans: Sequence[TextSpan]) -> list[Score]:
        """All in one forward: what pads a row on its right is never seen from the left."""
        return list(map(total, self._pieces(spans, score_tokens)))

    def losses(self, spans: Sequence[TextSpan]) -> list[list[float]]:
        """The negative log-likelihood of each token by itself, in nats; all in one forward, too."""

        def each(logits: Tensor, tokens: Tensor) -> list[float]:
            found: list[float] = F.cross_entropy(logits.float(), tokens, reduction="none").tolist()
            return found

        return [list(chain(*pieces)) for pieces in self._pieces(spans, each)]

    def _pieces(self, spans: Sequence[TextSpan], measure: Callable[[Tensor, Tensor], Piece]) -> list[list[Piece]]:
        """What `measure` makes of logits and tokens, for each span piece by piece."""
        if not attends_simply(self.model.config):
            return [[measure(*piece) for piece in self._logits(self._alone(span), span, span.places)] for span in spans]
        # The last token is only predicted, never run. So answers of one token to the same question share a row.
        inputs = [tuple(span.token_ids[:-1]) for span in spans]
        rows = {tokens: row for row, tokens in enumerate(dict.fromkeys(inputs))}
        width = max(map(len, rows))
        if width > READ_TOKENS:
            return [self._read_pieces(span, measure) for span in spans]
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in rows], device=self.model.device)
        with torch.no_grad(), our_attention(self.model), self._out_of_memory("scoring", width):
            self._choose([len(tokens) for tokens in rows])
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return [
                [measure(*piece) for piece in self._logits(hidden[rows[key]], span, span.places)]
                for key, span in zip(inputs, spans, strict=True)
            ]

    def _read_pieces(self, span: TextSpan, measure: Callable[[Tensor, Tensor], Piece]) -> list[Piece]:
        """The same for one long span, whose hidden states are never there all at once."""
        ids, done = span.token_ids[:-1], 0
        found: list[Piece] = []
        with torch.no_grad(), rows_attention(self.model), self._out_of_memory("scoring", len(ids)):
            for hidden in self._read(RowsCache([len(ids)], 0), 0, ids):
                end = done + hidden.shape[1]
                if here := [place for place in span.places if done < place <= end]:
                    found += [measure(*piece) for piece in self._logits(hidden[0], span, here, done)]
                done = end
        return found

    def _alone(self, span: TextSpan) -> Tensor:
        """The hidden states of a span by itself, with the model's own attention."""
        ids = torch.tensor([span.token_ids[:-1]], device=self.model.device)
        with torch.no_grad(), self._out_of_memory("scoring", ids.shape[1]):
            self._choose([ids.shape[1]])
            hidden: Tensor = body(self.model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        return hidden

    def _logits(
        self, hidden: Tensor, span: TextSpan, wanted: Sequence[int], first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits of some tokens of a span, and these tokens, until all wanted had their turn.

        `hidden` has the states from position `first` on.
        """
        tokens = torch.tensor(span.token_ids, device=hidden.device)
        places = torch.tensor(wanted, dtype=torch.long, device=hidden.device)
        for some in places.split(LOGIT_ROWS):
            # The state that predicts a token stands one position before it.
            with torch.no_grad():
                logits = head_logits(self.model, hidden[None, some - 1 - first])[0]
            yield logits, tokens[some]

    def _decode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        cache = RowsCache(lengths, max(prompt.max_new_tokens for prompt in prompts) - 1)
        answers: list[list[int]] = [[] for _ in prompts]
        device = self.model.device
        with torch.no_grad(), rows_attention(self.model):
            tokens = self._next(torch.cat([self._fill(cache, row, prompts) for row in range(len(prompts))]))
            positions = torch.tensor(lengths, device=device)[:, None]
            while not self._take(prompts, answers, tokens.tolist()):
                cache.grow()
                self._choose(lengths)
                with one_token_each(cache.visible(device)):
                    hidden = self._forward(tokens[:, None], positions, cache)
                tokens = self._next(hidden)
                positions = positions + 1
        return answers

    def _fill(self, cache: RowsCache, row: int, prompts: Sequence[Prompt]) -> Tensor:
        """Run one prompt, but for what the row before it has read already; returns its last hidden state."""
        tokens, shared = prompts[row].token_ids, self._shared(prompts[:row], prompts[row])
        if shared:
            cache.share(row, shared)
            self.on_read(shared)
        for hidden in self._read(cache, row, tokens, shared):
            last = hidden[:, -1:].clone()  # a copy, or every prompt's states would stay in memory
        return last

    def _shared(self, before: Sequence[Prompt], prompt: Prompt) -> int:
        """With how many tokens of the last one before a prompt begins, rotated alike; 0 where that saves little."""
        tokens = prompt.token_ids
        if not before or stretches_with_length(self.model.config):
            return 0
        other = before[-1].token_ids
        if self._switch is not None:
            ours, theirs = self._switch.is_long(torch.tensor([len(tokens), len(other)])).tolist()
            if ours != theirs:
                return 0
        # The last token is always run, for what comes next.
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens[:-1], other, strict=False)))
        return same if 2 * same > len(tokens) else 0

    def _read(self, cache: RowsCache, row: int, tokens: Sequence[int], begin: int = 0) -> Iterator[Tensor]:
        """Run the tokens of one row from some on; gives their hidden states, of a long row piece by piece."""
        ids = torch.tensor([tokens], device=self.model.device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        for done in range(begin, len(tokens), READ_TOKENS):
            piece = slice(done, done + READ_TOKENS)
            self._choose([len(tokens)])
            with cache.filling(row, done):
                hidden = self._forward(ids[:, piece], positions[:, piece], cache)
            self.on_read(hidden.shape[1])
            yield hidden

    def _forward(self, ids: Tensor, positions: Tensor, cache: RowsCache) -> Tensor:
        # The part below the head has none of the hooks that guard a switching model's own caches.
        outputs = self.model.base_model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    def _next(self, hidden: Tensor) -> Tensor:
        return head_logits(self.model, hidden)[:, -1].float().argmax(-1)

    def _take(self, prompts: Sequence[Prompt], answers: list[list[int]], tokens: list[int]) -> bool:
        """Add a token to every unfinished answer; returns whether all have ended."""
        for prompt, answer, token in zip(prompts, answers, tokens, strict=True):
            if not self._ended(prompt, answer):
                answer.append(token)
        return all(self._ended(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))

    def _ended(self, prompt: Prompt, answer: list[int]) -> bool:
        if not answer:
            return False
        if len(answer) >= prompt.max_new_tokens or answer[-1] in self._ends:
            return True
        return bool(prompt.stop) and any(word in self.tokenizer.decode(answer) for word in prompt.stop)

    def _choose(self, lengths: Sequence[int]) -> None:
        """Set which rows are long in the rotary module; before each forward, since a head's forward asks again."""
        if self._switch is not None:
            long_rows = self._switch.is_long(torch.tensor(lengths))
            same = bool(long_rows.all() or not long_rows.any())
            # One side for all is the common case, and needs nothing on the device.
            self._switch.rotary.long_rows = bool(long_rows[0]) if same else long_rows.to(self.model.device)

    def _may_cross(self, prompt: Prompt) -> bool:
        if self._switch is None or not self._switch.factors.switches:
            return False
        last = len(prompt.token_ids) + prompt.max_new_tokens - 1  # the last new token is never run
        return len(prompt.token_ids) <= self._switch.switch_length < last

    def _generate(self, prompt: Prompt) -> list[int]:
        ids = torch.tensor([prompt.token_ids], device=self.model.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=min(self._ends, default=0),
            **({} if self._switch is None else {"allow_beyond": True}),
        )
        new: list[int] = output[0, ids.shape[1] :].tolist()
        return new

    def _text(self, tokens: list[int], stop: Sequence[str]) -> str:
        return cut_at_stop(str(self.tokenizer.decode(tokens, skip_special_tokens=True)), stop)

    @contextmanager
    def _out_of_memory(self, doing: str, longest: int) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise LongRopeError(
                f"out of memory while {doing} {longest:,} tokens ({self.model.dtype} on {self.model.device})",
                hint="lower --batch-tokens, use shorter lengths, or a GPU with more memory",
            ) from error


def torch_backend(
    info: ModelInfo,
    *,
    window: int,
    device: torch.device,
    factors: RescaleFactors | None = None,
    switch_length: int | None = None,
) -> tuple[TorchBackend, dict[str, Any]]:
    """A model with given factors or as its config says, and what of its settings the answers depend on."""
    loaded = models.load(info, device=device)
    model = loaded.model
    facts: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch.")}
    if factors is not None or carries_factors(info):
        model = load_switching(model, factors, switch_length=switch_length)
        switch = model.longrope2
        facts["switch_length"] = switch.switch_length
        values = {key: value for key, value in switch.factors.to_json().items() if key != "provenance"}
        facts["factors_digest"] = digest(values)
    return TorchBackend(model, loaded.tokenizer, window=window), facts


class VllmBackend:
    """A model folder or hub id, served by vLLM; each prompt on its side, where our plugin is installed with it."""

    batch_rows = 1024  # vLLM forms its own batches

    def __init__(self, info: ModelInfo, tokenizer: Any, *, window: int, seed: int = 0) -> None:
        self._vllm = require("vllm", extra="vllm", purpose="--backend vllm")
        if info.is_gguf:
            raise LongRopeError("--backend vllm needs a model folder or hub id, not a GGUF file")
        self.tokenizer, self.window = tokenizer, window
        source, options = pretrained_source(info)
        try:
            self._llm = self._vllm.LLM(
                model=source,
                revision=options.get("revision"),
                max_model_len=window,  # it refuses more; an answer that comes so far ends one token early
                seed=seed,
                trust_remote_code=False,
                disable_log_stats=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise LongRopeError(
                f"vLLM does not start with {info.name} ({' '.join(str(error).split())})",
                hint="its own messages above say more; --backend torch does not need it",
            ) from error

        self.on_read: Callable[[int], None] = quiet  # vLLM does not say how far it is
        settings = settings_of(self._llm.llm_engine.vllm_config)
        self.switch_length = settings and settings.switch_length
        """None where all prompts are on one side."""

    def batch_tokens(self) -> int:
        """vLLM looks after its memory itself."""
        return 1 << 30

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        """Greedy continuations."""
        parameters = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=prompt.max_new_tokens, stop=list(prompt.stop))
            for prompt in prompts
        ]
        tokens = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
        outputs = self._llm.generate(tokens, parameters, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        return [cut_at_stop(text, prompt.stop) for text, prompt in zip(texts, prompts, strict=True)]

    def score(self, spans: Sequence[TextSpan]) -> list[Score]:
        """Refused."""
        raise LongRopeError("suites that score texts do not run on vLLM", hint="leave --backend at its default")
