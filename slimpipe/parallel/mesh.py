"""Process group and device mesh: pp outermost, then dp, cp, tp."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slimpipe.parallel.attempt import fresh_store
from slimpipe.runtime.carrier import Carrier, most_thread_blocks

if TYPE_CHECKING:
    from slimpipe.config import Config


@dataclass(frozen=True)
class Processes:
    """Where this process stands. `store` is None where there is one process and no process group."""

    rank: int
    world: int
    carrier: Carrier
    store: dist.Store | None

    @property
    def device(self) -> torch.device:
        return self.carrier.device


def pick_device(name: str, local_rank: int, key: str = "train.device", shared: bool = False) -> torch.device:
    """`auto` takes this process's GPU where there is one; `shared`: processes beyond the last GPU start over.

    Raises ValueError, naming `key`, where it is missing.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{key} = {name}: must be auto, cpu or cuda")
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ValueError(f"{key} = cuda: no GPU found; use cpu")
    found = torch.cuda.device_count()
    if local_rank >= found and not shared:
        raise ValueError(
            f"{key} = {name}: process {local_rank} of this node has no GPU of its own ({found} found); start fewer "
            "processes a node, or set parallel.carrier: host to share them"
        )
    return torch.device("cuda", local_rank % found)


def pick_carrier(config: Config, local_rank: int) -> Carrier:
    """The process's device, and what moves tensors to others'. Raises ValueError, naming the key, for what is not
    there."""
    through_host = config.parallel.carrier == "host"
    device = pick_device(config.train.device, local_rank, shared=through_host)
    for key in ("carrier", "collectives"):
        named = getattr(config.parallel, key)
        if named in ("nccl", "symmetric") and device.type == "cpu":
            raise ValueError(f"parallel.{key} = {named}: moves the memory of GPUs, and this runs on a CPU; use auto")
    shares = config.parallel.shares_memory if device.type == "cuda" else "never"
    return Carrier(device, through_host and device.type == "cuda", _thread_blocks(config, device), shares)


def _thread_blocks(config: Config, device: torch.device) -> int | None:
    """Of `Carrier.ctas`."""
    if config.parallel.nccl_ctas is not None or device.type != "cuda":
        return config.parallel.nccl_ctas
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    shape, loans = config.shape, config.pipeline.exchange != "off"
    return most_thread_blocks(processors, shape.p, shape.v, config.vocab_parallel, loans)


def prepare_process(config: Config) -> None:
    """Sets what must be set before this process first uses a GPU."""
    # Enough hardware queues that no communicator's kernel waits behind another's (docs/architecture.md).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if config.parallel.shares_memory != "never":
        os.environ.setdefault("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "32")  # nor a copy engine's work
        # Memory is shared rank by rank: NVLink multicast is not even set up.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # Each link has a group of its own, so that torch's serialising of a group's transfers is what is wanted.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if torch.cuda.is_available():
        # The merge has a specialisation for each number of parts, and an exchange over many ranks has many.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Every buffer here is written before it is read: filling it with NaN first would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def start_processes(config: Config) -> Processes:
    """Joins the job that torchrun describes in the environment; alone if there is none.

    Collective operations wait at most twice the watchdog's time and at least a minute: the watchdog speaks first, and a
    short one does not cut the start-up short.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    carrier = pick_carrier(config, int(os.environ.get("LOCAL_RANK", "0")))
    if carrier.device.type == "cuda":
        torch.cuda.set_device(carrier.device)
    if world == 1:
        return Processes(0, 1, carrier, None)
    shared, rank, world = next(dist.rendezvous("env://"))
    store = fresh_store(shared, rank, world)
    dist.init_process_group(
        carrier.backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=max(60.0, 2 * config.train.watchdog_seconds)),
    )
    return Processes(rank, world, carrier, store)


def build_mesh(config: Config, carrier: Carrier) -> DeviceMesh | None:
    """Mesh with dimensions pp, dp, cp, tp over the default process group; None without one.

    Its device type is that of the memory that its groups carry.
    """
    if not dist.is_initialized():
        return None
    parallel = config.parallel
    sizes = (parallel.pp, parallel.dp, parallel.cp, parallel.tp)
    return init_device_mesh(carrier.memory.type, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
