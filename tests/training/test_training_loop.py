"""The loop: exact updates, exact resuming, and clear ends."""

import json
import math
import shutil
import time
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from conftest import family_model, killed_in
from longrope2.data.loader import IGNORED_LABEL
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.training.config import TrainConfig
from longrope2.training.loop import make_optimizer, train_loop
from longrope2.training.mixed import Batch
from test_rotary import make_factors

ALONE = World(process=0, num_processes=1, local_process=0)
ROW = 48


def row(number: int) -> Batch:
    """A short row of two documents, or a long one, by turns."""
    tokens = torch.randint(3, 97, (1, ROW), generator=torch.Generator().manual_seed(number))
    ends = [0, 20, ROW] if number % 2 == 0 else [0, ROW]
    labels = torch.roll(tokens, -1, 1)
    labels[0, [end - 1 for end in ends[1:]]] = IGNORED_LABEL
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    return Batch(
        tokens=tokens, positions=positions, labels=labels, long_rows=torch.tensor([number % 2 == 1]), boundaries=[ends]
    )


def run(folder, *, steps=6, stop_after=None, rows=row, here=ALONE, **options):
    """Train a fresh model into a folder; optionally break off in the middle."""
    model = family_model("llama")
    config = TrainConfig(
        steps=steps, batch_rows=2, learning_rate=1e-2, warmup_steps=2, save_every=2, **options
    ).resolved()

    class BrokenOff(Exception):
        pass

    def report(result):
        if result.step == stop_after:
            raise BrokenOff

    results = []
    try:
        results = train_loop(model, make_factors(model), rows, config, folder, here, report=report)
    except BrokenOff:
        end = time.monotonic() + 20
        while list(folder.glob("checkpoints/.step-*.partial-*")) and time.monotonic() < end:
            time.sleep(0.02)  # the checkpoint under way is written in the background
    return model, results


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_an_update_is_that_of_a_plain_loop(tmp_path):
    """Against AdamW by hand on the mean loss of documents alone."""
    model = family_model("llama")
    config = TrainConfig(steps=3, batch_rows=2, learning_rate=1e-2, warmup_steps=0, weight_decay=2.0).resolved()
    factors = make_factors(model)
    rope = {"rope_type": "longrope", "long_factor": list(factors.long), "short_factor": list(factors.short),
            "original_max_position_embeddings": 32, "attention_factor": 1.0}  # fmt: skip
    plain = family_model("llama", rope, max_position_embeddings=128)
    matrices, vectors = ([p for p in plain.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": matrices, "weight_decay": 2.0}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(3):
        short, long = row(2 * step), row(2 * step + 1)
        total, count = torch.zeros(()), 0
        for document in (short.tokens[:, :20], short.tokens[:, 20:], long.tokens):
            logits = plain(document, use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, document[0, 1:], reduction="sum")
            count += len(logits)
        losses.append((total / count).item())
        (total / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 3)) / 2
        optimizer.step()
        optimizer.zero_grad()
    results = train_loop(model, factors, row, config, tmp_path, ALONE)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-4)
    assert [r.gradient_norm for r in results] == pytest.approx(norms, rel=1e-3)
    assert set(results[0].loss_by_kind) == {"short", "long"}
    assert all(0 < result.seconds < 600 for result in results)
    assert not any(module.training for module in model.modules())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-2, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "cohere", "gpt_oss"])
def test_norms_and_biases_do_not_decay(family):
    """Those of all heads or experts may lie in one tensor of two dimensions. Their values begin equal."""
    model = family_model(family)
    decaying, others = (
        group["params"] for group in make_optimizer(model, TrainConfig(steps=1).resolved()).param_groups
    )
    assert not any((p == p.flatten()[0]).all() for p in decaying)
    assert all(p.ndim == 1 or (p == p.flatten()[0]).all() for p in others)
    assert len(decaying) + len(others) == len(list(model.parameters()))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_resuming_is_bitwise(tmp_path, stop_after):
    whole, results = run(tmp_path / "whole")
    run(tmp_path / "parts", stop_after=stop_after)
    resumed, later = run(tmp_path / "parts")
    assert_same(weights(whole), weights(resumed))
    assert [r.loss for r in later] == [r.loss for r in results][-len(later) :]


def test_finished_runs_do_nothing_more(tmp_path):
    first, _ = run(tmp_path)
    again, results = run(tmp_path)
    assert results == []
    assert_same(weights(first), weights(again))


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_every_file_of_a_checkpoint_is_on_disk(tmp_path, synced):
    run(tmp_path, steps=2)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    files = list(checkpoint.iterdir())
    assert len(files) >= 3  # shards, DCP's own record, and ours
    assert {file.stat().st_ino for file in files} <= set(synced)


