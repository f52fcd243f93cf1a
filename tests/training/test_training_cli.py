"""`longrope2 train` as real processes: killed, interrupted and resumed, alone and several together."""

import json
import os
import signal
import sys
import time

import pytest
import torch
from training_samples import log_without_times, make_sample, weights

from longrope2.cli import main
from longrope2.errors import LongRopeError
from longrope2.training.loop import train_loop

STEPS = 20


@pytest.fixture(scope="module")
def sample(tmp_path_factory, one_thread):
    return make_sample(tmp_path_factory.mktemp("sample"))


def finish(process):
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def wait_for_checkpoint(process, output, newer_than=0):
    """The step of a checkpoint that is whole, as soon as there is one."""
    folder = output / "checkpoints"
    while True:
        steps = [int(path.name[5:]) for path in folder.glob("step-*")] if folder.exists() else []
        if max(steps, default=0) > newer_than:
            return max(steps)
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def test_interrupted_and_killed_it_ends_with_the_same_bytes(sample, tmp_path, capsys):
    """Two real processes that do not end well; the two runs that do are made in this one."""
    options = {"steps": STEPS, "save_every": 2}
    parts = sample.start(tmp_path / "parts", **options)
    first = wait_for_checkpoint(parts, tmp_path / "parts")
    parts.send_signal(signal.SIGINT)
    code, errors = finish(parts)
    assert code == 130
    assert errors.endswith("\ninterrupted; the same command goes on where it was\n")
    assert errors.count("the same command goes on") == 1
    assert "Traceback" not in errors
    again = sample.start(tmp_path / "parts", **options)
    wait_for_checkpoint(again, tmp_path / "parts", newer_than=first + 2)
    os.kill(again.pid, signal.SIGKILL)
    finish(again)
    assert not (tmp_path / "parts" / "model").exists()
    sample.run(tmp_path / "parts", **options)
    assert "resuming after step" in capsys.readouterr().err
    sample.run(tmp_path / "whole", **options)
    name = "model.safetensors"
    assert (tmp_path / "parts/model" / name).read_bytes() == (tmp_path / "whole/model" / name).read_bytes()
    assert log_without_times(tmp_path / "parts") == log_without_times(tmp_path / "whole")
    assert len(log_without_times(tmp_path / "whole")) == STEPS
    assert not list((tmp_path / "parts").glob(".*"))


@pytest.mark.slow  # tests/training/test_training_parallel.py compares losses in the first tier
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_one_process_or_two_the_same_losses_and_model(sample, tmp_path, sequence_parallel):
    """Two processes share the weights, and either take rows by turns or share each one."""
    options = {"steps": 4, "evaluate_every": 2, "evaluate_documents": 1}
    alone = sample.run(tmp_path / "alone", **options)
    expected = log_without_times(tmp_path / "alone")
    process = sample.start(tmp_path / "two", processes=2, sequence_parallel=sequence_parallel, **options)
    code, errors = finish(process)
    assert code == 0, errors
    found = log_without_times(tmp_path / "two")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if "needles" in ours:
            assert ours["needles"][0]["nll"] == pytest.approx(theirs["needles"][0]["nll"], rel=1e-3)
        else:
            assert ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = weights(tmp_path / "two" / "model"), weights(alone)
    assert set(ours) == set(theirs)
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-2, atol=2e-4)
    record = json.loads((tmp_path / "two" / "model" / "training.json").read_text())
    assert record["processes"] == 2


def test_bad_input_is_one_message(sample, tmp_path, monkeypatch, capsys):
    command = sample.command(tmp_path / "run", factors=tmp_path / "none.json")
    monkeypatch.setattr(sys, "argv", command[command.index("longrope2") :])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first == f"error: {tmp_path / 'none.json'}: no such file"
    assert hint.startswith("hint: ")


def test_one_of_several_processes_tells_of_an_error(sample, tmp_path):
    code, errors = finish(sample.start(tmp_path / "run", processes=2, factors=tmp_path / "none.json"))
    assert code
    assert errors.count("none.json: no such file") == 1


def test_a_second_run_is_kept_out_of_a_folder(sample, tmp_path, monkeypatch):
    output, trained = tmp_path / "run", []

    def train_while_another_tries(*arguments, **options):
        monkeypatch.setattr("longrope2.training.train.train_loop", train_loop)
        with pytest.raises(LongRopeError, match="another process is training there") as refused:
            sample.run(output)
        assert str(refused.value).startswith(f"{output}: ")
        assert refused.value.hint == "wait for it, or use another folder"
        trained.append(train_loop(*arguments, **options))

    monkeypatch.setattr("longrope2.training.train.train_loop", train_while_another_tries)
    assert weights(sample.run(output))
    assert [result.step for result in trained[0]] == [1, 2, 3, 4]
    sample.run(output)  # the first is gone: let in, and nothing left to do
