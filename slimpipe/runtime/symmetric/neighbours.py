"""Which ranks can share memory: those on one host whose GPUs reach each other's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

MOST_NAME: Final = 107
"""Bytes of a Unix socket's name."""


@dataclass(frozen=True)
class Site:
    """Where a rank is. `gpu`: its GPU's UUID; `reach`: UUIDs of the GPUs whose memory its own GPU can read and write.
    `lacks`: why it can share no memory at all, or None. `namespaces`: what of the host the process sees. `sockets`: the
    folder of the sockets through which torch hands memory over."""

    host: str
    gpu: str
    reach: frozenset[str]
    lacks: str | None = None
    namespaces: str = ""
    sockets: str = ""


def site_of(device: torch.device) -> Site:
    """This process's."""
    host = _read("/proc/sys/kernel/random/boot_id")
    if device.type != "cuda":
        return Site(host, str(device), frozenset(), "it computes on a CPU")
    own = device.index if device.index is not None else torch.cuda.current_device()
    gpus = {index: str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())}
    reach = frozenset(
        uuid for index, uuid in gpus.items() if index != own and torch.cuda.can_device_access_peer(own, index)
    )
    namespaces = "/".join(_namespace(kind) for kind in ("pid", "net", "mnt"))
    return Site(host, gpus[own], reach, _lacks(), namespaces, _sockets())


def _sockets() -> str:
    return next((os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp")


def _lacks() -> str | None:
    from slimpipe.runtime.symmetric.cuda import Driver

    try:
        Driver()
    except (OSError, AttributeError) as error:
        return f"its CUDA driver has no stream memory operations ({error})"
    if not hasattr(torch._C._distributed_c10d, "_SymmetricMemory"):
        return "its torch was built without symmetric memory"
    folder = _sockets()
    # torch copies the socket's name into the address without looking whether it fits.
    if len(os.fsencode(f"{folder}/symm_mem-{os.getpid()}")) > MOST_NAME:
        return f"TMPDIR = {folder} is too long for torch's sockets"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"TMPDIR = {folder} cannot be written to, where torch has its sockets"
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return os.uname().nodename


def _namespace(kind: str) -> str:
    """Memory is handed over through a socket and a process number: both must mean the same to both ranks."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def apart(one: Site, other: Site) -> str | None:
    """Why two ranks cannot share memory; None where they can."""
    if one.lacks or other.lacks:
        return one.lacks or other.lacks
    if one.host != other.host:
        return "they are on different hosts"
    if one.namespaces != other.namespaces:
        return "they are in different containers"
    if one.sockets != other.sockets:
        return f"their TMPDIRs differ ({one.sockets}, {other.sockets}), where torch has its sockets"
    if one.gpu == other.gpu:
        return "they share a GPU"
    if other.gpu not in one.reach or one.gpu not in other.reach:
        return "their GPUs have no access to each other's memory, or cannot see each other"
    return None


def neighbourhoods(sites: Sequence[Site]) -> tuple[tuple[int, ...], ...]:
    """Ranks in groups, within which all can share memory with all; each joins the first that takes it."""
    groups: list[list[int]] = []
    for rank, site in enumerate(sites):
        for group in groups:
            if all(apart(site, sites[member]) is None for member in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(map(tuple, groups))
