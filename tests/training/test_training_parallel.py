"""One process, two with sharded weights, two that share rows: the same loss curve and the same weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_training_loop import ALONE, row

from conftest import family_model, run_together
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.training.config import TrainConfig
from longrope2.training.loop import train_loop
from longrope2.training.mixed import Batch
from longrope2.training.parallel import Ulysses, own_part
from test_rotary import make_factors

HERE = Path(__file__).parent
CONFIG = TrainConfig(steps=6, batch_rows=4, learning_rate=1e-2, warmup_steps=2, save_every=2, keep=5).resolved()
# Trains twice in the same two processes: they cost far more to start than to train.
SCRIPT = """
import json, sys
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
from longrope2.distributed import world
from test_training_parallel import run_here

for group in (1, 2):
    with world() as all_processes:
        here = all_processes.groups_of(group)
        folder = Path(sys.argv[1]) / str(group)
        results = run_here(folder, sys.argv[2], here)
        if here.is_main:
            (folder / "results.json").write_text(json.dumps(results))
"""


def run_here(folder, family="llama", here=ALONE):
    """Train in this process; what each step gave."""
    model = family_model(family)
    results = train_loop(model, make_factors(model), row, CONFIG, folder, here)
    return [(r.step, r.loss, r.gradient_norm, r.loss_by_kind, r.tokens) for r in results]


def train_together(folder, family):
    """Train in two processes that share the weights, then in two that share rows."""
    run_together(SCRIPT.format(here=str(HERE), tests=str(HERE.parent)), str(folder), family, timeout=240)
    return folder / "1", folder / "2"


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def runs(request, tmp_path_factory, one_thread):
    """The family, what one process gives, and the folders of two that share weights and of two that share rows."""
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    return family, run_here(folder / "alone", family), *train_together(folder, family)


def assert_same_curve(ours, expected, tolerance=1e-4):
    assert [step for step, *_ in ours] == [step for step, *_ in expected][-len(ours) :]
    for (_, loss, norm, kinds, tokens), (_, loss2, norm2, kinds2, tokens2) in zip(
        ours, expected[-len(ours) :], strict=True
    ):
        assert loss == pytest.approx(loss2, rel=tolerance)
        assert norm == pytest.approx(norm2, rel=1e-3)
        assert kinds == pytest.approx(kinds2, rel=tolerance)
        assert tokens == tokens2


def test_the_same_loss_curve_however_it_is_split(runs):
    _, alone, *together = runs
    assert alone[-1][1] < alone[0][1]
    for folder in together:
        assert_same_curve(json.loads((folder / "results.json").read_text()), alone)


def test_resuming_on_another_number_of_processes(runs, tmp_path):
    family, alone, shared_weights, _ = runs
    killed = "step-00000002"  # as if it had been killed after step 2
    shutil.copytree(shared_weights / "checkpoints" / killed, tmp_path / "checkpoints" / killed)
    resumed = run_here(tmp_path, family)
    assert [step for step, *_ in resumed] == [3, 4, 5, 6]
    assert_same_curve(resumed, alone)


def test_rows_and_heads_that_do_not_divide_are_refused():
    here = World(process=1, num_processes=3, local_process=1, group_size=3)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    batch = Batch(tokens=tokens, positions=tokens, labels=tokens, long_rows=torch.tensor([True]), boundaries=[[0, 32]])
    with pytest.raises(LongRopeError, match="32 tokens cannot be shared evenly by 3"):
        own_part(batch, here)
    heads = torch.zeros(1, 4, 8, 16)
    with pytest.raises(LongRopeError, match="4 attention heads cannot be shared evenly by 3"):
        Ulysses(None, here).to_heads(heads, heads, heads, None)


def test_parts_are_the_row():
    tokens = torch.arange(32)[None]
    batch = Batch(tokens=tokens, positions=tokens, labels=tokens, long_rows=torch.tensor([True]), boundaries=[[0, 32]])
    worlds = [World(process=p, num_processes=4, local_process=p, group_size=2) for p in range(4)]
    parts = [own_part(batch, here).tokens for here in worlds]
    assert torch.equal(torch.cat(parts[:2], 1), tokens)
    assert torch.equal(parts[0], parts[2])
    assert [here.rank for here in worlds] == [0, 0, 1, 1]
