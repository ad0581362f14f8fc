"""torch.distributed.pipelining: 1F1B, and interleaved 1F1B where `v` > 1. Keys of a case: v, recompute, compiled.

Every rank holds its stages' weights in bf16 with fp32 gradients, masters and moments (slimpipe's AdamW). The last stage
gives hidden states, and the schedule's loss function has the output layer: no logits are kept between the passes.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.jobs import Case
from benchmarks.peers.measure import measure
from benchmarks.peers.plain import Part, attend, attend_expanded
from slimpipe.config import Config
from slimpipe.parallel.gradients import GradientBuffer, clip, norm_and_loss
from slimpipe.parallel.mesh import Processes
from slimpipe.parallel.optimizer import MasterAdamW
from slimpipe.schedule import place_layers
from slimpipe.train.dtypes import DTYPES


def kernel(device: torch.device) -> AbstractContextManager[None]:
    """SDPA by cuDNN alone, as slimpipe's attention is; on a CPU whatever SDPA has there."""
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if device.type == "cuda" else nullcontext()


def takes_grouped_heads(device: torch.device) -> bool:
    """Whether SDPA's kernel takes fewer heads of keys and values than of queries."""
    q, k = (torch.randn(1, h, 256, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for h in (8, 2))
    try:
        with kernel(device):
            attend(q, k, k).sum().backward()
    except RuntimeError:
        return False
    return True


class TorchPipeline:
    def __init__(self, config: Config, case: Case, processes: Processes) -> None:
        self.config, self.processes, device = config, processes, processes.device
        self.m, self.length = case["m"], case["length"]
        p, v, dtype = processes.world, case.get("v", 1), DTYPES[config.train.dtype]
        grouped = takes_grouped_heads(device)
        self.notes: dict[str, Any] = {"attention": "SDPA" if grouped else "SDPA, keys and values repeated"}
        placement = place_layers(config.model.layers, p * v)
        hidden = torch.empty(1, self.length, config.model.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, self.length, dtype=torch.int64, device="meta")
        stages, self.parameters = [], {}
        for index in range(processes.rank, p * v, p):
            part = Part(
                config,
                placement[index],
                device,
                dtype,
                case.get("recompute", "none"),
                case.get("compiled", False),
                attend if grouped else attend_expanded,
            )
            self.parameters |= dict(part.named_parameters())
            source = tokens if index == 0 else hidden
            stages.append(PipelineStage(part, index, p * v, device, input_args=(source,), output_args=(hidden,)))
        self.gradients = GradientBuffer(self.parameters)
        self.optimizer = MasterAdamW(self.parameters, config)
        self.first, self.last = stages[0].is_first, stages[-1].is_last
        self.head = stages[-1].submod.head
        # Gradients lie in main_grad, where the schedule would not find them to scale: the loss is scaled instead.
        settings: dict[str, Any] = {"n_microbatches": self.m, "loss_fn": self._loss, "scale_grads": False}
        self.schedule = ScheduleInterleaved1F1B(stages, **settings) if v > 1 else Schedule1F1B(stages[0], **settings)
        # The last stage's output would be kept to the end of the step.
        known = "return_outputs" in inspect.signature(self.schedule.step).parameters
        self.options = {"return_outputs": False} if known else {}

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden, labels) / (self.m * self.length)

    def step(self, tokens: Tensor, labels: Tensor, rate: float) -> tuple[float, float]:
        self.gradients.zero()
        losses: list[Tensor] = []
        with kernel(self.processes.device):
            given = (tokens,) if self.first else ()
            ends = {"target": labels, "losses": losses} if self.last else {}
            self.schedule.step(*given, **ends, **self.options)
        mine = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.processes.device)
        views = self.gradients.views()
        norm, loss = norm_and_loss(views, mine, dist.group.WORLD, self.processes.carrier)
        if self.config.optim.grad_clip is not None:
            clip(self.gradients.buffer, norm, self.config.optim.grad_clip)
        self.optimizer.step(rate)
        return float(loss), float(norm)

    def close(self) -> None:
        """Nothing outlives the process group."""


def run(config: Config, case: Case, processes: Processes) -> dict[str, Any] | None:
    return measure(config, case, processes, TorchPipeline)
