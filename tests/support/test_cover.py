"""The cases really cover what they claim to."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.cover import OPTIONS, all_pairs, all_supported, layouts, pairs_of, pairwise

TABLES = st.lists(st.integers(1, 4), min_size=2, max_size=7).map(
    lambda sizes: {f"o{i}": list(range(size)) for i, size in enumerate(sizes)}
)


@given(TABLES)
def test_pairwise_meets_every_pair_with_few_rows(options: dict[str, list[Any]]) -> None:
    rows = pairwise(options)
    assert set().union(*map(pairs_of, rows)) == all_pairs(options)
    assert all(list(row) == list(options) for row in rows)
    most, second = sorted(map(len, options.values()))[-1:-3:-1]
    assert len(rows) <= 3 * most * second


def test_pairwise_of_one_option() -> None:
    assert pairwise({"a": [1, 2]}) == [{"a": 1}, {"a": 2}]


def test_layouts_are_the_supported_ones() -> None:
    counts = Counter((row["schedule"], row["v"]) for row in layouts())
    # slimpipe, v=2, n >= pp: 12 at one rank, 9 at two, 6 at three, 6 at four; interleaved: m divisible by pp.
    expected = {"slimpipe": 48, "1f1b": 12, "gpipe": 12}
    assert counts == {(name, 1): count for name, count in expected.items()} | {
        ("slimpipe", 2): 33,
        ("interleaved", 2): 6,
    }


def test_every_layout_runs_and_every_pair_of_values_occurs() -> None:
    cases = all_supported()
    keys = ("schedule", "pp", "v", "n", "m")
    assert [{key: getattr(case, key) for key in keys} for case in cases] == layouts()
    assert len({str(case) for case in cases}) == len(cases)

    met = set().union(*(pairs_of(vars(case)) for case in cases))
    layout_values = {key: sorted({row[key] for row in layouts()}) for key in keys}
    wanted = {pair for pair in all_pairs(layout_values | OPTIONS) if pair[1][0] in OPTIONS}
    assert wanted <= met


def test_layer_counts_fill_every_stage_and_are_uneven_where_they_say_so() -> None:
    for case in all_supported():
        stages = case.pp * case.v
        assert case.layer_count >= stages
        assert stages == 1 or (case.layer_count % stages == 0) == (case.layers == "even")
