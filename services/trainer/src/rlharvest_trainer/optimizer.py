"""AdamW over float32 master weights, whatever the model's type.

Invariants: the optimiser sees a finite gradient or none; gradients of a bfloat16 model are summed in float32; norms
and biases don't decay (Loshchilov and Hutter 2019, arXiv 1711.05101, as it is done in practice); the state goes to
and comes from a flat dict of tensors, for safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rlharvest.errors import CorruptData
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Constants of AdamW and the clipping before it."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class MasterAdamW:
    """Sums gradients of micro-batches, then makes one step of them.

    Args:
        parameters: the model's, by name. float32 ones are their own masters; others get a float32 copy.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: AdamWConfig) -> None:
        self.config = config
        self._parameters = dict(parameters)
        self._masters = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_(True)
            for name, parameter in parameters.items()
        }
        decay = [master for master in self._masters.values() if master.ndim >= 2]
        plain = [master for master in self._masters.values() if master.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
        )

    def absorb(self) -> None:
        """Add the gradients that a backward pass left on the model to the masters'."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def discard(self) -> None:
        """Forget the gradients gathered so far."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, *, learning_rate: float, divisor: float) -> float | None:
        """Divide the summed gradients, clip their norm, make a step, forget them.

        Args:
            divisor: what the sums are divided by: the loss tokens of the whole step.

        Returns:
            The gradient's norm before clipping; None if it was not finite, and then nothing has changed.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = 0.0
        if gradients:
            for gradient in gradients:
                gradient.div_(divisor)
            # float64 sums: the norm must not overflow before the gradient does.
            norm = float(torch.stack([gradient.double().pow(2).sum() for gradient in gradients]).sum().sqrt())
            if not torch.isfinite(torch.tensor(norm)):
                self.discard()
                return None
            if norm > self.config.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(self.config.max_grad_norm / (norm + 1e-6))
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    if self._masters[name] is not parameter:
                        parameter.copy_(self._masters[name])
        self.discard()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return masters, moments and step counts, by `<kind>.<parameter>`; masters only where they are copies."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                tensors[f"master.{name}"] = master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value.detach()
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            CorruptData: a tensor is missing, unknown, or of another shape; names it.
        """
        left = dict(tensors)
        self._adamw.state.clear()
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                with torch.no_grad():
                    master.copy_(_take(left, f"master.{name}", master.shape))
                    self._parameters[name].copy_(master)
            if f"step.{name}" not in left:
                continue  # no step has touched this parameter
            self._adamw.state[master] = {
                "step": _take(left, f"step.{name}", torch.Size([])).clone(),
                **{
                    moment: _take(left, f"{moment}.{name}", master.shape).to(master.device).clone()
                    for moment in _MOMENTS
                },
            }
        if left:
            raise CorruptData(f"the optimiser's state holds {sorted(left)[0]!r}, which this model does not have")


def _take(tensors: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise CorruptData(f"the optimiser's state lacks {name!r}")
    if tensor.shape != shape:
        raise CorruptData(f"the optimiser's {name!r} is {tuple(tensor.shape)}, the model's is {tuple(shape)}")
    return tensor
