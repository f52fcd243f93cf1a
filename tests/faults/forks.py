"""Commands as processes of their own that need no start-up: forks of one process that has imported everything.

A trial may end its process as `kill -9` does, at a chosen change of the file system or a chosen time.
"""

import atexit
import gc
import json
import mmap
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = (
    "longrope2.api", "longrope2.pipeline.forecast", "longrope2.calibration.calibrate", "longrope2.export.verify",
    "longrope2.report.page", "transformers.models.llama.modeling_llama", "torch.utils.tensorboard", "matplotlib.figure",
    "torch.distributed.checkpoint.state_dict_saver",
)  # fmt: skip
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
"""Python's audit events between which a kill leaves another state on disk."""
MOST_BYTES = 4 << 30
"""Of memory: a trial that takes more fails, and not this machine."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a command."""

    code: int
    """Its exit code, negative for a signal."""
    changes: int
    """Of files and folders."""
    seconds: float
    megabytes: float
    """At most at any time, beyond what it began with."""
    output: str
    errors: str

    @property
    def problem(self) -> str:
        """What a user should never see; empty for a result, or one message about wrong input."""
        if self.code not in (0, 2):
            return f"exit code {self.code}"
        if "Traceback" in self.errors:
            return "a traceback"
        if self.code == 2 and len(re.findall(r"^error: ", self.errors, re.IGNORECASE | re.MULTILINE)) != 1:
            return "not one message"
        return ""


class Forks:
    """The process that all commands are forks of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: dict[str, dict[str, int]] = {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
                       "COLUMNS": "100"}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def count(self, kind: str, outcome: str) -> None:
        """Note what became of a trial."""
        outcomes = self.counts.setdefault(kind, {})
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    def run(
        self,
        arguments: Sequence[object],
        *,
        cwd: Path | None = None,
        kill_at: int = 0,
        kill_after: float = 0.0,
        timeout: float = 300.0,
    ) -> Ended:
        """Run `longrope2` with these arguments; to be killed at the n-th change, or after some seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = (self.folder / name for name in ("stdout", "stderr"))
        job = {"arguments": list(map(str, arguments)), "out": str(out), "err": str(err), "kill_at": kill_at,
               "folder": str(cwd or self.folder), "kill_after": kill_after or timeout}  # fmt: skip
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        texts = {"output": out.read_text(), "errors": err.read_text()}
        ended = Ended(**answer, **texts)
        assert kill_after or ended.seconds < timeout, f"no end after {timeout} seconds: {arguments}"
        return ended


def serve() -> None:
    """In that process: a fork for each line of stdin."""
    from importlib import import_module

    from longrope2 import cli

    for module in MODULES:
        import_module(module)
    gc.freeze()  # else every fork copies what all of them only read
    for line in sys.stdin:
        job = json.loads(line)
        notes = mmap.mmap(-1, 16)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(job, notes)
            os._exit(_code_of(cli.main))
        deadline = began + job["kill_after"]
        while not (ended := os.wait4(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        changes, resident = struct.unpack("qq", notes)
        answer = {
            "code": os.waitstatus_to_exitcode(ended[1]),
            "changes": changes,
            "seconds": time.monotonic() - began,
            "megabytes": ended[2].ru_maxrss / 1024 - resident / 1e6,
        }
        print(json.dumps(answer), flush=True)


def _become(job: dict[str, Any], notes: mmap.mmap) -> None:
    """Be the process of a command."""
    for number, (name, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (job["out"], os.O_RDWR | os.O_CREAT | os.O_TRUNC),
         (job["err"], os.O_RDWR | os.O_CREAT | os.O_TRUNC)]
    ):  # fmt: skip
        os.dup2(os.open(name, flags, 0o600), number)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(job["folder"])
    sys.argv = ["longrope2", *job["arguments"]]
    pages = list(map(int, Path("/proc/self/statm").read_text().split()))
    size, resident = (number * resource.getpagesize() for number in pages[:2])
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES + size, -1))
    notes[8:] = struct.pack("q", resident)
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in CHANGES and (event != "open" or _writes(arguments)):
            count += 1
            notes[:8] = struct.pack("q", count)
            if count == job["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _writes(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _code_of(main: Callable[[], None]) -> int:
    """Run to the end as Python does, except that nothing is taken down, which takes longer than most commands."""
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


if __name__ == "__main__":
    serve()
