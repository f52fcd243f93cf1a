"""`longrope2 data plan` as a user meets it: sources in words or in a file, a plan, its composition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longrope2.cli import cli
from longrope2.data.config import Source, parse_buckets, parse_tokens, read_mix
from longrope2.data.loader import RowLoader
from longrope2.data.plan import plan_documents, read_plan
from longrope2.errors import DataError, LongRopeError
from longrope2.models import ASSETS
from longrope2.records import as_json

WORDS = "the old man went down to the sea and saw a ship that came from far away".split()  # noqa: SIM905


def run(*arguments, **options):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "longrope2", "data", "plan", *map(str, arguments)],
        capture_output=True, text=True, env=environment, check=False, **options,
    )  # fmt: skip


def write_documents(path, count, mean, seed):
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for length in rng.integers(mean // 2, mean * 3 // 2, count):
            file.write(json.dumps({"text": " ".join(rng.choice(WORDS, length))}) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    write_documents(folder / "notes.jsonl", 400, 80, seed=0)
    write_documents(folder / "stories.jsonl", 200, 400, seed=1)
    write_documents(folder / "novels.jsonl", 100, 900, seed=2)
    (folder / "mix.toml").write_text(
        """
        [plan]
        target_length = 1024
        seed = 5
        tokens = "20k"

        [[source]]
        path = "notes.jsonl"

        [[source]]
        path = "stories.jsonl"
        weight = 2
        upsample = 0.5
        name = "stories"

        [[source]]
        path = "novels.jsonl"

        [[bucket]]
        up_to = 256
        quota = 1
        name = "short"

        [[bucket]]
        up_to = 2000
        quota = 3
        """
    )
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_a_plan_from_the_command_line(folder, cache, tmp_path):
    sources = [part for name in ("notes", "stories", "novels") for part in ("--source", folder / f"{name}.jsonl")]
    options = ["--target-length", "1k", "--tokens", "40k", "--seed", "3", "--cache", cache]
    result = run("tiny", *sources, *options, "-o", tmp_path / "plan.jsonl")
    assert result.returncode == 0, result.stderr
    assert "39 rows of 1,024 tokens" in result.stdout
    assert "801-1600" in result.stdout
    assert "tokenising" in result.stderr
    plan = read_plan(tmp_path / "plan.jsonl")
    assert len(plan) == 39
    assert [bucket.rows for bucket in plan.report.buckets] == [12, 12, 15]
    assert plan.report.padding_share <= 0.01
    rows = RowLoader.open(plan, cache)
    assert {rows.row(index).token_ids.shape for index in range(len(rows))} == {(1024,)}


def test_a_plan_from_a_file_with_json(folder, cache, tmp_path, capsys):
    outputs = []
    for name in ("a", "b"):
        plan_documents("tiny", tmp_path / name, config=folder / "mix.toml", cache=cache)
        assert capsys.readouterr().out == ""
    for name in ("b", "c"):
        options = ["--config", str(folder / "mix.toml"), "--cache", str(cache), "--json"]
        cli.main(["data", "plan", "tiny", "-o", str(tmp_path / name), *options], standalone_mode=False)
        outputs.append(json.loads(capsys.readouterr().out))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert outputs[0] == outputs[1] == as_json(read_plan(tmp_path / "a").report)
    assert outputs[0]["rows"] == 19
    assert [bucket["bucket"] for bucket in outputs[0]["buckets"]] == ["short", "257-2000"]
    # Paths are looked for beside the file, and named as they stand in it.
    assert [source["source"] for source in outputs[0]["sources"]] == ["notes.jsonl", "stories", "novels.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--target-length", "1k"], "no source given"),
        (["tiny", "--target-length", "128", "--source", "books"], "target_length must not be below the trained window"),
        (["tiny", "--target-length", "1k", "--source", "x", "--buckets", "8k"], "'8k' is not a bucket"),
        (["tiny", "--source", "books"], "target_length is missing"),
        (["tiny", "--config", "none.toml"], "none.toml: cannot be read"),
        (["tiny", "--target-length", "1k", "--tokens", "9k", "--source", "no.txt"], "'no.txt' is neither a file"),
        (["tiny", "--target-length", "1k", "--tokens", "9k", "--source", "no.jsonl"], "'no.jsonl' is neither a file"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(arguments, message, tmp_path, forked):
    ended = forked.run(["data", "plan", *arguments, "-o", "plan.jsonl"], cwd=tmp_path)
    assert (ended.code, ended.problem) == (2, ""), ended.errors
    assert message in ended.errors
    assert ended.output == ""
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_planned_or_written_is_refused_before_tokenising(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("longrope2.data.plan.corpus_of", None)
    options = {"config": folder / "mix.toml", "cache": tmp_path / "cache"}
    with pytest.raises(LongRopeError, match="Is a directory"):
        plan_documents("tiny", tmp_path, **options)
    with pytest.raises(DataError, match="weight must be above 0"):
        plan_documents("tiny", tmp_path / "p", sources=[Source(path="books", weight=-1.0)], **options)
    with pytest.raises(DataError, match="rows can be planned"):
        plan_documents("tiny", tmp_path / "p", tokens="1e30", **options)


def test_flags_win_over_the_file(folder, cache, tmp_path, capsys):
    plan = plan_documents(
        "tiny", tmp_path / "p", config=folder / "mix.toml", cache=cache,
        sources=[Source.parse(f"{folder / 'notes.jsonl'}=2")], buckets=parse_buckets("64:1,256:1"), seed=9, tokens="5k",
    )  # fmt: skip
    assert plan.config.seed == 9
    assert len(plan) == 4
    assert [source.weight for source in plan.sources] == [2.0]
    assert [bucket.label for bucket in plan.config.buckets] == ["1-64", "65-256"]
    assert "4 rows" in capsys.readouterr().err


def test_books_cut_to_lengths_serve_every_bucket(tmp_path, monkeypatch):
    """The package's books alone are enough for the tiny model."""
    config = tmp_path / "c.toml"
    config.write_text('[plan]\ntarget_length = 1024\n[[source]]\npath = "books"\ncut = [256, 800, 1600]\n')
    short = [next(iter(sources_read()))]
    monkeypatch.setattr("longrope2.data.corpus.read_documents", lambda source: iter(short))
    plan = plan_documents("tiny", tmp_path / "p", config=config, cache=tmp_path / "cache", tokens="30k")
    assert [bucket.rows for bucket in plan.report.buckets] == [9, 9, 11]
    assert not any("bucket" in warning for warning in plan.report.warnings)


