"""Models and texts that are damaged, or made to do harm: one message, soon, and in little memory."""

import gzip
import json
import os
import shutil
import struct
import tomllib
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import FAMILY_OPTIONS, family_config
from longrope2 import describe, export_model, files
from longrope2.books import read_books
from longrope2.cli import cli
from longrope2.data.config import read_mix
from longrope2.data.plan import read_plan
from longrope2.errors import DataError, LongRopeError, ModelError
from longrope2.evaluation.ruler.haystack import haystack_text
from longrope2.export.card import read_results
from longrope2.export.gguf import GGUFExport
from longrope2.export.weights import SourceModel
from longrope2.factors import RescaleFactors
from longrope2.families import live_config, read_config
from longrope2.files import parse_json, parse_toml, read_json
from longrope2.generation import generate
from longrope2.methods import rescale
from longrope2.models import ASSETS, load, load_tokenizer
from longrope2.pipeline.recipe import read_recipe
from longrope2.records import Manifest, RecordError
from longrope2.search.journal import Journal

FACTORS = rescale("yarn", describe("tiny").rope, 512)

LITTLE = 32 << 20
"""Bytes that reading a config may take."""
NUMBERS = st.one_of(
    st.integers(), st.sampled_from([0, -1, 10**6, 10**9, 10**19, 10**30, 10**400, 1 << 63]), st.floats(width=64)
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)
KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "original_max_position_embeddings", "sliding_window", "layer_types",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval",
    "rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct", "rope_parameters", "rope_scaling",
    "pad_token_id", "eos_token_id", "auto_map", "text_config", "quantization_config", "use_bidirectional_attention",
    "num_experts", "num_local_experts", "num_labels",
)  # fmt: skip
ROPE_KEYS = (
    "rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
    "attention_factor", "short_factor", "long_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
    "mscale", "mscale_all_dim", "truncate", "long_mscale", "short_mscale", "full_attention", "sliding_attention",
)  # fmt: skip
ROPES = st.dictionaries(
    st.sampled_from(ROPE_KEYS),
    st.one_of(VALUES, st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope"]), st.floats(1, 64)),
    max_size=5,
)


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model, and a function that changes its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny", folder)

    def change(**values):
        config = json.loads((ASSETS / "tiny" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))
        return folder

    return change


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**6},
        {"head_dim": 10**9},
        {"head_dim": 10**30},
        {"hidden_size": 10**12, "num_attention_heads": 1, "head_dim": None},
        {"partial_rotary_factor": 1e9},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e9}},
        {"auto_map": 2},
        {"pad_token_id": 10**19},
        {"eos_token_id": [1, 10**19]},
        {"sliding_window": {}},
        {"sliding_window": []},
        {"vocab_size": 10**12, "num_attention_heads": 10**9, "max_position_embeddings": 10**18},
        {"layer_types": ["full_attention"] * 7},
        {"num_labels": 10**9},
    ],
)
def test_a_config_with_implausible_numbers_is_refused_before_anything_is_made(model, values):
    folder = model(**values)
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"the config of this llama model is not usable") as caught:
        describe(folder)
    assert tracemalloc.get_traced_memory()[1] < LITTLE
    tracemalloc.stop()
    named = [key for key in values if key in str(caught.value)]
    assert named or "partial_rotary_factor" in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(ModelError, match="not usable"):
        live_config({**json.loads((folder / "config.json").read_text()), "head_dim": 10**9})


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "MODEL"],
        ["factors", "MODEL", "--target-length", "1k", "--method", "yarn", "-o", "OUT"],
        ["search", "MODEL", "--target-length", "512", "-o", "OUT"],
        ["export", "MODEL", "--factors", "FACTORS", "-o", "OUT"],
        ["train", "MODEL", "--factors", "FACTORS", "--plan", "PLAN", "-o", "OUT"],
        ["generate", "MODEL", "--prompt", "It was"],
        ["evaluate", "MODEL", "--suite", "niah", "-o", "OUT"],
    ],
)
def test_every_command_names_all_problems_of_a_config(model, tmp_path, arguments):
    folder = model(num_hidden_layers=10**9, head_dim=10**30, pad_token_id=10**19)
    FACTORS.save(tmp_path / "FACTORS")
    given = {"MODEL": str(folder), "FACTORS": str(tmp_path / "FACTORS"), "OUT": str(tmp_path / "out"), "PLAN": "no"}
    result = CliRunner().invoke(cli, [given.get(argument, argument) for argument in arguments])
    assert isinstance(result.exception, ModelError), result.output
    assert "3 problems\n  - num_hidden_layers" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels"])
