"""Ask one engine for log-probabilities: python probe.py FUNCTION JOB.json ANSWERS.json.

A job names a model, the window to start the engine with, and prompts as token ids with the number of tokens to
generate greedily after each. An answer holds those tokens and, for each of them, the engine's most probable choices.
Runs in any environment that has the engine, in float32 on whatever device there is.
"""

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = 64
KEPT: list[Any] = []
"""Servers of xllamacpp: a deleted one may wait for its own threads for ever."""


def main(function: str, job_file: str, answers_file: str) -> None:
    """Answer the questions of a job."""
    job, failed = json.loads(Path(job_file).read_text()), False
    try:
        Path(answers_file).write_text(json.dumps(globals()[function](job)))
    except BaseException:
        failed = True
        traceback.print_exc()
    if KEPT or failed:
        sys.stderr.flush()
        os._exit(failed)  # without deleting them


def _questions(job: dict[str, Any]) -> Iterator[tuple[list[int], int]]:
    """Prompts with the number of tokens to generate; notes how many are answered, for the process that waits."""
    for number, question in enumerate(zip(job["prompts"], job["new_tokens"], strict=True)):
        if "progress" in job:
            Path(job["progress"]).write_text(str(number))
        yield question


def ask_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """Plain `generate`, one prompt at a time."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job["path"], dtype=torch.float32)
    model.to(device).eval()
    answers = []
    for prompt, count in _questions(job):
        tokens = torch.tensor([prompt], device=device)
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tops = [step[0].float().log_softmax(-1).topk(min(TOP, step.shape[-1])) for step in output.logits]
        choices = [dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
        answers.append({"tokens": output.sequences[0, len(prompt) :].tolist(), "logprobs": choices})
    return {"version": f"transformers {transformers.__version__}", "answers": answers}


def ask_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """The engine as `vllm serve` starts it, with max_model_len as given; all prompts in one batch where it switches."""
    import vllm

    together = job["switches"]
    engine = vllm.LLM(
        model=job["path"],
        dtype="float32",
        max_model_len=job["capacity"],
        max_num_seqs=len(job["prompts"]) if together else 1,
        kv_cache_memory_bytes=job["cache_bytes"],
        max_logprobs=TOP,
        enforce_eager=True,
        enable_prefix_caching=together,
        skip_tokenizer_init=True,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    options = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, logprobs=TOP, ignore_eos=True, detokenize=False)
        for count in job["new_tokens"]
    ]
    answers = []
    for output in (answer.outputs[0] for answer in engine.generate(prompts, options)):
        choices = [{token: choice.logprob for token, choice in step.items()} for step in output.logprobs]
        answers.append({"tokens": list(output.token_ids), "logprobs": choices})
    # What the plugin, if there is one, has noted in the engine's configuration.
    noted = engine.llm_engine.vllm_config.additional_config.get("longrope2.switch")
    version = f"vllm {vllm.__version__}" + (f" with longrope2 {noted['version']}" if noted else "")
    return {"version": version, "answers": answers, "switch_length": noted and noted["switch_length"]}


def ask_mlx(job: dict[str, Any]) -> dict[str, Any]:
    """The model class of mlx-lm, called on the whole sequence for every new token."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(job["path"]))
    model.set_dtype(mx.float32)
    answers = []
    for prompt, count in _questions(job):
        tokens: list[int] = []
        choices: list[dict[int, float]] = []
        for _ in range(count):
            logits = model(mx.array([prompt + tokens]))[0, -1].astype(mx.float32).tolist()
            choices.append(_log_softmax(logits))
            tokens.append(max(choices[-1], key=choices[-1].__getitem__))
        answers.append({"tokens": tokens, "logprobs": choices})
    return {"version": f"mlx-lm {mlx_lm.__version__}", "answers": answers}


def ask_llama_cpp(job: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp by way of xllamacpp, or of llama-cpp-python; one token each, since it never switches by itself."""
    try:
        import xllamacpp  # noqa: F401
    except ModuleNotFoundError:
        return _ask_llama_cpp_python(job)
    return _ask_xllamacpp(job)


def _ask_xllamacpp(job: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = job["path"]
    options.n_ctx = options.n_batch = job["capacity"]
    options.n_parallel = 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = job["threads"]
    options.warmup = options.fit_params = options.ctx_shift = False
    options.cache_ram_mib = 0
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.yarn_attn_factor = job["temperature_ratio"]
    server = xllamacpp.Server(options)
    KEPT.append(server)
    answers = []
    for prompt, _ in _questions(job):
        request = {
            "prompt": prompt,
            "n_predict": 1,
            "n_probs": TOP,
            # A token that is half a letter would be kept back, with its probabilities; these are read before biases.
            "logit_bias": [["a", 1000.0]],
            "cache_prompt": False,
        }
        reply = server.handle_completions(request)
        if "choices" not in reply:
            raise RuntimeError(str(reply))
        step = reply["choices"][0]["logprobs"]["content"][0]
        choices = {choice["id"]: choice["logprob"] for choice in step["top_logprobs"]}
        answers.append({"tokens": [step["id"]], "logprobs": [choices]})
    return {"version": f"llama.cpp (xllamacpp {xllamacpp.__version__})", "answers": answers}


def _ask_llama_cpp_python(job: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp

    model = llama_cpp.Llama(
        job["path"],
        n_ctx=job["capacity"],
        n_batch=job["capacity"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        yarn_attn_factor=job["temperature_ratio"],
        verbose=False,
    )
    answers = []
    for prompt, _ in _questions(job):
        model.reset()
        model.eval(prompt)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        choices = _log_softmax([logits[i] for i in range(model.n_vocab())])
        answers.append({"tokens": [max(choices, key=choices.__getitem__)], "logprobs": [choices]})
    return {"version": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})", "answers": answers}


def _log_softmax(logits: list[float]) -> dict[int, float]:
    """The most probable tokens with their log-probabilities."""
    highest = max(logits)
    total = highest + math.log(sum(math.exp(value - highest) for value in logits))
    best = sorted(range(len(logits)), key=lambda token: -logits[token])[:TOP]
    return {token: logits[token] - total for token in best}


if __name__ == "__main__":
    main(*sys.argv[1:])
