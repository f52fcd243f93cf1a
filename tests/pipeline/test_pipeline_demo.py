"""What `make demo` promises, with its real numbers: minutes on two cores, so not among the default tests."""

import pytest

from longrope2 import extend, ledger


@pytest.mark.slow
def test_the_demo_makes_its_case(tmp_path):
    methods = extend("tiny", tmp_path / "run", target_length=4096, cache=tmp_path / "cache")["methods"]
    needles = {name: found["by_length"]["niah"]["4096"] for name, found in methods.items()}
    trained = needles.pop(ledger.AFTER_TRAINING)
    assert trained >= 95
    assert all(trained > needles[name] for name in ("base", "pi", "ntk", "yarn"))
    assert methods[ledger.AFTER_TRAINING]["short_perplexity"] <= 1.03 * methods["base"]["short_perplexity"]
