"""Files that we write: what comes back is what was saved, and every problem of a damaged one is named."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from longrope2 import records
from longrope2.records import Record, RecordError, parse


@dataclass(frozen=True, kw_only=True)
class Part:
    count: int
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sample(Record):
    FORMAT: ClassVar[str] = "longrope2.sample"
    VERSION: ClassVar[int] = 3

    name: str
    parts: tuple[Part, ...]
    by_length: dict[str, tuple[int, ...]]
    config: dict[str, Any]


SAMPLE = Sample(
    name="Zoë", parts=(Part(count=1), Part(count=2, share=0.5)), by_length={"4k": (1, 2)}, config={"a": [1]}
)


def test_what_was_saved_comes_back(tmp_path):
    SAMPLE.save(tmp_path / "sample.json")
    assert Sample.load(tmp_path / "sample.json") == SAMPLE
    content = json.loads((tmp_path / "sample.json").read_text())
    assert (content["format"], content["version"]) == ("longrope2.sample", 3)


def damaged(**changes):
    return json.dumps(SAMPLE.to_json() | changes).encode()


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (b"", ["damaged: invalid JSON"]),
        (damaged()[:-9], ["damaged: invalid JSON"]),
        (b"\xff\xfe", ["damaged: invalid JSON"]),
        (b"[" * 100_000, ["recursion limit exceeded"]),
        (b'{"format": ' + b"1" * 6000 + b"}", ["number out of range"]),
        (b"[]", ["the whole must be an object"]),
        (damaged(format="longrope2.other"), ["format 'longrope2.other', version 3; expected 'longrope2.sample', 3"]),
        (damaged(version=2), ["version 2; expected 'longrope2.sample', 3"]),
        (
            damaged(parts=[{"count": 1.5}, {"share": "x", "count": True}, {}], name=None, more=1),
            [
                "6 problems",
                "name must be a valid string, got 'None'",
                "parts.0.count must be a valid integer, got '1.5'",
                "parts.1.count must be a valid integer, got 'True'",
                "parts.1.share must be a valid number, got 'x'",
                "parts.2.count is missing",
                "unknown key 'more'",
            ],
        ),
        (damaged(parts=[{"count": 1, "share": float("nan")}]), ["parts.0.share must be a finite number"]),
    ],
)
def test_a_damaged_file_is_refused_with_every_problem(text, messages, tmp_path):
    path = tmp_path / "sample.json"
    path.write_bytes(text)
    with pytest.raises(RecordError) as caught:
        Sample.load(path)
    for message in messages:
        assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_missing_file_is_not_a_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        Sample.load(tmp_path / "none.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordError, match="cannot be read"):
        Sample.load(tmp_path / "folder")


def test_lines_of_a_journal_are_typed_too():
    assert parse(Part, b'{"count": 3}', "line 1") == Part(count=3)
    assert parse(Part, {"count": 3, "share": 1}, "line 1") == Part(count=3, share=1.0)


@dataclass(frozen=True, kw_only=True)
class Earlier(Sample):
    """As an earlier release wrote it, and read by who needs a part of it."""

    UNMARKED: ClassVar[bool] = True
    EXTRA: ClassVar[str] = "ignore"

    note: str | None = None


def test_a_file_without_a_format_is_read_where_that_is_allowed(tmp_path):
    content = {**SAMPLE.to_json(), "version": "0.1.0", "more": 1}
    del content["format"]
    path = tmp_path / "sample.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=r"format None, version '0\.1\.0'; expected 'longrope2\.sample', 3"):
        Sample.load(path)
    found = Earlier.load(path)
    assert found == Earlier(**vars(SAMPLE))
    assert "note" not in found.to_json()  # None by default
    path.write_text(json.dumps({**content, "format": "longrope2.other"}))
    with pytest.raises(RecordError, match=r"format 'longrope2\.other'"):
        Earlier.load(path)


def test_every_format_is_that_of_one_file():
    kinds = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Record)]
    results = (records.EvaluationRecord, records.LeaderboardRow)  # Results, and more
    formats = [kind.FORMAT for kind in kinds if kind not in (Record, *results)]
    assert len(formats) == len(set(formats)) > 8


def test_records_need_no_torch():
    code = "import sys, longrope2.records; print(*{'torch', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
