"""The switch in vLLM's own schedulers, with a model without numbers: thousands of requests in seconds."""

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

import torch
from serving_samples import BLOCK, ORIGINAL, WINDOW, allow_async, export_family
from symbolic import VOCABULARY, SymbolicModel, expected, serve
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    init_none_hash(sha256)
    return export_family(tmp_path_factory.mktemp("model"))


def scheduler_of(folder, *, blocks, asynchronous, **options):
    """vLLM's scheduler as an engine would make it, without an engine."""
    with allow_async():
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, max_model_len=WINDOW, max_num_seqs=8, block_size=BLOCK,
            max_num_batched_tokens=48, async_scheduling=asynchronous, dtype="float32", **options,
        )  # fmt: skip
        config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    kind = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], kind)])
    manager = StructuredOutputManager(config)
    return config.scheduler_config.get_scheduler_cls()(config, caches, manager, block_size=BLOCK)


class Engine:
    """A scheduler, the model, and what has become of each request."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.model = SymbolicModel(scheduler=scheduler, block_size=BLOCK)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.delivered: dict[str, list[int]] = {}
        self.wanted: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def request(self, name, prompt, new, stop=None, **options):
        parameters = SamplingParams(max_tokens=new, stop_token_ids=None if stop is None else [stop], ignore_eos=True)
        self.wanted[name] = expected(prompt, new_tokens=new, stop=stop, switch_length=ORIGINAL)
        self.delivered[name] = []
        return Request(name, prompt, parameters, None, block_hasher=self.hasher, **options)

    def deliver(self, output, tokens):
        ids = list(tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=[tokens[request] for request in ids],
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.delivered[one.request_id] += one.new_token_ids

    def abort(self, name):
        self.aborted.add(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def random_requests(engine, draw, count, **options):
    shared = [draw.randrange(VOCABULARY) for _ in range(WINDOW)]
    for number in range(count):
        around = [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL]
        length = draw.choice([1, 10, *around, draw.randrange(1, 3 * ORIGINAL), draw.randrange(1, WINDOW - 60)])
        begin = draw.choice([0, length, length, length // 2])
        prompt = shared[:begin] + [draw.randrange(VOCABULARY) for _ in range(length - begin)]
        room = ORIGINAL - length
        new = draw.choice([1, 5, 40, *(max(1, room + more) for more in (0, 1, 2, 20))])
        stop = draw.choice([None, None, draw.randrange(VOCABULARY)])
        priority = {"priority": draw.randrange(3)} if options.get("priority") else {}
        yield engine.request(str(number), prompt, min(new, WINDOW - length), stop, **priority)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("blocks", [21, 60])  # one request of the full window needs 16, and one is never used
@pytest.mark.parametrize(("asynchronous", "in_flight"), [(False, 1), (False, 2), (True, 2), (True, 3)])
@pytest.mark.parametrize(("policy", "runner"), [("fcfs", "0"), ("fcfs", "1"), ("priority", "0")])
def test_every_answer_is_the_one_defined(folder, policy, runner, asynchronous, in_flight, blocks, seed, monkeypatch):
    """300 requests: aborts, a cache that is cleared while they run, no room for all of them.

    Several steps of a synchronous scheduler are in flight where the model is a pipeline.
    """
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # which only the runner itself would need
    scheduler = scheduler_of(folder, blocks=blocks, asynchronous=asynchronous, scheduling_policy=policy)
    engine, draw = Engine(scheduler), random.Random(seed)
    requests = list(random_requests(engine, draw, 300, priority=policy == "priority"))

    def disturb():
        if draw.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if draw.random() < 0.02 and scheduler.requests:
            engine.abort(draw.choice(sorted(scheduler.requests)))

    serve(scheduler, requests, engine.model, engine.deliver, draw=draw, in_flight=in_flight, disturb=disturb)
    assert len(engine.aborted) > 5
    preemptions = sum(request.num_preemptions for request in requests)
    assert preemptions > 60
    for name, wanted in engine.wanted.items():
        found = engine.delivered[name]
        assert found == (wanted[: len(found)] if name in engine.aborted else wanted), name


def crossing(engine, count=40):
    """Lone requests and sharing ones, all of which cross."""
    prompt = list(range(ORIGINAL - 3))
    return [engine.request(str(number), [*prompt, number % 3], 20) for number in range(count)]


def test_control_without_the_salt(folder, monkeypatch):
    scheduler = scheduler_of(folder, blocks=60, asynchronous=False)
    monkeypatch.setattr(scheduler, "_long_salt", "")
    engine = Engine(scheduler)
    with pytest.raises(AssertionError, match="reads what is not its own"):
        serve(scheduler, crossing(engine), engine.model, engine.deliver, draw=random.Random(0))


def test_control_plain_vllm(folder):
    """Without the plugin there are no sides; were they those of the prompts, crossing requests would be wrong."""
    off = {"longrope2": {"switch": False}}
    scheduler = scheduler_of(folder, blocks=60, asynchronous=False, additional_config=off)
    assert type(scheduler).__module__.startswith("vllm.")
    schedule = scheduler.schedule

    def with_sides():
        output = schedule()
        output.longrope2_long_requests = {
            name for name in output.num_scheduled_tokens if scheduler.requests[name].num_prompt_tokens > ORIGINAL
        }
        return output

    scheduler.schedule = with_sides
    engine = Engine(scheduler)
    serve(scheduler, crossing(engine), engine.model, engine.deliver, draw=random.Random(0))
    assert all(engine.delivered[name] != wanted for name, wanted in engine.wanted.items())


def test_a_request_that_crosses_finds_the_long_blocks_of_another(folder):
    """Computed again, it takes from the cache what another long request has left there."""
    scheduler = scheduler_of(folder, blocks=60, asynchronous=False)
    engine = Engine(scheduler)
    schedule, computed = scheduler.schedule, []

    def counting():
        output = schedule()
        computed[-1] += sum(output.num_scheduled_tokens.values())
        return output

    scheduler.schedule = counting
    for name in ("first", "second"):
        computed.append(0)
        request = engine.request(name, list(range(ORIGINAL - 3)), 20)
        serve(scheduler, [request], engine.model, engine.deliver, draw=random.Random(0))
        assert request.num_preemptions == 1
    assert engine.delivered == engine.wanted
    # The second finds a block on the short side, too.
    assert computed[0] - computed[1] == BLOCK + ORIGINAL
