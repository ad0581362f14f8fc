"""Vocabulary passes: their places, their proofs, their replay under NCCL's rules, and what they cost on paper."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.schedule import (
    Action,
    Collective,
    Costs,
    Flow,
    LinkCost,
    Op,
    Plan,
    PlanError,
    Rule,
    Shape,
    Span,
    Unit,
    VocabularyCosts,
    add_vocabulary,
    build,
    check,
    draw_svg,
    equal_costs,
    from_csv,
    grid,
    least_send_window,
    lower,
    output_layer_costs,
    peak_held,
    replay_in_order,
    simulate,
    sliced_costs,
    to_csv,
)
from slimpipe.schedule.balance import balance
from slimpipe.schedule.collectives import awaited_by, chunk_of, passes_of, posted_by
from slimpipe.schedule.exchange import add_exchange
from slimpipe.schedule.in_phase import slot_spans
from slimpipe.schedule.loans import Mode
from slimpipe.schedule.meetings import Meetings
from slimpipe.schedule.orders.slimpipe import slice_group
from slimpipe.schedule.simulate import base_rules
from slimpipe.schedule.slack import halfway, latest
from slimpipe.schedule.slots import slots_of
from slimpipe.schedule.transfers import input_of, output_of
from slimpipe.schedule.wire import Wires
from slimpipe.schedule.work import sliced_work
from tests.schedule.shapes import Case, cases, slimpipe_shapes, supported_cases
from tests.schedule.test_check import Tokens, after, drop, edited, move, refused, replaced, swap

SHAPE = Shape(p=3, v=2, n=6, m=2)


@pytest.fixture(scope="module")
def sound() -> Plan:
    return add_vocabulary(build("slimpipe", SHAPE))


@pytest.fixture(scope="module")
def lowered(sound: Plan) -> Plan:
    return lower(sound)


def tokens(plan: Plan, rank: int) -> str:
    return " ".join(str(action).partition("@")[0] for action in plan.ranks[rank])


# ---- places ----


def test_by_hand() -> None:
    """p = 2, three slices. S and T of slices 0 and 1 fill the wait for those of slice 2, whose B follows at once."""
    plan = add_vocabulary(build("slimpipe", Shape(p=2, n=3, m=1)))
    assert tokens(plan, 1) == (
        "E0.0 E0.1 E0.2 F0.0 H0.0 F0.1 H0.1 F0.2 H0.2 S0.0 T0.0 S0.1 T0.1 S0.2 T0.2 B0.2 B0.1 G0.2 B0.0 G0.1 G0.0 "
        "D0.2 D0.1 D0.0"
    )
    assert tokens(plan, 0) == (
        "E0.0 E0.1 E0.2 F0.0 F0.1 H0.0 F0.2 H0.1 H0.2 S0.0 T0.0 S0.1 T0.1 S0.2 T0.2 B0.2 G0.2 B0.1 G0.1 B0.0 G0.0 "
        "D0.2 D0.1 D0.0"
    )


def test_one_slice_waits_every_time() -> None:
    plan = add_vocabulary(build("1f1b", Shape(p=2, m=2)))
    assert tokens(plan, 1) == "E0.0 E1.0 F0.0 H0.0 S0.0 T0.0 B0.0 F1.0 H1.0 S1.0 T1.0 B1.0 G0.0 G1.0 D0.0 D1.0"


@given(supported_cases())
def test_places_on_the_leading_ranks(case: Case) -> None:
    """As the module's docstring has them, counted in forwards and backwards."""
    plan = build(*case)
    if plan.shape.p == 1:
        return
    done: list[dict[Action, int]] = []
    passes = add_vocabulary(plan)
    for actions in (passes.ranks[0], passes.ranks[-1]):
        counts: dict[Action, int] = {}
        for action in actions:
            counts[action] = sum(a.op.is_compute for a in counts)
        done.append(counts)
    first, last = done
    order = [action.unit for action in passes.ranks[-1] if action.op is Op.STATISTICS]
    for microbatch in range(plan.shape.m):
        for slice_ in range(plan.shape.n):
            unit = Unit(microbatch, slice_, plan.shape.v - 1)
            f, d = last[Action(Op.FORWARD, unit)], last[Action(Op.BACKWARD, unit)]
            h, s, t = (last[Action(op, unit)] for op in (Op.HIDDEN, Op.STATISTICS, Op.GRADIENT))
            latest = d if d - f <= 2 else d - 1
            follower = order.index(unit) + 1
            next_s = last[Action(Op.STATISTICS, order[follower])] if follower < len(order) else latest
            assert (h, s, t) == (f + 1, min(f + 3, latest), min(s + 2, latest, next_s))
            unit = Unit(microbatch, slice_, 0)
            f, d = first[Action(Op.FORWARD, unit)], first[Action(Op.BACKWARD, unit)]
            e, g, back = (first[Action(op, unit)] for op in (Op.EMBED, Op.EMBED_GRAD_OUT, Op.EMBED_GRAD))
            assert (e, g, back) == (max(0, f - 3), d + 1, min(d + 5, 2 * plan.shape.units))


