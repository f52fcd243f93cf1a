"""The end product of a run: a plain transformers folder with longrope in its config, whole or absent."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import atomic_folder, write_json
from longrope2.generation.saved import FACTORS_FILE, warn_of_single_attention_factor, write_factors
from longrope2.shapes import misfit
from longrope2.training.trainable import merged

SHARD_SIZE = "5GB"
RECORD = "training.json"
INDEX = "model.safetensors.index.json"
SHOWN = {"config": {"save_dtype": str}, "steps": int, "tokens": int, "seconds": float, "losses": dict, "needles": dict}
"""What must stand in a record for it to be shown."""
LOSSES = {...: float}
NEEDLES = {"needles": [{"length": int, "depth": float, "exact": float}]}
"""What of the first and of the last step, where any was kept."""


def write_product(
    model: Any,
    tokenizer: Any,
    factors: RescaleFactors,
    folder: Path,
    record: dict[str, Any],
    here: World,
    *,
    dtype: torch.dtype,
) -> None:
    """Write the trained model; every process takes part, since each may hold a part of the weights."""
    state = full_state(model, dtype)
    if not here.is_main:
        return
    try:
        with atomic_folder(folder) as temporary:  # what is there is damaged, or of another dtype
            _write(model, tokenizer, factors, temporary, state, dtype)
            factors.save(temporary / FACTORS_FILE)
            write_json(temporary / RECORD, record)
    except (OSError, SafetensorError) as error:
        raise LongRopeError(
            f"{folder}: the trained model cannot be written ({error})",
            hint="free some space and run the same command again: the last checkpoint has all steps",
        ) from error


def product_problem(folder: Path, *, dtype: str) -> str | None:
    """Why a folder is not the whole product of a run, with weights of this type; None if it is."""
    try:
        record, *_ = (_read(folder / name) for name in (RECORD, FACTORS_FILE, "config.json", "tokenizer_config.json"))
        if problem := record_misfit(record):
            return f"{RECORD} is damaged: {problem}"
        files = _read(folder / INDEX)["weight_map"].values() if (folder / INDEX).exists() else ["model.safetensors"]
        for name in set(files):
            with safe_open(folder / name, framework="pt"):  # refuses one whose size is not what its header says
                pass
        if (saved := record["config"]["save_dtype"]) != dtype:
            return f"its weights are {saved}, {dtype} is asked for"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return str(error)
    return None


def record_misfit(record: dict[str, Any]) -> str | None:
    """Why a record cannot be shown; None if it can."""
    ends = {"losses": LOSSES, "needles": NEEDLES}
    shape = {name: {"first": part, "last": part} for name, part in ends.items() if record.get(name)}
    return misfit(record, SHOWN | shape)


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    return values


def full_state(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights on the CPU, additions merged in; on the main process only, empty elsewhere."""
    gathered: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not gathered:
        return {}
    state = {name: tensor.to(dtype) for name, tensor in merged(gathered, model).items()}
    # By now a weight that two modules share is two; transformers writes it once if it is one tensor.
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            state[name] = state[first]
    return state


def _write(
    model: Any, tokenizer: Any, factors: RescaleFactors, folder: Path, state: dict[str, Tensor], dtype: torch.dtype
) -> None:
    warn_of_single_attention_factor(factors)
    write_factors(model.config, factors, factors.original_length)
    model.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_SIZE)
    model.config.dtype = dtype  # the one of the weights in the folder; training keeps float32
    model.config.save_pretrained(folder)
    tokenizer.model_max_length = factors.target_length
    tokenizer.save_pretrained(folder)
