"""The swap manager: one object, one `with` a step, any eager PyTorch training loop.

    manager = SwapManager(gpu_budget=120 << 30, host_budget=200 << 30)
    for batch in data:
        with manager.step():
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(manager.summary())

No list of modules and no fraction: it looks at a few steps, and moves nothing while memory suffices.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.excluded import Excluded
from slimpipe.swap.execution import ExecutionPlan, Times
from slimpipe.swap.executor import Executor
from slimpipe.swap.host_memory import available
from slimpipe.swap.logical_layers import Layer, estimate_error, logical_layers
from slimpipe.swap.observer import HookObserver, Observer, make_observer
from slimpipe.swap.policy import make_policy
from slimpipe.swap.recorder import Profile, Recorder
from slimpipe.swap.release import make_holder
from slimpipe.swap.report import Counts, megabytes, two_columns
from slimpipe.swap.settings import SwapSettings
from slimpipe.swap.signature import Signature
from slimpipe.swap.stages import Stage, StageMachine
from slimpipe.swap.streams import Streams, make_streams
from slimpipe.swap.timeline import Limits, Policy

T = TypeVar("T")

VARIANTS = ((1.0, 1.0), (1.0, 0.85), (0.25, 1.0), (4.0, 0.85), (0.0, 0.7), (16.0, 1.0), (0.25, 0.85), (4.0, 0.7))
"""Of the policies that are tried: C as a multiple of the setting, the link's rate as a share of what was measured."""


