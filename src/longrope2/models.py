"""A path, hub id or GGUF file becomes a description of its RoPE, and, when asked, a live model."""

import hashlib
import json
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from longrope2.console import warn
from longrope2.distributed import is_main_process
from longrope2.errors import LONGEST_REASON, ModelError, first_line
from longrope2.factors import RescaleFactors
from longrope2.families import (
    OTHER_MODEL,
    RopeReading,
    accept_mscales,
    check_plausible,
    config_errors,
    head_dim,
    read_config,
)
from longrope2.files import checksum, file_digest, package_versions, read_json
from longrope2.gguf_model import open_gguf
from longrope2.methods import rescale
from longrope2.records import Manifest
from longrope2.rope import RopeSpec

if TYPE_CHECKING:
    import torch

ASSETS = Path(__file__).parent / "assets"
TINY = "tiny"
MANIFEST = "manifest.json"
WEIGHTS_REFUSED = "its weights cannot be loaded"
WEIGHTS_AGAIN = "the files may be cut short, or not belong to this config.json; copy or download them again"
HUB_TIMEOUT = 10.0
"""Seconds."""
HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is known of a model from its configuration alone."""

    name: str
    """As the user named it."""
    location: str
    """A local folder or file, or the hub id."""
    revision: str
    """What identifies this configuration: the hub's commit, or a hash of the config."""
    reading: RopeReading
    model_type: str
    """As in config.json; not the family's where a language model is a part of something larger."""
    quantisation: str | None
    """How its weights were quantised (gptq, awq, fp8, …), if they were; GGUF files are not counted."""

    @property
    def rope(self) -> RopeSpec:
        """The RoPE of pretraining."""
        return self.reading.rope

    @property
    def is_gguf(self) -> bool:
        """Whether the model is one GGUF file rather than a folder."""
        return self.location.endswith(".gguf")

    @property
    def rescaling(self) -> str | None:
        """That and how it was extended before, in words; None for an original model."""
        rescaled = self.reading.rescaled
        if rescaled is None:
            return None
        return (
            f"{self.name} is already rescaled by '{rescaled.method}' "
            f"from {self.rope.original_length:,} to {self.reading.window:,} tokens"
        )

    def refuse_rescaled(self, *, extend_again: bool) -> None:
        """Raise ModelError for a model that was extended before, unless the user asked for that."""
        if self.rescaling is not None and not extend_again:
            raise ModelError(
                self.rescaling,
                hint="extend the base model instead, or use --extend-again to replace that rescaling",
            )

    def refuse_weights(self) -> None:
        """Raise ModelError unless its weights are those of a language model and nothing else, as plain numbers."""
        if self.model_type != self.reading.family:
            raise ModelError(
                f"{self.name}: a '{self.model_type}' model has more parts than its language model",
                hint="save its language model alone (docs/models.md shows how), and give that folder",
            )
        if self.quantisation is not None:
            raise ModelError(
                f"{self.name}: its weights are quantised ({self.quantisation})",
                hint="take the model in bfloat16 or float16, extend that, and quantise the result",
            )


