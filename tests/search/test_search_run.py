"""Searches of the real tiny model: files, resuming after kills, several processes, and wrong inputs."""

import copy
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock

import longrope2
from longrope2.books import read_books
from longrope2.cli import main
from longrope2.distributed import World, world
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import only_one
from longrope2.methods import METHODS, rescale
from longrope2.models import ASSETS, describe, load
from longrope2.needles import Needle, NeedleDocument, PlainDocument, make_needles, make_plain
from longrope2.options import stated
from longrope2.perplexity import Score, Scorer
from longrope2.records import parse
from longrope2.rope import RopeSpec
from longrope2.rotary import rescaled
from longrope2.search import run as search_run
from longrope2.search.config import EvolutionConfig, SearchConfig, check
from longrope2.search.journal import Journal
from longrope2.search.run import search
from longrope2.search.space import Genome, SearchSpace

ALONE = World(process=0, num_processes=1, local_process=0)
SCHEDULE = {"population": 6, "parents": 3, "iterations": 2, "mutations": 1, "crossovers": 1}
DOCUMENTS, TARGET = 2, 384
OPTIONS = ["--target-length", TARGET, "--documents", DOCUMENTS]
OPTIONS += [part for name, value in SCHEDULE.items() for part in (f"--{name}", value)]
SMALLEST = ["--documents", 1, "--held-out", 0, "--population", 2, "--parents", 2]
SMALLEST += ["--iterations", 1, "--mutations", 1, "--crossovers", 1]


@pytest.fixture(autouse=True)
def one_thread():
    """Two workers and their processes share few cores, and sums depend on how many threads make them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(folder: Path, *command) -> subprocess.Popen:
    """A process whose output is read at its end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, timeout: float = 120) -> subprocess.CompletedProcess:
    """Wait for a process; one that hangs is killed, with all it started, and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def command_line(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """`longrope2` with these arguments, in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["longrope2", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


def lines(folder: Path, kind: str) -> list[dict]:
    entries = map(json.loads, (folder / "history.jsonl").read_text(encoding="utf-8").splitlines())
    return [entry for entry in entries if entry["type"] == kind]


def evaluations(folder: Path) -> dict[tuple[str, int], float]:
    found = [((e["key"], e["document"]), e["nll"]) for e in lines(folder, "evaluation")]
    assert len(found) == len(dict(found))  # nothing was computed twice
    return dict(found)


def result(folder: Path) -> dict:
    return json.loads((folder / "search.json").read_text(encoding="utf-8"))


def measured(folder: Path, part: str = "held out") -> dict[str, dict]:
    """What the record says of every method on one kind of documents."""
    return {row["method"]: row for row in result(folder)["scores"] if row["part"] == part}


def candidates(folder: Path) -> list[str]:
    """The keys of all candidates, in the order of their making."""
    made = [genome for entry in lines(folder, "generation") for genome in entry["genomes"]]
    return list(dict.fromkeys(parse(Genome, genome, "").key() for genome in made))


def wait_for_evaluations(process: subprocess.Popen, folder: Path, count: int) -> None:
    """Return once the journal holds so many; fail if the process ends or takes too long."""
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        file = folder / "history.jsonl"
        if file.exists() and file.read_bytes().count(b'"evaluation"') >= count:
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"{count} evaluations never came: {process.communicate()}")


def made_once(tmp_path_factory, name: str, make) -> Path:
    """A folder that `make` fills, once for all test workers."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, unfinished = base / name, base / f"{name}-unfinished"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Path:
    """The folder of an uninterrupted search by one process."""

    def make(folder: Path) -> None:
        ended = finish(start(folder.parent, "-m", "longrope2", "search", "tiny", *OPTIONS, "-o", folder))
        assert ended.returncode == 0, ended.stderr
        (folder / "stdout").write_text(ended.stdout)
        (folder / "stderr").write_text(ended.stderr)

    return made_once(tmp_path_factory, "search-reference", make)


@pytest.fixture(scope="session")
def tiny():
    return load("tiny", device="cpu")


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> str:
    """A folder of two short books: quicker to read than the package's ten."""
    folder = tmp_path_factory.mktemp("books")
    for number, book in enumerate(read_books(None, held_out=True, limit=2)):
        (folder / f"{number}.txt").write_text(book.text[20_000:40_000])
    return str(folder)


@pytest.fixture(scope="session")
def needles(tiny):
    """The documents of the reference, made without the search's code."""
    books = read_books(None, held_out=True)
    return make_needles(tiny.tokenizer, books, length=TARGET, count=2 * DOCUMENTS, seed=0, from_start=True)


def small_config(books, population=2, **options):
    evolution = EvolutionConfig(population=population, iterations=0)
    usual = {"target_length": 320, "documents": 1, "held_out": 0, "books": books, "evolution": evolution}
    return SearchConfig(**{**usual, **options})


