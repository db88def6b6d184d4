"""The engines that a worker can run, by name; each is imported only when it is chosen."""

from __future__ import annotations

from rlharvest.engine import Engine
from rlharvest.errors import InvalidField

from rlharvest_rollout.settings import RolloutSettings


def import_engine(name: str) -> None:
    """Bring the code of an engine into this process, so that `make_engine` is quick. Blocks, for torch some seconds."""
    if name == "torch":
        import rlharvest_rollout.engines.torch.engine
    if name == "vllm":
        import vllm.v1.engine.async_llm  # noqa: F401  # for what importing it does

        import rlharvest_rollout.engines.vllm.engine  # noqa: F401


def make_engine(name: str, settings: RolloutSettings) -> Engine:
    """Return a new engine.

    Raises:
        InvalidField: there is no engine of this name.
    """
    if name == "stub":
        from rlharvest.testing.stub import StubEngine

        return StubEngine()
    if name == "torch":
        from rlharvest_rollout.engines.torch.engine import TorchEngine

        return TorchEngine(
            threads=settings.compute_threads, slots=settings.slots, kv_memory_bytes=settings.kv_memory_mb << 20
        )
    if name == "vllm":
        from rlharvest_rollout.engines.restarting import RestartingEngine
        from rlharvest_rollout.engines.vllm.engine import VllmEngine

        return RestartingEngine(
            lambda: VllmEngine(
                threads=settings.compute_threads,
                slots=settings.slots,
                kv_memory_bytes=settings.kv_memory_mb << 20,
                tensor_parallel=settings.tensor_parallel,
                gpu_memory=settings.gpu_memory,
            )
        )
    raise InvalidField("engine", name, "there is no such engine", "Known engines: vllm, torch, stub.")
