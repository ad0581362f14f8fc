"""Which cases the numerics tests run: every supported layout, with the other options drawn so that all pairs occur."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

OPTIONS: dict[str, list[Any]] = {
    "kv": ["gqa", "mha"],
    "tied": [False, True],
    "mask": ["none", "ragged"],
    "recompute": ["none", "norms", "mlp", "all_but_attention", "full"],
    "qk_norm": [False, True],
    "micro_batch": [1, 2],
    "layers": ["even", "uneven"],
    "rope": ["plain", "linear", "llama3"],
}


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Every pair of (name, value) items of a row, names in the row's order."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(options: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Every pair of values of two different options."""
    return {((a, x), (b, y)) for a, b in itertools.combinations(options, 2) for x in options[a] for y in options[b]}


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows in which every pair of option values occurs: built greedily, far fewer than the product, always the same.

    Each row starts from a pair still missing and takes, option by option, the value that covers most missing pairs.
    """
    if len(options) < 2:
        return [dict.fromkeys(options, value) for values in options.values() for value in values]
    missing = all_pairs(options)
    order = {name: place for place, name in enumerate(options)}
    rows: list[Row] = []
    while missing:
        row: Row = dict(min(missing, key=lambda pair: [(order[n], options[n].index(x)) for n, x in pair]))
        for name in options:
            if name not in row:
                row[name] = max(options[name], key=lambda x: len(missing & _pairs_with(row, name, x, order)))
        rows.append({name: row[name] for name in options})
        missing -= pairs_of(rows[-1])
    return rows


def _pairs_with(row: Row, name: str, value: Any, order: Mapping[str, int]) -> set[Pair]:
    item = (name, value)
    return {(item, other) if order[name] < order[other[0]] else (other, item) for other in row.items()}


@dataclass(frozen=True)
class Case:
    """One run of the engine: a layout (pp ranks, v chunks, n slices, m microbatches) and the options drawn for it."""

    schedule: str
    pp: int
    v: int
    n: int
    m: int
    kv: str
    tied: bool
    mask: str
    recompute: str
    qk_norm: bool
    micro_batch: int
    layers: str
    rope: str
    vocab_parallel: bool = False
    """Not drawn, like those below: the tests of each run every case that can have it once more with it."""
    exchange: str = "off"
    granule: int | None = None
    keep: str = "none"

    @property
    def layer_count(self) -> int:
        """`even`: the smallest multiple of the stages from 4 up; `uneven`: the smallest odd number from 5 up that the
        stages do not divide, so that of four stages or more the first has two layers and the others have one."""
        stages = self.pp * self.v
        if self.layers == "even":
            return -(-4 // stages) * stages
        return next(layers for layers in (5, 7, 9) if layers >= stages and (layers % stages or stages == 1))

    def __str__(self) -> str:
        options = [self.kv, "tied" if self.tied else "untied", f"mask_{self.mask}", f"recompute_{self.recompute}"]
        options += ["qknorm"] * self.qk_norm + [f"mb{self.micro_batch}", f"L{self.layer_count}", f"rope_{self.rope}"]
        options += ["vocab"] * self.vocab_parallel + [f"exchange_{self.exchange}_keep_{self.keep}"] * (
            self.exchange != "off"
        )
        return f"{self.schedule}-p{self.pp}-v{self.v}-n{self.n}-m{self.m}-" + "-".join(options)


def layouts() -> list[Row]:
    """Every supported (schedule, pp, v, n, m) with pp in 1..4, v in 1..2, n in 1, 2, 4, 8 and m in 1, 2, 4."""
    rows = []
    for pp, v, n, m in itertools.product((1, 2, 3, 4), (1, 2), (1, 2, 4, 8), (1, 2, 4)):
        schedules = []
        if v == 1 or n >= pp:
            schedules.append("slimpipe")
        if v == 2 and n == 1 and m % pp == 0:
            schedules.append("interleaved")
        if v == 1 and n == 1:
            schedules += ["1f1b", "gpipe"]
        rows += [{"schedule": schedule, "pp": pp, "v": v, "n": n, "m": m} for schedule in schedules]
    return rows


@cache
def all_supported() -> tuple[Case, ...]:
    """Every layout once, with options such that every pair of values occurs: option with option, layout with option.

    Greedy: each layout takes the combination that adds most pairs not met yet, then the one whose pairs were met least.
    """
    combinations = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    numbers: dict[Pair, int] = {}

    def numbered(pairs: Iterable[Pair]) -> list[int]:
        return [numbers.setdefault(pair, len(numbers)) for pair in pairs]

    within = np.array([numbered(itertools.combinations(combination.items(), 2)) for combination in combinations])
    across = {
        item: np.array([numbered((item, other) for other in combination.items()) for combination in combinations])
        for item in {item for layout in layouts() for item in layout.items()}
    }
    met = np.zeros(len(numbers), dtype=int)
    cases = []
    for layout in layouts():
        pairs = np.hstack([within, *(across[item] for item in layout.items())])
        counts = met[pairs]  # [combinations, pairs of each]
        new, rare = (counts == 0).sum(1), (1 / (1 + counts)).sum(1)
        best = int(np.lexsort((-rare.round(9), -new))[0])
        met[pairs[best]] += 1
        cases.append(Case(**layout, **combinations[best]))
    return tuple(cases)


def options_of(cases: Iterable[Case]) -> Mapping[str, Sequence[Any]]:
    """The values that occur for each field of the cases."""
    rows = [vars(case) for case in cases]
    return {name: sorted({row[name] for row in rows}, key=str) for name in rows[0]}
