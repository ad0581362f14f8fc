"""Counts the operators of a step: the clock by which swaps are planned.

Three observers of one interface:

- `cpp`: csrc/operators.cpp, about 0.1 us an operator; the default where it was built.
- `dispatch`: a TorchDispatchMode, some 4 us an operator, but it acts at every single operator.
- `hooks`: counts saved-tensor hooks instead of operators. Costs nothing, and sees nothing between two hooks: changes of
  code that saves no tensor (a skipped optimizer step) pass unnoticed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slimpipe.kernels.merge import extension_available

Kind = Literal["auto", "cpp", "dispatch", "hooks"]


class Observer(Protocol):
    name: str

    def watching(self) -> AbstractContextManager[Any]:
        """Counts from 0 while inside."""
        ...

    def at_hook(self, kind: str) -> int:
        """The operator count now. Called once by each saved-tensor hook; `kind` names what it is given."""
        ...

    def last(self) -> int:
        """Number of the last operator's name; -1 where it is not known."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Inside, operators are the manager's own and do not count."""
        ...

    def sequence(self) -> Sequence[int]:
        """The operators of the last watch: number of the name times 2, plus 1 inside a backward."""
        ...


def make_observer(kind: Kind, at_operator: Callable[[int], None]) -> Observer:
    """`at_operator` is called by `dispatch` at every operator. Raises RuntimeError for `cpp` where it is not built."""
    if kind == "dispatch":
        return DispatchObserver(at_operator)
    if kind == "hooks" or (kind == "auto" and not _cpp_available()):
        return HookObserver()
    if not _cpp_available():
        raise RuntimeError(
            "observer = cpp: the C++ operators of csrc/ are not built (pip install --no-build-isolation -e .), or an "
            "older build is loaded; use auto, dispatch or hooks"
        )
    return CppObserver()


class CppObserver:
    name = "cpp"

    def __init__(self) -> None:
        self._library = _library()
        state = self._library.slimpipe_operators_state()
        self._count, self._last, self._paused = (
            ctypes.c_int64.from_address(state + 8 * i)  # of csrc/operators.cpp's State
            for i in range(3)
        )
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self._library.slimpipe_operators_begin():
            raise RuntimeError("another swap manager's step is under way in this process; one at a time can be counted")
        try:
            yield
        finally:
            self._library.slimpipe_operators_end()

    def at_hook(self, kind: str) -> int:
        return self._count.value

    def last(self) -> int:
        return self._last.value

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused.value = self._paused.value, 1
        try:
            yield
        finally:
            self._paused.value = before

    def sequence(self) -> Sequence[int]:
        count = self._count.value
        if not count:
            return ()
        numbers = (ctypes.c_int32 * count).from_address(self._library.slimpipe_operators_sequence())
        return np.ctypeslib.as_array(numbers).copy()  # type: ignore[return-value]


class HookObserver:
    name = "hooks"

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._sequence: list[int] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._sequence.clear()
        yield

    def at_hook(self, kind: str) -> int:
        number = self._numbers.setdefault(kind, len(self._numbers))
        self._sequence.append(2 * number + (torch._C._current_graph_task_id() != -1))
        return len(self._sequence)

    def last(self) -> int:
        return -1

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sequence(self) -> Sequence[int]:
        return tuple(self._sequence)


class DispatchObserver:
    name = "dispatch"

    def __init__(self, at_operator: Callable[[int], None]) -> None:
        self._at_operator = at_operator
        self._numbers: dict[Any, int] = {}
        self._sequence: list[int] = []
        self._last, self._is_paused = -1, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._sequence.clear()
        with _Counting(self):
            yield

    def count(self, function: Any) -> None:
        if self._is_paused:
            return
        self._last = self._numbers.setdefault(function, len(self._numbers))
        self._sequence.append(2 * self._last + (torch._C._current_graph_task_id() != -1))
        self._at_operator(len(self._sequence))

    def at_hook(self, kind: str) -> int:
        return len(self._sequence)

    def last(self) -> int:
        return self._last

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def sequence(self) -> Sequence[int]:
        return tuple(self._sequence)


class _Counting(TorchDispatchMode):
    def __init__(self, observer: DispatchObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._observer.count(function)
        return function(*args, **(kwargs or {}))


def _cpp_available() -> bool:
    return extension_available() and _library() is not None


@functools.cache
def _library() -> Any:
    """slimpipe/_C.so, which `extension_available` has loaded; None where it is of an older build."""
    library = ctypes.CDLL(str(Path(__file__).resolve().parents[1] / "_C.so"))
    try:
        library.slimpipe_operators_state.restype = ctypes.c_void_p
        library.slimpipe_operators_sequence.restype = ctypes.c_void_p
        library.slimpipe_operators_begin.restype = ctypes.c_int
    except AttributeError:
        return None
    return library
