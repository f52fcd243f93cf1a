"""The JSON Schemas of recipes and factors agree with what is really taken, by an independent validator."""

import json
import tomllib

import jsonschema
import pytest
from click.testing import CliRunner

import longrope2
from longrope2.cli import cli
from longrope2.errors import FactorsError, LongRopeError
from longrope2.pipeline.recipe import presets, read_recipe


def printed(file):
    result = CliRunner().invoke(cli, ["schema", file])
    assert result.exit_code == 0
    found = json.loads(result.output)
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


@pytest.fixture(scope="module")
def recipe_validator():
    return printed("recipe")


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid(recipe_validator, name):
    recipe_validator.validate(tomllib.loads(presets()[name]))


@pytest.mark.parametrize(
    "text",
    [
        "[search]\npopulation = 32\ndepth = [0.0, 0.5]\nattention_factor = 'released'",
        "methods = ['yarn', 'yarn-rcd']\noriginal_length = 256",
        "[[evaluate]]\nsuites = ['niah']\nlengths = [256, 512]",
        "[[source]]\npath = 'books'\ncut = 256\n[[bucket]]\nup_to = 512\nquota = 1.5",
        "[train]\nlora = 8\nfreeze = ['*mlp*']\n[export]\nformats = ['gguf']\n[verify]\nengines = ['transformers']",
        "[recall]\nlengths = [512]",
    ],
)
def test_what_is_taken_is_valid(recipe_validator, text, tmp_path):
    text = "target_length = 512\n" + text
    (tmp_path / "recipe.toml").write_text(text)
    read_recipe(tmp_path / "recipe.toml")
    recipe_validator.validate(tomllib.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "serch = 1",
        "methods = ['yarm']",
        "[search]\npopulatoin = 32",
        "[search]\npopulation = 'many'",
        "[search]\nspace = 'wider'",
        "[search]\nattention_factor = 'warm'",
        "[search]\ntarget_length = 512",
        "[[source]]\nweight = 2.0",
        "[[evaluate]]\nlengths = [256]",
        "[evaluate]\nsuites = ['niah']",
        "[train]\nbatch_rows = 1.5",
        "[export]\nformats = ['onnx']",
        "extend_again = 1",
    ],
)
def test_what_is_refused_is_invalid(recipe_validator, text, tmp_path):
    text = text if text.startswith("target") else "target_length = 512\n" + text
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(LongRopeError):
        read_recipe(tmp_path / "recipe.toml")
    assert not recipe_validator.is_valid(tomllib.loads(text))


def test_factors_files_are_valid_as_long_as_they_can_be_read():
    validator = printed("factors")
    content = longrope2.rescale("tiny", "yarn", 1024).to_json()
    validator.validate(content)
    for changes in (
        {"format": "other"}, {"version": 2}, {"long": 3}, {"long": [*content["long"][:-1], 0]}, {"theta": 1},
        {"rotary_dim": 63}, {"method": ""}, {"critical_dimension": -1}, {"more": 1}, {"provenance": []},
    ):  # fmt: skip
        with pytest.raises(FactorsError):
            longrope2.RescaleFactors.from_json(content | changes)
        assert not validator.is_valid(content | changes), changes
    del content["short"]
    assert not validator.is_valid(content)


def test_an_unknown_file_has_no_schema():
    assert CliRunner().invoke(cli, ["schema", "model"]).exit_code == 2
