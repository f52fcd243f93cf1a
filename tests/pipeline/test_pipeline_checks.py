"""What a later stage would refuse is refused before the first one starts, and by --dry-run alike."""

import shutil
import sys

import pytest
from pipeline_samples import write_recipe

from longrope2.cli import cli
from longrope2.errors import LongRopeError
from longrope2.models import ASSETS
from longrope2.pipeline.extend import Extension
from longrope2.report.summary import UNTRAINED


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("checks"))


def job(recipe, folder, *stages):
    return Extension(None, folder, target_length=None, config=recipe, stages=stages, cache=folder)


TRAIN, NIAH, RECALL = "[train]\n", 'suites = ["niah"]\n', 'buckets = ["recall"]'
WRONG = {
    "[recall]": ("[recal]", "unknown key 'recal', did you mean 'recall'?"),
    'path = "recall"': ('path = "texts"\nname = "b"', "go together"),
    "population = 2": ("population = 0", "search: population must be at least 1"),
    "[search]\n": ('[search]\nbooks = "nosuch"\n', "search: 'nosuch' is neither a file"),
    "[search]": ("[search]\ndepth = []", "search: depth is empty (name what"),
    "target_length = 512": ("target_length = 200", "not above the trained window"),
    'methods = ["yarn"]': ('methods = ["yarn", "yarn"]', "method 'yarn' is named twice"),
    "lengths = [512]\ndocuments": ("lengths = [8]\ndocuments", "data: recall documents: lengths must be at least 64"),
    "lengths = [512]\nsamples": ("lengths = [1024]\nsamples", "evaluate: table 1: length 1,024 is beyond"),
    "lengths = [512]\nsamples = 1\n": ("lengths = [64]\nchat = true\n", "evaluate: table 1:"),
    "rows = 6": ('tokens = "600"\nrows = 6', "data: plan: both tokens and rows are given"),
    "repeat = true": ("seed = -1", "data: plan: seed must be at least 0"),
    'path = "texts"': ('path = "nosuch"', "data: source 'nosuch': 'nosuch' is neither"),
    'path = "texts"\ncut': ('path = ""\ncut', "data: sources: a source has no path"),
    "[train]\nbatch": (
        "[export]\nformats = []\n[train]\nbatch",
        "export: formats is empty (name what it should have, or omit it)",
    ),
    RECALL: ('buckets = ["recal"]', "no bucket is called 'recal'"),
    "up_to = 511": ("up_to = 200", "must end above its start"),
    NIAH: ("", "evaluate 1: suites is missing"),
    "[search]\ndocuments": (
        "[calibrate]\ndocuments = 3\n[search]\ndocuments",
        "calibrate: calibration: documents must have at least",
    ),
    "up_to = 511\nquota = 1": (
        "above = 300\nup_to = 511\nquota = 1\n[calibrate]",
        "calibrate: bucket books must begin where bucket short ends, or",
    ),
    "[search]\ndocuments = 1": ("[calibrate]\nstore = true\n[search]", "calibrate: unknown key 'store'"),
    TRAIN + "batch_rows": (
        '[calibrate]\n[train]\nwindow = "single"\nbatch_rows',
        "one RoPE at every length has no switch",
    ),
    TRAIN + "batch_rows = 2": (TRAIN + "batch_rows = 0", "train: batch_rows must be at least 1"),
}


def test_the_demo_passes_its_own_checks(tmp_path):
    job(None, tmp_path / "run")


