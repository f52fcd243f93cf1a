"""Less memory: the same training, in fewer bytes or elsewhere."""

import copy
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_training_cli import wait_for_checkpoint
from test_training_estimate import LENGTH, LLAMA3, shape
from test_training_loop import ALONE, assert_same, row, run, weights
from test_training_trainable import BrokenOffError, stop_after_three
from training_samples import log_without_times, make_sample
from training_samples import weights as weights_of

from conftest import FAMILY_OPTIONS, family_model, run_together
from longrope2 import pieces, rotary
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.training import four_bit, host, optimizer
from longrope2.training.config import LEVELS, TrainConfig
from longrope2.training.estimate import GIB
from longrope2.training.loop import train_loop
from longrope2.training.mixed import mixed_window
from longrope2.training.optimizer import CompactAdamW, clip, decode, encode, join, local, split
from longrope2.training.train import PRECISION, _chosen_memory
from longrope2.training.trainable import add_lora
from test_rotary import make_factors

SPREAD = 6
"""Decades between the largest and the smallest numbers tried."""


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch):
    """Rows of tests are short: let them be cut, moved and updated in parts all the same."""
    monkeypatch.setattr(pieces, "MLP_ROWS", 20)
    monkeypatch.setattr(host, "LEAST", 1)
    monkeypatch.setattr(host, "CHUNK", 700)
    monkeypatch.setattr(optimizer, "PIECE", 5000)


def scattered(*shape):
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (-SPREAD * torch.rand(shape, generator=generator))
    return torch.randn(shape, generator=generator) * scale


