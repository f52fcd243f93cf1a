"""The workers' part of the switch, before workers and model runners of the shape of vLLM's."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longrope2.errors import LongRopeError
from longrope2.serving.running import SwitchingWorker, TokenOffsets
from longrope2.serving.scheduling import LONG_REQUESTS
from longrope2.serving.settings import RESOLVED, SwitchSettings

SETTINGS = SwitchSettings(switch_length=100, original_length=64)


def step(counts, long=()):
    output = SimpleNamespace(num_scheduled_tokens=counts)
    setattr(output, LONG_REQUESTS, set(long))
    return output


class RunnerV1:
    def __init__(self):
        self.input_batch = SimpleNamespace(req_ids=[])

    def get_model(self):
        return "model"

    def _preprocess(self, scheduler_output, num_input_tokens, intermediate_tensors=None):
        return num_input_tokens

    def execute_model(self, scheduler_output):
        self.input_batch.req_ids = sorted(scheduler_output.num_scheduled_tokens)  # as when a batch is reordered
        return self._preprocess(scheduler_output, 16)


class RunnerV2(RunnerV1):
    def __init__(self):
        self.model_state = SimpleNamespace(prepare_inputs=self.prepare_inputs)

    @staticmethod
    def prepare_inputs(input_batch, req_states):
        return len(input_batch.req_ids)

    def execute_model(self, scheduler_output):
        ids = sorted(scheduler_output.num_scheduled_tokens)
        counts = np.array([scheduler_output.num_scheduled_tokens[request] for request in ids])
        return self.model_state.prepare_inputs(SimpleNamespace(req_ids=ids, num_scheduled_tokens=counts), None)


class Worker:
    def __init__(self, runner):
        self.device, self.model_runner = torch.device("cpu"), runner
        self.vllm_config = SimpleNamespace(
            additional_config={RESOLVED: SETTINGS.to_json()},
            scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
            use_v2_model_runner=isinstance(runner, RunnerV2),
        )

    def load_model(self, *, load_dummy_weights=False):
        self.loaded = True

    def compile_or_warm_up_model(self):
        return "times"

    def execute_model(self, scheduler_output):
        return self.model_runner.execute_model(scheduler_output)


class Switching(SwitchingWorker, Worker):
    pass


@pytest.fixture(params=[RunnerV1, RunnerV2])
def worker(request, monkeypatch):
    checked = []
    layer = SimpleNamespace(
        switching_layers=lambda offsets: nullcontext(), check_layers=lambda *given: checked.append(given)
    )
    monkeypatch.setitem(sys.modules, "longrope2.serving.vllm_layer", layer)
    worker = Switching(request.param())
    worker.load_model(load_dummy_weights=False)
    assert worker.loaded
    assert checked == [("model", worker._offsets)]
    return worker


def test_tokens_of_long_requests_read_the_long_rows(worker):
    buffer = worker._offsets.buffer
    assert worker.execute_model(step({"b": 3, "a": 2, "c": 1}, {"b"})) in (3, 16)
    assert buffer.tolist()[:6] == [0, 0, 100, 100, 100, 0]
    worker.execute_model(step({"a": 1, "c": 2}, {"a", "c"}))
    assert buffer.tolist()[:3] == [100] * 3
    worker.execute_model(step({"a": 16}))
    assert buffer.tolist() == [0] * 16


def test_a_step_that_lost_its_sides_is_an_error(worker):
    strange = SimpleNamespace(num_scheduled_tokens={"warm-up": 4})
    worker.execute_model(strange)  # vLLM warms up with steps of its own
    assert worker.compile_or_warm_up_model() == "times"
    with pytest.raises(RuntimeError, match="without the sides"):
        worker.execute_model(strange)


def test_nothing_is_copied_while_nothing_changes(monkeypatch):
    offsets = TokenOffsets(SETTINGS, max_tokens=8, device=torch.device("cpu"))
    offsets.fill(["a", "b"], [1, 1], {"b"})
    monkeypatch.setattr(offsets, "buffer", None)  # which cannot be written to
    offsets.fill(["a", "b"], [1, 1], {"b"})
    offsets.fill(["c"], [1], {"b"})
    with pytest.raises(AttributeError):
        offsets.fill(["b"], [1], {"b"})


def test_a_runner_with_other_methods_is_refused(worker):
    class Renamed(RunnerV1):
        def _preprocess(self, step, count):
            pass

    worker.model_runner = Renamed()
    with pytest.raises(LongRopeError, match="_preprocess takes"):
        worker._fill_in_runner_v1()
