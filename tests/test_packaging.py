"""What others get: extras that exist, a workflow that runs what `.ci/run` runs, and a wheel that works by itself."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from functools import cache
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from longrope2 import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "longrope2"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Used where they are found: engines that `verify` asks, a tracker, and pydantic's own core, whose version it pins.
UNDECLARED = {"llama_cpp", "mlx", "mlx_lm", "pydantic_core", "wandb", "xllamacpp"}
# One evaluation of one text, and no training: the stages that need no extra.
RECIPE = """
target_length = 512
methods = ["yarn"]

[search]
documents = 1
population = 2
parents = 2
iterations = 1
mutations = 1
crossovers = 0

[[evaluate]]
suites = ["perplexity"]
tasks = ["full"]
lengths = [256]
samples = 1
"""
MACHINE_PATH = re.compile(rb"(?<![\w.~-])(?:/(?:home|root|Users|tmp|work|mnt|opt)/\w|" + re.escape(bytes(ROOT)) + rb")")


def dependencies(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements bring, and those they bring in turn."""
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        distribution = found[canonicalize_name(wanted.name)] = metadata.distribution(wanted.name)
        for needed in map(Requirement, distribution.requires or []):
            extras = ["", *wanted.extras]
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


installed_packages = cache(metadata.packages_distributions)  # reads the records of all of them


def providers(module: str) -> set[str]:
    """The distributions that have a module; its own name where none is installed."""
    top = module.split(".")[0]
    return {canonicalize_name(name) for name in installed_packages().get(top, [top])}


def hinted_extras() -> list[tuple[str, str]]:
    """Every `require(module, extra=…, purpose=…)` of the package: the module's name and the extra."""
    calls = [
        node
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and {"extra", "purpose"} <= {keyword.arg for keyword in node.keywords}
    ]
    return [
        (
            next(argument.value for argument in call.args if isinstance(argument, ast.Constant)),
            next(keyword.value.value for keyword in call.keywords if keyword.arg == "extra"),
        )
        for call in calls
    ]


def test_every_extra_named_in_a_hint_brings_the_module():
    hints = hinted_extras()
    assert len(hints) > 15
    # vLLM and Ray are too large for the test environment: there, only their names can be compared.
    brought = {extra: names(EXTRAS[extra]) for extra in ("vllm", "cluster")}
    for module, extra in hints:
        if extra not in brought:
            brought[extra] = set(dependencies(EXTRAS[extra]))
        assert brought[extra] & providers(module), (module, extra)


def test_every_imported_package_is_declared():
    """Not only brought by another package, which may drop it."""
    users = {name: needed for name, needed in EXTRAS.items() if name != "dev"}
    declared = names([*PROJECT["dependencies"], *(text for needed in users.values() for text in needed)])
    imported = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
    others = imported - sys.stdlib_module_names - {"longrope2"} - UNDECLARED
    assert {module for module in others if not providers(module) & declared} == set()


def test_every_extra_named_in_text_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *SOURCE.rglob("*.py"), *SOURCE.rglob("*.md")]
    named = {
        name for page in pages for found in re.findall(r"(?:longrope2|'\.)\[([\w,]+)\]", page.read_text())
        for name in found.split(",")
    }  # fmt: skip
    assert {"cluster", "eval", "export", "report", "train", "vllm"} <= named <= EXTRAS.keys()


