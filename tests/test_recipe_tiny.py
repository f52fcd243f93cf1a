"""The recipe of the tiny base: its documents are what they claim to be, and its scripts run to the end."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny"


@pytest.fixture(scope="module")
def recipe() -> Iterator[tuple[ModuleType, ModuleType, ModuleType, ModuleType]]:
    """The recipe's scripts, which are no package: imported as they import each other."""
    sys.path.insert(0, str(RECIPE))
    import card
    import evaluate
    import recall
    import train

    precision = torch.get_float32_matmul_precision()  # which the training script sets
    yield recall, train, evaluate, card
    torch.set_float32_matmul_precision(precision)
    sys.path.remove(str(RECIPE))


@pytest.fixture(scope="module")
def recall(recipe):
    return recipe[0]


@pytest.fixture(scope="module")
def books():
    from longrope2.books import Book, read_books

    return [
        Book(title=book.title, text=book.text[:200_000], source=book.source)
        for book in read_books(None, held_out=False)
    ]


@pytest.fixture(scope="module")
def tokenizer(recipe, books):
    return recipe[1].train_tokenizer(books, 4096)


@pytest.fixture(scope="module")
def maker(recall, books, tokenizer):
    def make(law: str, which: str = "train"):
        return recall.RecallMaker(
            stream=stream,
            wordings=[recall.Wording.compile(tokenizer, t) for t in recall.read_templates(which)],
            keys=keys,
            digits=[tokenizer.token_to_id(digit) for digit in "0123456789"],
            bos=tokenizer.token_to_id("<s>"),
            eos=tokenizer.token_to_id("</s>"),
            window=256,
            law=law,
        )

    stream = recall.TokenStream.from_books(tokenizer, books, window=256)
    keys = recall.make_keys(tokenizer, books, count=2000, seed=0)
    return make


def batch(recall, maker, *, length: int = 256, rows: int = 400, needles=(1, 1, 2, 3), seed: str = "test"):
    step = recall.Step(length=length, rows=rows, needle_counts=needles)
    return recall.Batches(maker, [step], seed=seed)[0]