class SwapManager:
    """Moves what autograd saves to the host and back, where memory asks for it.

    `gpu_budget`: bytes that may be in use on the device (as torch.cuda.memory_allocated counts them), everything
    included; None: 90 % of its memory. `host_budget`: bytes of pinned host memory. `device`: None for the current CUDA
    device, or for simulated streams where there is none. Budgets that cannot be kept are told, once, by a warning, and
    the run goes on.

    One manager a process and device; steps of several managers must not overlap.
    """

    def __init__(
        self,
        gpu_budget: int | None = None,
        host_budget: int = 0,
        device: torch.device | str | None = None,
        settings: SwapSettings | None = None,
        streams: Streams | None = None,
    ) -> None:
        for key, value in (("gpu_budget", gpu_budget), ("host_budget", host_budget)):
            default = value is None and key == "gpu_budget"
            if not default and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"SwapManager: {key} = {value!r}: must be a whole number of bytes, 0 or more")
        self._told: set[str] = set()
        self.settings = settings or SwapSettings()
        self.streams = streams or make_streams(_device(device))
        self.host_budget = host_budget = self._usable_host_budget(host_budget)
        self.gpu_budget = self._usable_budget(gpu_budget)
        self.stages = StageMachine(self.settings.stable_steps, self.settings.length_change, self.settings.similarity)
        self.policies: list[Policy] = []
        """Of the last profile, the first one first."""
        self.layers: tuple[Layer, ...] = ()
        self.profiled_steps = 0
        self.stalled = 0.0
        """Seconds the compute stream waited for copies, as measured."""
        self._excluded = Excluded()
        self._arenas = PinnedArenas(self.streams.host_memory, self.streams.done, host_budget, self.settings.arena_bytes)
        self.executor = Executor(
            self.streams,
            self._arenas,
            self._excluded,
            make_holder(self.streams.device),
            self.gpu_budget,
            int(self.gpu_budget * self.settings.headroom),
            self.settings.min_bytes,
        )
        self.observer: Observer = make_observer(self.settings.observer, self.executor.at_operator)
        self._inside = False
        if self.settings.observer == "auto" and isinstance(self.observer, HookObserver):
            self._tell(
                "csrc/ is not built: operators are counted by saved-tensor hooks, which is coarser, and changes that "
                "save no tensor pass unnoticed (pip install --no-build-isolation -e .)"
            )
        if host_budget == 0:
            self._tell("host_budget = 0: no tensor can be moved; give the bytes of pinned host memory it may use")

    @property
    def stage(self) -> Stage:
        return self.stages.stage

    @property
    def host_bytes_in_use(self) -> int:
        return self._arenas.in_use

    def sizes(self) -> dict[str, int]:
        """Of everything that could grow from step to step."""
        return {
            "host_bytes_in_use": self._arenas.in_use,
            "host_bytes_pinned": self._arenas.pinned,
            "device_bytes_in_use": self.streams.memory_in_use(),
            "excluded": len(self._excluded),
            "kinds_of_step": len(self.stages.known),
            **self.executor.sizes(),
        }

    @property
    def counts(self) -> Counts:
        return self.executor.counts

    def reserve(self, nbytes: int | None = None) -> int:
        """Pins host memory now (0.4 s a GiB), before training; None: the whole budget. Returns the bytes pinned."""
        pinned = self._arenas.reserve(self.host_budget if nbytes is None else min(nbytes, self.host_budget))
        self._tell_refusal()
        return pinned

    def exclude(self, *tensors: Tensor | nn.Module) -> None:
        """Tensors that stay where they are, and all views of them. Parameters and buffers need not be named."""
        for item in tensors:
            if isinstance(item, nn.Module):
                self._excluded.add_module(item)
            else:
                self._excluded.add(item)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step, evaluation, or part of a step with gradient accumulation. Backwards of graphs that were
        made inside may run after it."""
        if self._inside:
            raise RuntimeError("SwapManager.step: the last step is not over; steps do not nest")
        orders = self.stages.orders()
        recorder = Recorder(self.streams, self.settings.min_bytes) if orders.detailed else None
        self._excluded.watch_modules(self.stage is not Stage.STABLE)
        self.executor.begin(self.observer, orders.plan, self.stages.plans(), recorder)
        self._inside = True
        begin = self.streams.mark()
        whole = False
        try:
            with self.observer.watching(), saved_tensors_hooks(self.executor.pack, self.executor.unpack):
                yield
            whole = True
        except torch.OutOfMemoryError as error:
            self.counts.out_of_memory += 1
            _add_note(error, self.memory_report())
            raise
        finally:
            self._inside = False
            self._excluded.watch_modules(False)
            self.executor.end()
            self.counts.steps += 1
            self._read_stalls()
            if whole:
                self._learn(orders.plan, recorder, begin)
            else:
                self.counts.aborted_steps += 1
            self._tell_refusal()

    def run_forward(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """`function(*arguments, **named)`, tried again after running out of memory: first everything that is leaving
        the device leaves and the allocator's cache is emptied, then saved tensors of earlier forwards are moved out.

        Only for a forward that no other process takes part in (no collectives, no pipeline traffic: peers would not
        repeat theirs) and that changes nothing but random state, which is restored. Never for a backward: what it has
        accumulated cannot be taken back.
        """
        for relief in (self._drain_and_empty, lambda: self.executor.evict(self.gpu_budget), None):
            state = _random_state(self.streams.device)
            try:
                return function(*arguments, **named)
            except torch.OutOfMemoryError as error:
                self.counts.out_of_memory += 1
                if relief is None:
                    _add_note(error, self.memory_report())
                    raise
                # The error's traceback holds what the failed forward had made.
                error.__traceback__ = None
            relief()
            _restore_random_state(self.streams.device, state)
        raise AssertionError("unreachable")

    def _drain_and_empty(self) -> None:
        self.executor.drain()
        self.streams.free_cached()

    # What a step teaches

    def _learn(self, followed: ExecutionPlan | None, recorder: Recorder | None, begin: Any) -> None:
        saved_bytes = sum(feature.nbytes for feature in self.executor.features)
        signature = Signature.of(self.observer.sequence(), saved_bytes)
        if recorder is not None:
            self.profiled_steps += 1
            if self.stages.profiled(signature):
                self.stages.made(signature, self._plans(recorder.finish()))
            return
        # Reading the time waits for the device: only while plans are compared.
        seconds = self.streams.seconds(begin, self.streams.mark()) if self.stages.trying() else 0.0
        # A plan that could not fit is not to be made again and again for that.
        allowed = max(self.gpu_budget, int(1.02 * followed.peak) if followed is not None else 0)
        excess = self.executor.most_in_use - allowed
        # What a step did under another kind's plan tells nothing of either.
        if self.stages.saw(signature, seconds, followed, excess > 0) and not self.executor.changed_plan:
            largest = max((feature.nbytes for feature in self.executor.features), default=0)
            self.executor.room.learn(excess, largest, self.gpu_budget)

    def _plans(self, profile: Profile) -> list[ExecutionPlan]:
        """The plans to try, no two alike."""
        self.layers = logical_layers(profile.operators, profile.timeline.seconds)
        out_rate, in_rate = self.streams.rates()
        gpu_bytes = int(self.gpu_budget * (1 - self.settings.margin))
        self.policies, plans = [], []
        for weight, share in VARIANTS[: self.settings.policies]:
            policy = make_policy(
                profile.timeline,
                profile.candidates,
                Limits(gpu_bytes, self.host_budget, out_rate * share, in_rate * share),
                self.settings.size_weight * weight,
                self.settings.move_share,
            )
            plan = _execution_plan(profile, policy, in_rate, self.settings.min_bytes)
            if plan not in plans:
                plans.append(plan)
                self.policies.append(policy)
            if not policy.swaps:
                break
        if not self.policies[0].fits and self.settings.move_share is None:
            if profile.candidates:
                why = "moving everything that can be moved leaves "
                in_use = "(weights, optimizer, and what one layer needs at once)"
            else:
                least = f"{self.settings.min_bytes:,} bytes or more, min_bytes"
                why = f"no saved tensor can be moved (of {least}), which leaves "
                in_use = "(weights, optimizer, small tensors, and what others hold up to the backward)"
            self._tell(
                f"gpu_budget = {megabytes(self.gpu_budget)}: {why}{megabytes(self.policies[0].peak)} in use {in_use}; "
                "the run goes on with that"
            )
        for policy in self.policies:
            uses = [(s.candidate.nbytes, s.candidate.birth, s.candidate.first_use) for s in policy.swaps]
            self._arenas.rehearse(uses)
        return plans

    def _read_stalls(self) -> None:
        """Of waits that the device has passed; the others stay for the next time."""
        left = []
        for begin, end in self.executor.stalls:
            if self.streams.passed(end):
                self.stalled += self.streams.seconds(begin, end)
            else:
                left.append((begin, end))
        self.executor.stalls = left[-4096:]

    # Messages

    def _usable_budget(self, asked: int | None) -> int:
        size = self.streams.memory_size()
        if asked is None:
            return int(0.9 * size)
        if asked > size:
            self._tell(f"gpu_budget = {asked:,} bytes, but the device has {size:,}; using 90 % of that")
            return int(0.9 * size)
        return asked

    def _usable_host_budget(self, asked: int) -> int:
        """Who pins more than there is, is killed by the system instead of being refused."""
        free = available()
        if free is None or asked <= free:
            return asked
        self._tell(f"host_budget = {asked:,} bytes, but the host has {free:,} to be had; using 90 % of that")
        return int(0.9 * free)

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(f"swap: {message}", stacklevel=3)

    def _tell_refusal(self) -> None:
        if self._arenas.refusal is not None:
            self._tell(f"{self._arenas.refusal}; what finds no place there stays on the device")

    def memory_report(self) -> str:
        """What holds the device's memory, as far as the manager knows."""
        lines = [
            f"swap: {megabytes(self.streams.memory_in_use())} in use on the device, budget "
            f"{megabytes(self.gpu_budget)}; {megabytes(self._arenas.in_use)} of {megabytes(self.host_budget)} of host "
            f"memory in use; {self.executor.live()} large saved tensors, the largest:"
        ]
        lines += [
            f"  {megabytes(nbytes):>14}  {origin}  ({state})" for origin, nbytes, state in self.executor.largest(8)
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """The table for the end of a run."""
        counts, stages = self.counts, self.stages
        planned = sum(known.plan.moved_bytes for known in stages.known if known.plan is not None)
        per_move = counts.moved_out / counts.moves_out if counts.moves_out else 0.0
        rows = [
            ("steps", f"{counts.steps}, {counts.aborted_steps} of them aborted; stage {self.stage.value}"),
            ("kinds of step known", f"{len(stages.known)}; {stages.changes} changes from one to another"),
            ("observer", f"{self.observer.name}; pending tensors held by {self.executor.holder.name}"),
            ("planned a step", f"{megabytes(planned)} over all kinds"),
            ("moved out", f"{megabytes(counts.moved_out)} in {counts.moves_out} copies of {megabytes(per_move)}"),
            ("  by plan", megabytes(counts.planned_out)),
            ("moved in", f"{megabytes(counts.moved_in)}, {counts.prefetches} copies ahead of time"),
            ("  late", f"{megabytes(counts.fetched_late)} in {counts.late_fetches} copies"),
            ("compute waited", f"{1e3 * self.stalled:,.1f} ms for copies"),
            ("mismatches, fallbacks", f"{counts.mismatches}, {counts.fallbacks}"),
            ("room that steps unlike their plan keep", megabytes(self.executor.room.excess)),
            ("moved for nothing", f"{megabytes(counts.still_referenced)} that others held still"),
            ("kept for want of host memory", f"{counts.no_host_room} tensors"),
            ("out of memory", f"{counts.out_of_memory} times; {counts.evicted} tensors moved out at once"),
            ("written to while saved", f"{counts.modified} tensors"),
            ("pinned host memory", f"{megabytes(self._arenas.pinned)}, at most {megabytes(self._arenas.peak)} in use"),
        ]
        if self.layers:
            rows.append(
                (
                    "logical layers",
                    f"{len(self.layers)}; equal-time estimate off by {100 * estimate_error(self.layers):.1f} %",
                )
            )
        table = two_columns("swap", rows)
        if counts.origins:
            worst = ", ".join(f"{origin} x{count}" for origin, count in counts.origins.most_common(5))
            table += f"\n  mismatches and fallbacks came from: {worst}"
        return table

    def layer_table(self) -> str:
        """Each logical layer's operators, measured time, and the equal-time estimate with its error."""
        lines = ["operators        measured ms  estimated ms   error"]
        lines += [
            f"{layer.begin:>7}-{layer.end:<7} {1e3 * layer.measured:>12.3f} {1e3 * layer.estimated:>13.3f} "
            f"{100 * layer.error:>6.1f}%"
            for layer in self.layers
        ]
        return "\n".join(lines)


def _execution_plan(profile: Profile, policy: Policy, in_rate: float, min_bytes: int) -> ExecutionPlan:
    operators, seconds = profile.operators, profile.timeline.seconds
    swaps = {
        name: Times(operators[swap.release], operators[swap.prefetch], operators[swap.candidate.first_use])
        for swap in policy.swaps
        for name in profile.members[swap.candidate.name]
    }
    fetch_at = {}
    for name, moment in profile.first_use.items():
        # What nobody planned shares the link with what was planned: twice the time that it takes alone.
        begin = seconds[moment] - 2 * profile.features[name].nbytes / in_rate
        fetch_at[name] = operators[max(0, bisect_right(seconds, begin) - 1)]
    used_at = {name: operators[moment] for name, moment in profile.first_use.items()}
    large = tuple(i for i, feature in enumerate(profile.features) if feature.nbytes >= min_bytes)
    return ExecutionPlan(profile.features, profile.packed_at, large, swaps, used_at, fetch_at, policy.peak)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    else:
        warnings.warn(text, stacklevel=3)
