"""Published closed forms: bubble and peak activation under equal costs.

Bubble: SlimPipe paper (arXiv 2504.14519), table of schemes. Peak activation: its Eq. 1 for slimpipe and the same
table for the others, in units of M_a, the activations of one microbatch over all layers, K and V included. The papers
assume enough microbatches; where there are fewer, a rank holds what there is, m M_a / p.
"""

from __future__ import annotations

from fractions import Fraction

from slimpipe.schedule.orders import supported
from slimpipe.schedule.plan import PlanError, Shape


def bubble_fraction(name: str, shape: Shape) -> Fraction:
    """Idle share of all rank time: (p-1) / (units a rank + p-1).

    gpipe, 1f1b: (p-1)/(m+p-1). interleaved: (p-1)/(v m+p-1). slimpipe: (p-1)/(m n v+p-1). They are one formula, as
    n = 1, and v = 1 in the first two. Holds for any ratio of backward to forward.
    """
    _refuse_unsupported(name, shape)
    return Fraction(shape.p - 1, shape.units + shape.p - 1)


def peak_activation(name: str, shape: Shape) -> Fraction:
    """Peak activation on the worst rank, in M_a.

    gpipe: m/p. 1f1b: 1. interleaved: 1 + (p-1)/(p v). slimpipe: (1 + 2(p-1)/(n v)) / p (Eq. 1). At most m/p.
    """
    _refuse_unsupported(name, shape)
    p, v, n, m = shape.p, shape.v, shape.n, shape.m
    everything = Fraction(m, p)
    if name == "gpipe":
        return everything
    if name == "1f1b":
        return min(Fraction(1), everything)
    if name == "interleaved":
        return min(1 + Fraction(p - 1, p * v), everything)
    return min((1 + Fraction(2 * (p - 1), n * v)) / p, everything)


def _refuse_unsupported(name: str, shape: Shape) -> None:
    reason = supported(name, shape)
    if reason is not None:
        raise PlanError(reason)
