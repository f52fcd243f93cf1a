"""On a GPU: the kernels of training, bfloat16 over float32 master weights, recomputing, resuming."""

import pytest
import torch
from test_training_loop import ALONE, row

from conftest import family_model
from longrope2.kernels import Heads, agrees, choose_kernel, varlen_agrees
from longrope2.training.config import TrainConfig
from longrope2.training.loop import train_loop
from longrope2.training.mixed import mixed_window
from test_rotary import make_factors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (32, 8, 128), (32, 32, 96)])
def test_the_chosen_kernel_is_right_in_both_directions(heads, kv_heads, size):
    of = Heads(torch.device("cuda"), torch.bfloat16, heads, kv_heads, size)
    kernel = choose_kernel(of, training=True)
    assert kernel.name in ("cudnn", "flash")
    assert agrees(kernel, of, training=True)
    assert varlen_agrees(of, training=True)


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


def trained(folder, *, device, steps=4, recompute=False):
    model = family_model("llama").to(device)
    results = train_loop(model, make_factors(model), row, config(steps=steps, recompute=recompute), folder, ALONE)
    return model, [result.loss for result in results]


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_are_those_of_float32_and_master_weights_stay_float32(tmp_path, recompute):
    _, expected = trained(tmp_path / "cpu", device="cpu")
    model, losses = trained(tmp_path / "gpu", device="cuda", recompute=recompute)
    assert losses == pytest.approx(expected, rel=2e-2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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
