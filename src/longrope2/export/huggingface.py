"""A plain transformers folder: one config.json that every engine reads right, weights, tokenizer, factors, card."""

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longrope2.console import ProgressLine, warn
from longrope2.errors import FactorsError, LongRopeError, ModelError
from longrope2.export.card import is_card
from longrope2.export.engines import forced_temperature
from longrope2.export.weights import Change, SourceModel, cast, check_room
from longrope2.factors import RescaleFactors
from longrope2.families import (
    FULL_ATTENTION,
    ODD,
    ORIGINAL,
    SLIDING_ATTENTION,
    Family,
    head_dim,
    live_config,
    read_config,
    rescaled_kind,
    rope_parameters,
)
from longrope2.files import atomic_folder, write_json, write_text
from longrope2.generation.saved import FACTORS_FILE, OWN_KEY, read_switch_length, write_factors
from longrope2.models import json_object, write_manifest

EXPORT = "export"
REPLACED = {"rope_parameters", "rope_scaling", "original_max_position_embeddings", OWN_KEY, "_name_or_path", "auto_map"}
"""What an export writes itself or leaves out; all else of a model's config.json stays."""
PER_LAYER = ("allow_global_per_layer_attribute_access",)
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
    # A link that the user named stays one. Not `resolve`, which raises an error of its own for links in a circle.
    output = Path(os.path.realpath(output))
    check_room(output, sum(sizes.values()))
    with atomic_folder(output) as folder:
        write_json(folder / "config.json", serving_config(source.config, factors, dtype=dtype))
        factors.save(folder / FACTORS_FILE)
        _write_tokenizer(source, folder, factors)
        _write_shards(source, folder, _shards(sizes, shard_bytes), dtypes, change)
        write_text(folder / CARD, card)
        write_manifest(folder)