def test_both_halves_are_the_float32_number():
    values = torch.cat((scattered(10_000), torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0e38, 1e-40])))
    upper, lower = split(values)
    assert torch.equal(join(upper, lower).view(torch.int32), values.view(torch.int32))
    # The nearest bfloat16: where two are equally near, either.
    assert torch.equal((upper.float() - values).abs(), (values.bfloat16().float() - values).abs())


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_near_and_never_too_small_to_divide_by(length, signed):
    values = scattered(7, length)
    values = values if signed else values.square()
    values[3] = 0
    values[2, :5] = 0
    codes, scales = encode(values, signed=signed)
    assert codes.dtype == torch.uint8
    assert scales.shape == (7, -(-length // optimizer.BLOCK))
    found = decode(codes, scales, signed=signed)
    assert torch.equal(found == 0, values == 0) or signed
    largest = scales.repeat_interleave(optimizer.BLOCK, 1)[:, :length]
    for part in (values.abs() > 2**-15 * largest,) if signed else (values > 2**-31 * largest,):
        torch.testing.assert_close(found[part], values[part], rtol=2 ** (1 / 16) - 1 + 1e-5, atol=0)
    if signed:
        assert ((found - values).abs() <= 2**-15 * largest + 0.045 * values.abs()).all()
    else:
        assert (found >= 0.95 * values).all()


def quadratic(dtype, **options):
    """A problem with a known solution, and an optimizer."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(300, 20).to(dtype)
    groups = [{"params": list(layer.parameters()), "weight_decay": 0.1}]
    if options.pop("plain", False):
        return layer, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    return layer, CompactAdamW(groups, lr=1e-2, betas=(0.9, 0.95), **options)


def steps(layer, chosen, count=30, largest=1.0):
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(count):
        x = torch.randn(8, 300, generator=generator).to(layer.weight.dtype)
        (layer(x) - x[:, :20]).float().square().mean().backward()
        norms.append(clip(layer.parameters(), chosen, largest))
        chosen.step()
        chosen.zero_grad()
    return norms


@pytest.mark.parametrize("in_host", [False, True])
def test_float32_weights_get_the_bits_of_torchs_adamw(in_host):
    (ours, compact), (theirs, plain) = quadratic(torch.float32, in_host=in_host), quadratic(torch.float32, plain=True)
    assert steps(ours, compact) == steps(theirs, plain)
    assert torch.equal(ours.weight, theirs.weight)
    for mine, other in zip(compact.state.values(), plain.state.values(), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_the_master_weight_of_bfloat16_follows_float64():
    """Adam by hand in float64, from the same gradients; 8 bits move an update by a few percent of it."""
    layer, compact = quadratic(torch.bfloat16)
    weight = layer.weight.detach().double()
    mean, square, before = torch.zeros_like(weight), torch.zeros_like(weight), weight.clone()
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 21):
        gradient = torch.randn(20, 300, generator=generator) * scattered(20, 300).abs() ** 0.5
        layer.weight.grad = gradient.bfloat16()
        compact.step()
        rounded = gradient.bfloat16().double()
        mean, square = 0.9 * mean + 0.1 * rounded, 0.95 * square + 0.05 * rounded**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        weight = weight * (1 - 1e-2 * 0.1) - 1e-2 * update
    master = join(layer.weight.detach(), compact.state[layer.weight]["lower"]).double()
    moved, off = (weight - before).norm(), (master - weight).norm()
    assert off < 0.05 * moved
    assert (layer.weight.double() - weight).norm() < 0.1 * moved


def test_updates_too_small_for_bfloat16_are_not_lost():
    layer, compact = quadratic(torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    for group in compact.param_groups:
        group["lr"], group["weight_decay"] = 1e-4, 0.0  # bfloat16 has steps of 2^-8 and 2^-7 there
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        compact.step()
    torch.testing.assert_close(layer.weight.float(), torch.full((20, 300), 1 - 0.01), rtol=0, atol=2**-9 + 1e-6)


def test_clipping_leaves_gradients_of_bfloat16_as_they_are():
    layer, compact = quadratic(torch.bfloat16)
    layer.weight.grad, layer.bias.grad = torch.full_like(layer.weight, 3.0), torch.full_like(layer.bias, 4.0)
    norm = clip(layer.parameters(), compact, 0.5)
    assert norm == pytest.approx((6000 * 9 + 20 * 16) ** 0.5)
    assert compact.gradient_scale == pytest.approx(0.5 / norm)
    assert (layer.weight.grad == 3).all()


def test_bytes_of_a_parameter():
    """2 for the weight and 2 for its gradient come on top."""
    layer, compact = quadratic(torch.bfloat16)
    steps(layer, compact, count=1)
    state = compact.state[layer.weight]
    held = sum(x.nbytes for name, x in state.items() if name != "step")
    assert held / layer.weight.numel() == pytest.approx(4 + 2 * 2 * 4 / 300)


# Layers


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_gradients_in_pieces_and_from_host_memory_are_the_same(family):
    """Of every family: MLPs cut, layer inputs moved, attention kept or not, against the plain pass."""
    found = {}
    for name in ("plain", "host", "least"):
        model = family_model(family).train()
        with (
            mixed_window(model, make_factors(model), recompute=name != "plain", level=LEVELS[name]) as mixed,
            mixed.rows_of(row(0)),
        ):
            loss = mixed(row(0))
            loss.backward()
        found[name] = {"": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name in ("host", "least"):
        assert found[name].keys() == found["plain"].keys()
        for parameter, gradient in found[name].items():
            expected = found["plain"][parameter]
            assert (gradient - expected).norm() < 1e-5 * expected.norm() + 1e-7, parameter
    assert all("forward" not in layer.mlp.__dict__ for layer in model.base_model.layers if hasattr(layer, "mlp"))


def test_inputs_beyond_the_room_in_host_memory_stay_where_they_are(monkeypatch):
    """Those of the last layers; the gradients do not change."""
    found, moved = [], []
    pack = host.HostInputs._pack

    def watched(inputs, tensor):
        kept = pack(inputs, tensor)
        if not isinstance(kept, torch.Tensor):
            moved.append((len(inputs._moved), sum(piece.nbytes for piece in kept.host)))
        return kept

    monkeypatch.setattr(host.HostInputs, "_pack", watched)
    size = None
    for layers_in_host in (4, 3, 1, 0):
        model = family_model("llama", num_hidden_layers=4).train()
        room = float("inf") if size is None else (layers_in_host + 0.5) * size
        moved.clear()
        with (
            mixed_window(
                model, make_factors(model), recompute=True, level=LEVELS["least"], host_room=room, check=False
            ) as mixed,
            mixed.rows_of(row(0)),
        ):
            mixed(row(0)).backward()
        size = size or moved[0][1]
        assert moved == [(number + 1, size) for number in range(layers_in_host)]
        found.append({name: p.grad for name, p in model.named_parameters()})
    for gradients in found[1:]:
        assert_same(gradients, found[0])


def test_an_mlp_in_pieces_runs_twice_only():
    """Forward, and for its gradients: not when the layer around it is computed again."""
    model, seen = family_model("llama").train(), []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    with (
        mixed_window(model, make_factors(model), recompute=True, level=LEVELS["small"]) as mixed,
        mixed.rows_of(row(0)),
    ):
        seen.clear()  # what setting up has tried
        mixed(row(0)).backward()
    assert seen == [20, 20, 8] * 2 * len(model.model.layers)


def test_an_mlp_stays_in_pieces_after_needles_were_scored():
    layer = family_model("llama").model.layers[0]
    with pieces.mlp_in_pieces(layer):
        inside = layer.mlp.forward
        with pieces.mlp_in_pieces(layer):
            assert layer.mlp.forward is not inside
        assert layer.mlp.forward is inside
    assert "forward" not in layer.mlp.__dict__


def test_dropout_of_an_mlp_is_drawn_again():
    """Starcoder 2 has one there; zeros must be where they were."""
    model = family_model("starcoder2", residual_dropout=0.5).train()
    hidden = torch.randn(1, 48, model.config.hidden_size, requires_grad=True)
    with pieces.mlp_in_pieces(model.model.layers[0]):
        torch.manual_seed(0)
        output = model.model.layers[0].mlp(hidden)
        output.sum().backward()
    torch.manual_seed(0)
    parts = torch.cat([model.model.layers[0].mlp(part) for part in hidden.detach().split(20, dim=1)], dim=1)
    assert torch.equal(parts, output)
    bias = model.model.layers[0].mlp.c_proj.bias.grad
    torch.testing.assert_close(bias, 2.0 * (output != 0).sum((0, 1)).float())


# Runs


@pytest.mark.parametrize("memory", ["host", "small", "least"])
def test_resuming_is_bitwise(tmp_path, memory):
    whole, results = run(tmp_path / "whole", memory=memory)
    run(tmp_path / "parts", memory=memory, stop_after=3)
    resumed, later = run(tmp_path / "parts", memory=memory)
    assert_same(local_weights(whole), local_weights(resumed))
    assert [r.loss for r in later] == [r.loss for r in results][-len(later) :]
    assert len(later) == 4


def local_weights(model):
    return {name: local(tensor) for name, tensor in weights(model).items()}


def test_host_memory_changes_nothing_but_rounding_of_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "MLP_ROWS", 48)  # no pieces
    plain, results = run(tmp_path / "plain")
    moved, others = run(tmp_path / "host", memory="host")
    assert [r.loss for r in others] == [r.loss for r in results]
    assert_same(weights(plain), weights(moved))
    # One level's checkpoints are the other's.
    shutil.rmtree(tmp_path / "host" / "checkpoints" / "step-00000006")
    again, later = run(tmp_path / "host")
    assert len(later) == 2
    assert_same(weights(plain), weights(again))


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A model whose weights are bfloat16 numbers, so that all levels begin with the same ones."""
    made = make_sample(tmp_path_factory.mktemp("sample"))
    (file,) = made.model.glob("*.safetensors")
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights_of(made.model).items()}
    save_file(rounded, file, metadata={"format": "pt"})
    return made


RUN = {"learning_rate": 1e-3, "steps": 6}


@pytest.fixture(scope="module", params=[None, 4])
def plain_run(request, sample, tmp_path_factory):
    """The rank of additions, if any, and the folder of a run with nothing done about memory."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    sample.run(folder, memory="plain", lora=request.param, **RUN)
    return request.param, folder


@pytest.mark.parametrize("memory", ["host", "small", "least"])
def test_a_run_learns_what_the_plain_one_does(sample, plain_run, tmp_path, memory):
    """What differs is rounding, less than what was learned."""
    lora, folder = plain_run
    before = weights_of(sample.model)
    plain = weights_of(folder / "model")
    ours = weights_of(sample.run(tmp_path / "ours", memory=memory, lora=lora, **RUN))
    learned = sum(float((plain[name] - before[name]).square().sum()) for name in before) ** 0.5
    off = sum(float((plain[name] - ours[name]).square().sum()) for name in before) ** 0.5
    assert off < (1e-4 if memory == "host" else 0.15) * learned
    losses = [[line["loss"] for line in log_without_times(path)] for path in (folder, tmp_path / "ours")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if memory == "host" else 5e-3)
    record = json.loads((tmp_path / "ours" / "model" / "training.json").read_text())
    assert record["config"]["memory"] == memory


def test_auto_is_plain_on_a_cpu_and_goes_on_with_what_has_begun(sample, tmp_path, monkeypatch):
    plain = weights_of(sample.run(tmp_path / "plain", memory="plain"))
    settings = json.loads((tmp_path / "plain" / "run.json").read_text())
    assert PRECISION not in settings["identity"]  # as before there was a choice
    assert_same(plain, weights_of(sample.run(tmp_path / "auto")))
    small = weights_of(sample.run(tmp_path / "whole", memory="small"))
    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.log.StepReporter.step", stop_after_three)
        with pytest.raises(BrokenOffError):
            sample.run(tmp_path / "small", memory="small")
    with pytest.raises(LongRopeError, match="precision: 'bfloat16' on disk, not set now"):
        sample.run(tmp_path / "small", memory="host")
    assert_same(small, weights_of(sample.run(tmp_path / "small")))


@pytest.mark.parametrize("memory", ["plain", "host", "small", "least"])
def test_frozen_weights_of_lora_take_two_bytes_on_a_gpu(memory):
    """At every level, since a GPU computes in bfloat16 anyway; what a CPU computes in float32 stays so."""
    lora, whole = TrainConfig(lora=4, memory=memory), TrainConfig(memory=memory)
    assert lora.precision(lora.level, "cuda") == "bfloat16"
    assert lora.precision(lora.level) == whole.precision(whole.level) == whole.precision(whole.level, "cuda")
    assert (whole.precision(whole.level) == "bfloat16") == (memory in ("small", "least"))


def test_norms_and_embeddings_learn_beside_frozen_bfloat16(sample, tmp_path, monkeypatch):
    """Two precisions in one model; the proof of its RoPE comes before, for which there is no kernel then."""
    proved, real = [], rotary._prove_effect

    def prove(model, ours):
        proved.append({p.dtype for p in model.parameters()})
        real(model, ours)

    monkeypatch.setattr(rotary, "_prove_effect", prove)
    beside = {"lora": 4, "also": ("norms", "embeddings")}
    before = weights_of(sample.model)
    plain, small = (
        weights_of(sample.run(tmp_path / memory, memory=memory, **beside, **RUN)) for memory in ("plain", "small")
    )
    learned = sum(float((plain[name] - before[name]).square().sum()) for name in before) ** 0.5
    off = sum(float((plain[name] - small[name]).square().sum()) for name in before) ** 0.5
    assert proved == [{torch.float32}, {torch.bfloat16}]
    assert off < 0.15 * learned
    assert all((small[name] != before[name]).any() for name in before if "norm" in name or "embed" in name)


def test_levels_that_a_run_cannot_have(sample, tmp_path):
    with pytest.raises(LongRopeError, match="memory small needs recompute"):
        sample.run(tmp_path / "run", memory="small", recompute=False)
    with pytest.raises(LongRopeError, match="memory 4bit is for lora"):
        sample.run(tmp_path / "run", memory="4bit")


@pytest.mark.parametrize(
    ("gpu_gib", "host_gib", "chosen"),
    [(300, 128, "plain"), (139, 128, "host"), (139, 64, "small"), (80, 128, "least"), (24, 128, "least")],
)
def test_auto_takes_the_cheapest_level_that_fits_the_gpu(tmp_path, monkeypatch, capsys, gpu_gib, host_gib, chosen):
    """An 8B model at 128k."""
    monkeypatch.setattr(World, "device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(total_memory=gpu_gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("longrope2.training.host.host_memory", lambda: host_gib * GIB)
    config = TrainConfig(steps=1).resolved()
    assert _chosen_memory(config, shape(LLAMA3, tmp_path), LENGTH, None, ALONE) == chosen
    said = capsys.readouterr().err
    assert f"--memory {chosen}: about" in said
    assert ("nothing fits" in said) == (gpu_gib == 24)


@pytest.mark.parametrize(
    ("memory", "lora"),
    [("least", None)] + [pytest.param(*case, marks=pytest.mark.slow) for case in (("small", None), ("4bit", 4))],
)
def test_killed_it_ends_with_the_same_bytes(sample, tmp_path, capsys, monkeypatch, memory, lora):
    monkeypatch.undo()  # the process that is killed cuts nothing
    options = {"steps": 10, "save_every": 2, "memory": memory} | ({"lora": lora} if lora else {})
    parts = sample.start(tmp_path / "parts", **options)
    wait_for_checkpoint(parts, tmp_path / "parts")
    os.kill(parts.pid, signal.SIGKILL)
    parts.communicate()
    assert not (tmp_path / "parts" / "model").exists()
    sample.run(tmp_path / "parts", **options)
    assert "resuming after step" in capsys.readouterr().err
    sample.run(tmp_path / "whole", **options)
    assert_same(weights_of(tmp_path / "parts" / "model"), weights_of(tmp_path / "whole" / "model"))
    assert log_without_times(tmp_path / "parts") == log_without_times(tmp_path / "whole")


# Four bits


def test_levels_are_quantiles_of_a_normal_distribution():
    """By the formula of QLoRA's authors."""
    above, below = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8))
    values = torch.cat((above, torch.zeros(1), -below)).sort().values
    torch.testing.assert_close(torch.tensor(four_bit.LEVELS), (values / values.max()).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [64, 70, 200])
