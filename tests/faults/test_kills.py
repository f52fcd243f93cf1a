"""Every command that writes something, killed again and again: it resumes to the identical result."""

import random
import shutil
import sys

import pytest
from commands import COMMANDS, LONG_SCALE, OUT, result_of, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks and /proc")]
TRIALS = {"train": 2, "extend": 2}
KILLS = 3


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_resumes_to_the_identical_result(forks, name):
    rng = random.Random(name)
    command, whole, expected = undisturbed(forks, name)
    out = forks.folder / OUT
    for trial in range(TRIALS.get(name, 3) * LONG_SCALE):
        shutil.rmtree(out)
        killed, finished = [], None
        for number in range(KILLS):
            # At a change of the file system, where a kill does most harm, or wherever the program happens to be.
            change, seconds = rng.randint(1, whole.changes), rng.uniform(0.1, whole.seconds)
            kill = {"kill_at": change} if (number + trial) % 2 == 0 else {"kill_after": seconds}
            finished = forks.run(command, **kill)
            killed.append(kill)
            if finished.code >= 0:
                break
        if finished.code < 0:
            finished = forks.run(command)
        # A kill may come when all is done but the farewell; a command that replaces nothing says so then.
        assert finished.code == 0 or "exists already" in finished.errors, (killed, finished.errors)
        assert result_of(out) == expected, killed
        forks.count("kills", f"{name}: identical")
        # The last kill may have come when a file had its name, and only the empty mark beside it was to be removed.
        left = [path for place in forks.folder.rglob(".*.partial-*") for path in place.iterdir()]
        assert all(path.name.startswith("mark-") for path in left), (killed, left)
