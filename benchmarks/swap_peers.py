"""What others move activations with, on the layers of benchmarks/swap_model.py: optional packages, each as documented.

- torchtune's `OffloadActivations` (torchtune.training): everything that autograd saves of 1 KiB and more, but what the
  last few operators saved.
- megatron-core's fine-grained activation offload: the marks that its own modules set, here around each whole layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from benchmarks.swap_model import Machine, layer_by_layer

Step = Callable[[], AbstractContextManager[Any]]
Run = Callable[[nn.Module, Tensor], Tensor]


class Missing(RuntimeError):
    """The package cannot be imported; says why."""


def torchtune(machine: Machine) -> tuple[Step, Run]:
    """What goes around a step, and what runs the layers. Raises Missing."""
    try:
        from torchtune.training import OffloadActivations
    except ImportError as error:
        raise Missing(
            f"torchtune.training does not import ({' '.join(str(error).split())[:120]}): besides torchtune it needs an "
            "old torchao and a dozen packages for data and tokenizers"
        ) from None
    offload = OffloadActivations(use_pin_memory=machine.cuda, use_streams=machine.cuda)
    return lambda: offload, layer_by_layer


def megatron(machine: Machine) -> tuple[Step, Run]:
    """As `torchtune`."""
    try:
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module
    except ImportError as error:
        raise Missing(f"megatron-core's fine-grained offload does not import ({error})") from None
    if not machine.cuda:
        raise Missing("megatron-core's fine-grained offload makes CUDA streams")
    interface = module.FineGrainedActivationOffloadingInterface
    names = inspect.signature(interface.init_chunk_handler).parameters
    known = {"vp_size": 1, "vp_stage": None, "min_offloaded_tensor_size": 1 << 20}
    # Asked for from 0.19 on: one pipeline rank, which offloads all that is marked.
    known |= {"pp_rank": 0, "delta_offload_bytes_across_pp_ranks": 0, "activation_offload_fraction": 1.0}

    def run(model: nn.Module, x: Tensor) -> Tensor:
        interface.reset()
        x = x.detach().requires_grad_()  # the marks' backwards start the copies back
        interface.init_chunk_handler(**{name: value for name, value in known.items() if name in names})
        for layer in model.children():
            with interface(True, x, "layer") as inside:
                x = layer(inside)
            x = interface.group_commit(x, name="layer")
        return x

    return nullcontext, run
