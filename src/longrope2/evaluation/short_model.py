"""The engine as a language model of lm-evaluation-harness."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from longrope2.errors import LongRopeError
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.suite import Sample, TextSpan

NEW_TOKENS = 256  # the harness's own default


class EngineModel(TemplateLM):
    """Every process of ours asks for everything and gets everything: to the harness there is only one."""

    def __init__(self, engine: EvaluationEngine, *, max_length: int) -> None:
        super().__init__()
        self._engine, self.max_length = engine, max_length
        self.tokenizer = engine.backend.tokenizer
        self.label = "short"

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        end: int = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's records."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Opened as the tokenizer opens a text, unless the text has its opening (a chat template's) already."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The tokenizer's own; an unfinished last message of the assistant goes on."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        spans = [self._span(context, continuation) for _, context, continuation in requests]
        return [(-score.nll, score.exact) for score in self._engine.scores(spans, self.label)]

    def _span(self, context: Sequence[int], continuation: Sequence[int]) -> TextSpan:
        if not 0 < len(continuation) <= self.max_length:
            raise LongRopeError(f"{self.label}: an answer of {len(continuation)} tokens cannot be scored")
        # The last token is only predicted, so the window holds one more; what is too long loses its beginning.
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        return TextSpan(token_ids=tokens, start=len(tokens) - len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Whole texts, in windows that do not overlap."""
        spans, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, windows):
                spans.append(self._span(context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._engine.scores(spans, self.label), strict=True):
            totals[owner] -= score.nll
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers."""
        return self._engine.answers([self._sample(i, *request.args) for i, request in enumerate(requests)], self.label)

    def _sample(self, index: int, context: str, options: dict[str, Any]) -> Sample:
        if options.get("do_sample") and options.get("temperature", 1) > 0:
            raise LongRopeError(f"{self.label}: it samples its answers, and answers here are greedy")
        stop = options.get("until") or []
        new_tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NEW_TOKENS)
        new_tokens = min(new_tokens, self.max_length // 2)
        tokens = self.tok_encode(context)[-(self.max_length - new_tokens) :]
        return Sample(
            suite="short",
            task=self.label.removeprefix("short "),
            length=self.max_length,
            index=index,
            prompt=tuple(tokens),
            references=(),
            max_new_tokens=new_tokens,
            score=None,  # by the harness
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
