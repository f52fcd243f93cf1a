"""The entry point that vLLM calls in each of its processes, and the checks before anything is changed.

Only one method of vLLM is replaced: the one that completes an engine's configuration, where our scheduler and worker
are named. All else is in classes of our own, which stand before vLLM's.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from longrope2.errors import LongRopeError
from longrope2.serving.settings import WITHOUT, apply, check_methods, refuse_unsupported, resolve, settings_of

SUPPORTED = ("0.30", "0.31", "0.32")
"""Minor versions of vLLM with which the tests were run."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM may call it more than once."""
    from vllm.config import VllmConfig

    if not hasattr(VllmConfig.__post_init__, "longrope2"):
        VllmConfig.__post_init__ = _with_switch(VllmConfig.__post_init__)


def _with_switch(complete: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(complete)
    def complete_with_switch(vllm_config: Any) -> None:
        complete(vllm_config)
        settings = resolve(vllm_config)
        if settings is None:
            return
        check_vllm()
        refuse_unsupported(vllm_config, settings)
        _refuse_growing_prompts()
        apply(vllm_config, settings)
        _logger().info_once(
            "longrope2: requests of up to %d tokens run on the short RoPE factors, longer ones on the long factors; "
            "one that grows beyond is computed again, once.",
            settings.switch_length,
        )

    complete_with_switch.longrope2 = True  # type: ignore[attr-defined]
    return complete_with_switch


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.longrope2")


def check_vllm() -> None:
    """Refuse a version of vLLM that the switch was not tried with."""
    import vllm

    version = str(vllm.__version__)
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise LongRopeError(
            f"longrope2 can switch RoPE for each request in vLLM {', '.join(SUPPORTED)}, and this is {version}",
            hint=f"pip install 'longrope2[vllm]' brings one that it knows, {WITHOUT}",
        )


def _refuse_growing_prompts() -> None:
    """Prompts sent in pieces, which vLLM's Python interface allows, are refused where they arrive."""
    from vllm.v1.engine.input_processor import InputProcessor

    if hasattr(InputProcessor.process_inputs, "longrope2"):
        return
    check_methods(InputProcessor, {"process_inputs": ("self", "request_id", "prompt", "params")})
    process_inputs = InputProcessor.process_inputs

    @wraps(process_inputs)
    def process_whole_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        if request.resumable and settings_of(self.vllm_config) is not None:
            raise ValueError(f"longrope2: a prompt sent in pieces cannot switch RoPE; send it whole, {WITHOUT}")
        return request

    process_whole_inputs.longrope2 = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_whole_inputs
