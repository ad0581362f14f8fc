"""What is moved and what is not, what is refused and how, and that nothing is left behind."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimpipe.swap import SimulatedStreams, Stage, SwapManager, SwapSettings
from slimpipe.swap.release import PythonHolder
from slimpipe.swap.streams import Event
from tests.swap.programs import PROGRAMS, batch, mlp
from tests.swap.support import check_bitwise, check_clean, differences, make_manager, run


def moved(manager: SwapManager) -> list[tuple[tuple[int, ...], str]]:
    """(shape, node) of the large tensors that the manager saw as candidates in this step."""
    found = []
    for reference in manager.executor._all.values():
        saved = reference()
        if saved is not None and saved.feature is not None:
            found.append((saved.feature.shape, saved.source))
    return found


# What may move


def test_parameters_buffers_and_their_views_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
            self.words = nn.Parameter(torch.randn(64, 32))
            self.register_buffer("table", torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            x = self.frozen(self.trained(x)) @ self.table * self.table[:16]
            return F.linear(x, self.words[8:40]) @ self.words.t()[:, :32].t()

    manager, model = make_manager(0), Model()
    with manager.step():
        model(batch(0)).sum()
        graph = model(batch(0)).square().sum()
        shapes = [shape for shape, _ in moved(manager)]
    assert shapes and all(shape[0] == 16 for shape in shapes), shapes
    del graph


def test_parameters_without_a_module_stay() -> None:
    trained, frozen = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32), requires_grad=False)
    manager = make_manager(0)
    with manager.step():
        loss = ((batch(0).requires_grad_() * 1.0) @ trained.t() @ frozen.t()).square().sum()
        shapes = [shape for shape, _ in moved(manager)]
        loss.backward()
    assert shapes and all(shape[0] == 16 for shape in shapes), shapes


def test_tables_that_outlive_a_step_stay_from_then_on() -> None:
    table = torch.randn(16, 32)
    manager = make_manager(0)
    for expected in (True, False, False):
        with manager.step():
            x = batch(0).requires_grad_()
            loss = ((x * 1.0) * table).sum()
            assert ((16, 32), "input") in moved(manager) or not expected
            assert any(
                saved().key[0] == table.untyped_storage()._cdata for saved in manager.executor._all.values()
            ) == (expected)
            loss.backward()


def test_excluded_by_name() -> None:
    table, other = torch.randn(16, 32), nn.BatchNorm1d(400)
    manager = make_manager(0)
    manager.exclude(table, other)
    with manager.step():
        loss = ((batch(0).requires_grad_() * 1.0) * table).sum()
        assert moved(manager) == []
        loss.backward()


def test_small_tensors_stay() -> None:
    manager = make_manager(0, min_bytes=1 << 20)
    check_bitwise(PROGRAMS["plain"], manager)
    assert manager.counts.moved_out == 0


def test_a_large_tensor_that_a_small_view_holds_is_no_candidate() -> None:
    """The small view is kept, and the whole storage with it: moving the large one would free nothing."""

    def program(step: Any) -> list[Tensor]:
        found, model = [], mlp()
        for i in range(8):
            x = batch(i).requires_grad_()
            with step():
                y = x * 1.0
                held = y.square().sum() + y[:2].square().sum()
                del y
                (held + model(batch(i)).square().sum()).backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    manager = check_bitwise(program, make_manager(0))
    plan = manager.stages.known[0].plan
    assert plan is not None and plan.swaps and manager.counts.still_referenced == 0
    assert not any(plan.expected[number].source == "MulBackward0" for number in plan.swaps)


def test_a_tensor_saved_twice_moves_once_and_a_changed_one_twice() -> None:
    manager = make_manager(0)
    with manager.step():
        x = batch(0).requires_grad_() * 1.0
        loss = (x * x).sum() + (x * x.sin()).sum() + (x[2:] * x.t()[:, :14].t()).sum()
        assert manager.counts.moves_out == 2  # x, and its sine
        z = x.clone()
        dropped = (z * z).sum()
        z = z.mul_(2)
        loss = loss + (z * z).sum()
        assert manager.counts.moves_out == 4
        loss.backward()
    del dropped


def test_addresses_used_again_are_other_tensors() -> None:
    """The allocator gives the same block again within a step."""
    manager = make_manager(0, SimulatedStreams(order="late"))
    with manager.step():
        losses, expected = [], []
        for i in range(20):
            x = torch.full((16, 32), float(i + 1)).requires_grad_()
            losses.append((x * 1.0).square().sum())
            expected.append(torch.full((16, 32), 2.0 * (i + 1)))
            inputs = x
            (g,) = torch.autograd.grad(losses[-1], inputs)
            assert torch.equal(g, expected[-1])
            del x, inputs


# In-place writes


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("rows", [2, 64])
def test_a_write_to_a_saved_tensor_is_an_error_as_without_swap(budget: int | None, rows: int) -> None:
    """Small and large tensors, kept and on their way out."""
    manager = make_manager(budget)
    with manager.step():
        y = (torch.randn(rows, 32).requires_grad_() * 1.0).tanh()
        z = (y * y).sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="written to in place|modified by an inplace"):
            z.backward()
    del y, z
    check_clean(manager)


def test_a_write_while_the_copy_runs_is_found_when_it_ends() -> None:
    manager = make_manager(0)
    with manager.step():
        y = (batch(0).requires_grad_() * 1.0).tanh()
        z = (y * y).sum()
        y.data  # noqa: B018  (no write)
        y.add_(1)
    assert manager.counts.modified > 0
    with pytest.raises(RuntimeError, match="at version 1, but was saved at version 0"):
        z.backward()


def test_a_write_after_the_tensor_has_left_does_no_harm() -> None:
    """Autograd alone would refuse; the copy has the value that the gradient needs."""
    manager = make_manager(0)
    x = batch(0).requires_grad_()
    with manager.step():
        y = x * 1.0
        z = y.square().sum()
        manager.executor.drain()
        y.add_(1)
        z.backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_a_storage_resized_while_its_copy_runs() -> None:
    manager = make_manager(0)
    with manager.step():
        y = batch(0).requires_grad_() * 1.0
        z = y.square().sum()
        y.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its storage was resized"):
        z.backward()


# Nothing left behind


class Canary:
    pass


def test_a_graph_that_is_dropped_is_freed_at_once() -> None:
    """Keeping a node's own output would make a cycle that is never freed."""
    gc.disable()
    try:
        # Small ones, which are always kept, and large ones, kept and moved.
        for budget, min_bytes in ((None, 1 << 20), (None, 512), (0, 512)):
            manager = make_manager(budget, min_bytes=min_bytes)
            with manager.step():
                y = (batch(0).requires_grad_() * 1.0).exp()
                y.grad_fn.metadata["canary"] = canary = Canary()
                alive = weakref.ref(canary)
                del y, canary
            assert alive() is None
            check_clean(manager)
    finally:
        gc.enable()


