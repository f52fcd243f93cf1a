"""One process, two with sharded weights, two that share rows: the same loss curve and the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.training.mixed import Batch
from longrope2.training.parallel import Ulysses, own_part

HERE = Path(__file__).parent
SCRIPT = """
import json, sys
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
from conftest import family_model
from test_rotary import make_factors
from test_training_loop import row
from longrope2.distributed import world
from longrope2.training.loop import TrainConfig, train

folder, family, group = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with world(group_size=group) as here:
    model = family_model(family)
    config = TrainConfig(steps=6, batch_rows=4, learning_rate=1e-2, warmup_steps=2, save_every=2, keep=5)
    results = train(model, make_factors(model), row, config, folder, here)
    if here.is_main:
        values = [(r.step, r.loss, r.gradient_norm, r.loss_by_kind, r.tokens) for r in results]
        (folder / f"results-{{here.num_processes}}-{{group}}.json").write_text(json.dumps(values))
"""


def run(folder, processes, *, group=1, family="llama"):
    script = folder.parent / "train.py"
    script.write_text(SCRIPT.format(here=str(HERE), tests=str(HERE.parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    folder.mkdir(exist_ok=True)
    command = [*launcher, str(script), str(folder), family, str(group)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"results-{processes}-{group}.json").read_text())


def assert_same_curve(ours, expected, tolerance=1e-4):
    assert [step for step, *_ in ours] == [step for step, *_ in expected][-len(ours) :]
    for (_, loss, norm, kinds, tokens), (_, loss2, norm2, kinds2, tokens2) in zip(
        ours, expected[-len(ours) :], strict=True
    ):
        assert loss == pytest.approx(loss2, rel=tolerance)
        assert norm == pytest.approx(norm2, rel=1e-3)
        assert kinds == pytest.approx(kinds2, rel=tolerance)
        assert tokens == tokens2


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_the_same_loss_curve_however_it_is_split(tmp_path, family):
    alone = run(tmp_path / "one", 1, family=family)
    assert alone[-1][1] < alone[0][1]
    assert_same_curve(run(tmp_path / "sharded", 2, family=family), alone)
    assert_same_curve(run(tmp_path / "sequence", 2, group=2, family=family), alone)


def test_resuming_on_another_number_of_processes(tmp_path):
    alone = run(tmp_path / "one", 1)
    run(tmp_path / "two", 2)
    saved = tmp_path / "two" / "checkpoints"
    for step in (4, 6):  # as if it had been killed after step 2
        for file in (saved / f"step-{step:08d}").iterdir():
            file.unlink()
        (saved / f"step-{step:08d}").rmdir()
    resumed = run(tmp_path / "two", 1)
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
