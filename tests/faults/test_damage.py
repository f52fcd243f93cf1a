"""Damage to files of ours, whole and half-done: it is found, or what comes out is what would have come out."""

import os
import random
import re
import shutil
import sys

import pytest
from commands import LONG_SCALE, OUT, damage, result_of, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks and /proc")]
RESUMING = ("search", "calibrate", "tokenise", "plan", "train", "evaluate", "extend")
UNREAD = {".png", ".svg", ".csv", ".html", ".md", ".lock"}
"""Kinds of files that people read, and we never again."""
KEPT = "earlier"
"""Where `extend` keeps what was damaged."""


@pytest.mark.parametrize("name", RESUMING)
def test_a_damaged_run_is_refused_or_ends_as_it_should(forks, name):
    rng = random.Random(name)
    command, whole, expected = undisturbed(forks, name)
    out = forks.folder / OUT
    for trial in range(4 * LONG_SCALE):
        shutil.rmtree(out)
        if trial % 2:
            forks.run(command, kill_at=rng.randint(whole.changes // 2, whole.changes))
        else:
            forks.run(command)
        files = [path for path in sorted(out.rglob("*")) if path.is_file() and is_read_again(path)]
        if not files:
            continue
        path = rng.choice(files)
        # Once its job is finished it may never be read again; if it is, the damage is found.
        has_checksum = path.suffix == ".jsonl" or b'"checksum": ' in path.read_bytes()
        how = damage(path, rng)
        ended = forks.run(command)
        case = f"{path.relative_to(out)}: {how}; {ended.errors}"
        assert not ended.problem, case
        forks.count("damage", "refused" if ended.code else "right in spite of it")
        if ended.code == 0 and f"warning: {path.relative_to(forks.folder)} lacks" not in ended.errors:
            shutil.rmtree(out / KEPT, ignore_errors=True)
            path.with_name(f"{path.name}.damaged").unlink(missing_ok=True)  # so is a ledger
            unread = {path} if has_checksum else set()
            found = result_of(out, without=unread)
            assert found == {name: value for name, value in expected.items() if out / name not in unread}, case


@pytest.mark.parametrize("name", RESUMING)
def test_what_stands_in_the_place_of_a_file_does_no_harm(forks, name):
    """Links to what is not ours, pipes and devices: nothing hangs, and nothing of a user's is changed."""
    rng = random.Random(name)
    command, whole, _ = undisturbed(forks, name)
    out, own = forks.folder / OUT, forks.folder / "own"
    for trial in range(3 * LONG_SCALE):
        shutil.rmtree(out)
        forks.run(command, kill_at=rng.randint(whole.changes // 2, whole.changes) if trial % 2 else 0)
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        thesis = own / "thesis.txt"
        place = rng.choice(sorted(out.rglob("*")))
        how = rng.choice(["folder", "file", "pipe", "device"] if place.is_dir() else ["file", "pipe", "device"])
        if how == "folder":  # the run's own, moved to where something else is
            shutil.copytree(place, own, dirs_exist_ok=True)
        thesis.write_text("two years of work")
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        if how == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to({"folder": own, "file": thesis, "device": "/dev/zero"}[how])
        ended = forks.run(command, timeout=120)
        case = f"{how} at {place.relative_to(out)}: {ended}"
        assert not ended.problem, case
        assert thesis.read_text() == "two years of work", case
        forks.count("links, pipes and devices", "refused" if ended.code else "done")


def is_read_again(path):
    return path.stat().st_size > 0 and path.suffix not in UNREAD and not re.search("tensorboard|partial", str(path))
