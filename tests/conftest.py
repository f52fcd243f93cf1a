"""Shared fixtures: one tiny random model per family, published facts, and processes as torchrun starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# No test may reach for the network, whatever it loads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores, so one thread each, in the processes they start as well.
    os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job: without this, nothing that a test starts could be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# Begun first, so that no worker is left with one of them in the end; the rest take less than half a minute each.
LONGEST = ("test_pipeline_run", "test_training_cli", "test_search_run", "test_training_run", "test_readme",
           "test_recipe_tiny", "test_evaluation_engine", "test_generation", "test_training_parallel")  # fmt: skip
FIXTURES = Path(__file__).parent / "fixtures"
sys.path.append(str(Path(__file__).parent / "faults"))  # for `commands` and `forks`
ORIGINAL_LENGTH = 32
TARGET_LENGTH = 128

# What each family needs beyond the common small shape; `rope` goes into rope_parameters.
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phi": {"rope": {"partial_rotary_factor": 0.5}},
    "phi3": {"rope": {"partial_rotary_factor": 0.75}},
    "gpt_neox": {"rope": {"partial_rotary_factor": 0.25}},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "num_hidden_layers": 6},
    "olmo2": {},
    "granite": {},
    "stablelm": {"rope": {"partial_rotary_factor": 0.25}},
    "glm": {"head_dim": 16, "rope": {"partial_rotary_factor": 0.5}},
    "glm4": {"head_dim": 16, "rope": {"partial_rotary_factor": 0.5}},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 4},
    "starcoder2": {},
    "smollm3": {},
    "gpt_oss": {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def family_config(family: str, rope: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A small config of a family whose RoPE is plain unless `rope` says otherwise."""
    from transformers import CONFIG_MAPPING

    options = dict(FAMILY_OPTIONS[family])
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **options.pop("rope", {}), **(rope or {})}
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 1_000.0}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    common = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": ORIGINAL_LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # large enough that attention is sharp and positions matter
    }
    return CONFIG_MAPPING[family](**{**common, **options, **overrides}, rope_parameters=parameters)


def family_model(family: str, rope: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A tiny random model; the same weights for every `rope`, since none has RoPE parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = family_config(family, rope, **overrides)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def as_torchrun() -> list[dict[str, str]]:
    """What torchrun sets in the environment of each of two workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**together, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def run_together(script: str, *arguments: str, timeout: int) -> None:
    """Run a script in two processes of one thread each, as torchrun would start them, to a good end."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **told, "OMP_NUM_THREADS": "1"},
        )
        for told in as_torchrun()
    ]  # fmt: skip
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=timeout)
            assert worker.returncode == 0, errors[-3000:]
    finally:
        for worker in workers:
            worker.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As the processes have that tests start: the order of sums, and so their last bits, depends on the number."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of files that were handed to the disk, so that a power cut leaves them whole."""
    inodes: list[int] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        inodes.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    return inodes


def killed_in(folder: Path) -> Path:
    """What a process leaves that was killed while it wrote a folder of this name: the new one, under way."""
    code = (
        "import os, signal, sys; from pathlib import Path; from longrope2.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as temporary:\n"
        "    print(temporary, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True, check=False)
    return Path(ended.stdout.strip())


@pytest.fixture(scope="session")
def published() -> dict[str, list[float]]:
    """Published factor lists: LongRoPE2's LLaMA-3-8B, and Phi-3-mini-128k of April 2024."""
    return json.loads((FIXTURES / "published_factors.json").read_text())


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """For tests/faults: commands as forks of one process, in a folder with what they read."""
    from commands import prepared  # beside those tests

    with prepared(tmp_path_factory.mktemp("faults")) as forks:
        yield forks


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Runs commands in processes of their own, without the seconds in which a new one imports transformers."""
    from forks import Forks

    with Forks(tmp_path_factory.mktemp("forks")) as forked:
        yield forked
