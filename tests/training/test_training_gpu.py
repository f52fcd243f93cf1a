"""On a GPU: the kernels of training, bfloat16 over float32 master weights, recomputing, resuming."""

from itertools import pairwise

import pytest
import torch
from test_training_loop import ALONE, row
from training_samples import make_sample

from conftest import family_model
from longrope2 import attention, pieces
from longrope2.attention import packed_attention
from longrope2.kernels import Heads, agrees, choose_kernel, reference_attention, varlen_agrees
from longrope2.training import host, optimizer
from longrope2.training.config import LEVELS, TrainConfig
from longrope2.training.log import LOG, read_steps
from longrope2.training.loop import train_loop
from longrope2.training.mixed import mixed_window
from longrope2.training.optimizer import CompactAdamW
from test_rotary import make_factors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (32, 8, 128), (32, 32, 96)])
def test_the_chosen_kernel_is_right_in_both_directions(heads, kv_heads, size):
    of = Heads(torch.device("cuda"), torch.bfloat16, heads, kv_heads, size)
    kernel = choose_kernel(of, training=True)
    assert kernel.name in ("cudnn", "flash")
    assert agrees(kernel, of, training=True)
    assert varlen_agrees(of, training=True)


@pytest.mark.parametrize("launch_flops", [0, 10**15], ids=["a kernel each", "one kernel"])
def test_packed_documents_are_those_of_the_reference(launch_flops, monkeypatch):
    monkeypatch.setattr(attention, "LAUNCH_FLOPS", launch_flops)
    ends, scale = [0, 1200, 1201, 1700, 4000, 4100], 64**-0.5
    tensors = [x.requires_grad_() for x in Heads(torch.device("cuda"), torch.bfloat16, 9, 3, 64).random(ends[-1])]
    output = packed_attention(*tensors, [ends], scale=scale)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    pieces = [[x[:, :, start:stop] for x in exact] for start, stop in pairwise(ends)]
    reference = torch.cat([reference_attention(*piece, scale=scale) for piece in pieces], dim=2)
    upstream = torch.randn_like(output)
    mine = [output, *torch.autograd.grad(output, tensors, upstream)]
    expected = [reference, *torch.autograd.grad(reference, exact, upstream.double())]
    for ours, true in zip(mine, expected, strict=True):
        assert float((ours - true).norm() / true.norm()) < 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_recomputing_gives_the_same_gradients(family):
    found = {}
    for recompute in (False, True):
        model = family_model(family).cuda().train()
        batch = row(0).to(torch.device("cuda"))
        with mixed_window(model, make_factors(model), recompute=recompute) as mixed, mixed.rows_of(batch):
            mixed(batch).backward()
        found[recompute] = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in found[True].items():
        torch.testing.assert_close(gradient, found[False][name], msg=name)


def config(**options):
    return TrainConfig(batch_rows=2, learning_rate=1e-2, warmup_steps=2, save_every=2, **options).resolved()


def trained(folder, *, device, steps=4, memory="plain", recompute=False, waits="cuda"):
    model = family_model("llama").to(waits if device == "cuda" else device)
    if LEVELS[memory].compact:
        model = model.bfloat16()
    chosen = config(steps=steps, recompute=recompute or LEVELS[memory].frugal, memory=memory)
    results = train_loop(model, make_factors(model), row, chosen, folder, ALONE, device=torch.device(device))
    return model, [result.loss for result in results]


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_are_those_of_float32_and_master_weights_stay_float32(tmp_path, recompute):
    _, expected = trained(tmp_path / "cpu", device="cpu")
    model, losses = trained(tmp_path / "gpu", device="cuda", recompute=recompute)
    assert losses == pytest.approx(expected, rel=2e-2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("memory", ["plain", "least"])
def test_a_model_in_host_memory_goes_to_the_gpu_layer_by_layer(tmp_path, memory):
    _, expected = trained(tmp_path / "there", device="cuda", memory=memory)
    model, losses = trained(tmp_path / "moved", device="cuda", memory=memory, waits="cpu")
    assert losses == expected
    assert {p.device.type for p in model.parameters()} == {"cuda"}


def test_the_memory_of_a_run_is_its_own(tmp_path):
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # as a search before it
    make_sample(tmp_path / "sample").run(tmp_path / "run")
    assert 0 < max(line.memory_gib for line in read_steps(tmp_path / "run" / LOG)) < 1


@pytest.mark.parametrize("memory", ["auto", "host", "least", "4bit"])
def test_lora_keeps_frozen_weights_in_bfloat16(tmp_path, memory, monkeypatch):
    kinds = []

    def watched(model, *arguments, **hooks):
        kinds.extend((p.requires_grad, p.dtype) for p in model.parameters())
        return train_loop(model, *arguments, **hooks)

    monkeypatch.setattr("longrope2.training.train.train_loop", watched)
    make_sample(tmp_path / "sample").run(tmp_path / "run", memory=memory, lora=4, also=("norms",))
    assert set(kinds) == {(True, torch.float32), (False, torch.bfloat16)}


def test_resuming_goes_on_from_the_same_state(tmp_path):
    _, whole = trained(tmp_path / "whole", device="cuda")

    class BrokenOff(Exception):
        pass

    def stop(result):
        if result.step == 3:
            raise BrokenOff

    model = family_model("llama").cuda()
    with pytest.raises(BrokenOff):
        train_loop(model, make_factors(model), row, config(steps=4), tmp_path / "parts", ALONE, report=stop)
    _, rest = trained(tmp_path / "parts", device="cuda")
    assert rest == pytest.approx(whole[-len(rest) :], rel=1e-3)


@pytest.fixture
def small_tensors_count(monkeypatch):
    monkeypatch.setattr(pieces, "MLP_ROWS", 20)
    monkeypatch.setattr(host, "LEAST", 1)
    monkeypatch.setattr(optimizer, "PIECE", 500)


@pytest.mark.usefixtures("small_tensors_count")
@pytest.mark.parametrize("memory", ["host", "small", "least"])
def test_levels_of_memory_learn_what_the_plain_one_does(tmp_path, memory):
    """Copies to host memory and back run beside the computation here: one that came too late would show."""
    _, expected = trained(tmp_path / "plain", device="cuda", steps=6)
    _, losses = trained(tmp_path / "ours", device="cuda", steps=6, memory=memory)
    assert losses == pytest.approx(expected, rel=2e-2)
    (tmp_path / "ours" / "checkpoints" / "step-00000006").rename(tmp_path / "last")
    _, rest = trained(tmp_path / "ours", device="cuda", steps=6, memory=memory)
    assert rest == pytest.approx(losses[-2:], rel=1e-3)


def test_a_state_in_host_memory_is_updated_as_one_on_the_gpu(monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 5000)
    found = {}
    for in_host in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(300, 200).cuda().to(dtype) for dtype in (torch.bfloat16, torch.float32)]
        parameters = [p for layer in layers for p in layer.parameters()]
        adamw = CompactAdamW([{"params": parameters}], lr=1e-2, betas=(0.9, 0.95), in_host=in_host)
        for _ in range(10):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            adamw.step()
        states = [x.cpu() for state in adamw.state.values() for x in state.values()]
        assert all(x.is_pinned() for state in adamw.state.values() for x in state.values() if x.ndim) == in_host
        found[in_host] = [p.detach().cpu() for p in parameters] + states
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))
