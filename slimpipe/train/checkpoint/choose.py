"""The newest whole checkpoint of a run, and why newer ones were passed over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slimpipe.train.checkpoint import digests, folders
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.peers import Peers


@dataclass(frozen=True)
class Choice:
    """The same on every rank. `taken` is None where the run has no checkpoint at all."""

    taken: Path | None
    passed_over: tuple[tuple[Path, str], ...] = ()
    """Newer ones, each with what is wrong with it."""

    @property
    def checkpoint(self) -> Path:
        """What is taken, where there must be one."""
        assert self.taken is not None
        return self.taken

    def told(self) -> list[str]:
        """A line for each that was passed over."""
        return [f"checkpoint {checkpoint}: passed over, {fault}" for checkpoint, fault in self.passed_over]


def choose(run: Path, peers: Peers) -> Choice:
    """The newest checkpoint that every rank finds whole; collective over `peers`, who verify a share of it each.

    Raises CheckpointError where the run has checkpoints and none is whole: starting over is for the user to say.
    """
    passed_over: list[tuple[Path, str]] = []
    for checkpoint in peers.from_lead(folders.found(run)):
        shares = peers.from_all(digests.faults(checkpoint, peers.rank, peers.world))
        faults = list(dict.fromkeys(fault for share in shares for fault in share))
        if not faults:
            return Choice(checkpoint, tuple(passed_over))
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        passed_over.append((checkpoint, f"{faults[0]}{more}"))
    if passed_over:
        told = "; ".join(f"{checkpoint.name}: {fault}" for checkpoint, fault in passed_over)
        raise CheckpointError(
            f"{folders.home(run)}: no checkpoint there is whole ({told}); bring one back, or remove that folder to "
            "start from the beginning"
        )
    return Choice(None)


def verify_together(checkpoint: Path, peers: Peers) -> None:
    """Raises CheckpointError, on every rank, where a file is missing, truncated or damaged; each of `peers` looks at a
    share of them."""
    faults = [fault for share in peers.from_all(digests.faults(checkpoint, peers.rank, peers.world)) for fault in share]
    if faults:
        raise CheckpointError(f"{checkpoint}: {faults[0]}; use another checkpoint")


def newest(run: Path) -> Choice:
    """As `choose`, for this process alone. Raises CheckpointError also where there is none."""
    choice = choose(run, Peers())
    if choice.taken is None:
        raise CheckpointError(f"{run}: no checkpoint in {folders.home(run)}; give the folder of a run (train.output)")
    return choice