def test_weights_get_the_nearest_level(length):
    weight = scattered(11, length)
    weight[3] = 0
    found = four_bit.unpack(*four_bit.pack(weight), length)
    for start in range(0, length, four_bit.BLOCK):
        block, ours = weight[:, start : start + four_bit.BLOCK], found[:, start : start + four_bit.BLOCK]
        grid = torch.tensor(four_bit.LEVELS) * block.abs().amax(1)[:, None, None]
        nearest = (grid - block[..., None]).abs().min(-1).values
        torch.testing.assert_close((ours - block).abs(), nearest.expand_as(block))


def test_a_layer_in_four_bits_is_the_layer_of_its_rounded_weights():
    layer = torch.nn.Linear(100, 32).bfloat16()
    frozen = four_bit.FourBitLinear(layer)
    assert sum(x.nbytes for x in (frozen.weight, frozen.scales)) == 32 * 128 * four_bit.BYTES
    rounded = copy.deepcopy(layer)
    rounded.weight.data = four_bit.unpack(*four_bit.pack(layer.weight.detach()), 100).bfloat16()
    x = torch.randn(3, 100, dtype=torch.bfloat16, requires_grad=True)
    expected = rounded(x)
    assert torch.equal(frozen(x), expected)
    (gradient,) = torch.autograd.grad(frozen(x).sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), x)[0])


