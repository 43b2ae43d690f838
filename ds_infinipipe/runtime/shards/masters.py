"""Master weights without ZeRO: float32 copies of half-precision parameters that are stepped on."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["MasterOptimizer"]


class MasterOptimizer:
    """Steps an optimizer on float32 masters, then rounds them into the parameters.

    In place of DeepSpeed's wrappers for fp16 and bf16: they take half-precision gradients, scale
    and check them, which all is done before here, or shard over the ranks of a stage (bf16).
    """

    overflow = False
    """Whether a step was skipped for it; gradients that overflow never get here."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        """By trained parameter."""
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            for parameter in trained:
                master = parameter.detach().to(torch.float32, copy=True)
                self.masters[parameter] = master.requires_grad_()
            group["params"] = [self.masters[p] for p in trained]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's, of masters."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Any:
        """The inner optimizer's, by master."""
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        """Step on the parameters' float32 gradients; one without a gradient stays as it is."""
        for parameter, master in self.masters.items():
            master.grad = parameter.grad
        self.optimizer.step()
        self.publish()
        for master in self.masters.values():
            master.grad = None

    def publish(self) -> None:
        """Carry the masters over to the parameters."""
        for parameter, master in self.masters.items():
            parameter.data.copy_(master.data)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' gradients."""
        for parameter in self.masters:
            parameter.grad = None
