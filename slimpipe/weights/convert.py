"""`slimpipe convert`: a Hugging Face folder into a run's folder with a checkpoint, and back.

One tensor is in memory at a time, and the folder appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import Part, Peers
from slimpipe.weights.errors import WeightsError
from slimpipe.weights.llama_config import CONFIG, to_json
from slimpipe.weights.llama_names import Piece, pieces
from slimpipe.weights.safetensors_file import TensorToWrite, write_file
from slimpipe.weights.source import HuggingFaceSource, open_source

if TYPE_CHECKING:
    from slimpipe.config import Config

_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_DTYPES: Final = ("float32", "bfloat16", "float16")

Advance = Callable[[int], None]
"""Told how many bytes have been written."""


def convert(source: Path, output: Path, dtype: str | None, shard_bytes: int, show: bool = True) -> str:
    """Writes `output` from what lies in `source`; a line on what was written.

    A Hugging Face folder becomes a run's folder: `config.yaml` with its `model` section, to be completed, and a
    checkpoint of the weights alone. A run becomes `config.json` and safetensors files of `shard_bytes` at most, unless
    a tensor is larger. `dtype`: of the weights written; None: as they are, and of a run as it trains. `show`: progress,
    on stderr. Raises WeightsError or CheckpointError.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise WeightsError(f"--dtype = {dtype}: must be one of {', '.join(_DTYPES)}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise WeightsError(f"{output}: is there already; choose another folder, or remove it")
    found = open_source(source)
    kind = None if dtype is None else getattr(torch, dtype)
    with _whole(output) as folder:
        if isinstance(found, HuggingFaceSource):
            _to_run(found, folder, output, kind, show)
        else:
            _to_hugging_face(source, folder, kind, shard_bytes, show)
        for name in _TOKENIZER:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
    return f"wrote {output}"


@dataclasses.dataclass(frozen=True)
class _Deferred(Part):
    """A part that is read when it is written; `tensor` has no memory."""

    read: Callable[[], Tensor]

    def values(self) -> Tensor:
        return self.read()


def _to_run(source: HuggingFaceSource, folder: Path, output: Path, dtype: torch.dtype | None, show: bool) -> None:
    model, kind = source.config, dtype or source.dtype
    shapes = {name: _stacked(found) for name, found in pieces(model).items()}
    source.check(model, shapes)
    config = _settings(source, output, kind)
    (folder / "config.yaml").write_text(_HEADING.format(source=source.folder) + config.to_yaml(), encoding="utf-8")
    with _progress(sum(map(math.prod, shapes.values())) * kind.itemsize, show) as advance:

        def deferred(name: str, shape: tuple[int, ...]) -> Part:
            def read() -> Tensor:
                part = Part.whole(torch.empty(shape, dtype=kind))
                source.fill({name: part}, Peers())
                advance(part.tensor.nbytes)
                return part.tensor

            return _Deferred(torch.empty(shape, dtype=kind, device="meta"), (0,) * len(shape), shape, read)

        state = {f"model.{name}": deferred(name, shape) for name, shape in shapes.items()}
        note = {"format": 1, "step": 0, "settings": config.model_dump(mode="json"), "weights_only": True}
        checkpoint.write(checkpoint.place(folder, 0), state, note, Peers(), a_file_a_tensor=True)


_HEADING: Final = """\
# Made by `slimpipe convert` from {source}. The model section is that model's; what follows it is a start, to be
# edited: name your data, the steps and the layout. To train from these weights, copy this file and set
# train.init_from to this folder and train.output to another.
"""


def _settings(source: HuggingFaceSource, output: Path, dtype: torch.dtype) -> Config:
    """Settings that load, with the model's section right."""
    from slimpipe.config import Config

    given = json.loads((source.folder / CONFIG).read_text(encoding="utf-8")).get("max_position_embeddings")
    length = min(given, 8192) if isinstance(given, int) and given > 0 else 2048
    return Config.from_dict(
        {
            "model": source.config.record(),
            "data": {"corpus": "python_stdlib", "sequence_length": length},
            "train": {
                "steps": 1,
                "output": str(output),
                "global_batch": 1,
                "dtype": "bfloat16" if dtype == torch.bfloat16 else "float32",
            },
        }
    )


def _to_hugging_face(source: Path, folder: Path, dtype: torch.dtype | None, shard_bytes: int, show: bool) -> None:
    from slimpipe.config import load_config
    from slimpipe.data import load_tokenizer

    run = source.parent.parent if (source / ".metadata").exists() else source
    if not (run / "config.yaml").exists():
        raise WeightsError(f"{run}: no config.yaml; give the folder of a run (its train.output)")
    config = load_config(run / "config.yaml")
    there = source if run != source else checkpoint.newest(run).checkpoint
    if run != source:
        checkpoint.verify(there)
    name_of_dtype = config.train.dtype if dtype is None else str(dtype).removeprefix("torch.")
    kind: torch.dtype = getattr(torch, name_of_dtype)
    end = load_tokenizer(run / "tokenizer.json").end_of_text if (run / "tokenizer.json").exists() else None
    described = to_json(config.model, config.data.sequence_length, name_of_dtype, end)
    stored = checkpoint.weight_shapes(there)
    for name, found in pieces(config.model).items():
        if stored.get(name) != _stacked(found):
            raise WeightsError(
                f"{there}: {name} has shape {list(stored.get(name, ()))}, {run / 'config.yaml'} says "
                f"{list(_stacked(found))}"
            )
    with _progress(_bytes(config, kind), show) as advance:
        tensors = _tensors(there, config, kind, advance)
        shards = list(_shards(tensors, shard_bytes))
        total = sum(tensor.nbytes for tensor in tensors.values())
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
            placed = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for file, shard in zip(names, shards, strict=True):
            write_file(folder / file, shard)
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _bytes(config: Config, dtype: torch.dtype) -> int:
    return sum(math.prod(_stacked(found)) for found in pieces(config.model).values()) * dtype.itemsize


def _stacked(found: tuple[Piece, ...]) -> tuple[int, ...]:
    """Shape of the weight that the pieces make up."""
    return (sum(piece.shape[0] for piece in found), *found[0].shape[1:])


def _tensors(there: Path, config: Config, dtype: torch.dtype, advance: Advance) -> dict[str, TensorToWrite]:
    """Their tensors, each to be read as so many rows of one of ours."""

    def tensor(name: str, piece: Piece, first: int, total: int) -> TensorToWrite:
        def read() -> Tensor:
            values = torch.empty(piece.shape, dtype=torch.float32)
            checkpoint.load_weights(there, {name: Part.rows(values, first, total)}, verified=True)
            lowered = values.to(dtype)
            advance(lowered.nbytes)
            return lowered

        return TensorToWrite(dtype, piece.shape, read)

    found: dict[str, TensorToWrite] = {}
    for name, parts in pieces(config.model).items():
        first = 0
        for piece in parts:
            found[piece.name] = tensor(name, piece, first, _stacked(parts)[0])
            first += piece.shape[0]
    return found


def _shards(tensors: Mapping[str, TensorToWrite], most: int) -> Iterator[dict[str, TensorToWrite]]:
    """In order, files of `most` bytes at most, unless a tensor alone is larger."""
    shard: dict[str, TensorToWrite] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


@contextmanager
def _whole(output: Path) -> Iterator[Path]:
    """A folder beside `output`, renamed to it at the end, and removed where that does not come."""
    folder = output.with_name(f".{output.name}.unfinished")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        if output.exists():
            output.rmdir()
        folder.rename(output)
    except OSError as error:
        reason = error.strerror or error
        raise WeightsError(f"{output}: not written ({reason}); make room or choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as display:
        task = display.add_task("weights", total=total)
        yield lambda count: display.advance(task, count)
