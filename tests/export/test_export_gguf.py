"""GGUF files against llama.cpp itself: log-probabilities in both modes, tokens, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_samples import (
    EXTENDED,
    ONE_TEMPERATURE,
    TWO_TEMPERATURES,
    WINDOW,
    family_factors,
    family_folder,
    tiny_factors,
)

import longrope2
from longrope2 import export_model as export
from longrope2.errors import LongRopeError, ModelError
from longrope2.export.config import VerifyConfig
from longrope2.export.gguf import GGUFExport
from longrope2.export.reference import Reference
from longrope2.export.verify import verify
from longrope2.gguf_model import GPT4O_SPLIT, LLAMA3_SPLIT, open_gguf
from longrope2.methods import rescale
from longrope2.models import ASSETS, describe, load, load_tokenizer
from longrope2.rotary import rescaled

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 32, "sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("phi3", {"sliding_window": EXTENDED}),
    (
        "granite",
        {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    ),
]

TOKENISE = """
import json, os, sys, urllib.request
import xllamacpp
file, texts = json.load(sys.stdin)
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel = file, 256, 1
options.warmup = options.fit_params = False
server = xllamacpp.Server(options)
found = []
for text in texts:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    kind = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(server.listening_address + "/tokenize", body, kind)) as reply:
        found.append(json.load(reply)["tokens"])
