"""The schedulers that vLLM imports by name."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from longrope2.serving.scheduling import SwitchingScheduler


class SwitchScheduler(SwitchingScheduler, Scheduler):
    """Waits for each step before it schedules the next."""


class SwitchAsyncScheduler(SwitchingScheduler, AsyncScheduler):
    """Schedules a step while the one before is running."""
