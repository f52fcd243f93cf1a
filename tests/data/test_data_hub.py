"""Sources on the hub, against a stand-in of it: read at one commit from beginning to end, which is recorded."""

import json
import os
import re
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest
from test_data_tokenise import content, documents, texts

from hub import Answers, Hub

__all__ = ["texts"]  # a fixture
OLD, NEW = "a" * 40, "b" * 40


class DatasetHub(Hub):
    """Has one dataset, with the files of each commit; speaks as much of the hub's protocol as reading needs."""

    def __init__(self, commits):
        super().__init__(Reading)
        self.commits, self.newest = commits, OLD


class Reading(Answers):
    def do_GET(self):
        hub = self.server
        hub.requests.append(self.path)
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"/(?:api/)?datasets/owner/name(?:/(revision|tree|resolve)/(\w+)/?(.*))?", path)
        kind, revision, inside = found.groups() if found else ("none", None, "")
        commit = hub.newest if revision in (None, "main") else revision
        files = hub.commits.get(commit, {})
        if found and kind in (None, "revision"):
            return self.answer({"id": "owner/name", "sha": commit, "siblings": [{"rfilename": name} for name in files]})
        if kind == "tree":
            prefix, entries = f"{inside}/" if inside else "", {}
            for name in (name for name in files if name.startswith(prefix)):
                first, _, rest = name.removeprefix(prefix).partition("/")
                entries[first] = {
                    "type": "directory" if rest else "file", "path": prefix + first, "size": len(files[name]),
                    "oid": "0" * 40,
                }  # fmt: skip
            return self.answer(list(entries.values()))
        if inside not in files:
            code = "EntryNotFound" if found else "RepoNotFound"
            return self.answer({"error": "Not found"}, 404, X_Error_Code=code)
        begin, end = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "bytes=0-999999999")).groups()
        part = files[inside][int(begin) : int(end) + 1]
        return self.answer(part, 206 if "Range" in self.headers else 200, ETag='"0"', X_Repo_Commit=commit)

    do_HEAD = do_GET


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def hub(texts):
    old = {"README.md": b"---\nlicense: mit\n---\n", "data/train-0.jsonl": lines(texts[:20]),
           "data/train-1.jsonl": lines(texts[20:30]), "data/test.jsonl": lines(texts[30:40])}  # fmt: skip
    with DatasetHub({OLD: old, NEW: {**old, "data/train-0.jsonl": lines(texts[40:60])}}) as server:
        yield server


def run(hub, folder, *arguments):
    command = ["data", "tokenise", *arguments, "--model", "tiny", "--shard-size", "0.02", "-o", str(folder / "out")]
    environment = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "-m", "longrope2", *command, "--json"], capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_dataset_is_read_at_one_commit_also_when_the_hub_moves_on(tmp_path, texts, hub):
    """By the datasets library's choice of files for a split, and by path."""
    sources = ["split=owner/name:train", "files=hf://datasets/owner/name/data/t*.jsonl", "--workers", "2"]
    first = run(hub, tmp_path, *sources)
    assert first.returncode == 0, first.stderr
    recorded = json.loads(first.stdout)["sources"]
    facts = {"dataset": "owner/name", "commit": OLD}
    assert {key: recorded["split"][key] for key in (*facts, "split")} == {**facts, "split": "train"}
    assert {key: recorded["files"][key] for key in facts} == facts
    assert (recorded["split"]["files"], recorded["files"]["files"]) == (2, 3)
    whole = content(tmp_path / "out")
    assert len(documents(tmp_path / "out", ":split")) == 30
    assert len(documents(tmp_path / "out", ":files")) == 40

    hub.newest = NEW
    hub.requests.clear()
    (tmp_path / "out" / "000000.arrow").unlink()
    again = run(hub, tmp_path, *sources)
    assert again.returncode == 0, again.stderr
    assert content(tmp_path / "out") == whole
    assert any(f"/resolve/{OLD}/data/train-0.jsonl" in request for request in hub.requests)
    assert not any(NEW in request for request in hub.requests)


def test_what_the_hub_does_not_have_is_named(tmp_path, hub):
    done = run(hub, tmp_path, "owner/name:dev", "hf://datasets/owner/name/data/nowhere", "hf://datasets/owner/other")
    assert done.returncode == 2
    assert f"owner/name:dev at {OLD}: no split 'dev'" in done.stderr
    assert "nowhere: no such file or folder" in done.stderr
    assert "hf://datasets/owner/other: no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr
