"""The command line as a user meets it: real processes, wrong inputs, exit codes."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import click
import pytest

from conftest import family_config
from longrope2 import cli, files
from longrope2.errors import LongRopeError
from longrope2.evaluation import evaluate as evaluation
from longrope2.factors import RescaleFactors
from longrope2.ledger import STAGES
from longrope2.methods import METHODS, rescale
from longrope2.models import ASSETS, describe
from longrope2.pipeline import extend as extending
from longrope2.pipeline.recipe import presets
from longrope2.search import run as search


def run(*arguments, **options):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "longrope2", *map(str, arguments)],
        capture_output=True, text=True, env=environment, check=False, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    family_config("llama", {"rope_theta": 100_000.0}, head_dim=64, max_position_embeddings=8192).save_pretrained(folder)
    return folder


def test_help_is_fast_and_imports_no_torch():
    run("--help")  # compile the bytecode first
    seconds = []
    for _ in range(3):
        before = os.times()
        result = run("--help")
        after = os.times()
        # Of the processor, which other work on the machine does not take.
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert result.returncode == 0
    assert "inspect" in result.stdout
    assert min(seconds) < 0.5


def every_command(group=cli.cli):
    for command in group.commands.values():
        yield from every_command(command) if isinstance(command, click.Group) else [command]


def test_help_explains_every_command_and_option():
    for command in every_command():
        assert not command.get_short_help_str(limit=66).endswith("..."), command.name
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, f"{command.name} {option.name}"


def test_help_names_what_there_is():
    methods = next(option for option in cli.factors.params if option.name == "method")
    assert set(methods.help.removeprefix("One of ").rstrip(".").split(", ")) == set(METHODS)
    recipe = next(option for option in cli.extend.params if option.name == "config")
    assert all(name in recipe.help for name in presets())
    stages = cli.extend.help.partition("Stages: ")[2].partition(".")[0]
    assert stages.split(", ") == list(STAGES)


def test_inspect_json_is_the_smollm2_of_the_theory(model):
    result = run("inspect", model, "--target-length", "32k", "--json")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["rotary_dim"] == 64
    assert values["theta"] == 100_000
    assert values["original_length"] == 8192
    assert (values["critical_dimension"], values["ten_period_dimension"]) == (20, 14)
    assert len(values["periods"]) == 32
    assert values["methods"]["pi"] == [4.0] * 32
    assert {"ntk", "yarn", "llama3", "ntk-aware", "dynamic-ntk", "ntk-by-parts"} < set(values["methods"])


def test_inspect_shows_the_factors_of_a_file(tmp_path, forked):
    path, plot = tmp_path / "mine.json", tmp_path / "rope.svg"
    mine = rescale("longrope2", describe("tiny").rope, 4096, critical_dimension=9, right_factors=[20.0])
    mine.save(path)
    result = forked.run(["inspect", "tiny", "--factors", path, "--plot", plot])
    assert result.code == 0, result.errors
    assert "4,096 tokens, 16×" in result.output
    assert " unseen   mine.json " in result.output
    values = json.loads(forked.run(["inspect", "tiny", "--factors", path, "--json"]).output)
    assert values["methods"]["mine.json"] == list(mine.long)
    assert {"mine.json", "d_rcd = 9"} <= set(re.findall("<text[^>]*>(.+?)</text>", plot.read_text()))
    for wrong, message in (("--target-length", "made for 4,096 tokens"), ("--original-length", "another model")):
        result = forked.run(["inspect", "tiny", "--factors", path, wrong, "512"])
        assert (result.code, message in result.errors) == (2, True), result.errors


def test_inspect_table_and_plot(model, tmp_path):
    plot = tmp_path / "figures" / "rope.png"
    result = run("inspect", model, "--plot", plot)
    assert result.returncode == 0, result.stderr
    assert "20 tcd" in result.stdout
    assert "131,072 tokens, 16×" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in plot.parent.iterdir()] == ["rope.png"]


def test_factors_are_written_and_read_back(model, tmp_path, forked):
    file = tmp_path / "yarn.json"
    result = forked.run(["factors", model, "--target-length", "128k", "--method", "yarn", "-o", file])
    assert result.code == 0, result.errors
    factors = RescaleFactors.load(file)
    assert (factors.method, factors.target_length) == ("yarn", 131072)
    assert factors.provenance["revision"].startswith("sha256:")
    assert factors.switches
    forked.run(["factors", model, "--target-length", "128k", "--method", "yarn", "--single", "-o", file])
    assert RescaleFactors.load(file) == factors.long_everywhere()
    right = ",".join(["6.5"] * 12)
    options = ["--critical-dimension", "20", "--right-factors", right, "--attention-factor", "1.1"]
    forked.run(["factors", model, "--target-length", "32768", "--method", "longrope2", *options, "-o", file])
    factors = RescaleFactors.load(file)
    assert factors.long[20:] == (6.5,) * 12
    assert factors.long_attention_factor == 1.1


def test_odd_factors_are_written_with_a_warning(model, tmp_path, forked):
    options = ["--critical-dimension", "30", "--right-factors", "5,4"]
    arguments = ["factors", model, "--target-length", "32k", "--method", "longrope2", *options]
    result = forked.run([*arguments, "-o", tmp_path / "f.json"])
    assert result.code == 0
    assert "warning: long factors fall at dimension 31" in result.errors


FACTORS = ["factors", "MODEL", "--target-length", "32k", "-o", "f.json", "--method"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "no-such-model"], "no such folder or file"),
        (["inspect", "MODEL/config.json"], "config.json: a file, and not a .gguf one"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", ""], "Invalid value for 'MODEL': the name is empty"),
        (["inspect", "./models"], "models: no such folder or file"),
        (["inspect", "MODEL", "--target-length", "far"], "'far' is not a length"),
        (["inspect", "MODEL", "--target-length", "4k"], "not above the trained window of 8,192"),
        (["inspect", "MODEL", "--plot", "figure.xyz"], "cannot draw into a file that ends in '.xyz'"),
        (["inspct", "MODEL"], "No such command 'inspct'"),
        (["factors", "MODEL", "--method", "yarn", "-o", "f.json"], "hint: give --target-length"),
        (["factors", "MODEL", "--target-length", "32k", "--method", "yarn", "-o", ""], "the name is empty"),
        ([*FACTORS, "yarm"], "did you mean 'yarn'"),
        ([*FACTORS, "YaRN"], "did you mean 'yarn'"),
        ([*FACTORS, "pi", "--critical-dimension", "3"], "pi takes no --critical-dimension"),
        ([*FACTORS, "longrope2", "--right-factors", "4,x"], "'x' is not a number"),
        (
            [*FACTORS, "longrope2", "--attention-factor", "-1"],
            "the attention factor must be a finite number above 0, got -1\nhint: 1 leaves",
        ),
        (
            [*FACTORS, "longrope2", "--critical-dimension", "20", "--right-factors", "-1"],
            "right-hand factors must be finite numbers above 0, got -1.0, -1.0, -1.0\nhint:",
        ),
        ([*FACTORS, "pi", "-o", "/proc/f.json"], "/proc/f.json: cannot be written"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(arguments, message, model, tmp_path, forked):
    ended = forked.run([a.replace("MODEL", str(model)) for a in arguments], cwd=tmp_path)
    assert (ended.code, ended.problem) == (2, ""), ended.errors
    assert message in ended.errors
    assert ended.output == ""
    assert list(tmp_path.iterdir()) == []


def test_a_rescaled_model_is_extended_only_on_request(tmp_path, forked):
    rope = {"rope_type": "linear", "factor": 4.0}
    family_config("llama", rope, max_position_embeddings=128).save_pretrained(tmp_path / "m")
    common = [
        "factors",
        tmp_path / "m",
        "--target-length",
        "256",
        "--method",
        "pi",
        "-o",
        tmp_path / "f.json",
    ]
    refused = forked.run([*common])
    assert refused.code == 2
    assert "already rescaled by 'linear' from 32 to 128 tokens" in refused.errors
    assert forked.run([*common, "--extend-again"]).code == 0
    inspected = forked.run(["inspect", tmp_path / "m"])
    assert "already rescaled by linear to 128 tokens" in inspected.output
    assert "implied by the factor" in inspected.errors


def test_no_colour_codes_in_pipes(model):
    result = run("inspect", model)
    assert "\x1b[" not in result.stdout + result.stderr


def test_a_stream_without_some_characters_or_closed(model, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert "16\\xd7" in run("inspect", model).stdout  # 16×
    for arguments, closed, code in (("inspect tiny", ">&-", 0), ("generate tiny -", "<&-", 2)):
        command = f'"$0" -m longrope2 {arguments} {closed}'
        result = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
        assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr


def failing_main(monkeypatch, error):
    def fail(**_):
        raise error

    monkeypatch.setattr(cli.cli, "main", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_a_full_disk_is_one_message_wherever_it_is_met(monkeypatch, capsys):
    assert failing_main(monkeypatch, OSError(28, "No space left on device", "log.jsonl")) == 2
    told = (
        "error: [Errno 28] No space left on device: 'log.jsonl'\nhint: free some space and run the same command again\n"
    )
    assert capsys.readouterr().err == told
    assert failing_main(monkeypatch, OSError(28, "No space left on device")) == 2
    assert "No space left on device (stdout, or a file in " in capsys.readouterr().err
    assert failing_main(monkeypatch, IsADirectoryError(21, "Is a directory", "f.json")) == 2
    assert "'f.json'\nhint: check that path" in capsys.readouterr().err
    assert failing_main(monkeypatch, OSError(errno.ENAMETOOLONG, "File name too long", "f" * 300)) == 2
    assert "hint: check that path: no name in it may be that long" in capsys.readouterr().err
    with pytest.raises(PermissionError):
        failing_main(monkeypatch, PermissionError(13, "Permission denied"))


def test_a_folder_in_the_place_of_a_file_is_refused_before_and_after(tmp_path):
    file = tmp_path / "f.json"
    writing = files.atomic_path(file)
    writing.__enter__()
    file.mkdir()
    with pytest.raises(LongRopeError, match="cannot be written") as caught:
        writing.__exit__(None, None, None)
    assert caught.value.hint == "give another path, or make this one writable"
    for write in (files.check_writable, lambda path: files.write_json(path, 1)):
        with pytest.raises(LongRopeError, match=r"f.json: cannot be written \(Is a directory\)"):
            write(file)
    files.check_writable(tmp_path / "new" / "g.json")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["f.json"]


def test_what_kills_left_of_a_file_is_swept_away_and_what_others_write_is_not(tmp_path, monkeypatch):
    code = (
        "import sys, time; from pathlib import Path; from longrope2.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); print('now', flush=True); time.sleep(60)"
    )
    file, other = tmp_path / "a[1].json", tmp_path / "b.json"
    command = [sys.executable, "-c", code]
    writing = [subprocess.Popen([*command, path], stdout=subprocess.PIPE) for path in (file, file, other)]
    assert [child.stdout.readline() for child in writing] == [b"now\n"] * 3
    for child in writing[1:]:
        child.kill()
        child.wait()
    assert len(list(tmp_path.iterdir())) == 3
    with monkeypatch.context() as without_locks:
        without_locks.setattr(files, "_locked", lambda _: True)
        files.write_json(file, 1)
        assert len(list(tmp_path.iterdir())) == 4, "nobody knows there whose they are"
    files.write_json(file, 2)
    files.write_json(other, 3)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["a[1].json", "b.json"]
    (left,) = tmp_path.glob(".*")
    assert (left / "new.json").read_text() == "half"
    writing[0].kill()
    writing[0].wait()
    files.write_json(file, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[1].json", "b.json"]


def test_a_file_that_another_writer_swept_away_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    made = []

    def swept(handle):
        if not made:
            (left,) = tmp_path.iterdir()
            shutil.rmtree(left)
        made.append(handle)
        return True

    monkeypatch.setattr(files, "_locked", swept)
    files.write_json(tmp_path / "f.json", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]


def test_a_folder_removed_under_a_process_is_told_as_that(tmp_path):
    folder = tmp_path / "run"

    def work(name, *, removed):
        with files.only_one(folder, ""):
            if removed:
                shutil.rmtree(folder)
            os.stat(name)  # noqa: PTH116 - also of bytes

    for inside in (folder / "x.json", os.fsencode(folder / "log" / "events")):  # TensorBoard names them in bytes
        with pytest.raises(LongRopeError, match=r"run: removed while this was at work there \(\[Errno 2\]") as caught:
            work(inside, removed=True)
        assert caught.value.hint == "run the same command again: it begins anew"
    for name, removed in ((folder / "x.json", False), (tmp_path / "elsewhere", True)):
        with pytest.raises(FileNotFoundError):
            work(name, removed=removed)


def test_what_tensorboard_cannot_write_is_told_once(tmp_path):
    pytest.importorskip("tensorboard")
    code = (
        "import shutil, sys, threading; from pathlib import Path; from longrope2 import cli, files\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
        "def main(**_):\n"
        "    other = threading.Thread(target=lambda: 1 / 0); other.start(); other.join()\n"
        "    folder = Path(sys.argv[1])\n"
        "    with files.only_one(folder, ''):\n"
        "        events = SummaryWriter(folder / 'tensorboard'); events.flush(); shutil.rmtree(folder)\n"
        "        for step in range(100):\n"
        "            events.add_scalar('loss', 1.0, step); events.flush()\n"
        "cli.cli.main = main; cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert "run: removed while this was at work there" in result.stderr
    assert result.stderr.count("Traceback") == result.stderr.count("ZeroDivisionError") == 1, "that of another thread"


@pytest.mark.parametrize("command", ["calibrate", "evaluate --suite niah --lengths 256 --samples 1", "search"])
def test_nothing_is_left_of_a_model_that_cannot_be_loaded_and_a_bad_place_is_told_of_first(command, tmp_path, forked):
    model, factors, output = tmp_path / "model", tmp_path / "factors.json", tmp_path / "out"
    shutil.copytree(ASSETS / "tiny", model)
    (model / "model.safetensors").write_bytes(b"cut short")
    rescale("yarn", describe("tiny").rope, 512).save(factors)
    given = "--target-length 512" if command == "search" else f"--factors {factors}"
    name, *options = command.split()
    for place, problem in ((output, "its weights cannot be loaded"), (factors, "is a file, a folder is needed")):
        ended = forked.run([name, model, *options, *given.split(), "-o", place])
        assert (ended.code, problem in ended.errors) == (2, True), ended.errors
        assert not output.exists()


@pytest.mark.parametrize("command", ["search", "evaluate", "extend"])
def test_an_interrupted_job_says_that_it_goes_on(command, monkeypatch, capsys, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run_search", interrupted)
    monkeypatch.setattr(evaluation, "run_evaluation", interrupted)
    monkeypatch.setattr(extending, "Extension", interrupted)
    options = {"search": ["--target-length", "512"], "evaluate": ["--suite", "niah"], "extend": []}[command]
    monkeypatch.setattr(sys, "argv", ["longrope2", command, "tiny", *options, "-o", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.split("\n") == ["", "interrupted; the same command goes on where it was", ""]


def test_a_process_with_an_error_of_its_own_tells_it_in_the_end(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    for process, local in ((8, 0), (9, 1)):
        monkeypatch.setenv("RANK", str(process))
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert failing_main(monkeypatch, LongRopeError("no GPU here")) == 2
        assert capsys.readouterr().err == f"process {process}: error: no GPU here\n"
        assert failing_main(monkeypatch, KeyboardInterrupt()) == 130
        assert capsys.readouterr().err == ""
    assert 0 < waits[0] < waits[1]


def test_json_has_lists_of_plain_values_on_one_line(tmp_path):
    value = {"a": [1, 2.5, None], "b": ["x, [y]", "{"], "c": [[1, 2], [3]], "d": [], "e": [{"f": ["g\nh", '"', "\\"]}]}
    files.write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == value
    assert ' "a": [1, 2.5, null],\n' in text
    assert "  [1, 2],\n" in text


def test_a_recipe_of_the_package_can_be_had_as_a_file(capsys):
    for name, text in presets().items():
        cli.cli.main(["extend", "--show-recipe", name], standalone_mode=False)
        assert capsys.readouterr().out == text
    with pytest.raises(LongRopeError, match="did you mean 'smollm2-32k'") as caught:
        cli.cli.main(["extend", "--show-recipe", "smolm2-32k"], standalone_mode=False)
    assert "--show-recipe NAME" in caught.value.hint
