"""Processes that torchrun started, of which one is lost: one message, which says that the same command resumes."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import os, signal, sys, time
import longrope2.distributed
from longrope2 import cli
from longrope2.errors import LongRopeError

longrope2.distributed.PATIENCE = 0.5

@cli.cli.command()
def work():
    with longrope2.distributed.world() as here:
        here.gather_all(None)
        if here.process == int(sys.argv[2]):
            if sys.argv[3] == "fails":
                raise LongRopeError("this disk is full")
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[4] == "waits":
            here.gather_all(None)
        time.sleep(60)

cli.cli.main = lambda **_: work.main(args=[], standalone_mode=False)
cli.main()
"""


@pytest.mark.parametrize(
    ("lost", "how", "others"), [("0", "killed", "waits"), ("1", "killed", "works"), ("1", "fails", "waits")]
)
def test_one_message(tmp_path, lost, how, others):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    process = subprocess.run(
        [sys.executable, *command, "work", lost, how, others], stderr=subprocess.PIPE, text=True, timeout=50,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert process.returncode == 1
    errors, _, _ = process.stderr.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')  # torchrun's
    messages = re.findall(r"^(?:process \d: )?error: .*\n.*", errors, re.MULTILINE)
    assert len(messages) == 1, process.stderr
    if how == "fails":
        assert "this disk is full" in messages[0]
    else:
        assert messages[0].endswith("hint: run the same command again: it goes on where it was")
    assert "Traceback" not in errors
