"""How every benchmark reports: one JSON file with a ratio against a named peer, measured in the same run."""

import argparse
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from longrope2.files import package_versions, write_json
from longrope2.malloc import keep_freed_memory

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options all benchmarks share; and memory is held as the command does it."""
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--commit", help="commit measured; default: what git says")
    return parser


def hardware() -> str:
    """The GPU, or the CPU with its number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit of this checkout, marked when it has changes."""
    root = Path(__file__).parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float | None:
    """The most memory that tensors took on the GPU since the last `reset_peak`; None without one."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def report(
    options: argparse.Namespace,
    *,
    name: str,
    value: float,
    unit: str,
    peer: str,
    peer_value: float,
    more_is_better: bool = False,
    **more: Any,
) -> None:
    """Write results/benchmarks/<name>.json and print the line that matters; a ratio above 1 is in our favour."""
    ratio = value / peer_value if more_is_better else peer_value / value
    result = {
        "name": name,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "hardware": hardware(),
        "versions": package_versions("torch", "transformers", "triton"),
        "commit": options.commit or commit(),
        **more,
    }
    write_json(options.output / f"{name}.json", result)
    print(f"{name}: {value:.3f} {unit}; {peer}: {peer_value:.3f} {unit}; ratio {ratio:.2f}", flush=True)
