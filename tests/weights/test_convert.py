"""Conversion both ways: the same logits, the same bits, one tensor at a time, and one line for what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.config import load_config
from slimpipe.kernels.attention import select_backend
from slimpipe.train import checkpoint
from slimpipe.train.generate import CachedSlice, load_run
from slimpipe.weights import WeightsError, convert
from slimpipe.weights.safetensors_file import StoredTensor, read_header
from slimpipe.weights.source import HuggingFaceSource
from tests.support.hugging_face import LLAMA3, PLAIN, logits, random_tensors, write_folder, write_safetensors

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": LLAMA3,
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "head_dim": {"head_dim": 16, "num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
}
TOKENS = torch.randint(301, (100,), generator=torch.Generator().manual_seed(1))


def our_logits(run: Path) -> Tensor:
    """[S, V] of the run's newest checkpoint, through our own model."""
    place = torch.device("cpu")
    _, stage = load_run(run, place)
    backend = select_backend("plain", place, torch.float32, False)
    with torch.no_grad():
        hidden = stage.forward(TOKENS[None], CachedSlice({}, torch.arange(len(TOKENS)), backend))
        assert stage.head is not None
        return hidden[0] @ stage.head.weight.T  # type: ignore[operator,union-attr]


def distance(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).norm() / reference.norm())


def run_of(tmp_path: Path, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32, files: int = 3) -> Path:
    """A Hugging Face folder and the run's folder made of it."""
    config = {**PLAIN, **changes}
    source = write_folder(tmp_path / "there", config, random_tensors(config, dtype), files)
    convert(source, tmp_path / "here", None, 10**9, show=False)
    return tmp_path / "here"


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_has_its_logits_and_goes_back_to_the_same_bits(name: str, tmp_path: Path) -> None:
    run, config = run_of(tmp_path, MODELS[name]), {**PLAIN, **MODELS[name]}
    expected = random_tensors(config)
    assert distance(our_logits(run), logits(config, expected, TOKENS)) < 5e-6

    convert(run, tmp_path / "back", None, 100_000, show=False)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in read_header(file).items()}
    assert len(files) > 1 and max(file.stat().st_size for file in files) < 110_000
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].rows(0, len(expected[name])), expected[name]) for name in expected)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: tensor.path.name for name, tensor in found.items()}
    back = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: back[key] for key in config} == config


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Its own weights converted here, and ours read there."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**PLAIN, **MODELS[name]}, initializer_range=0.2)
    ).float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        expected = theirs(TOKENS[None]).logits[0].double()
    theirs.save_pretrained(tmp_path / "there", max_shard_size="100KB")
    convert(tmp_path / "there", tmp_path / "here", None, 10**9, show=False)
    assert distance(our_logits(tmp_path / "here"), expected) < 5e-6
    convert(tmp_path / "here", tmp_path / "back", None, 100_000, show=False)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(again(TOKENS[None]).logits[0].double(), expected)


