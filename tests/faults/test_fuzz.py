"""Damaged and hostile files through whole commands: a right result, or one message and exit code 2, soon."""

import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
from commands import COMMANDS, MIX, OUT, SCALE
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longrope2.models import ASSETS
from test_hostile import HOSTILE, KEYS, ROPES, VALUES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks and /proc")]
SECONDS, MEGABYTES = 60, 500
MODEL_COMMANDS = (
    "inspect MODEL --json",
    "factors MODEL --target-length 1k --method yarn -o out/f.json",
    "generate MODEL --prompt Once --max-new-tokens 2",
    "export MODEL --factors f.json -o out/model",
)
campaign = settings(max_examples=60 * SCALE, derandomize=SCALE == 1)


def attempt(forks, kind, command, **names):
    """Run a command, and give its result; whatever a user should not see fails."""
    shutil.rmtree(forks.folder / OUT, ignore_errors=True)
    ended = forks.run([names.get(word, word) for word in command.split()], timeout=SECONDS)
    assert not ended.problem, ended
    assert ended.megabytes < MEGABYTES, ended
    assert len(ended.errors) < 5000, ended
    forks.count(kind, "refused" if ended.code else "done")
    return ended


@pytest.fixture(scope="module")
def model(forks):
    return shutil.copytree(ASSETS / "tiny", forks.folder / "model")


@campaign
@given(
    values=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    ropes=st.dictionaries(st.sampled_from(["rope_parameters", "rope_scaling"]), ROPES, max_size=1),
    command=st.sampled_from(MODEL_COMMANDS),
    in_parts=st.booleans(),
)
def test_any_config(forks, model, values, ropes, command, in_parts):
    config = json.loads((ASSETS / "tiny" / "config.json").read_text()) | values | ropes
    if in_parts:  # as models that also see
        config = {"model_type": "llava", "text_config": config, "vision_config": values}
    (model / "config.json").write_text(json.dumps(config))
    ended = attempt(forks, "configs", command, MODEL=model)
    if ended.code == 0 and command.startswith("inspect") and not in_parts:
        assert_as_transformers_reads_it(json.loads(ended.output), model)


def assert_as_transformers_reads_it(found, folder):
    try:
        config = AutoConfig.from_pretrained(folder)
        frequencies = LlamaRotaryEmbedding(config).inv_freq.double().numpy()
    except Exception:  # it runs fewer models than we describe
        return
    assert found["num_layers"] == config.num_hidden_layers
    if found["rescaled_by"] is None:
        assert frequencies == pytest.approx(2 * math.pi / np.array(found["periods"]), rel=1e-5)


@pytest.fixture(scope="module")
def gguf_file(forks):
    path = forks.folder / "tiny.gguf"
    assert forks.run(["export", "tiny", "--factors", "f.json", "--format", "gguf", "-o", path]).code == 0
    return path


@campaign
@given(data=st.data())
def test_any_gguf_file(forks, gguf_file, data):
    content = bytearray(gguf_file.read_bytes())
    header = content.index(b"blk.5.ffn_down.weight") + 50
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([1, 4, 8]))
        place = data.draw(st.integers(0, header - width))
        content[place : place + width] = data.draw(st.binary(min_size=width, max_size=width))
    if data.draw(st.integers(0, 4)) == 0:
        del content[data.draw(st.integers(0, len(content))) :]
    path = forks.folder / "damaged.gguf"
    path.write_bytes(content)
    ended = attempt(forks, "GGUF files", data.draw(st.sampled_from(MODEL_COMMANDS)), MODEL=path)
    if ended.code == 0 and ended.output.startswith("{"):
        found, fields = json.loads(ended.output), GGUFReader(path).fields
        assert found["num_layers"] == fields["llama.block_count"].contents()
        assert math.isclose(found["theta"], fields["llama.rope.freq_base"].contents(), rel_tol=1e-6)


