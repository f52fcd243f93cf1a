"""The part of the switch in vLLM's workers: every token reads the angles of its request's side.

vLLM's own longrope layer holds one table of angles, short rows first, then long rows, and reads it at the position of
each token. Ours reads it at the position plus an offset: 0 for a token of a short request, the number of short rows for
one of a long request. The offsets stand in one buffer, filled before each forward. Positions stay what they are, for
everything else that reads them. The address of the buffer never changes, so CUDA graphs read it, too.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from longrope2.serving.scheduling import LONG_REQUESTS
from longrope2.serving.settings import SwitchSettings, check_methods, settings_of


class TokenOffsets:
    """What to add to the position of each token of a step to find its row of the table."""

    def __init__(self, settings: SwitchSettings, *, max_tokens: int, device: torch.device) -> None:
        self.settings = settings
        self.buffer = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._filled = np.zeros(max_tokens, dtype=np.int64)

    def fill(self, request_ids: Sequence[str], counts: Sequence[int], long: Collection[str]) -> None:
        """For requests in the order of a batch, each with its number of tokens."""
        sides = np.fromiter((request in long for request in request_ids), dtype=np.int64, count=len(request_ids))
        offsets = np.repeat(sides * self.settings.short_rows, counts)
        filled = self._filled[: len(offsets)]
        if np.array_equal(filled, offsets):  # as in most steps
            return
        filled[:] = offsets
        source = torch.from_numpy(offsets)
        if self.buffer.is_cuda:
            # New memory for each step, since earlier copies may still be waiting; torch keeps it until it is read.
            source = source.pin_memory()
        self.buffer[: len(offsets)].copy_(source, non_blocking=True)


class SwitchingWorker:
    """Goes before a worker of vLLM in the bases of a class."""

    vllm_config: Any
    device: torch.device
    model_runner: Any
    _long_requests: Collection[str] = ()
    _is_serving = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load it with our RoPE layers, and put the offsets into each step."""
        from longrope2.serving.vllm_layer import check_layers, switching_layers

        check_methods(super(), {"execute_model": ("scheduler_output",), "compile_or_warm_up_model": ()})
        settings = settings_of(self.vllm_config)
        assert settings is not None
        max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._offsets = TokenOffsets(settings, max_tokens=max_tokens, device=self.device)
        with switching_layers(self._offsets):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        check_layers(self.model_runner.get_model(), self._offsets)
        if self.vllm_config.use_v2_model_runner:
            self._fill_in_runner_v2()
        else:
            self._fill_in_runner_v1()

    def compile_or_warm_up_model(self) -> Any:
        """From here on, steps come from our scheduler."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self._is_serving = True
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Note which requests of this step are long."""
        self._long_requests = getattr(scheduler_output, LONG_REQUESTS, ())
        if self._is_serving and not hasattr(scheduler_output, LONG_REQUESTS):
            raise RuntimeError("longrope2: a step came without the sides of its requests")
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _fill_in_runner_v1(self) -> None:
        runner = self.model_runner
        check_methods(runner, {"_preprocess": ("scheduler_output", "num_input_tokens")})
        preprocess = runner._preprocess

        def preprocess_and_fill(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            ids = runner.input_batch.req_ids  # in the order of the batch, which is final by now
            counts = [scheduler_output.num_scheduled_tokens[request] for request in ids]
            self._offsets.fill(ids, counts, self._long_requests)
            return preprocess(scheduler_output, *args, **kwargs)

        runner._preprocess = preprocess_and_fill

    def _fill_in_runner_v2(self) -> None:
        state = self.model_runner.model_state
        check_methods(state, {"prepare_inputs": ("input_batch", "req_states")})
        prepare_inputs = state.prepare_inputs

        def fill_and_prepare_inputs(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            counts = input_batch.num_scheduled_tokens[: len(input_batch.req_ids)]
            self._offsets.fill(input_batch.req_ids, counts, self._long_requests)
            return prepare_inputs(input_batch, *args, **kwargs)

        state.prepare_inputs = fill_and_prepare_inputs
