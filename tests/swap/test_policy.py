"""Policies on hand-made timelines, against exact solvers, and for anything hypothesis comes up with."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.swap.link import host_peak, latest_starts_in, memory_with, simulate, swaps_without_stalls
from slimpipe.swap.policy import make_policy
from slimpipe.swap.timeline import Candidate, Limits, Policy, Timeline

PLENTY = 1 << 40


def limits(gpu: int, host: int = PLENTY, out: float = 1e12, into: float = 1e12) -> Limits:
    return Limits(gpu, host, out, into)


def layers(count: int, nbytes: int = 10, seconds: float = 1.0) -> tuple[Timeline, list[Candidate]]:
    """A model of equal layers: each saves one tensor in the forward and uses it in the backward. Two moments a layer,
    its start and its end; the backward takes twice as long."""
    candidates, memory, times, now = [], [], [0.0], 0
    moments = 4 * count
    for layer in range(count):
        candidates.append(Candidate(layer, nbytes, 2 * layer, 2 * layer, moments - 1 - 2 * layer))
    for k in range(moments):
        if k < 2 * count and k % 2 == 0:
            now += nbytes
        memory.append(now)
        if k >= 2 * count and k % 2 == 1:
            now -= nbytes
        times.append(times[-1] + (seconds if k < 2 * count else 2 * seconds))
    return Timeline(tuple(times[:-1]), tuple(memory)), candidates


def test_nothing_moves_while_memory_suffices() -> None:
    timeline, candidates = layers(8)
    assert make_policy(timeline, candidates, limits(80)) == Policy((), 80, True, 0.0, 0)


@pytest.mark.parametrize(("gpu", "moved"), [(79, 1), (70, 1), (69, 2), (40, 4), (20, 6)])
def test_the_least_that_fits(gpu: int, moved: int) -> None:
    timeline, candidates = layers(8)
    policy = make_policy(timeline, candidates, limits(gpu))
    assert policy.fits and policy.stalled == 0.0 and len(policy.swaps) == moved
    assert policy.peak <= gpu


def test_a_peak_is_lowered_by_what_is_idle_there() -> None:
    """The last tensor saved is no use at the peak in the middle; the one that is needed everywhere else is."""
    timeline = Timeline(tuple(float(k) for k in range(10)), (1, 2, 3, 9, 3, 3, 3, 3, 2, 1))
    early, late = Candidate(0, 4, 0, 1, 8), Candidate(1, 4, 5, 5, 8)
    policy = make_policy(timeline, [early, late], limits(5))
    assert [swap.candidate for swap in policy.swaps] == [early] and policy.peak == 5


def test_copies_out_queue_up() -> None:
    """Ten bytes take three moments: the layers' copies leave one after another, and later than they are saved."""
    timeline, candidates = layers(6)
    swaps = swaps_without_stalls(timeline, candidates, limits(0, out=10 / 3, into=1e12))
    # The fifth would be gone at 15, when it is needed already.
    assert [(swap.release, swap.prefetch) for swap in swaps] == [(3, 22), (6, 20), (9, 18), (12, 16)]


def test_copies_in_are_placed_backwards_from_their_use() -> None:
    timeline = Timeline(tuple(float(k) for k in range(12)), (0,) * 12)
    candidates = [Candidate(0, 20, 0, 0, 10), Candidate(1, 20, 1, 1, 9), Candidate(2, 10, 2, 2, 11)]
    starts = latest_starts_in(timeline, candidates, limits(0, into=10.0))
    # Backwards: 2 needs [10, 11], 0 needs [8, 10], 1 needs [6, 8], though it could have used [7, 9] alone.
    assert starts == {2: 10, 0: 8, 1: 6}


def test_several_copies_run_behind_one_long_operator() -> None:
    """The link does not wait for a moment: three copies of 30 s are started before an operator of 100 s."""
    timeline = Timeline((0.0, 1.0, 2.0, 3.0, 103.0, 104.0), (90,) * 6)
    candidates = [Candidate(0, 30, 0, 0, 5), Candidate(1, 30, 0, 0, 5), Candidate(2, 30, 0, 0, 4)]
    limit = limits(0, into=1.0)
    assert latest_starts_in(timeline, candidates, limit) == {0: 3, 1: 3, 2: 3}
    assert simulate(timeline, swaps_without_stalls(timeline, candidates, limit), limit).stalled == 0.0