READERS = {
    "f.json": "export tiny --factors f.json -o out/model",
    "plan.jsonl": "train tiny --factors f.json --plan plan.jsonl --cache cache --steps 1 --batch-rows 1 -o out",
    "mix.toml": "data plan tiny --config mix.toml -o out/plan.jsonl --cache cache",
    "recipe.toml": "extend --config recipe.toml --cache cache --dry-run -o out",
    "notes/*.dataset": "train tiny --factors f.json --plan shards.jsonl --cache notes --steps 1 --batch-rows 1 -o out",
    "texts.jsonl": "data recall tiny -o out/recall.jsonl --lengths 512 --documents 2 --needles 2 --books texts.jsonl",
    "model/tokenizer.json": "generate model --prompt Once --max-new-tokens 2",
    "model/tokenizer_config.json": "export model --factors f.json --format gguf -o out/model.gguf",
    "model/model.safetensors": "generate model --prompt Once --max-new-tokens 2",
    "run/pipeline.json": "watch run --once",
    "run/search/search.json": "report run",
    "run/search/factors.json": "report run",
    "run/search/history.jsonl": "watch run --once",
    "run/data/plan.jsonl": "report run",
    "run/train/log.jsonl": "report run",
    "run/train/model/training.json": "report run",
    "run/evaluate/yarn/niah/results.json": "compare run/evaluate/yarn/niah run/evaluate/base/niah",
    "run/export/tiny-512/config.json": "generate run/export/tiny-512 --prompt Once --max-new-tokens 2",
    "run/export/tiny-512/factors.json": "report run",
}
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
HOSTILE_TOML = ("a" + ".a" * 50_000 + " = 1", "a = " + "[" * 50_000, "[" + "a." * 50_000 + "a]", "a = " + "9" * 5000)
OTHER_VALUES = (b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"[]", b"{}", b'"x"', rb'"\ud800"', b"9" * 30, b"1.5")


@pytest.fixture(scope="module")
def originals(forks, model):
    """A folder with a file of every kind that a command reads."""
    shutil.copyfile(ASSETS / "tiny" / "config.json", model / "config.json")
    text = (forks.folder / "texts" / "book.txt").read_text()
    books = [{"title": f"part {place}", "text": text[place : place + 6000]} for place in range(0, 60_000, 6000)]
    (forks.folder / "texts.jsonl").write_text("\n".join(map(json.dumps, books)))
    assert forks.run(COMMANDS["extend"].replace("-o out", "-o run").split()).code == 0
    for line in ("tokenise lines.jsonl --model tiny -o shards", "plan tiny --config shards.toml -o shards.jsonl"):
        (forks.folder / "shards.toml").write_text(MIX.replace("texts", "shards").replace("cut =", "# cut ="))
        assert forks.run(["data", *line.split(), *(["--cache", "notes"] if "plan" in line else [])]).code == 0
    for name in READERS:
        kept = forks.folder / "originals" / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(forks.folder.glob(name)), kept)
    return forks.folder / "originals"


@settings(campaign, max_examples=100 * SCALE)
@given(data=st.data(), name=st.sampled_from(sorted(READERS)))
def test_any_file_of_ours(forks, originals, data, name):
    path = next(forks.folder.glob(name))
    path.write_bytes(damaged(data.draw, (originals / name).read_bytes()))
    try:
        attempt(forks, "files of all kinds", READERS[name])
    finally:
        shutil.copyfile(originals / name, path)


def damaged(draw, content):
    """Content with another value in it, other bytes, a part missing or twice, or something hostile in its place."""
    reach = min(len(content), 30_000)  # of a model's weights only the header
    first, last = sorted(draw(st.tuples(st.integers(0, reach), st.integers(0, reach))))
    numbers = list(NUMBER.finditer(content[:reach]))
    kind = draw(st.sampled_from(["bytes", "cut", "end", "doubled", "hostile"] + 3 * ["value"] * bool(numbers)))
    if kind == "value":
        number = draw(st.sampled_from(numbers))
        return content[: number.start()] + draw(st.sampled_from(OTHER_VALUES)) + content[number.end() :]
    if kind == "bytes":
        other = draw(st.binary(min_size=1, max_size=8))
        return content[:first] + other + content[first + len(other) :]
    if kind == "hostile":
        text = draw(st.sampled_from([*(text for text, _ in HOSTILE.values()), *HOSTILE_TOML]))
        return text if isinstance(text, bytes) else text.encode()
    return {
        "cut": content[:first] + content[last:],
        "end": content[:first],
        "doubled": content[:last] + content[first:],
    }[kind]
