"""`push` against a stand-in of the hub: what arrives is what was exported, all of it or nothing."""

import base64
import hashlib
import json

import pytest
from click.testing import CliRunner
from export_samples import ONE_TEMPERATURE, tiny_factors

from hub import Answers, Hub
from longrope2 import export_model
from longrope2.cli import cli
from longrope2.errors import LongRopeError
from longrope2.export.hub import push

NAME = "alice/tiny-1k"


class UploadHub(Hub):
    """Speaks as much of the hub's protocol as an upload needs."""

    def __init__(self):
        super().__init__(Upload)
        self.created, self.objects, self.repository = None, {}, {}
        self.accepts = True


class Upload(Answers):
    def do_GET(self):
        self.server.requests.append(self.path)
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self.answer({"error": "Invalid username or password."}, 401)
        return self.answer({"name": "alice", "type": "user"})

    def do_PUT(self):
        content = self.body()
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self):
        hub, content = self.server, self.body()
        hub.requests.append(self.path)
        if self.path == "/api/repos/create":
            hub.created = json.loads(content)
            return self.answer({"url": f"{hub.address}/{NAME}"})
        if self.path == "/api/validate-yaml":  # of the card
            return self.answer({"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            sizes = {file["path"]: file["size"] for file in json.loads(content)["files"]}
            modes = {path: "lfs" if size > 100_000 else "regular" for path, size in sizes.items()}
            return self.answer(
                {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{hub.address}/put/{wanted['oid']}"}}}
                for wanted in json.loads(content)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        assert self.path.endswith("/commit/main"), self.path
        if not hub.accepts:
            return self.answer({"error": "this repository is full"}, 400)
        for line in map(json.loads, content.splitlines()):
            if line["key"] == "file":
                hub.repository[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "lfsFile":
                hub.repository[line["value"]["path"]] = hub.objects[line["value"]["oid"]]
        return self.answer({"commitUrl": f"{hub.address}/{NAME}/commit/1", "commitOid": "1", "success": True})


@pytest.fixture
def hub(monkeypatch):
    with UploadHub() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield server


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    factors = tiny_factors(**ONE_TEMPERATURE)
    export_model("tiny", folder / "tiny-1k", factors=factors)
    export_model("tiny", folder / "tiny-1k.gguf", factors=factors, format="gguf")
    return folder


def test_a_folder_arrives_as_it_is(hub, exported):
    result = CliRunner().invoke(cli, ["push", str(exported / "tiny-1k"), NAME, "--private"])
    assert result.exit_code == 0, result.output
    assert f"it is at {hub.address}/{NAME}" in result.stderr
    files = {path.name: path.read_bytes() for path in (exported / "tiny-1k").iterdir()}
    assert hub.repository == files
    assert {"config.json", "factors.json", "README.md", "model.safetensors"} <= set(files)
    assert hub.created == {"name": "tiny-1k", "organization": "alice", "visibility": "private"}


def test_a_file_arrives_with_its_card(hub, exported):
    push(exported / "tiny-1k.gguf", NAME)
    assert set(hub.repository) == {"tiny-1k.gguf", "README.md"}
    assert hub.repository["tiny-1k.gguf"] == (exported / "tiny-1k.gguf").read_bytes()
    assert hub.repository["README.md"] == (exported / "tiny-1k.md").read_bytes()


def test_what_the_hub_refuses_leaves_nothing(hub, exported, monkeypatch):
    hub.accepts = False
    with pytest.raises(LongRopeError, match="the hub did not take it"):
        push(exported / "tiny-1k", NAME)
    assert hub.repository == {}
    hub.accepts = True
    push(exported / "tiny-1k", NAME)
    assert len(hub.repository) > 3


def test_a_wrong_token_is_noticed_before_anything_is_sent(hub, exported, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(LongRopeError, match="the hub did not take it") as caught:
        push(exported / "tiny-1k", NAME)
    assert "hf auth login" in caught.value.hint
    assert hub.requests == ["/api/whoami-v2"]


def test_only_whole_exports_are_sent(hub, exported, tmp_path):
    for name in ("tiny", "alice/", "alice/tiny@main"):
        with pytest.raises(LongRopeError, match="is no name of a repository"):
            push(exported / "tiny-1k", name)
    with pytest.raises(LongRopeError, match="not an export"):
        push(tmp_path, NAME)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in (exported / "tiny-1k").iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(weights)
    with pytest.raises(LongRopeError, match=r"model\.safetensors"):
        push(damaged, NAME)
    assert hub.requests == []
