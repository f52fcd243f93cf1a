"""What `check` says of older engines, held against those engines' own code, which is downloaded for it."""

import importlib.util
import json
import math
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
from check_samples import LLAMA3, LONGROPE, YARN, config

from longrope2.checking.readers import READERS
from longrope2.checking.rotation import Rotation
from longrope2.checking.statement import read_statement

TOP = {"original_max_position_embeddings": 256}
CONFIGS = {
    "default": config(rope_theta=500000.0),
    "linear": config(rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama3": config(rope_theta=500000.0, rope_scaling=LLAMA3),
    "yarn": config(rope_theta=1e6, rope_scaling=YARN),
    "yarn, window as it was": config(window=256, rope_theta=1e6, rope_scaling=YARN),
    "yarn, temperature": config(rope_theta=1e6, rope_scaling={**YARN, "attention_factor": 0.9, "beta_fast": 16}),
    "yarn, no original": config(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "longrope": config(rope_theta=1e4, **TOP, rope_scaling=LONGROPE),
    "longrope, temperature": config(rope_theta=1e4, **TOP, rope_scaling={**LONGROPE, "attention_factor": 1.0}),
    "longrope, nested": config(rope_theta=1e4, rope_scaling={**LONGROPE, "factor": 4.0, **TOP}),
}
MSCALES = config(rope_theta=1e6, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5})


def download(folder: Path, package: str) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(command, check=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def reading(engine: str, first: str, content: dict) -> Rotation:
    (reader,) = (each for each in READERS if (each.engine, each.first) == (engine, first))
    return reader.read(read_statement(content), {}).rotation


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "first"),
    [("4.57.6", "4.56"), ("4.56.2", "4.56"), ("4.55.4", "4.51"), ("4.51.3", "4.51"), ("4.50.3", "4.43"),
     ("4.48.3", "4.43")],
)  # fmt: skip
def test_transformers_4(version, first, tmp_path, monkeypatch):
    """Its functions, without the rest of the package: they take any object for a config."""
    archive = download(tmp_path, f"transformers=={version}")
    quiet = types.SimpleNamespace(get_logger=lambda name: None)
    stubs = {
        "older": types.SimpleNamespace(__path__=[]),
        "older.configuration_utils": types.SimpleNamespace(PretrainedConfig=object),
        "older.utils": types.SimpleNamespace(is_torch_available=lambda: True, logging=quiet),
    }
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    file = Path(archive.extract("transformers/modeling_rope_utils.py", tmp_path))
    spec = importlib.util.spec_from_file_location("older.modeling_rope_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    switches = hasattr(module, "dynamic_rope_update")
    contents = {**CONFIGS, **({"mscales": MSCALES} if first != "4.43" else {})}
    for name, content in contents.items():
        values = types.SimpleNamespace(**{"rope_scaling": None, "head_dim": 16, **content})
        section = values.rope_scaling or {"rope_type": "default"}
        init = module.ROPE_INIT_FUNCTIONS[section.get("rope_type", section.get("type"))]
        found = reading("transformers", first, content)
        threshold = getattr(values, "original_max_position_embeddings", values.max_position_embeddings)
        sides = [(found.short, found.short_attention, threshold)]
        sides += [(found.long, found.long_attention, threshold + 1)] if switches else []
        for turns, attention, length in sides:
            inv_freq, scaling = init(values, torch.device("cpu"), seq_len=length)
            torch.testing.assert_close(torch.tensor(turns), inv_freq, rtol=1e-5, atol=0, msg=name)
            assert math.isclose(attention, scaling, rel_tol=1e-6), name


ASK_MLX = """
import json, runpy, sys, sysconfig
# Alone: the package wants transformers.
initialize_rope = runpy.run_path(sysconfig.get_path("purelib") + "/mlx_lm/models/rope_utils.py")["initialize_rope"]
answers = {}
for name, content in json.loads(sys.argv[1]).items():
    rope = initialize_rope(
        16, content["rope_theta"], False, content.get("rope_scaling"), content["max_position_embeddings"]
    )
    periods = getattr(rope, "_freqs", None)
    if periods is None:  # plain
        periods = [content["rope_theta"] ** (i / 16) / rope.scale for i in range(0, 16, 2)]
    answers[name] = [[1 / float(period) for period in periods], getattr(rope, "mscale", getattr(rope, "_scale", 1.0))]
print(json.dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.network
def test_mlx(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    for packages in (["mlx[cpu]==0.32.4"], ["--no-deps", "mlx-lm==0.32.2"]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    refused = {"longrope", "longrope, temperature"}  # the original window must stand among the factors
    contents = {name: each for name, each in {**CONFIGS, "mscales": MSCALES}.items() if name not in refused}
    asked = subprocess.run([python, "-c", ASK_MLX, json.dumps(contents)], check=True, capture_output=True, text=True)
    answers = json.loads(asked.stdout)
    for name, content in contents.items():
        found, (turns, attention) = reading("mlx-lm", "0.32", content), answers[name]
        torch.testing.assert_close(torch.tensor(found.long), torch.tensor(turns), rtol=1e-5, atol=0, msg=name)
        assert math.isclose(found.long_attention, attention, rel_tol=1e-6), name
    for name in refused:
        with pytest.raises(KeyError):
            reading("mlx-lm", "0.32", CONFIGS[name])
