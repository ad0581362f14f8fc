"""What the host does for one layer and slice, without a GPU: calls counted, and their time on this CPU.

    python -m benchmarks.host_path                # a row in benchmarks/results/host_path.jsonl; half a minute

A tiny model goes the way it would on a GPU: for compiled code, cuDNN and Triton kernels there are stand-ins, which give
back empty tensors. So times are of Python, of torch's dispatch and autograd and of Triton's launch, but without the
launches' own end in the driver; what the stand-ins take is nearly nothing. Numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import record
from benchmarks.pipeline import config_of
from slimpipe.kernels import fuse, merge
from slimpipe.kernels.attention.cudnn import CudnnAttention
from slimpipe.kernels.attention.pieces import InPieces
from slimpipe.kernels.norm import rms_norm_forward
from slimpipe.kernels.triton.launch import Launcher
from slimpipe.runtime import engine as engine_module
from slimpipe.schedule import Op
from slimpipe.train.collector import heap_set_aside
from slimpipe.train.session import Session

RESULTS = Path(__file__).parent / "results" / "host_path.jsonl"
SLICES, TOKENS = 64, 16
NO_DEVICE = -2
"""Triton keeps code by device: none that there is shall find the stand-ins'."""
KINDS = {Op.FORWARD: "forward", Op.BACKWARD: "backward"}
COLUMNS = {"pass": "", "us": ".0f", "aten": ".0f", "compiled": ".0f", "triton": ".0f", "cudnn": ".0f", "nodes": ".0f"}


