"""fp32 gradients of a rank's parameters, in one buffer (docs/architecture.md, "Weight gradients")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimpipe.kernels.fuse import wide
from slimpipe.kernels.weight_grad import Waiting, waiting_of
from slimpipe.runtime.carrier import Carrier


class GradientBuffer:
    """Gives every parameter `main_grad`, a view of one fp32 buffer (fp64 for fp64 parameters).

    slimpipe's own kernels add into `main_grad` themselves. A gradient that autograd makes in the usual way, by a plain
    torch.nn module in a user's model, is added and dropped as soon as it is there.

    `slices` above 1: slimpipe's linears multiply the factors of so many backwards at once; `flush` adds those that
    still wait at a step's end.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], slices: int = 1) -> None:
        self._parameters = parameters
        first = next(iter(parameters.values()))
        # Each view starts on a 16-byte boundary, which the GEMM's epilogue wants.
        sizes = [-(-parameter.numel() // 4) * 4 for parameter in parameters.values()]
        self.buffer = torch.zeros(sum(sizes), dtype=wide(first.dtype), device=first.device)
        for parameter, part in zip(parameters.values(), self.buffer.split(sizes), strict=True):
            parameter.main_grad = part[: parameter.numel()].view_as(parameter)  # type: ignore[attr-defined]
            if slices > 1 and parameter.dim() == 2:
                parameter.main_grad.waiting = Waiting(slices)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(_move_to_main_grad)

    def zero(self) -> None:
        """Forgets what a step left, one that failed too."""
        for waiting, _ in self._waiting():
            waiting.clear()
        self.buffer.zero_()

    @torch.no_grad()
    def flush(self) -> None:
        """Adds all that waits: the gradients are whole from here on."""
        for waiting, gradient in self._waiting():
            waiting.flush(gradient)

    def _waiting(self) -> Iterator[tuple[Waiting, Tensor]]:
        for gradient in self.views().values():
            waiting = waiting_of(gradient)
            if waiting is not None:
                yield waiting, gradient

    def views(self) -> dict[str, Tensor]:
        """Gradients by layout-free name."""
        return {name: parameter.main_grad for name, parameter in self._parameters.items()}  # type: ignore[attr-defined]


def _move_to_main_grad(parameter: Tensor) -> None:
    if parameter.grad is None:  # our own kernels have added it already; autograd calls the hook all the same
        return
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None, carrier: Carrier) -> Tensor:
    """Sum of every rank's tensor, on the carrier's device; the tensor itself where there is no group."""
    if group is None:
        return tensor
    carried = carrier.outgoing(tensor)
    dist.all_reduce(carried, group=group)
    return carrier.incoming(carried)


def sum_tied(gradient: Tensor, group: dist.ProcessGroup, carrier: Carrier) -> None:
    """Adds up, in place, the gradients that first and last stage have for a weight they share (each holds a copy)."""
    gradient.copy_(sum_over(gradient, group, carrier))


def norm_and_loss(
    counted: Mapping[str, Tensor], loss: Tensor, group: dist.ProcessGroup | None, carrier: Carrier
) -> tuple[Tensor, Tensor]:
    """(L2 norm of the gradients given, sum of the losses) over all ranks of `group`, in one reduction; each [] fp32 on
    their device, the same bits on every rank, so that all decide alike by them.

    Every parameter must be given by one rank only: a tied weight's second copy is left out by the caller.
    """
    square = torch.stack(torch._foreach_norm(list(counted.values()))).square().sum()
    totals = sum_over(torch.stack((square, loss.to(square.dtype))), group, carrier)
    return totals[0].sqrt(), totals[1]


def clip(buffer: Tensor, norm: Tensor, limit: float) -> None:
    """Scales the gradients so that their global norm is at most `limit`. Does not wait for the device.

    Where the norm is not finite they stay as they are, for the search of the first bad one.
    """
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    buffer.mul_(torch.where(norm.isfinite(), factor, 1.0))


@dataclass(frozen=True)
class BadGradients:
    """What a rank found that is not finite. `last`: place of the bad parameter nearest to the loss, by the caller's
    order; -1 where all are finite."""

    last: int
    values: int
    parameters: int


def bad_gradients(views: Mapping[str, Tensor], order: Mapping[str, int]) -> BadGradients:
    """Counts gradients that are not finite. Waits for the device: for a step that has failed already."""
    counts = {name: int((~gradient.isfinite()).sum()) for name, gradient in views.items()}
    hit = [order[name] for name, count in counts.items() if count]
    return BadGradients(max(hit, default=-1), sum(counts.values()), len(hit))
