"""`train.init_from`: a new run's first weights from another run, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slimpipe.config.yaml_text import shown
from slimpipe.models.contract import build_model
from slimpipe.train.checkpoint import CheckpointError, Peers, folders
from slimpipe.weights import Source, WeightsError, open_source

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.runtime.watchdog import Progress
    from slimpipe.train.session import Session

_FREE: Final = ("rope_theta", "rope_scaling", "norm_eps")
"""May be others than the weights were trained with, as in making a model fit for longer contexts; that is told."""
_FIXED: Final = (
    "name",
    "layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_embeddings",
    "qk_norm",
)


def refuse_source(config: Config) -> None:
    """Raises ValueError where the run cannot start from what `train.init_from` names. Before any group starts; a run
    that has checkpoints goes on from those, and nothing is asked."""
    if config.train.init_from is None or folders.found(Path(config.train.output)):
        return
    source = _open(config)
    known = source.model
    for key in _FIXED:
        ours = _plain(config, key)
        if key in known and known[key] != ours:
            raise ValueError(
                f"model.{key} = {shown(ours)}: the weights of train.init_from = {config.train.init_from} were trained "
                f"with {shown(known[key])}; set it so"
            )
    shapes = {name: tuple(parameter.shape) for name, parameter in build_model(config).named_parameters()}
    try:
        source.check(config.model, shapes)
    except (WeightsError, CheckpointError) as error:
        raise _told(config, error) from error


def start_from(config: Config, session: Session, peers: Peers, progress: Progress) -> list[str]:
    """Gives the session the weights; what there is to tell. Collective over `peers`; raises ValueError on all."""
    source, failure = _open(config), None
    state = session.state()
    parts = {name.removeprefix("model."): part for name, part in state.items() if name.startswith("model.")}
    try:
        with progress.patience(f"reading {config.train.init_from}"):
            source.fill(parts, peers)
    except (WeightsError, CheckpointError) as error:
        failure = _told(config, error)
    failure = next(filter(None, peers.from_all(failure)), None)
    if failure is not None:
        raise failure
    session.restored(state)
    lines = [f"weights from {config.train.init_from}"]
    for key in _FREE:
        ours, theirs = _plain(config, key), source.model.get(key)
        if key in source.model and ours != theirs:
            lines.append(f"model.{key} = {shown(ours)}: those weights were trained with {shown(theirs)}")
    return lines


def _open(config: Config) -> Source:
    assert config.train.init_from is not None
    try:
        return open_source(Path(config.train.init_from).expanduser())
    except (WeightsError, CheckpointError) as error:
        raise _told(config, error) from error


def _told(config: Config, error: ValueError) -> ValueError:
    """Under the key, which says the folder already."""
    folder = config.train.init_from
    return ValueError(f"train.init_from = {folder}: {str(error).removeprefix(f'{folder}: ')}")


def _plain(config: Config, key: str) -> Any:
    return config.model.model_dump(mode="json")[key]
