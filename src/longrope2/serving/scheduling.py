"""Which requests are short and which are long, and when one changes: the part of the switch in vLLM's scheduler.

A request is long once a step of it reads more tokens than the switch length. Its side is decided when it arrives. A
short request that would outgrow its side is preempted, by vLLM's own means, and computed again as a long one.
"""

import secrets
import time
from typing import Any

from longrope2.serving.settings import check_methods, settings_of

LONG_REQUESTS = "longrope2_long_requests"
"""Attribute of vLLM's SchedulerOutput: ids of the requests of this step that are long."""


class SwitchingScheduler:
    """Goes before a scheduler of vLLM, synchronous or not, in the bases of a class."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        expected = {"add_request": ("request",), "schedule": (), "_preempt_request": ("request", "timestamp")}
        check_methods(super(), expected)
        settings = settings_of(vllm_config)
        assert settings is not None
        self._switch_length = settings.switch_length
        # vLLM hashes it with a request's first block, and each block's hash with the next: so the sides share no
        # block. A secret, since any client may choose the salt of its own requests.
        self._long_salt = f"\0{secrets.token_hex(16)}"
        self._long: set[str] = set()
        self._preempted_short: list[Any] = []
        # Steps in which no running request can outgrow its side, since each adds at most one token to a request.
        self._quiet_steps = 0

    # What these three replace is vLLM's; the arguments that they only pass on differ between its versions.

    def add_request(self, request: Any) -> None:
        """Decide its side."""
        if request.resumable:
            raise RuntimeError("longrope2: a request whose prompt is still to grow must be refused where it arrives")
        self._long.discard(request.request_id)  # of an earlier request, that ended since the last step
        if request.num_tokens > self._switch_length:
            self._make_long(request)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Take those that outgrow their side out of the running ones, then schedule as usual."""
        if self._preempted_short:
            self._look_at_preempted()
        if self._quiet_steps:
            self._quiet_steps -= 1
        else:
            self._switch_outgrown()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for begun in (*(new.req_id for new in output.scheduled_new_reqs), *resumed):
            if begun not in self._long:
                self._quiet_steps = min(self._quiet_steps, max(self._room(self.requests[begun]), 0))
        if output.finished_req_ids and self._long:
            self._long.intersection_update(self.requests)
        setattr(output, LONG_REQUESTS, self._long.intersection(output.num_scheduled_tokens) if self._long else set())
        return output

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        if request.request_id not in self._long:
            self._preempted_short.append(request)

    requests: dict[str, Any]
    running: list[Any]
    prev_step_scheduled_req_ids: set[str]

    def _make_long(self, request: Any) -> None:
        self._long.add(request.request_id)
        request.cache_salt = (request.cache_salt or "") + self._long_salt
        request.block_hashes = []
        request.update_block_hashes()

    def _switch_outgrown(self) -> None:
        nearest, outgrown = 1 << 30, []
        for request in self.running:
            if request.request_id in self._long:
                continue
            room = self._room(request)
            if room >= 0:
                nearest = min(nearest, room)
            elif not self._is_last_step(request):
                outgrown.append(request)
        self._quiet_steps = nearest
        # Last first, since each goes to the head of the queue.
        for request in reversed(outgrown):
            self.running.remove(request)
            self._make_long(request)
            self._preempt_request(request, time.monotonic())
            # It may run again in this very step. The older model runner must then be sent all its tokens.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _room(self, request: Any) -> int:
        """How many tokens it can still get, besides those that are being computed, before it outgrows its side."""
        room: int = self._switch_length - request.num_tokens - request.num_output_placeholders
        return room

    def _is_last_step(self, request: Any) -> bool:
        """Whether the token that is being computed is the last one allowed: there is nothing left to read it."""
        coming: int = request.num_output_placeholders
        end: int = request.num_prompt_tokens + request.max_tokens
        return coming > 0 and request.num_tokens + coming >= end

    def _look_at_preempted(self) -> None:
        """Those that got their last token before their blocks were taken from them, as when the cache is cleared."""
        waiting = [request for request in self._preempted_short if request.status.name == "PREEMPTED"]
        for request in waiting:
            if request.num_tokens > self._switch_length:
                self._make_long(request)
        self._preempted_short = [request for request in waiting if request.request_id not in self._long]
