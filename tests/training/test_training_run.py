"""`longrope2 train` from checks to the finished folder, in one process."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_samples import TARGET, WINDOW, log_without_times, make_sample, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import longrope2
from conftest import family_model
from longrope2.cli import cli
from longrope2.data.config import PlanConfig
from longrope2.data.loader import RowLoader, order_of_rows
from longrope2.data.plan import build_plan, plan_documents, read_plan
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import sealed_line, umask
from longrope2.models import describe, rescale_model, skeleton
from longrope2.perplexity import Score
from longrope2.records import NeedleLine, StepLine, TrainingRecord, as_json
from longrope2.rotary import rescaled
from longrope2.tracking import Tracking
from longrope2.training.config import TrainConfig
from longrope2.training.estimate import known_gpu, shape_of
from longrope2.training.log import LogFile, StepReporter, read_log, training_table
from longrope2.training.loop import StepResult
from longrope2.training.retrieval import trials
from test_models import write_gguf


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return make_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def finished(sample, tmp_path_factory):
    """A whole run, and the model as it was in memory when it ended."""
    output = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        live = []
        original = longrope2.training.train.train_loop

        def keeping(model, *arguments, **options):
            live.append(model)
            return original(model, *arguments, **options)

        patch.setattr("longrope2.training.train.train_loop", keeping)
        sample.run(output)
    return output, live[0]


def tokens(length, seed=0):
    return torch.randint(3, 4000, (1, length), generator=torch.Generator().manual_seed(seed))


def test_the_folder_is_a_plain_model_with_the_weights_of_memory(sample, finished):
    output, live = finished
    folder = output / "model"
    ours = longrope2.load(folder, dtype=torch.float32, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = family_model("llama", vocab_size=4096, max_position_embeddings=WINDOW)
    theirs.load_state_dict(live.state_dict())  # the base's class, so the original RoPE
    with torch.no_grad():
        for length in (WINDOW // 2, WINDOW, WINDOW + 1, TARGET):
            first, second = ours(tokens(length)).logits, plain(tokens(length), use_cache=False).logits
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
        short = theirs(tokens(WINDOW), use_cache=False).logits
    torch.testing.assert_close(ours(tokens(WINDOW)).logits, short, rtol=1e-4, atol=1e-4)
    for name, tensor in weights(folder).items():
        assert torch.equal(tensor, live.state_dict()[name]), name
    before = weights(sample.model)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(folder).items())
    assert RescaleFactors.load(folder / "factors.json") == RescaleFactors.load(sample.folder / "factors.json")
    assert AutoTokenizer.from_pretrained(folder).model_max_length == TARGET
    assert not [path for path in output.iterdir() if path.name.startswith(".")]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask()}


def test_a_single_window_leaves_a_model_that_is_run_as_it_was_trained(sample, tmp_path):
    """The rescaled RoPE in every row, and so in every sequence: no original window is left to switch at."""
    found = RescaleFactors.load(sample.folder / "factors.json")
    folder = sample.run(tmp_path / "single", steps=1, window="single")
    kept = RescaleFactors.load(folder / "factors.json")
    assert kept.long == kept.short == found.long != found.short
    assert kept.short_attention_factor == kept.long_attention_factor == found.long_attention_factor
    ours = longrope2.load(folder, dtype=torch.float32, device="cpu")
    theirs = family_model("llama", vocab_size=4096, max_position_embeddings=WINDOW)
    theirs.load_state_dict(ours.state_dict())
    for length in (WINDOW // 2, TARGET):
        with torch.no_grad(), rescaled(theirs, found, long_rows=True):
            expected = theirs(tokens(length), use_cache=False).logits
        torch.testing.assert_close(ours(tokens(length)).logits, expected, rtol=1e-4, atol=1e-4)
    # Trained so, too: the first step's short rows have another loss than with the original RoPE.
    mixed = sample.run(tmp_path / "mixed", steps=1)
    first, other = (read_log(path.parent / "log.jsonl")[0].loss_short for path in (folder, mixed))
    assert abs(first - other) > 1e-5


def test_the_record_says_what_was_done(sample, finished):
    output, _ = finished
    record = json.loads((output / "model" / "training.json").read_text())
    assert record["config"]["train"]["batch_rows"] == 4
    assert (record["steps"], record["tokens"]) == (4, 4 * 4 * TARGET)
    assert record["plan"]["rows"] == 24
    assert record["plan"]["fingerprint"].startswith("xxh3:")
    assert record["model"]["name"] == sample.model.name
    assert {"torch", "transformers", "longrope2"} <= set(record["versions"])
    lines = read_log(output / "log.jsonl")
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert record["losses"]["last"]["loss"] == lines[-1].loss < lines[0].loss
    assert {"loss", "loss_short", "loss_long"} == set().union(*(line.losses for line in lines))
    assert all(line.gradient_norm > 0 and line.tokens_per_second > 0 for line in lines)
    assert any((output / "tensorboard").iterdir())


def test_a_kind_of_row_that_one_step_lacks_is_shown_all_the_same(tmp_path):
    losses = {"first": {"loss": 3.5, "loss_long": 3.5}, "last": {"loss": 2.5, "loss_short": 2.5}}
    facts = {name: {} for name in ("model", "factors", "plan", "config", "versions", "needles")}
    record = TrainingRecord(**facts, processes=1, device="cpu", steps=2, tokens=8, seconds=1.0, losses=losses)
    rows = training_table(record, tmp_path).rows
    assert rows == [["loss", "3.5000", "2.5000"], ["loss_long", "3.5000", "-"], ["loss_short", "-", "2.5000"]]


def test_a_finished_run_is_left_alone(sample, finished, capsys, monkeypatch):
    output, _ = finished
    monkeypatch.setattr("longrope2.training.train.load", None)  # no weights are read
    record = json.loads((output / "model" / "training.json").read_text())
    paths = {name: str(path) for name, path in sample.arguments(output).items() if name in ("factors", "plan")}
    options = {name: value for name, value in sample.arguments(output).items() if name not in paths}
    assert longrope2.train(sample.model, **paths, **options) == output / "model"
    shown = capsys.readouterr()
    assert shown.err.count("already finished") == 1
    assert shown.out == ""
    command = sample.command(output)
    words = command[command.index("train") :]
    cli.main([*words, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == {name: record[name] for name in record if name != "checksum"}
    cli.main(words, standalone_mode=False)
    assert "4 steps, 2,048 tokens" in capsys.readouterr().out


def test_bfloat16_is_the_default_and_stated(sample, tmp_path):
    folder = sample.run(tmp_path / "run", save_dtype="bfloat16", steps=1)
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.bfloat16}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["rope_parameters"]["rope_type"] == "longrope"


def test_a_gguf_file_becomes_a_folder(sample, tmp_path):
    file = tmp_path / "base.gguf"
    write_gguf(file, AutoModelForCausalLM.from_pretrained(sample.model), sample.model)
    plan = tmp_path / "plan.jsonl"
    plan_documents(str(file), plan, config=sample.folder / "mix.toml", cache=tmp_path / "cache")
    arguments = sample.arguments(tmp_path / "run", plan=plan, cache=tmp_path / "cache", steps=1)
    longrope2.train(file, **arguments)
    trained = longrope2.load(tmp_path / "run" / "model", dtype=torch.float32, device="cpu")
    assert trained.config.max_position_embeddings == TARGET
    assert set(weights(tmp_path / "run" / "model")) == set(weights(sample.model))


def test_a_config_that_makes_no_model_is_refused(sample, tmp_path):
    shutil.copytree(sample.model, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "hidden_act": 3}))
    with pytest.raises(LongRopeError, match="transformers cannot read its config"):
        longrope2.train(tmp_path / "base", **sample.arguments(tmp_path / "run"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_weights_are_written_once(tmp_path, dtype):
    sample = make_sample(tmp_path, tie_word_embeddings=True)
    folder = sample.run(tmp_path / "run", steps=1, freeze=("lm_head.weight",), save_dtype=dtype)
    assert set(weights(folder)) == set(weights(sample.model))
    name = "model.embed_tokens.weight"  # the head's other name
    assert torch.equal(weights(folder)[name], weights(sample.model)[name].to(getattr(torch, dtype)))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_frozen_parameters_stay_bitwise(sample, tmp_path):
    before = weights(sample.model)
    after = weights(sample.run(tmp_path / "run", freeze=("*mlp*", "model.embed_tokens.*"), steps=2))
    frozen = {name for name in before if "mlp" in name or "embed_tokens" in name}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen


def test_needles_leave_training_untouched(tmp_path):
    sample = make_sample(tmp_path / "base", window=256, target=512)
    with_needles = sample.run(tmp_path / "with", evaluate_every=2, evaluate_documents=3)
    without = sample.run(tmp_path / "without")
    ours, plain = weights(with_needles), weights(without)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    lines = log_without_times(tmp_path / "with")
    assert [line["step"] for line in lines if "needles" in line] == [0, 2, 4]
    assert [line for line in lines if "loss" in line] == log_without_times(tmp_path / "without")
    found = lines[0]["needles"]
    assert [(r["length"], r["depth"]) for r in found] == [(n, d) for n in (512, 256) for d in (0.0, 0.5, 1.0)]
    assert all(r["documents"] == 1 and 0 <= r["exact"] <= 1 and r["nll"] > 0 for r in found)
    assert lines[0]["needles"] != lines[-1]["needles"]


def test_a_window_too_short_for_needles_is_no_error(sample, tmp_path, capsys):
    sample.run(tmp_path / "run", evaluate_every=1, steps=1, evaluate_documents=1)
    assert "no needle tests in the original window" in capsys.readouterr().err
    assert {trial.length for trial in read_log(tmp_path / "run" / "log.jsonl")[0].needles} == {TARGET}
    short = make_sample(tmp_path / "short", window=32, target=64)
    with pytest.raises(LongRopeError, match="no room"):  # the target itself
        short.run(tmp_path / "refused", evaluate_every=1)


def test_a_broken_row_is_named_and_the_checkpoint_kept(tmp_path):
    sample = make_sample(tmp_path / "base")
    plan = read_plan(sample.folder / "plan.jsonl")
    loader = RowLoader.open(plan, sample.folder / "cache")
    order = order_of_rows(plan.bucket_of_row, seed=0, epoch=0).tolist()
    # A token that stands in one row of the plan and in no other: its embedding breaks that row alone.
    number, token = next(
        (n, t)
        for n in range(8, 24)
        for t in loader.row(order[n]).token_ids.tolist()
        if not any(t in loader.row(order[m]).token_ids for m in range(24) if m != n)
    )
    model = AutoModelForCausalLM.from_pretrained(sample.model)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    model.save_pretrained(sample.model)
    with pytest.raises(LongRopeError, match="loss is no longer finite") as caught:
        sample.run(tmp_path / "run", steps=6)
    text = str(caught.value)
    assert f"at step {number // 4 + 1}: row {number} of the run (" in text
    assert f"row {order[number]} of the plan, from '" in text
    assert "; row" not in text
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{number // 4 // 2 * 2:08d}"
    assert not (tmp_path / "run" / "model").exists()


def test_out_of_memory_is_told(sample, tmp_path, monkeypatch):
    def loop(*_, started, **__):
        started(0)
        raise torch.OutOfMemoryError("tried to allocate\nmuch")

    monkeypatch.setattr("longrope2.training.train.train_loop", loop)
    with pytest.raises(LongRopeError, match=r"128 tokens on 1 process \(tried to allocate\)") as caught:
        sample.run(tmp_path / "run")
    assert "--sequence-parallel" in caught.value.hint


def test_a_full_disk_at_the_end_is_mended_by_running_again(sample, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("longrope2.training.train.write_factors", full)
        with pytest.raises(LongRopeError, match="No space left on device"):
            sample.run(tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    folder = sample.run(tmp_path / "run")
    assert weights(folder)
    assert json.loads((folder / "training.json").read_text())["tokens"] == 4 * 4 * TARGET


def refusals():
    yield {"steps": 0, "learning_rate": -1.0, "weight_decay": -1.0, "gradient_clip": 0.0, "seed": -1}, "5 problems"
    yield {"batch_rows": 0}, "batch_rows must be at least 1"
    yield {"lora": 0}, "lora must be at least 1, got 0"
    yield {"lora": 100_000}, "rank of at most 64, the model's width, got 100,000"
    yield {"lora": 2, "freeze": ("*",)}, "freezes the whole model already"
    yield {"evaluate_every": -1}, "evaluate_every must be at least 0, got -1"
    yield {"evaluate_documents": 0}, "evaluate_documents must be at least 1"
    yield {"freeze": ("nothing",)}, "names no parameter"
    yield {"freeze": ("model.*", "lm_head*")}, "leaves no parameter to train"
    yield {"window": "singel"}, 'window must be "mixed" or "single", got "singel"'
    yield {"save_dtype": "bf16"}, 'save_dtype must be "bfloat16" or "float16" or "float32", got "bf16"'
    yield {"long_row_mask": "documents"}, 'long_row_mask must be "full" or "document", got "documents"'
    yield {"steps": 5, "warmup_steps": 6}, r"warmup_steps must be at most steps \(5\), got 6"
    yield {"sequence_parallel": 2}, "1 processes cannot form groups of 2"


@pytest.mark.parametrize(("options", "message"), list(refusals()))
def test_refused_before_weights_are_read(sample, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("longrope2.training.train.load", None)
    with pytest.raises(LongRopeError, match=message):
        sample.run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_factors_that_were_made_for_another_model_are_told_of(sample, tmp_path, capsys):
    factors = RescaleFactors.load(sample.folder / "factors.json")
    provenance = {"model": "owner/other", "revision": "sha256:0123"}
    replace(factors, provenance=provenance).save(tmp_path / "other.json")
    sample.run(tmp_path / "run", factors=tmp_path / "other.json", steps=1)
    assert "warning: these factors were made for owner/other" in capsys.readouterr().err


def test_parts_that_do_not_belong_together_are_refused(sample, tmp_path, monkeypatch):
    monkeypatch.setattr("longrope2.training.train.load", None)
    spec = describe(sample.model)
    other = tmp_path / "factors.json"
    factors = rescale_model(spec, "ntk", 2 * TARGET)
    factors.save(other)
    with pytest.raises(LongRopeError, match="target_length is 128, that of the factors 256"):
        sample.run(tmp_path / "run", factors=other)
    values = {**factors.to_json(), "theta": 500_000.0, "original_length": WINDOW // 2}
    RescaleFactors.from_json(values).save(other)
    with pytest.raises(LongRopeError, match="made for another model"):
        sample.run(tmp_path / "run", factors=other)
    plan = read_plan(sample.folder / "plan.jsonl")
    foreign = build_plan(
        config=PlanConfig(target_length=TARGET, original_length=WINDOW), sources=plan.sources,
        corpus_keys=plan.corpus_keys, tokenizer="sha256:other", marks=plan.marks, buckets=[0], padding=[0],
        spans=[plan.spans[:1]], report=plan.report,
    )  # fmt: skip
    foreign.save(tmp_path / "plan.jsonl")
    with pytest.raises(LongRopeError, match="another tokenizer"):
        sample.run(tmp_path / "run", plan=tmp_path / "plan.jsonl")
    empty = build_plan(
        config=plan.config, sources=plan.sources, corpus_keys=plan.corpus_keys, tokenizer=plan.tokenizer,
        marks=plan.marks, buckets=[], padding=[], spans=[], report=plan.report,
    )  # fmt: skip
    empty.save(tmp_path / "plan.jsonl")
    with pytest.raises(LongRopeError, match="no rows"):
        sample.run(tmp_path / "run", plan=tmp_path / "plan.jsonl")
    with pytest.raises(LongRopeError, match="no tokenised source"):
        sample.run(tmp_path / "run", cache=tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    sample = make_sample(tmp_path)
    config = json.loads((sample.model / "config.json").read_text())
    (sample.model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(LongRopeError, match="the tokenizer uses 4,096 tokens, the model has 100"):
        sample.run(tmp_path / "run")


def test_padding_that_the_model_has_no_token_for_is_refused(sample, tmp_path, monkeypatch):
    monkeypatch.setattr("longrope2.training.train.load", None)
    plan = read_plan(sample.folder / "plan.jsonl")
    replace(plan, marks=replace(plan.marks, pad=4096)).save(tmp_path / "plan.jsonl")
    with pytest.raises(LongRopeError, match="the tokenizer uses 4,097 tokens, the model has 4,096"):
        sample.run(tmp_path / "run", plan=tmp_path / "plan.jsonl")


def test_other_folders_are_refused(sample, finished, tmp_path):
    output, _ = finished
    with pytest.raises(LongRopeError, match=r"2 problems\s+- steps: 4 on disk, 5 now\s+- learning_rate: 0\.01 on disk"):
        sample.run(output, steps=5, learning_rate=1e-3)
    with pytest.raises(LongRopeError, match="lora: not set on disk, 2 now"):
        sample.run(output, lora=2)
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / ".run.json.x1y2.json").write_text("")  # before the file had its name
    assert (sample.run(killed) / "config.json").exists()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LongRopeError, match="neither empty nor a run"):
        sample.run(tmp_path)
    with pytest.raises(LongRopeError, match="is a file"):
        sample.run(tmp_path / "notes.txt")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(LongRopeError, match=r"run\.json: damaged: invalid JSON"):
        sample.run(tmp_path)


def test_short_factors_of_another_rescaling_are_warned_of(sample, tmp_path, capsys):
    factors = RescaleFactors.load(sample.folder / "factors.json")
    half = {**factors.to_json(), "short": [2.0] * len(factors.short)}
    RescaleFactors.from_json(half).save(tmp_path / "factors.json")
    sample.run(tmp_path / "run", factors=tmp_path / "factors.json", steps=1)
    assert "short rows will not see its own RoPE" in capsys.readouterr().err


def test_weights_and_biases_when_asked(sample, tmp_path, monkeypatch):
    with pytest.raises(LongRopeError, match="pip install wandb"):
        sample.run(tmp_path / "missing", wandb="project")
    calls = []
    run = SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end"))
    given = {}

    def init(**options):
        given.update(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    sample.run(tmp_path / "run", wandb="project", steps=2)
    assert given["project"] == "project"
    assert given["resume"] == "allow"
    assert [call[0] for call in calls[:-1]] == [1, 2]
    assert "train/loss_short" in calls[0][1]
    assert calls[-1] == "end"


def test_gpus_have_utilisation_and_memory(sample, tmp_path, monkeypatch, capsys):
    """What a step on two H200s would say, after a search that took more memory."""
    peaks = [30 << 30]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peaks.append(3 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peaks[-1])
    info = describe(sample.model)
    shape = shape_of(skeleton(info), info)
    config = TrainConfig(steps=1).resolved()
    peak = 2e12 * known_gpu("NVIDIA H200").peak
    tracking = Tracking(tmp_path, wandb=None, settings={})
    reporter = StepReporter(
        tmp_path, config, device=torch.device("cuda"), step_flops=shape.step_flops, peak_flops=peak, tracking=tracking
    )
    reporter.started(0)
    result = StepResult(step=1, loss=2.0, loss_by_kind={"long": 2.0}, gradient_norm=1.0, tokens=10**9, attended=10**12,
                        seconds=2.0)  # fmt: skip
    reporter.step(result)
    document = SimpleNamespace(token_ids=range(TARGET), needle=SimpleNamespace(depth=0.4))
    (lost,) = trials([document], [Score(float("inf"), 4, exact=0)])
    assert (lost.depth, lost.nll) == (0.5, None)  # JSON has no infinity
    reporter.needles(NeedleLine(step=1, needles=(lost,)))
    reporter.close()
    line, needles = read_log(tmp_path / "log.jsonl")
    assert line.mfu == pytest.approx(shape.step_flops(10**9, 10**12) / (2.0 * 2 * 989e12))
    assert line.memory_gib == 3
    assert needles.needles == (lost,)
    assert f"500,000,000 tokens/s, MFU {line.mfu:.0%}, 3.0 GiB" in capsys.readouterr().err


def test_a_log_goes_on_where_the_checkpoint_is(tmp_path):
    path = tmp_path / "log.jsonl"
    step = StepLine(step=1, loss=2.5, loss_long=2.5, gradient_norm=1.0, learning_rate=1e-5, tokens=8, seconds=1.0,
                    tokens_per_second=8.0)  # fmt: skip
    lines = [step, replace(step, step=2), NeedleLine(step=2, needles=()), replace(step, step=3, loss=9.0)]
    texts = [sealed_line(as_json(line)) for line in lines]
    path.write_text("".join([*texts, '{"st']))
    log = LogFile(path)
    log.open_after(2)
    assert path.read_text() == "".join(texts[:3])
    log.write(replace(step, step=3))
    log.close()
    assert read_log(path) == [*lines[:3], replace(step, step=3)]
    log.open_after(0)
    log.close()
    assert path.read_text() == ""