def sound_everywhere(name: str, shape: Shape, costs: Costs | None = None) -> None:
    """Proved, replayed, and within the bounds that the runtime and the memory model rest on."""
    bare = build(name, shape)
    plan = add_vocabulary(bare, costs)
    low = lower(plan)
    peaks = check(low)
    assert peaks.logits == (1,) * shape.p
    assert (peaks.units, peaks.kv_slots) == (check(bare).units, check(bare).kv_slots)
    slices = shape.m * shape.n
    assert replay_in_order(low, send_window=2).collectives == {"output": 3 * slices, "embedding": 2 * slices}
    for rank, actions in enumerate(low.ranks):
        assert low.compute(rank) == bare.ranks[rank]
        assert peak_held(actions, Op.HIDDEN, Op.GRADIENT) <= 4
        assert peak_held(actions, Op.EMBED_GRAD_OUT, Op.EMBED_GRAD) <= 5
    assert peak_held(low.ranks[0], Op.EMBED, Op.FORWARD) <= 4
    assert peak_held(low.ranks[-1], Op.GRADIENT, Op.BACKWARD) <= peaks.units[-1]


def needs_wide_window(shape: Shape) -> bool:
    """tests/schedule/test_in_order.py: such a group waits in send buffers, with or without passes."""
    return shape.v > 1 and slice_group(shape) - shape.p > 2


def test_every_shape_is_sound() -> None:
    shapes = [
        *cases([2, 3, 4, 8], [1, 2, 3], [1, 2, 3, 4, 6, 8, 16], [1, 3], ["slimpipe"]),
        *cases([5, 6, 7], [1, 2], [7, 12], [2], ["slimpipe"]),
        *cases([2, 3, 8], [1, 2], [1], [1, 3, 8], ["gpipe", "1f1b", "interleaved"]),
    ]
    shapes = [(name, shape) for name, shape in shapes if not needs_wide_window(shape)]
    assert len(shapes) > 110
    for name, shape in shapes:
        sound_everywhere(name, shape)


@settings(max_examples=40)
@given(slimpipe_shapes(p=6, n=12, m=4), st.floats(0.0, 1.0), st.randoms(use_true_random=False))
def test_any_costs_give_a_sound_plan(shape: Shape, share: float, rng: random.Random) -> None:
    """Right costs, or nonsense: places move, soundness does not depend on them."""
    if shape.p == 1 or needs_wide_window(shape):
        return
    sound_everywhere("slimpipe", shape, sliced_costs(shape.n, share))
    table: dict[tuple[str, int, Unit], float] = {}

    def nonsense(op: str) -> Callable[[int, Unit], float]:
        return lambda stage, unit: table.setdefault((op, stage, unit), rng.uniform(0.01, 10.0))

    sound_everywhere("slimpipe", shape, Costs(nonsense("F"), nonsense("B")))


def test_passes_need_no_wider_send_window() -> None:
    for _, shape in cases([2, 3], [2], [3, 5, 6, 7], [1, 2], ["slimpipe"]):
        plan = build("slimpipe", shape)
        assert least_send_window(lower(add_vocabulary(plan))) == least_send_window(lower(plan))


