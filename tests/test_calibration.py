"""Where to switch: what is measured equals plain forwards, and the rule follows from it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from longrope2.books import read_books
from longrope2.calibration import calibrate as stage
from longrope2.calibration.calibrate import calibrate, calibration_table, measure
from longrope2.calibration.config import CalibrationConfig
from longrope2.calibration.rule import TOLERANCE, choose, recommend
from longrope2.cli import cli
from longrope2.errors import DataError, FactorsError, LongRopeError
from longrope2.files import only_one
from longrope2.generation.switch import load as load_switching
from longrope2.methods import rescale
from longrope2.models import load
from longrope2.needles import make_needles
from longrope2.options import build
from longrope2.perplexity import Score, Scorer
from longrope2.records import CalibrationRecord, MeasuredLength, MeasuredSide, Recommendation, as_json
from longrope2.rotary import rescaled

CONFIG = CalibrationConfig(lengths=(192, 288), documents=2, depths=(0.0, 0.5))


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", device="cpu")


@pytest.fixture(scope="module")
def factors(tiny):
    return rescale("yarn", tiny.info.rope, 1024)


@pytest.fixture(scope="module")
def result(tiny, factors):
    return measure(tiny, factors, CONFIG)


def test_both_sides_equal_plain_forwards(result, tiny, factors):
    books = list(read_books(held_out=True))
    assert [point.length for point in result.points] == [192, 256, 288]
    for point in result.points:
        documents = make_needles(tiny.tokenizer, books, length=point.length, count=2, seed=0, depth=(0.0, 0.5))
        means = {}
        for side in ("original", "long"):
            found = []
            for document in documents:
                tokens = torch.tensor([document.token_ids])
                with rescaled(tiny.model, factors, long_rows=side == "long"), torch.no_grad():
                    logits = tiny.model(tokens, use_cache=False).logits[0, document.needle.answer[0] - 1 : -1]
                answer = tokens[0, document.needle.answer[0] :]
                found.append(torch.nn.functional.cross_entropy(logits.double(), answer).item())
                exact = bool((logits.argmax(-1) == answer).all())
                assert getattr(point, side).by_document[len(found) - 1].exact is exact
            means[side] = sum(found) / 2
            assert getattr(point, side).nll == pytest.approx(means[side], abs=1e-5)
        assert point.gain == pytest.approx(means["original"] - means["long"], abs=1e-5)


def test_the_result_is_json_and_speaks_of_it(result):
    again = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert again["config"]["documents"] == 2
    assert again["factors"]["method"] == "yarn"
    assert f"recommended switch length: {again['switch_length']:,}" in calibration_table(result).caption


def test_an_interrupted_calibration_goes_on_to_the_same_result(result, tiny, factors, tmp_path, monkeypatch, capsys):
    score, scored = stage._score, []

    def counted(*arguments):
        if len(scored) == 5:
            raise KeyboardInterrupt
        scored.append(arguments)
        return score(*arguments)

    monkeypatch.setattr(stage, "_score", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(tiny, factors, CONFIG, tmp_path)
    with (tmp_path / "scores.jsonl").open("a") as file:
        file.write('{"type": "score", "key": "288/lo')  # what a kill leaves of a line
    monkeypatch.setattr(stage, "_score", lambda *arguments: scored.append(arguments) or score(*arguments))
    assert measure(tiny, factors, CONFIG, tmp_path) == result
    assert len(scored) == 3 * 2 * 2
    renamed = replace(tiny, info=replace(tiny.info, name="elsewhere/tiny"))
    assert measure(renamed, factors, CONFIG, tmp_path) == replace(result, model="elsewhere/tiny")
    assert len(scored) == 3 * 2 * 2
    assert "resuming: 5 scores found" in capsys.readouterr().err
    with only_one(tmp_path, "", hint=""), pytest.raises(LongRopeError, match="another process is calibrating there"):
        measure(tiny, factors, CONFIG, tmp_path)
    with pytest.raises(LongRopeError, match="documents: 2 on disk, 3 now"):
        measure(tiny, factors, replace(CONFIG, documents=3), tmp_path)
    (tmp_path / "books").mkdir()
    for book in list(read_books(held_out=True))[:2]:
        (tmp_path / "books" / f"{book.title}.txt").write_text(book.text[:20_000])
    with pytest.raises(LongRopeError, match=r"documents: '.*' on disk"):
        measure(tiny, factors, replace(CONFIG, books=str(tmp_path / "books")), tmp_path)


class TestTheRule:
    def test_the_window_stands_where_nothing_speaks_against_it(self):
        found = choose({64: (0.0, 0.1), 128: (-0.1, 0.1), 256: (0.1, 0.1), 512: (0.0, 0.1)}, 256)
        assert found == (256, 64, 512)

    def test_an_effective_window_shorter_than_the_trained_one(self):
        """SmolLM2's case: at its whole window the original RoPE fails, at three quarters it is as good."""
        found = choose({2048: (-0.2, 0.02), 4096: (-0.2, 0.02), 6144: (0.0, 0.1), 8192: (2.5, 0.3)}, 8192)
        assert found == (6144, 4096, 6144)

    def test_an_original_rope_that_reaches_further(self):
        found = choose({128: (-1.0, 0.1), 256: (-1.0, 0.1), 320: (-0.5, 0.1), 512: (2.0, 0.1)}, 256)
        assert found[0] == 320

    def test_a_worse_length_between_two_good_ones_is_not_called_as_good(self):
        found = choose({100: (-1.0, 0.0), 200: (0.5, 0.0), 300: (-0.5, 0.0), 400: (0.001, 0.0)}, 300)
        assert found == (300, 300, 400)

    def test_a_large_gain_that_is_not_certain_changes_nothing(self):
        assert choose({128: (-0.1, 0.01), 256: (1.0, 0.6)}, 256)[0] == 256
        assert choose({128: (-0.1, 0.01), 256: (1.0, 0.4)}, 256)[0] == 128  # 2.5 standard errors

    def test_a_certain_gain_that_does_not_matter_changes_nothing(self):
        assert choose({128: (-0.1, 0.01), 256: (0.9 * TOLERANCE, 1e-6)}, 256)[0] == 256

    @given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=8), st.integers(0, 7))
    def test_property_it_is_the_cheapest_by_counting(self, nlls, window):
        """Without errors: no measured length costs less by more than the tolerance, none as cheap is nearer."""
        points = {100 * (i + 1): nll for i, nll in enumerate(nlls)}
        window = 100 * (window % len(nlls) + 1)

        def cost(switch):
            return sum(original if length <= switch else long for length, (original, long) in points.items())

        found = choose({length: (a - b, 0.0) for length, (a, b) in points.items()}, window)
        least = min(map(cost, points))
        assert cost(found[0]) <= least + TOLERANCE + 1e-9
        nearer = [length for length in points if abs(length - window) < abs(found[0] - window)]
        assert all(cost(length) > least + TOLERANCE - 1e-9 for length in nearer)


