"""`longrope2 generate` as a user meets it."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longrope2 import cli
from longrope2.books import read_books
from longrope2.errors import DataError, LongRopeError
from longrope2.generation import generate as stage
from longrope2.generation.config import ChatConfig, GenerateConfig, Sampling
from longrope2.generation.generate import Timing, encode, read_prompt
from longrope2.generation.switch import load
from longrope2.methods import rescale
from longrope2.models import describe, load_tokenizer
from longrope2.models import load as load_model
from longrope2.rotary import rescaled

WINDOW, TARGET = 256, 1024


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", device="cpu")


@pytest.fixture(scope="module")
def factors(tiny):
    return rescale("yarn", tiny.info.rope, TARGET)


@pytest.fixture(scope="module")
def factors_file(factors, tmp_path_factory):
    file = tmp_path_factory.mktemp("factors") / "yarn.json"
    factors.save(file)
    return file


@pytest.fixture(scope="module")
def book(tiny):
    """A text of 250 tokens: seven more are beyond the window."""
    ids = tiny.tokenizer(next(read_books(held_out=True)).text[5000:8000]).input_ids[:250]
    text = tiny.tokenizer.decode(ids, skip_special_tokens=True)
    assert tiny.tokenizer(text).input_ids == ids
    return text


@pytest.fixture
def longrope2(monkeypatch, capsys):
    """Run a command in this process: its exit code, stdout and stderr."""

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["longrope2", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code or 0, out=out, err=err)

    return run


def expected_text(tiny, factors, prompt, new, *, switch_length=WINDOW):
    """Greedy text by fresh forwards without cache, each on its side of the switch."""
    new_ids = written(tiny, factors, tiny.tokenizer(prompt).input_ids, new, switch_length=switch_length)
    return tiny.tokenizer.decode(new_ids, skip_special_tokens=True) + "\n"


def written(tiny, factors, prompt, new, *, switch_length=WINDOW):
    ids = list(prompt)
    for _ in range(new):
        with rescaled(tiny.model, factors, long_rows=len(ids) > switch_length, check=False), torch.no_grad():
            ids.append(int(tiny.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class TestText:
    @pytest.mark.parametrize("way", [[], ["--stream"], ["--switch", "shadow"]])
    def test_it_is_exact_across_the_switch(self, way, longrope2, tiny, factors, factors_file, book):
        result = longrope2(
            "generate", "tiny", "--prompt", book, "--factors", factors_file, "--max-new-tokens", 14, *way
        )
        assert result.code == 0, result.err
        assert result.out == expected_text(tiny, factors, book, 14)
        name = "shadow" if "shadow" in way else "recompute"
        assert f"switched to long RoPE after 256 tokens, at new token 8: {name} took" in result.err
        assert "tokens/s" in result.err

    def test_work_ahead_that_begins_with_the_prompt(self, longrope2, tiny, factors, factors_file, book):
        options = ["--switch", "shadow", "--switch-length", 250, "--max-new-tokens", 3]
        result = longrope2("generate", "tiny", "--prompt", book, "--factors", factors_file, *options)
        assert result.out == expected_text(tiny, factors, book, 3, switch_length=250)
        assert "at new token 2: shadow took" in result.err
        assert "; 128 tokens were run ahead with the prompt" in result.err

    def test_prompts_from_a_file_and_from_stdin(self, longrope2, tiny, factors, factors_file, book, tmp_path):
        file = tmp_path / "prompt.txt"
        file.write_text(book, encoding="utf-8")
        options = ["--factors", factors_file, "--max-new-tokens", 3]
        results = [
            longrope2("generate", "tiny", "--prompt-file", file, *options),
            longrope2("generate", "tiny", "-", *options, stdin=book.encode()),
            longrope2("generate", "tiny", "--prompt-file", "-", *options, stdin=book.encode()),
        ]
        assert {result.out for result in results} == {expected_text(tiny, factors, book, 3)}
        assert "original RoPE throughout" in results[0].err

    def test_a_saved_model_with_its_switch_length(self, longrope2, tiny, factors, book, tmp_path):
        model = load("tiny", factors, switch_length=252, device="cpu")
        model.save_pretrained(tmp_path)
        tiny.tokenizer.save_pretrained(tmp_path)
        result = longrope2("generate", tmp_path, "--prompt", book, "--max-new-tokens", 6)
        assert result.out == expected_text(tiny, factors, book, 6, switch_length=252)
        assert "after 252 tokens" in result.err
        result = longrope2("generate", tmp_path, "--prompt", book, "--max-new-tokens", 4, "--switch-length", 200)
        assert result.out == expected_text(tiny, factors, book, 4, switch_length=200)
        assert "long RoPE from the start" in result.err

    def test_a_base_model_without_factors(self, longrope2, tiny, factors, book):
        result = longrope2("generate", "tiny", "--prompt", book)
        assert result.out == expected_text(tiny, factors, book, 6)  # what its window leaves
        assert "RoPE" not in result.err
        beyond = longrope2("generate", "tiny", "--prompt", book, "--max-new-tokens", 9, "--beyond-window")
        assert beyond.out.startswith(result.out.rstrip("\n"))
        assert "9 new tokens" in beyond.err
        assert "warning: prompt and new tokens come to 259 tokens, tiny is made for 256" in beyond.err
        assert "reminder" not in beyond.err

    def test_factors_that_name_another_model(self, longrope2, factors, book, tmp_path):
        options = ["--prompt", book, "--max-new-tokens", 1, "--factors", tmp_path / "f.json"]
        info = describe("tiny")
        for made_for, revision, told in (
            ("other", "sha256:0", True),
            ("tiny", "sha256:0", True),  # its config has changed since
            ("owner/other", "3c0ffee", True),
            ("a-copy", info.revision, False),
            ("owner/tiny@main", "3c0ffee", False),  # the hub's, of which this may be a download
        ):
            replace(factors, provenance={"model": made_for, "revision": revision}).save(tmp_path / "f.json")
            result = longrope2("generate", "tiny", *options)
            assert result.code == 0
            assert (f"warning: these factors were made for {made_for}" in result.err) is told

    def test_pin_says_its_side(self, longrope2, factors_file, book):
        options = ["generate", "tiny", "--prompt", book, "--factors", factors_file, "--switch", "pin"]
        assert "original RoPE throughout, pinned" in longrope2(*options, "--max-new-tokens", 7).err
        assert "long RoPE throughout, pinned" in longrope2(*options, "--max-new-tokens", 8).err

    @pytest.mark.parametrize("way", ["recompute", "shadow", "pin"])
    def test_one_rope_never_switches(self, way, longrope2, tiny, factors, book, tmp_path):
        factors.long_everywhere().save(tmp_path / "f.json")
        options = ["--factors", tmp_path / "f.json", "--max-new-tokens", 10, "--switch", way]
        result = longrope2("generate", "tiny", "--prompt", book, *options)
        assert result.out == expected_text(tiny, factors, book, 10, switch_length=0)
        assert "one RoPE at every length: there was nothing to switch" in result.err
        assert "original RoPE" not in result.err

    def test_sampling_follows_its_seed(self, longrope2, book):
        texts = [
            longrope2("generate", "tiny", "--prompt", book, "--temperature", 2, "--seed", seed).out
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]

    def test_chat_template(self, tiny):
        tokenizer = load_model("tiny", device="cpu").tokenizer
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}answer:"
        assert tokenizer.decode(encode(tokenizer, "hello there")) == "[user] hello there answer:"
        assert encode(tokenizer, "hello there", raw=True) == encode(tiny.tokenizer, "hello there")
        for broken in ("{{ raise_exception('a system message first') }}", "{% if %}"):
            tokenizer.chat_template = broken
            with pytest.raises(DataError, match="chat template fails") as caught:
                encode(tokenizer, "hello there")
            assert "--raw" in caught.value.hint


class TestInterrupts:
    def test_ctrl_c_keeps_what_was_streamed(self):
        arguments = ["generate", "tiny", "--prompt", "Once upon a time", "--stream", "--max-new-tokens", "1M"]
        process = subprocess.Popen(
            [sys.executable, "-m", "longrope2", *arguments, "--beyond-window"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert len((begun + out).decode()) >= 20
        assert out.endswith(b"\n")
        assert err.decode().endswith("interrupted\n")
        assert b"Traceback" not in err

    def test_ctrl_c_prints_what_was_not(self, longrope2, monkeypatch, tiny, factors, book):
        put = stage.Listener.put

        def interrupt(listener, value):
            put(listener, value)
            if len(listener.times) == 4:
                raise KeyboardInterrupt

        monkeypatch.setattr(stage.Listener, "put", interrupt)
        result = longrope2("generate", "tiny", "--prompt", book)
        assert result.code == 130
        assert result.out == expected_text(tiny, factors, book, 3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "no prompt given"),
            (["--prompt", "a", "--prompt-file", "b"], "several prompts given"),
            (["--prompt", "a", "-"], "several prompts given"),
            (["text"], "'text' after the model is not understood\nhint: give --prompt TEXT"),
            (["--prompt", " \n"], "the prompt is empty"),
            (["--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read (No such file or directory)\nhint: give"),
            (["--prompt-file", "."], ".: cannot be read (Is a directory)"),
            (["--prompt-file", "binary"], "binary: not a text file in UTF-8"),
            (["--prompt-file", "zeros"], "zeros: not a text file in UTF-8"),
            (["--prompt", "a", "--max-new-tokens", "0"], "'0' is not a length"),
            (["--prompt", "a", "--max-new-tokens", "300"], "more than the window of 256\nhint: --max-new-tokens 25"),
            (["--prompt", "a", "--factors", "F", "--max-new-tokens", "2k"], "more than the extended window of 1,024"),
            (["--prompt", "a " * 2000, "--factors", "F"], "tokens: more than the extended window of 1,024"),
            (["--prompt", "a", "--switch", "shadow"], "tiny has no factors, so there is nothing to switch to"),
            (["--prompt", "a", "--factors", "F", "--switch-length", "2k"], "switch_length must lie from 1 to"),
            (["--prompt", "a", "--factors", "nowhere.json"], "nowhere.json: no such file\nhint: write one with"),
            (["--prompt", "a", "--factors", "."], ".: cannot be read (Is a directory)\nhint: write one with"),
            (
                ["--prompt", "a", "--factors", "binary"],
                "binary: cannot be read (not a text file)\nhint: write one with",
            ),
            (["--prompt", "a", "--factors", "OTHER"], "these factors were made for another model than tiny"),
            (["--prompt", "a", "--temperature", "-1"], "temperature must be 0 or at least 1e-06, got -1"),
            (["--prompt", "a", "--temperature", "nan"], "temperature must be a number, got NaN"),
            (["--prompt", "a", "--temperature", "1e-300"], "temperature must be 0 or at least 1e-06, got 1e-300"),
            (["--prompt", "a", "--seed", "-1"], f"seed must lie from 0 to {2**63 - 1}, got -1"),
            (["--prompt", "a", "--seed", str(1 << 64)], f"seed must lie from 0 to {2**63 - 1}, got"),
            (["--prompt", "a", "--top-p", "1.5"], "top_p must lie in (0, 1], got 1.5"),
        ],
    )
    def test_one_message_before_any_weights_are_read(
        self, options, message, longrope2, factors, factors_file, monkeypatch, tmp_path
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
        (tmp_path / "zeros").write_bytes(b"text\x00text")
        other = {**factors.to_json(), "theta": 5e5}
        type(factors).from_json(other).save(tmp_path / "other.json")
        monkeypatch.setattr(stage, "load_model", lambda *_: pytest.fail("weights were loaded"))
        names = {"F": factors_file, "OTHER": "other.json"}
        result = longrope2("generate", "tiny", *(names.get(option, option) for option in options))
        assert result.code == 2
        assert message in result.err
        assert result.out == ""

    def test_weights_that_are_not_numbers(self, longrope2, monkeypatch):
        broken = stage.load_model("tiny", device="cpu")
        torch.nn.init.constant_(broken.model.model.norm.weight, float("nan"))
        monkeypatch.setattr(stage, "load_model", lambda *_: broken)
        result = longrope2("generate", "tiny", "--prompt", "a", "--temperature", "1", "--max-new-tokens", "2")
        assert (result.code, result.err.splitlines()[0]) == (
            2,
            "error: the model's logits are not finite, so that nothing can be sampled",
        )

    def test_an_empty_stdin(self, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        with pytest.raises(LongRopeError, match="the prompt is empty"):
            read_prompt(GenerateConfig(), "-")


def test_greedy_even_where_the_model_would_sample():
    assert Sampling().options()["do_sample"] is Sampling(temperature=0.0, top_p=0.5).options()["do_sample"] is False
    options = Sampling(top_p=0.5).options()
    assert (options["do_sample"], options["temperature"], options["top_p"], options["top_k"]) == (True, 1.0, 0.5, 0)


def test_the_cost_of_a_switch():
    """Tokens of 1 s, two of them with work that takes 3 s and 2 s more; the prompt is not counted."""
    timing = Timing([0.0, 9.0, 10.0, 14.0, 17.0, 18.0])
    assert timing.cost([7, 0, 5, 5, 0]) == (5.0, 4.0, 1.0)
    assert timing.tokens_per_second == 4 / 9
    assert Timing([0.0, 1.0]).tokens_per_second is None


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def talker(tiny, tmp_path_factory):
    """The tiny model with a chat template; it never ends a turn itself."""
    folder = tmp_path_factory.mktemp("talker")
    tiny.model.save_pretrained(folder)
    tokenizer = load_tokenizer(describe("tiny"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class TestChat:
    def test_every_turn_is_that_of_fresh_forwards_across_the_switch(
        self, longrope2, tiny, factors, factors_file, talker
    ):
        """Turns that cross the switch length in the middle of an answer, and after it."""
        messages = ["It was the best of times, " * 24, "and then?", "why"]
        options = ["--factors", factors_file, "--max-new-tokens", "40"]
        found = longrope2("chat", talker, *options, stdin="\n".join(messages).encode())
        assert found.code == 0, found.err
        ids, said = [], ""
        for number, message in enumerate(messages):
            turn = "\n" * (number > 0) + f"<user>{message.strip()}\n<assistant>"
            ids += tiny.tokenizer(turn, add_special_tokens=False).input_ids
            answer = written(tiny, factors, ids, 40)
            if tiny.tokenizer.eos_token_id in answer:
                answer = answer[: answer.index(tiny.tokenizer.eos_token_id)]
            said += tiny.tokenizer.decode(answer, skip_special_tokens=True) + "\n"
            ids += answer
        assert found.out == said
        assert found.err.count("[original RoPE throughout") == 1
        assert found.err.count("switched to long RoPE") == 1
        assert found.err.count("long RoPE from the start") == 1

    def test_what_was_read_is_not_read_again(self, talker, factors_file):
        read = []
        chat = stage.Chat(str(talker), ChatConfig(max_new_tokens=5), factors_file=factors_file)
        chat.answer("one two three four five six", lambda _: None)
        hook = lambda _, __, options: read.append(options["input_ids"].shape[1])  # noqa: E731
        chat._writer._live.register_forward_pre_hook(hook, with_kwargs=True)
        chat.answer("seven", lambda _: None)
        assert read[0] < 20

    def test_commands_and_wrong_lines(self, longrope2, talker, factors_file, tmp_path):
        (tmp_path / "book.txt").write_text("A short book.")
        lines = ["/help", f"/file {tmp_path}/none", f"/file {tmp_path}/book.txt", "", "summarise"]
        lines += ["x " * 2000, "/clear", "hello", "/exit", "never"]
        options = ["--factors", factors_file, "--max-new-tokens", "3"]
        found = longrope2("chat", talker, *options, stdin="\n".join(lines).encode())
        assert found.code == 0
        assert len(found.out.splitlines()) == 2
        assert "/clear begins again" in found.err
        assert "none: cannot be read" in found.err
        assert "15 characters go with your next message" in found.err
        assert "more than the extended window of 1,024" in found.err
        assert found.err.count("[prompt of") == 2

    def test_a_model_without_a_template_is_refused(self, longrope2):
        found = longrope2("chat", "tiny", stdin=b"hello")
        assert found.code == 2
        assert "tiny has no chat template" in found.err
