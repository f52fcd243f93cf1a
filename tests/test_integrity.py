"""Damage of what was written is found where it is read, and nothing that is written names this machine's folders."""

import json
import random
import shutil
from pathlib import Path

import pytest

from longrope2 import RescaleFactors, export_model
from longrope2.errors import LongRopeError
from longrope2.files import checksum, file_digest, public, sealed_line, unsealed
from longrope2.generation.saved import read_switch_length, store_switch_length
from longrope2.methods import rescale
from longrope2.models import describe, load, weights_fingerprint
from longrope2.records import Finding, RecordError, VerifyRecord


def tiny_factors() -> RescaleFactors:
    return rescale("yarn", describe("tiny").rope, 1024)


def flips(content: bytes, count: int):
    """The same bytes with one bit changed, at places spread over all of it."""
    draw = random.Random(0)
    for _ in range(count):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        yield content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def same_values(one, two) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def test_a_changed_bit_in_a_factors_file_is_found(tmp_path, capsys):
    path = tmp_path / "factors.json"
    factors = tiny_factors()
    factors.save(path)
    for changed in flips(path.read_bytes(), 400):
        path.write_bytes(changed)
        try:
            found = RescaleFactors.load(path)
        except LongRopeError:
            continue
        # A space has become a tab, or such.
        assert same_values(found.to_json(), factors.to_json())
    capsys.readouterr()


def test_factors_are_edited_by_deleting_their_checksum(tmp_path, capsys):
    path = tmp_path / "factors.json"
    tiny_factors().save(path)
    content = json.loads(path.read_text())
    content["long_attention_factor"] = 1.25
    path.write_text(json.dumps(content))
    with pytest.raises(LongRopeError, match=r'changed since it was written .*\nhint: .*delete the line "checksum"'):
        RescaleFactors.load(path)
    del content["checksum"]
    path.write_text(json.dumps(content))
    assert RescaleFactors.load(path).long_attention_factor == 1.25
    assert "factors.json has no checksum: it was edited by hand" in capsys.readouterr().err


def test_a_changed_bit_in_a_record_is_found(tmp_path):
    path = tmp_path / "verify.json"
    record = VerifyRecord(exports={"export/a": (Finding("transformers", "long", 1.25e-6, "right"),)})
    record.save(path)
    for changed in flips(path.read_bytes(), 400):
        path.write_bytes(changed)
        try:
            found = VerifyRecord.load(path)
        except RecordError:
            continue
        assert found == record


def test_a_changed_bit_in_a_line_is_found():
    line = sealed_line({"type": "evaluation", "key": "é", "nll": 1.0625, "exact": 3}).encode()
    text = unsealed(line[:-1])
    assert json.loads(text)["nll"] == 1.0625
    for changed in flips(line[:-1], 400):
        with pytest.raises(ValueError, match="checksum"):
            unsealed(changed)


def test_checksums_are_of_values_not_of_layout():
    assert checksum({"b": (1, 2), 10: 0.1, 9: None}) == checksum({"9": None, "10": 0.1, "b": [1, 2]})
    assert checksum({"a": 1}) != checksum({"a": 1.5})


def test_every_byte_of_weights_counts(tmp_path):
    """Also of files that samples would have missed."""
    folder = tmp_path / "m"
    shutil.copytree(describe("tiny").location, folder)
    before = weights_fingerprint(describe(folder))
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert weights_fingerprint(describe(moved)) == before
    content = (folder / "model.safetensors").read_bytes()
    for place in (len(content) // 3, len(content) - 1):
        (folder / "model.safetensors").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert weights_fingerprint(describe(folder)) != before


def test_a_finished_model_is_read_only_as_it_was_written(tmp_path):
    model = export_model("tiny", tmp_path / "m", factors=tiny_factors())
    load(model)
    (model / "README.md").write_text("mine")
    store_switch_length(model, 200)  # our own command changes what it may
    assert read_switch_length(json.loads((model / "config.json").read_text())) == 200
    load(model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    message = r"model\.safetensors: changed since this model was written\nhint: .* delete its manifest\.json"
    with pytest.raises(LongRopeError, match=message):
        load(model)
    with pytest.raises(LongRopeError, match="changed since this model was written"):
        export_model(model, tmp_path / "again")
    (model / "manifest.json").unlink()
    load(model)


def test_published_values_have_names_for_paths():
    here = str(Path.cwd())
    values = {"model": f"{here}/base", "books": "owner/name:train", "lengths": (1, 2), "text": "a / b", "root": "/"}
    assert public(values) == {**values, "model": "base", "lengths": [1, 2]}
    for path in ("../alice/base", "runs/../../alice/base", "~/alice/base", "file:///home/alice/base"):
        assert public(path) == "base"
    for kept in ("runs/base", "./base", "..", "not ../this", "a..b/c", "s3://bucket/base@2", "hf://datasets/a/b@c/d"):
        assert public(kept) == kept
    assert public("s3://KEY:SECRET@bucket/base") == "s3://bucket/base"
    assert file_digest(Path(__file__)).startswith("xxh3:")