def test_the_parts_of_a_config_have_the_same_limits(part, key):
    with pytest.raises(ModelError, match=rf"gemma3 model is not usable: {part}\.{key} must be at most"):
        live_config({"model_type": "gemma3", part: {key: 10**9}})


def test_weights_that_cannot_be_those_of_the_config_are_refused_before_room_is_made(model):
    """Each size is plausible by itself; together they would take terabytes."""
    folder = model(num_hidden_layers=100, hidden_size=1 << 18, vocab_size=1 << 24)
    with pytest.raises(
        ModelError, match=r"its weights cannot be loaded \(config.json describes [\d,]+, the files have"
    ):
        load(folder)


@settings(max_examples=150)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILY_OPTIONS)))
def test_any_config_is_read_or_refused(data, family):
    config = CONFIGS[family] | data.draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
    for key in data.draw(st.lists(st.sampled_from(["rope_parameters", "rope_scaling"]), max_size=2)):
        config[key] = data.draw(ROPES)
    with suppress(ModelError):
        reading = read_config(config)
        assert len(reading.layer_types) == reading.num_layers <= 1024
        assert reading.rope.rotary_dim <= 4096


DEEP = "[" * 5000 + "]" * 5000
HOSTILE = {
    "nesting": (f'{{"a": {DEEP}}}', "nested more than 100 levels deep"),
    "levels": ('{"a": ' * 101 + "1" + "}" * 101, "nested more than 100 levels deep"),
    "digits": (f'{{"a": {"9" * 5000}}}', "4300 digits"),
    "surrogate": (r'{"a": "\ud800"}', "half a character"),
    "integer": (f'{{"a": {10**30}}}', "an integer of 31 digits"),
    "infinity": ('{"a": 1e999}', "1e999 is not a number that JSON has"),
    "NaN": ('{"a": NaN}', "NaN is not a number that JSON has"),
    "UTF-8": (b'{"a": "\xff"}', "can't decode byte"),
    "syntax": ('{"a": ', "Expecting value"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_that_is_only_unusual_is_read(tmp_path, monkeypatch):
    nested = "[" * 100 + "]" * 100
    assert parse_json(nested) == json.loads(nested)
    assert parse_json(r'"\ud83d\ude00"') == "😀"
    assert parse_json(b"\xef\xbb\xbf1") == 1
    assert parse_json(f"[{2**64 - 1}, {-(2**63)}, 1e308, 0.1234567890123456789]") == [
        2**64 - 1,
        -(2**63),
        1e308,
        0.12345678901234568,
    ]
    assert parse_json(f"[{10**30}, Infinity]", lenient=True) == [10**30, float("inf")]
    monkeypatch.setattr(files, "MOST_BYTES", 8)
    (tmp_path / "f.json").write_text('"123456"')
    assert read_json(tmp_path / "f.json") == "123456"
    (tmp_path / "f.json").write_text('"1234567"')
    with pytest.raises(ValueError, match="9 bytes, at most 8 expected"):
        read_json(tmp_path / "f.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".".join(["a"] * 50_000) + " = 1", "a key of more than 100 parts"),
        ("x = {" + " . ".join(['"a b"'] * 50_000) + " = 1}", "a key of more than 100 parts"),
        ("[" + ".".join(["'a'"] * 50_000) + "]", "a key of more than 100 parts"),
        ("x = " + "[" * 10_000, "nested too deep"),
        ("x = " + "9" * 5000, "digits"),
        ("x = 0x" + "f" * 1_000_000 + '"' * 100_000, "Expected newline"),
    ],
)
def test_hostile_toml_is_a_value_error_soon(text, message):
    with pytest.raises(ValueError, match=message):
        parse_toml(text)


def test_toml_that_is_only_unusual_is_read():
    text = f"# {'.' * 300}\n{'.'.join(['a'] * 100)} = 1.5\nb = '{'so. ' * 90}'\nc = [{'1.5, ' * 300}]\n"
    assert parse_toml(text) == tomllib.loads(text)


def test_pipes_in_the_place_of_files_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path / "manifest.json")
    with pytest.raises(RecordError, match="not a regular file"):
        Manifest.load(tmp_path / "manifest.json")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device")