def test_memory_does_not_grow_over_steps() -> None:
    manager = make_manager(60_000)
    run(PROGRAMS["exceptions"], manager)
    pinned, sequences = manager._arenas.pinned, len(manager.stages.known)
    for _ in range(3):
        run(PROGRAMS["exceptions"], manager)
        check_clean(manager)
    assert manager._arenas.pinned == pinned and len(manager.stages.known) == sequences
    assert len(manager.executor._all) == len(manager.executor._known) == len(manager.executor._releases) == 0
    assert len(manager.executor._holders) == 0
    assert len(manager.executor._seen) < 100 and manager.executor.stalls == []


def test_host_memory_runs_out() -> None:
    """What finds no room there stays on the device."""
    manager = make_manager(0, host_budget=1 << 14)
    check_bitwise(PROGRAMS["plain"], manager)
    assert manager.counts.no_host_room > 0 and manager.counts.moved_out > 0


# Budgets that cannot be kept: a message and a correct run


def test_no_host_budget() -> None:
    with pytest.warns(UserWarning, match="host_budget = 0: no tensor can be moved"):
        manager = SwapManager(1000, 0, streams=SimulatedStreams(), settings=SwapSettings(min_bytes=512))
    check_bitwise(PROGRAMS["plain"], manager)
    assert manager.counts.moved_out == 0


def test_a_budget_larger_than_the_machine() -> None:
    with pytest.warns(UserWarning, match="gpu_budget = 2,000,000 bytes, but the device has 1,000,000; using 90 %"):
        manager = SwapManager(2_000_000, 1 << 20, streams=SimulatedStreams(size=1_000_000))
    assert manager.gpu_budget == 900_000
    check_bitwise(PROGRAMS["plain"], manager)


