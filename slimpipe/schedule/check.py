"""The checker: proves a plan sound before a rank acts on it (docs/architecture.md, "The schedule is data").

Each question has a file of its own under `proofs`, and each may rely on those before it:

1. `proofs.units`      each unit forward once, then backward once (an evaluation's: forward once alone)
2. `proofs.order`      slices of a microbatch forward ascending and backward descending, or gradients are wrong
3. `proofs.vocabulary` vocabulary passes once on every rank, their collectives in one order (plans that have them)
4. `proofs.exchange`   every token of every past attended to once, by its owner or one helper (plans that exchange)
5. `proofs.transfers`  sends and receives match one to one, in one order on each link (lowered plans)
6. `proofs.swap`       each unit stays, or goes to the host and comes back in time; memory as stated (plans that swap)
7. `proofs.progress`   no deadlock where receives, collectives and helpers block
8. `proofs.slots`      every past is exactly the slots of the earlier slices, no slot used twice
"""

from __future__ import annotations

from dataclasses import dataclass

from slimpipe.schedule.action import Op
from slimpipe.schedule.in_flight import peak_held, peak_kept
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.proofs.exchange import prove_exchange
from slimpipe.schedule.proofs.order import prove_slice_order
from slimpipe.schedule.proofs.progress import prove_progress
from slimpipe.schedule.proofs.slots import prove_kv_slots
from slimpipe.schedule.proofs.swap import prove_swap
from slimpipe.schedule.proofs.transfers import prove_transfers
from slimpipe.schedule.proofs.units import prove_units
from slimpipe.schedule.proofs.vocabulary import prove_vocabulary
from slimpipe.schedule.swap import Swap


@dataclass(frozen=True)
class Peaks:
    """What a sound plan holds at most: units in flight by rank, KV slots by rank and chunk, logits shards by rank.

    A logits shard is a slice's, from its S to its T or L; there are none without vocabulary passes. An evaluation keeps
    no activations: its units are those whose keys and values are kept (`in_flight.peak_kept`).
    """

    units: tuple[int, ...]
    kv_slots: tuple[tuple[int, ...], ...]
    logits: tuple[int, ...]


def check(plan: Plan, exchange: Exchange | None = None, forward_only: bool = False, swap: Swap | None = None) -> Peaks:
    """Prove the plan sound, with or without transfer actions, and return what it holds at most.

    `exchange`: of a plan that has passed `add_exchange`; `swap`: `add_swap`. `forward_only`: it is an evaluation's.
    Raises PlanError with the first offending action, its rank and index, what was expected, and its place in the grid.
    """
    if len(plan.ranks) != plan.shape.p:
        raise PlanError(f"{plan.name}: lists for {len(plan.ranks)} ranks, but p = {plan.shape.p}")
    prove_units(plan, forward_only)
    prove_slice_order(plan)
    if plan.has_vocabulary:
        prove_vocabulary(plan, forward_only)
    if exchange is not None:
        prove_exchange(plan, exchange)
    if plan.is_lowered:
        prove_transfers(plan)
    if plan.has_swap or swap is not None:
        prove_swap(plan, swap)
    prove_progress(plan, exchange)
    kv_slots = prove_kv_slots(plan)
    return Peaks(
        units=tuple(peak_kept(plan.shape, actions) for actions in plan.ranks),
        kv_slots=kv_slots,
        logits=tuple(
            peak_held(actions, Op.STATISTICS, Op.LOSS if forward_only else Op.GRADIENT) for actions in plan.ranks
        ),
    )
