"""The patch that we offer to vLLM: its own test fails without its change and passes with it, without our plugin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent
PATCH = HERE.parents[1] / "docs" / "upstream" / "vllm-longrope-switch.patch"
RUN = """
import sys
from run_engine import use_runner_v2
use_runner_v2()
import pytest
from serving_samples import allow_async
with allow_async():
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """vLLM as it is installed, with the patch applied; files that it does not change are links."""
    place = tmp_path_factory.mktemp("tree")
    installed = Path(vllm.__file__).parent
    shutil.copytree(installed, place / "vllm", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    for line in PATCH.read_text().splitlines():
        if line.startswith("--- a/"):
            changed = line.removeprefix("--- a/")
            (place / changed).unlink()
            shutil.copy(installed.parent / changed, place / changed)
    subprocess.run(["git", "apply", PATCH], cwd=place, check=True)
    return place


@pytest.mark.skipif(vllm.__version__ != "0.32.0", reason="the patch is against vLLM 0.32.0")
@pytest.mark.parametrize("patched", [False, True])
def test_the_patch(tree, tmp_path, patched):
    (test,) = (tree / "tests").rglob("test_*.py")
    path = os.pathsep.join(map(str, [*([tree] if patched else []), HERE, HERE.parent]))
    changes = {"PYTHONPATH": path, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, shutil.copy(test, tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **changes}, timeout=600,
    )  # fmt: skip
    assert ("2 passed" in done.stdout) if patched else ("not close" in done.stdout), done.stdout[-3000:]
