"""Ctrl-C during `longrope2 train`: it always ends the run, and the step under way is saved."""

import signal
import subprocess
import sys
import time

import pytest
from training_samples import log_without_times, make_sample

from longrope2.interrupts import interrupts
from longrope2.training.loop import train_step
from longrope2.training.train import load


@pytest.fixture(scope="module")
def sample(tmp_path_factory, one_thread):
    return make_sample(tmp_path_factory.mktemp("sample"))


def interrupt():
    signal.raise_signal(signal.SIGINT)


def interrupting(function, *, at=1, times=1):
    """The function, in whose call number `at` Ctrl-C is pressed."""
    calls = []

    def wrapper(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            for _ in range(times):
                interrupt()
        return function(*arguments, **options)

    return wrapper


def checkpoints(output):
    return sorted(path.name for path in (output / "checkpoints").glob("*"))


def test_the_step_under_way_is_saved(sample, tmp_path, monkeypatch, capfd):
    options = {"steps": 5, "save_every": 100}
    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.loop.train_step", interrupting(train_step, at=3))
        with pytest.raises(KeyboardInterrupt):
            sample.run(tmp_path / "parts", **options)
    errors = capfd.readouterr().err
    assert "Ctrl-C again stops at once" in errors
    assert checkpoints(tmp_path / "parts") == ["step-00000003"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sample.run(tmp_path / "parts", **options)
    assert "resuming after step 3" in capfd.readouterr().err
    sample.run(tmp_path / "whole", **options)
    name = "model/model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert log_without_times(tmp_path / "parts") == log_without_times(tmp_path / "whole")


def test_twice_stops_at_once(sample, tmp_path, monkeypatch):
    monkeypatch.setattr("longrope2.training.loop.train_step", interrupting(train_step, at=2, times=2))
    with pytest.raises(KeyboardInterrupt):
        sample.run(tmp_path / "run", save_every=100)
    assert checkpoints(tmp_path / "run") == []


def test_one_that_an_import_swallows_is_not_lost(sample, tmp_path, monkeypatch):
    def swallowing(*arguments, **options):
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        return load(*arguments, **options)

    monkeypatch.setattr("longrope2.training.train.load", swallowing)
    with pytest.raises(KeyboardInterrupt):
        sample.run(tmp_path / "run", save_every=100)
    assert checkpoints(tmp_path / "run") == ["step-00000001"]


def test_one_that_an_import_turns_into_another_error(sample, tmp_path, monkeypatch):
    def turning(*_, **__):
        try:
            interrupt()
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr("longrope2.training.train.load", turning)
    with pytest.raises(KeyboardInterrupt):
        sample.run(tmp_path / "run")


def test_other_errors_and_handlers_are_left_alone():
    with pytest.raises(ImportError), interrupts():
        raise ImportError
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as received:
            interrupt()
        assert not received.asked
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_reading_tokens_imports_no_pandas(sample):
    """Its import, reached through pyarrow, is where Ctrl-C was swallowed."""
    key = sorted((sample.folder / "cache").glob("*.arrow"))[0]
    code = (
        "import sys; from pathlib import Path; from longrope2.data.corpus import open_corpus;"
        f"c = open_corpus({key.stem!r}, Path({str(key.parent)!r})); c.tokens(0), c.lengths, c.title(0);"
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_several_processes_save_together(sample, tmp_path):
    """torchrun hands Ctrl-C on to each of its processes."""
    process = sample.start(tmp_path / "run", processes=2, steps=100_000, save_every=100_000)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert errors.count("the same command goes on") == 1
    steps = len(log_without_times(tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == [f"step-{steps:08d}"]