def test_a_wrong_order_of_rows_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary pairs as Meta's own files have them, and gate and up the wrong way round."""
    config = {**PLAIN}
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    neighbours = {**tensors, name: tensors[name].view(4, 6, 2, 48).transpose(1, 2).reshape(48, 48)}
    swapped = {
        **tensors,
        "model.layers.1.mlp.gate_proj.weight": tensors["model.layers.1.mlp.up_proj.weight"],
        "model.layers.1.mlp.up_proj.weight": tensors["model.layers.1.mlp.gate_proj.weight"],
    }
    for number, wrong in enumerate((neighbours, swapped)):
        convert(write_folder(tmp_path / f"t{number}", config, wrong), tmp_path / f"h{number}", None, 10**9, show=False)
        assert distance(our_logits(tmp_path / f"h{number}"), logits(config, tensors, TOKENS)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_types_stay_as_they_are_unless_another_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    run = run_of(tmp_path, {}, dtype)
    there = checkpoint.newest(run).checkpoint
    assert {weight.dtype for weight in checkpoint.read_weights(there).values()} == {dtype}
    expected = random_tensors(PLAIN, dtype)
    convert(run, tmp_path / "back", str(dtype).removeprefix("torch."), 10**9, show=False)
    found = read_header(tmp_path / "back/model.safetensors")
    assert all(torch.equal(found[name].rows(0, len(expected[name])), expected[name]) for name in expected)
    convert(run, tmp_path / "wide", "float32", 10**9, show=False)
    wide = read_header(tmp_path / "wide/model.safetensors")
    assert all(torch.equal(wide[name].rows(0, len(expected[name])), expected[name].float()) for name in expected)


def test_our_files_are_read_by_the_reference_library_and_its_by_us(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    convert(run_of(tmp_path, {}, torch.bfloat16), tmp_path / "back", "bfloat16", 10**9, show=False)
    expected = random_tensors(PLAIN, torch.bfloat16)
    theirs = library.load_file(tmp_path / "back/model.safetensors")
    assert theirs.keys() == expected.keys()
    assert all(torch.equal(theirs[name], expected[name]) for name in expected)
    library.save_file(expected, tmp_path / "theirs.safetensors")
    ours = read_header(tmp_path / "theirs.safetensors")
    assert all(torch.equal(ours[name].rows(0, len(expected[name])), expected[name]) for name in expected)


def test_one_tensor_is_read_at_a_time_and_no_byte_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    rows = StoredTensor.rows

    def counted(tensor: StoredTensor, first: int, count: int) -> Tensor:
        found = rows(tensor, first, count)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(StoredTensor, "rows", counted)
    run_of(tmp_path, {})
    tensors = random_tensors(PLAIN)
    assert sorted(read) == sorted(tensor.nbytes for tensor in tensors.values())


def test_memory_holds_a_weight_or_two_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP keeps what it writes into a file until that is done: with one file for all, that is the whole model."""
    made: list[StorageWeakRef] = []
    alive: list[int] = []
    fill = HuggingFaceSource.fill

    def counted(source: HuggingFaceSource, parts: Mapping[str, checkpoint.Part], peers: checkpoint.Peers) -> None:
        fill(source, parts, peers)
        made.extend(StorageWeakRef(part.tensor.untyped_storage()) for part in parts.values())
        alive.append(sum(not memory.expired() for memory in made))

    monkeypatch.setattr(HuggingFaceSource, "fill", counted)
    run_of(tmp_path, {})
    assert len(alive) == 27 and max(alive) <= 2


def test_the_command(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "there", PLAIN, random_tensors(PLAIN))
    (source / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "here")])
    assert (done.exit_code, done.stdout) == (0, f"wrote {tmp_path / 'here'}\n")
    config = load_config(tmp_path / "here/config.yaml")
    assert (config.model.kv_heads, config.model.vocab_size, config.data.sequence_length) == (2, 301, 128)
    assert (tmp_path / "here/tokenizer.json").read_text() == "{}"
    again = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "here")])
    assert again.exit_code == 2
    assert again.stderr == f"{tmp_path / 'here'}: is there already; choose another folder, or remove it\n"


def edited(key: str, value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        if value is None:
            del config[key]
        else:
            config[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def changed(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = random_tensors(PLAIN)
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors)

    return edit


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


Q = "model.layers.1.self_attn.q_proj.weight"
BAD: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda folder: shutil.rmtree(folder),
        "{folder}: no such folder; give a run, a checkpoint or a Hugging Face folder",
    ),
    (
        lambda folder: (folder / "config.json").unlink(),
        "{folder}: neither a run (checkpoints/), a checkpoint (.metadata) nor a Hugging Face folder (config.json)",
    ),
    (lambda folder: (folder / "config.json").write_text("{"), "{folder}/config.json: no JSON"),
    (edited("model_type", "qwen2"), "{folder}/config.json: model_type = qwen2: not supported; only llama is"),
    (
        edited("attention_bias", True),
        "{folder}/config.json: attention_bias = true: biases in attention are not",
    ),
    (edited("mlp_bias", True), "{folder}/config.json: mlp_bias = true: biases in the feed-forward block are not"),
    (edited("hidden_act", "gelu"), '{folder}/config.json: hidden_act = "gelu": this activation'),
    (edited("quantization_config", {"bits": 4}), "{folder}/config.json: quantization_config = "),
    (
        edited("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        "{folder}/config.json: rope_scaling of type yarn: not supported; only linear and llama3 are",
    ),
    (
        edited("rope_scaling", {"rope_type": "linear"}),
        "{folder}/config.json: rope_scaling of type linear: has no",
    ),
    (edited("vocab_size", None), "{folder}/config.json: has no vocab_size; is it a Llama's?"),
    (edited("num_key_value_heads", 3), "{folder}/config.json: model.kv_heads = 3: heads 4 is not divisible by 3"),
    (pickled, "{folder}: neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin is a pickle"),
    (changed(lambda t: t.pop(Q)), f"{{folder}}: holds no tensor {Q} of shape [48, 48]"),
    (
        changed(lambda t: t.update({Q: t[Q][:40]})),
        f"{{folder}}/model.safetensors: tensor {Q} has shape [40, 48], config.json says [48, 48]",
    ),
    (
        changed(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})),
        "{folder}/model.safetensors: tensor model.layers.0.self_attn.q_proj.bias [48] has no place in a Llama",
    ),
    (
        changed(lambda t: t.update({Q: torch.zeros(48, 48, dtype=torch.int8)})),
        f"{{folder}}/model.safetensors: tensor {Q} is of type I8, not one of F64, F32, F16, BF16",
    ),
    (cut, "{folder}/model.safetensors: cut off at "),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "{folder}/model.safetensors: no safetensors"),
]


@pytest.mark.parametrize(("damage", "line"), BAD, ids=[line for _, line in BAD])
def test_what_is_wrong_is_told_in_one_line_and_nothing_is_written(
    damage: Callable[[Path], Any], line: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "there", PLAIN, random_tensors(PLAIN))
    damage(folder)
    done = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "here")])
    assert done.exit_code == 2
    told = [text for text in done.stderr.splitlines() if not text.startswith("weights ")]
    assert len(told) == 1 and told[0].startswith(line.format(folder=folder)), done.stderr
    assert not (tmp_path / "here").exists() and not list(tmp_path.glob(".*"))


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "there", PLAIN, random_tensors(PLAIN), files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="names model-00002-of-00003.safetensors, which is not in the folder"):
        convert(folder, tmp_path / "here", None, 10**9, show=False)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("qk_norm: true", "model.qk_norm = true: Hugging Face's Llama has no norms of queries and keys"),
        (
            "name: slimpipe.models.example:ParallelBlocks",
            "model.name = slimpipe.models.example:ParallelBlocks: only",
        ),
        ("vocab_size: 299", "embedding.weight has shape [301, 48]"),
    ],
)
def test_runs_that_have_no_form_there_are_refused(change: str, line: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, {})
    key = change.split(":")[0]
    text = (run / "config.yaml").read_text()
    old = next(text for text in text.splitlines() if text.startswith(f"  {key}:"))
    (run / "config.yaml").write_text(text.replace(old, f"  {change}"))
    with pytest.raises(WeightsError) as caught:
        convert(run, tmp_path / "back", None, 10**9, show=False)
    assert line in str(caught.value)
    assert not (tmp_path / "back").exists()