def test_old_checkpoints_go(tmp_path):
    run(tmp_path, keep=2)
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000006"]
    record = json.loads((tmp_path / "checkpoints" / "step-00000006" / "checkpoint.json").read_text())
    assert record["step"] == 6
    assert record["config"]["batch_rows"] == 2


def test_links_in_the_place_of_checkpoints_lead_to_nothing_that_goes(tmp_path):
    thesis = tmp_path / "victim" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 4):  # an old one, and one that is about to be written
        (tmp_path / "checkpoints" / f"step-0000000{step}").symlink_to(thesis.parent)
    run(tmp_path, steps=4, keep=1)
    assert list(thesis.parent.iterdir()) == [thesis]
    assert checkpoints(tmp_path) == ["step-00000001", "step-00000004"]
    assert not (tmp_path / "checkpoints" / "step-00000004").is_symlink()


def test_what_a_kill_left_of_an_old_checkpoint_goes(tmp_path):
    run(tmp_path, keep=2)
    old = shutil.copytree(tmp_path / "checkpoints" / "step-00000004", tmp_path / "checkpoints" / "step-00000002")
    next(old.glob("*.distcp")).unlink()
    run(tmp_path, keep=2)  # has no step to do, and so saves nothing
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "record", "other step", "no step"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, capsys):
    whole, _ = run(tmp_path / "whole")
    run(tmp_path / "parts", steps=6, stop_after=5)
    folder = tmp_path / "parts" / "checkpoints" / "step-00000004"
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    if damage == "cut":
        shard.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "remove":
        shard.unlink()
    elif damage == "record":
        (folder / "checkpoint.json").write_text("{")
    else:
        record = json.loads((folder / "checkpoint.json").read_text())
        del record["step"]
        (folder / "checkpoint.json").write_text(json.dumps(record | ({"step": 5} if damage == "other step" else {})))
    resumed, _ = run(tmp_path / "parts")
    assert "is damaged" in capsys.readouterr().err
    assert_same(weights(whole), weights(resumed))


def test_a_damaged_checkpoint_takes_no_good_ones_place(tmp_path):
    run(tmp_path, stop_after=5, keep=2)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000004", folder / "step-00000008")
    (folder / "step-00000008" / "checkpoint.json").write_text("{")
    run(tmp_path, keep=1)
    assert checkpoints(tmp_path) == ["step-00000006", "step-00000008"]


def test_a_half_written_checkpoint_does_not_count(tmp_path):
    whole, _ = run(tmp_path / "whole")
    run(tmp_path / "parts", stop_after=3)
    folder = tmp_path / "parts" / "checkpoints"
    for step in ("step-00000003", "step-00000004"):
        shutil.copytree(folder / "step-00000002", killed_in(folder / step), dirs_exist_ok=True)
    resumed, _ = run(tmp_path / "parts")
    assert_same(weights(whole), weights(resumed))
    assert not list(folder.glob(".*"))


