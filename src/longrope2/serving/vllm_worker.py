"""The worker that vLLM imports by name: ours before the platform's own."""

from vllm.platforms import current_platform

from longrope2.serving.running import SwitchingWorker

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class SwitchWorker(SwitchingWorker, PlatformWorker):
    """Runs each request on its side."""
