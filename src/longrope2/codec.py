"""Text that is put together from tokens: ids of a text in its place, and what they read as."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longrope2.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTENCE_END = re.compile(r"[.!?][\"'”’)]*\s*$")


def opens_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """The tokenizer's own rule: many have a BOS token and do not put it before a text."""
    return tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("x").input_ids[:1]


class Codec:
    """One tokenizer: text to ids as they stand in a given place, and ids back to text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.bos: int | None = tokenizer.bos_token_id
        self.opening: list[int] = [self.bos] if self.bos is not None and opens_with_bos(tokenizer) else []

    def ids(self, text: str, *, after: str = "") -> list[int]:
        """The ids of `text` in the middle of a text; at its very start where `after` is empty.

        Some tokenizers (SentencePiece's) put a space before the first word they are given. So `after` is encoded in
        front of the text and its ids are cut off again: the space, if any, went to it.
        """
        before, whole = self._encode(after), self._encode(after + text)
        return whole[len(before) :] if whole[: len(before)] == before else self._encode(text)

    def text(self, ids: Sequence[int]) -> str:
        """What ids read as."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        # A book that contains "<s>" means the three characters, not the special token.
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids

    def split_answer(self, prompt: str, value: str) -> tuple[list[int], list[int]]:
        """The ids of the prompt and of the value after it, where no token belongs to both."""
        space = "" if prompt[-1].isspace() else " "
        prompt_ids = self.ids(prompt, after="a")
        prompt_text = self.text(prompt_ids).rstrip()
        # As one text first, since that is what a model has seen; apart where a token would span the seam.
        apart = prompt_ids + self.ids(space + value, after="a")
        for ids in (self.ids(prompt + space + value, after="a"), apart):
            # The shortest tail that reads as the value: a lone space before it belongs to the prompt.
            for start in range(len(ids) - 1, max(0, len(ids) - len(value) - 2), -1):
                if self.text(ids[start:]).strip() == value and self.text(ids[:start]).rstrip() == prompt_text:
                    return ids[:start], ids[start:]
        raise DataError(
            f"the tokenizer has no separate tokens for the answer {value!r}: it reads back "
            f"{self.text(apart)!r} for {prompt + space + value!r}",
            hint="needle documents need a tokenizer that can write digits",
        )

    def place(self, ids: Sequence[int], depth: float) -> int:
        """The index near `depth` to insert a sentence at: where a sentence ends if one does, or a word."""
        wanted = round(depth * len(ids))
        if depth in (0.0, 1.0):
            return wanted
        # Half a percent of the text, but enough to meet a word in a short one.
        reach = min(128, max(16, len(ids) // 200))
        nearby = range(max(1, wanted - reach), min(len(ids), wanted + reach + 1))
        words = []
        for index in sorted(nearby, key=lambda index: abs(index - wanted)):
            # Decoders drop the space before the first token they see, so both texts start a little earlier.
            before = self.text(ids[max(0, index - 8) : index])
            through = self.text(ids[max(0, index - 8) : index + 1])
            if through.startswith(before) and through[len(before) :][:1].isspace():
                if SENTENCE_END.search(before):
                    return index
                words.append(index)
        return words[0] if words else wanted
