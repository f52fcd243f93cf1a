"""The scheduler's part of the switch, before a small scheduler that does what vLLM's does: queue, blocks, preemption.

tests/serving/test_vllm_scheduler.py runs the same against vLLM's own schedulers.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from symbolic import VOCABULARY, SymbolicModel, expected, prefixes, serve

from longrope2.errors import LongRopeError
from longrope2.serving.scheduling import LONG_REQUESTS, SwitchingScheduler
from longrope2.serving.settings import RESOLVED, SwitchSettings

BLOCK, SWITCH = 4, 16
RUNNING, PREEMPTED, FINISHED = (SimpleNamespace(name=name) for name in ("RUNNING", "PREEMPTED", "FINISHED"))


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    max_tokens: int
    stop: int | None = None
    cache_salt: str | None = None
    resumable: bool = False
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    stale: int = 0
    """Steps under way when it was preempted, whose tokens may be dropped."""
    drops: bool = False
    under_way: int = 0
    status: SimpleNamespace | None = None
    block_hashes: list[int] = field(default_factory=list)
    times_hashed: int = 0

    def __post_init__(self):
        self.num_prompt_tokens = len(self.all_token_ids)
        self.update_block_hashes()

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def update_block_hashes(self):
        states = prefixes(self.all_token_ids)[BLOCK - 1 :: BLOCK]
        self.block_hashes = [hash((state, self.cache_salt)) for state in states]


class Blocks:
    """As many as there are; full ones are found again by the hash of their tokens."""

    def __init__(self, count):
        self.free, self.cached, self.of = deque(range(count)), {}, {}

    def get_block_ids(self, request_id):
        return (self.of[request_id],)

    def find(self, request):
        """What is cached of it, but for the last token, which must be run."""
        found = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if self.cached.get(key) not in self.free:
                break
            found.append(self.cached[key])
        return found

    def allocate(self, request, end, known=()):
        needed = -(-end // BLOCK) - len(self.of.get(request.request_id, known))
        free = [block for block in self.free if block not in known]
        if needed > len(free):
            return False
        mine = self.of.setdefault(request.request_id, list(known))
        mine += free[:needed]
        self.free = deque(block for block in self.free if block not in mine)
        self.cached = {key: block for key, block in self.cached.items() if block not in free[:needed]}
        return True

    def keep(self, request, computed):
        """Full blocks may be found by others from now on."""
        for key, block in zip(request.block_hashes[: computed // BLOCK], self.of[request.request_id], strict=False):
            self.cached[key] = block

    def release(self, request):
        self.free.extend(reversed(self.of.pop(request.request_id, [])))


class Scheduler:
    """First come, first served; `asynchronous` as in vLLM's AsyncScheduler, with placeholders for coming tokens."""

    def __init__(self, vllm_config, blocks, *, asynchronous=False, budget=12):
        self.kv_cache_manager, self.asynchronous, self.budget = Blocks(blocks), asynchronous, budget
        self.requests, self.running, self.waiting = {}, [], deque()
        self.finished_req_ids, self.prev_step_scheduled_req_ids = set(), set()
        self.preemptions = 0

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self):
        counts, new, resumed, budget = {}, [], [], self.budget
        preempted = False
        for request in list(self.running):
            end = request.num_prompt_tokens + request.max_tokens
            coming = request.num_tokens + request.num_output_placeholders
            if request not in self.running or (request.num_output_placeholders and coming >= end):
                continue
            count = min(coming - request.num_computed_tokens, budget)
            while count and request in self.running:
                if self.kv_cache_manager.allocate(request, request.num_computed_tokens + count):
                    counts[request.request_id] = count
                    budget -= count
                    break
                if self.running[-1].request_id in counts:
                    break
                self._preempt_request(self.running.pop(), 0.0)
                preempted = True
        while self.waiting and budget and not preempted:
            request = self.waiting[0]
            known = self.kv_cache_manager.find(request)
            computed = len(known) * BLOCK
            count = min(request.num_tokens - computed, budget)
            if request.stale or not self.kv_cache_manager.allocate(request, computed + count, known):
                break
            self.waiting.popleft()
            (new if request.status is None else resumed).append(SimpleNamespace(req_id=request.request_id))
            request.status, request.num_computed_tokens = RUNNING, computed
            self.running.append(request)
            counts[request.request_id] = count
            budget -= count
        for request_id, count in counts.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            request.under_way += 1
            if (
                self.asynchronous
                and request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders
            ):
                request.num_output_placeholders += 1
        finished, self.finished_req_ids = self.finished_req_ids, set()
        self.prev_step_scheduled_req_ids = set(counts)
        return SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={each.req_id for each in resumed}),
            finished_req_ids=finished,
        )

    def reset_running(self):
        """As vLLM does to clear its cache, for which any client may ask: all begin again, coming tokens are dropped."""
        while self.running:
            self._preempt_request(self.running.pop(), 0.0, drops=True)

    def _preempt_request(self, request, timestamp, drops=False):
        assert request not in self.running
        request.drops = drops
        self.kv_cache_manager.release(request)
        request.status, request.num_computed_tokens = PREEMPTED, 0
        request.stale, request.num_output_placeholders = request.under_way, 0
        self.preemptions += 1
        self.waiting.appendleft(request)

    def deliver(self, output, tokens):
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.under_way -= 1
            was_stale, request.stale = request.stale > 0, max(request.stale - 1, 0)
            for token in [] if was_stale and request.drops else tokens[request_id]:
                request.all_token_ids.append(token)
                request.update_block_hashes()
                request.num_output_placeholders -= self.asynchronous and not was_stale
                if token == request.stop or request.num_tokens == request.num_prompt_tokens + request.max_tokens:
                    self.finish(request)
            if request.status is RUNNING:
                computed = request.num_computed_tokens - request.num_output_placeholders
                self.kv_cache_manager.keep(request, min(computed, request.num_tokens))

    def finish(self, request):
        request.status = FINISHED
        self.kv_cache_manager.release(request)
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)


