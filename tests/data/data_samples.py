"""Corpora in memory and small tokenizers, shared by the tests of the data package."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from longrope2.data.config import Mix, PlanConfig, Source
from longrope2.data.corpus import Corpus
from longrope2.data.plan import make_plan
from longrope2.records import Marks

MARKS = Marks(bos=1, eos=2, pad=3)
FIRST_TOKEN = 10
STRIDE = 1_000_000  # between the tokens of two documents, so that every token shows where it comes from


class MemoryCorpus(Corpus):
    """Documents of given lengths whose tokens name document and place."""

    def __init__(self, lengths: list[int], key: str = "memory") -> None:
        object.__setattr__(self, "given", np.array(lengths, dtype=np.int64))
        super().__init__(key=key, path=Path(key), num_documents=len(lengths), num_tokens=sum(lengths))

    @cached_property
    def lengths(self) -> Any:
        return self.given

    def tokens(self, document: int) -> Any:
        return np.arange(self.given[document], dtype=np.int32) + FIRST_TOKEN + STRIDE * document


def plan_of(lengths: list[int], marks: Marks = MARKS, source: Source | None = None, **options: Any) -> Any:
    """A plan over one corpus in memory, with that corpus."""
    corpus = MemoryCorpus(lengths)
    config = PlanConfig(**{"target_length": 64, "original_length": 16, **options})
    mix = Mix(sources=(source or Source(path="memory"),), plan=config)
    return make_plan(mix, [corpus], marks=marks), corpus


def word_tokenizer(*, bos: bool = True, eos: bool = True, opens: bool = True) -> Any:
    """A tokenizer with a token for each of a few words."""
    words = ["<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos and opens:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"unk_token": "<unk>"} | ({"bos_token": "<s>"} if bos else {}) | ({"eos_token": "</s>"} if eos else {})
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