SMOKE = ["--smoke", "--steps-scale", "0.15", "--device", "cpu"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    """The folder that the script leaves, run as a process."""
    folder = tmp_path_factory.mktemp("smoke")
    command = [sys.executable, str(RECIPE / "train.py"), *SMOKE, "--output", str(folder), "--seed", "3"]
    # One thread: beside other tests, threads that wait for each other cost more than they bring.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=300, capture_output=True, env=environment)
    return folder


def test_numbers_have_a_token_per_digit_and_keys_are_short(tokenizer):
    from longrope2.needles import key_value

    tokens = tokenizer.encode(" 6716097.", add_special_tokens=False).tokens
    assert tokens == ["Ġ", *"6716097", "."]
    assert tokenizer.encode("x").tokens == ["<s>", "x"]
    rng = np.random.default_rng(0)
    for _ in range(50):
        key, _ = key_value(rng)
        assert len(tokenizer.encode(f" {key}", add_special_tokens=False)) == 3


@pytest.mark.parametrize("which", ["train", "held_out"])
def test_sentences_joined_from_pieces_have_the_tokens_of_the_whole(recall, tokenizer, maker, which):
    rng = random.Random(0)
    for template in recall.read_templates(which):
        wording = recall.Wording.compile(tokenizer, template)
        value = recall.encode(tokenizer, "1234567")
        for key in rng.sample(maker("skewed").keys, 50):
            for separator in recall.SEPARATORS:
                needle = template["needle"].replace("{key}", key.text).replace("{value}", "1234567")
                assert wording.needle[separator].fill(key, value) == recall.encode(tokenizer, separator + needle)
                question = f"{template['question']} {template['answer_prefix']}".replace("{key}", key.text)
                whole = recall.encode(tokenizer, f"{separator}{question} 1234567")
                assert wording.question[separator].fill(key) + value == whole


def test_templates_serve_the_evaluation(recall):
    from longrope2.needles import PAPER_TEMPLATE, NeedleTemplate

    train = [NeedleTemplate.from_dict(template) for template in recall.read_templates("train")]
    held_out = [NeedleTemplate.from_dict(template) for template in recall.read_templates("held_out")]
    assert PAPER_TEMPLATE in train
    assert len(train) >= 12
    assert len(held_out) >= 3
    assert not {template.needle for template in train} & {template.needle for template in held_out}


@pytest.mark.parametrize("law", ["skewed", "uniform", "short"])
@pytest.mark.parametrize("length", [64, 128, 192, 256])
def test_the_answer_stands_where_the_mask_says_and_in_the_needle(recall, tokenizer, maker, law, length):
    ids, answers, distances = batch(recall, maker(law), length=length, rows=100)
    assert ids.shape == answers.shape == (100, length)
    assert not answers[:50].any(), "book rows have no answer"
    assert (ids[:, 0] == tokenizer.token_to_id("<s>")).all()
    assert not (ids[:, 1:] == tokenizer.token_to_id("<s>")).any()
    for row, mask, distance in zip(ids[50:], answers[50:], distances.tolist(), strict=True):
        places = mask.nonzero().flatten()
        assert len(places) == 7
        assert places.tolist() == list(range(length - 8, length - 1))
        value = tokenizer.decode(row[places].tolist())
        assert value.isdecimal()
        assert value[0] != "0"
        assert torch.equal(row[places - distance], row[places]), "the value stands `distance` tokens earlier"
        assert tokenizer.decode(row.tolist()).count(value) == 2
        assert row[-1] == tokenizer.token_to_id("</s>")


def test_each_document_asks_for_one_of_its_needles(recall, tokenizer, maker):
    ids, answers, _ = batch(recall, maker("uniform"), needles=(3,), rows=100)
    distinct = set()
    for row, mask in zip(ids[50:], answers[50:], strict=True):
        text = tokenizer.decode(row[1:-8].tolist())
        digits = "".join(character if character.isdecimal() else " " for character in text)
        values = [number for number in digits.split() if len(number) == 7]
        asked = tokenizer.decode(row[mask].tolist())
        assert asked in values
        distinct.add((len(values), values.index(asked)))
    assert {(3, 0), (3, 1), (3, 2)} <= distinct, "the asked needle may be the first, middle or last"


def test_distances_follow_their_law(recall, maker):
    distances = {law: batch(recall, maker(law), rows=2000)[2].float() for law in ("skewed", "uniform", "short")}
    assert distances["skewed"].median() < 0.5 * distances["uniform"].median()
    assert distances["skewed"].max() > 200, "the law is skewed, but reaches over the window"
    assert all(values.max() < 256 for values in distances.values())
    assert distances["short"].max() <= 64
    middle = distances["uniform"].quantile(0.5)
    assert 110 < middle < 160


def test_drawn_distances_follow_the_truncated_pareto_law(recall):
    rng = random.Random(0)
    draws = [recall.draw_distance("skewed", rng, 5, 240) for _ in range(20_000)]
    assert min(draws) == recall.PARETO_MINIMUM
    assert max(draws) <= 240
    for limit in (20, 50, 150):
        whole = 1 - (12 / 241) ** 1.5
        expected = (1 - (12 / limit) ** 1.5) / whole
        assert np.mean(np.array(draws) < limit) == pytest.approx(expected, abs=0.015)


def test_batches_depend_on_seed_and_number_alone(recall, maker):
    step = recall.Step(length=128, rows=16, needle_counts=(1, 2))
    batches = recall.Batches(maker("skewed"), [step] * 3, seed="a")
    again = recall.Batches(maker("skewed"), [step] * 3, seed="a")
    for mine, other in zip(batches[2], again[2], strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(batches[1][0], batches[2][0])
    assert not torch.equal(recall.Batches(maker("skewed"), [step] * 3, seed="b")[2][0], batches[2][0])


def test_a_document_that_no_wording_fits_is_refused(recall, maker):
    from longrope2.errors import DataError

    with pytest.raises(DataError, match="no wording fits into 24 tokens"):
        batch(recall, maker("skewed"), length=24, rows=4)


def test_books_too_short_are_refused(recall, tokenizer):
    from longrope2.books import Book
    from longrope2.errors import DataError

    with pytest.raises(DataError, match="no book of at least 1,024 tokens"):
        recall.TokenStream.from_books(tokenizer, [Book(title="t", text="short", source="s")], window=256)


def test_schedule_warms_up_and_decays(recipe):
    config = recipe[1].TinyConfig()
    steps = len(config.schedule())
    assert steps == sum(stage.steps for stage in config.stages)
    rates = [config.learning_rate_at(step) for step in range(steps)]
    assert rates[0] == pytest.approx(1e-5)
    assert max(rates) == rates[100] == config.learning_rate
    assert rates[-1] == pytest.approx(config.final_learning_rate, rel=0.01)
    assert all(step.rows * step.length <= config.tokens_per_step for step in config.schedule())


def test_smoke_training_makes_a_folder_that_transformers_loads(recipe, smoke):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert len(recipe[1].TinyConfig().smoke().schedule()) == 20
    record = json.loads((smoke / "training.json").read_text(encoding="utf-8"))
    assert record["config"]["distances"] == "skewed"
    assert record["log"][-1]["step"] == 3
    assert sum(record["distances"]["counts"]) > 0
    assert {"torch", "transformers", "longrope2"} <= set(record["versions"])
    model = AutoModelForCausalLM.from_pretrained(smoke)
    tokenizer = AutoTokenizer.from_pretrained(smoke)
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == 256
    assert (smoke / "model.safetensors").stat().st_size < 16e6
    assert tokenizer("7 kites").input_ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.decode(tokenizer("Call me 12.\n").input_ids, skip_special_tokens=True) == "Call me 12.\n"


def test_evaluation_and_card(recipe, books, tokenizer, tmp_path, monkeypatch):
    """On next to nothing: the numbers mean nothing, but every path is walked."""
    from longrope2.books import read_books
    from longrope2.files import write_json

    recall, train, evaluate, card = recipe
    small = replace(train.TinyConfig().smoke(), num_layers=1, hidden_size=64, num_heads=1, num_key_value_heads=1)
    monkeypatch.setattr(train, "train_tokenizer", lambda *_: tokenizer)
    model, _, record = train.train(small, books, device=torch.device("cpu"), compiled=False, workers=0)
    assert [line["step"] for line in record["log"]] == [10, 20]
    train.save(tmp_path, model, tokenizer, record)
    config = evaluate.EvaluationConfig(
        documents=1,
        long_documents=1,
        text_rows=2,
        inside=(64, 128),
        beyond=(512,),
        target_length=512,
        flat_multiples=(1.0,),
        ramp_start_stride=99,
    )
    held_out = [replace(book, text=book.text[:50_000]) for book in read_books(None, held_out=True, limit=2)]
    monkeypatch.setattr(evaluate, "read_templates", lambda which: recall.read_templates(which)[:4])
    evaluation = evaluate.evaluate(tmp_path, held_out, config, "cpu")
    for which in ("train", "held_out"):
        assert [result["length"] for result in evaluation["retrieval"][which]] == [64, 128]
        assert all(result["wordings"] >= 3 for result in evaluation["retrieval"][which])
    names = [result["name"] for result in evaluation["extension"]["results"]]
    assert len(names) == len(set(names)) == 8 + 2 * 9
    write_json(tmp_path / "evaluation.json", evaluation)
    assert card.main([str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"{record['parameters']:,} parameters" in text
    assert all(name in text for name in ("YaRN", "ntk below", "ramp 0–"))


def test_factors_are_taken_out_again(recipe):
    _, train, evaluate, _ = recipe
    config = train.TinyConfig(num_layers=1, hidden_size=64, num_heads=1, num_key_value_heads=1)
    model = train.make_model(config, train.train_tokenizer([], 258))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).logits
        with evaluate.scaled_rope(model, evaluate.Factors(name="half", long=(2.0,) * 32, attention_factor=1.1)):
            inside = model(ids).logits
        after = model(ids).logits
    assert not torch.allclose(before, inside)
    assert torch.equal(before, after)


def test_one_seed_gives_one_model(recipe, smoke, one_thread, tmp_path):
    """In another process, too."""
    from safetensors.torch import load_file

    _, train, _, _ = recipe
    again, other = tmp_path / "again", tmp_path / "other"
    for folder, seed in ((again, "3"), (other, "4")):
        assert train.main([*SMOKE, "--output", str(folder), "--seed", seed]) == 0
    weights = [load_file(folder / "model.safetensors") for folder in (smoke, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert (smoke / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()


def test_bad_books_end_with_a_message(tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            str(RECIPE / "train.py"),
            "--books",
            str(tmp_path),
            "--output",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "no .txt file" in result.stderr
    assert "Traceback" not in result.stderr