class TestTheCommand:
    def options(self, **changes):
        options = {"documents": 5, "lengths": (192, 288), **changes}
        given = {name: options.pop(name) for name in ("output", "factors") if name in options}
        return {"config": build(CalibrationConfig, "calibration", options), **given}

    def test_files_and_the_stored_length(self, tiny, factors, tmp_path, capsys, monkeypatch):
        folder = tmp_path / "model"
        load_switching("tiny", factors, device="cpu").save_pretrained(folder)
        tiny.tokenizer.save_pretrained(folder)
        found = calibrate(str(folder), **self.options(output=tmp_path / "out", store=True))
        result = CalibrationRecord.load(tmp_path / "out" / "calibration.json")
        # Files that people publish name no folders.
        assert result.to_json() == {**as_json(found), "model": "model"}
        assert (tmp_path / "out" / "calibration.png").read_bytes().startswith(b"\x89PNG")
        assert capsys.readouterr().out == ""
        assert load_switching(folder, device="cpu").longrope2.switch_length == result.switch_length
        assert not (tmp_path / "out" / "scores.jsonl").exists()

        other = replace(found, switch_length=192)
        monkeypatch.setattr(stage, "measure", lambda *_: other)
        shown = CliRunner().invoke(cli, ["calibrate", str(folder), "--store", "--json"])
        assert json.loads(shown.stdout)["switch_length"] == 192
        assert load_switching(folder, device="cpu").longrope2.switch_length == 192
        shown = CliRunner().invoke(cli, ["calibrate", str(folder)])
        assert "recommended switch length: 192" in shown.stdout

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lengths": (2048,)}, r"lengths \[2048\] are beyond the target length 1024"),
            ({"documents": 1}, r"documents must lie from 2 to 4096, got 1\n[^\0]*hint: see"),
            ({"documents": 4}, r"documents must have at least as many needles as there are depths \(5\), got 4"),
            ({"depths": (0.0, 1.5)}, "depth must lie between 0 and 1, got 1.5"),
            ({"depths": ()}, "depth must name one place or more, got none"),
            ({"store": True}, "--store writes into the config.json of a folder that has its own factors"),
            ({"factors": None}, "no factors were given, and tiny has none of its own\nhint: pass --factors FILE"),
            ({"output": Path(__file__)}, "test_calibration.py is a file, a folder is needed"),
            ({"output": "TAKEN"}, r"calibration.json: cannot be written \(Is a directory\)"),
            ({"output": Path(__file__).parent}, "neither empty nor a run of `longrope2 calibrate`"),
            ({"seed": -1}, "seed must be at least 0, got -1"),
            ({"books": "nosuch"}, "'nosuch' is neither a file or folder"),
            ({"lengths": (288, 3)}, r"document of 3 tokens has no room[^\0]*smallest length .* is \d+"),
        ],
    )
    def test_refusals_before_weights_are_loaded(self, changes, message, factors, tmp_path, monkeypatch):
        monkeypatch.setattr(stage, "load", lambda *_: pytest.fail("weights were loaded"))
        factors.save(tmp_path / "f.json")
        (tmp_path / "calibration.json").mkdir()
        if changes.get("output") == "TAKEN":
            changes = {"output": tmp_path}
        with pytest.raises(LongRopeError, match=message):
            calibrate("tiny", **self.options(**{"factors": tmp_path / "f.json", **changes}))

    def test_one_rope_has_no_switch(self, tiny, factors, tmp_path, monkeypatch):
        one = factors.long_everywhere()
        with pytest.raises(FactorsError, match="one RoPE for every length: there is nothing to switch"):
            measure(tiny, one, CONFIG)
        one.save(tmp_path / "f.json")
        monkeypatch.setattr(stage, "load", lambda *_: pytest.fail("weights were loaded"))
        with pytest.raises(FactorsError, match="there is nothing to switch"):
            calibrate("tiny", **self.options(factors=tmp_path / "f.json"))

    def test_a_named_length_must_hold_a_document(self, tiny, factors):
        with pytest.raises(DataError, match="no room for its sentences"):
            measure(tiny, factors, CalibrationConfig(lengths=(64,), documents=5))

    def test_books_that_are_not_there_are_no_matter_of_length(self, tiny, factors, capsys):
        with pytest.raises(DataError, match="'nowhere' is neither a file or folder"):
            measure(tiny, factors, CalibrationConfig(books="nowhere"))
        assert capsys.readouterr().err == ""

    def test_a_result_that_cannot_be_kept_is_not_lost(self, tiny, factors, tmp_path, monkeypatch):
        """The scores stay, and the same command has its result from them at once."""
        save, factors_file = CalibrationRecord.save, tmp_path / "f.json"
        factors.save(factors_file)
        monkeypatch.setattr(stage, "load", lambda *_: tiny)
        full = LongRopeError("the disk is full")
        monkeypatch.setattr(CalibrationRecord, "save", lambda *_: (_ for _ in ()).throw(full))
        options = self.options(factors=factors_file, output=tmp_path / "out", lengths=(192,))
        with pytest.raises(LongRopeError, match="the disk is full"):
            calibrate("tiny", **options)
        monkeypatch.setattr(CalibrationRecord, "save", save)
        monkeypatch.setattr(stage, "_score", lambda *_: pytest.fail("scored again"))
        found = calibrate("tiny", **options)
        assert json.loads((tmp_path / "out" / "calibration.json").read_text())["switch_length"] in (192, 256)
        assert found.points[0].length == 192

    def test_a_default_length_need_not(self, factors):
        lengths = CalibrationConfig().all_lengths(factors)
        assert lengths == [64, 128, 192, 224, 256, 320, 384, 512]
        assert CalibrationConfig(lengths=(300,)).all_lengths(factors) == [256, 300]


