"""What is read of a checkpoint, by whom and in what parts; damage told in one line; nothing of a file is executed."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import CheckpointError, Part, Peers, metadata
from slimpipe.train.checkpoint.digests import Digest, read_manifest, write_manifest
from slimpipe.train.checkpoint.write import quiet_alone
from tests.support.pool import Pool

STEP = 3


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"layers.{i}": torch.randn(10 + i, 6, generator=generator) for i in range(4)}


def write(run: Path, step: int = STEP, seed: float = 0.0) -> Path:
    state = {f"model.{name}": Part.whole(weight + seed) for name, weight in weights().items()}
    folder = checkpoint.place(run, step)
    moments = {"optimizer.layers.0.exp_avg": Part.whole(torch.ones(10, 6))}
    checkpoint.write(folder, state | moments, {"step": step}, Peers())
    return folder


# ---- what is there ----


def test_weights_alone_are_read_by_their_names_in_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert checkpoint.weight_shapes(folder) == {name: tuple(weight.shape) for name, weight in weights().items()}
    found = checkpoint.read_weights(folder)
    assert found.keys() == weights().keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights().items())


def test_dcp_reads_it_without_slimpipe(tmp_path: Path) -> None:
    state = {"model.layers.2": torch.zeros(12, 6), "optimizer.layers.0.exp_avg": torch.zeros(10, 6)}
    quiet_alone()
    dcp.load(state, checkpoint_id=write(tmp_path), no_dist=True)
    assert torch.equal(state["model.layers.2"], weights()["layers.2"])
    assert state["optimizer.layers.0.exp_avg"].eq(1).all()


def test_a_part_of_a_weight_is_read_by_itself_and_into_other_types(tmp_path: Path) -> None:
    rows, low = torch.zeros(4, 6), torch.zeros(11, 6, dtype=torch.bfloat16)
    checkpoint.load_weights(write(tmp_path), {"layers.2": Part.rows(rows, 5, 12), "layers.1": low})
    assert torch.equal(rows, weights()["layers.2"][5:9])
    assert torch.equal(low, weights()["layers.1"].bfloat16())


def save_rows(rank: int, world: int, run: Path, total: int) -> None:
    """Every rank its rows, cut as the vocabulary is (the last may have none), and all of them a weight they share."""
    size = -(-total // world)
    whole = torch.arange(2.0 * total).view(total, 2)
    mine = whole[rank * size : (rank + 1) * size]
    state = {"model.cut": Part.rows(mine, rank * size, total), "model.shared": Part.whole(torch.ones(3))}
    checkpoint.write(checkpoint.place(run, 1), state, {"rank": rank}, Peers.of_job("test", 60))


@pytest.mark.parametrize(("ranks", "total"), [(2, 7), (3, 7), (4, 5)])
def test_rows_of_several_ranks_are_one_weight(
    ranks: int, total: int, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool(ranks).run(save_rows, tmp_path, total)
    folder = checkpoint.place(tmp_path, 1)
    found = checkpoint.read_weights(folder)
    assert torch.equal(found["cut"], torch.arange(2.0 * total).view(total, 2)) and found["shared"].eq(1).all()
    assert checkpoint.read_note(folder) == {"rank": 0}
    across = torch.zeros(3, 2)
    checkpoint.load_weights(folder, {"cut": Part.rows(across, 2, total)})
    assert torch.equal(across, found["cut"][2:5])


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("layers.9", (3,), "holds no tensor model.layers.9; are the settings those it was trained with?"),
        ("layers.1", (3,), "model.layers.1 has shape (11, 6), the settings say (3,); use the settings it was trained"),
    ],
)
def test_a_weight_that_does_not_fit_is_named(name: str, shape: tuple[int, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.load_weights(write(tmp_path), {name: torch.zeros(shape)})
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


# ---- damage ----


def flip_a_bit(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(data))
    data[place] ^= 1 << random.Random(seed).randrange(8)
    path.write_bytes(data)


def a_tensor_file(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (lambda f: os.truncate(a_tensor_file(f), 900), r" has 900 bytes, not \d+"),
    "missing shard": (lambda f: a_tensor_file(f).unlink(), "__0_0.distcp is missing"),
    "empty shard": (lambda f: a_tensor_file(f).write_bytes(b""), r" has 0 bytes, not \d+"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "other metadata": (lambda f: (f / ".metadata").write_bytes(b"no"), r".metadata has 2 bytes, not \d+"),
    "flipped note": (lambda f: (f / "note.json").write_text('{\n "step": 4\n}\n'), "note.json is damaged"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "truncated manifest": (lambda f: os.truncate(f / "manifest.json", 50), "manifest.json is damaged"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text('{"files": {}}'), "manifest.json is damaged"),
    "manifest elsewhere": (
        lambda f: write_manifest(f, {"../step_3/note.json": Digest(1, "")}),
        "manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_in_one_line(damage: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    do, said = DAMAGE[damage]
    do(folder)
    for read in (checkpoint.verify, checkpoint.read_weights):
        with pytest.raises(CheckpointError, match=said) as refusal:
            read(folder)
        assert "\n" not in str(refusal.value) and str(refusal.value).startswith(f"{folder}: ")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("file", ["shard", ".metadata", "note.json", "manifest.json"])
def test_any_flipped_bit_is_noticed_or_changes_nothing(file: str, seed: int, tmp_path: Path) -> None:
    folder = write(tmp_path)
    known = read_manifest(folder)
    flip_a_bit(a_tensor_file(folder) if file == "shard" else folder / file, seed)
    if file == "manifest.json":
        try:
            if read_manifest(folder) == known:
                return  # between the words
        except ValueError:
            pass
    with pytest.raises(CheckpointError):
        checkpoint.verify(folder)


def test_the_newest_whole_one_is_taken_and_the_others_are_told(tmp_path: Path) -> None:
    folders = [write(tmp_path, step) for step in (2, 10, 9, 30)]
    (tmp_path / "checkpoints" / "step_last").mkdir()
    (tmp_path / "checkpoints" / ".step_40.unfinished").mkdir()
    (tmp_path / "checkpoints" / "step_50").write_text("a file")
    os.truncate(a_tensor_file(folders[3]), 5)
    (folders[1] / "manifest.json").unlink()
    choice = checkpoint.newest(tmp_path)
    assert choice.taken == folders[2]
    assert [path for path, _ in choice.passed_over] == [folders[3], folders[1]]
    first, second = choice.told()
    assert first.startswith(f"checkpoint {folders[3]}: passed over, __0_0.distcp has 5 bytes, not ")
    assert second == f"checkpoint {folders[1]}: passed over, manifest.json is missing"


def test_where_none_is_whole_that_is_an_error_and_none_at_all_another(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        checkpoint.newest(tmp_path)
    for step in (1, 2):
        (write(tmp_path, step) / ".metadata").unlink()
    line = r"no checkpoint there is whole \(step_2: .metadata is missing; step_1: .metadata is missing\); bring one"
    with pytest.raises(CheckpointError, match=line):
        checkpoint.newest(tmp_path)


def chosen(rank: int, world: int, run: Path) -> tuple[str, tuple[str, ...]]:
    choice = checkpoint.choose(run, Peers.of_job("test", 60))
    return choice.checkpoint.name, tuple(fault for _, fault in choice.passed_over)


def test_ranks_verify_a_share_each_and_agree(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    """The damaged file is in one rank's share only."""
    for step in (1, 2):
        pool(1).run(save_rows, tmp_path, 7)
        checkpoint.place(tmp_path, 1).rename(checkpoint.place(tmp_path, 10 * step))
    flip_a_bit(checkpoint.place(tmp_path, 20) / "note.json", 1)
    assert pool(3).run(chosen, tmp_path) == [("step_10", ("note.json is damaged (its sha256 is another)",))] * 3


