"""The programs that need a GPU, in the small form that runs on a CPU: none may rot while no GPU is at hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "results"),
    [
        ("reading.py tiny --length 1k --peer-length 512 --peer-chunk 256", ["read-tiny-1k"]),
        ("packing.py --length 1k --documents 64,256 --tiny", ["packing"]),
        ("training.py llama3-8b --tiny --memory least", ["train-tiny-0k"]),
        (
            "training.py lengths --of tiny --lengths 128,256 --memory 4bit --lora 4 --documents 32",
            ["train-lengths-tiny-lora"],
        ),
    ],
)
def test_a_benchmark_writes_its_result(tmp_path, command, results):
    program, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, str(FOLDER / program), *arguments, "--output", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.stem for path in tmp_path.iterdir()) == results
    assert all(json.loads(path.read_text())["ratio"] > 0 for path in tmp_path.iterdir())
