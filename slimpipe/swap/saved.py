"""What the hooks keep for a saved tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slimpipe.swap.arena import Slot
from slimpipe.swap.features import Feature
from slimpipe.swap.geometry import Layout
from slimpipe.swap.streams import Event


class State(Enum):
    HERE = "on the device"
    LEAVING = "on the device, its copy to the host under way"
    AWAY = "on the host"
    COMING = "on its way back, or back"


class Saved:
    """A byte range of one storage that autograd saved, at one version; shared by all views of it that were saved.

    Lives as long as one of its views does, so as long as autograd keeps it. `original` is a detached alias: it keeps
    the storage alive and knows its version.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "changed",
        "feature",
        "generation",
        "held",
        "in_event",
        "key",
        "missing",
        "nbytes",
        "number",
        "original",
        "out_event",
        "planned",
        "reference",
        "restored",
        "restored_on",
        "retire",
        "serial",
        "slot",
        "source",
        "state",
        "used",
        "version",
        "waiting",
    )

    def __init__(
        self,
        original: Tensor,
        reference: StorageWeakRef,
        version: int,
        begin: int,
        nbytes: int,
        retire: Callable[[Saved], None],
    ) -> None:
        self.original: Tensor | None = original
        self.version, self.begin, self.nbytes = version, begin, nbytes
        self.reference = reference
        self.key: Any = None
        self.feature: Feature | None = None
        self.source = ""
        """Name of the autograd node that made the tensor."""
        self.serial = 0
        self.number: int | None = None
        """Place in the known sequence of its step, None where it matches none."""
        self.generation = 0
        self.state = State.HERE
        self.planned = False
        self.missing = False
        """The device has this much less in use than it would have without swapping."""
        self.held: int | None = None
        """While it leaves: the number by which the pending queue holds `original`."""
        self.slot: Slot | None = None
        self.out_event: Event | None = None
        self.in_event: Event | None = None
        self.restored: Tensor | None = None
        self.restored_on: Any = None
        self.waiting = 0
        """Views that were not unpacked yet."""
        self.used = False
        self.changed: tuple[int, int] | None = None
        """(version expected, version found) where it was written to after it was saved."""
        self.retire = retire

    @property
    def origin(self) -> str:
        feature = self.feature
        what = "" if feature is None else f" {str(feature.dtype).removeprefix('torch.')}{list(feature.shape)}"
        return self.source + what

    def __del__(self) -> None:
        self.retire(self)


class View:
    """One saved tensor: its layout in a `Saved`."""

    __slots__ = ("layout", "saved", "unpacked")

    def __init__(self, saved: Saved, layout: Layout) -> None:
        self.saved, self.layout, self.unpacked = saved, layout, False

    def __del__(self) -> None:
        if not self.unpacked:
            self.saved.waiting -= 1


SavedReference = weakref.ReferenceType[Saved]
