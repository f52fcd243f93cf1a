"""What needs processes of its own: tensor and pipeline parallelism, the newer model runner, the server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from serving_samples import EXACT, ORIGINAL, WINDOW, Oracle, export_family

pytestmark = pytest.mark.vllm
TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""One core for each; otherwise vLLM wants as many NUMA nodes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_family(tmp_path_factory.mktemp("model"))


def environment(**changes):
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**inherited, **quiet, **changes}


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"tensor_parallel_size": 2}, TWO_WORKERS),
        # vLLM's pipelines work on a CPU only with compiled models.
        ({"pipeline_parallel_size": 2, "enforce_eager": False, "num_gpu_blocks_override": 20}, TWO_WORKERS),
        ({"runner_v2": True}, {}),
        ({"runner_v2": True, "async_scheduling": True, "num_gpu_blocks_override": 20}, {}),
    ],
)
def test_every_token(folder, options, changes):
    command = [sys.executable, Path(__file__).with_name("run_engine.py"), folder, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**changes), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(found["worst"].values()) < EXACT
    assert found["preemptions"] >= 14
    assert found["runner_v2"] == options.get("runner_v2", False)


@pytest.fixture
def server(folder):
    """What `vllm serve` runs, with the one option that matters and others that make it small."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--max-model-len", str(WINDOW),
        "--port", str(port),
        "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 27),
        "--max-num-seqs", "4", "--block-size", "32", "--served-model-name", "model",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, process.stdout.read()[-3000:]
            assert time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_the_server(server, folder):
    """Greedy answers over HTTP are those of our own forward, on both sides and across the switch."""
    oracle = Oracle(folder)
    for length in (ORIGINAL // 2, ORIGINAL - 3, ORIGINAL + 5):
        prompt = [3 + 7 * i % 100 for i in range(length)]
        body = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        request = urllib.request.Request(
            server, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["token_ids"]
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(oracle.after_each(tokens, long=len(tokens) > ORIGINAL)[-1].argmax()))
        assert answer == tokens[length:]
