"""A model without numbers, which finds out whether a scheduler kept the two sides apart.

Instead of keys and values, each slot of the cache holds which tokens it was computed from, and on which side. A request
may read nothing else than what an uncached forward of its own side would have computed. The next token is a function of
the tokens before it and of the side, so that every answer can be compared with one computed without a scheduler.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longrope2.serving.scheduling import LONG_REQUESTS

VOCABULARY = 40


def prefixes(tokens: Sequence[int]) -> list[int]:
    """For each token, a number that stands for it and all before it."""
    found, state = [], 0
    for token in tokens:
        state = hash((state, token))
        found.append(state)
    return found


def next_token(prefix: int, long: bool) -> int:
    return hash((prefix, long)) % VOCABULARY


def expected(prompt: Sequence[int], *, new_tokens: int, stop: int | None, switch_length: int) -> list[int]:
    """The answer to a request, as the rule defines it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(next_token(prefixes(tokens)[-1], len(tokens) > switch_length))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


@dataclass
class SymbolicModel:
    """Runs the steps of a scheduler in order."""

    scheduler: Any
    block_size: int
    slots: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """What the worker knows of each request: it is ahead of the scheduler by what is being computed."""

    def run(self, output: Any) -> dict[str, list[int]]:
        """The token that each request of a step gets, if any."""
        begun = [new.req_id for new in output.scheduled_new_reqs] + list(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in begun:
            self.tokens[request_id] = list(self.scheduler.requests[request_id].all_token_ids)
        return {request_id: self._step(request_id, count, output) for request_id, count in
                output.num_scheduled_tokens.items()}  # fmt: skip

    def _step(self, request_id: str, count: int, output: Any) -> list[int]:
        tokens, long = self.tokens[request_id], request_id in getattr(output, LONG_REQUESTS)
        end = self.scheduler.requests[request_id].num_computed_tokens
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        states = prefixes(tokens[:end])
        assert len(states) == end
        places = [(blocks[i // self.block_size], i % self.block_size) for i in range(end)]
        for i in range(end - count, end):
            self.slots[places[i]] = (states[i], long)
        read = [self.slots.get(place) for place in places]
        assert read == [(state, long) for state in states], f"{request_id} reads what is not its own, at {end} tokens"
        if end < len(tokens):
            return []
        # On the wrong side, too: vLLM may run a step too many, whose token nobody gets.
        tokens.append(next_token(states[-1], long))
        return [tokens[-1]]


def serve(
    scheduler: Any,
    requests: Sequence[Any],
    model: SymbolicModel,
    deliver: Any,
    *,
    draw: random.Random,
    in_flight: int = 1,
    disturb: Any = lambda: None,
) -> None:
    """Send requests at random times and run all to their ends, with up to so many steps under way at once."""
    coming, under_way = deque(requests), deque()
    idle = 0
    while coming or scheduler.requests or under_way:
        while coming and draw.random() < 0.4:
            scheduler.add_request(coming.popleft())
        disturb()
        output = scheduler.schedule()
        if output.num_scheduled_tokens:
            under_way.append((output, model.run(output)))
        if under_way and (len(under_way) >= in_flight or not output.num_scheduled_tokens):
            deliver(*under_way.popleft())
        idle = 0 if output.num_scheduled_tokens or under_way else idle + 1
        assert idle < 200, "nothing is scheduled any more"
