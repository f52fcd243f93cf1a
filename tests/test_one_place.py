"""An engine and a method are one row each, known everywhere; a model family needs none, and one to be refused."""

import subprocess
import sys

import pytest

ADD = """
import sys
from importlib import import_module
from pathlib import Path
from click.testing import CliRunner

def add(module, **rows):
    module = import_module(module)
    source = Path(module.__file__).read_text()
    for row, before in rows.values():
        assert source.count(before) == 1
        source = source.replace(before, row + before)
    exec(source, module.__dict__)  # as if the row stood in that file

def run(*arguments):
    from longrope2.cli import cli
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output

folder = Path(sys.argv[1])
sys.path[:0] = [sys.argv[2], f"{sys.argv[2]}/export"]
"""
ENGINE = """
sys.path.insert(0, str(folder))
(folder / "dummy_probe.py").write_text('''
import json, pathlib, sys
def ask_dummy(job):
    answers = [{"tokens": [1] * count, "logprobs": [{"5": -1.0, "6": -2.0}] * count} for count in job["new_tokens"]]
    return {"version": "dummy 1.0", "answers": answers}
if __name__ == "__main__":
    job = json.loads(pathlib.Path(sys.argv[2]).read_text())
    pathlib.Path(sys.argv[3]).write_text(json.dumps(globals()[sys.argv[1]](job)))
''')
add("longrope2.export.engines", listed=("DUMMY, ", "LLAMA_CPP)}"), row=('''
import dummy_probe
DUMMY = ServingEngine(
    name="dummy", title="Dummy Serve", format="huggingface", packages={"json": "pip install dummy"}, chooses="long",
    advice=lambda factors, where: [(f"dummy serve {where}", "what it likes")], probe=dummy_probe.ask_dummy,
    families=("mistral",),
)
''', "ENGINES = {"))

assert "transformers, vllm, mlx, dummy or llama.cpp" in " ".join(run("verify", "--help").split())
run("factors", "tiny", "--target-length", "512", "--method", "pi", "-o", folder / "f.json")
told = run("export", "tiny", "--factors", folder / "f.json", "-o", folder / "e")
assert "not right in dummy: it is not known to run llama models" in told, told
card = (folder / "e" / "README.md").read_text()
assert "| Dummy Serve | `dummy serve e` | what it likes; but it is not known to run llama" in card, card
table = run("verify", folder / "e", "--engine", "dummy")
assert "dummy 1.0" in table and "WRONG" in table and "it is not known to run llama models" in table, table
from test_verify import undocumented
assert undocumented() == ["Dummy Serve"]
"""
METHOD = """
add("longrope2.methods", row=('''    "dummy": Method(
        rescaling=position_interpolation, formula="as pi", temperature="1", well_known=True
    ),
''', '    "longrope2": Method('))
assert "hardclip, drope, dummy, longrope2" in " ".join(run("factors", "--help").split())
run("factors", "tiny", "--target-length", "512", "--method", "dummy", "-o", folder / "f.json")
assert '"method": "dummy"' in (folder / "f.json").read_text()
assert " dummy " in run("inspect", "tiny").replace(chr(10), " ")
(folder / "r.toml").write_text('model = "tiny"' + chr(10) + 'target_length = 512' + chr(10) + 'methods = ["dummy"]')
from longrope2.pipeline.recipe import read_recipe
assert read_recipe(folder / "r.toml").methods == ("dummy",)
from test_methods import methods_table
assert "| `dummy` | as pi | 1 |" in methods_table()
"""
FAMILY = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class DummyConfig(LlamaConfig):
    model_type = "dummy"
    default_theta = 5000.0

class DummyForCausalLM(LlamaForCausalLM):
    config_class = DummyConfig

AutoConfig.register("dummy", DummyConfig)
AutoModelForCausalLM.register(DummyConfig, DummyForCausalLM)
(folder / "config.json").write_text(
    '{"model_type": "dummy", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}'
)
shown = run("inspect", folder)
assert "(dummy): rotary dimension 16, theta 5,000, trained window 2,048 tokens" in " ".join(shown.split()), shown
add("longrope2.families", row=('    "dummy": "it is made up",\\n', '    "deepseek_v4":'))
from longrope2.errors import LongRopeError
from longrope2.families import read_config
try:
    read_config({"model_type": "dummy"})
except LongRopeError as error:
    assert "'dummy' models cannot be extended: it is made up" in str(error)
else:
    raise AssertionError("not refused")
"""


@pytest.mark.parametrize("script", [ENGINE, METHOD, FAMILY], ids=["engine", "method", "family"])
def test_a_row_added_is_known_everywhere(script, tmp_path, request):
    command = [sys.executable, "-c", ADD + script, str(tmp_path), str(request.path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
