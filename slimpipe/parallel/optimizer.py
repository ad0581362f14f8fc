"""AdamW over fp32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from slimpipe.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Rate of step `step` (from 0): linear warm-up over `warmup_steps`, then cosine to `min_lr` at the last step."""
    optim = config.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    span = max(1, config.train.steps - 1 - optim.warmup_steps)
    progress = min(1.0, (step - optim.warmup_steps) / span)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """torch.optim.AdamW on fp32 masters whose `.grad` is the parameter's `main_grad`.

    fp32 parameters are their own masters. Vectors (norm weights) are not decayed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: Config) -> None:
        self._parameters = dict(parameters)
        self.masters = {name: self._master(parameter) for name, parameter in parameters.items()}
        optim = config.optim
        decayed = [master for master in self.masters.values() if master.dim() > 1]
        plain = [master for master in self.masters.values() if master.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        self._lowered = [
            (parameter.data, self.masters[name])
            for name, parameter in parameters.items()
            if self.masters[name] is not parameter
        ]

        self._take_memory()

    def _take_memory(self) -> None:
        """Makes the moments now, as AdamW would at its first step: later they would take what the activations need."""
        for master in self.masters.values():
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @staticmethod
    def _master(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        return nn.Parameter(parameter.detach().float())

    def step(self, rate: float, skip: Tensor | None = None) -> None:
        """One update at this learning rate; the parameters take the masters' values, rounded.

        `skip` [] fp32 on the device: where it is 1 the kernel leaves weights, moments and their count as they are. The
        device decides, so nothing waits for it.
        """
        # What torch's own GradScaler tells a fused optimizer by.
        self._adamw.found_inf = skip  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for name, parameter in self._parameters.items():
            self.masters[name].grad = parameter.main_grad  # type: ignore[attr-defined]
        self._adamw.step()
        for master in self.masters.values():
            master.grad = None
        self._lower()

    def _lower(self) -> None:
        if self._lowered:
            torch._foreach_copy_([low for low, _ in self._lowered], [master.data for _, master in self._lowered])

    @property
    def updates(self) -> Tensor:
        """Updates done, [] fp32 where the masters are; live, as AdamW counts them."""
        count: Tensor = self._adamw.state[next(iter(self.masters.values()))]["step"]
        return count

    def restored(self) -> None:
        """To be called once masters, moments and `updates` hold the values of an earlier time."""
        for master in self.masters.values():
            self._adamw.state[master]["step"].copy_(self.updates)
        self._lower()

    def state(self) -> dict[str, Tensor]:
        """Moments by layout-free name: `<parameter>.exp_avg`, `<parameter>.exp_avg_sq`."""
        return {
            f"{name}.{key}": self._adamw.state[master][key]
            for name, master in self.masters.items()
            for key in ("exp_avg", "exp_avg_sq")
        }
