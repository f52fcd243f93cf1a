"""The end product of a run: a plain transformers folder with longrope in its config, whole or absent."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import write_json
from longrope2.generation.saved import warn_of_single_attention_factor, write_factors
from longrope2.training.trainable import merged

SHARD_SIZE = "5GB"
RECORD = "training.json"
FACTORS = "factors.json"


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
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(model, tokenizer, factors, temporary, state, dtype)
        factors.save(temporary / FACTORS)
        write_json(temporary / RECORD, record)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise LongRopeError(
            f"{folder}: the trained model cannot be written ({error})",
            hint="free some space and run the same command again: the last checkpoint has all steps",
        ) from error


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
