"""What moves tensors between the pipeline's ranks, put together from a run's settings and its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.collectives import Collectives
from slimpipe.runtime.exchange import ExchangeTraffic
from slimpipe.runtime.routes import settle
from slimpipe.runtime.symmetric.collectives import Sizes
from slimpipe.runtime.traffic import Traffic
from slimpipe.runtime.transport import Transport
from slimpipe.schedule import links
from slimpipe.train.rings import exchange_need, pass_sizes

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.train.planning import Planned


class BetweenRanks:
    """Of one rank; `group` None for a run of one. Its calls, the making of it too, are collective over all processes.

    Raises ValueError where `parallel.carrier` names one that cannot carry.
    """

    def __init__(
        self, config: Config, planned: Planned, carrier: Carrier, group: dist.ProcessGroup | None, rank: int
    ) -> None:
        self._config, self._planned, self._group = config, planned, group
        self._links = links(planned.plan)
        exchange = planned.exchange
        self._lenders = [] if exchange is None else [(loan.owner, loan.helper) for loan in exchange.loans]
        self.routes = settle(carrier, group, [*((link.src, link.dst) for link in self._links), *self._lenders])
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._traffic = Traffic(self.routes, rank, ranks, carrier)

    def transport(self, dtype: torch.dtype) -> Transport:
        """For hidden states of one slice and their gradients."""
        config = self._config
        size = (
            config.train.micro_batch,
            config.data.sequence_length // config.shape.n,
            config.model.hidden_size,
        )
        return self._traffic.transport(self._links, size, dtype, self._planned.send_window)

    def exchange(self) -> ExchangeTraffic:
        """For the plan's loans."""
        assert self._planned.exchange is not None
        return self._traffic.exchange(exchange_need(self._config, self._planned.exchange))

    def collectives(self) -> Collectives:
        """For the vocabulary passes."""
        return self._traffic.collectives(self._pass_sizes)

    @property
    def _pass_sizes(self) -> Sizes | None:
        """None where not all ranks share memory, or are not to."""
        return pass_sizes(self._config) if len(self.routes.groups) == 1 and self._group is not None else None

    @property
    def carriers(self) -> str | None:
        """What moves what, in words; None for a run of one rank."""
        if self._group is None:
            return None
        return self.routes.describe(self._links, self._lenders, self._pass_sizes is not None)

    @property
    def shared_bytes(self) -> int:
        """Memory that other ranks read, beside what torch's allocator counts."""
        return self._traffic.shared_bytes

    def waits(self) -> str | None:
        """For whom the device waits in memory that ranks share, for the watchdog; None where it does not."""
        return self._traffic.waits()