@pytest.mark.parametrize("before", WRONG)
def test_a_bad_recipe_is_refused_before_anything_is_done(recipe, tmp_path, before):
    after, message = WRONG[before]
    text = recipe.read_text()
    assert before in text
    bad = recipe.with_name("bad.toml")
    bad.write_text(text.replace(before, after, 1))
    with pytest.raises(LongRopeError) as caught:
        job(bad, tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_of_a_later_stage_is_reported_before_the_search(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    with pytest.raises(LongRopeError) as caught:
        job(recipe, tmp_path / "run")
    assert "data: a tokenised corpus needs the package 'pyarrow'" in str(caught.value)
    assert "pip install 'longrope2[train]'" in str(caught.value)
    job(recipe, tmp_path / "run", "search", "evaluate")  # which read no corpus


def test_books_of_a_recipe_are_looked_for_where_the_command_runs(recipe, tmp_path, monkeypatch):
    """Not beside the recipe, as sources are."""
    named = recipe.with_name("named.toml")
    text = recipe.read_text().replace(f'books = "{recipe.parent}/texts"', 'books = "texts"')
    named.write_text(text.replace("[search]\n", '[search]\nbooks = "texts"\n'))
    monkeypatch.chdir(recipe.parent)
    job(named, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LongRopeError) as caught:
        job(named, tmp_path / "run")
    for stage in ("search", "data"):
        assert f"{stage}: 'texts' is neither a file or folder here" in str(caught.value)
    assert "source" not in str(caught.value)


def test_all_problems_of_all_stages_are_in_one_message(recipe, tmp_path):
    (tmp_path / "texts").mkdir()
    text = (
        recipe.read_text() + '[export]\nformats = ["gguf"]\n[verify]\nengines = ["nope", "vllm", "llama.cpp=nosuch"]\n'
    )
    text = text.replace(NIAH, 'suites = ["nihah"]\n').replace('"texts"\n', f'"{tmp_path}/texts/nosuch"\n')
    text = text.replace(TRAIN, TRAIN + 'lora = -1\nfreeze = ["nosuch*"]\nsequence_parallel = 7\n')
    (tmp_path / "bad.toml").write_text(text)
    arguments = ["extend", "--config", str(tmp_path / "bad.toml"), "-o", str(tmp_path / "run"), "--dry-run"]
    with pytest.raises(LongRopeError) as caught:
        cli.main(arguments, standalone_mode=False)
    lines = str(caught.value).splitlines()
    for expected in (
        "data: source", "train: lora must be at least 1", "train: --freeze 'nosuch*' names no parameter",
        "train: 512 tokens and", "evaluate: table 1: suite 'nihah' is not known (did you mean 'niah'?",
        "verify: engine 'nope' is not known", "verify: vllm runs the format huggingface",
        "verify: llama.cpp=nosuch: no such program",
    ):  # fmt: skip
        assert sum(expected in line for line in lines) == 1, expected
    job(tmp_path / "bad.toml", tmp_path / "run", "search")  # the rest is not asked for


@pytest.mark.parametrize(
    ("search", "export", "message"),
    [
        ("", 'dtype = "q8_0"', "dtype q8_0 is a format of GGUF"),
        ("", 'dtype = "int4"', 'export: dtype must be "float32" or "float16"'),
        ("attention_factor = 1.2", "fold_temperature = true", "differ, and weights can hold only one"),
        ("attention_factor = 1.2", "", "is wrong in plain transformers (name the profile here"),
        ('space = "wide"', "", "is wrong in plain transformers (name the profile here"),
        ('space = "wide"', 'fold_temperature = true\nprofile = "dual"', "looks for one of long sequences alone"),
        ('space = "wide"', 'profile = "dual"', None),
        ("attention_factor = 1.2", 'fold_temperature = true\nprofile = "static-long"', None),
    ],
)
def test_exports_that_cannot_be_made(recipe, tmp_path, search, export, message):
    text = recipe.read_text().replace("[search]\n", f"[search]\n{search}\n") + f"[export]\n{export}\n"
    (tmp_path / "r.toml").write_text(text)
    if message is None:
        job(tmp_path / "r.toml", tmp_path / "run", "search", "export")
        return
    with pytest.raises(LongRopeError) as caught:
        job(tmp_path / "r.toml", tmp_path / "run", "search", "export")
    assert message in str(caught.value)


def test_documents_are_needed_for_training_only(tmp_path):
    options = {"target_length": 512, "config": None, "cache": tmp_path}
    source = str(tmp_path / "model")
    shutil.copytree(ASSETS / "tiny", source)
    whole = Extension(source, tmp_path / "run", stages=(), **options)
    methods = ("base", "pi", "ntk", "yarn", "longrope2-factors-only", "longrope2-exported")
    evaluations = [f"evaluate/{method}/{suite}" for method in methods for suite in ("niah", "perplexity")]
    assert [step.name for step in whole.steps] == ["search", *evaluations, "export", "verify", "report"]
    assert whole.notes[1:] == [UNTRAINED]
    some = Extension(source, tmp_path / "run", stages=("search", "report"), **options)
    assert [step.name for step in some.steps] == ["search", "report"]
    for table in ("[train]\nsteps = 1", "[plan]\nrows = 1", "[[bucket]]\nup_to = 256\nquota = 1"):
        (tmp_path / "r.toml").write_text(table)
        with pytest.raises(LongRopeError, match="no source of documents"):
            Extension(source, tmp_path / "run", stages=(), **{**options, "config": tmp_path / "r.toml"})
    with pytest.raises(LongRopeError, match="no source of documents"):
        Extension(source, tmp_path / "run", stages=("data",), **options)
    with pytest.raises(LongRopeError, match="stage 'serach' is not known"):
        Extension(source, tmp_path / "run", stages=("serach",), **options)