def test_a_prompt_has_an_end(monkeypatch):
    monkeypatch.setattr(generate, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match="/dev/zero: more than 1,000 bytes"):
        generate._decoded(Path("/dev/zero"))


@settings(max_examples=200)
@given(VALUES.filter(lambda value: "inf" not in str(value).lower() and "nan" not in str(value).lower()))
def test_what_json_holds_comes_back(value):
    text = json.dumps(value)
    assert parse_json(text, lenient=True) == json.loads(text)


READERS = {
    "config.json": lambda path: describe(path.parent),
    "tokenizer_config.json": lambda path: export_model("tiny-copy", path.parent / "out", factors=FACTORS),
    "model.safetensors.index.json": lambda path: SourceModel(describe(path.parent)).tensors,
    "tokenizer.json": lambda path: load_tokenizer(describe(path.parent)),
    "factors.json": RescaleFactors.load,
    "texts.jsonl": lambda path: list(read_books(path)),
    "plan.jsonl": read_plan,
    "mix.toml": read_mix,
    "recipe.toml": read_recipe,
    "results.json": read_results,
    "history.jsonl": lambda path: Journal(path, {"a": 1}),
    "essays.json": haystack_text,
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_of_json_gives_one_message(model, monkeypatch, name):
    folder = model()
    monkeypatch.chdir(folder.parent)
    folder.rename("tiny-copy")
    path = Path("tiny-copy") / name
    if "index" in name:
        (path.parent / "model.safetensors").unlink()
    for kind in ("nesting", "digits", "syntax", "surrogate"):
        text = HOSTILE[kind][0]
        path.write_text(f"a = {text[6:-1]}" if path.suffix == ".toml" else f"{text}\n")
        with pytest.raises(LongRopeError, match=r"tiny-copy|its tokenizer cannot be loaded") as caught:
            READERS[name](path)
        assert len(str(caught.value)) < 800


def test_a_line_that_fills_the_memory_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "fine"}\n')
        for _ in range(200):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="line 2 has more than 1,048,576 bytes"):
        list(read_books(path))
    assert tracemalloc.get_traced_memory()[1] < LITTLE
    tracemalloc.stop()
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on disk
    with pytest.raises(DataError, match=r"b\.txt: 1,099,511,627,776 bytes are too many for one text"):
        list(read_books(tmp_path / "b.txt"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    export_model("tiny", path, factors=FACTORS, format="gguf")
    return path


def damaged(gguf_file, tmp_path, key, value, offset=0):
    """The file with other bytes after the name of a value or tensor."""
    content = bytearray(gguf_file.read_bytes())
    start = content.index(key.encode()) + len(key) + offset
    content[start : start + len(value)] = value
    (tmp_path / "bad.gguf").write_bytes(content)
    return tmp_path / "bad.gguf"


@pytest.mark.parametrize(
    ("key", "offset", "value"),
    [
        ("llama.block_count", 4, struct.pack("<I", 10**9)),
        ("llama.attention.head_count", 4, struct.pack("<I", 0)),
        ("llama.attention.key_length", 4, struct.pack("<I", 1 << 31)),
        ("llama.context_length", 0, struct.pack("<I", 7)),
        ("tokenizer.ggml.token_type", 8, struct.pack("<Q", 1 << 60)),
        ("tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 60)),
        ("token_embd.weight", 4, struct.pack("<Q", 1 << 40)),
        ("token_embd.weight", 4, struct.pack("<Q", 3)),
        ("token_embd.weight", 0, struct.pack("<I", 1 << 31)),
        ("blk.0.attn_q.weight", 4, struct.pack("<Q", 1 << 63)),
        ("longrope2.factors", 4, struct.pack("<Q", 9)),
    ],
)
def test_a_damaged_gguf_file_is_refused(gguf_file, tmp_path, key, offset, value):
    path = damaged(gguf_file, tmp_path, key, value, offset)
    with pytest.raises(LongRopeError, match=r"bad\.gguf|the config of this llama model is not usable"):
        load(path, device="cpu")


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_gguf_file_is_read_or_refused(gguf_file, tmp_path, data):
    content = bytearray(gguf_file.read_bytes())
    header = content.index(b"blk.5.ffn_down.weight") + 50
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    (tmp_path / "any.gguf").write_bytes(content)
    with suppress(LongRopeError):
        describe(tmp_path / "any.gguf")
    with suppress(LongRopeError):
        GGUFExport(tmp_path / "any.gguf")


CONFIGS = {family: family_config(family).to_dict() for family in FAMILY_OPTIONS}
