"""A tokenizer as llama.cpp stores it: byte-level BPE with the name of its text split, or sentencepiece with scores."""

import json
import re
from typing import TYPE_CHECKING, Any

from longrope2.errors import ModelError, damage, require
from longrope2.export.weights import SourceModel
from longrope2.gguf_model import GPT4O_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT
from longrope2.models import json_object

if TYPE_CHECKING:
    from gguf import GGUFWriter

# Kinds of tokens, as in llama.cpp.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# (text split, whether whole words of the vocabulary go before merges) → llama.cpp's name for both.
SPLITS = {
    (LLAMA3_SPLIT, True): "llama-bpe",
    (LLAMA3_SPLIT, False): "dbrx",
    (QWEN2_SPLIT, False): "qwen2",
    (GPT4O_SPLIT, False): "gpt-4o",
}


def add_tokenizer(writer: "GGUFWriter", source: SourceModel, vocab_size: int) -> None:
    """Write a model's tokenizer into a GGUF file, or raise ModelError where llama.cpp has nothing like it."""
    tokenizer = source.tokenizer()
    with damage(f"{source.info.name}: its tokenizer is damaged", hint="copy or download tokenizer.json again"):
        _add(writer, source, tokenizer, vocab_size)
    _add_special_tokens(writer, tokenizer, vocab_size)


def _add(writer: "GGUFWriter", source: SourceModel, tokenizer: Any, vocab_size: int) -> None:
    content = _content(source, tokenizer)
    model = content["model"]
    if model["type"] != "BPE":
        raise ModelError(f"tokenizers of kind {model['type']} cannot be written to a GGUF file; only BPE can")
    tokens, kinds = _tokens(content, vocab_size)
    if model.get("byte_fallback"):
        _add_sentencepiece(writer, source, content, tokens, kinds)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(content))
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in _merges(model)])


def _content(source: SourceModel, tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json as it lies in the folder: transformers puts rules of the model's family into what it loads."""
    file = source.folder / "tokenizer.json" if source.folder else None
    if file and file.is_file():
        return json_object(file)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("the model's tokenizer has no fast form, from which a GGUF file could be made")
    return json.loads(backend.to_str())


def _tokens(content: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Every token's text and kind; rows of the embedding that no token uses get a name that no text has."""
    found = {number: (text, NORMAL) for text, number in content["model"]["vocab"].items()}
    unknown = content["model"].get("unk_token")
    for number, (text, _) in found.items():
        if text == unknown:
            found[number] = (text, UNKNOWN)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", text) and content["model"].get("byte_fallback"):
            found[number] = (text, BYTE)
    for added in content["added_tokens"]:
        if found.get(added["id"], ("", NORMAL))[1] != UNKNOWN:
            found[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    if max(found) >= vocab_size:
        raise ModelError(f"the tokenizer has {max(found) + 1:,} tokens, the model only {vocab_size:,}")
    rows = [found.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocab_size)]
    return [text for text, _ in rows], [kind for _, kind in rows]


def _merges(model: dict[str, Any]) -> list[list[str]]:
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]


def _split_name(content: dict[str, Any]) -> str:
    """llama.cpp's name for how this tokenizer splits text before merging."""
    rule = content["pre_tokenizer"] or {}
    parts = rule.get("pretokenizers", [rule])
    kinds = [part.get("type") for part in parts]
    if parts[-1].get("add_prefix_space"):
        kinds.append("prefix space")  # nothing below matches it
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        pattern = parts[0]["pattern"].get("Regex")
        name = SPLITS.get((pattern, bool(content["model"].get("ignore_merges"))))
        if name and parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]:
            return name
    raise ModelError(
        "the way this tokenizer splits text has no name known here, and a guess would change tokens",
        hint="known: the splits of GPT-2, SmolLM, StarCoder, LLaMA 3, Qwen 2, GPT-4 and GPT-4o, and sentencepiece",
    )


def _add_sentencepiece(
    writer: "GGUFWriter", source: SourceModel, content: dict[str, Any], tokens: list[str], kinds: list[int]
) -> None:
    """Pieces with scores: llama.cpp merges the pair that makes the piece of the best score first."""
    scores, prefix = _scores(content), _prefixes_space(content)
    trained = _trained_pieces(source)
    if trained is not None:
        scores = {piece.piece: piece.score for piece in trained.pieces}
        prefix = trained.normalizer_spec.add_dummy_prefix
        for number, piece in enumerate(trained.pieces):
            if kinds[number] == NORMAL:
                kinds[number] = piece.type  # the same numbers as in GGUF
    worst = min(scores.values(), default=0.0) - 1
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    # In added tokens the mark of a space is a space.
    spaced = [t.replace("▁", " ") if kind == USER_DEFINED else t for t, kind in zip(tokens, kinds, strict=True)]
    writer.add_token_list(spaced)
    writer.add_token_scores([scores.get(t, worst) if k == NORMAL else 0.0 for t, k in zip(tokens, kinds, strict=True)])
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(prefix)


def _trained_pieces(source: SourceModel) -> Any:
    """The model that sentencepiece trained, where the folder still has it."""
    file = source.folder / "tokenizer.model" if source.folder else None
    if file is None or not file.is_file():
        return None
    require("google.protobuf", extra="export", purpose="reading a sentencepiece model")
    proto = require("sentencepiece.sentencepiece_model_pb2", extra="export", purpose="reading a sentencepiece model")
    model = proto.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's own, of a module that may not be there
        raise ModelError(f"{file}: not a sentencepiece model ({error})") from error
    return model


def _scores(content: dict[str, Any]) -> dict[str, float]:
    """Scores that order pieces as the merges of tokenizer.json do."""
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(_merges(content["model"])):
        scores.setdefault(left + right, -float(rank))
    return scores


def _prefixes_space(content: dict[str, Any]) -> bool:
    normalizer, splitter = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Prepend" for step in steps) or (
        splitter.get("type") == "Metaspace" and splitter.get("prepend_scheme", "always") != "never"
    )


def _add_special_tokens(writer: "GGUFWriter", tokenizer: Any, vocab_size: int) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None and number < vocab_size:
            getattr(writer, f"add_{name}_token_id")(number)
    encoded = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and encoded[-1] == tokenizer.eos_token_id)
    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # several
        templates = [{"name": name, "template": template} for name, template in templates.items()]
    if templates:
        writer.add_chat_template(templates)