def rescale_model(
    info: ModelInfo, method: str, target_length: int, *, extend_again: bool = False, **options: Any
) -> RescaleFactors:
    """Factors of a closed-form method for a model; within its window the model stays as it is now."""
    info.refuse_rescaled(extend_again=extend_again)
    rescaled = info.reading.rescaled
    return rescale(
        method,
        info.rope,
        target_length,
        short=rescaled.factors if rescaled else None,
        short_attention_factor=rescaled.attention_factor if rescaled else 1.0,
        provenance={"model": info.name, "revision": info.revision, "versions": package_versions()},
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A live model with its tokenizer and description."""

    model: Any
    tokenizer: Any
    info: ModelInfo


def describe(name: str | Path, *, original_length: int | None = None) -> ModelInfo:
    """Read a model's configuration: a folder, a .gguf file, a hub id (owner/name[@revision]), or `tiny`.

    `original_length` is the trained window if the config does not state it, or states it wrongly.
    """
    accept_mscales()
    location, config, revision = raw_config(name)
    return ModelInfo(
        name=str(name),
        location=location,
        revision=revision,
        reading=read_config(config, original_length=original_length),
        model_type=config["model_type"],
        quantisation=_quantisation(config),
    )


def raw_config(name: str | Path) -> tuple[str, dict[str, Any], str]:
    """Where a model of that name is, its config.json as it stands there, and what identifies that."""
    name = str(name)
    # A folder of that name only where it is a model: recipes/tiny, for one, is none.
    if name == TINY and not (Path(name) / "config.json").exists():
        location: Path | str = ASSETS / TINY
    elif Path(name).exists() or not HUB_ID.fullmatch(name):
        location = Path(name)
    else:
        location = name
    return str(location), *(_local_config(location) if isinstance(location, Path) else _hub_config(name))


def check_factors(factors: RescaleFactors, info: ModelInfo) -> None:
    """Raise FactorsError for factors of another RoPE; warn of another model's, and where they replace a rescaling."""
    factors.check_fits(info.rope, info.name)
    if not is_main_process():
        return
    other = factors.made_for_another(info.name, info.revision)
    if other is not None:
        warn(f"these factors were made for {other}, which has the same RoPE; {info.name} is another model")
    if info.rescaling is not None:
        warn(f"{info.rescaling}: these factors take its place")


def load(
    name: str | Path | ModelInfo,
    *,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str | None" = None,
    tensor_parallel: int = 1,
) -> LoadedModel:
    """Load weights (safetensors or GGUF) and tokenizer; never pickle, never code of the repository.

    The dtype defaults to bfloat16 on CUDA and float32 elsewhere, where bfloat16 is slower.
    """
    import torch

    info = name if isinstance(name, ModelInfo) else describe(name)
    info.refuse_weights()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if info.is_gguf:
        if tensor_parallel > 1:
            raise ModelError("a GGUF file cannot be spread over several GPUs", hint="save it as a folder first")
        file = open_gguf(Path(info.location))
        model, tokenizer = file.model(dtype=dtype), file.tokenizer()
    else:
        if Path(info.location).is_dir() and is_main_process():
            check_manifest(Path(info.location))
        model, tokenizer = _load_weights(info, dtype, tensor_parallel), load_tokenizer(info)
        _check_vocabulary(info, tokenizer, model.config.vocab_size)
    if tensor_parallel == 1:
        model = model.to(device)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, info=info)


def load_tokenizer(info: ModelInfo) -> Any:
    """The tokenizer of a model, without its weights."""
    if info.is_gguf:
        return open_gguf(Path(info.location)).tokenizer()
    from transformers import AutoTokenizer

    source, options = pretrained_source(info)
    _refuse_config_alone(Path(source))
    hint = "tokenizer.json and tokenizer_config.json belong beside config.json; copy them from the base model"
    with config_errors(info.name, "its tokenizer cannot be loaded", hint=hint):
        return AutoTokenizer.from_pretrained(source, **options)


def pretrained_source(info: ModelInfo) -> tuple[str, dict[str, Any]]:
    """The source and options of from_pretrained: never code of the repository, the hub only for a hub id."""
    is_local = Path(info.location).is_dir()
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": is_local}
    match = None if is_local else HUB_ID.fullmatch(info.location)
    if match is None:
        return info.location, options
    if match["revision"]:
        options["revision"] = match["revision"]
    return match["repo"], options


def skeleton(info: ModelInfo) -> Any:
    """The model on the meta device: every parameter has its name and shape, and none takes memory."""
    from transformers import AutoConfig

    info.refuse_weights()
    with config_errors(info.name):
        if info.is_gguf:
            values = open_gguf(Path(info.location)).config()
            return empty_model(AutoConfig.for_model(values.pop("model_type"), **values))
        source, options = pretrained_source(info)
        return empty_model(AutoConfig.from_pretrained(source, **options))


def empty_model(config: Any) -> Any:
    """The model of a transformers config on the meta device."""
    import torch

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # initialising what has no values
        return causal_lm(config)._from_config(config, dtype=torch.float32)