def sources_read():
    from longrope2.books import Book, read_books

    for book in read_books(limit=1):
        yield Book(title=book.title, text=book.text[:400_000], source=book.source)


def test_the_word_books_in_a_config_file_is_no_folder_beside_it(tmp_path, monkeypatch):
    (tmp_path / "books").mkdir()
    (tmp_path / "c.toml").write_text('[[source]]\npath = "books"\n[[source]]\npath = "./books"\n')
    monkeypatch.chdir(tmp_path)
    sources = read_mix(Path("c.toml"))["sources"]
    assert [(source.path, source.label) for source in sources] == [
        ("books", "books"),
        (str(tmp_path / "books"), "./books"),
    ]


def test_every_problem_of_a_config_file_at_once(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        """
        sauce = 1
        plan = {seeds = 1, seed = "x", repeat = 1, rows = true}
        [[source]]
        paths = "x"
        [[bucket]]
        up_to = 5.5
        size = 1
        """
    )
    with pytest.raises(DataError) as error:
        read_mix(path)
    for problem in (
        "unknown key 'sauce'", "plan: unknown key 'seeds'", 'plan: seed must be a whole number, got "x"',
        "plan: repeat must be true or false, got 1", "plan: rows must be a whole number, got true",
        "source 1: unknown key 'paths', did you mean 'path'?", "source 1: path is missing",
        'bucket 1: up_to must be a length such as "32k", got 5.5',
        "bucket 1: unknown key 'size'", "bucket 1: quota is missing",
    ):  # fmt: skip
        assert problem in error.value.message
    assert "text_column" in error.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "not valid TOML"),
        ("plan = 3", "plan must be a table, got 3"),
        ("source = 3", "source must be a list of tables"),
        ("bucket = [3]", "bucket must be a list of tables"),
        ("source = [3]", "source must be a list of tables"),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(DataError, match=message):
        read_mix(tmp_path / "c.toml")


def test_rows_of_no_tokens_are_refused(tmp_path):
    (tmp_path / "c.toml").write_text('[plan]\ntarget_length = 0\ntokens = "1M"\n[[source]]\npath = "books"')
    with pytest.raises(DataError, match="target_length must not be below the trained window of 256, got 0"):
        plan_documents("tiny", tmp_path / "plan.jsonl", config=tmp_path / "c.toml")


def test_a_table_of_the_config_file_must_be_utf_8(tmp_path):
    (tmp_path / "c.toml").write_bytes(b'x = "\xff"')
    with pytest.raises(DataError, match="not valid TOML"):
        read_mix(tmp_path / "c.toml")


def test_numbers_of_tokens():
    assert parse_tokens("10B") == 10_000_000_000
    assert parse_tokens("1.5m") == 1_500_000
    assert parse_tokens(2_000) == parse_tokens("2_000") == parse_tokens("2k") == 2000
    for wrong in ("many", "", "infB"):
        with pytest.raises(DataError, match="is not a number of tokens"):
            parse_tokens(wrong)


def test_buckets_in_words():
    short, middle, top = parse_buckets("8k:3, 100k:3, 1M:4.5")
    assert (short.above, short.up_to, middle.above, top.up_to, top.quota) == (0, 8192, 8192, 1 << 20, 4.5)
    with pytest.raises(DataError, match="'x:1' is not a bucket"):
        parse_buckets("8k:3,x:1")


def test_tokens_or_rows_but_not_both(folder, cache, tmp_path):
    with pytest.raises(DataError, match="both tokens and rows are given"):
        plan_documents("tiny", tmp_path / "p", config=folder / "mix.toml", rows=3, tokens="9k")
    assert len(plan_documents("tiny", tmp_path / "p", config=folder / "mix.toml", cache=cache, rows=3)) == 3


def test_a_model_without_a_tokenizer_is_refused(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((ASSETS / "tiny" / name).read_bytes())
    with pytest.raises(LongRopeError, match="its tokenizer cannot be loaded"):
        plan_documents(str(tmp_path), tmp_path / "p", config=folder / "mix.toml")
