"""Small models and factors for the export tests."""

import json
import shutil
from pathlib import Path

from conftest import family_model
from longrope2.factors import RescaleFactors
from longrope2.models import ASSETS, describe
from test_rotary import make_factors

WINDOW, EXTENDED = 256, 1024
"""llama.cpp counts contexts in steps of 256, so a smaller window would have no short side there."""
ONE_TEMPERATURE = {"short_attention_factor": 0.9, "long_attention_factor": 0.9}
TWO_TEMPERATURES = {"short_attention_factor": 1.0, "long_attention_factor": 1.2}


def tiny_factors(**changes) -> RescaleFactors:
    """Factors for the embedded model that differ in every dimension, on both sides."""
    rope, n = describe("tiny").rope, 32
    values = {
        "method": "test",
        "rotary_dim": rope.rotary_dim,
        "theta": rope.theta,
        "original_length": WINDOW,
        "target_length": EXTENDED,
        "long": tuple(1.0 + 5 * i / n for i in range(n)),
        "short": tuple(1.0 + i / (8 * n) for i in range(n)),
        **changes,
    }
    return RescaleFactors(**values)


def family_factors(model, **changes) -> RescaleFactors:
    lengths = {"original_length": WINDOW, "target_length": EXTENDED}
    return make_factors(model, **{**lengths, **ONE_TEMPERATURE, **changes})


def family_folder(folder: Path, family: str, *, tokenizer: bool = True, **overrides) -> Path:
    """A random model of a family with a window of 256, and the embedded model's tokenizer."""
    vocabulary = {"vocab_size": 4096} if tokenizer else {}
    model = family_model(family, **{"max_position_embeddings": WINDOW, **vocabulary, **overrides})
    model.save_pretrained(folder)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ASSETS / "tiny" / name, folder)
    return folder


def edit_config(folder: Path, change) -> None:
    """Change an exported config.json in place."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
