"""Folders that others can write into, too: links, pipes and folders that they plant there stay untouched."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import killed_in
from longrope2 import describe, export_model
from longrope2.data.config import Source
from longrope2.data.corpus import tokenise
from longrope2.errors import LongRopeError
from longrope2.figures import draw_inspection
from longrope2.files import (
    atomic_folder,
    atomic_path,
    file_digest,
    is_locked,
    naming,
    only_one,
    sweep,
    write_json,
    write_text,
)
from longrope2.inspection import inspect
from longrope2.ledger import DAMAGED, LEDGER, keep_damaged
from longrope2.methods import rescale
from longrope2.models import load_tokenizer
from longrope2.search.journal import Journal
from longrope2.training.log import LogFile


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    return folder


def untouched(victim):
    return {path.name: path.read_text() for path in victim.iterdir()} == {"thesis.txt": "mine"}


def plant(place, name, victim):
    """Links to a folder and to a file of it, under all names that a temporary one once had."""
    for state in ("partial", "replaced", "partial-0", f"partial-1{Path(name).suffix}"):
        (place / f".{name}.{state}").symlink_to(victim)
    (place / f".{name}.partial-2").symlink_to(victim / "thesis.txt")


@pytest.mark.parametrize("format", ["huggingface", "gguf"])
def test_an_export_leaves_planted_links_alone(tmp_path, victim, format):
    name = "out" if format == "huggingface" else "out.gguf"
    plant(tmp_path, name, victim)
    factors = rescale("yarn", describe("tiny").rope, 1024)
    for force in (False, True):
        export_model("tiny", tmp_path / name, factors=factors, format=format, force=force)
        assert untouched(victim)
    assert not (tmp_path / name).is_symlink()
    assert len([path for path in tmp_path.iterdir() if path.is_symlink()]) == 5


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("model", lambda path: write_folder(path)),
        ("factors.json", lambda path: write_json(path, 1)),
        ("index.html", lambda path: write_text(path, "page")),
        ("rope.png", lambda path: draw_inspection(inspect(describe("tiny"), 1024), path)),
    ],
)
def test_whatever_is_written_leaves_planted_links_alone(tmp_path, victim, name, write):
    plant(tmp_path, name, victim)
    for _ in range(2):
        write(tmp_path / name)
    assert untouched(victim)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink()) == sorted([name, "victim"])


def write_folder(path):
    with atomic_folder(path) as folder:
        (folder / "config.json").write_text("{}")


def test_a_cache_of_tokens_leaves_planted_links_alone(tmp_path, victim):
    source = Source(path=str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("It was the best of times. " * 100)
    tokenizer, cache = load_tokenizer(describe("tiny")), tmp_path / "cache"
    key = tokenise(source, tokenizer, cache).key
    for made in cache.iterdir():
        made.unlink()
    (cache / f".{key}.partial").symlink_to(victim / "thesis.txt")
    plant(cache, f"{key}.arrow", victim)
    assert tokenise(source, tokenizer, cache).num_documents == 1
    assert untouched(victim)


def test_the_copy_of_a_damaged_ledger_goes_through_no_link(tmp_path, victim):
    (tmp_path / LEDGER).write_text("{")
    (tmp_path / DAMAGED).symlink_to(victim / "thesis.txt")
    assert keep_damaged(tmp_path).read_text() == "{"
    assert untouched(victim)


def test_a_lock_is_not_made_through_a_link(tmp_path, victim):
    (tmp_path / ".lock").symlink_to(victim / "new.txt")
    with pytest.raises(LongRopeError, match="cannot be written"), only_one(tmp_path, "", file=".lock"):
        pass
    assert untouched(victim)


def test_a_journal_is_not_continued_through_a_link_or_a_pipe(tmp_path, victim):
    (tmp_path / "link").symlink_to(victim / "new.txt")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(LongRopeError, match=f"{name}: cannot be read or written"):
            Journal(tmp_path / name, {})
    assert untouched(victim)


def test_only_what_is_certainly_ours_is_swept(tmp_path, victim):
    ours = killed_in(tmp_path / "out").parent
    (ours / "new" / "model.safetensors").write_text("gigabytes")
    (ours / "new" / "link").symlink_to(victim)
    planted = {name: tmp_path / f".out.partial-{name}" for name in ("copied", "renamed", "foreign", "link", "pipe")}
    shutil.copytree(ours, planted["copied"], symlinks=True)
    planted["foreign"].mkdir()
    (planted["foreign"] / "thesis.txt").write_text("mine")
    shutil.copytree(victim, planted["renamed"])
    (planted["renamed"] / f"mark-{victim.stat().st_ino}").touch()
    planted["link"].symlink_to(victim)
    (victim / f"mark-{victim.stat().st_ino}").touch()  # even if all but the link were right
    os.mkfifo(planted["pipe"])
    write_folder(tmp_path / "out")
    (victim / f"mark-{victim.stat().st_ino}").unlink()
    assert not ours.exists()
    assert untouched(victim)
    assert (planted["foreign"] / "thesis.txt").exists()
    assert (planted["renamed"] / "thesis.txt").exists()
    assert sorted(tmp_path.glob(".*")) == sorted(planted.values())
    assert not sweep([tmp_path / "no such"])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a folder to another user")
def test_what_another_user_left_stays(tmp_path):
    theirs = killed_in(tmp_path / "out").parent
    os.chown(theirs, 12345, 12345)
    write_folder(tmp_path / "out")
    assert theirs.exists()


def test_two_at_once_write_one_folder_and_one_is_refused(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from longrope2.files import atomic_folder\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "with atomic_folder(Path(sys.argv[1])) as folder: (folder / 'f').write_text('x'); time.sleep(2)"
    )
    start = str(time.time() + 1)
    both = [subprocess.Popen([sys.executable, "-c", code, tmp_path / "e", start], stderr=subprocess.PIPE) for _ in "ab"]
    told = [child.communicate()[1].decode() for child in both]
    assert sorted(child.returncode for child in both) == [0, 1], told
    assert "another process is writing it" in "".join(told)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_a_relative_name_is_not_taken_for_that_of_another_process(tmp_path, monkeypatch):
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: str(Path(make(**options)).resolve()))  # as Python 3.12
    monkeypatch.chdir(tmp_path)
    with atomic_path(Path("a"), refusal="another process is writing it") as path:
        path.write_text("content")
    assert Path("a").read_text() == "content"


def test_a_folder_whose_name_was_taken_meanwhile_is_not_lost(tmp_path, monkeypatch):
    folder = tmp_path / "e"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    rename = Path.rename

    def taken(path, target):
        rename(path, target)
        if Path(target).name == "old":
            folder.symlink_to(tmp_path)

    monkeypatch.setattr(Path, "rename", taken)
    with pytest.raises(LongRopeError, match="cannot be written"), atomic_folder(folder):
        pass
    monkeypatch.undo()
    (left,) = tmp_path.glob(".e*")
    sweep([left])
    assert (left / "old" / "config.json").read_text() == "old"
    folder.unlink()
    sweep([left])
    assert (folder / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize("write", [lambda path: write_text(path, "new"), write_folder])
def test_pipes_and_devices_are_refused(tmp_path, write):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "null"):
        with pytest.raises(LongRopeError, match=rf"{name}: cannot be written \([Nn]ot a"):
            write(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert not is_locked(tmp_path / "pipe")


def test_files_where_folders_are_meant_and_the_other_way_round(tmp_path, victim):
    with pytest.raises(LongRopeError, match="Is a directory"):
        write_text(victim, "new")
    with pytest.raises(LongRopeError, match="Not a directory"):
        write_folder(victim / "thesis.txt")
    assert untouched(victim)


def test_links_at_the_place_itself(tmp_path, victim):
    """What is written takes a link's place, so that nothing is written or removed elsewhere."""
    (tmp_path / "file").symlink_to(victim / "thesis.txt")
    os.link(victim / "thesis.txt", tmp_path / "hard")
    (tmp_path / "dangling").symlink_to(victim / "new.txt")
    for name in ("file", "hard", "dangling"):
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert untouched(victim)
    for name, target in (("folder", victim), ("nowhere", tmp_path / "new"), ("circle", tmp_path / "circle")):
        (tmp_path / name).symlink_to(target)
        write_folder(tmp_path / name)
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name / "config.json").exists()
    assert untouched(victim)
    assert not (tmp_path / "new").exists()


