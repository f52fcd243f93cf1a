"""The rules of the house: imports only go upwards, nothing heavy at import time."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longrope2

PACKAGE = Path(longrope2.__file__).parent

# A module may import only those listed before it. docs/architecture.md says what each one is for.
ORDER = [
    "errors", "chat", "options", "intervals", "files", "records", "malloc", "runfolder", "journal", "console",
    "tracking", "distributed", "interrupts", "rope", "factors", "methods", "families", "gguf_model", "models",
    "inspection", "figures", "collection", "rotary", "kernels", "attention", "pieces", "generation", "serving", "books",
    "codec", "needles", "perplexity", "calibration", "search", "data", "training", "evaluation", "export", "checking",
    "ledger", "report", "watching", "pipeline", "keywords", "api", "command_options", "cli", "reference",
]  # fmt: skip


def imported_modules(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("longrope2."):
            names.add(node.module.split(".")[1])
        if isinstance(node, ast.ImportFrom) and node.module == "longrope2":
            names |= {alias.name for alias in node.names} & set(ORDER)  # the others are what the package itself has
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("longrope2.")}
    return names


def modules() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(file)
    return found


def test_every_module_has_its_place():
    assert set(modules()) == set(ORDER)


def test_imports_only_go_upwards():
    for name, files in modules().items():
        for file in files:
            below = {m for m in imported_modules(file) - {name} if ORDER.index(m) > ORDER.index(name)}
            assert not below, f"{file.name} imports {below}, which stand below it"


def test_modules_are_named_in_the_docs():
    text = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text()
    assert [name for name in ORDER if f"`{name}." not in text and f"`{name}/" not in text] == []


def test_importing_the_package_is_light():
    """So is reading what a run has left, which `watch` does."""
    modules = "sys, longrope2.cli, longrope2.watching"
    code = f"import {modules}; print(*{{'torch', 'transformers', 'numpy', 'rich'}} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert output.stdout.strip() == ""


def test_an_evaluation_is_configured_without_torch():
    code = "import sys, longrope2.evaluation.config; print(*{'torch', 'transformers', 'lm_eval'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert output.stdout.strip() == ""


@pytest.mark.parametrize("module", ["watching", "report.page", "pipeline.recipe", "evaluation.compare"])
def test_commands_that_only_read_start_at_once(module):
    """watch, report, extend --show-recipe and compare: no torch, and half a second of processor time at most."""
    code = f"import sys, longrope2.{module}; print(*{{'torch', 'transformers', 'scipy', 'numpy'}} & set(sys.modules))"
    seconds = []
    for _ in range(3):
        before = os.times()
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert output.stdout.strip() == ""
    assert min(seconds) < 0.5


def test_only_the_command_line_prints():
    """Stages return what they found; `watch` draws a view of its own."""
    for name, files in modules().items():
        for file in files:
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
            if name not in ("cli", "console", "watching"):
                assert not named & {"print", "show_table", "show_json"}, file


def test_no_machine_paths_or_environment_as_interface():
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert "os.environ" not in text, file
