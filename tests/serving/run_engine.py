"""Run an engine with processes or kernels that the tests' own process cannot have: python run_engine.py FOLDER OPTIONS.

Prints, as its last line, the largest errors and what the engine counted.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def use_runner_v2() -> None:
    """The newer model runner is made of Triton kernels. They run without a GPU, too, if Triton interprets them."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from importlib import metadata

    import triton.backends

    # Up to 0.31, vLLM looks for the version of a package of its own name, which this build has not.
    version = metadata.version
    metadata.version = lambda name: "cpu" if name == "vllm" else version(name)
    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=driver)


def main(folder: str, options: dict[str, Any]) -> None:
    if options.pop("runner_v2", False):
        use_runner_v2()
    sys.path.append(str(Path(__file__).parents[1]))
    from serving_samples import ORIGINAL, Oracle, ask, counters, engine, requests_around

    # Greedy, since the kernel with which 0.30 draws tokens cannot be interpreted.
    asks = [replace(one, options={"temperature": 0.0}) for one in requests_around(ORIGINAL)]
    with engine(Path(folder), **options) as running:
        outputs = [output for _ in range(2) for output in ask(running, asks)]
        preemptions = counters(running)["vllm:num_preemptions"]
        v2 = running.llm_engine.vllm_config.use_v2_model_runner
    result = {"worst": Oracle(Path(folder)).worst(outputs), "preemptions": preemptions, "runner_v2": v2}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
