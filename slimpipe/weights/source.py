"""Where weights come from: a run, one of its checkpoints, or a Hugging Face folder. Any part of them can be had."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import Part, Peers, folders
from slimpipe.weights.errors import WeightsError
from slimpipe.weights.llama_config import CONFIG, read_model
from slimpipe.weights.llama_names import Piece, is_no_weight, pieces
from slimpipe.weights.safetensors_file import StoredTensor, read_header

if TYPE_CHECKING:
    from slimpipe.config import ModelConfig

_WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


class Source(Protocol):
    """Weights by layout-free name, and the settings of their model."""

    @property
    def model(self) -> Mapping[str, Any]:
        """The `model` section of the settings they were trained with, as far as it is known."""
        ...

    def check(self, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises WeightsError or CheckpointError, naming the first tensor that is missing, wrong or too many.

        `shapes`: what is asked for. Reads no weights."""
        ...

    def fill(self, parts: Mapping[str, Part], peers: Peers) -> None:
        """Fills these parts of weights, of any dtype and device, and reads no others. Collective over `peers`, who
        verify the files together where there is something to verify them by. Raises as `check` does."""
        ...


def open_source(folder: Path) -> Source:
    """What lies there. Raises WeightsError or CheckpointError where it is nothing that is known."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; give a run, a checkpoint or a Hugging Face folder")
    if (folder / ".metadata").exists():
        return CheckpointSource(folder)
    if folders.home(folder).is_dir():
        return CheckpointSource(None, folder)
    if (folder / CONFIG).exists():
        return HuggingFaceSource(folder)
    raise WeightsError(
        f"{folder}: neither a run (checkpoints/), a checkpoint (.metadata) nor a Hugging Face folder ({CONFIG})"
    )


class CheckpointSource:
    """A checkpoint of ours; of a run, the newest whole one."""

    def __init__(self, there: Path | None, run: Path | None = None) -> None:
        if there is None:
            assert run is not None
            found = folders.found(run)
            if not found:
                raise checkpoint.CheckpointError(f"{run}: no checkpoint in {folders.home(run)}")
            there = found[0]
        self._there, self._run = there, run

    @property
    def model(self) -> Mapping[str, Any]:
        try:
            found = checkpoint.read_note(self._there)["settings"]["model"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return found if isinstance(found, dict) else {}

    def check(self, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        stored = checkpoint.weight_shapes(self._there)
        for name, shape in shapes.items():
            if name not in stored:
                raise WeightsError(f"{self._there}: holds no weight {name} of shape {list(shape)}")
            if stored[name] != shape:
                raise WeightsError(
                    f"{self._there}: {name} has shape {list(stored[name])}, the settings say {list(shape)}"
                )
        for name in stored.keys() - shapes.keys():
            raise WeightsError(f"{self._there}: {name} {list(stored[name])} has no place in the model of the settings")

    def fill(self, parts: Mapping[str, Part], peers: Peers) -> None:
        if self._run is not None:
            # Newer ones that are damaged are passed over, as in resuming.
            self._there = checkpoint.choose(self._run, peers).checkpoint
        else:
            checkpoint.verify_together(self._there, peers)
        checkpoint.load_weights(self._there, parts, verified=True)


class HuggingFaceSource:
    """A folder with `config.json` and a Llama's weights as safetensors, in one file or several with an index."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers. Raises WeightsError."""
        self.folder, self._model = folder, read_model(folder)
        self._stored: dict[str, StoredTensor] = {}
        for path in _files(folder):
            self._stored |= read_header(path)
        self._pieces = pieces(self._model)

    @property
    def config(self) -> ModelConfig:
        """The model's settings, whole."""
        return self._model

    @property
    def model(self) -> Mapping[str, Any]:
        return self._model.model_dump(mode="json", exclude={"init_std", "name", "options"})

    @property
    def dtype(self) -> torch.dtype:
        """Of most of its weights."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self._stored.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])

    def check(self, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if model.name != "llama":
            raise WeightsError(f"{self.folder}: holds a Llama, and model.name is {model.name}; set it to llama")
        expected: set[str] = set()
        for name in self._pieces.keys() | shapes.keys():
            if name not in shapes or name not in self._pieces:
                where = "the folder's model" if name in self._pieces else "the settings' model"
                raise WeightsError(f"{self.folder}: weight {name} is in {where} alone; make the model sections agree")
        for found in self._pieces.values():
            for piece in found:
                self._find(piece)
                expected.add(piece.name)
        for name, tensor in self._stored.items():
            if name not in expected and not is_no_weight(name, self._model):
                raise WeightsError(
                    f"{tensor.path}: tensor {name} {list(tensor.shape)} has no place in a Llama of these settings"
                )

    def fill(self, parts: Mapping[str, Part], peers: Peers) -> None:
        for name, part in parts.items():
            first, count = part.offsets[0], part.tensor.shape[0]
            with torch.no_grad():
                for at, rows in self._rows(name, first, first + count):
                    part.tensor[at : at + len(rows)].copy_(rows)

    def _rows(self, name: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(place behind `start`, rows) of our weight's rows `start` .. `stop - 1`, piece by piece."""
        begin = 0
        for piece in self._pieces[name]:
            end = begin + piece.shape[0]
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield first - start, self._find(piece).rows(first - begin, last - first)
            begin = end

    def _find(self, piece: Piece) -> StoredTensor:
        """Raises WeightsError where it is not there, or has another shape."""
        found = self._stored.get(piece.name)
        if found is None:
            raise WeightsError(f"{self.folder}: holds no tensor {piece.name} of shape {list(piece.shape)}")
        if found.shape != piece.shape:
            raise WeightsError(
                f"{found.path}: tensor {piece.name} has shape {list(found.shape)}, {CONFIG} says {list(piece.shape)}"
            )
        return found


def _files(folder: Path) -> list[Path]:
    """The folder's files of weights. Raises WeightsError where there are none, or not all."""
    index = folder / _INDEX
    if not index.exists():
        if (folder / _WHOLE).exists():
            return [folder / _WHOLE]
        pickled = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
        why = f"; {pickled.name} is a pickle, and those are not read" if pickled is not None else ""
        raise WeightsError(f"{folder}: neither {_WHOLE} nor {_INDEX}{why}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: damaged; fetch it again") from error
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise WeightsError(f"{index}: names {name}, which is not in the folder; fetch it")
    return [folder / name for name in names]