def long_context_layers(count: int) -> tuple[Timeline, list[Candidate]]:
    """As an H200 runs them at 64K tokens in plain PyTorch: milliseconds and MiB, attention far the longest."""
    forward = [(5.0, 1280), (62.0, 2560), (3.5, 512), (11.5, 1792), (10.5, 1792), (12.0, 2304)]
    seconds, candidates, now, name = [0.0], [], 0, 0
    moments = 2 * count * len(forward)
    memory = []
    for k in range(moments):
        layer, part = divmod(min(k, moments - 1 - k), len(forward))
        took, nbytes = forward[part]
        if k < moments // 2:
            candidates.append(Candidate(name, nbytes, k, k, moments - 1 - k))
            name += 1
            now += nbytes
        memory.append(now)
        now -= nbytes if k >= moments // 2 else 0
        seconds.append(seconds[-1] + took * (1 if k < moments // 2 else 2.7 if part == 1 else 2))
    return Timeline(tuple(seconds[:-1]), tuple(memory)), candidates


def test_a_long_context_moves_most_of_itself_without_stalls() -> None:
    """All but the last layer of four; 51 MiB a millisecond, so that a layer's copy takes twice its forward."""
    timeline, candidates = long_context_layers(4)
    policy = make_policy(timeline, candidates, limits(PLENTY, out=100.0, into=51.0), move_share=0.75)
    assert policy.moved_bytes >= 0.7 * sum(candidate.nbytes for candidate in candidates)
    assert policy.stalled <= 0.001 * timeline.seconds[-1]


def test_a_share_that_the_link_cannot_hide_waits_as_little_as_it_must() -> None:
    """One tensor between a forward and a backward of a second each, and a second each way on the link: both directions
    take two, the step has two, less one moment of 0.1 in which it is away."""
    timeline = Timeline(tuple(k / 10 for k in range(21)), (10,) * 21)
    policy = make_policy(timeline, [Candidate(0, 10, 0, 0, 20)], limits(PLENTY, out=10.0, into=10.0), move_share=1.0)
    assert policy.stalled == pytest.approx(0.1)


def test_stalls_only_where_it_cannot_fit_otherwise() -> None:
    timeline, candidates = layers(6)
    stalls = [make_policy(timeline, candidates, limits(gpu, out=2.0, into=2.0)).stalled for gpu in (50, 40, 30, 20)]
    assert stalls[0] == stalls[1] == 0.0 < stalls[2] < stalls[3]
    assert all(make_policy(timeline, candidates, limits(gpu, out=2.0, into=2.0)).fits for gpu in (50, 40, 30, 20))


def test_the_host_budget_is_kept() -> None:
    timeline, candidates = layers(8)
    policy = make_policy(timeline, candidates, limits(40, host=20))
    assert policy.host_bytes == 20 and not policy.fits and policy.peak == 60


def test_what_the_step_itself_needs_cannot_be_moved() -> None:
    timeline = Timeline((0.0, 1.0, 2.0, 3.0), (5, 9, 9, 5))
    policy = make_policy(timeline, [Candidate(0, 5, 0, 1, 2)], limits(6))
    assert policy.swaps == () and not policy.fits and policy.peak == 9


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_a_share_of_the_bytes(share: float) -> None:
    timeline, candidates = layers(20)
    policy = make_policy(timeline, candidates, limits(PLENTY), move_share=share)
    assert policy.moved_bytes == 200 * share
    assert [swap.candidate.name for swap in policy.swaps] == list(range(len(policy.swaps)))


def test_the_size_weight_makes_a_difference() -> None:
    """Else there would be no point in trying several."""
    differ = 0
    for seed in range(8):
        plans = {_names_with_weight(weight, seed) for weight in (0.0, 0.5, 2.0, 32.0)}
        differ += len(plans) > 1
    assert differ > 0


def _names_with_weight(weight: float, seed: int) -> tuple[int, ...]:
    generator = np.random.default_rng(seed)
    timeline, candidates = layers(12)
    candidates = [
        Candidate(c.name, int(generator.integers(1, 30)), c.birth, c.last_use, c.first_use) for c in candidates
    ]
    policy = make_policy(timeline, candidates, limits(60, out=20.0, into=20.0), size_weight=weight)
    assert policy.fits
    return tuple(swap.candidate.name for swap in policy.swaps)


@pytest.mark.parametrize(
    ("candidate", "timeline", "message"),
    [
        (Candidate(7, 1, 1, 0, 2), None, "candidate 7: birth 1, last use 0"),
        (Candidate(7, 1, 0, 2, 2), None, "candidate 7"),
        (Candidate(7, 1, 0, 1, 3), None, "of 3 moments"),
        (Candidate(7, 1, 0, 0, 2), Timeline((0.0, 1.0), (0, 0, 0)), "2 times and 3 memory values"),
        (Candidate(7, 1, 0, 0, 2), Timeline((0.0, 2.0, 1.0), (0, 0, 0)), "seconds fall"),
    ],
)
def test_what_makes_no_sense_is_refused(candidate: Candidate, timeline: Timeline | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(timeline or Timeline((0.0, 1.0, 2.0), (0, 0, 0)), [candidate], limits(1))
    with pytest.raises(ValueError, match="rates are 0"):
        make_policy(Timeline((0.0,), (0,)), [], limits(1, out=0))


# Against exact solvers


@st.composite
def problems(draw: Any, most: int = 7) -> tuple[Timeline, list[Candidate]]:
    moments = draw(st.integers(6, 24))
    seconds = np.cumsum([draw(st.integers(0, 3)) for _ in range(moments)]).astype(float)
    base = draw(st.integers(0, 10))
    memory, candidates = [base] * moments, []
    births = sorted(draw(st.lists(st.integers(0, moments - 3), min_size=1, max_size=most)))
    for name, birth in enumerate(births):
        last = draw(st.integers(birth, moments - 3))
        first = draw(st.integers(last + 2, moments - 1))
        nbytes = draw(st.integers(1, 20))
        candidates.append(Candidate(name, nbytes, birth, last, first))
        for k in range(birth, min(moments, first + 1)):
            memory[k] += nbytes
    for _ in range(draw(st.integers(0, 2))):  # what is not saved: workspaces
        memory[draw(st.integers(0, moments - 1))] += draw(st.integers(0, 30))
    return Timeline(tuple(seconds), tuple(memory)), candidates


def exact_with_an_infinite_link(timeline: Timeline, candidates: list[Candidate], gpu: int) -> int | None:
    """Fewest bytes to move, by mixed-integer programming: a candidate frees its bytes strictly between its uses."""
    optimize = pytest.importorskip("scipy.optimize")
    sizes = np.array([c.nbytes for c in candidates], dtype=float)
    excess = np.maximum(np.array(timeline.memory) - gpu, 0)
    cover = np.zeros((len(timeline.memory), len(candidates)))
    for i, c in enumerate(candidates):
        cover[c.last_use + 1 : c.first_use, i] = c.nbytes
    rows = excess > 0
    if not rows.any():
        return 0
    found = optimize.milp(
        sizes,
        constraints=optimize.LinearConstraint(cover[rows], lb=excess[rows]),
        integrality=np.ones(len(candidates)),
        bounds=optimize.Bounds(0, 1),
    )
    return round(found.fun) if found.success else None


@given(problems(12), st.floats(0.3, 1.0))
@settings(max_examples=150)
def test_against_mixed_integer_programming(problem: tuple[Timeline, list[Candidate]], share: float) -> None:
    """With a link that takes no time: it fits where anything does, and moves little more than the least."""
    timeline, candidates = problem
    # Moments at the same time are moments all the same.
    timeline = Timeline(tuple(float(k) for k in range(len(timeline.seconds))), timeline.memory)
    gpu = int(share * max(timeline.memory))
    policy = make_policy(timeline, candidates, limits(gpu, out=1e15, into=1e15))
    least = exact_with_an_infinite_link(timeline, candidates, gpu)
    assert policy.fits == (least is not None)
    if least is not None:
        assert policy.stalled == pytest.approx(0, abs=1e-9)
        # Greedy: a large tensor may do for two small ones.
        assert least <= policy.moved_bytes <= 2 * least + 20


def test_close_to_the_least_on_average() -> None:
    """200 random problems of the size of a small model."""
    generator = np.random.default_rng(0)
    moved = least = 0
    for _ in range(200):
        count = 14
        moments = 4 * count
        candidates, memory = [], [0] * moments
        for name in range(count):
            nbytes = int(generator.integers(1, 30))
            candidates.append(
                Candidate(name, nbytes, 2 * name, 2 * name + int(generator.integers(0, 3)), moments - 1 - 2 * name)
            )
            for k in range(2 * name, moments - 2 * name):
                memory[k] += nbytes
        candidates = [c for c in candidates if c.last_use + 1 < c.first_use]
        timeline = Timeline(tuple(float(k) for k in range(moments)), tuple(memory))
        gpu = int(generator.uniform(0.4, 0.95) * max(memory))
        policy = make_policy(timeline, candidates, limits(gpu, out=1e15, into=1e15))
        exact = exact_with_an_infinite_link(timeline, candidates, gpu)
        assert policy.fits == (exact is not None)
        if exact is not None:
            moved += policy.moved_bytes
            least += exact
    assert least <= moved <= 1.03 * least


@given(problems(6), st.floats(0.4, 1.0), st.sampled_from([1.0, 4.0, 20.0]))
@settings(max_examples=100)
def test_against_all_subsets_on_a_slow_link(
    problem: tuple[Timeline, list[Candidate]], share: float, rate: float
) -> None:
    """Where some subset fits without stalls, the policy fits, with no more than a little stall; and where it does not
    stall either, it moves not much more than the least."""
    timeline, candidates = problem
    limit = limits(int(share * max(timeline.memory)), out=rate, into=rate)
    fitting = []
    for size in range(len(candidates) + 1):
        for subset in itertools.combinations(candidates, size):
            swaps = swaps_without_stalls(timeline, subset, limit)
            if memory_with(timeline, swaps).max() <= limit.gpu_bytes:
                fitting.append(sum(swap.candidate.nbytes for swap in swaps))
    policy = make_policy(timeline, candidates, limit)
    if fitting:
        assert policy.fits
        if policy.stalled < 1e-9:
            assert min(fitting) <= policy.moved_bytes <= 2 * min(fitting) + 20


# For anything


@given(
    problems(),
    st.floats(0.0, 1.2),
    st.integers(0, 60),
    st.floats(0.5, 50.0),
    st.floats(0.5, 50.0),
    st.sampled_from([None, 0.5]),
)
@settings(max_examples=150)
def test_every_policy_is_sound(
    problem: tuple[Timeline, list[Candidate]], gpu: float, host: int, out: float, into: float, share: float | None
) -> None:
    timeline, candidates = problem
    limit = limits(int(gpu * max(timeline.memory)), host, out, into)
    policy = make_policy(timeline, candidates, limit, move_share=share)
    names = [swap.candidate.name for swap in policy.swaps]
    assert len(set(names)) == len(names)
    for swap in policy.swaps:
        c = swap.candidate
        assert c.last_use < swap.release <= swap.prefetch <= c.first_use and swap.release < swap.prefetch
    outcome = simulate(timeline, policy.swaps, limit)
    assert policy.peak == outcome.peak <= max(timeline.memory)
    assert policy.fits == (outcome.peak <= limit.gpu_bytes)
    assert policy.host_bytes == host_peak(timeline, policy.swaps) <= host
    assert policy.stalled == outcome.stalled >= 0
    assert all(b >= a for a, b in zip(outcome.seconds, outcome.seconds[1:], strict=False))


@given(problems(), st.floats(0.5, 50.0), st.floats(0.5, 50.0))
@settings(max_examples=150)
def test_swaps_without_stalls_do_not_stall(problem: tuple[Timeline, list[Candidate]], out: float, into: float) -> None:
    """The planner's copies, put through the simulator: the two were written apart."""
    timeline, candidates = problem
    limit = limits(0, out=out, into=into)
    swaps = swaps_without_stalls(timeline, candidates, limit)
    # The others are not moved, so their copies do not take the link.
    assert simulate(timeline, swaps, limit).stalled == pytest.approx(0, abs=1e-9)
