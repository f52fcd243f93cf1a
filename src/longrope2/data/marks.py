"""What a tokenizer puts around a document, and what tells one tokenizer from another."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longrope2.codec import opens_with_bos
from longrope2.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The tokens that open and close a document, and the one that fills up a row."""

    bos: int | None
    """Opens every piece of a document, so that a row begins as a prompt does; None: nothing opens it."""
    eos: int | None
    """Closes a document where it really ends, never where it was cut."""
    pad: int
    """Never attended to by a document and never a label."""

    def size(self, num_tokens: int, *, ends: bool) -> int:
        """The tokens that a piece of `num_tokens` takes in a row."""
        return (self.bos is not None) + num_tokens + (ends and self.eos is not None)


def document_marks(tokenizer: "PreTrainedTokenizerBase") -> Marks:
    """The tokenizer's own rule: BOS only where it opens texts with one, or where there is no EOS to part them."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None and eos is None:
        raise DataError(
            "the tokenizer has neither a BOS nor an EOS token, so packed documents would run together",
            hint="set tokenizer.eos_token to the token that ended documents when the model was trained",
        )
    # Not the tokenizer's own padding token: that may have been added later, and the model does not have it then.
    pad = bos if eos is None else eos
    return Marks(bos=bos if eos is None or opens_with_bos(tokenizer) else None, eos=eos, pad=pad)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of everything that decides which tokens a text becomes."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left over from whoever called it last; not a part of what it is, and never used here.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return "sha256:" + hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def plain_encoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Sequence[str]], list[list[int]]]:
    """A function from texts to their tokens, no special token among them, on as many threads as allowed."""
    if not tokenizer.is_fast:

        def encode_slowly(texts: Sequence[str]) -> list[list[int]]:
            options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
            return [tokenizer(text, verbose=False, **options).input_ids for text in texts]

        return encode_slowly

    from tokenizers import Tokenizer

    # A copy, since these settings would otherwise stay behind on the caller's tokenizer.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    # A text that speaks of "<s>" means the three characters, not the special token.
    backend.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[list[int]]:
        # Without offsets, which nobody needs here, it is 1.7 times as fast.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode
