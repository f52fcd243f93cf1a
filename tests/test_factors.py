"""RescaleFactors: what cannot be built, what is reported, and the file format."""

import copy
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrope2.errors import FactorsError
from longrope2.factors import RescaleFactors
from longrope2.rope import RopeSpec


def make(**changes):
    values = {
        "method": "test", "rotary_dim": 8, "theta": 10_000, "original_length": 64, "target_length": 256,
        "long": [1, 2, 3, 4], "short": [1, 1, 1, 1],
    }  # fmt: skip
    return RescaleFactors(**{**values, **changes})


@given(
    st.lists(st.floats(0.01, 1e6), min_size=4, max_size=4),
    st.floats(0.1, 10),
    st.none() | st.integers(0, 4),
)
def test_file_round_trip_is_exact(tmp_path_factory, long, attention, critical):
    path = tmp_path_factory.mktemp("factors") / "f.json"
    factors = make(long=long, long_attention_factor=attention, critical_dimension=critical, provenance={"seed": 1})
    factors.save(path)
    assert RescaleFactors.load(path, factors.spec) == factors


def test_value_is_immutable_and_hash_like():
    factors = make()
    with pytest.raises(AttributeError):
        factors.long = (1.0,)
    with pytest.raises(TypeError):
        factors.provenance["model"] = "x"
    assert factors.long == (1.0, 2.0, 3.0, 4.0)


def test_copies_and_pickles_are_equal():
    factors = make(provenance={"seed": 1})
    assert copy.deepcopy(factors) is factors
    assert pickle.loads(pickle.dumps(factors)) == factors


def test_frequencies_are_divided():
    factors = make()
    assert factors.inv_freq(long=True)[2] == factors.spec.frequencies[2] / 3
    assert factors.inv_freq(long=False) == factors.spec.frequencies
    assert factors.extension_ratio == 4.0
    assert (factors.long_attention_factor, factors.short_attention_factor) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long": [1, 2, 3]}, "3 long factors, expected 4"),
        ({"long": [1, 2, math.nan, 4]}, "got nan at dimension 2"),
        (
            {"short": [1, 0, -1, 1]},
            "short factors must be finite numbers above 0, got 0, -1 at dimension 1, 2",
        ),
        ({"long": [1, 2, math.inf, 4]}, "got inf"),
        ({"long_attention_factor": 10**400}, "long_attention_factor must be a finite number above 0"),
        ({"long": [1, True, 3, 4]}, "got True"),
        ({"long": "1234"}, "long must be a list of numbers"),
        ({"rotary_dim": 7}, "rotary_dim must be an even integer"),
        ({"theta": 0.5}, "theta must be"),
        ({"original_length": 1.5}, "original_length must be a positive integer"),
        ({"target_length": 32}, "target_length 32 is below original_length 64"),
        ({"critical_dimension": 5}, "critical_dimension must be an integer from 0 to 4"),
        ({"long_attention_factor": 0}, "long_attention_factor must be"),
        ({"method": ""}, "method must be"),
        ({"provenance": 3}, "provenance must be an object"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(FactorsError) as caught:
        make(**changes)
    assert message in str(caught.value)


def test_every_problem_of_a_file_is_reported_at_once(tmp_path):
    content = make().to_json()
    del content["theta"]
    content |= {"long": [1, 2], "short": [1, 1, 1, -5], "target_length": "far", "surprise": 1}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FactorsError) as caught:
        RescaleFactors.load(path)
    message = str(caught.value)
    assert "5 problems" in message
    for part in ("'theta' is missing", "2 long factors", "-5", "target_length must be", "'surprise'"):
        assert part in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "longrope2.factors", "version"', "not valid JSON at line 1"),
        ('{"format": "other"}', "not a factors file"),
        ("[1, 2]", "not a factors file"),
        ('{"format": "longrope2.factors", "version": 99}', "version 99 of the file format, expected 1"),
    ],
)
def test_unreadable_files(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FactorsError) as caught:
        RescaleFactors.load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(FactorsError, match="no such file"):
        RescaleFactors.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(FactorsError, match="cannot be read"):
        RescaleFactors.load(tmp_path / "binary.json")
    with pytest.raises(FactorsError, match="cannot be read"):
        RescaleFactors.load(tmp_path)


def test_factors_of_another_model_are_refused(tmp_path):
    path = tmp_path / "f.json"
    make().save(path)
    other = RopeSpec(rotary_dim=8, theta=500_000.0, original_length=128)
    with pytest.raises(FactorsError) as caught:
        RescaleFactors.load(path, other)
    message = str(caught.value)
    assert "another model" in message
    assert "theta is 10000 in the factors but 500000" in message
    assert "original_length is 64 in the factors but 128" in message


def test_published_oddities_are_remarks_not_errors(published):
    assert make().oddities() == []
    odd = make(long=[0.9, 2, 1.5, 4])
    assert odd.oddities() == ["long factors below 1 at dimension 0", "long factors fall at dimension 2"]
    phi3 = make(
        rotary_dim=96,
        long=published["phi3_mini_128k_april_long"],
        short=published["phi3_mini_128k_april_short"],
    )
    assert phi3.oddities() == []
    many = make(rotary_dim=16, long=[0.5] * 8, short=[1] * 8)
    assert many.oddities() == ["long factors below 1 at dimension 0, 1, 2, 3, 4 and 3 more"]


def test_a_file_is_on_disk_when_it_has_its_name(tmp_path, synced):
    make().save(tmp_path / "f.json")
    assert synced == [(tmp_path / "f.json").stat().st_ino]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f.json"
    make().save(path)
    before = path.read_bytes()
    monkeypatch.setattr("json.dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(method="other").save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]