class Switching(SwitchingScheduler, Scheduler):
    pass


class Unsalted(Switching):
    def _make_long(self, request):
        super()._make_long(request)
        request.cache_salt = None
        request.update_block_hashes()


class Unwatched(Switching):
    def _look_at_preempted(self):
        self._preempted_short = []


def scheduler_of(kind=Switching, blocks=40, **options):
    settings = SwitchSettings(switch_length=SWITCH, original_length=SWITCH)
    return kind(SimpleNamespace(additional_config={RESOLVED: settings.to_json()}), blocks, **options)


def model_of(scheduler):
    return SymbolicModel(scheduler=scheduler, block_size=BLOCK)


def random_requests(draw, count, most=40):
    shared = [draw.randrange(VOCABULARY) for _ in range(most)]
    found = []
    for number in range(count):
        length = draw.choice([1, 3, SWITCH - 1, SWITCH, SWITCH + 1, draw.randrange(1, most - 10)])
        begin = draw.choice([0, length, length // 2])
        prompt = shared[:begin] + [draw.randrange(VOCABULARY) for _ in range(length - begin)]
        stop = draw.choice([None, None, draw.randrange(VOCABULARY)])
        new = draw.choice([1, max(1, SWITCH - length), max(1, SWITCH + 1 - length), max(1, SWITCH + 2 - length), 10])
        found.append(Request(str(number), prompt, min(new, most - length), stop))
    return found


def answers(scheduler, seed, *, in_flight=1, count=150, resets=0.0):
    """Every answer, and what it should be."""
    draw = random.Random(seed)
    requests = random_requests(draw, count)
    wanted = [
        expected(request.all_token_ids, new_tokens=request.max_tokens, stop=request.stop, switch_length=SWITCH)
        for request in requests
    ]

    def disturb():
        if draw.random() < resets:
            scheduler.reset_running()

    model = model_of(scheduler)
    serve(scheduler, requests, model, scheduler.deliver, draw=draw, in_flight=in_flight, disturb=disturb)
    return [request.all_token_ids[request.num_prompt_tokens :] for request in requests], wanted


class TestRandomRequests:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("blocks", [11, 40])
    @pytest.mark.parametrize(("asynchronous", "in_flight"), [(False, 1), (True, 2), (True, 3)])
    def test_every_answer_is_the_one_defined(self, asynchronous, in_flight, blocks, seed):
        scheduler = scheduler_of(blocks=blocks, asynchronous=asynchronous)
        found, wanted = answers(scheduler, seed, in_flight=in_flight, resets=0.1 * (seed == 2))
        assert found == wanted
        assert scheduler.preemptions > 10
        assert not scheduler._long or scheduler._long <= scheduler.requests.keys() | scheduler.finished_req_ids

    def test_the_salt_is_needed(self):
        with pytest.raises(AssertionError, match="reads what is not its own"):
            answers(scheduler_of(Unsalted), 0)

    def test_a_preempted_request_may_have_outgrown_its_side(self):
        found, wanted = answers(scheduler_of(Unwatched), 0, resets=0.1)
        assert found != wanted


def run_one(scheduler, request, *, in_flight=1):
    """The ids of long requests, step by step."""
    model, under_way, sides = model_of(scheduler), deque(), []
    scheduler.add_request(request)
    while scheduler.requests or under_way:
        output = scheduler.schedule()
        if output.num_scheduled_tokens:
            sides.append(getattr(output, LONG_REQUESTS))
            under_way.append((output, model.run(output)))
        if under_way and (len(under_way) == in_flight or not output.num_scheduled_tokens):
            scheduler.deliver(*under_way.popleft())
    return sides


class TestOneRequest:
    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize(
        ("prompt", "new", "switches"),
        [
            (SWITCH - 2, 2, 0),
            (SWITCH - 2, 3, 0),  # its last token is only predicted
            (SWITCH - 2, 4, 1),
            (SWITCH, 1, 0),
            (SWITCH, 2, 1),
            (SWITCH + 1, 5, 0),
        ],
    )
    def test_it_is_computed_again_only_if_it_must_be(self, prompt, new, switches, asynchronous):
        scheduler = scheduler_of(asynchronous=asynchronous)
        request = Request("a", list(range(prompt)), new)
        run_one(scheduler, request, in_flight=2 if asynchronous else 1)
        assert request.num_tokens == prompt + new
        assert scheduler.preemptions == switches

    def test_a_client_cannot_guess_the_salt(self):
        salts = []
        for _ in range(2):
            request = Request("a", list(range(SWITCH + 1)), 1, cache_salt="mine")
            run_one(scheduler_of(), request)
            assert request.cache_salt.startswith("mine\0")
            salts.append(request.cache_salt)
        assert salts[0] != salts[1]

    def test_each_side_shares_its_own_blocks(self):
        scheduler = scheduler_of()
        for tokens, cached in ((SWITCH, 0), (SWITCH, 3 * BLOCK), (SWITCH + 1, 0), (SWITCH + 1, 4 * BLOCK)):
            request = Request("a", list(range(tokens)), 1)
            scheduler.add_request(request)
            output = scheduler.schedule()
            assert request.num_computed_tokens == min(cached + scheduler.budget, tokens)
            while scheduler.requests:
                output = output or scheduler.schedule()
                done = request.num_computed_tokens == request.num_tokens
                scheduler.deliver(output, {"a": [1] if done else []})
                output = None

    def test_the_same_id_again(self):
        """An aborted request's id may come back before the next step, with a short prompt."""
        scheduler = scheduler_of()
        scheduler.add_request(Request("a", list(range(SWITCH + 1)), 5))
        scheduler.schedule()
        scheduler.finish(scheduler.requests["a"])
        sides = run_one(scheduler, Request("a", list(range(5)), 2))
        assert sides == [set(), set()]

    def test_growing_prompts_must_not_get_here(self):
        with pytest.raises(RuntimeError, match="must be refused where it arrives"):
            scheduler_of().add_request(Request("a", [1], 1, resumable=True))

    def test_running_requests_are_looked_at_only_when_one_may_outgrow_its_side(self, monkeypatch):
        scheduler = scheduler_of()
        looks = []
        look = scheduler._switch_outgrown
        monkeypatch.setattr(scheduler, "_switch_outgrown", lambda: (looks.append(1), look()))
        run_one(scheduler, Request("a", [1], SWITCH + 10))
        assert len(looks) <= 5

    def test_a_scheduler_with_other_methods_is_refused(self):
        class Other(SwitchingScheduler, Scheduler):
            pass

        class Renamed(Scheduler):
            def _preempt_request(self, victim, timestamp):
                pass

        Other.__bases__ = (SwitchingScheduler, Renamed)
        with pytest.raises(LongRopeError, match="_preempt_request takes"):
            scheduler_of(Other)