def causal_lm(config: Any) -> Any:
    """The class of a language model by its transformers config; a few are listed only among other classes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING

    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    other: Any = MODEL_FOR_PRETRAINING_MAPPING.get(kind, None)
    if other is None or not other.__name__.endswith("ForCausalLM"):
        raise ModelError(f"transformers has no language model class for '{config.model_type}'", hint=OTHER_MODEL)
    return other


def body(model: Any) -> Any:
    """A live model without its head; a few families call it otherwise than their class says."""
    return model.model if model.base_model is model else model.base_model


def decoder_layers(model: Any) -> list[Any]:
    """The layers of a live model; a few families have another name for them than `layers`."""
    if layers := getattr(body(model), "layers", None):
        return list(layers)
    lists = (list(module) for module in model.modules() if type(module).__name__ == "ModuleList")
    return max(lists, key=len)


def num_kv_heads(config: Any) -> int:
    """The heads that keys and values have by a transformers config."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def cached_values(config: Any) -> int:
    """How many numbers a key-value cache keeps for each token."""
    return 2 * config.num_hidden_layers * num_kv_heads(config) * head_dim(config)


def weights_fingerprint(info: ModelInfo) -> str:
    """What identifies a set of weights, wherever it lies: a hash of every byte, or the revision on the hub."""
    location = Path(info.location)
    if not location.exists():
        return info.revision
    files = [location] if location.is_file() else sorted(location.glob("*.safetensors"))
    for file in files:
        _open(file).close()  # or refuse it by its name
    return checksum([[file.name if len(files) > 1 else "", file_digest(file)] for file in files])


def write_manifest(folder: Path) -> None:
    """Note the digest of every file of a model that is about to be finished; its card is for people to change."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, "README.md"))
    Manifest(files={path.relative_to(folder).as_posix(): file_digest(path) for path in files}).save(folder / MANIFEST)


def check_manifest(folder: Path) -> None:
    """Refuse a model whose files are not those that were written, if a manifest says which these were."""
    hint = f"copy the folder again, or make it again; if you changed it on purpose, delete its {MANIFEST}"
    try:
        files = Manifest.load(folder / MANIFEST, hint=hint).files
    except FileNotFoundError:
        return
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path}: missing since this model was written", hint=hint)
        if file_digest(path) != digest:
            raise ModelError(f"{path}: changed since this model was written", hint=hint)


def _load_weights(info: ModelInfo, dtype: "torch.dtype", tensor_parallel: int) -> Any:
    source, options = pretrained_source(info)
    placement: dict[str, Any] = {}
    if tensor_parallel > 1:
        import torch.distributed as dist
        from transformers.distributed.configuration_utils import DistributedConfig

        if dist.get_world_size() != tensor_parallel:
            raise ModelError(
                f"transformers spreads a model over all {dist.get_world_size()} processes, not over {tensor_parallel}",
                hint=f"start with --nproc-per-node {tensor_parallel}",
            )
        placement = {"distributed_config": DistributedConfig(tp_size=tensor_parallel)}
    return load_folder(info.name, source, dtype=dtype, **placement, **options)


def load_folder(name: str, source: str | Path, *, config: Any = None, **options: Any) -> Any:
    """A model from safetensors; `source` and options are from_pretrained's.

    Refuses one whose weights are not all there, which transformers would fill with random numbers.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a bar in a log file is noise
    with config_errors(name):
        config = config or AutoConfig.from_pretrained(source, **options)
        kind = causal_lm(config)
        if options["local_files_only"]:
            _require_safetensors(name, Path(source), empty_model(config).num_parameters())
    with config_errors(name, WEIGHTS_REFUSED, hint=WEIGHTS_AGAIN):
        loaded: Any = kind.from_pretrained(
            source, config=config, use_safetensors=True, output_loading_info=True, **options
        )
    model, report = loaded
    check_plausible(model.generation_config.to_dict(), f"{name}: generation_config.json is not usable")
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{name}: its weights lack {missing[0]}{more}",
            hint="this is not a whole language model, or config.json is another one's (tie_word_embeddings, layers)",
        )
    return model


def _check_vocabulary(info: ModelInfo, tokenizer: Any, vocab_size: int) -> None:
    # Without tokens that were added to a tokenizer: text models of larger ones (Gemma 3) have no rows for some.
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"{info.name}: its tokenizer has {tokenizer.vocab_size:,} tokens, the model only {vocab_size:,}",
            hint="tokenizer.json is another model's; copy the right one beside config.json",
        )