def digest(documents) -> str:
    content = json.dumps([document.token_ids for document in documents])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def perplexity_by_full_logits(model, documents) -> float:
    nll, tokens = 0.0, 0
    for document in documents:
        ids = torch.tensor([document.token_ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0]
        for start, end in (needle.answer for needle in document.needles):
            nll += F.cross_entropy(logits[start - 1 : end - 1].double(), ids[0, start:end], reduction="sum").item()
            tokens += end - start
    return math.exp(nll / tokens)


# What a search leaves behind


def test_weights_and_biases_when_asked(tiny, tmp_path, monkeypatch):
    small = SearchConfig(target_length=TARGET, documents=1, held_out=0, evolution=EvolutionConfig(**SCHEDULE))
    with pytest.raises(LongRopeError, match="pip install wandb"):
        search(tiny, small, tmp_path / "missing", ALONE, wandb="project")
    logged, given = [], {}
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end"))
    fake = SimpleNamespace(init=lambda **options: given.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    search(tiny, small, tmp_path / "run", ALONE, wandb="project")
    assert (given["project"], given["resume"], given["config"]["target_length"]) == ("project", "allow", TARGET)
    assert [entry[0] for entry in logged[:-1]] == [0, 1, 2]
    assert logged[0][1].keys() == {"search/perplexity", "search/critical_dimension", "search/evaluations"}
    assert logged[-1] == "end"
    with pytest.raises(LongRopeError, match="needs a folder"):
        longrope2.search_factors("tiny", TARGET, wandb="project")


def test_a_search_writes_factors_history_summary_and_figures(reference, tiny):
    factors = RescaleFactors.load(reference / "factors.json", tiny.info.rope)
    assert (factors.method, factors.target_length) == ("longrope2", TARGET)
    assert factors.short == (1.0,) * 32
    assert factors.critical_dimension in range(5, 14)
    assert factors.provenance["model"] == "tiny"
    assert factors.provenance["versions"]["torch"] == version("torch")
    assert factors.provenance["config"]["evolution"] == {
        **SCHEDULE, "algorithm": "surrogate", "race": "statistical", "race_confidence": -0.5, "seed": 0
    }  # fmt: skip
    summary = result(reference)
    assert summary["config"] == factors.provenance["config"]
    assert summary["versions"] == factors.provenance["versions"]
    assert summary["weights"] == factors.provenance["weights"]
    assert summary["config"]["evolution"]["seed"] == 0
    assert set(measured(reference)) == {"searched", *METHODS} - {"longrope2"}
    assert set(measured(reference, "in sample")) == {"searched"}
    assert summary["chance"] == 10.0  # a token for each digit
    assert summary["stages"] == [TARGET]
    assert summary["seconds"] > 0
    assert (summary["processes"], summary["device"], summary["resumed_evaluations"]) == (1, "cpu", 0)
    assert [entry["iteration"] for entry in summary["convergence"]] == [0, 1, 2]
    assert [entry["length"] for entry in summary["own_window"]] == [128, 256]
    for name in ("convergence.png", "factors.png"):
        assert (reference / name).read_bytes().startswith(b"\x89PNG")
    if find_spec("tensorboard"):
        assert list((reference / "tensorboard").glob("events.out.tfevents.*"))
    expected = {"factors.json", "history.jsonl", "search.json", "convergence.png", "factors.png"}
    left = {path.name for path in reference.iterdir()} - {"tensorboard", "stdout", "stderr"}
    assert left == expected  # no temporary files


def test_the_history_adds_up_to_the_summary(reference):
    header = lines(reference, "header")
    assert len(header) == 1
    summary = result(reference)
    told = [key for key in header[0] if key not in ("type", "format", "version", "sum")]
    assert {key: header[0][key] for key in told} == {key: summary[key] for key in told}
    assert header[0]["format"] == 2
    generations = lines(reference, "generation")
    assert [(entry["stage"], entry["iteration"], len(entry["genomes"])) for entry in generations] == [
        (0, 0, 6), (0, 1, 2), (0, 2, 2)
    ]  # fmt: skip
    scores, made = evaluations(reference), candidates(reference)
    searched = {task: nll for task, nll in scores.items() if task[0] in made and task[1] < DOCUMENTS}
    assert len(searched) == summary["document_evaluations"] <= summary["exhaustive_evaluations"] == 20
    # The rest are four finalists and all closed forms on the documents that were held out.
    assert len(scores) - len(searched) == (4 + len(METHODS) - 1) * DOCUMENTS
    ended = lines(reference, "iteration")
    assert [(entry["iteration"], entry["perplexity"]) for entry in ended] == [
        (entry["iteration"], entry["perplexity"]) for entry in summary["convergence"]
    ]


def test_the_winner_is_the_finalist_that_is_best_on_documents_it_has_not_seen(reference):
    scores, made, summary = evaluations(reference), candidates(reference), result(reference)
    both = {key: [scores.get((key, document)) for document in range(2 * DOCUMENTS)] for key in made}
    in_sample = {key: sum(nlls[:DOCUMENTS]) for key, nlls in both.items() if None not in nlls[:DOCUMENTS]}
    finalists = sorted(in_sample, key=in_sample.__getitem__)[:4]
    held_out = {key: sum(both[key][DOCUMENTS:]) for key in finalists}
    winner = min(finalists, key=held_out.__getitem__)
    assert parse(Genome, summary["best"], "").key() == winner
    assert [parse(Genome, entry["genome"], "").key() for entry in summary["finalists"]] == finalists
    tokens = 7 * DOCUMENTS
    for part, nll in (("in sample", in_sample[winner]), ("held out", held_out[winner])):
        found = measured(reference, part)["searched"]
        assert found["perplexity"] == pytest.approx(math.exp(nll / tokens))
        assert found["low"] < found["perplexity"] < found["high"]
        assert found["documents"] == DOCUMENTS


def test_perplexities_are_those_of_transformers(reference, tiny, needles):
    from transformers import AutoModelForCausalLM

    factors = RescaleFactors.load(reference / "factors.json")
    seen, unseen = needles[:DOCUMENTS], needles[DOCUMENTS:]
    with rescaled(tiny.model, factors, long_rows=True):
        for part, documents in (("in sample", seen), ("held out", unseen)):
            expected = perplexity_by_full_logits(tiny.model, documents)
            assert measured(reference, part)["searched"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    for name, rope in {
        "pi": {"rope_type": "linear", "factor": 1.5},
        "yarn": {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 256},
    }.items():
        model = AutoModelForCausalLM.from_pretrained(
            ASSETS / "tiny", dtype=torch.float32, rope_parameters={"rope_theta": 10_000.0, **rope}
        )
        expected = perplexity_by_full_logits(model.eval(), unseen)
        assert measured(reference)[name]["perplexity"] == pytest.approx(expected, rel=2e-3)


def test_held_out_documents_are_other_books_while_there_are_any(needles):
    assert len({document.book for document in needles}) == 2 * DOCUMENTS
    assert {document.book_start for document in needles} == {0}  # as in the paper


def test_without_held_out_documents_everything_is_measured_on_those_searched(tiny, books, tmp_path):
    search(tiny, small_config(books, held_out=0, space="wide", population=14), tmp_path, ALONE)
    assert measured(tmp_path) == {}
    found = measured(tmp_path, "in sample")
    assert set(found) == {"searched", *METHODS} - {"longrope2"}
    assert found["searched"]["perplexity"] == min(row["perplexity"] for row in found.values())
    assert (found["searched"]["low"], found["searched"]["high"]) == (None, None)  # one document gives no interval


def test_the_table_is_data_and_the_rest_is_talk(reference):
    table, talk = (reference / "stdout").read_text(), (reference / "stderr").read_text()
    assert "needle perplexity at 384 tokens, documents: 2 in sample, 2 held out; guessing digits has 10" in table
    assert "longrope2 (searched)" in table
    pi = measured(reference)["pi"]
    assert f"{pi['perplexity']:.4g} (" in table
    assert "document evaluations of 20 without racing" in table
    assert table.count("/2") == len(METHODS) + 1  # exact answers: of every closed form, and twice of what was found
    assert "within its window, 256 tokens: perplexity 1.000, 2/2 exact" in talk
    assert "search 3/3" in talk
    assert "warning" not in talk


# Interruptions


def test_it_tells_of_every_document_and_not_of_iterations_alone(tiny, books, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("longrope2.search.progress.LOG_SECONDS", 0.0)
    options = ["--target-length", TARGET, *SMALLEST, "--held-out", 1]
    code, _, talk = command_line(monkeypatch, capsys, "search", "tiny", *options, "-o", tmp_path)
    assert code == 0
    lines = [line for line in talk.splitlines() if line.startswith("search ")]
    assert lines[0].startswith("search 0/2 [")
    assert lines[0].endswith("left] 384 tokens, first population: 1 scored")
    assert any("384 tokens, iteration 1: 1 scored" in line for line in lines)
    # All four candidates are finalists, and measured on the document held out as every closed form is.
    compared = 4 + len(METHODS) - 1
    assert f"finalists and closed forms, evaluations {compared}/{compared} [" in talk


def test_a_killed_search_goes_on_where_it_was(reference, tmp_path, monkeypatch, capsys):
    process = start(tmp_path, "-m", "longrope2", "search", "tiny", *OPTIONS, "-o", "out")
    folder = tmp_path / "out"
    wait_for_evaluations(process, folder, 15)
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process).returncode == -signal.SIGKILL
    assert not (folder / "factors.json").exists()
    file = folder / "history.jsonl"
    whole = [line for line in file.read_bytes().split(b"\n")[:-1] if b'"evaluation"' in line]
    assert 15 <= len(whole) < len(evaluations(reference))
    # As if the kill had come in the middle of a write, which is rare.
    with file.open("ab") as journal:
        journal.write(b'{"type": "evaluation", "key": "12')
    code, _, error = command_line(monkeypatch, capsys, "search", "tiny", *OPTIONS, "-o", folder)
    assert code == 0, error
    assert f"resuming: {len(whole)} evaluations found" in error
    assert (folder / "factors.json").read_bytes() == (reference / "factors.json").read_bytes()
    assert evaluations(folder) == evaluations(reference)
    for kind in ("generation", "iteration"):
        assert lines(folder, kind) == lines(reference, kind)
    assert result(folder)["resumed_evaluations"] == len(whole)
    assert result(folder)["convergence"] == result(reference)["convergence"]


def test_running_again_computes_nothing_and_changes_nothing(reference, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(reference, tmp_path / "again")
    asked = []
    score = Scorer.__call__

    def counting(self, factors, documents):
        asked.append(len(documents[0].token_ids))
        return score(self, factors, documents)

    monkeypatch.setattr(Scorer, "__call__", counting)
    model = shutil.copytree(ASSETS / "tiny", tmp_path / "moved")  # the same weights in another place
    code, output, error = command_line(
        monkeypatch, capsys, "search", model, *OPTIONS, "-o", folder, "--json"
    )  # fmt: skip
    assert code == 0, error
    assert TARGET not in asked  # only the model's own window is tried again
    assert (folder / "history.jsonl").read_bytes() == (reference / "history.jsonl").read_bytes()
    assert RescaleFactors.load(folder / "factors.json").long == RescaleFactors.load(reference / "factors.json").long
    again = result(folder)
    printed = json.loads(output)
    assert printed["model"] == str(model)
    assert {**printed, "model": "moved", "checksum": again["checksum"]} == again
    assert again["resumed_evaluations"] == len(evaluations(reference))
    different = {key for key, value in again.items() if value != result(reference)[key]}
    assert different == {"model", "resumed_evaluations", "seconds", "checksum"}
    before = sum(entry["seconds"] for entry in lines(reference, "time"))
    assert 0 < before < again["seconds"]
    assert before == pytest.approx(result(reference)["seconds"], rel=0.5)
    assert len(lines(reference, "time")) == SCHEDULE["iterations"] + 2  # the first population, and closed forms


def test_a_journal_of_another_model_is_refused(reference, tiny, tmp_path):
    folder = shutil.copytree(reference, tmp_path / "out")
    model = shutil.copytree(ASSETS / "tiny", tmp_path / "tiny")
    content = bytearray((model / "model.safetensors").read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    (model / "model.safetensors").write_bytes(content)
    other = replace(tiny, info=describe(model))
    config = SearchConfig(target_length=TARGET, documents=DOCUMENTS, evolution=EvolutionConfig(**SCHEDULE))
    with pytest.raises(LongRopeError, match=r"another search: weights: 'xxh3:\w+' on disk"):
        search(other, config, folder, ALONE)


def test_one_search_at_a_time_in_a_folder(reference, tiny, tmp_path):
    folder = shutil.copytree(reference, tmp_path / "out")
    config = SearchConfig(target_length=TARGET, documents=DOCUMENTS, evolution=EvolutionConfig(**SCHEDULE))
    with only_one(folder, "", hint=""), pytest.raises(LongRopeError, match="another process is searching") as caught:
        search(tiny, config, folder, ALONE)
    assert caught.value.hint
    assert (folder / "history.jsonl").read_bytes() == (reference / "history.jsonl").read_bytes()


def test_a_folder_of_other_things_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "results.json").write_text("{}")
    code, _, error = command_line(monkeypatch, capsys, "search", "tiny", *OPTIONS, "-o", tmp_path)
    assert code == 2
    assert "neither empty nor a run of `longrope2 search`" in error
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_journal_of_another_seed_is_refused(reference, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(reference, tmp_path / "other")
    code, _, error = command_line(
        monkeypatch, capsys, "search", "tiny", *OPTIONS, "-o", folder, "--seed", 1
    )  # fmt: skip
    assert code == 2
    assert "belongs to another search" in error
    assert "config.evolution.seed: 0 on disk, 1 now" in error
    assert "hint: search into another folder" in error
    assert (folder / "history.jsonl").read_bytes() == (reference / "history.jsonl").read_bytes()


def test_a_journal_made_with_other_books_is_refused(tiny, books, tmp_path):
    """The folder has the same name, so only the documents themselves show the difference."""
    folder = shutil.copytree(books, tmp_path / "books")
    search(tiny, small_config(str(folder)), tmp_path / "out", ALONE)
    for file in folder.iterdir():
        file.write_text(file.read_text()[500:])
    with pytest.raises(LongRopeError, match="belongs to another search: documents: "):
        search(tiny, small_config(str(folder)), tmp_path / "out", ALONE)


# Every kind of search once


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (["--space", "wide"], "longrope2"),
        (["--dimensions", "all", "--race", "off", "--depth", 0.5], "longrope2"),
        (["--objective", "plain", "--race", "exact", "--attention-factor", 1.1], "longrope2"),
        (["--method", "longrope"], "longrope"),
    ],
)
def test_every_kind_of_search_runs_to_its_end(options, method, tiny, books, tmp_path, monkeypatch, capsys):
    arguments = ["search", "tiny", "--target-length", 320, "--books", books, *SMALLEST, *options]
    code, output, error = command_line(monkeypatch, capsys, *arguments, "-o", tmp_path)
    assert code == 0, error
    factors = RescaleFactors.load(tmp_path / "factors.json", tiny.info.rope)
    summary = result(tmp_path)
    assert (factors.method, factors.target_length) == (method, 320)
    assert f"{method} (searched)" in output
    if "longrope" in options:
        assert factors.critical_dimension is None
        assert max(factors.long) <= 1.25 * 1.25
        assert factors.long_attention_factor == pytest.approx(math.sqrt(1 + math.log(1.25) / math.log(256)))
        # From Python `method` alone asks for the same search: its journal is accepted, nothing is left to do.
        named = dict(zip((name[2:].replace("-", "_") for name in SMALLEST[::2]), SMALLEST[1::2], strict=True))
        again = longrope2.search_factors("tiny", 320, tmp_path, books=str(books), method="longrope", **named)
        assert (again.method, again.long) == (factors.method, factors.long)
    if "plain" in options or "longrope" in options:
        assert summary["config"]["objective"] == "plain"
        assert {entry["tokens"] for entry in lines(tmp_path, "evaluation")} == {319}
        assert summary["own_window"] == []
        assert summary["chance"] is None
        assert "exact" not in output
        # Book text alone, nothing hidden and nothing asked.
        made = make_plain(tiny.tokenizer, read_books(books), length=320, count=1, seed=0)
        assert summary["documents"] == digest(made)
    if "wide" in options:
        found = measured(tmp_path, "in sample")
        assert found["searched"]["perplexity"] == min(row["perplexity"] for row in found.values())
        origins = {genome["origin"] for entry in lines(tmp_path, "generation") for genome in entry["genomes"]}
        assert origins > set(METHODS)
    if "all" in options:
        assert summary["best"]["shape"] == "given"
    if "off" in options:
        assert summary["document_evaluations"] == summary["exhaustive_evaluations"]
        made = make_needles(tiny.tokenizer, read_books(books), length=320, count=1, seed=0, depth=0.5, from_start=True)
        assert summary["documents"] == digest(made)
    if "exact" in options:
        assert factors.long_attention_factor == 1.1


def test_needles_at_several_depths_are_taken_in_turn(tiny, books, tmp_path):
    """And the journal of such a search is found again."""
    config = small_config(books, depth=(0.0, 0.5), documents=2)
    search(tiny, config, tmp_path, ALONE)
    made = make_needles(tiny.tokenizer, read_books(books), length=320, count=2, seed=0, depth=(0, 0.5), from_start=True)
    assert result(tmp_path)["documents"] == digest(made)
    search(tiny, config, tmp_path, ALONE)
    assert result(tmp_path)["resumed_evaluations"] > 0


def test_one_depth_in_a_list_is_that_depth(books):
    assert small_config(books, depth=[0.5]) == small_config(books, depth=0.5)


# Stages, temperatures, and something to hold on to


STAGED = {"space": "wide", "target_length": 1024, "documents": 1, "depth": 0.0}


def test_stages_double_up_to_the_target():
    rope = describe("tiny").rope  # a window of 256
    stages = {
        target: SearchConfig(target_length=target, space="wide").stages(rope) for target in (512, 768, 1024, 5000)
    }
    assert stages == {512: [512], 768: [768], 1024: [512, 1024], 5000: [625, 1250, 2500, 5000]}
    assert SearchConfig(target_length=4096).stages(rope) == [4096]
    assert SearchConfig(target_length=4096, staged=True).stages(rope) == [512, 1024, 2048, 4096]
    assert SearchConfig(target_length=4096, space="wide", staged=False).stages(rope) == [4096]


def test_what_is_found_at_one_length_starts_the_next(tiny, books, tmp_path):
    evolution = EvolutionConfig(population=24, iterations=1, parents=4, mutations=2, crossovers=2)
    search(tiny, small_config(books, **STAGED, evolution=evolution), tmp_path, ALONE)
    summary = result(tmp_path)
    assert summary["stages"] == [512, 1024]
    places = [(entry["length"], entry["iteration"]) for entry in summary["convergence"]]
    assert places == [(512, 0), (512, 1), (1024, 0), (1024, 1)]
    by_place = {(entry["stage"], entry["iteration"]): entry["genomes"] for entry in lines(tmp_path, "generation")}
    carried = [parse(Genome, genome, "") for genome in by_place[1, 0] if genome["origin"] == "carried"]
    assert len(carried) == 2  # half of the parents
    space = SearchSpace(spec=tiny.info.rope, target_length=1024, kind="wide", attention_factor=None)
    earlier = {key: nll for (key, document), nll in evaluations(tmp_path).items() if document == 0}
    genomes = [parse(Genome, genome, "") for iteration in (0, 1) for genome in by_place[0, iteration]]
    best = sorted((genome for genome in genomes if genome.key() in earlier), key=lambda g: earlier[g.key()])[:2]
    assert {genome.key() for genome in carried} == {space.carry(genome, 2.0).key() for genome in best}
    assert len(by_place[1, 0]) < len(by_place[0, 0])


@pytest.mark.parametrize(
    ("options", "schedule", "cuts"),
    [
        pytest.param({}, {}, 2, id="paper"),
        *(
            pytest.param(options, schedule, 6, marks=pytest.mark.slow, id=name)
            for name, options, schedule in [
                ("paper, more often", {}, {}),
                ("evolution", {"documents": 2}, {"algorithm": "evolution"}),
                ("evolution without racing", {"dimensions": "all"}, {"algorithm": "evolution", "race": "off"}),
                ("wide, staged", STAGED, {}),
                ("paper, staged", {**STAGED, "space": "paper", "staged": True, "attention_factor": "searched"}, {}),
                ("longrope", {"method": "longrope"}, {}),
            ]
        ),
    ],
)
def test_a_search_cut_off_anywhere_ends_with_the_same_factors(options, schedule, cuts, tiny, books, tmp_path):
    evolution = EvolutionConfig(population=4, iterations=2, parents=4, mutations=2, crossovers=1, **schedule)
    config = small_config(books, **{"documents": 1, "held_out": 1, "evolution": evolution, **options})
    search(tiny, config, tmp_path / "whole", ALONE)
    journal = (tmp_path / "whole" / "history.jsonl").read_bytes()
    ends = [place for place, byte in enumerate(journal) if byte == ord("\n")]
    for number, end in enumerate(ends[2 :: max(len(ends) // cuts, 1)]):
        folder = tmp_path / f"cut-{number}"
        folder.mkdir()
        (folder / "history.jsonl").write_bytes(journal[: end - 5])  # in the middle of a line
        search(tiny, config, folder, ALONE)
        assert (folder / "factors.json").read_bytes() == (tmp_path / "whole" / "factors.json").read_bytes()
        assert evaluations(folder) == evaluations(tmp_path / "whole")
        assert lines(folder, "generation") == lines(tmp_path / "whole", "generation")


def test_candidates_of_a_journal_are_used_whatever_would_be_made_now(tiny, books, tmp_path, monkeypatch):
    """Another machine may round a surrogate's choice otherwise."""
    evolution = EvolutionConfig(population=4, iterations=2, mutations=2, crossovers=1)
    config = small_config(books, evolution=evolution)
    search(tiny, config, tmp_path, ALONE)
    before = (tmp_path / "history.jsonl").read_bytes()
    monkeypatch.setattr("longrope2.search.evolution.children", lambda *_: pytest.fail("made again"))
    search(tiny, config, tmp_path, ALONE)
    assert (tmp_path / "history.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
        # Published: engines apply √(1 + ln 32/ln 4096) to Phi-3's 128k.
        ({"attention_factor": "released"}, 1.1902380714238083),
        ({"method": "longrope"}, 1.1902380714238083),
        ({"attention_factor": "searched"}, None),
        ({"space": "wide"}, None),
        ({"space": "wide", "attention_factor": 1.1}, 1.1),
    ],
)
def test_temperatures_are_those_the_methods_and_spaces_name(options, expected):
    phi3 = RopeSpec(rotary_dim=96, theta=1e4, original_length=4096)
    config = SearchConfig(target_length=131_072, **options)
    assert config.problems() == []
    assert config.temperature(phi3, 131_072) == (None if expected is None else pytest.approx(expected, rel=1e-12))


def test_a_temperature_given_for_a_space_is_that_of_all_candidates(tiny, books, tmp_path):
    evolution = EvolutionConfig(population=6, iterations=1)
    for name, options in {
        "fixed": {"space": "wide", "attention_factor": 1.1},
        "searched": {"attention_factor": "searched"},
    }.items():
        search(tiny, small_config(books, **options, evolution=evolution), tmp_path / name, ALONE)
    made = {
        name: [genome for entry in lines(tmp_path / name, "generation") for genome in entry["genomes"]]
        for name in ("fixed", "searched")
    }
    # But for closed forms, which are as they are.
    assert {g["attention_factor"] for g in made["fixed"] if g["origin"] not in METHODS} == {1.1}
    assert len({genome["attention_factor"] for genome in made["searched"]}) > 3
    assert {genome["shape"] for genome in made["searched"]} == {"ntk"}


@pytest.mark.parametrize(("options", "advice"), [
    ({}, "; a temperature brings a signal back: --attention-factor searched, or --space wide"),
    ({"attention_factor": "released"}, ""),
])  # fmt: skip
def test_it_says_where_all_candidates_are_worse_than_guessing(
    options, advice, tiny, books, tmp_path, monkeypatch, capsys
):
    nlls = iter([30.0] * 8 + [2.0] * 99)
    answer = lambda self, factors, documents: [Score(next(nlls), 7, exact=False) for _ in documents]  # noqa: E731
    monkeypatch.setattr(Scorer, "__call__", answer)
    monkeypatch.setattr(search_run, "_try_own_window", lambda *_: [])
    evolution = EvolutionConfig(population=4, iterations=3, mutations=2, crossovers=0, race="off")
    search(tiny, small_config(books, **options, evolution=evolution), tmp_path, ALONE)
    talk = capsys.readouterr().err
    expected = (
        "warning: all candidates are worse than guessing digits: the best has a perplexity of 72.65 at 320 tokens, "
        f"guessing 10. The objective says little there{advice}\n"
    )
    assert talk.count(expected) == 1
    assert "a candidate is better than guessing digits: 1.331, guessing 10" in talk
    assert talk.index(expected) < talk.index("a candidate is better")


def test_chance_counts_the_digits_of_a_token():
    """A tokenizer that writes seven digits in three tokens: guessing one of them is guessing 10^(7/3)."""
    needle = Needle(key="k", value="1234567", depth=0.0, wanted_depth=0.0, start=3, answer=(17, 20))
    document = NeedleDocument(token_ids=tuple(range(20)), needles=(needle,), book="b", book_start=0, asked_from=9)
    assert search_run._chance([document, document]) == pytest.approx(10 ** (7 / 3))
    assert search_run._chance([PlainDocument(token_ids=(1, 2), book="b", book_start=0)]) is None


def test_the_wide_space_never_ends_below_a_closed_form_that_racing_has_stopped(tiny, books, tmp_path, monkeypatch):
    """YaRN is best on documents that were held out, and looked worst on the one that was searched."""
    factors = []

    def score(self, given, documents):
        yarn = given.long == rescale("yarn", tiny.info.rope, 320).long and given.long_attention_factor != 1
        factors.append(given)
        seen = documents[0].token_ids == searched.token_ids
        return [Score(50.0 if seen else 1.0, 7, exact=not seen) if yarn else Score(10.0, 7, exact=False)]

    config = small_config(books, space="wide", held_out=2)
    searched = search_run.search_documents(tiny, config, 320, count=1, note=lambda _: None)[0]
    monkeypatch.setattr(search_run, "_try_own_window", lambda *_: [])
    monkeypatch.setattr(Scorer, "__call__", score)
    found = search(tiny, config, tmp_path, ALONE).factors
    assert found.long == rescale("yarn", tiny.info.rope, 320).long
    assert measured(tmp_path)["searched"]["exact"] == 2
    assert measured(tmp_path, "in sample")["searched"]["exact"] == 0


def test_without_a_folder_nothing_is_written(tiny, books, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config(books)
    factors = search(tiny, config, None, ALONE).factors
    factors.check_fits(tiny.info.rope)
    assert list(tmp_path.iterdir()) == []


def test_without_optional_packages_it_says_so_and_goes_on(tiny, books, tmp_path, monkeypatch, capsys):
    for name in ("torch.utils.tensorboard", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    config = small_config(books)
    search(tiny, config, tmp_path, ALONE)
    assert {path.name for path in tmp_path.iterdir()} == {"factors.json", "history.jsonl", "search.json"}
    assert "pip install 'longrope2[report]'" in capsys.readouterr().err


# Several processes


TOGETHER = """
import os
import sys
import time
from pathlib import Path

from longrope2.cli import main
from longrope2.perplexity import Scorer

arguments = sys.argv[1:]


def run(*options):
    sys.argv = ["longrope2", *arguments, *options]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code


def dying(self, factors, documents):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls > 2:
        Path("death").write_text(str(time.time()))
        os._exit(7)
    return score(self, factors, documents)


run("-o", "two")
run("-o", "shared", "--tensor-parallel", "2")
score, calls, Scorer.__call__ = Scorer.__call__, 0, dying
run("-o", "dead")
"""


@pytest.fixture(scope="session")
def together(tmp_path_factory) -> Path:
    """The folder where two processes searched each with a model, then sharing one, then until one died."""

    def make(folder: Path) -> None:
        (folder / "together.py").write_text(TOGETHER)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "together.py"]
        ended = finish(start(folder, *command, "search", "tiny", *OPTIONS))
        (folder / "end").write_text(f"{time.time()} {ended.returncode}")
        (folder / "stdout").write_text(ended.stdout)
        (folder / "stderr").write_text(ended.stderr)

    return made_once(tmp_path_factory, "search-together", make)


def test_two_processes_find_exactly_what_one_finds(reference, together):
    two = together / "two"
    assert two.exists(), (together / "stderr").read_text()
    assert (two / "factors.json").read_bytes() == (reference / "factors.json").read_bytes()
    assert evaluations(two) == evaluations(reference)
    for kind in ("header", "generation", "iteration"):
        assert lines(two, kind) == lines(reference, kind)
    assert result(two)["processes"] == 2
    assert result(two)["scores"] == result(reference)["scores"]


def test_processes_that_share_one_model_find_what_one_finds(reference, together):
    assert (together / "shared" / "search.json").exists(), (together / "stderr").read_text()
    shared, alone = result(together / "shared"), result(reference)
    assert shared["processes"] == 1  # one group
    long, expected = (RescaleFactors.load(f / "factors.json").long for f in (together / "shared", reference))
    assert long == expected
    # Sums over half of the heads are added in another order, so scores agree only nearly.
    assert [row["perplexity"] for row in shared["scores"]] == pytest.approx(
        [row["perplexity"] for row in alone["scores"]], rel=1e-4
    )
    assert [window["perplexity"] for window in shared["own_window"]] == pytest.approx(
        [window["perplexity"] for window in alone["own_window"]], rel=1e-4
    )


def test_what_rotates_alike_is_scored_once():
    space = SearchSpace(spec=describe("tiny").rope, target_length=TARGET)
    form, scored, told = space.closed_form("yarn"), [], []

    def scorer(factors, documents):
        scored.extend(documents)
        return [Score(float(len(scored)), 2, True)]

    evaluate = search_run._evaluator(scorer, space, ["one", "other"], Journal(None, {}), ALONE, scored=told.append)
    found = replace(form, origin="mutation")  # as a search may come upon it
    assert [score.nll for score in evaluate([(form, 0), (form, 1), (found, 0)])] == [1.0, 2.0, 1.0]
    assert scored == ["one", "other"]
    assert told == [1, 1, 1]  # what is known already, then each as it comes


def test_only_the_main_process_talks(together):
    table, talk = ((together / name).read_text() for name in ("stdout", "stderr"))
    assert table.count("longrope2 (searched)") == 2
    assert sum(line.startswith("finalists") and "taken]" in line for line in talk.splitlines()) == 2
    assert talk.count("within its window, 256 tokens") == 3


def test_a_worker_that_dies_ends_the_search_and_loses_nothing(reference, together):
    end, code = (together / "end").read_text().split()
    assert int(code) != 0
    assert float(end) - float((together / "death").read_text()) < 60
    assert "exitcode  : 7" in (together / "stderr").read_text()
    assert not (together / "dead" / "factors.json").exists()
    # What it had found is worth as much as what one process finds.
    found = evaluations(together / "dead")
    assert 2 <= len(found) < len(evaluations(reference))
    assert found.items() <= evaluations(reference).items()


@pytest.mark.parametrize(
    ("process", "group_size", "rank", "size"),
    [(0, 1, 0, 8), (5, 1, 5, 8), (5, 2, 2, 4), (7, 8, 0, 1), (3, 4, 0, 2)],
)
def test_processes_that_share_a_model_count_as_one(process, group_size, rank, size):
    here = World(process=process, num_processes=8, local_process=process, group_size=group_size)
    assert (here.rank, here.size) == (rank, size)
    assert here.is_main == (process == 0)


def test_one_process_gathers_from_itself():
    with world() as here:
        assert here == ALONE
        assert here.gather({"x": 1}) == [{"x": 1}]
        assert here.device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_processes_that_do_not_divide_into_groups_are_refused():
    here = World(process=5, num_processes=6, local_process=5)
    assert (here.groups_of(3).rank, here.groups_of(3).size) == (1, 2)
    with pytest.raises(LongRopeError, match="6 processes cannot form groups of 4"):
        here.groups_of(4)


# What may go wrong


def test_wrong_options_are_all_named_at_once(monkeypatch, capsys, tmp_path):
    arguments = ["search", "tiny", "--target-length", 512, "-o", tmp_path / "out"]
    options = ["--population", 0, "--depth", 2, "--documents", 0, "--grid", 0, "--lower", 3]
    options += ["--mutation-probability", 0, "--attention-factor", 0]
    code, output, error = command_line(monkeypatch, capsys, *arguments, *options)
    assert code == 2
    for message in (
        "search configuration: 7 problems",
        "population must be at least 1, got 0",
        "documents must lie from 1 to 2048, got 0",
        "depth must lie between 0 and 1, got 2.0",
        "mutation_probability must lie in (0, 1], got 0.0",
        "grid must lie from 1e-06 to 0.25, got 0.0",
        "lower must not be above upper, got 3.0 and 2.0",
        "attention_factor must lie from 0.01 to 100, got 0.0",
        "hint: see `longrope2 search --help`",
    ):
        assert message in error
    assert "Traceback" not in error
    assert output == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {name: value}
        for name in ("lower", "upper", "grid", "attention_factor", "mutation_probability", "race_confidence", "depth")
        for value in (math.nan, math.inf, 1e300, -1e9)
    ]
    + [{"grid": 1e-320}, {"documents": 5000}, {"held_out": 5000}, {"depth": ()}, {"depth": []}]
    + [{"documents": 2, "depth": (0, 0.5, 1)}, {"held_out": 1, "depth": (0, 1)}],
)
def test_what_would_overflow_or_be_left_out_is_refused(options, tiny):
    evolution = EvolutionConfig(**{name: options.pop(name) for name in ("race_confidence",) if name in options})
    config = SearchConfig(target_length=512, evolution=evolution, **options)
    with pytest.raises(LongRopeError, match=next(iter(options), "race_confidence")) as caught:
        check(config, tiny.info.rope)
    assert caught.value.hint


@pytest.mark.parametrize("ends", range(2))
@pytest.mark.parametrize("method", ["longrope2", "longrope"])
def test_the_ends_of_what_is_allowed_can_be_searched(ends, method, tiny, books, tmp_path):
    names = ("grid", *(("lower", "upper") if method == "longrope2" else ()))
    limits = {entry.name: (entry.option.least, entry.option.most) for entry in stated(SearchConfig)}
    values = {name: limits[name][ends] for name in (*names, "attention_factor")}
    objective = "plain" if method == "longrope" else "needle"
    evolution = EvolutionConfig(population=4, iterations=1, mutations=4, crossovers=1, race_confidence=1000 * ends)
    config = small_config(books, method=method, objective=objective, evolution=evolution, **values)
    search(tiny, config, tmp_path, ALONE).factors.check_fits(tiny.info.rope)


def test_documents_without_needles_are_all_alike():
    config = SearchConfig(target_length=1024, space="wide", objective="plain", documents=4, held_out=2)
    assert config.problems() == []
    assert config.kinds(keys=0) == [0, 0, 0, 0]


def test_documents_are_alike_that_hide_needles_at_the_same_depths():
    wide = SearchConfig(target_length=1024, space="wide", documents=5)
    assert wide.kinds(keys=8) == [0, 0, 0, 0, 0]
    assert wide.kinds(keys=4) == [0, 4, 0, 4, 0]
    assert wide.kinds(keys=1) == [0, 1, 2, 3, 4]


def test_a_search_hides_as_many_needles_as_there_is_room_for(tiny, books):
    config = SearchConfig(target_length=TARGET, space="wide", books=str(books))
    for length, expected in ((128, 1), (512, 2), (4096, 8)):
        made = search_run.search_documents(tiny, config, length, count=2, note=lambda _: None)
        assert [len(document.needles) for document in made] == [expected] * 2


def test_every_answer_of_a_document_is_scored(tiny, books, tmp_path):
    config = small_config(books, target_length=512, keys=2, depth=(0.0, 0.5), documents=2)
    factors, record = search(tiny, config, tmp_path, ALONE)
    options = {"length": 512, "count": 2, "seed": 0, "depth": (0, 0.5), "keys": 2, "from_start": True}
    made = make_needles(tiny.tokenizer, read_books(books), **options)
    assert record.documents == digest(made)
    (found,) = (row for row in record.scores if (row.method, row.part) == ("searched", "in sample"))
    assert (found.answers, found.documents) == (4, 2)
    with rescaled(tiny.model, factors, long_rows=True):
        assert found.perplexity == pytest.approx(perplexity_by_full_logits(tiny.model, made), rel=1e-4)


def test_the_first_longrope_has_no_stages():
    (problem,) = SearchConfig(target_length=1024, method="longrope", staged=True).problems()
    assert "staged goes with the spaces" in problem


def test_a_right_configuration_has_no_problems():
    assert SearchConfig(target_length=1024).problems() == []


def test_words_that_mean_nothing_are_refused():
    """From Python; the command line knows them by itself."""
    config = SearchConfig(
        target_length=1024,
        space="wider",
        dimensions="some",
        objective="perplexity",
        method="longrope3",
        attention_factor="warm",
        evolution=EvolutionConfig(race="sometimes", algorithm="annealing"),
    )
    assert config.problems() == [
        'method must be "longrope2" or "longrope", got "longrope3"',
        'dimensions must be "critical" or "all", got "some"',
        'space must be "paper" or "wide", got "wider"',
        'attention_factor must be a number or "released" or "searched", got "warm"',
        'objective must be "needle" or "plain", got "perplexity"',
        'algorithm must be "surrogate" or "evolution", got "annealing"',
        'race must be "statistical" or "exact" or "off", got "sometimes"',
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target-length", 256], "target length 256 is not above the trained window of 256"),
        (["--original-length", 6], "the original length must be at least 7 tokens, got 6\nhint: see"),
        (["--method", "longrope", "--objective", "needle"], "method longrope is defined with objective plain"),
        (["--method", "longrope", "--space", "wide"], "method longrope is defined with objective plain"),
        (
            ["--method", "longrope", "--upper", 3],
            "method longrope has bounds of its own, 1 and 1.25 s; omit lower and",
        ),
        (["--space", "wide", "--dimensions", "all"], "space wide shapes the left side itself"),
        (["--method", "longrope", "--attention-factor", "searched"], "method longrope has no temperature to search"),
        (["--attention-factor", "hot"], "'hot' is neither a number nor released or searched"),
        (["--books", "SHORT"], "no book is long enough: 512 tokens needed, the longest, 'short'"),
        (["--books", "EMPTY"], "no .txt file in this folder"),
        (["--tensor-parallel", 2], "cannot form groups of 2\nhint: start with: torchrun --nproc-per-node 2"),
        (["--tensor-parallel", 0], "tensor_parallel must be at least 1, got 0"),
        (["-o", "SHORT/short.txt"], "short.txt is a file, a folder is needed\nhint: name a folder"),
        (["--race", "sometimes"], "Invalid value for '--race'"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(options, message, tmp_path, monkeypatch, capsys):
    if "--books" not in options and "-o" not in options:
        monkeypatch.setattr(search_run, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    (tmp_path / "SHORT").mkdir()
    (tmp_path / "SHORT" / "short.txt").write_text("Call me Ishmael. " * 9)
    (tmp_path / "EMPTY").mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = ["search", "tiny", "--target-length", 512, "-o", "out", *SMALLEST]
    code, output, error = command_line(monkeypatch, capsys, *arguments, *options)
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    assert output == ""
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_without_a_traceback_and_keeps_the_journal(tiny, books, tmp_path, monkeypatch, capsys):
    score, calls = Scorer.__call__, []

    def interrupted(self, factors, documents):
        calls.append(factors)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return score(self, factors, documents)

    monkeypatch.setattr(Scorer, "__call__", interrupted)
    arguments = ["search", "tiny", "--target-length", 320, "--books", books, "-o", tmp_path, *SMALLEST]
    # Shells start background jobs with the signal ignored; a terminal has the default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, output, error = command_line(monkeypatch, capsys, *arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert error.endswith("\ninterrupted; the same command goes on where it was\n")
    assert "Traceback" not in error
    assert output == ""
    assert len(calls) == 4
    assert len(evaluations(tmp_path)) == 1  # two calls were tries within the window
    assert not (tmp_path / "factors.json").exists()


def test_out_of_memory_says_what_to_do_and_keeps_what_is_known(tiny, books, tmp_path, monkeypatch):
    score, calls = Scorer.__call__, []

    def exhausted(self, factors, documents):
        calls.append(factors)
        if len(calls) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 67 GiB")
        return score(self, factors, documents)

    monkeypatch.setattr(Scorer, "__call__", exhausted)
    config = small_config(books, population=6)
    with pytest.raises(LongRopeError, match="out of memory at 320 tokens") as caught:
        search(tiny, config, tmp_path, ALONE)
    assert "--tensor-parallel" in caught.value.hint
    assert len(evaluations(tmp_path)) == 2  # the other two were tries within the window


def test_a_model_that_fails_in_its_own_window_is_warned_of(books, tmp_path, monkeypatch, capsys):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(
        ASSETS / "tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=1, dtype="float32"
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "random")
    AutoTokenizer.from_pretrained(ASSETS / "tiny").save_pretrained(tmp_path / "random")
    arguments = ["search", tmp_path / "random", "--target-length", 320, "-o", tmp_path / "out", *SMALLEST]
    code, _, error = command_line(monkeypatch, capsys, *arguments, "--books", books)
    assert code == 0, error
    for length in (128, 256):
        assert (
            f"warning: the model hardly retrieves at {length} tokens, inside its own window of 256: "
            "expect no better beyond it"
        ) in error
    assert [entry["exact"] for entry in result(tmp_path / "out")["own_window"]] == [0, 0]


def test_a_model_that_overflows_everywhere_ends_in_words(books, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        Scorer, "__call__", lambda self, factors, documents: [Score(math.inf, 7, exact=False) for _ in documents]
    )
    arguments = ["search", "tiny", "--target-length", 320, "-o", tmp_path / "out", *SMALLEST]
    code, output, error = command_line(monkeypatch, capsys, *arguments, "--books", books)
    assert code == 0, error
    assert output.count(" overflow ") == len(METHODS)
    assert "best perplexity overflow" in error
    summary = result(tmp_path / "out")
    assert {row["perplexity"] for row in summary["scores"]} == {None}
    assert [entry["perplexity"] for entry in summary["own_window"]] == [None, None]


def test_a_model_whose_every_dimension_is_trained_can_be_searched(tiny, books, tmp_path):
    """A small base: all periods are complete in training, so the theory's critical dimension is past the last."""
    reading = replace(tiny.info.reading, rope=replace(tiny.info.rope, theta=20.0))
    model = copy.deepcopy(tiny.model)
    model.config.rope_parameters["rope_theta"] = 20.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    trained = replace(tiny, info=replace(tiny.info, reading=reading), model=model)
    assert reading.rope.critical_dimension == reading.rope.num_dims
    factors = search(trained, small_config(books), tmp_path, ALONE).factors
    factors.check_fits(reading.rope)
    assert set(measured(tmp_path, "in sample")) == {"searched", *METHODS} - {"longrope2"}
