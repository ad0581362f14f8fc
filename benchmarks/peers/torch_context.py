"""FSDP2 (fully_shard) with torch's own context parallelism over the same ranks.

Keys of a case: recompute, compiled; `reshard`: whether weights are gathered anew for the backward; `accumulate`:
whether gradients wait, whole and in fp32, for a step's last microbatch before they travel; `rotate`: allgather or
alltoall.

Every rank has 1 / ranks of fp32 weights, gradients and moments, and of each sequence two parts, one from either end.

On a CPU torch has no ring: its context parallelism knows the kernels of GPUs alone. There `Gathered` stands in, which
cuts sequences alike and gathers keys and values, so that all else can be compared with slimpipe.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.jobs import Case
from benchmarks.peers.measure import measure
from benchmarks.peers.plain import Attend, Part, attend, attend_expanded
from benchmarks.peers.torch_pipeline import kernel
from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes
from slimpipe.train.dtypes import DTYPES


class Whole(nn.Module):
    """The whole model: forward gives the sum of the losses of this rank's tokens."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        assert self.part.head is not None
        return self.part.head(self.part(tokens, positions), labels)


def own_parts(mesh: DeviceMesh, stack: ExitStack) -> list[int]:
    """Which of 2 x ranks parts of a sequence are this rank's, in order, by torch's own cut.

    From here until `stack` closes, torch's SDPA goes over all ranks: entered once, as entering anew for each microbatch
    would give compiled blocks another function each time.
    """
    from torch.distributed.tensor.experimental import context_parallel

    parts = torch.arange(2 * mesh.size(), device=mesh.device_type)
    stack.enter_context(context_parallel(mesh, buffers=[parts], buffer_seq_dims=[0], no_restore_buffers={parts}))
    found: list[int] = parts.tolist()
    return found


class Ring:
    """Torch's context parallelism, for GPUs."""

    def __init__(self, mesh: DeviceMesh, rotate: str, device: torch.device) -> None:
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(rotate)
        random = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, 512 * mesh.size(), 128, generator=random, device=device).bfloat16()
            for heads in (8, 2, 2)
        )
        with kernel(device):
            alone = attend_expanded(q, k, v)
        self.stack = ExitStack()
        self.parts = own_parts(mesh, self.stack)
        self.attend: Attend = attend if self._grouped(device, q, k, v, alone) else attend_expanded

    def _grouped(self, device: torch.device, *whole: Tensor) -> bool:
        """Whether the ring takes fewer heads of keys and values, and gives this rank's part of what one rank alone does
        (the last of `whole`). The same on every rank."""
        q, k, v, alone = (cut(t, self.parts, 2) for t in whole)
        try:
            with kernel(device):
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                found = attend(*leaves)
                found.sum().backward()
            good = bool((found.detach() - alone).float().norm() < 0.02 * alone.float().norm())
        except (RuntimeError, NotImplementedError, AssertionError, ValueError):
            good = False
        agreed = torch.tensor(float(good), device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)

    def close(self) -> None:
        self.stack.close()


class Gathered:
    """The stand-in of a CPU: the same parts of each sequence, keys and values gathered from all ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        with ExitStack() as stack:
            self.parts = own_parts(mesh, stack)
        self.everyone: list[Any] = [None] * mesh.size()
        dist.all_gather_object(self.everyone, self.parts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_AllGather.apply(t) for t in (k, v))
        positions = torch.arange(k.shape[2])
        mine = cut(positions, self.parts, 0)
        theirs = torch.cat([cut(positions, parts, 0) for parts in self.everyone])
        return F.scaled_dot_product_attention(q, k, v, mine[:, None] >= theirs[None], enable_gqa=True)

    def close(self) -> None:
        """Torch's context was left at once."""


def cut(whole: Tensor, parts: list[int], dim: int) -> Tensor:
    """A rank's parts of a tensor along `dim`."""
    chunks = whole.chunk(2 * dist.get_world_size(), dim)
    return torch.cat([chunks[part] for part in parts], dim)


class _AllGather(torch.autograd.Function):
    """[b, g, s, d] of every rank, one behind the other in s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class TorchContext:
    def __init__(self, config: Config, case: Case, processes: Processes) -> None:
        self.config, self.processes, device = config, processes, processes.device
        self.world, self.accumulate = processes.world, case.get("accumulate", False)
        mesh = init_device_mesh(device.type, (self.world,), mesh_dim_names=("cp",))
        self.context: Ring | Gathered
        if device.type == "cuda":
            self.context = Ring(mesh, case.get("rotate", "allgather"), device)
        else:
            self.context = Gathered(mesh)
        repeated = ", keys and values repeated" * (self.context.attend is attend_expanded)
        self.notes: dict[str, Any] = {"attention": f"SDPA, {type(self.context).__name__.lower()}{repeated}"}
        part = Part(
            config,
            range(config.model.layers),
            device,
            DTYPES[config.train.dtype],
            case.get("recompute", "none"),
            case.get("compiled", False),
            self.context.attend,
        )
        self.model = Whole(part.float())
        low = MixedPrecisionPolicy(DTYPES[config.train.dtype], torch.float32, cast_forward_inputs=False)
        shard = partial(fully_shard, mesh=mesh, mp_policy=low, reshard_after_forward=case.get("reshard", True))
        for module in (part.embedding, *part.layers.values(), part.head):
            shard(module)
        shard(self.model)
        self.optimizer = self._adamw()

    def _adamw(self) -> torch.optim.AdamW:
        """With its moments made now: later they would take what the activations need."""
        optim, parameters = self.config.optim, list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [one for one in parameters if one.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
        for one in parameters:
            adamw.state[one] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.processes.device),
                "exp_avg": torch.zeros_like(one),
                "exp_avg_sq": torch.zeros_like(one),
            }
        return adamw

    def step(self, tokens: Tensor, labels: Tensor, rate: float) -> tuple[float, float]:
        device, (m, length) = self.processes.device, tokens.shape
        parts = self.context.parts
        positions = cut(torch.arange(length, device=device), parts, 0)
        tokens, labels = cut(tokens, parts, 1), cut(labels, parts, 1)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for i in range(m):
            self._last(i == m - 1)
            with kernel(device):
                # Gradients are averaged over ranks, and each has its own tokens' sum.
                loss = self.model(tokens[i : i + 1], positions, labels[i : i + 1]) * self.world / (m * length)
                loss.backward()
            total += loss.detach() / self.world
        norm = self._clip()
        dist.all_reduce(total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(total), norm

    def _last(self, last: bool) -> None:
        if self.accumulate:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def _clip(self) -> float:
        """Every parameter is cut over the ranks, so their sums of squares add up. The norm before clipping."""
        shards = [one.grad.to_local() for one in self.model.parameters() if one.grad is not None]
        square = torch.stack(torch._foreach_norm(shards)).square().sum()
        dist.all_reduce(square)
        norm, limit = square.sqrt(), self.config.optim.grad_clip
        if limit is not None:
            torch._foreach_mul_(shards, (limit / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    def close(self) -> None:
        self.context.close()


def run(config: Config, case: Case, processes: Processes) -> dict[str, Any] | None:
    return measure(config, case, processes, TorchContext)