print(json.dumps(found), flush=True)
os._exit(0)
"""

MODES = ("short", "short, long factors", "long")


def export_family(folder, family, options, temperatures=ONE_TEMPERATURE, dtype="float32"):
    """A random model as a GGUF file with factors that all differ."""
    model = family_folder(folder / "model", family, **options)
    factors = family_factors(load(model, device="cpu").model, **temperatures)
    export(str(model), folder / "out.gguf", factors=factors, format="gguf", profile="dual", dtype=dtype)
    return folder / "out.gguf"


def export_tiny(file, dtype="float32", **changes):
    export("tiny", file, factors=tiny_factors(**changes), format="gguf", profile="dual", dtype=dtype)
    return file


class TestLlamaCpp:
    @pytest.mark.parametrize(("family", "options"), FAMILIES)
    def test_every_family_in_both_modes(self, tmp_path, family, options):
        file = export_family(tmp_path, family, options, TWO_TEMPERATURES)
        reference = Reference(file)
        findings = verify(reference.path, VerifyConfig()).findings
        assert {finding.mode: finding.verdict for finding in findings} == dict.fromkeys(MODES, "right")
        assert max(finding.max_error for finding in findings) < 1e-3
        # What was read back from the file is the model it was made of, and not just what llama.cpp agrees with.
        source = load(file.with_name("model"), device="cpu").model
        tokens = torch.randint(0, 4096, (1, 40), generator=torch.Generator().manual_seed(0))
        with rescaled(source, reference.factors, long_rows=True), torch.no_grad():
            expected = source(tokens).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(reference.logprobs(tokens[0].tolist(), long=True), expected, rtol=1e-5, atol=1e-4)

    def test_a_file_loads_as_the_model_it_was_made_of(self, tmp_path):
        for family, options in (("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})):
            file = export_family(tmp_path / family, family, options, TWO_TEMPERATURES)
            info, source = describe(file), load(file.with_name("model"), device="cpu").model
            assert info.reading.family == family
            assert info.reading.rescaled.long_factors == GGUFExport(file).factors.long
            model = load(file, device="cpu").model
            assert model.config.num_hidden_layers == source.config.num_hidden_layers
            assert model.state_dict().keys() == source.state_dict().keys()
            for name, weight in source.state_dict().items():
                torch.testing.assert_close(model.state_dict()[name], weight)

    def test_the_tiny_model(self, tmp_path):
        findings = verify(export_tiny(tmp_path / "t.gguf", **TWO_TEMPERATURES), VerifyConfig()).findings
        assert {finding.mode: finding.verdict for finding in findings} == dict.fromkeys(MODES, "right")
        assert max(finding.max_error for finding in findings) < 1e-3

    @pytest.mark.parametrize("method", ["cope", "hardclip", "drope"])
    def test_dimensions_that_stand_still(self, tmp_path, method):
        factors = rescale(method, describe("tiny").rope, EXTENDED)
        export("tiny", tmp_path / "t.gguf", factors=factors, format="gguf", profile="dual", dtype="float32")
        findings = verify(tmp_path / "t.gguf", VerifyConfig()).findings
        assert {finding.mode: finding.verdict for finding in findings} == dict.fromkeys(MODES, "right")
        assert max(finding.max_error for finding in findings) < 1e-3
        assert longrope2.load(tmp_path / "t.gguf", device="cpu").longrope2.factors.long == factors.long

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "q8_0"])
    def test_precisions(self, tmp_path, dtype):
        file = export_family(tmp_path, "llama", {}, TWO_TEMPERATURES, dtype)
        findings = verify(file, VerifyConfig()).findings
        assert {finding.mode: finding.verdict for finding in findings} == dict.fromkeys(MODES, "right")
        kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
        assert kinds == {"F32", {"bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}[dtype]}

    @pytest.mark.parametrize("dtype", ["float32", "q8_0"])
    @pytest.mark.parametrize("fault", ["long factors", "temperature"])
    def test_faults_are_seen_in_every_precision(self, tmp_path, dtype, fault):
        file = export_family(tmp_path, "llama", {}, dtype=dtype)
        reader = gguf.GGUFReader(file, "r+")
        if fault == "temperature":
            reader.get_field("llama.rope.scaling.attn_factor").parts[-1][0] = 1.0
        else:
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            tensors["rope_factors_long.weight"].data[:] = tensors["rope_factors_short.weight"].data
        del reader
        result = verify(file, VerifyConfig())
        assert result.wrong
        findings = {finding.mode: finding for finding in result.findings}
        assert findings["long"].verdict == "WRONG"
        assert findings["short"].verdict == ("WRONG" if fault == "temperature" else "right")
        expected = "long factors at an attention factor of 1.0" if fault == "temperature" else "short factors"
        assert expected in findings["long"].note

    def test_no_short_side_below_a_step_of_context(self, tmp_path):
        """llama.cpp rounds contexts up to 256, so a window of 100 tokens is never short."""
        model = family_folder(tmp_path / "m", "llama", max_position_embeddings=100)
        factors = family_factors(load(model, device="cpu").model, original_length=100)
        export(str(model), tmp_path / "o.gguf", factors=factors, format="gguf", dtype="float32")
        findings = verify(tmp_path / "o.gguf", VerifyConfig()).findings
        assert {finding.mode: finding.verdict for finding in findings} == {
            "short, long factors": "right",
            "long": "right",
        }
        assert "-c 100" not in (tmp_path / "o.md").read_text()


class TestRoundTrip:
    def test_loads_as_a_model_that_switches(self, tmp_path):
        factors = tiny_factors(**TWO_TEMPERATURES)
        file = export_tiny(tmp_path / "t.gguf", **TWO_TEMPERATURES)
        model = longrope2.load(str(file), device="cpu")
        for name in ("long", "short", "long_attention_factor", "short_attention_factor", "original_length"):
            assert getattr(model.longrope2.factors, name) == getattr(factors, name)
        base = longrope2.load("tiny", factors, device="cpu")
        for length in (WINDOW, WINDOW + 1):
            tokens = torch.arange(length)[None]
            with torch.no_grad():
                torch.testing.assert_close(model(tokens).logits, base(tokens).logits, rtol=1e-4, atol=1e-4)

    def test_folded(self, tmp_path):
        """Folding and permuting leave the model what it was."""
        model = family_folder(tmp_path / "m", "llama")
        factors = family_factors(load_model(model))
        logits = []
        for fold in (False, True):
            file = tmp_path / f"{fold}.gguf"
            export(str(model), file, factors=factors, format="gguf", dtype="float32", fold_temperature=fold)
            with torch.no_grad():
                logits.append(longrope2.load(str(file), device="cpu")(torch.arange(300)[None]).logits)
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)

    def test_is_not_extended_a_second_time(self, tmp_path):
        file = export_tiny(tmp_path / "t.gguf")
        with pytest.raises(ModelError, match="already rescaled by 'longrope' from 256 to 1,024"):
            export(str(file), tmp_path / "again", factors=tiny_factors(target_length=2048))
        export(str(file), tmp_path / "folder")
        assert describe(tmp_path / "folder").reading.window == EXTENDED
        assert longrope2.load(str(tmp_path / "folder"), device="cpu").longrope2.factors.long == tiny_factors().long


class TestTokenizers:
    TEXTS = (
        "The quick brown fox, in 1848, jumped over 12345 lazy dogs.",
        "  two spaces,\n\n\tnewlines and tabs \n end  ",
        "naïve café – “quotes” 你好 🙂 don't we'LL",
        "CamelCaseWords, snake_case_words = foo(bar)[0]/n\n/;",
        "<|user|>hi<|end|> there",
    )

    @staticmethod
    def in_llama_cpp(file, texts):
        """In a process that ends without deleting the server, which may wait for its own threads for ever."""
        job = json.dumps([str(file), texts])
        command = [sys.executable, "-c", TOKENISE]
        done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def check(self, folder, tokenizer):
        """Give a random LLaMA this tokenizer, export it, and compare tokens."""
        model = family_folder(folder, "llama", tokenizer=False, vocab_size=len(tokenizer) + 5)
        tokenizer.save_pretrained(model)
        factors = family_factors(load(model, device="cpu").model)
        export(str(model), folder / "o.gguf", factors=factors, format="gguf", dtype="float32")
        theirs, again = self.in_llama_cpp(folder / "o.gguf", self.TEXTS), open_gguf(folder / "o.gguf").tokenizer()
        for text, tokens in zip(self.TEXTS, theirs, strict=True):
            assert tokens == tokenizer(text).input_ids == again(text).input_ids, text
            assert again.decode(tokens) == tokenizer.decode(tokens)

    @staticmethod
    def byte_level(splitter, *, ignore_merges=False, bos=True):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        tokenizer.pre_tokenizer = splitter
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<s>", "</s>", "<|user|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator([*TestTokenizers.TEXTS, "brown lazy dogs jumped 1848 we'll"] * 3, trainer)
        tokenizer.add_tokens(["<|end|>"])
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")

    @pytest.mark.parametrize("split", ["gpt-2", "digits", "llama3", "llama3 words", "qwen2", "gpt-4o"])
    def test_byte_level(self, tmp_path, split):
        from tokenizers import Regex, pre_tokenizers

        by_rule = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        patterns = {
            "llama3": LLAMA3_SPLIT,
            "llama3 words": LLAMA3_SPLIT,
            "qwen2": LLAMA3_SPLIT.replace("{1,3}", ""),
            "gpt-4o": GPT4O_SPLIT,
        }
        if split in patterns:
            rule = pre_tokenizers.Split(Regex(patterns[split]), "isolated")
            splitter = pre_tokenizers.Sequence([rule, by_rule])
        elif split == "digits":
            splitter = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_gpt2])
        else:
            splitter = by_gpt2
        self.check(tmp_path, self.byte_level(splitter, ignore_merges=split == "llama3 words", bos=split != "qwen2"))

    # Into tokenizer.json transformers always writes the prefix, whatever the model says.
    @pytest.mark.parametrize(
        ("files", "prefix"), [("tokenizer.model", True), ("tokenizer.model", False), ("tokenizer.json", True)]
    )
    def test_sentencepiece(self, tmp_path, files, prefix):
        """A model trained by sentencepiece itself: llama.cpp gives the tokens that sentencepiece gives."""
        import sentencepiece
        from transformers import AutoTokenizer

        model = family_folder(tmp_path / "m", "llama", tokenizer=False, vocab_size=480)
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("\n".join(text.replace("\n", " ") for text in self.TEXTS * 20))
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=str(model / "tokenizer"), vocab_size=470, model_type="bpe",
            byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
            normalization_rule_name="identity", user_defined_symbols=["<|user|>", "<|end|>"],
            character_coverage=0.99, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
        if files == "tokenizer.json":
            AutoTokenizer.from_pretrained(model).save_pretrained(model)
            (model / "tokenizer.model").unlink()
            assert (model / "tokenizer.json").is_file()
        factors = family_factors(load_model(model))
        export(str(model), tmp_path / "o.gguf", factors=factors, format="gguf", dtype="float32")
        # After a special token llama.cpp puts the space in once more, by a rule of its own.
        texts = self.TEXTS[:-1] if prefix else self.TEXTS
        for text, tokens in zip(texts, self.in_llama_cpp(tmp_path / "o.gguf", texts), strict=True):
            assert tokens == [pieces.bos_id(), *pieces.encode(text)], text

    def test_several_chat_templates(self, tmp_path):
        shutil.copytree(ASSETS / "tiny", tmp_path / "m")
        tokenizer = load_tokenizer(describe("tiny"))
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        tokenizer.save_pretrained(tmp_path / "m")
        export(str(tmp_path / "m"), tmp_path / "o.gguf", factors=tiny_factors(), format="gguf")
        file = open_gguf(tmp_path / "o.gguf")
        assert file.value("tokenizer.chat_template") == "{{ messages }}"
        assert file.value("tokenizer.chat_template.tool_use") == "{{ tools }}"

    def test_unknown_splits_are_refused(self, tmp_path):
        from tokenizers import pre_tokenizers

        model = family_folder(tmp_path, "llama", tokenizer=False, vocab_size=700)
        self.byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)).save_pretrained(model)
        with pytest.raises(ModelError, match="a guess would change tokens"):
            export(str(model), tmp_path / "o.gguf", factors=family_factors(load(model).model), format="gguf")
        assert not list(tmp_path.glob("*.gguf"))


class TestRefusals:
    def test_biases_that_a_stand_in_would_leave_out(self, tmp_path):
        with pytest.raises(ModelError, match=r"_proj\.bias has no place in llama\.cpp's 'step35' architecture"):
            export_family(tmp_path, "qwen3", {"attention_bias": True})

    @pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "olmo2", "smollm3", "starcoder2"])
    def test_architectures_that_would_run_without_factors(self, tmp_path, family):
        model = family_folder(tmp_path / "m", family, tokenizer=False)
        factors = family_factors(load_model(model))
        with pytest.raises(ModelError, match="would run them with plain RoPE, and say nothing"):
            export(str(model), tmp_path / "o.gguf", factors=factors, format="gguf")

    @pytest.mark.parametrize(
        ("family", "options", "message"),
        [
            ("mistral", {"sliding_window": 64}, "its layers attend to 64 tokens"),
            ("phi3", {"sliding_window": 64}, "its layers attend to 64 tokens"),
            ("llama", {"hidden_act": "gelu"}, "the activation 'silu', not 'gelu'"),
            ("llama", {"rope": {"partial_rotary_factor": 0.5}}, "rotates whole heads"),
            ("llama", {"vocab_size": 50, "tokenizer": True}, "the tokenizer has 4,096 tokens, the model only 50"),
        ],
    )
    def test_models_it_would_run_otherwise(self, tmp_path, family, options, message):
        model = family_folder(tmp_path / "m", family, **{"tokenizer": False, **options})
        with pytest.raises(ModelError, match=message):
            export(str(model), tmp_path / "o.gguf", factors=family_factors(load_model(model)), format="gguf")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]

    def test_files_of_others(self, tmp_path):
        """They are read like any model: test_verify_others.py."""
        writer = gguf.GGUFWriter(tmp_path / "o.gguf", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match=r"metadata 'llama\.embedding_length' is missing"):
            verify(tmp_path / "o.gguf", VerifyConfig())
        (tmp_path / "o.gguf").write_bytes(b"GGUF but not really")
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            verify(tmp_path / "o.gguf", VerifyConfig())

    @pytest.mark.parametrize(
        ("bytes_before", "bytes_after", "message"),
        [
            (b'{"format": "longrope2.factors"', b'?"format": "longrope2.factors"', "'longrope2.factors' is damaged"),
            (b'{"format": "longrope2.factors"', b'\xff"format": "longrope2.factors"', "'longrope2.factors' is damaged"),
            (b"rope_factors_short.weight", b"rope_factors_other.weight", "'rope_factors_short.weight' is missing"),
        ],
    )
    def test_damaged_files_are_told_to_be_that(self, bytes_before, bytes_after, message, tmp_path):
        path = tmp_path / "tiny.gguf"
        export("tiny", path, factors=tiny_factors(), format="gguf")
        assert bytes_before in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(bytes_before, bytes_after))
        with pytest.raises(ModelError, match=message):
            describe(path)
        if b"format" in bytes_before:
            with pytest.raises(ModelError, match=r"its factors or config are damaged|'longrope2\.factors' is damaged"):
                Reference(path)

    def test_a_damaged_vocabulary_or_size(self, tmp_path):
        path = tmp_path / "tiny.gguf"
        export("tiny", path, factors=tiny_factors(), format="gguf")
        whole = path.read_bytes()
        merge = (3).to_bytes(8, "little") + b"h e"
        assert merge in whole
        for other in (b"h \xff", b"h \x01"):  # no UTF-8, and no token
            path.write_bytes(whole.replace(merge, merge[:-3] + other))
            with pytest.raises(
                ModelError, match=r"tiny\.gguf: (its tokenizer cannot be loaded|.*merges' is damaged)"
            ) as caught:
                load_tokenizer(describe(path))
            assert caught.value.hint
        size = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
        place = whole.index(size) + len(size)
        path.write_bytes(whole[:place] + (8).to_bytes(4, "little") + whole[place + 4 :])
        with pytest.raises(ModelError, match=r"tensors and metadata disagree \(size mismatch"):
            load(path)

    def test_a_weight_that_is_missing_is_not_made_up(self, tmp_path):
        path = tmp_path / "tiny.gguf"
        export("tiny", path, factors=tiny_factors(), format="gguf")
        path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.weight", b"xlk.0.attn_q.weight"))
        with pytest.raises(ModelError, match=r"tiny\.gguf: tensors not known for 'llama': xlk\.0\.attn_q\.weight"):
            Reference(path).model()

    def test_what_is_no_export_is_never_replaced(self, tmp_path):
        path, card = tmp_path / "tiny.gguf", tmp_path / "tiny.md"
        export("tiny", path, factors=tiny_factors(), format="gguf")
        with pytest.raises(LongRopeError, match=r"tiny\.gguf exists already"):
            export("tiny", path, factors=tiny_factors(), format="gguf")
        export("tiny", path, factors=tiny_factors(), format="gguf", force=True)
        theirs = path.read_bytes().replace(b"longrope2.config", b"somebody.else.s1")
        for place, content in ((card, b"# notes"), (path, theirs), (path, b"GGUF but not really")):
            before = place.read_bytes()
            place.write_bytes(content)
            with pytest.raises(LongRopeError, match=rf"{place.name} is not an export of longrope2, and is never"):
                export("tiny", path, factors=tiny_factors(), format="gguf", force=True)
            assert place.read_bytes() == content
            place.write_bytes(before)

    def test_the_file_comes_last_so_that_the_same_command_goes_on_after_a_kill(self, tmp_path, monkeypatch):
        path, card = tmp_path / "tiny.gguf", tmp_path / "tiny.md"
        real = Path.replace

        def killed(temporary, final):
            assert final == card, "a kill"
            return real(temporary, final)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            with pytest.raises(AssertionError, match="a kill"):
                export("tiny", path, factors=tiny_factors(), format="gguf")
        assert [file.name for file in tmp_path.iterdir()] == ["tiny.md"]
        export("tiny", path, factors=tiny_factors(), format="gguf")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.gguf", "tiny.md"]
        path.unlink()
        card.write_text("# notes")
        with pytest.raises(LongRopeError, match=r"tiny\.md is not an export of longrope2, and is never replaced"):
            export("tiny", path, factors=tiny_factors(), format="gguf")

    @pytest.mark.parametrize(
        ("name", "format", "hint"),
        [("o.bin", "gguf", r"use -o .*o\.bin\.gguf"), ("o.gguf", "huggingface", "add --format")],
    )
    def test_names_and_formats_must_agree(self, name, format, hint, tmp_path):
        with pytest.raises(LongRopeError, match=rf"ends in \.gguf, and that of a folder does not\nhint: {hint}"):
            export("tiny", tmp_path / name, factors=tiny_factors(), format=format)
        assert list(tmp_path.iterdir()) == []

    def test_numbers_beyond_float16(self, tmp_path):
        model = family_folder(tmp_path / "m", "llama")
        weights = load_model(model)
        weights.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
        weights.save_pretrained(model)
        with pytest.raises(ModelError, match="beyond the range of float16"):
            export(str(model), tmp_path / "o.gguf", factors=family_factors(weights), format="gguf", dtype="float16")


def load_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
