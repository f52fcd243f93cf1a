"""Which weights learn: all of them, all but some, or low-rank additions that are merged in at the end."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from longrope2.errors import LongRopeError, require
from longrope2.training.config import Also
from longrope2.training.four_bit import FourBitLinear, unpack

ADAPTER = "default"
LORA_SCALE = 2
"""What a low-rank product is multiplied by (peft's lora_alpha / rank)."""


def matching(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """The parameters that patterns such as `*mlp*` name; a pattern must name some, all together not every one."""
    # A weight that two modules share goes by both names, and is named with both.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in parameters if fnmatchcase(name, pattern)}
        if not names:
            raise LongRopeError(
                f"--freeze {pattern!r} names no parameter of the model",
                hint=f"its parameters are called {_examples(list(parameters))}",
            )
        found |= names
    chosen = {id(parameters[name]) for name in found}
    found = {name for name, parameter in parameters.items() if id(parameter) in chosen}
    if len(found) == len(parameters):
        raise LongRopeError(
            f"--freeze {' '.join(map(repr, patterns))} leaves no parameter to train",
            hint=f"name fewer of {_examples(list(parameters))}",
        )
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep the parameters that the patterns name as they are."""
    names = matching(model, patterns)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or many of them."""
    # A tensor may hold the norms of all heads (Cohere) or the biases of all experts (gpt-oss): two dimensions as well.
    return parameter.ndim >= 2 and "norm" not in name and not name.endswith("bias")


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """The layers that get additions: all linear ones but the head; experts, which lie in one tensor, get none."""
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def learning_beside(model: Any, also: Sequence[Also]) -> set[str]:
    """The parameters that learn themselves beside low-rank additions; a tied head goes by the embedding's name."""
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    return {
        name
        for name, parameter in model.named_parameters()
        if ("norms" in also and "norm" in name) or ("embeddings" in also and id(parameter) in embeddings)
    }


def add_lora(model: nn.Module, rank: int, also: Sequence[Also] = ()) -> None:
    """Freeze the model but for what `also` names; its linear layers get low-rank additions, which start at zero."""
    beside = learning_beside(model, also)
    peft = require("peft", extra="train", purpose="LoRA")
    config = peft.LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules=list(linear_layers(model)))
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name in beside:
        model.get_parameter(name).requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:  # few, and learning: float32 where the frozen ones are bfloat16
            parameter.data = parameter.data.float()


def merged(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The full weights of a model with low-rank additions, as if it had been trained without; W + s·B·A."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        layer, is_base, kind = name.rpartition(".base_layer.")
        if is_base and kind == "scales":
            continue
        if is_base and kind == "weight":
            base: Any = model.get_submodule(f"{layer}.base_layer")
            if isinstance(base, FourBitLinear):
                tensor = unpack(tensor, state[f"{layer}.base_layer.scales"], base.in_features)
            scale = _scaling(model.get_submodule(layer))
            low, high = (state[f"{layer}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
            tensor = tensor + scale * (high @ low)
        result[f"{layer}.{kind}" if is_base else name] = tensor
    return result


def _scaling(layer: Any) -> float:
    return float(layer.scaling[ADAPTER])


def _examples(names: list[str]) -> str:
    return ", ".join([*names[:2], "…", names[-1]])