def test_an_export_goes_through_a_link_that_the_user_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    factors = rescale("yarn", describe("tiny").rope, 1024)
    for force in (False, True):
        export_model("tiny", tmp_path / "link", factors=factors, force=force)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "elsewhere" / "config.json").exists()


def test_nobody_else_may_enter_while_a_file_is_written_and_all_may_read_it_then(tmp_path):
    with atomic_path(tmp_path / "f.json") as temporary:
        assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700
        temporary.write_text("x")
        temporary.chmod(0o600)  # as safetensors and mkstemp make them
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "f.json").stat().st_mode) == 0o666 & ~mask


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*/f\.json'$"), atomic_path(tmp_path / "f.json"):
        full()
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/out/a/b\.bin'$"),
        atomic_folder(tmp_path / "out") as new,
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new / "a" / "b.bin"))
    with pytest.raises(OSError, match=r"No space left on device: '.*/run'$"), only_one(tmp_path / "run", "busy"):
        full()  # of what is no file of ours, such as TensorBoard's events
    with pytest.raises(OSError, match=r"^another$"), naming(tmp_path):
        raise OSError("another")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_names_the_journal_and_the_log(tmp_path):
    journal, log = Journal(tmp_path / "history.jsonl", {}), LogFile(tmp_path / "log.jsonl")
    log.open_after(0)
    for appended in (journal, log):
        os.dup2(os.open("/dev/full", os.O_WRONLY), appended._file.fileno())
    with pytest.raises(OSError, match=r"No space left on device: '.*/history\.jsonl'$"):
        journal.append({"type": "x"})
    with pytest.raises(OSError, match=r"No space left on device: '.*/log\.jsonl'$"):
        log.write({"step": 1})


def test_what_is_no_file_has_the_digest_of_none(tmp_path):
    """A pipe would be waited for, and a device read for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "file").write_bytes(b"")
    pipe, device, file = (file_digest(tmp_path / name) for name in ("pipe", "zeros", "file"))
    assert pipe == device != file
