"""The same prompts through vLLM, where it is installed: for speed, not for the exact switch."""

from collections.abc import Sequence
from typing import Any

from longrope2.errors import LongRopeError, require
from longrope2.evaluation.suite import Prompt, TextSpan, cut_at_stop
from longrope2.models import ModelInfo, pretrained_source
from longrope2.perplexity import Score

ONE_SIDE = "vLLM uses the long factors at every length once its window exceeds the original one"


class VllmBackend:
    """A model folder or hub id, served in this process."""

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
                hint="its own messages above say more; --backend torch does without it",
            ) from error

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
        raise LongRopeError(
            "suites that score texts (perplexity, short) do not run on vLLM", hint="leave --backend at its default"
        )
