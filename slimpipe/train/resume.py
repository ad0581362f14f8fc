"""A run that is started again goes on where its newest whole checkpoint has left it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from slimpipe.config import ConfigError
from slimpipe.config.section import follows_others
from slimpipe.config.yaml_text import shown
from slimpipe.train import checkpoint, randomness
from slimpipe.train.checkpoint import CheckpointError, Choice, Note, Peers, State, folders

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.train.session import Session

_FORMAT: Final = 1  # raise it when a reader of the last one would misread the new one
_FREE_OF_THE_MODEL: Final = frozenset({"model.init_std"})
"""Keys of the model that say nothing of one whose weights are there."""
_OF_THE_DATA: Final = ("data.", "train.global_batch", "train.seed")
_NOWHERE_IN_TRAINING: Final = ("train.output", "data.cache_dir", "log.")


def make_note(config: Config, step: int, data: Mapping[str, Any], processes: int) -> Note:
    """What a checkpoint says besides tensors. `data`: the run's place in its data, plain JSON."""
    return {
        "format": _FORMAT,
        "step": step,
        "settings": config.model_dump(mode="json"),
        "data": dict(data),
        "processes": processes,
        "torch": torch.__version__,
    }


def state_of(session: Session, rank: int) -> State:
    """All that a checkpoint holds as tensors of this process."""
    drawn = checkpoint.Part.whole(randomness.capture(session.device))
    return {**session.state(), f"random.{rank}": drawn}


def refuse_changes(config: Config) -> None:
    """Raises ConfigError where the run's newest checkpoint that can be asked is of another model.

    Before any group starts: what is whole is for all ranks to find out, later.
    """
    for there in folders.found(Path(config.train.output)):
        try:
            note = checkpoint.read_note(there)
        except (OSError, ValueError):
            continue
        refuse(config, there, note)
        return


def refuse(config: Config, there: Path, note: Note) -> None:
    """Raises ConfigError, a line for each key, where the checkpoint `there` is of another model than `config`'s."""
    if note.get("format") != _FORMAT:
        raise CheckpointError(
            f"{there}: its format is {shown(note.get('format'))}, not {_FORMAT}; use its own slimpipe"
        )
    if note.get("weights_only"):
        raise CheckpointError(
            f"{there}: holds weights alone, nothing to go on from; set train.init_from to {there.parent.parent} and "
            "train.output to another folder"
        )
    lines = [
        f"{key} = {shown(now)}: the run in train.output was trained with {shown(before)} ({there.name}); set it "
        "back, or choose another train.output"
        for key, before, now in _changes(config, note)
        if key.startswith("model.") and key not in _FREE_OF_THE_MODEL
    ]
    if lines:
        raise ConfigError(lines)


def resume(config: Config, choice: Choice, note: Note, session: Session, peers: Peers) -> list[str]:
    """Gives the session the state of the checkpoint that was chosen. What there is to tell.

    Collective over `peers`. Raises CheckpointError on every rank where any could not read.
    """
    there = choice.checkpoint
    failure: CheckpointError | None = None
    try:
        state = session.state()
        checkpoint.read(there, state)
        session.restored(state)
        drawn = checkpoint.read_tensor(there, f"random.{peers.rank}")
    except CheckpointError as error:
        failure = error
    failure = next(filter(None, peers.from_all(failure)), None)
    if failure is not None:
        raise failure
    lines = [*choice.told(), f"resumed from {there}: step {session.steps_done + 1} of {config.train.steps} is next"]
    same_ranks = note["processes"] == peers.world and not any(
        key.startswith(("parallel.", "train.device")) for key, _, _ in _changes(config, note)
    )
    if same_ranks and drawn is not None:
        randomness.restore(drawn, session.device)
    return [*lines, *_told(config, note)]


def _told(config: Config, note: Note) -> Iterator[str]:
    changes = [change for change in _changes(config, note) if not change[0].startswith(_NOWHERE_IN_TRAINING)]
    for of_data, what in ((True, "data changed"), (False, "settings changed")):
        some = [
            f"{key} {shown(before)} -> {shown(now)}"
            for key, before, now in changes
            if key.startswith(_OF_THE_DATA) == of_data
        ]
        if some:
            yield f"{what} since the checkpoint: {', '.join(some)}"


def _changes(config: Config, note: Note) -> list[tuple[str, Any, Any]]:
    """(key, value in the checkpoint, value now) of every setting that both know and that differs.

    Keys that follow from others are left out where another of their section has changed: that one is the cause.
    """
    before, now = dict(_flat(note["settings"])), dict(_flat(config.model_dump(mode="json")))
    changes = [(key, before[key], value) for key, value in now.items() if key in before and before[key] != value]
    causes = {key.split(".")[0] for key, _, _ in changes if not _follows(config, key)}
    return [change for change in changes if not _follows(config, change[0]) or change[0].split(".")[0] not in causes]


def _follows(config: Config, key: str) -> bool:
    """Whether nobody has set the key."""
    section, _, name = key.partition(".")
    values = getattr(config, section)
    return follows_others(type(values).model_fields[name]) and name not in values.model_fields_set


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if prefix == "" and isinstance(value, dict):
            yield from _flat(value, f"{key}.")
        else:
            yield f"{prefix}{key}", value


def set_aside(choice: Choice) -> list[str]:
    """Renames the damaged checkpoints that were passed over, so that they are not counted among those kept."""
    lines = []
    for there, _ in choice.passed_over:
        try:
            lines.append(f"checkpoint {there}: renamed to {folders.set_aside(there).name}")
        except OSError as error:
            lines.append(f"checkpoint {there}: cannot be renamed ({error.strerror or error}); remove it")
    return lines