def test_lora_on_four_bits_ends_merged_into_the_rounded_weights(sample, tmp_path):
    before = weights_of(sample.model)
    after = weights_of(sample.run(tmp_path / "run", lora=4, memory="4bit", learning_rate=1e-3))
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settings["identity"][PRECISION] == "4 bits"
    for name, tensor in before.items():
        if "_proj." not in name:
            assert torch.equal(after[name], tensor), name
            continue
        learned = after[name] - four_bit.unpack(*four_bit.pack(tensor), tensor.shape[1])
        assert torch.linalg.matrix_rank(learned, rtol=1e-3) <= 4
        assert 0 < learned.norm() < 0.1 * tensor.norm()


# Several processes

CONFIG = TrainConfig(steps=6, batch_rows=4, learning_rate=1e-2, warmup_steps=2, save_every=2, keep=5)
TOGETHER = """
import json, sys
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
from longrope2.distributed import world
from test_training_memory import losses_here

for group in (1, 2):
    for kind in ("least", "lora", "four bits"):
        with world() as all_processes:
            here = all_processes.groups_of(group)
            losses = losses_here(Path(sys.argv[1]) / f"{{group}}-{{kind}}", kind, here)
            if here.is_main:
                (Path(sys.argv[1]) / f"{{group}}-{{kind}}.json").write_text(json.dumps(losses))
"""