def is_exported_folder(folder: Path) -> bool:
    """Whether `write_folder` wrote it: a trained model may have factors that come from an export, but no such card."""
    try:
        return is_card(folder / CARD) and is_export(RescaleFactors.load(folder / FACTORS_FILE))
    except FactorsError:
        return False


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names of tensors, in order, in groups of at most this many bytes."""
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
    config = json_object((source.folder or folder) / file.name)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows, too
    if isinstance(config.get("model_max_length"), int) and config["model_max_length"] < factors.target_length:
        config["model_max_length"] = factors.target_length
    write_json(file, config)


def with_provenance(factors: RescaleFactors, export: Mapping[str, Any]) -> RescaleFactors:
    """Factors with a record of how they were exported, by which `is_export` recognises them."""
    return replace(factors, provenance={**factors.provenance, EXPORT: dict(export)})


def is_export(factors: RescaleFactors) -> bool:
    """Whether factors come from an export, rather than from a training run or a search."""
    return EXPORT in factors.provenance


def with_forced_temperature(factors: RescaleFactors) -> RescaleFactors:
    """What a model with folded weights is run with; raises where folding cannot be exact."""
    if factors.short_attention_factor != factors.long_attention_factor:
        raise LongRopeError(
            f"the attention factors of short ({factors.short_attention_factor:g}) and long "
            f"({factors.long_attention_factor:g}) sequences differ, and weights can hold only one",
            hint="fold the temperature of --profile static-long, which has one",
        )
    forced = forced_temperature(factors)
    return replace(factors, short_attention_factor=forced, long_attention_factor=forced)


def serving_config(source: Mapping[str, Any], factors: RescaleFactors, *, dtype: str) -> dict[str, Any]:
    """The config.json of an export: `source` is the model's own, factors are those of the profile.

    Engines read different keys for the same thing, so every key is written, and all agree. What has nothing to do
    with RoPE stays as it is.
    """
    config = live_config(source)
    # Another switch length than the original window is something that only `longrope2.load` knows. It was measured
    # with the factors beside it, and says nothing of others.
    reading = read_config(source)
    family, before = ODD.get(reading.family, Family()), reading.rescaled
    same = before is not None and (before.factors, before.long_factors) == (factors.short, factors.long)
    switch_length = read_switch_length(config.to_dict()) if same and factors.switches else None
    write_factors(config, factors, switch_length or factors.original_length)
    written = config.to_dict()
    kind, parameters = rope_parameters(config)
    result = {name: value for name, value in source.items() if name not in REPLACED} | {
        **{
            name: written[name] for name in ("architectures", "rope_parameters", OWN_KEY, *PER_LAYER) if name in written
        },
        config.attribute_map.get("max_position_embeddings", "max_position_embeddings"): factors.target_length,
        "dtype": dtype,
        "torch_dtype": dtype,  # before transformers 4.56
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": _legacy_parameters(family, parameters, factors),
    }
    if not (
        getattr(config, "is_heterogeneous", False) or isinstance(getattr(type(config), "head_dim", None), property)
    ):
        result["head_dim"] = head_dim(config)  # several readers know no default
    if "partial_rotary_factor" in parameters:
        partial = parameters["partial_rotary_factor"]
        result |= {"partial_rotary_factor": partial, family.theta_key: factors.theta, family.partial_key: partial}
    local = written["rope_parameters"].get(SLIDING_ATTENTION) if kind == FULL_ATTENTION else None
    if local:
        result["rope_local_base_freq"] = local["rope_theta"]
    # transformers 4 switches only where it stands at the top; vLLM takes it for the default window, which is right
    # for `dual` alone. Phi-3 assumes 4096 where it is missing.
    if hasattr(type(config), ORIGINAL) or factors.switches:
        result[ORIGINAL] = factors.original_length
    without = {name: value for name, value in result.items() if name != "rope_scaling"}
    return result if _ropes(result) == _ropes(without) else without


def _ropes(config: Mapping[str, Any]) -> Any:
    """What a config says of RoPE in all layers. The older form is for one kind; some families take it for all."""
    try:
        live = live_config(config)
        kind, _ = rope_parameters(live)
        others = {name: value for name, value in live.rope_parameters.items() if kind not in (None, name)}
        return read_config(config), others
    except ModelError:  # as of families that only know the newer form
        return None


def _legacy_parameters(family: Family, parameters: Mapping[str, Any], factors: RescaleFactors) -> dict[str, Any]:
    """The `rope_scaling` of transformers 4 and mlx-lm; transformers 5 prefers it to rope_parameters, too."""
    legacy = {"type": "longrope", **copy.deepcopy(dict(parameters))}
    forced = forced_temperature(factors)
    if family.legacy_keys and factors.long_attention_factor == factors.short_attention_factor == forced:
        # transformers 4 accepts these keys of such a family and no others. What it then assumes for the attention
        # factor is right only here; elsewhere its refusal is better than a wrong temperature.
        return {name: legacy[name] for name in family.legacy_keys}
    return legacy


def config_problems(config: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Which RoPE keys of an exported config are missing or differ from what an export writes, in words."""
    problems = []
    for key in ("rope_theta", "head_dim", "max_position_embeddings", "original_max_position_embeddings"):
        problems += _difference(key, config.get(key), expected.get(key))
    for key in ("partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct"):
        if key in expected:
            problems += _difference(key, config.get(key), expected[key])
    for key in ("rope_parameters", "rope_scaling"):
        if key not in expected:
            continue
        found, wanted = (_rescaled_part(source.get(key)) for source in (config, expected))
        if found is None:
            problems.append(f"{key} is missing")
            continue
        for name, value in wanted.items():
            problems += _difference(f"{key}.{name}", found.get(name), value)
    return problems


def _rescaled_part(parameters: Any) -> Any:
    if not isinstance(parameters, Mapping):
        return None
    kind = rescaled_kind(name for name, value in parameters.items() if isinstance(value, Mapping))
    return parameters[kind] if kind else parameters


def _difference(name: str, found: Any, wanted: Any) -> list[str]:
    if found == wanted:
        return []
    if found is None:
        return [f"{name} is missing"]
    if wanted is None:
        return [f"{name} should not be there"]
    if isinstance(wanted, list):
        return [f"{name} differs from the factors"]
    return [f"{name} is {found!r}, not {wanted!r}"]
