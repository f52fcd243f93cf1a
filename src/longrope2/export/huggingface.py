"""A plain transformers folder: config for every engine, sharded safetensors, tokenizer, factors, card."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longrope2.console import ProgressLine, warn
from longrope2.errors import FactorsError, ModelError
from longrope2.export.card import is_card
from longrope2.export.output import check_room
from longrope2.export.serving_config import is_export, serving_config
from longrope2.export.weights import Change, SourceModel, cast
from longrope2.factors import RescaleFactors
from longrope2.files import atomic_folder, write_json, write_text
from longrope2.generation.saved import FACTORS_FILE

CARD = "README.md"
SHARD_BYTES = 4 << 30
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "LICENSE",
    "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt",
)  # fmt: skip

TEMPLATES = "additional_chat_templates"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these is what makes a tokenizer."""


def write_folder(
    source: SourceModel,
    factors: RescaleFactors,
    output: Path,
    *,
    dtype: str,
    dtypes: Mapping[str, torch.dtype],
    change: Change,
    card: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the export; `change` is applied to every tensor on its way to its own of `dtypes`, `dtype` being most."""
    sizes = {name: tensor.num_values * dtypes[name].itemsize for name, tensor in source.tensors.items()}
    check_room(Path(os.path.realpath(output)), sum(sizes.values()))
    with atomic_folder(output) as folder:
        write_json(folder / "config.json", serving_config(source.config, factors, dtype=dtype))
        factors.save(folder / FACTORS_FILE)
        _write_tokenizer(source, folder, factors)
        _write_shards(source, folder, _shards(sizes, shard_bytes), dtypes, change)
        write_text(folder / CARD, card)


def is_exported_folder(folder: Path) -> bool:
    """Whether `write_folder` wrote it: a trained model may have factors that come from an export, but no such card."""
    try:
        return is_card(folder / CARD) and is_export(RescaleFactors.load(folder / FACTORS_FILE))
    except FactorsError:
        return False


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names of tensors, in order, in groups of at most so many bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_shards(
    source: SourceModel, folder: Path, shards: list[list[str]], dtypes: Mapping[str, torch.dtype], change: Change
) -> None:
    from safetensors.torch import save_file

    progress = ProgressLine(len(source.tensors), "tensors")
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        content = {}
        for name in names:
            content[name] = cast(name, change(name, source.tensors[name].read()), dtypes[name]).contiguous()
            total += content[name].nbytes
            places[name] = file
            progress.update(len(places))
        save_file(content, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _write_tokenizer(source: SourceModel, folder: Path, factors: RescaleFactors) -> None:
    """The model's own files, word for word, where it has any: no version of transformers between."""
    if source.folder is None:
        source.tokenizer().save_pretrained(folder)
    else:
        for name in COMPANIONS:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)
        if (source.folder / TEMPLATES).is_dir():
            shutil.copytree(source.folder / TEMPLATES, folder / TEMPLATES)
    if not any((folder / name).is_file() for name in VOCABULARIES):
        warn(
            f"this export has no tokenizer, since {source.info.name} has none of {', '.join(VOCABULARIES)}; "
            "copy the base model's into it"
        )
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{source.info.name}: its tokenizer_config.json is not valid JSON ({error})",
            hint="copy or download it again",
        ) from error
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows, too
    if isinstance(config.get("model_max_length"), int) and config["model_max_length"] < factors.target_length:
        config["model_max_length"] = factors.target_length
    write_json(file, config)