@given(supported_cases(), st.integers(0, 3))
def test_lowering_counts_forwards_and_backwards_alone(case: Case, lookahead: int) -> None:
    """Without their passes the lists are those of the plain plan: only what stands between two computes is put after
    the receives and sends there."""
    plan = build(*case)
    if plan.shape.p == 1:
        return
    low = lower(add_vocabulary(plan), lookahead)
    assert check(low).logits == (1,) * plan.shape.p
    plain = lower(plan, lookahead)
    for rank, actions in enumerate(low.ranks):
        assert tuple(action for action in actions if not action.op.is_vocabulary) == plain.ranks[rank]
        for before, action in zip(actions, actions[1:], strict=False):
            assert not (before.op.is_vocabulary and action.op.is_transfer)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: add_vocabulary(build("slimpipe", Shape(1, 1, 2, 1))), "parallel.pp >= 2"),
        (lambda: add_vocabulary(lower(build("slimpipe", SHAPE))), "has sends and receives already"),
        (lambda: add_vocabulary(add_vocabulary(build("slimpipe", SHAPE))), "has vocabulary passes already"),
        (lambda: add_vocabulary(build("slimpipe", SHAPE), equal_costs(0.0, 1.0)), "must be above 0"),
        (lambda: replay_in_order(lower(build("1f1b", Shape(2))), reduce_window=0), "reduce_window = 0"),
        (lambda: VocabularyCosts(gradient=-1.0), "must be >= 0"),
    ],
)
def test_refusals(call: Callable[[], object], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        call()


# ---- moments ----


@given(supported_cases(), st.integers(1, 5), st.integers(1, 5))
def test_latest_times(case: Case, forward: int, backward: int) -> None:
    """Every action ends right where the next of its rank, or its output's consumer, or the step's end needs it to, and
    no earlier; it starts no earlier than in the simulation."""
    plan = build(*case)
    costs = equal_costs(forward, backward)
    earliest = simulate(plan, costs)
    late = latest(plan, earliest)
    consumer = {
        input_of(plan.shape, rank, span.action): span.start for rank, spans in enumerate(late) for span in spans
    }
    for rank, spans in enumerate(late):
        assert [span.action for span in spans] == list(plan.ranks[rank])
        following = [span.start for span in spans[1:]] + [earliest.makespan]
        for span, early, next_start in zip(spans, earliest.spans[rank], following, strict=True):
            made = output_of(plan.shape, rank, span.action)
            assert span.end == min(next_start, consumer[made] if made else next_start)
            assert span.end - span.start == early.end - early.start
            assert span.start >= early.start
    assert min(span.start for spans in late for span in spans) == 0


@given(supported_cases(), st.integers(1, 5), st.integers(1, 5))
def test_halfway_breaks_no_rule(case: Case, forward: int, backward: int) -> None:
    plan = build(*case)
    costs = equal_costs(forward, backward)
    earliest = simulate(plan, costs)
    made_at = {}
    middle = halfway(earliest.spans, latest(plan, earliest))
    for rank, spans in enumerate(middle):
        for span in spans:
            made_at[output_of(plan.shape, rank, span.action)] = span.end
    for rank, spans in enumerate(middle):
        before = 0.0
        for span, early in zip(spans, earliest.spans[rank], strict=True):
            needs = input_of(plan.shape, rank, span.action)
            assert span.start >= max(before, made_at[needs] if needs else 0.0, early.start)
            before = span.end
        assert before <= earliest.makespan


def test_in_phase_or_not() -> None:
    """slimpipe in its slots: when one rank is in a forward, none is in a backward. As early as can be, many are."""
    plan = build("slimpipe", Shape(p=4, n=8, m=3))

    def out_of_phase(spans: Sequence[Sequence[Span]]) -> int:
        forwards, backwards = (
            [span for row in spans for span in row if span.action.op is op] for op in (Op.FORWARD, Op.BACKWARD)
        )
        return sum(f.start < b.end and b.start < f.end for f in forwards for b in backwards)

    assert out_of_phase(slot_spans(plan, slots_of(plan))) == 0
    assert out_of_phase(simulate(plan, equal_costs()).spans) > 50


class InSlots(Rule):
    """All ranks that have something to run in a slot meet there, as exchange can make them."""

    def __init__(self, rule: Rule, plan: Plan) -> None:
        self._rule, self._slots = rule, slots_of(plan)

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        flow.post(("arrived", self._slots.slot_of(rank, action), rank), time)

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[object]:
        slot = self._slots.slot_of(rank, action)
        others = [other for other in range(flow.plan.shape.p) if self._slots.unit(slot, other) is not None]
        return [*(("arrived", slot, other) for other in others), *self._rule.needs(flow, rank, action)]

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float | None:
        return self._rule.run(flow, rank, action, start)


def meet_in_slots(plan: Plan) -> list[object]:
    """Who is stuck where all ranks of a slot wait for each other, besides all else."""
    rules = base_rules(plan, equal_costs(), Wires(None), Meetings(plan.shape.p, None))
    rules |= {op: InSlots(rules[op], plan) for op in (Op.FORWARD, Op.BACKWARD)}
    return list(Flow(plan, rules).run())


def test_passes_in_phase_do_not_cross_meetings_in_slots() -> None:
    """Whatever loans there are, they cannot make a circle with passes that stand between slots; others can."""
    for _, shape in cases([2, 3, 4], [1, 2], [1, 3, 4, 8], [1, 3], ["slimpipe"]):
        assert not meet_in_slots(add_vocabulary(build("slimpipe", shape)))
    plan = build("slimpipe", Shape(4, 1, 8, 3))
    costs = sliced_costs(8, 0.8)
    assert meet_in_slots(add_vocabulary(plan, costs))
    assert not meet_in_slots(add_vocabulary(plan, costs, slots_of(plan)))


@pytest.mark.parametrize("mode", ["pairwise", "balanced"])
def test_passes_go_with_exchange(mode: Mode) -> None:
    """Ranks bound by loans, and helpers with nothing else to run: proved, and replayed with the loans' transfers."""
    helped = 0
    for _, shape in cases([2, 3, 4], [1, 2], [1, 4, 8], [1, 3], ["slimpipe"]):
        bare = build("slimpipe", shape)
        exchange = balance(bare, mode, sliced_work(shape.n, 0.8, 4), 1, 4)
        plan = lower(add_vocabulary(add_exchange(bare, exchange)), lookahead=0)
        assert check(plan, exchange).logits == (1,) * shape.p
        replay_in_order(plan, send_window=4, exchange=exchange)
        helped += plan.has_help
    assert (helped > 0) == (mode == "balanced")


def test_places_are_chosen_by_costs() -> None:
    """Even costs: in phase. Attention by slice: elsewhere, and the step is shorter than with places in phase."""
    plan = build("slimpipe", Shape(8, 1, 16, 4))
    assert add_vocabulary(plan, equal_costs()) == add_vocabulary(plan)
    costs = sliced_costs(16, 0.6)
    chosen, in_phase = add_vocabulary(plan, costs), add_vocabulary(plan)
    assert simulate(chosen, costs).makespan < 0.98 * simulate(in_phase, costs).makespan


# ---- the proof ----


def exchange(*pairs: tuple[str, str]) -> Callable[[Tokens], None]:
    """Swap several pairs of tokens."""

    def edit(tokens: Tokens) -> None:
        for pair in pairs:
            swap(*pair)(tokens)

    return edit


MUTATIONS = {
    "two slices' S and T swapped": (
        1,
        exchange(("S0.1@1", "S0.2@1"), ("T0.1@1", "T0.2@1")),
        "S0.2@1",
        "communicator output in different orders",
    ),
    "H swapped": (0, swap("H0.4@1", "H0.5@1"), "H0.5@1", "communicator output in different orders"),
    "E swapped": (2, swap("E0.1@0", "E0.2@0"), "E0.2@0", "communicator embedding in different orders"),
    "G swapped on a follower": (1, swap("G0.5@0", "G0.4@0"), "G0.4@0", "communicator embedding in different orders"),
    "S before H": (1, swap("S0.3@1", "H0.3@1"), "S0.3@1", "expected H0.3@1 before it"),
    "T before S": (1, swap("S0.3@1", "T0.3@1"), "T0.3@1", "expected S0.3@1 before it"),
    "H before F": (2, swap("H0.3@1", "F0.3@1"), "H0.3@1", "expected F0.3@1 before it"),
    "T after B": (2, move("T0.5@1", "B0.5@1"), "B0.5@1", "expected T0.5@1 before it"),
    "E after F": (0, move("E0.1@0", "F0.1@0"), "F0.1@0", "expected E0.1@0 before it"),
    "D before G": (1, swap("D0.2@0", "G0.2@0"), "D0.2@0", "expected G0.2@0 before it"),
    "G before B": (0, swap("G0.2@0", "B0.2@0"), "G0.2@0", "expected B0.2@0 before it"),
    "T missing on a follower": (0, drop("T1.2@1"), "end of list", "T1.2@1 is missing"),
    "T missing on the last rank": (2, drop("T1.2@1"), "B1.2@1", "expected T1.2@1 before it"),
    "S missing": (1, drop("S0.0@1"), "T0.0@1", "expected S0.0@1 before it"),
    "H missing": (1, drop("H0.0@1"), "S0.0@1", "expected H0.0@1 before it"),
    "E missing": (2, drop("E0.0@0"), "end of list", "E0.0@0 is missing"),
    "E missing on rank 0": (0, drop("E0.0@0"), "F0.0@0", "expected E0.0@0 before it"),
    "G missing": (2, drop("G1.0@0"), "D1.0@0", "expected G1.0@0 before it"),
    "D missing": (2, drop("D1.0@0"), "end of list", "D1.0@0 is missing"),
    "S twice": (0, after("S0.1@1", "S0.1@1"), "S0.1@1", "expected each pass once"),
    "D twice": (0, after("D0.1@0", "D0.1@0"), "D0.1@0", "expected each pass once"),
    "chunk of the embedding": (1, replaced("E0.1@0", "E0.1@1"), "E0.1@1", "expected chunk 0 in E"),
    "chunk of the output layer": (1, replaced("T0.1@1", "T0.1@0"), "T0.1@0", "expected chunk 1 in T"),
    "a slice too many": (1, replaced("E0.5@0", "E0.6@0"), "E0.6@0", "outside the shape"),
}


@pytest.mark.parametrize("what", MUTATIONS)
@pytest.mark.parametrize("with_transfers", [False, True])
def test_broken_passes_are_refused(sound: Plan, lowered: Plan, what: str, with_transfers: bool) -> None:
    rank, edit, token, why = MUTATIONS[what]
    refused(edited(lowered if with_transfers else sound, rank, edit), rank, token, why)


def test_deadlock_through_a_pass_is_refused() -> None:
    """Rank 1 waits in S for an output that only its own next forward lets the last rank make."""
    plan = lower(add_vocabulary(build("slimpipe", Shape(p=3, n=4, m=1))))
    broken = edited(edited(plan, 1, move("F0.3@0", "S0.3@0")), 1, move("SF0.3@0>2", "F0.3@0"))
    for find, phrase in ((check, "deadlock: "), (replay_in_order, "deadlock in order of posting")):
        with pytest.raises(PlanError) as error:
            find(broken)
        assert phrase in str(error.value)
        assert re.search(r"rank 1 at action \d+ \([ST]0.\d@0\)", str(error.value))
        assert re.search(r"rank 2 at action \d+ \(F0.3@0\)", str(error.value))
    with pytest.raises(PlanError, match="deadlock"):
        simulate(broken, equal_costs())


def test_a_deadlock_names_who_has_not_posted() -> None:
    plan = edited(add_vocabulary(build("slimpipe", Shape(p=2, n=3, m=1))), 0, move("F0.2@0", "S0.2@0"))
    with pytest.raises(PlanError) as error:
        check(plan)
    assert "rank 0 at action 9 (T0.0@0) waits for rank 1, action 9 (S0.0@0)" in str(error.value)
    assert "rank 1 at action 7 (F0.2@0) waits for rank 0, action 13 (F0.2@0)" in str(error.value)


@given(slimpipe_shapes(p=5, v=2, n=6, m=3), st.randoms(use_true_random=False))
def test_a_lost_or_doubled_pass_is_refused(shape: Shape, rng: random.Random) -> None:
    if shape.p == 1:
        return
    plan = lower(add_vocabulary(build("slimpipe", shape)))
    rank = rng.randrange(shape.p)
    index = rng.choice([index for index, action in enumerate(plan.ranks[rank]) if action.op.is_vocabulary])
    for edit in (lambda tokens: tokens.pop(index), lambda tokens: tokens.insert(index, tokens[index])):
        with pytest.raises(PlanError):
            check(edited(plan, rank, edit))


@given(slimpipe_shapes(p=4, v=2, n=6, m=3), st.randoms(use_true_random=False))
def test_what_passes_the_check_runs(shape: Shape, rng: random.Random) -> None:
    """Swap two actions near to each other: the checker refuses it, or the replay and the simulator run it."""
    if shape.p == 1:
        return
    plan = lower(add_vocabulary(build("slimpipe", shape)))
    rank = rng.randrange(shape.p)
    i = rng.randrange(len(plan.ranks[rank]))
    j = min(i + rng.randrange(1, 6), len(plan.ranks[rank]) - 1)

    def swapped(tokens: Tokens) -> None:
        tokens[i], tokens[j] = tokens[j], tokens[i]

    broken = edited(plan, rank, swapped)
    try:
        check(broken)
    except PlanError:
        return
    replay_in_order(broken, send_window=shape.units, reduce_window=shape.units)
    simulate(broken, equal_costs())


# ---- the replay finds by itself what the checker would have ----


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_a_wrong_order_on_one_rank_is_found(p: int, v: int) -> None:
    c = v - 1
    plan = lower(add_vocabulary(build("slimpipe", Shape(p, v, 2 * p, 2))))
    replay_in_order(plan)
    edits = {
        "output": exchange((f"S0.1@{c}", f"S0.2@{c}"), (f"T0.1@{c}", f"T0.2@{c}")),
        "embedding": swap("E1.0@0", "E1.1@0"),
    }
    for rank in range(p):
        for communicator, edit in edits.items():
            # With passes of the two slices exchanged, rank p-1 or 0 may also block before it meets the others.
            with pytest.raises(PlanError, match=f"communicator {communicator}: the .* meets the|deadlock in order"):
                replay_in_order(edited(plan, rank, edit))


def test_a_wrong_order_names_rank_and_place(lowered: Plan) -> None:
    broken = edited(lowered, 2, swap("E0.1@0", "E0.2@0"))
    with pytest.raises(PlanError) as error:
        replay_in_order(broken)
    message = str(error.value)
    assert "the reduce of the embeddings of microbatch 0, slice" in message
    assert "communicator embedding" in message
    assert ">E0." in message


def test_a_pass_missing_on_one_rank_is_found(lowered: Plan) -> None:
    """Nothing waits for the last G but its D: without both, only the count is wrong."""
    broken = edited(edited(lowered, 1, drop("G1.0@0")), 1, drop("D1.0@0"))
    broken = edited(edited(broken, 0, drop("D1.0@0")), 2, drop("D1.0@0"))
    with pytest.raises(PlanError, match=r"rank 0, action \d+ \(G1.0@0\): ranks \[1\] never posted the broadcast"):
        replay_in_order(broken)
    with pytest.raises(PlanError, match="slice 1 meets the broadcast of the last stage's output of .* slice 0"):
        replay_in_order(edited(lowered, 1, drop("H0.0@1")))


def test_contributions_are_bounded() -> None:
    """Rank 1 hands in three lookups before its first H; rank 0 the second only behind its S, which waits for that H."""
    plan = lower(add_vocabulary(build("1f1b", Shape(p=2, m=3))))
    for token, anchor in (("E2.0@0", "S0.0@0"), ("E1.0@0", "S0.0@0"), ("F1.0@0", "E1.0@0"), ("SF1.0@0>1", "F1.0@0")):
        plan = edited(plan, 0, move(token, anchor))
    replay_in_order(plan, reduce_window=2)
    with pytest.raises(PlanError, match="reduce of the embeddings of microbatch 1, slice 0 has not completed"):
        replay_in_order(plan, reduce_window=1)


# ---- the simulator ----


def starts(plan: Plan, costs: Costs, rank: int, link: LinkCost | None = None) -> dict[str, float]:
    spans = simulate(plan, costs, link).spans[rank]
    return {str(span.action).partition("@")[0]: span.start for span in spans}


def test_the_output_layer_on_the_last_rank() -> None:
    """Three products in the last stage's forward: 1f1b, p = 2, m = 2, head 1/2 of a forward."""
    costs = replace(equal_costs(), vocabulary=output_layer_costs(0.5, 2))
    plan = build("1f1b", Shape(p=2, m=2))
    assert starts(plan, costs, 1) == {"F0.0": 1, "B0.0": 3.5, "F1.0": 5.5, "B1.0": 8}
    assert simulate(plan, costs).makespan == 12
    assert simulate(plan, costs).idle == (6, 1 + 2)


def test_passes_by_hand() -> None:
    """The same in passes: S takes 1/4 and T 1/2 on both ranks. Rank 0 keeps its second forward and its first backward
    for after the passes, which thus delay nobody: the step takes 9 and the passes' 3/2."""
    costs = replace(equal_costs(), vocabulary=output_layer_costs(0.5, 2))
    plan = add_vocabulary(build("1f1b", Shape(p=2, m=2)))
    last, first = starts(plan, costs, 1), starts(plan, costs, 0)
    assert [last[token] for token in ("F0.0", "S0.0", "T0.0", "B0.0", "F1.0", "S1.0", "T1.0", "B1.0")] == [
        *(1, 2, 2.25, 2.75),
        *(4.75, 5.75, 6, 6.5),
    ]
    assert [first[token] for token in ("F0.0", "S0.0", "T0.0", "F1.0", "S1.0", "T1.0", "B0.0", "B1.0")] == [
        *(0, 2, 2.25, 2.75),
        *(5.75, 6, 6.5, 8.5),
    ]
    assert simulate(plan, costs).makespan == 10.5


def test_collectives_take_time_on_a_link() -> None:
    """Tensors of 20 bytes at 10 a unit of time, latency 1/2: activations and broadcasts arrive 2.5 after they are sent,
    the fp32 reduce of the output's gradient 4.5, and E's reduces queue on their communicator. Statistics take the
    latency alone."""
    costs = replace(equal_costs(), vocabulary=output_layer_costs(0.5, 2))
    plan = lower(add_vocabulary(build("1f1b", Shape(p=2, m=1))))
    link = LinkCost(latency=0.5, bandwidth=10, tensor_bytes=20)
    first, last = starts(plan, costs, 0, link), starts(plan, costs, 1, link)
    assert first["F0.0"] == 2.5  # the embeddings
    assert last["F0.0"] == 2.5 + 1 + 2.5
    assert last["S0.0"] == 7 + 2.5 == first["S0.0"]
    assert last["T0.0"] == 9.5 + 0.25 + 0.5
    assert last["B0.0"] == 10.25 + 0.5 + 4.5
    assert first["B0.0"] == last["B0.0"] + 2 + 2.5
    assert first["D0.0"] == first["B0.0"] + 2 + 2.5
    two = lower(add_vocabulary(build("gpipe", Shape(p=2, m=2))))
    # Both reduces are posted at 0, and the first holds its communicator for 2.
    assert starts(two, costs, 0, link)["F1.0"] == 4.5


def test_embedding_can_cost_something() -> None:
    costs = replace(equal_costs(), vocabulary=VocabularyCosts(embed=0.25, embed_grad=0.5))
    plan = add_vocabulary(build("1f1b", Shape(p=2, m=1)))
    assert starts(plan, costs, 0)["F0.0"] == 0.25
    assert simulate(plan, costs).makespan == 0.25 + 6 + 0.5


def test_a_barrier_waits_for_the_slowest_rank() -> None:
    """Rank 0 is in a forward of 10 when the last rank's output goes round; nobody's T starts before rank 0's S ends."""
    costs = Costs(
        lambda stage, unit: 10.0 if stage == 0 and unit.microbatch == 2 else 1.0,
        lambda stage, unit: 2.0,
        VocabularyCosts(statistics=1.0, gradient=1.0),
    )
    plan = edited(add_vocabulary(build("gpipe", Shape(p=2, m=3))), 0, lambda tokens: None)
    first, last = starts(plan, costs, 0), starts(plan, costs, 1)
    assert last["S0.0"] < first["S0.0"]
    assert last["T0.0"] == first["T0.0"] == first["S0.0"] + 1


def fixed_point(plan: Plan, costs: Costs) -> list[dict[Action, float]]:
    """Ends of actions, by sweeping over all ranks until nothing changes: slow and plain. Collectives are free."""
    shape = plan.shape
    ends: list[dict[Action, float]] = [{} for _ in plan.ranks]
    posted: dict[Collective, dict[int, float]] = {}
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(plan.ranks):
            now = 0.0
            for action in actions:
                made = plan.producer(rank, action) if action.op.is_compute else None
                if made is not None:
                    now = max(now, ends[made[0]].get(Action(action.op, made[1]), 0.0))
                wanted = awaited_by(shape, rank, action)
                if wanted is not None:
                    now = max([now, *posted.get(wanted, {}).values()])
                if action.op.is_compute:
                    now += costs.of(shape.stage(rank, action.unit.chunk), action)
                else:
                    now += costs.vocabulary.of(action.op)
                changed |= ends[rank].get(action) != now
                ends[rank][action] = now
                collective = posted_by(action)
                if collective is not None:
                    posted.setdefault(collective, {})[rank] = now
    return ends


@given(supported_cases(), st.randoms(use_true_random=False))
def test_agrees_with_a_fixed_point_under_any_costs(case: Case, rng: random.Random) -> None:
    bare = build(*case)
    if bare.shape.p == 1 or bare.shape.p * bare.shape.units > 300:
        return
    plan = add_vocabulary(bare)
    table: dict[tuple[str, int, Unit], float] = {}

    def drawn(op: str) -> Callable[[int, Unit], float]:
        return lambda stage, unit: table.setdefault((op, stage, unit), float(rng.randrange(1, 50)))

    passes = VocabularyCosts(0.0, *(float(rng.randrange(5)) for _ in range(4)))
    costs = Costs(drawn("F"), drawn("B"), passes)
    timeline = simulate(plan, costs)
    ends = fixed_point(plan, costs)
    for rank, spans in enumerate(timeline.spans):
        posts = (Op.HIDDEN, Op.EMBED_GRAD_OUT)
        assert {span.action: span.end for span in spans} == {
            action: end for action, end in ends[rank].items() if action.op not in posts
        }
    assert simulate(lower(plan, 1000), costs).spans == timeline.spans


SHARE, BACKWARD = 0.587, 2.5 * 590 / 535
"""Attention in the Llama-8B shape at 64K (benchmarks/vocabulary_simulation.py)."""


@pytest.mark.parametrize("evened", [True, False])
@pytest.mark.parametrize(
    ("shape", "head"),
    [
        (Shape(2, 1, 8, 4), 0.12),
        (Shape(8, 1, 32, 4), 0.25),
        (Shape(8, 1, 32, 1), 0.25),
        (Shape(4, 2, 16, 4), 0.25),
        (Shape(4, 3, 6, 4), 0.37),
        (Shape(8, 1, 8, 4), 0.25),
        (Shape(8, 1, 1, 16), 0.25),
    ],
)
def test_passes_cost_hardly_more_than_an_even_split(shape: Shape, head: float, evened: bool) -> None:
    """0.1 % more at most than a step without output layer and a p-th of that; on the last rank it costs 4 % more."""
    costs = equal_costs(1.0, 2 * (1 - SHARE) + BACKWARD * SHARE) if evened else sliced_costs(shape.n, SHARE, BACKWARD)
    plan = build("slimpipe", shape)
    even = simulate(plan, costs).makespan + shape.m * shape.n * 3 * head / shape.p
    costs = replace(costs, vocabulary=output_layer_costs(head, shape.p))
    assert simulate(add_vocabulary(plan, costs), costs).makespan < 1.001 * even
    if evened:
        assert simulate(add_vocabulary(plan), costs).makespan < 1.001 * even
        assert simulate(plan, costs).makespan > 1.04 * even


def test_the_passes_work_is_what_the_last_rank_had() -> None:
    costs = replace(equal_costs(), vocabulary=output_layer_costs(0.3, 4))
    plan = build("slimpipe", Shape(4, 1, 8, 2))
    alone, passes = simulate(plan, costs), simulate(add_vocabulary(plan), costs)

    def busy(spans: Sequence[Sequence[Span]]) -> float:
        return sum(span.end - span.start for row in spans for span in row)

    assert busy(alone.spans) == pytest.approx(busy(passes.spans)) == pytest.approx(64 * 4 * 3 / 4 + 16 * 0.9)


# ---- text and pictures ----


def test_csv_round_trip(lowered: Plan) -> None:
    assert from_csv(to_csv(lowered)) == lowered


def test_grid_gives_passes_a_tick() -> None:
    text = grid(add_vocabulary(build("1f1b", Shape(p=2, m=1))))
    assert text.splitlines()[2].split() == ["rank", "1", ".", "F0.0", "S0.0", "T0.0", "B0.0", "."]


def test_svg_has_green_boxes_where_passes_take_time() -> None:
    plan = add_vocabulary(build("slimpipe", Shape(2, 1, 4, 1)))
    costs = replace(equal_costs(), vocabulary=output_layer_costs(0.5, 2))
    with_time, without = draw_svg(simulate(plan, costs)), draw_svg(simulate(plan, equal_costs()))
    assert "vocabulary passes" in with_time and ">T3</text>" in with_time
    assert "vocabulary passes" not in without and without.count("M") < with_time.count("M")
    boxes = with_time.count("M") - without.count("M")
    assert boxes == 2 * 2 * 4 + 1  # S and T of four slices on two ranks, and the legend's


def test_each_op_has_a_place_in_the_table() -> None:
    assert {op for op in Op if op.is_vocabulary} == {*passes_of(False), *passes_of(True)}
    shape = Shape(p=3, v=2, n=1, m=1)
    assert [chunk_of(shape, op) for op in passes_of(False)] == [0, 1, 1, 1, 0, 0]


WAITS = {"S0": "H", "T0": "S", "L0": "S", "D0": "G"}


def test_who_waits_for_what() -> None:
    shape = Shape(p=3, v=2, n=1, m=1)

    def waits(rank: int) -> dict[str, str]:
        actions = [
            Action(op, Unit(0, 0, chunk)) for op in Op for chunk in range(2) if op.is_vocabulary or op.is_compute
        ]
        found = ((action, awaited_by(shape, rank, action)) for action in actions)
        return {str(action).partition(".")[0] + str(action)[-2:]: c.op.value for action, c in found if c is not None}

    everywhere = {f"{action}@{chunk}": post for action, post in WAITS.items() for chunk in range(2)}
    assert waits(0) == {**everywhere, "F0@0": "E"}
    assert waits(1) == everywhere
    assert waits(2) == {**everywhere, "B0@1": "T"}
