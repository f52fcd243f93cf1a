"""What `longrope2 train` makes of a folder, tokens or a plan that are not as it left them."""

import dataclasses
import json
import shutil

import pytest
import torch
from training_samples import make_sample, weights

from longrope2.data.plan import read_plan
from longrope2.errors import LongRopeError
from longrope2.training.log import read_log


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def finished(sample, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "finished"
    sample.run(output)
    return output


@pytest.fixture
def copied(finished, tmp_path):
    """A finished run to damage."""
    return shutil.copytree(finished, tmp_path / "run")


def cut(path, share=2):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // share])


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES = {
    "no record": lambda model: (model / "training.json").unlink(),
    "cut record": lambda model: cut(model / "training.json"),
    "other record": lambda model: (model / "training.json").write_text("{}"),
    "record without its last losses": lambda model: replace(model / "training.json", '"last"', '"lost"'),
    "record of a loss that is a text": lambda model: replace(model / "training.json", '"loss": ', '"loss": "",\n"": '),
    "empty": lambda model: (shutil.rmtree(model), model.mkdir()),
    "cut weights": lambda model: cut(model / "model.safetensors"),
    "no config": lambda model: (model / "config.json").unlink(),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_model_is_written_again_without_training(sample, finished, copied, damage, monkeypatch, capsys):
    DAMAGES[damage](copied / "model")
    monkeypatch.setattr("longrope2.training.loop.train_step", None)
    folder = sample.run(copied)
    assert "it is written again from the last checkpoint" in capsys.readouterr().err
    for path in (finished / "model").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    sample.run(copied)
    assert "already finished" in capsys.readouterr().err


def test_another_dtype_of_a_finished_run(sample, finished, copied, monkeypatch, capsys):
    monkeypatch.setattr("longrope2.training.loop.train_step", None)
    folder = sample.run(copied, save_dtype="bfloat16")
    assert "its weights are float32, bfloat16 is asked for" in capsys.readouterr().err
    found = weights(folder)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(finished / "model").items())
    assert json.loads((folder / "training.json").read_text())["config"]["save_dtype"] == "bfloat16"
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(LongRopeError, match=r"the checkpoint of step 4, .* is gone") as caught:
        sample.run(copied, save_dtype="float32")
    assert "longrope2 export --dtype" in caught.value.hint
    assert weights(folder)


FOLDERS = [
    (
        lambda run: (run / "run.json").write_text('{"identity": 3}'),
        r"run\.json: damaged: 3 problems",
        "copy that file back",
    ),
    (lambda run: cut(run / "run.json"), r"run\.json: damaged: invalid JSON", "copy that file back"),
    (lambda run: ((run / "log.jsonl").unlink(), (run / "log.jsonl").mkdir()), "is a folder, a file", "move it away"),
    (lambda run: (shutil.rmtree(run / "model"), (run / "model").touch()), "model is a file", "move it away"),
    (lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").touch()), "is a file", "move it away"),
    (lambda run: (run / "run.json").unlink(), "neither empty nor a run", "an empty one"),
]


@pytest.mark.parametrize(("damage", "message", "hint"), FOLDERS)
def test_a_damaged_run_is_refused_with_its_own_hint(sample, copied, damage, message, hint):
    damage(copied)
    with pytest.raises(LongRopeError, match=message) as caught:
        sample.run(copied)
    assert hint in caught.value.hint


def test_a_file_and_no_processes_to_share_rows(sample, tmp_path):
    (tmp_path / "p.txt").touch()
    with pytest.raises(LongRopeError, match="is a file") as caught:
        sample.run(tmp_path / "p.txt")
    assert "same options" not in caught.value.hint
    with pytest.raises(LongRopeError, match="sequence_parallel must be at least 1, got 0") as caught:
        sample.run(tmp_path / "run", sequence_parallel=0)
    assert "torchrun" not in caught.value.hint


def test_a_log_that_is_lost_is_told(sample, copied, capsys):
    lines = (copied / "log.jsonl").read_text().splitlines(keepends=True)
    (copied / "log.jsonl").write_text(lines[0] + "garbage\n" + '{"step": 3, "loss": 1.0}\n' + lines[3])
    with (copied / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "needles": [{"length": 8}]}\n')
    shutil.rmtree(copied / "model")
    record = json.loads((sample.run(copied) / "training.json").read_text())
    assert "lacks 2 of 4 steps" in capsys.readouterr().err
    assert record["tokens"] == sum(json.loads(lines[index])["tokens"] for index in (0, 3))


def test_damaged_tokens_are_found_before_training(tmp_path):
    sample = make_sample(tmp_path / "sample")
    path = sorted((sample.folder / "cache").glob("*.arrow"))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(LongRopeError, match=f"{path.name}: damaged") as caught:
        sample.run(tmp_path / "run")
    assert "longrope2 data plan" in caught.value.hint
    assert not (tmp_path / "run").exists()


def test_a_bad_row_is_found_before_a_folder_is_claimed(sample, tmp_path):
    plan = read_plan(sample.folder / "plan.jsonl")
    spans = plan.spans.copy()
    spans[plan.first_span[7], 1] = 10**6
    dataclasses.replace(plan, spans=spans).save(tmp_path / "plan.jsonl")
    with pytest.raises(LongRopeError, match="row 7 refers to"):
        sample.run(tmp_path / "run", plan=tmp_path / "plan.jsonl")
    assert not (tmp_path / "run").exists()


def test_a_run_that_saved_nothing_makes_room(sample, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.train.load", None)
        with pytest.raises(TypeError):
            sample.run(tmp_path / "run", learning_rate=1.0)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["learning_rate"] == 1.0
    sample.run(tmp_path / "run", steps=2)
    assert "saved nothing; this one takes its place" in capsys.readouterr().err
    assert [line.step for line in read_log(tmp_path / "run" / "log.jsonl")] == [1, 2]
    shutil.rmtree(tmp_path / "run" / "model")  # its checkpoint is worth keeping
    with pytest.raises(LongRopeError, match="holds another run"):
        sample.run(tmp_path / "run", steps=3)