# ---- malice ----


class Attack:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def plant(folder: Path, name: str, data: bytes) -> None:
    """Someone who can write to the folder can also write the manifest."""
    (folder / name).write_bytes(data)
    digest = Digest(len(data), hashlib.sha256(data).hexdigest())
    write_manifest(folder, {**read_manifest(folder), name: digest})


def test_a_pickle_that_would_run_something_is_refused_unrun(tmp_path: Path) -> None:
    folder, mark = write(tmp_path), tmp_path / "mark"
    evil = pickle.dumps(Attack(mark))
    plant(folder, ".metadata", evil)
    for read in (checkpoint.read_weights, checkpoint.weight_shapes):
        with pytest.raises(CheckpointError, match=r"cannot be read \(names posix.mkdir, which no description of"):
            read(folder)
    assert not mark.exists()
    pickle.loads(evil)  # the attack is a real one
    assert mark.exists()


def test_an_attack_inside_what_looks_like_metadata_is_refused_unrun(tmp_path: Path) -> None:
    folder, mark = write(tmp_path), tmp_path / "mark"
    described = metadata.loads((folder / ".metadata").read_bytes())
    described.planner_data = Attack(mark)
    plant(folder, ".metadata", pickle.dumps(described))
    with pytest.raises(CheckpointError, match="names posix.mkdir"):
        checkpoint.read_weights(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "os system", "torch load", "torch.storage _load_from_bytes", "torch Tensor.map_"]
)
def test_no_name_but_those_of_data_is_looked_up(name: str) -> None:
    module, attribute = name.split()
    for pickled in (
        f"c{module}\n{attribute}\n.".encode(),
        b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, attribute)) + b"\x93.",
    ):
        with pytest.raises(pickle.UnpicklingError, match="which no description of tensors needs"):
            metadata.loads(pickled)


def test_an_attack_in_a_tensors_place_is_refused_unrun(tmp_path: Path) -> None:
    folder, mark = write(tmp_path), tmp_path / "mark"
    info = next(iter(metadata.loads((folder / ".metadata").read_bytes()).storage_data.values()))
    evil = tmp_path / "evil"
    torch.save(Attack(mark), evil)
    shard = bytearray((folder / info.relative_path).read_bytes())
    shard[info.offset : info.offset + info.length] = evil.read_bytes().ljust(info.length, b"\0")[: info.length]
    plant(folder, info.relative_path, bytes(shard))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_weights(folder)
    assert not mark.exists()


def test_what_is_no_tensor_is_not_unpickled_either(tmp_path: Path) -> None:
    """DCP keeps other objects as pickles and would load those without a question."""
    folder, mark = write(tmp_path), tmp_path / "mark"
    quiet_alone()
    dcp.save({"model.x": torch.zeros(2), "step": Attack(mark)}, checkpoint_id=folder, no_dist=True)
    for name in (".metadata", "__0_0.distcp"):
        plant(folder, name, (folder / name).read_bytes())
    with pytest.raises(CheckpointError, match="holds no tensor step"):
        checkpoint.read(folder, {"step": Part.whole(torch.zeros(()))})
    assert checkpoint.read_weights(folder).keys() == {"x"} and not mark.exists()
