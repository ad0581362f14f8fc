"""The memory that ranks share, from a run's settings: what the exchange asks for, and bytes by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimpipe.plan.hardware import loan_bytes
from slimpipe.runtime.symmetric.collectives import Sizes
from slimpipe.runtime.traffic import ring_bytes
from slimpipe.schedule import Exchange, links
from slimpipe.schedule.exchange_report import pair_bytes
from slimpipe.train.dtypes import DTYPES

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
    size = _tokens(config) * config.model.hidden_size * _element(config)
    need = None if planned.exchange is None else exchange_need(config, planned.exchange)
    passes = pass_sizes(config) if len(near) == 1 else None
    by_group = {
        rank: ring_bytes(group, links(planned.plan), size, planned.send_window, need, passes)
        for group in near
        for rank in group
    }
    return tuple(by_group.get(rank, 0) for rank in range(config.shape.p))


def pass_sizes(config: Config) -> Sizes | None:
    """Of the vocabulary passes' tensors, where they go through shared memory if all ranks have it."""
    if not config.vocab_parallel or not config.parallel.shares_passes:
        return None
    tokens = _tokens(config)
    hidden = tokens * config.model.hidden_size
    # Statistics are three fp32 numbers a token.
    return Sizes(hidden=hidden * _element(config), wide=hidden * 4, statistics=tokens * 3 * 4)


def near_by_settings(config: Config, on_gpus: bool) -> tuple[tuple[int, ...], ...]:
    """The groups as far as settings tell. Under `symmetric` all ranks are one: links join each stage with the next.
    Under `auto` they are too, on GPUs, where it shares at all; should they then turn out to be apart, NCCL takes about
    as much."""
    shares = config.parallel.shares_memory
    return (tuple(range(config.shape.p)),) if shares == "always" or (shares == "auto" and on_gpus) else ()


def _tokens(config: Config) -> int:
    """Of one unit, over its sequences."""
    return config.data.sequence_length // config.shape.n * config.train.micro_batch


def _element(config: Config) -> int:
    return DTYPES[config.train.dtype].itemsize
