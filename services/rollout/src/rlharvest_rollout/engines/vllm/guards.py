"""What runs inside vLLM's worker process: repairs of known faults, and an end with the process that owns it.

vLLM imports this module by the name of `WorkerGuards`, mixes that class into its worker, and `collective_rpc` calls its
methods there. Each repair names its fault; `selftest` and the tests find out whether it is still needed or suffices.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from rlharvest.speculation.options import Speculation

from rlharvest_rollout.engines.vllm.arguments import OWNER_VARIABLE

_PROBE_ROWS = 4


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each sequence's value once for each of its tokens.

    In the place of vLLM's function of this name, whose CPU kernel leaves the result unwritten for some dtypes: verified
    drafts were then sampled at a temperature read from uninitialised memory (vLLM issue 55005).

    Args:
        x: (sequences,).
        cu_num_tokens: (sequences,), running total of tokens.
        replace_from: this value of `x` becomes `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


def heads(model: torch.nn.Module) -> Iterator[Any]:
    """Return the modules whose packed copy for the CPU's kernel `reload_weights` may leave stale: heads and embeddings.

    A head that is tied to the embedding gets no weights of its own, so nothing packs it again after a reload.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            yield module


def head_error(module: Any) -> float:
    """Return the largest difference of a head's logits to those of its plain weights, over the largest logit."""
    weight: torch.Tensor = module.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBE_ROWS, weight.shape[1], generator=generator).to(weight)
    wanted = torch.nn.functional.linear(rows.float(), weight.float())
    found = module.quant_method.apply(module, rows).float()
    return float((found[:, : wanted.shape[1]] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


class WorkerGuards:
    """Methods that vLLM's worker gets; the names are apart from vLLM's own."""

    model_runner: Any

    def guard_processes(self) -> list[int]:
        """Return the ids of this process and of the one that started it."""
        return [os.getpid(), os.getppid()]

    def guard_reload(self, directory: str) -> float:
        """Load the weights in a directory, pack the heads again, and return the largest `head_error` that is left."""
        self.model_runner.reload_weights(weights_path=directory)
        model = self.model_runner.get_model()
        for module in heads(model):
            module.quant_method.process_weights_after_loading(module)
        return self.guard_head_error()

    def guard_head_error(self) -> float:
        """Return the largest `head_error` of the model."""
        with torch.inference_mode():
            return max((head_error(module) for module in heads(self.model_runner.get_model())), default=0.0)

    def guard_drafts(self, options: dict[str, Any], memory_bytes: int) -> None:
        """Begin to draft from history: fields of `Speculation`, and the bound of what is remembered."""
        runner = self.model_runner
        # Near the end of the context vLLM would verify drafts of zeros, for all that run: it thinks of draft models.
        runner.effective_drafter_max_model_len += runner.num_spec_tokens
        # With one thread all is computed on this one, whose processor time does not grow while other processes run.
        alone = runner.device.type == "cpu" and torch.get_num_threads() == 1
        runner.drafter.attach(
            runner,
            Speculation(**options),
            memory_bytes=memory_bytes,
            clock=time.thread_time if alone else time.perf_counter,
        )

    def guard_draft_always(self, tokens: list[int] | None) -> None:
        """Draft these tokens after every step, until it is called with None."""
        self.model_runner.drafter.always = tokens


def watch(owner: int) -> None:
    """End this process, and its parent where that is the engine's core, as soon as one of them or the owner has ended.

    The owner may be killed at any instant, and nothing of it runs then: a device must not stay taken.
    """
    parent = multiprocessing.parent_process()
    core = parent.pid if parent is not None and parent.pid is not None else owner
    try:
        # By handle: an id may belong to another process by the time it is used.
        handles = {pid: os.pidfd_open(pid) for pid in {owner, core}}
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def end_with_them() -> None:
        select.select(list(handles.values()), [], [])
        if core != owner:
            try:
                signal.pidfd_send_signal(handles[core], signal.SIGKILL)
            except ProcessLookupError:
                pass  # it went first
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_them, name="ends-with-owner", daemon=True).start()


def _repair() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


if (_owner := int(os.environ.get(OWNER_VARIABLE, "0"))) not in (0, os.getpid()):
    watch(_owner)
    _repair()