def test_planted_links_and_folders_are_not_taken_for_half_a_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("victim", ".step-00000002.partial", ".step-00000002.partial-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "thesis.txt").write_text("mine")
    for name in (".step-00000004.partial", ".step-00000004.partial-1"):
        (folder / name).symlink_to(folder / "victim")
    before = {path: path.read_text() for path in folder.rglob("thesis.txt")}
    run(tmp_path, steps=4)
    assert (folder / "step-00000004").is_dir()
    assert {path: path.read_text() for path in before} == before
    assert [path.name for path in (folder / "victim").iterdir()] == ["thesis.txt"]


def test_a_loss_that_breaks_stops_the_run_and_keeps_the_checkpoint(tmp_path):

    def rows(number):
        if number == 6:  # step 4
            with torch.no_grad():
                poisoned.lm_head.weight.fill_(float("nan"))
        return row(number)

    poisoned = family_model("llama")
    config = TrainConfig(steps=6, batch_rows=2, learning_rate=1e-2, save_every=2).resolved()
    with pytest.raises(LongRopeError, match="no longer finite at step 4"):
        train_loop(poisoned, make_factors(poisoned), rows, config, tmp_path, ALONE)
    assert checkpoints(tmp_path) == ["step-00000002"]


def test_a_gradient_that_breaks_names_the_step(tmp_path):
    """No row has a loss that is not finite, so none can be blamed."""
    model = family_model("llama")
    model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    config = TrainConfig(steps=2, batch_rows=2).resolved()
    with pytest.raises(LongRopeError, match="the gradient is no longer finite at step 1: rows 0 to 1 of the run"):
        train_loop(model, make_factors(model), row, config, tmp_path, ALONE)


def test_many_broken_rows_are_counted(tmp_path):
    def rows(number):
        with torch.no_grad():
            poisoned.lm_head.weight.fill_(float("nan"))
        return row(number)

    poisoned = family_model("llama")
    config = TrainConfig(steps=2, batch_rows=5).resolved()
    with pytest.raises(LongRopeError, match="row 0 of the run; row 1 of the run; row 2 of the run; and 2 more of 5"):
        train_loop(poisoned, make_factors(poisoned), rows, config, tmp_path, ALONE)


def test_dropout_and_recomputing_resume_bitwise(tmp_path):
    """Starcoder's checkpoints come with dropout; its random numbers belong to the step, not to the process."""

    def go(folder, steps_done=None):
        model = family_model("starcoder2", residual_dropout=0.5, embedding_dropout=0.5)
        config = TrainConfig(steps=4, batch_rows=2, learning_rate=1e-2, save_every=2, recompute=True).resolved()

        def report(result):
            if result.step == steps_done:
                raise KeyboardInterrupt

        try:
            train_loop(model, make_factors(model), row, config, folder, ALONE, report=report)
        except KeyboardInterrupt:
            time.sleep(0.2)
        return model

    whole = go(tmp_path / "whole")
    go(tmp_path / "parts", steps_done=3)
    torch.manual_seed(99)
    assert_same(weights(whole), weights(go(tmp_path / "parts")))


def test_what_a_caller_hears_and_in_which_order(tmp_path):
    heard = []

    def go(stop=None):
        model = family_model("llama")
        config = TrainConfig(steps=3, batch_rows=2, save_every=1).resolved()

        def evaluate(mixed, step):
            assert mixed.training
            heard.append(("evaluate", step))
            if step == stop:
                raise KeyboardInterrupt

        train_loop(
            model, make_factors(model), row, config, tmp_path, ALONE, kind_of=lambda _: "short", evaluate=evaluate,
            started=lambda step: heard.append(("started", step)),
            report=lambda result: heard.append(("step", result.step, *result.loss_by_kind)),
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        go(stop=2)
    assert heard == [("started", 0), ("evaluate", 0), ("step", 1, "short"), ("evaluate", 1), ("step", 2, "short"),
                     ("evaluate", 2)]  # fmt: skip
    time.sleep(0.5)
    heard.clear()
    go()
    # Step 2 had no checkpoint yet when it was evaluated.
    assert heard == [("started", 1), ("step", 2, "short"), ("evaluate", 2), ("step", 3, "short"), ("evaluate", 3)]


def test_attended_pairs_are_counted(tmp_path):
    model = family_model("llama")
    config = TrainConfig(steps=1, batch_rows=2).resolved()
    (result,) = train_loop(model, make_factors(model), row, config, tmp_path, ALONE)
    assert result.attended == sum(n * (n + 1) // 2 for n in (20, 28, ROW))


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longrope2.records.write_json", full)
    with pytest.raises(LongRopeError, match="No space left on device"):
        run(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_disk_that_fills_up_under_torch_is_told_in_a_line(tmp_path, monkeypatch):
    """As seen on a small tmpfs: torch's own error, raised while it dealt with that of the disk."""

    def full(*_, **__):
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", full)
    with pytest.raises(LongRopeError) as caught:
        run(tmp_path)
    assert caught.value.message.endswith("cannot be written ([Errno 28] No space left on device)")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_config_problems_and_schedule():
    config = TrainConfig(steps=10, warmup_steps=2, learning_rate=1.0).resolved()
    assert [config.learning_rate_at(step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert config.learning_rate_at(9) < 0.05
    problems = TrainConfig(steps=0, batch_rows=0, learning_rate=-1, save_every=0, keep=0, betas=(0.9, 1.0)).problems()
    assert len(problems) == 6
    assert TrainConfig(steps="ten", betas=(0.9,), recompute=1).problems() == [
        'steps must be a whole number, got "ten"',
        "betas must be a list of 2 in brackets, each a number, got [0.9]",
        "recompute must be true or false, got 1",
    ]
    paper = TrainConfig(steps=1).resolved()
    assert (paper.batch_rows, paper.learning_rate, paper.weight_decay, paper.gradient_clip) == (64, 2e-5, 0.1, 1.0)


def test_progress_moves_with_each_row_of_a_step(tmp_path):
    """A step of many long rows takes minutes."""
    model, heard = family_model("llama"), []
    config = TrainConfig(steps=2, batch_rows=3).resolved()
    train_loop(model, make_factors(model), row, config, tmp_path, ALONE, within=heard.append)
    assert heard == [0.25, 0.5, 0.75, 1.25, 1.5, 1.75]
