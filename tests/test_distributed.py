"""Many processes on one machine: each has a GPU of its own, and they wait for each other."""

import atexit

import pytest
import torch
import torch.distributed as dist

from conftest import run_together
from longrope2 import distributed
from longrope2.distributed import World, world
from longrope2.errors import LongRopeError

SCRIPT = """
import sys
import time
from datetime import timedelta
from pathlib import Path
from torch.distributed import distributed_c10d
from longrope2.distributed import world

kept = Path(sys.argv[1])


def make():
    if not kept.exists():
        with kept.open("x") as file:
            time.sleep(3)
            file.write(str(here.process))
    return kept.read_text()


distributed_c10d.default_pg_timeout = timedelta(seconds=1)
with world() as here:
    here.gather_all(None)
    assert here.main_first(make) == "0"
    assert here.gather_all(here.process) == [0, 1]
"""


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two of them; the list shows which one became the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_: chosen.append("joined"))
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(distributed, "_report_termination", lambda: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    return chosen


def test_a_process_works_on_its_own_gpu(gpus, monkeypatch):
    """FSDP shards on the current one, and all processes would shard on the first."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with world() as here:
        assert here.device() == torch.device("cuda", 1)
    assert gpus == [1, "joined"]


def test_more_processes_than_gpus_are_refused(gpus):
    here = World(process=2, num_processes=3, local_process=2)
    with pytest.raises(LongRopeError, match="process 3 on this machine has no GPU: there are 2") as caught:
        here.device()
    assert "--nproc-per-node 2" in caught.value.hint


def test_processes_wait_for_one_that_works_alone(tmp_path):
    """What one of them makes may take longer than torch would wait, and the others find it."""
    run_together(SCRIPT, str(tmp_path / "kept"), timeout=120)
