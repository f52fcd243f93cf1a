"""AdamW for weights in bfloat16, and with its state in host memory.

A bfloat16 weight is the upper half of a float32 number. The optimizer keeps the lower half, so that a small update is
never lost: both halves together are the float32 master weight, exactly. The two moments of a matrix take 8 bits a
number, as logarithms relative to the largest of a block. Blocks lie within a row (an index of the first dimension),
since processes share tensors by rows: a run may go on with more or fewer of them.

A parameter takes 2 bytes for the weight, 2 for its gradient, 2 for the lower half and 2.03 for the moments.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

BLOCK = 256
"""Numbers that share a scale."""
CODES_PER_OCTAVE = 8
"""A number is off by at most half a code: 4.4%."""
SIGN = 128
PIECE = 1 << 24
"""Numbers that are updated at once: some ten float32 copies of them are held for a moment."""
LOWER_HALF = 16


# Numbers in fewer bits


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Rows [R, N] of float32 as codes [R, N] of 8 bits and scales [R, blocks]; 0 stays 0.

    With a sign, numbers below 2^-16 of the largest become 0. Without, where they are squares to divide by, they become
    the smallest code: dividing by too much is harmless.
    """
    rows, length = values.shape
    blocks = F.pad(values, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    sizes = blocks.abs()
    scales = sizes.amax(-1)
    highest = SIGN - 1 if signed else 2 * SIGN - 1
    codes = (sizes / scales[..., None]).log2_().mul_(CODES_PER_OCTAVE).round_().add_(highest)
    codes = codes.clamp_(min=0) + SIGN * (blocks < 0) if signed else codes.clamp_(min=1)
    codes = codes.where(sizes > 0, 0.0)  # where a whole block is zero, its codes were not numbers
    return codes.to(torch.uint8).view(rows, -1)[:, :length], scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 numbers [R, N] that codes and scales stand for."""
    rows, length = codes.shape
    blocks = F.pad(codes, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    sizes = blocks & (SIGN - 1) if signed else blocks
    highest = SIGN - 1 if signed else 2 * SIGN - 1
    values = ((sizes.float() - highest) / CODES_PER_OCTAVE).exp2_().mul_(scales[..., None]).mul_(sizes > 0)
    if signed:
        values = torch.where(blocks >= SIGN, -values, values)
    return values.view(rows, -1)[:, :length]


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The float32 numbers whose nearest bfloat16 is `upper`, and whose other bits are `lower` (int16)."""
    bits = (upper.view(torch.int16).to(torch.int32) << LOWER_HALF) + lower
    return bits.view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 numbers, and what is left (int16): `join` gives back every bit."""
    bits = values.view(torch.int32)
    upper = (bits + (1 << (LOWER_HALF - 1))) >> LOWER_HALF
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << LOWER_HALF)).to(torch.int16)


# The optimizer


class CompactAdamW(torch.optim.AdamW):
    """AdamW for parameters of bfloat16 or float32, whose state may wait in host memory.

    Float32 parameters are updated as torch's own AdamW does it, with a state of the same names. Gradients are
    multiplied by `gradient_scale` first: clipped gradients of bfloat16 would be rounded twice.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], in_host: bool = False
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas)
        self.gradient_scale = 1.0
        self._in_host = in_host
        self._host_mesh: DeviceMesh | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        assert closure is None
        pieces = [piece for group in self.param_groups for p in group["params"] for piece in self._pieces(p, group)]
        if any(piece.weight.is_cuda for piece in pieces) and self._in_host:
            return self._overlapped(pieces)
        for piece in pieces:
            self._update(piece, piece.state)
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy a state into the one that is there: torch would give it the parameters' precision and device."""
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        for group, loaded in groups:
            for parameter, key in zip(group["params"], loaded["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    self._state_of(parameter)[name].copy_(value)
            group.update({name: value for name, value in loaded.items() if name != "params"})

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.dtype == torch.bfloat16:
                state["lower"] = self._zeros(parameter, parameter.shape, torch.int16)
            # A norm or bias has one number in each row, and few of them.
            coded = parameter.dtype == torch.bfloat16 and parameter.ndim > 1
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self._zeros(parameter, parameter.shape, torch.uint8 if coded else torch.float32)
                if coded:
                    blocks = -(-parameter[:1].numel() // BLOCK)
                    scales = torch.Size((parameter.shape[0], blocks))
                    state[f"{name}_scale"] = self._zeros(parameter, scales, torch.float32)
        return state

    def _zeros(self, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Zeros, shared by processes as the parameter is: by rows."""
        rows = local(parameter).shape[0]
        device = torch.device("cpu") if self._in_host else parameter.device
        pinned = device != parameter.device
        zeros = torch.zeros((rows, *shape[1:]), dtype=dtype, device=device, pin_memory=pinned)
        if not isinstance(parameter, DTensor):
            return zeros
        mesh = parameter.device_mesh
        if pinned:
            self._host_mesh = self._host_mesh or init_device_mesh("cpu", tuple(mesh.shape))
            mesh = self._host_mesh
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(zeros, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)

    def _pieces(self, parameter: Tensor, group: dict[str, Any]) -> "Iterator[_Piece]":
        """Rows of a parameter with what their update needs."""
        if parameter.grad is None:
            return
        state = self._state_of(parameter)
        state["step"] += 1
        weight, gradient = (local(x).reshape(len(local(x)), -1) for x in (parameter, parameter.grad))
        own = {name: local(x).reshape(len(weight), -1) for name, x in state.items() if name != "step"}
        rows = max(PIECE // max(weight.shape[1], 1), 1)
        for begin in range(0, len(weight), rows):
            part = slice(begin, begin + rows)
            yield _Piece(
                weight=weight[part],
                gradient=gradient[part],
                state={name: x[part] for name, x in own.items()},
                step=int(state["step"]),
                group=group,
            )

    def _overlapped(self, pieces: "Sequence[_Piece]") -> None:
        """Update on the GPU, while the state of the next piece comes and that of the one before goes."""
        device = pieces[0].weight.device
        coming, going, here = torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.current_stream(device)

        def fetch(piece: "_Piece") -> dict[str, Tensor]:
            with torch.cuda.stream(coming):
                return {name: x.to(device, non_blocking=True) for name, x in piece.state.items()}

        following = fetch(pieces[0])
        for number, piece in enumerate(pieces):
            here.wait_stream(coming)
            fetched, following = following, {}
            if number + 1 < len(pieces):
                following = fetch(pieces[number + 1])
            self._update(piece, fetched)
            going.wait_stream(here)
            with torch.cuda.stream(going):
                for name, x in fetched.items():
                    piece.state[name].copy_(x, non_blocking=True)
                    x.record_stream(here)
                    x.record_stream(going)
        going.synchronize()  # what reads the state next does so on the CPU, or on another stream

    def _update(self, piece: "_Piece", state: dict[str, Tensor]) -> None:
        """In float32, in the order of torch's AdamW, so that float32 parameters get the same bits."""
        group, is_split = piece.group, "lower" in state
        rate, (beta1, beta2) = group["lr"], group["betas"]
        gradient = piece.gradient.float()
        if self.gradient_scale != 1:
            gradient = gradient * self.gradient_scale
        weight = join(piece.weight, state["lower"]) if is_split else piece.weight
        mean, square = (_read(state, name) for name in ("exp_avg", "exp_avg_sq"))
        weight.mul_(1 - rate * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = rate / (1 - beta1**piece.step)
        divisor = (square.sqrt() / (1 - beta2**piece.step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(mean, divisor, value=-size)
        if is_split:
            upper, lower = split(weight)
            piece.weight.copy_(upper)
            state["lower"].copy_(lower)
        _write(state, "exp_avg", mean)
        _write(state, "exp_avg_sq", square)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some rows of a parameter, as this process holds them: views of [rows, numbers in a row]."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    step: int
    group: dict[str, Any]


def _read(state: dict[str, Tensor], name: str) -> Tensor:
    scales = state.get(f"{name}_scale")
    return state[name] if scales is None else decode(state[name], scales, signed=name == "exp_avg")


def _write(state: dict[str, Tensor], name: str, values: Tensor) -> None:
    if (scales := state.get(f"{name}_scale")) is not None:
        for kept, new in zip((state[name], scales), encode(values, signed=name == "exp_avg"), strict=True):
            kept.copy_(new)


def state_bytes(model: nn.Module) -> int:
    """What the optimizer keeps of all parameters that learn, whatever processes share them."""
    learning = [p for p in model.parameters() if p.requires_grad]
    coded = sum(p.numel() for p in learning if p.dtype == torch.bfloat16)
    return 2 * coded + 2 * coded * (BLOCK + 4) // BLOCK + 8 * (sum(p.numel() for p in learning) - coded)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, largest: float) -> float:
    """Limit the norm of all gradients and return what it was.

    Gradients of bfloat16 stay as they are; the optimizer multiplies them.
    """
    learning = [p for p in parameters if p.grad is not None]
    if not any(p.dtype == torch.bfloat16 for p in learning):
        total = nn.utils.clip_grad_norm_(learning, largest)
        # A norm of sharded gradients is a sharded number.
        return float(total.full_tensor() if isinstance(total, DTensor) else total)
    assert isinstance(optimizer, CompactAdamW)
    gradients = [local(p.grad) for p in learning if p.grad is not None]
    squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).square().sum()
    if isinstance(learning[0], DTensor):
        dist.all_reduce(squares, group=learning[0].device_mesh.get_group())
    norm = float(squares.sqrt())
    optimizer.gradient_scale = min(largest / (norm + 1e-6), 1.0)
    return norm