def losses_here(folder, kind, here=ALONE):
    """Train in this process: everything, or with LoRA on frozen weights of bfloat16 or 4 bits."""
    model = family_model("llama").bfloat16()
    if kind != "least":
        torch.manual_seed(0)
        add_lora(model, 4)
    if kind == "four bits":
        four_bit.freeze_in_four_bits(model)
    levels = {"lora": "small", "four bits": "4bit"}
    config = replace(CONFIG, memory=levels.get(kind, kind), lora=None if kind == "least" else 4).resolved()
    return [r.loss for r in train_loop(model, make_factors(model), row, config, folder, here)]


@pytest.fixture(scope="module")
def together(tmp_path_factory, one_thread):
    """A folder with what two processes gave, with weights shared and with rows shared, each at several levels."""
    folder = tmp_path_factory.mktemp("together")
    here = Path(__file__).parent
    run_together(TOGETHER.format(here=str(here), tests=str(here.parent)), str(folder), timeout=240)
    return folder


@pytest.mark.parametrize("kind", ["least", "lora", "four bits"])
def test_two_processes_learn_what_one_does(together, tmp_path, kind):
    """And a run goes on with another number of them, though blocks of 8 bits must not depend on it."""
    alone = losses_here(tmp_path / "alone", kind)
    assert kind != "least" or alone[-1] < alone[0]  # six steps are too few for additions that start at zero
    for group in (1, 2):
        losses = json.loads((together / f"{group}-{kind}.json").read_text())
        assert losses == pytest.approx(alone, rel=5e-3)
        begun = tmp_path / str(group) / "checkpoints"
        shutil.copytree(together / f"{group}-{kind}" / "checkpoints" / "step-00000002", begun / "step-00000002")
        later = losses_here(tmp_path / str(group), kind)
        assert len(later) == 4
        assert later == pytest.approx(losses[2:], rel=5e-3)
