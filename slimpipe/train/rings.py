"""The memory that ranks share, from a run's settings: what the exchange asks for, and bytes by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimpipe.plan.hardware import loan_bytes
from slimpipe.runtime.traffic import ring_bytes
from slimpipe.schedule import Exchange, links
from slimpipe.schedule.exchange_report import pair_bytes

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.train.planning import Planned


def exchange_need(config: Config, exchange: Exchange) -> dict[tuple[int, int], int]:
    """Bytes by (sender, receiver) that should find room at once: a layer's, of the slot that sends the most."""
    tokens = config.data.sequence_length // config.shape.n
    return pair_bytes(
        exchange, loan_bytes(config.model, tokens, config.train.micro_batch, _element(config), exchange.again)
    )


def rings_by_rank(config: Config, planned: Planned, near: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Bytes. `near`: groups of ranks that share memory; a rank in none of them, or alone in one, shares nothing."""
    if all(len(group) < 2 for group in near):
        return (0,) * config.shape.p
    tokens = config.data.sequence_length // config.shape.n * config.train.micro_batch
    size = tokens * config.model.hidden_size * _element(config)
    need = None if planned.exchange is None else exchange_need(config, planned.exchange)
    by_group = {
        rank: ring_bytes(group, links(planned.plan), size, planned.send_window, need)
        for group in near
        for rank in group
    }
    return tuple(by_group.get(rank, 0) for rank in range(config.shape.p))


def near_by_settings(config: Config) -> tuple[tuple[int, ...], ...]:
    """The groups as far as settings tell. Under `symmetric` all ranks are one: links join each stage with the next."""
    return (tuple(range(config.shape.p)),) if config.parallel.carrier == "symmetric" else ()


def _element(config: Config) -> int:
    return 2 if config.train.dtype == "bfloat16" else 4
