"""Nodes that torchrun joins, of which one is lost and another comes: the command goes on to the same end."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

pytestmark = pytest.mark.slow
COMMANDS = {
    "evaluate": ("generations.jsonl", "evaluate tiny --suite niah --lengths 128,256 --samples 20"),
    "search": (
        "history.jsonl",
        "search tiny --target-length 512 --documents 4 --population 12 --parents 4 --iterations 6 --mutations 6 "
        "--crossovers 6",
    ),
}
QUICK = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5"
"""Seconds for which torchrun waits for further nodes, and for a silent one; tens otherwise."""


def environment():
    # As the page of the recipes says: otherwise torchrun lets no node join later.
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def node(port, command, folder):
    """A node of one process."""
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--monitor-interval", "0.2"]
    meeting = ["--rdzv-id", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    module = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *elastic,
        *meeting,
        "--rdzv-conf",
        QUICK,
        "-m",
        "longrope2",
    ]
    return subprocess.Popen(
        [*module, *command.split(), "-o", "out"], stderr=subprocess.PIPE, text=True, cwd=folder, env=environment()
    )


def lose(process):
    """Kill a node and all that runs on it."""
    found = psutil.Process(process.pid)
    for each in (found, *found.children(recursive=True)):
        each.kill()
    process.communicate()


def wait_for_lines(path, count, *nodes):
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert all(each.poll() is None for each in nodes), [each.communicate() for each in nodes]
        time.sleep(0.05)


def outcome(folder):
    if (folder / "factors.json").exists():
        factors = json.loads((folder / "factors.json").read_text())
        return factors["long"], json.loads((folder / "search.json").read_text())["scores"]
    return json.loads((folder / "results.json").read_text())["scores"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_on_when_nodes_come_and_go(tmp_path, name):
    journal, command = COMMANDS[name]
    alone = [sys.executable, "-m", "longrope2", *command.split(), "-o", "alone"]
    subprocess.run(alone, cwd=tmp_path, env=environment(), check=True, stderr=subprocess.DEVNULL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "out" / journal
    nodes = [node(port, command, tmp_path)]
    try:
        # Torchrun keeps what nodes agree on at the first to come, whose loss ends them all; so the second is lost here.
        while nodes[0].poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        nodes.append(node(port, command, tmp_path))
        wait_for_lines(path, 20, *nodes)
        lose(nodes.pop())
        wait_for_lines(path, path.read_bytes().count(b"\n") + 5, *nodes)
        nodes.append(node(port, command, tmp_path))
        for each in nodes:
            _, errors = each.communicate(timeout=500)
            assert each.returncode == 0, errors
    finally:
        for each in nodes:
            if each.poll() is None:
                lose(each)
    record = "results.json" if name == "evaluate" else "search.json"
    assert json.loads((tmp_path / "out" / record).read_text())["processes"] == 2
    assert outcome(tmp_path / "out") == outcome(tmp_path / "alone")
