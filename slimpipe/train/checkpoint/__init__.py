"""Checkpoints through torch.distributed.checkpoint, under names that do not depend on the layout.

A checkpoint holds fp32 weights (`model.<name>`), the optimizer's moments (`optimizer.<name>.exp_avg`, `.exp_avg_sq`)
and counts of steps, as tensors; a note of the rest (`note.json`); and a manifest of every file's digest. It is written
beside its place and renamed into it: a half-written one is never found. Any layout reads it, and reading executes
nothing of it. docs/checkpoints.md is the user's view.
"""

from slimpipe.train.checkpoint.choose import Choice, choose, newest, verify_together
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.folders import place
from slimpipe.train.checkpoint.parts import Part, State
from slimpipe.train.checkpoint.peers import Peers
from slimpipe.train.checkpoint.read import load_weights, read, read_tensor, read_weights, shapes, verify, weight_shapes
from slimpipe.train.checkpoint.saver import WRITER, Keeping, Saver
from slimpipe.train.checkpoint.write import Note, read_note, write

__all__ = [
    "WRITER",
    "CheckpointError",
    "Choice",
    "Keeping",
    "Note",
    "Part",
    "Peers",
    "Saver",
    "State",
    "choose",
    "load_weights",
    "newest",
    "place",
    "read",
    "read_note",
    "read_tensor",
    "read_weights",
    "shapes",
    "verify",
    "verify_together",
    "weight_shapes",
    "write",
]