@dataclass
class Calls:
    """What one layer and slice takes, or a whole step: dispatches of aten, calls of compiled code, launches of Triton
    kernels, calls of cuDNN's attention, and nodes of autograd's graph. `aten` is without what is inside the others."""

    aten: Counter[str] = field(default_factory=Counter)
    compiled: int = 0
    triton: int = 0
    cudnn: int = 0
    nodes: int = 0

    def __sub__(self, other: Calls) -> Calls:
        fewer = Counter(self.aten)
        fewer.subtract(other.aten)
        numbers = {
            name: getattr(self, name) - getattr(other, name) for name in ("compiled", "triton", "cudnn", "nodes")
        }
        return Calls(Counter({name: count for name, count in fewer.items() if count}), **numbers)

    def __floordiv__(self, by: int) -> Calls:
        numbers = {name: getattr(self, name) // by for name in ("compiled", "triton", "cudnn", "nodes")}
        return Calls(Counter({name: count // by for name, count in self.aten.items()}), **numbers)

    def row(self) -> dict[str, int]:
        return {**asdict(self), "aten": self.aten.total()}


class _Counting(TorchDispatchMode):
    """Counts dispatches into `host.calls.aten`, but for those inside of a stand-in."""

    def __init__(self, host: HostPath) -> None:
        super().__init__()
        self._host = host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._host.inside:
            self._host.calls.aten[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


class HostPath:
    """The stand-ins. `calls`: counted since it was last set."""

    def __init__(self) -> None:
        self.calls, self.inside = Calls(), False
        self._known: dict[object, Any] = {}

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """CPU tensors go the way of a GPU's."""
        host, aten = self, torch.ops.aten

        def attention(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
            host.calls.cudnn += 1
            return host.known("attention", lambda: (_by_tokens(q), q.new_empty(*q.shape[:3], 1)))

        def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
            host.calls.cudnn += 1
            return host.known(("backward", k.shape), lambda: tuple(_by_tokens(x) for x in (q, k, v)))

        with ExitStack() as stack:
            for patch in (
                mock.patch.object(fuse, "runs_compiled", lambda argument: True),
                mock.patch.object(fuse, "runs_triton", lambda argument: True),
                mock.patch.object(fuse.Fused, "compiled", property(self._compiled)),
                mock.patch.object(merge, "extension_available", lambda: False),
                mock.patch.object(aten, "_scaled_dot_product_cudnn_attention", attention),
                mock.patch.object(aten, "_scaled_dot_product_cudnn_attention_backward", backward),
                self._triton(),
            ):
                stack.enter_context(patch)
            yield

    def known(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` gave for `key`, as new tensors that share its memory: nothing is computed twice."""
        self.inside = True
        if key not in self._known:
            self._known[key] = make()
        found = self._known[key]
        fresh = (
            found.detach() if isinstance(found, Tensor) else None if found is None else tuple(x.detach() for x in found)
        )
        self.inside = False
        return fresh

    def _compiled(self, function: fuse.Fused[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.compiled += 1
            shapes = tuple(x.shape for x in arguments if isinstance(x, Tensor))
            return self.known((function.plain, shapes), lambda: function.plain(*arguments))

        return call

    @contextmanager
    def _triton(self) -> Iterator[None]:
        """Triton compiles for an H100, and launches nothing."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        host = self

        class Launcher:
            """Kernels keep it for as long as the process lives: the count is the driver's of the day."""

            def __init__(self, *made_of: Any) -> None: ...

            def __call__(self, *arguments: Any) -> None:
                driver.active.host.calls.triton += 1

        class Utils:
            def get_device_properties(self, device: int) -> dict[str, int]:
                return {"max_shared_mem": 232448}

            def load_binary(self, *binary: Any) -> tuple[Any, ...]:
                return object(), object(), 0, 0, 1024

            def unload_module(self, module: object) -> None: ...

        class Driver:
            launcher_cls, utils = Launcher, Utils()

            def __init__(self) -> None:
                self.host = host

            def get_current_target(self) -> Any:
                return GPUTarget("cuda", 90, 32)

            def get_current_device(self) -> int:
                return NO_DEVICE

            def get_current_stream(self, device: int) -> int:
                return 0

        with mock.patch.object(driver, "_active", Driver()):
            try:
                yield
            finally:
                for launcher in launchers():
                    launcher.codes.clear()
                    launcher.kernel.device_caches.pop(NO_DEVICE, None)


def launchers() -> list[Launcher]:
    """Of all Triton kernels that this process has met."""
    modules = [module for name, module in sys.modules.items() if name.startswith("slimpipe.kernels.triton.")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]


def _by_tokens(x: Tensor) -> Tensor:
    """Empty, shaped as x [b, heads, s, d] and laid out by tokens, as cuDNN does it."""
    b, heads, s, d = x.shape
    return x.new_empty(b, s, heads, d).transpose(1, 2)


def session_of(layers: int, slices: int = SLICES, recompute: str = "norms") -> Session:
    """Hidden 64, one rank, slices of 16 tokens, no vocabulary passes."""
    model = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "intermediate_size": 96, "vocab_size": 64}
    case = {"ranks": 1, "layers": layers, "length": slices * TOKENS, "m": 1, "v": 1, "n": slices, "steps": 1}
    case |= {"recompute": recompute, "vocab": False, "dtype": "float32", "device": "cpu", "model": model}
    session = Session(config_of(case))
    session.engine.backend = InPieces(CudnnAttention())
    return session


def step(session: Session) -> None:
    tokens = torch.zeros(1, session.config.data.sequence_length, dtype=torch.int64)
    session.step_gradients(tokens, tokens)


def calls_of(layers: int, slices: int, recompute: str) -> dict[str, Calls]:
    """Of a whole step, by pass."""
    host = HostPath()
    found = {name: Calls() for name in KINDS.values()}
    edges: list[GradientEdge] = []

    def edge_of(out: Tensor) -> GradientEdge:
        edges.append(get_gradient_edge(out))
        return edges[-1]

    def counting(method: Callable[[Any], None], name: str) -> Callable[[Any], None]:
        def count(action: Any) -> None:
            host.calls = found[name]
            with _Counting(host):
                method(action)
            while edges:
                found[name].nodes += len(_nodes(edges.pop()))

        return count

    with host.stand_in(), mock.patch.object(engine_module, "get_gradient_edge", edge_of):
        session = session_of(layers, slices, recompute)
        step(session)
        edges.clear()
        methods = dict(session.engine.methods)
        session.engine.methods = methods | {op: counting(methods[op], name) for op, name in KINDS.items()}
        step(session)
    return found


def _nodes(edge: GradientEdge) -> set[Any]:
    seen, new = set(), [edge.node]
    while new:
        node = new.pop()
        # Of a parameter whose gradient is summed elsewhere nothing comes to its own node.
        if node is not None and node not in seen and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            new += [following for following, _ in node.next_functions]
    return seen


def calls_per_layer(recompute: str = "norms") -> dict[str, Calls]:
    """Of one layer and one slice in mid-sequence, by pass: layers and slices of difference between steps."""
    return {
        name: (
            (calls_of(2, 6, recompute)[name] - calls_of(1, 6, recompute)[name])
            - (calls_of(2, 4, recompute)[name] - calls_of(1, 4, recompute)[name])
        )
        // 2
        for name in KINDS.values()
    }


def seconds_per_layer(layers: int, steps: int, around: Any = None) -> dict[str, float]:
    """By pass, of a step's time in it over slices and layers, ends of the model included: the least of `steps`. Time of
    this process, for other processes may be running."""
    host, spent = HostPath(), dict.fromkeys(KINDS.values(), 0.0)

    def timed(method: Callable[[Any], None], name: str) -> Callable[[Any], None]:
        def run(action: Any) -> None:
            began = time.process_time()
            method(action)
            spent[name] += time.process_time() - began

        return run

    rows = []
    with host.stand_in():
        session = session_of(layers)
        step(session)
        methods = dict(session.engine.methods)
        session.engine.methods = methods | {op: timed(methods[op], name) for op, name in KINDS.items()}
        with heap_set_aside(), around or nullcontext():
            for _ in range(steps):
                spent |= dict.fromkeys(spent, 0.0)
                step(session)
                rows.append({name: seconds / (SLICES * layers) for name, seconds in spent.items()})
    return min(rows, key=lambda row: sum(row.values()))


def full_collections() -> dict[str, float]:
    """Milliseconds of the garbage collector's full look, as it is in any process and in a run's steps."""

    def milliseconds() -> float:
        began = time.process_time()
        gc.collect()
        return 1e3 * (time.process_time() - began)

    gc.collect()
    found = {"collection_ms": milliseconds()}
    with heap_set_aside():
        return found | {"collection_in_steps_ms": milliseconds()}


def calls_of_a_norm() -> dict[str, float]:
    """Microseconds of one call of RMSNorm's forward: compiled (for this CPU, whose kernel is in it: 16 rows of 64
    numbers), and by Triton, its questions before the launch included."""
    x, weight = torch.randn(1, TOKENS, 64), torch.randn(64)
    host, norm = HostPath(), rms_norm_forward

    def microseconds(call: Callable[..., Any]) -> float:
        times = timeit.repeat(lambda: call(x, weight, 1e-5), number=1000, repeat=7, timer=time.process_time)
        return 1e6 * min(times[1:]) / 1000  # the first compiles

    with torch.no_grad():
        found = {"norm_compiled_us": microseconds(norm.compiled)}
        with host.stand_in():
            return found | {"norm_triton_us": microseconds(norm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print what takes the time; nothing is recorded")
    parser.add_argument("--calls", action="store_true", help="print aten's calls by name; nothing is recorded")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        seconds_per_layer(options.layers, 2, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return
    calls = calls_per_layer()
    if options.calls:
        for name, found in calls.items():
            print(name, found)
        return
    seconds = seconds_per_layer(options.layers, options.steps)
    rows = [{"pass": name, "us": 1e6 * seconds[name], **calls[name].row()} for name in KINDS.values()]
    row = {"layers": options.layers, "passes": rows, **full_collections(), **calls_of_a_norm()}
    record.append(options.results, row | record.circumstances("python -m benchmarks.host_path"))
    print({key: value for key, value in row.items() if key.endswith(("_ms", "_us"))})
    record.table(rows, COLUMNS, "one layer and slice; microseconds of this CPU")


if __name__ == "__main__":
    main()
