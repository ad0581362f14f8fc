"""Which carrier takes which traffic of the pipeline: symmetric memory inside a node, else the process group's backend.

Settled once, from where all ranks are, and so the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch.distributed as dist

from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.symmetric.neighbours import Site, apart, neighbourhoods, site_of
from slimpipe.schedule import Link

_NOT_ALL: Final = "some GPU of the node reaches one of them and not the other"


@dataclass(frozen=True)
class Routes:
    """`sites`: of the pipeline ranks. `symmetric`: whether memory is shared where it can be."""

    sites: tuple[Site, ...]
    symmetric: bool
    backend: str

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by neighbourhood; each its own where memory is not shared."""
        return neighbourhoods(self.sites) if self.symmetric else tuple((rank,) for rank in range(len(self.sites)))

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups if rank in group)

    def near(self, one: int, other: int) -> bool:
        """Whether two ranks' transfers go through shared memory."""
        return other in self.group_of(one)

    def describe(self, links: Sequence[Link], pairs: Iterable[tuple[int, int]], vocabulary: bool = False) -> str:
        """A line; of what shares no memory where it would if it could, why. `pairs`: (owner, helper) of the exchange.
        `vocabulary`: its passes' collectives share memory."""
        sends = self._told([(link.src, link.dst) for link in links], [str(link) for link in links])
        found = sorted({(min(pair), max(pair)) for pair in pairs})
        loans = self._told(found, [f"{one}-{other}" for one, other in found])
        parts = [f"sends {sends}" if links else "", f"exchange {loans}" if found else ""]
        parts.append("vocabulary passes symmetric memory" if vocabulary else "")
        rest = "other collectives" if vocabulary else "collectives"
        return ", ".join([*filter(None, parts), f"{rest} {self.backend}"])

    def _told(self, pairs: Sequence[tuple[int, int]], names: Sequence[str]) -> str:
        near = [name for pair, name in zip(pairs, names, strict=True) if self.near(*pair)]
        far = [name for name in names if name not in near]
        if not far:
            return "symmetric memory"
        reasons = {self._why_apart(*pair) for pair in pairs if self.symmetric and not self.near(*pair)}
        why = "; ".join(sorted(reasons))
        if not near:
            return f"{self.backend} ({why})" if why else self.backend
        return f"symmetric memory ({'; '.join(near)}) and {self.backend} ({'; '.join(far)}: {why})"

    def _why_apart(self, one: int, other: int) -> str:
        """Of two ranks that do not share memory where they would if they could."""
        return apart(self.sites[one], self.sites[other]) or _NOT_ALL


def settle(carrier: Carrier, group: dist.ProcessGroup | None, among: Iterable[tuple[int, int]]) -> Routes:
    """Collective over the pipeline's `group`. `among`: pairs of pipeline ranks that send to each other.

    Raises ValueError, on every rank alike, where `parallel.carrier` is symmetric and a pair cannot share memory.
    """
    backend = {"nccl": "NCCL", "gloo": "gloo"}[carrier.backend]
    if carrier.through_host:
        backend = "gloo through host memory"
    size = 1 if group is None else dist.get_world_size(group)
    sites: list[Site] = [site_of(carrier.device)] * size
    if group is not None and carrier.symmetric != "never":
        dist.all_gather_object(sites, sites[0], group=group)
    if carrier.symmetric == "always":
        for one, other in sorted(set(among)):
            reason = apart(sites[one], sites[other])
            if reason is None and other not in next(g for g in neighbourhoods(sites) if one in g):
                reason = _NOT_ALL
            if reason is not None:
                raise ValueError(
                    f"parallel.carrier = symmetric: ranks {one} and {other} cannot share memory: {reason}; use auto"
                )
    return Routes(tuple(sites), carrier.symmetric != "never", backend)