def test_the_workflow_runs_what_the_local_script_runs():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    rows = job["strategy"]["matrix"]["include"]
    prefix = "Programming Language :: Python :: "
    assert [f"{prefix}{row['python']}" for row in rows] == [c for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert PROJECT["requires-python"] == f">={rows[0]['python']}"
    steps = [step["run"] for step in job["steps"] if "run" in step]
    local = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    for row in rows:
        commands = [step.replace("${{ matrix.tests }}", row["tests"]) for step in steps]
        assert all(command.startswith("make ") for command in commands)
        missing = set(local) - set(commands)
        assert missing == (set() if row["tests"] == "test-all" else {"make test-all"})
    assert "test-all" in [row["tests"] for row in rows]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist of the working tree, as `make dist` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    make = ["make", "dist", "--old-file", ".venv/.ready", f"BIN={Path(sys.executable).parent}", f"DIST={folder}"]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    wheel, _ = built
    information = f"longrope2-{__version__}.dist-info/"
    on_disk = {
        file.relative_to(SOURCE.parent).as_posix()
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {name for name in names if not name.startswith(information)} == on_disk
        assert {name.removeprefix(information) for name in names - on_disk} == {
            "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"
        }  # fmt: skip
        assert [name for name in names if MACHINE_PATH.search(archive.read(name))] == []


@pytest.mark.slow
def test_what_the_dockerfile_copies_is_enough_to_build(built, tmp_path):
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY "):
            *sources, _ = line.removeprefix("COPY ").split()
            for source in sources:
                place = ROOT / source
                (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / source)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with ZipFile(wheel) as ours, ZipFile(built[0]) as whole:
        assert sorted(ours.namelist()) == sorted(whole.namelist())
    (install,) = [line for line in lines if "/opt/longrope2[" in line]
    assert set(re.search(r"\[(.*)\]", install)[1].split(",")) == EXTRAS.keys() - {"cluster", "dev", "vllm"}


@pytest.mark.slow
def test_the_metadata_is_that_of_the_project(built):
    wheel, _ = built
    with ZipFile(wheel) as archive:
        found = Metadata.from_email(archive.read(f"longrope2-{__version__}.dist-info/METADATA"))  # checks the fields
        assert "longrope2/py.typed" in archive.namelist()
    assert (found.name, str(found.version), found.summary) == ("longrope2", __version__, PROJECT["description"])
    assert str(found.requires_python) == PROJECT["requires-python"]
    assert found.license_expression == "Apache-2.0"
    assert found.classifiers == PROJECT["classifiers"]
    assert found.project_urls == PROJECT["urls"]
    assert found.description_content_type == "text/markdown"
    # The README without links into this repository, which lead nowhere on an index.
    targets = re.findall(r"\]\(([^)]*)\)", found.description)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / "README.md").read_text())
    figure = re.compile(r"Needles by length and depth.*?\n\n\*.*?\*\n\n", re.DOTALL)
    assert re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found.description) == figure.sub("", plain)
    assert set(found.provides_extra) == EXTRAS.keys()
    plain = {str(needed) for needed in found.requires_dist if needed.marker is None}
    assert plain == {str(Requirement(text)) for text in PROJECT["dependencies"]}


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / sdist.name.removesuffix(".tar.gz"), check=True, capture_output=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of a new environment that has the wheel and its declared dependencies, and nothing else.

    Dependencies are links to those of the running environment, so that nothing is downloaded. Without its own pip,
    since that brings setuptools.
    """
    wheel, _ = built
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in dependencies(PROJECT["dependencies"]).values():
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / name).exists():  # several packages may share a folder
                (packages / name).symlink_to(distribution.locate_file(name))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--isolated"]
    # With its dependencies, though none can be fetched: pip must find them all there, in versions that fit.
    subprocess.run([*pip, "install", "--no-index", str(wheel)], check=True, capture_output=True)
    return folder / "bin"


def run(*command, folder):
    """Run a program in a folder, with nothing of this environment in its path."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([str(part) for part in command], cwd=folder, env=bare, capture_output=True, text=True)


@pytest.mark.slow
def test_the_installed_wheel_extends_tiny(installed, tmp_path):
    place = run(installed / "python", "-c", "import longrope2; print(longrope2.__file__)", folder=tmp_path)
    assert Path(place.stdout.strip()).is_relative_to(installed.parent)
    program = installed / "longrope2"
    assert run(program, "--version", folder=tmp_path).stdout == f"longrope2, version {__version__}\n"
    assert "trained window 256 tokens" in run(program, "inspect", "tiny", folder=tmp_path).stdout
    shown = run(program, "extend", "--show-recipe", "tiny-laptop", folder=tmp_path)
    assert shown.stdout == (SOURCE / "recipes" / "tiny-laptop.toml").read_text()
    (tmp_path / "small.toml").write_text(RECIPE)
    options = ("--target-length", "512", "--config", "small.toml", "-o", "run")
    extended = run(program, "extend", "tiny", *options, folder=tmp_path)
    assert extended.returncode == 0, extended.stderr
    assert "LongRoPE2, factors only" in extended.stdout
    assert (tmp_path / "run" / "report" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspect", "nosuch"], "nosuch: no such folder"),
        # The package's own recipe trains: without the extra for it, nothing may start.
        (["extend", "tiny", "--target-length", "512", "-o", "run"], "pip install 'longrope2[train]'"),
        (["inspect", "tiny", "--plot", "rope.png"], "pip install 'longrope2[report]'"),
    ],
    ids=["model", "train", "report"],
)
def test_the_installed_wheel_refuses_with_a_message(installed, tmp_path, arguments, complaint):
    result = run(installed / "longrope2", *arguments, folder=tmp_path)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
