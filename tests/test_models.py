"""Finding, refusing and loading models; GGUF against transformers' own reader."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import family_config, family_model
from longrope2.errors import MissingExtraError, ModelError
from longrope2.gguf_model import GGUFModel
from longrope2.methods import rescale
from longrope2.models import (
    ASSETS,
    check_factors,
    describe,
    load,
    load_tokenizer,
    rescale_model,
    skeleton,
    weights_fingerprint,
)

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A folder with a small byte-level BPE tokenizer that splits digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog ran 1234 times"] * 4, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>").save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("llama")
    family_model("llama", vocab_size=320).save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder)
    return folder


def permuted(weight, heads):
    """llama.cpp's converter, restated: pairs (i, i + half) become neighbours."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "phi3": "phi3"}


def random_blocks(kind, shape, rng):
    """Bytes of a quantised tensor that mean numbers of a usual size."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(256, size=(shape[0] * shape[1] // values, size), dtype=np.uint8)
    while kind in gguf.quants._type_traits:
        with np.errstate(all="ignore"):
            numbers = gguf.dequantize(blocks, kind)
        odd = ~(np.abs(numbers).max(axis=1) < 100)
        if not odd.any():
            break
        blocks[odd] = rng.integers(256, size=(odd.sum(), size), dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(path, model, tokenizer_folder, *, quantisation="F32", types=None, rope=None, architecture=None,
               extra=None):  # fmt: skip
    """A GGUF file as llama.cpp's converter writes it, with the names that its own package gives to tensors.

    `types` names the quantisation of single tensors, whose content is then random.
    """
    rng = np.random.default_rng(0)
    config, state = model.config, {name: t.float().numpy() for name, t in model.state_dict().items()}
    family = GGUF_FAMILIES[config.model_type]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * parameters.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(parameters["rope_theta"])
    if family == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    for call in rope or []:
        call(writer)
    vocabulary = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (config.vocab_size - 2))
    writer.add_token_merges([" ".join(m) for m in vocabulary["merges"]] or ["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, array in state.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            array = permuted(array, heads[part])
        if family == "gemma3" and part.endswith("norm"):
            array = array + 1
        kind = gguf.GGMLQuantizationType[quantisation] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        if name in (types or {}):
            kind, content = types[name], random_blocks(types[name], array.shape, rng)
        else:
            content = gguf.quantize(array, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), content, raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, np.asarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_model(**overrides):
    return family_model("llama", vocab_size=320, head_dim=16, **overrides)


def _edit(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class TestFolders:
    def test_load(self, llama_folder):
        loaded = load(llama_folder)
        assert loaded.info.rope.original_length == 32
        assert loaded.model.dtype == torch.float32
        assert loaded.tokenizer.decode(loaded.tokenizer("the cat").input_ids) == "the cat"

    def test_config_alone_is_enough_to_describe(self, tmp_path):
        family_config("qwen3").save_pretrained(tmp_path)
        info = describe(tmp_path)
        assert info.reading.family == "qwen3"
        assert info.revision.startswith("sha256:")
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError, match=r"no \*.safetensors weights"):
            load(info)

    def test_describe_imports_no_models(self, llama_folder):
        """Of transformers, it needs the config classes."""
        code = (
            "import sys; from longrope2.models import describe, rescale_model\n"
            f"rescale_model(describe({str(llama_folder)!r}), 'yarn', 64)\n"
            "assert not [name for name in sys.modules if '.modeling_llama' in name], 'heavy import'"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_pickled_weights_are_refused(self, llama_folder, tmp_path):
        shutil.copytree(llama_folder, tmp_path / "m")
        (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
        with pytest.raises(ModelError, match="only pickled weights"):
            load(tmp_path / "m")

    def test_damaged_weights_are_one_clear_error(self, llama_folder, tmp_path):
        shutil.copytree(llama_folder, tmp_path / "m")
        file = tmp_path / "m" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(ModelError, match="its weights cannot be loaded") as caught:
            load(tmp_path / "m")
        assert "copy or download them again" in caught.value.hint

    @pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
    def test_weights_that_lack_something_are_not_filled_with_noise(self, llama_folder, tmp_path, lost):
        """As of a base model without its head; transformers only warns."""
        shutil.copytree(llama_folder, tmp_path / "m")
        file = tmp_path / "m" / "model.safetensors"
        state = {name: tensor for name, tensor in load_file(file).items() if name != lost}
        save_file(state, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"its weights lack {re.escape(lost)}") as caught:
            load(tmp_path / "m")
        assert "not a whole language model" in caught.value.hint

    @pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4"])
    def test_quantised_weights_are_refused(self, llama_folder, tmp_path, method):
        shutil.copytree(llama_folder, tmp_path / "m")
        _edit(tmp_path / "m", quantization_config={"quant_method": method})
        with pytest.raises(ModelError, match=rf"its weights are quantised \({method}\)") as caught:
            load(tmp_path / "m")
        assert "in bfloat16 or float16" in caught.value.hint
        assert describe(tmp_path / "m").rope.original_length == 32

    def test_a_very_long_name_of_a_quantisation_is_cut(self, llama_folder, tmp_path):
        shutil.copytree(llama_folder, tmp_path / "m")
        _edit(tmp_path / "m", quantization_config={"quant_method": "q" * 100_000})
        with pytest.raises(ModelError) as caught:
            load(tmp_path / "m")
        assert len(caught.value.message) < 1000

    def test_a_language_model_with_a_vision_part_is_refused(self, llama_folder, tmp_path):
        text = family_config("gemma3_text").to_dict()
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
        assert describe(tmp_path).reading.family == "gemma3_text"
        for read in (load, lambda folder: skeleton(describe(folder))):
            with pytest.raises(ModelError, match="a 'gemma3' model has more parts") as caught:
                read(tmp_path)
            assert "docs/models.md" in caught.value.hint

    def test_a_tokenizer_of_a_larger_vocabulary_is_refused(self, tokenizer_folder, tmp_path):
        shutil.copytree(tokenizer_folder, tmp_path / "m")
        family_model("llama", vocab_size=100).save_pretrained(tmp_path / "m")
        with pytest.raises(ModelError, match=r"its tokenizer has \d+ tokens, the model only 100"):
            load(tmp_path / "m")

    def test_a_config_that_transformers_refuses_is_one_clear_error(self, llama_folder, tmp_path):
        shutil.copytree(llama_folder, tmp_path / "m")
        _edit(tmp_path / "m", rms_norm_eps="x")
        for read in (load, lambda folder: load_tokenizer(describe(folder))):
            with pytest.raises(ModelError, match=r"cannot read its config .*rms_norm_eps.*expected float"):
                read(tmp_path / "m")

    def test_weights_that_may_not_be_read(self, llama_folder, monkeypatch):
        """Before safetensors says that there is no such file."""
        plain = Path.open

        def forbidden(path, *arguments, **options):
            if path.suffix == ".safetensors":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return plain(path, *arguments, **options)

        monkeypatch.setattr(Path, "open", forbidden)
        for work in (load, lambda folder: weights_fingerprint(describe(folder))):
            with pytest.raises(ModelError, match=r"model.safetensors: cannot be read \(Permission denied\)") as caught:
                work(llama_folder)
            assert caught.value.hint == "check its permissions"

    def test_a_tokenizer_that_is_not_there(self, llama_folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(llama_folder / name, tmp_path)
        with pytest.raises(ModelError, match="its tokenizer cannot be loaded") as caught:
            load_tokenizer(describe(tmp_path))
        assert "copy them from the base model" in caught.value.hint

    def test_a_folder_with_only_a_config(self, llama_folder, tmp_path):
        shutil.copy(llama_folder / "config.json", tmp_path)
        for work in (lambda: load_tokenizer(describe(tmp_path)), lambda: load(tmp_path)):
            with pytest.raises(ModelError, match=r": only a config\.json, without weights and tokenizer"):
                work()

    def test_a_damaged_tokenizer(self, llama_folder, tmp_path):
        folder = shutil.copytree(llama_folder, tmp_path / "m")
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"].popitem()  # whose merge tokenizers then misses
        (folder / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match="its tokenizer cannot be loaded") as caught:
            load_tokenizer(describe(folder))
        assert "copy them from the base model" in caught.value.hint

    def test_tiny_is_the_packages_unless_a_model_has_that_name(self, llama_folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny").mkdir()
        assert describe("tiny").location == str(ASSETS / "tiny")
        shutil.copy(llama_folder / "config.json", tmp_path / "tiny")
        assert describe("tiny").location == "tiny"

    def test_missing_places(self, tmp_path):
        with pytest.raises(ModelError, match="no such folder or file"):
            describe("nowhere")
        with pytest.raises(ModelError, match=r"no config.json there"):
            describe(tmp_path)
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(ModelError, match="an adapter alone"):
            describe(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
    def test_broken_config(self, tmp_path, text):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ModelError, match=r"not valid JSON|expected a JSON object"):
            describe(tmp_path)

    def test_without_network_the_hub_is_tried_once(self, monkeypatch):
        calls = []

        def fail(url, **_):
            calls.append(url)
            raise ConnectionError("Name or service not known")

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
        with pytest.raises(ModelError, match=r"the hub cannot be reached \(Name or service not known\)"):
            describe("nobody/nothing@main")
        assert len(calls) == 1

    def test_what_the_hub_does_not_have(self, monkeypatch):
        def refuse(url, **_):
            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
        with pytest.raises(ModelError, match=r"the hub does not have it \(404\)"):
            describe("nobody/nothing")

    def test_hub_config_is_used(self, monkeypatch, tmp_path):
        snapshot = tmp_path / "snapshots" / "abc123"
        family_config("llama").save_pretrained(snapshot)
        calls = []

        def download(repo, file, revision=None):
            calls.append((repo, file, revision))
            return str(snapshot / file)

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        info = describe("owner/name@v2")
        assert calls == [("owner/name", "config.json", "v2")]
        assert info.revision == "abc123"


class TestExtendedModels:
    RESCALED: ClassVar = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

    def test_second_extension_needs_a_word(self, tmp_path):
        family_config("llama", self.RESCALED, max_position_embeddings=128).save_pretrained(tmp_path)
        info = describe(tmp_path)
        assert info.rope.original_length == 32
        with pytest.raises(ModelError, match="already rescaled by 'yarn' from 32 to 128"):
            rescale_model(info, "ntk", 256)
        factors = rescale_model(info, "ntk", 256, extend_again=True)
        assert factors.short == info.reading.rescaled.factors
        assert factors.short_attention_factor > 1

    def test_factors_that_replace_a_rescaling_are_told_of(self, tmp_path, capsys):
        """Whatever runs with them: train, evaluate, generate, calibrate."""
        for rope, name, told in ((None, "base", False), (self.RESCALED, "extended", True)):
            length = 128 if rope else 32
            family_config("llama", rope, max_position_embeddings=length).save_pretrained(tmp_path / name)
            info = describe(tmp_path / name)
            check_factors(rescale("ntk", info.rope, 256), info)
            warning = f"{info.name} is already rescaled by 'yarn' from 32 to 128 tokens: these factors take its place"
            assert (f"warning: {warning}" in capsys.readouterr().err) is told


class TestGGUF:
    @pytest.mark.parametrize(
        ("family", "options", "quantisation"),
        [
            ("llama", {}, "F32"),
            ("llama", {"tie_word_embeddings": True}, "F16"),
            ("llama", {}, "Q8_0"),
            ("llama", {"tie_word_embeddings": True}, "Q4_1"),
            ("qwen2", {}, "F32"),
            ("qwen3", {"tie_word_embeddings": True}, "F32"),
            ("phi3", {"pad_token_id": None}, "F32"),
            ("gemma3_text", {"num_hidden_layers": 7, "query_pre_attn_scalar": 32, "sliding_window": 9}, "F32"),
        ],
    )
    def test_same_logits_as_the_model_and_in_transformers(
        self, tmp_path, tokenizer_folder, family, options, quantisation
    ):
        model = family_model(family, vocab_size=320, **options)
        path = write_gguf(tmp_path / "m.gguf", model, tokenizer_folder, quantisation=quantisation)
        loaded, models = load(path), [model] if quantisation == "F32" else []
        if family in (
            "llama",
            "qwen2",
        ):  # of the others transformers loses the size of heads, their part or their scale
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
            models.append(theirs.eval())
        tokens = torch.randint(2, 320, (2, 48), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for each in models:
                torch.testing.assert_close(loaded.model(tokens).logits, each(tokens).logits, rtol=1e-5, atol=1e-5)
        assert loaded.info.reading.family == family

    def test_every_type_that_the_package_dequantises(self, tmp_path, tokenizer_folder):
        """One file with a tensor of each, as K-quants mix them, against transformers' own reader."""
        model = gguf_model(
            hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16
        )
        matrices = [name for name, weight in model.named_parameters() if weight.ndim > 1]
        types = dict(zip(matrices, gguf.quants._type_traits, strict=False))
        assert len(types) == len(gguf.quants._type_traits) > 20
        path = write_gguf(tmp_path / "m.gguf", model, tokenizer_folder, types=types)
        ours, tensors = load(path).model.state_dict(), gguf.GGUFReader(path).tensors
        assert {tensor.tensor_type for tensor in tensors} >= set(types.values())
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
        for name in types:
            assert ours[name].std() > 0
            assert torch.equal(ours[name], theirs[name]), types[name].name

    def test_a_type_that_the_package_cannot_dequantise(self, tmp_path, tokenizer_folder):
        types = {"model.layers.0.mlp.up_proj.weight": gguf.GGMLQuantizationType.Q8_K}
        path = write_gguf(tmp_path / "m.gguf", gguf_model(hidden_size=256), tokenizer_folder, types=types)
        with pytest.raises(
            ModelError, match=r"'blk\.0\.ffn_up\.weight' has the type Q8_K, which the gguf package"
        ) as raised:
            load(path)
        assert "another quantisation" in raised.value.hint

    def test_tokenizer_splits_as_the_file_says(self, tmp_path, tokenizer_folder):
        from transformers import AutoTokenizer

        path = write_gguf(tmp_path / "m.gguf", gguf_model(), tokenizer_folder)
        ours, source = GGUFModel(path).tokenizer(), AutoTokenizer.from_pretrained(tokenizer_folder)
        text = "the dog ran 1234567 times,\n  it's 98%"
        assert ours(text).input_ids == source(text).input_ids
        assert ours.decode(ours(text).input_ids) == text

    def test_a_file_is_parsed_once_until_it_changes(self, tmp_path, tokenizer_folder, monkeypatch):
        path = write_gguf(tmp_path / "m.gguf", gguf_model(), tokenizer_folder)
        info = describe(path)
        load_tokenizer(info).chat_template = "changed by one, which the next must not see"
        with monkeypatch.context() as patch:
            patch.setattr(gguf, "GGUFReader", None)
            assert describe(path) == info
            assert load_tokenizer(info).chat_template is None
        write_gguf(path, gguf_model(num_hidden_layers=1), tokenizer_folder)
        assert describe(path).revision != info.revision

    def test_extended_files_are_recognised(self, tmp_path, tokenizer_folder):
        rope = [
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            lambda w: w.add_rope_scaling_orig_ctx_len(16),
            lambda w: w.add_rope_scaling_attn_factors(1.25),
        ]
        factors = {"rope_factors_long.weight": [2.0] * 8, "rope_factors_short.weight": [1.5] * 8}
        path = write_gguf(tmp_path / "l.gguf", gguf_model(), tokenizer_folder, rope=rope, extra=factors)
        reading = describe(path).reading
        assert reading.rescaled.method == "longrope"
        assert reading.rescaled.factors == (1.5,) * 8
        assert reading.rescaled.attention_factor == 1.25
        assert reading.rope.original_length == 16
        assert load(path).model.config.rope_parameters["long_factor"] == [2.0] * 8

        path = write_gguf(tmp_path / "f.gguf", gguf_model(), tokenizer_folder, extra={"rope_freqs.weight": [3.0] * 8})
        assert describe(path).reading.rescaled.factors == (3.0,) * 8
        rope = [
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            lambda w: w.add_rope_scaling_factor(2.0),
        ]
        path = write_gguf(tmp_path / "s.gguf", gguf_model(), tokenizer_folder, rope=rope)
        assert describe(path).reading.rescaled.factors == (2.0,) * 8

    def test_refusals(self, tmp_path, tokenizer_folder):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF but not really")
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            describe(broken)
        for name in ("starcoder2", "step35"):
            other = write_gguf(tmp_path / "o.gguf", gguf_model(), tokenizer_folder, architecture=name)
            with pytest.raises(ModelError, match=f"architecture '{name}' is not supported, only llama, qwen2, qwen3"):
                describe(other)
        gate = write_gguf(tmp_path / "b.gguf", gguf_model(), tokenizer_folder, extra={"blk.0.attn_gate.weight": [0.0]})
        with pytest.raises(ModelError, match=r"b\.gguf: tensors not known for 'llama': blk\.0\.attn_gate\.weight"):
            load(gate)
        bias = write_gguf(tmp_path / "b.gguf", gguf_model(), tokenizer_folder, extra={"blk.0.attn_q.bias": [0.0] * 64})
        with pytest.raises(ModelError, match=r"b\.gguf: tensors missing"):
            load(bias)

    def test_missing_package_names_the_extra(self, monkeypatch, tmp_path):
        (tmp_path / "m.gguf").touch()
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'longrope2\[export\]'"):
            describe(tmp_path / "m.gguf")
