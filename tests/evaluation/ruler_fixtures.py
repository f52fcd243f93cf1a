"""What NVIDIA's generator was given, for tests of the same name."""

import json
import lzma
from functools import cache
from itertools import accumulate
from pathlib import Path

from longrope2.evaluation.ruler import haystack

FOLDER = Path(__file__).parent / "fixtures" / "ruler"


@cache
def fixture(name):
    return json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))


@cache
def neox_tokenizer():
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fixture("tokenizer"))))


@cache
def golden_haystack():
    words = haystack.words_of(fixture("haystack")["text"])
    breaks = haystack.Breaks(list(accumulate(fixture("haystack")["gaps"])), fixture("haystack")["endings"])
    return haystack.Haystack(words, breaks)


def question_files(folder):
    files = {}
    for task, name in (("qa_1", "squad"), ("qa_2", "hotpotqa")):
        files[task] = folder / f"{name}.json"
        files[task].write_text(json.dumps(fixture(name)), encoding="utf-8")
    return files