def test_a_host_budget_larger_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.swap.manager.available", lambda: 1_000_000)
    with pytest.warns(UserWarning, match="host_budget = 2,000,000 bytes, but the host has 1,000,000 to be had"):
        manager = SwapManager(0, 2_000_000, streams=SimulatedStreams(), settings=SwapSettings(min_bytes=512))
    assert manager.host_budget == 900_000
    check_bitwise(PROGRAMS["plain"], manager)
    assert 0 < manager.sizes()["host_bytes_pinned"] <= 900_000
    monkeypatch.setattr("slimpipe.swap.manager.available", lambda: None)  # a system that does not say
    assert SwapManager(0, 2_000_000, streams=SimulatedStreams()).host_budget == 2_000_000


def test_a_budget_that_nothing_can_keep() -> None:
    manager = make_manager(0)
    with pytest.warns(UserWarning, match="moving everything that can be moved leaves .* in use"):
        PROGRAMS["plain"](manager.step)
    assert manager.stage is Stage.STABLE


@pytest.mark.parametrize("pinnable", [0, 5000])
def test_no_pinned_memory_to_be_had(pinnable: int) -> None:
    manager = make_manager(0, SimulatedStreams(pinnable=pinnable))
    with pytest.warns(UserWarning, match="no pinned host memory beyond .* stays on the device"):
        PROGRAMS["plain"](manager.step)
    check_bitwise(PROGRAMS["plain"], make_manager(0, SimulatedStreams(pinnable=pinnable)))


def test_nothing_large_enough_to_be_moved() -> None:
    """The largest tensors of the program have 8 KiB."""
    manager = make_manager(0, min_bytes=1 << 14)
    with pytest.warns(UserWarning, match=r"no saved tensor can be moved \(of 16,384 bytes or more, min_bytes\)"):
        PROGRAMS["plain"](manager.step)
    check_bitwise(PROGRAMS["plain"], make_manager(0, min_bytes=1 << 14))
    assert manager.counts.moved_out == 0 and manager.stage is Stage.STABLE