def test_logits_that_are_not_finite_are_named(tiny, factors, monkeypatch):
    monkeypatch.setattr(Scorer, "__call__", lambda *_: [Score(math.inf, 7, False)])
    with pytest.raises(LongRopeError, match="not finite at 192 tokens"):
        measure(tiny, factors, CONFIG)


def test_the_result_in_words():
    result = Recommendation(
        switch_length=4096, as_good_from=4096, as_good_to=4096, original_stops=None, long_better_from=None
    )
    assert result.in_words().splitlines() == [
        "the original RoPE retrieves at every measured length",
        "the long RoPE is not better at the longest measured length",
        "recommended switch length: 4,096",
    ]
    assert replace(result, as_good_from=3072, original_stops=6144, long_better_from=8192).in_words().splitlines() == [
        "the original RoPE stops retrieving at 6,144 tokens",
        "the long RoPE is better from 8,192 tokens on",
        "recommended switch length: 4,096 (of the measured lengths, those from 3,072 to 4,096 are as good "
        "within the error)",
    ]


def test_a_model_that_does_not_retrieve_is_reported(factors, capsys):
    poor = MeasuredSide(nll=1.0, nll_error=0.1, exact=0.2, worst=0.0, by_document=())
    point = MeasuredLength(length=256, gain=0.1, gain_error=0.2, original=poor, long=poor)
    found = recommend([point], factors.original_length)
    assert (found.original_stops, found.long_better_from) == (256, None)
    assert "take the recommendation as a guess" in capsys.readouterr().err
