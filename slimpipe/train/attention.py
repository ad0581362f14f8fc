"""Which attention backend a run takes: the one that is named, or with `auto` on a GPU the fastest for its shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slimpipe.kernels.attention import AttentionBackend, candidates, select_backend
from slimpipe.kernels.attention.fastest import AttentionShape, Choice, fastest, time_on_device
from slimpipe.kernels.attention.flash_package import PACKAGES, is_installed, version_of
from slimpipe.runtime.carrier import Carrier

if TYPE_CHECKING:
    from slimpipe.config import Config


def is_measured(config: Config, device: torch.device) -> bool:
    """Whether `choose_attention` measures."""
    train = config.train
    half = train.dtype == "bfloat16"
    return train.attention == "auto" and device.type == "cuda" and half and not train.deterministic


def choose_attention(
    config: Config, carrier: Carrier, group: dist.ProcessGroup | None
) -> tuple[AttentionBackend, Choice | None]:
    """The run's backend, and how it was chosen where it was measured.

    Collective over `group` where it measures: all ranks take what its first rank found, since they wait for each other.
    """
    train, device = config.train, carrier.device
    dtype: torch.dtype = getattr(torch, train.dtype)
    if not is_measured(config, device):
        return select_backend(train.attention, device, dtype, train.deterministic), None
    folder = Path(config.data.cache_dir).expanduser()
    found = candidates(device, dtype)
    choice: list[Choice] = [fastest(shape_of(config), found, versions(device), folder, time_on_device)]
    torch.cuda.empty_cache()
    if group is not None:
        dist.broadcast_object_list(choice, group=group, group_src=0, device=carrier.memory)
    return select_backend(choice[0].name, device, dtype, False), choice[0]


def shape_of(config: Config) -> AttentionShape:
    """A slice in mid-sequence."""
    model, tokens = config.model, config.data.sequence_length // config.shape.n
    past = config.shape.n // 2 * tokens
    return AttentionShape(
        config.train.micro_batch, tokens, past, model.heads, model.kv_heads, model.head_dim, config.train.dtype
    )


def versions(device: torch.device) -> dict[str, str]:
    """What a measurement is of: the device, and what runs on it."""
    found = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found | {name: version_of(name) for name in PACKAGES if is_installed(name)}