def test_nothing_to_swap() -> None:
    def program(step: Any) -> list[Tensor]:
        found = []
        for i in range(8):
            with step():
                found.append(torch.randn(100, 100, generator=torch.Generator().manual_seed(i)) @ torch.ones(100))
        return found

    manager = check_bitwise(program, make_manager(0))
    assert manager.counts.moved_out == 0 and "steps" in manager.summary()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_budget": -1}, "gpu_budget = -1: must be a whole number of bytes"),
        ({"gpu_budget": True}, "gpu_budget = True: must be a whole number of bytes"),
        ({"host_budget": 1.5}, "host_budget = 1.5: must be a whole number of bytes"),
        ({"host_budget": None}, "host_budget = None: must be a whole number of bytes"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwapManager(**arguments, streams=SimulatedStreams())


@pytest.mark.parametrize(
    "setting",
    [
        "stable_steps=0",
        "policies=0",
        "length_change=1.0",
        "similarity=0.0",
        "min_bytes=0",
        "margin=1.0",
        "move_share=2.0",
    ],
)
def test_wrong_settings(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(ValueError, match=f"swap: {key} = {value}: must be"):
        SwapSettings(**{key: float(value) if "." in value else int(value)})  # type: ignore[arg-type]


def test_steps_do_not_nest() -> None:
    manager = make_manager(None)
    with manager.step():
        with pytest.raises(RuntimeError, match="steps do not nest"), manager.step():
            pass
        mlp()(batch(0)).sum().backward()
    with manager.step():
        pass


# Pressure and out of memory


class Draining(PythonHolder):
    """Lets go under pressure at the worst time, as the C++ holder does: whenever another tensor is held."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams, self._events, self._drained = streams, dict[int, Event](), dict[int, int]()

    def hold(self, tensor: Tensor, event: Event) -> int:
        for number, earlier in list(self._events.items()):
            self._streams.wait_everywhere(earlier)
            drained = super().take(number)
            if drained is not None:
                self._drained[number] = drained._version
            del self._events[number]
        number = super().hold(tensor, event)
        self._events[number] = event
        return number

    def take(self, number: int) -> Tensor | None:
        self._events.pop(number, None)
        return super().take(number)

    def version_when_drained(self, number: int) -> int:
        return self._drained.pop(number)


@pytest.mark.parametrize(
    "name", ["plain", "views_and_transposes", "retained_graph", "backward_never_run", "exceptions"]
)
def test_let_go_under_pressure(name: str) -> None:
    streams = SimulatedStreams(order="random", rate=1e8)
    manager = make_manager(30_000, streams)
    manager.executor.holder = Draining(streams)
    check_bitwise(PROGRAMS[name], manager)
    assert manager.counts.drained_early > 0


def test_a_forward_that_runs_out_of_memory_is_tried_again() -> None:
    """With what was saved before moved out, and with the same random numbers."""

    def program(fails: bool) -> tuple[list[Tensor], SwapManager]:
        manager, model, tries = make_manager(None), nn.Sequential(mlp(), nn.Dropout(0.5)), 0

        def forward(x: Tensor) -> Tensor:
            nonlocal tries
            y = model(x)
            tries += 1
            if fails and tries in (1, 2):
                raise torch.OutOfMemoryError("no room")
            return y

        torch.manual_seed(1)
        with manager.step():
            first = model(batch(0))
            second = manager.run_forward(forward, batch(1))
            (first.square().mean() + second.square().mean()).backward()
        return [first, second, *(p.grad for p in model.parameters() if p.grad is not None)], manager

    torch.manual_seed(0)
    expected, _ = program(False)
    torch.manual_seed(0)
    found, manager = program(True)
    assert differences([t.detach() for t in found], [t.detach() for t in expected]) == []
    assert manager.counts.out_of_memory == 2 and manager.counts.evicted > 0
    del found
    check_clean(manager)


def test_out_of_memory_for_good_tells_what_held_it() -> None:
    manager, model = make_manager(None), mlp()

    def forward(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError) as caught, manager.step():
        y = model(batch(0))
        manager.run_forward(forward, y)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert "large saved tensors, the largest:" in notes and "GeluBackward0" in notes


def test_the_way_back_finds_the_device_full() -> None:
    """Copies under way end early, then other saved tensors make room."""
    streams = SimulatedStreams(order="late", rate=1e8)
    manager = make_manager(60_000, streams)
    expected = run(PROGRAMS["plain"], None)

    def crowded(step: Any) -> list[Tensor]:
        streams.capacity = 75_000
        return PROGRAMS["plain"](step)

    assert differences(run(crowded, manager), expected) == []
    check_clean(manager)


def test_another_default_device() -> None:
    """Whatever device a program has made the default, host memory is on the host."""
    model, x = mlp(), batch(0)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with torch.device("meta"):
        manager = make_manager(0)
        manager.reserve(1 << 17)
        with manager.step():
            loss = model(x).square().mean()
            manager.executor.drain()
            found = torch.autograd.grad(loss, list(model.parameters()))
    assert differences(list(found), list(expected)) == [] and manager.counts.moved_in > 0


# Reports


def test_summary_and_layers() -> None:
    manager = make_manager(60_000)
    run(PROGRAMS["transformer"], manager)
    text = manager.summary()
    for word in ("moved out", "moved in", "compute waited", "mismatches, fallbacks", "logical layers", "pinned"):
        assert word in text
    assert "estimated ms" in manager.layer_table() and len(manager.layers) > 10
    assert manager.stalled == pytest.approx(manager.streams.stalled, rel=1e-6)  # type: ignore[attr-defined]


def test_the_observer_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.swap.observer._cpp_available", lambda: False)
    with pytest.warns(UserWarning, match="operators are counted by saved-tensor hooks"):
        manager = SwapManager(None, 1 << 20, streams=SimulatedStreams())
    assert manager.observer.name == "hooks"
    with pytest.raises(RuntimeError, match="observer = cpp: the C\\+\\+ operators of csrc/ are not built"):
        SwapManager(None, 1 << 20, streams=SimulatedStreams(), settings=SwapSettings(observer="cpp"))


def test_real_memory_is_given_back() -> None:
    """Storages of tensors that were moved are gone while the graph still lives."""
    manager = make_manager(0)
    with manager.step(), warnings.catch_warnings():
        y = batch(0).requires_grad_() * 1.0
        z = y.square()
        alive = weakref.ref(y.untyped_storage())
        cdata = y.untyped_storage()._cdata
        del y, alive
        manager.executor.drain()
        (saved,) = [s() for s in manager.executor._all.values()]
        assert saved is not None and saved.key[0] == cdata and saved.reference.expired()
        z.sum().backward()