def _local_config(path: Path) -> tuple[dict[str, Any], str]:
    if path.suffix == ".gguf" and path.is_file():
        config = open_gguf(path).config()
        return config, _digest(json.dumps(config, sort_keys=True).encode())
    file = path / "config.json"
    if not file.is_file():
        if not path.exists():
            raise ModelError(
                f"{path}: no such folder or file, and not a hub id (owner/name)",
                hint="give a folder with config.json, a .gguf file, a hub id, or 'tiny'",
            )
        if path.is_file():
            raise ModelError(
                f"{path}: a file, and not a .gguf one",
                hint="give a folder with config.json, a .gguf file, a hub id, or 'tiny'",
            )
        if (path / "adapter_config.json").is_file():
            raise ModelError(
                f"{path}: an adapter alone, without the model it was trained for",
                hint="merge it into that model (merge_and_unload of peft), save it, and give that folder",
            )
        raise ModelError(
            f"{path}: no config.json there",
            hint="give the folder that holds config.json and the safetensors files, or a .gguf file",
        )
    return json_object(file), _digest(file.read_bytes())


def _hub_config(name: str) -> tuple[dict[str, Any], str]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    match = HUB_ID.fullmatch(name)
    assert match is not None
    try:
        _reach_hub(name, match["repo"], match["revision"])
        file = Path(hf_hub_download(match["repo"], "config.json", revision=match["revision"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{name}: no such folder, and the hub does not have it ({first_line(error)})",
            hint="check the spelling and the network; gated models need `hf auth login`",
        ) from error
    # The hub's cache keeps files under snapshots/<commit>/.
    return json_object(file), file.parent.name


def _reach_hub(name: str, repo: str, revision: str | None) -> None:
    """Ask for config.json once, unless the cache has it: a download tries for half a minute to reach the hub."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(try_to_load_from_cache(repo, "config.json", revision=revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(repo, "config.json", revision=revision), timeout=HUB_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:  # of whatever package the hub's client uses
        raise ModelError(
            f"{name}: no such folder, and the hub cannot be reached ({first_line(error)})",
            hint="check the network, or give a folder with config.json, a .gguf file, or 'tiny'",
        ) from error


def json_object(file: Path, *, hint: str = "copy or download it again") -> dict[str, Any]:
    """A JSON file of a model's folder, such as config.json."""
    try:
        content = read_json(file, lenient=True)
        json.dumps(content, allow_nan=False)  # for an export, which writes it again
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})", hint=hint) from error
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error})", hint=hint) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(content).__name__}", hint=hint)
    return content


def _quantisation(config: dict[str, Any]) -> str | None:
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    method = found.get("quant_method", "compressed") if isinstance(found, dict) else found
    return str(method)[:LONGEST_REASON]


def _open(file: Path) -> BinaryIO:
    """Weights to read; safetensors says of a file without permission that there is none."""
    try:
        return file.open("rb")
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})", hint="check its permissions") from error


def _require_safetensors(name: str, folder: Path, wanted: int) -> None:
    """Refuse a folder without weights that can be read, or with far fewer than `wanted`, those of its config.json.

    transformers would make room for all of those before it finds out.
    """
    if files := list(folder.glob("*.safetensors")):
        for file in files:
            _open(file).close()
        found = sum(file.stat().st_size for file in files)
        if wanted > found:  # of no dtype that is read here a weight takes less than two bytes
            reason = f"config.json describes {wanted:,}, the files have {found:,} bytes"
            raise ModelError(f"{name}: {WEIGHTS_REFUSED} ({reason})", hint=WEIGHTS_AGAIN)
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder}: only pickled weights (.bin, .pt), which can run code when loaded",
            hint="convert them to safetensors with a tool you trust, in an environment you trust",
        )
    _refuse_config_alone(folder)
    raise ModelError(
        f"{folder}: no *.safetensors weights there", hint="copy or download them into the folder of config.json"
    )


def _refuse_config_alone(folder: Path) -> None:
    """Report a folder with a config and nothing else, whichever of a model's files is looked for first."""
    if folder.is_dir() and {file.name for file in folder.iterdir()} <= {"config.json", "generation_config.json"}:
        raise ModelError(
            f"{folder}: only a config.json, without weights and tokenizer",
            hint="copy or download the model's other files into that folder: *.safetensors, tokenizer.json, …",
        )


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()[:16]
