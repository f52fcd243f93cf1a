"""The commands and the example of README and docs really run."""

import contextlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from longrope2.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def commands(page: Path) -> list[str]:
    """Command lines of a page, continued lines joined, comments dropped."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("command", commands(ROOT / "README.md"))
def test_readme_commands_run(command, tmp_path, monkeypatch):
    program, *arguments = shlex.split(command)
    if program == "make":  # `make test` is what runs this test; its targets must exist and parse
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        return
    if program == "pip":
        named = re.findall(r"\[(.+)\]", command)
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert all(set(names.split(",")) <= set(extras) for names in named)
        return
    assert program == "longrope2"
    if "MODEL" in arguments:  # a stranger's model: everything is checked and forecast, nothing is run
        arguments = ["tiny" if word == "MODEL" else word for word in arguments] + ["--dry-run"]
    monkeypatch.chdir(tmp_path)
    cli.main(arguments, standalone_mode=False)  # tests/test_cli.py starts processes


@pytest.mark.parametrize("example", blocks(ROOT / "README.md", "python"))
def test_readme_example_runs(example, tmp_path, monkeypatch, capsys):
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "It was the best of times" in capsys.readouterr().out
    cli.main(["generate", "tiny-1k", "--prompt", "It was", "--max-new-tokens", "1"], standalone_mode=False)


def test_the_example_of_the_reference_runs(tmp_path, monkeypatch):
    (example,) = blocks(ROOT / "docs" / "reference.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "reference.md", "exec"), {})


def test_the_first_evaluation_of_its_page_runs(tmp_path, monkeypatch):
    program, *arguments = shlex.split(commands(ROOT / "docs" / "evaluation.md")[0])
    assert (program, arguments[:2]) == ("longrope2", ["evaluate", "tiny"])
    monkeypatch.chdir(tmp_path)
    cli.main([*arguments, "--samples", "1"], standalone_mode=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_docs_parse(page):
    """Every longrope2 command names options that exist."""
    for command in commands(page):
        program, *arguments = shlex.split(command)
        if program == "torchrun":
            program, arguments = "longrope2", arguments[arguments.index("longrope2") + 1 :]
        if program != "longrope2":
            continue
        subcommand = cli.commands[arguments[0]]
        if isinstance(subcommand, click.Group):
            subcommand, arguments = subcommand.commands[arguments[1]], arguments[1:]
        known = {option for parameter in subcommand.params for option in parameter.opts}
        used = {word.split("=")[0] for word in arguments[1:] if word.startswith("-")}
        assert used <= known, f"{command}: {used - known}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_docs_fails_on_a_link_that_leads_nowhere(tmp_path):
    """Where it is quiet, mkdocs does not count warnings, and --strict has none to fail on."""
    for name in ("Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = ["make", "docs", "--old-file", ".venv/.ready", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("[gone](results.md#nowhere)\n")
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "#nowhere" in result.stderr


PROGRAMS = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "recipes").rglob("*.py"))]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_benchmarks_and_recipes_find_what_they_import(program, monkeypatch, capsys):
    """No test runs all of them, and what they use of the package moves."""
    monkeypatch.syspath_prepend(program.parent)
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(program), run_name="__main__")
    is_program = '__name__ == "__main__"' in program.read_text()
    assert capsys.readouterr().out.startswith("usage") == is_program


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "notebooks" / "first-steps.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["found"]["searched"][1024] > 50 > names["found"]["original"][1024]
    assert "It was the best of times" in capsys.readouterr().out
