"""Bad input of every kind, each with the line that it gives: the key or argument, its value, and the remedy.

Through the real commands, in this process; before any process group is started and before a run's folder is made.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimpipe.cli import app

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
MODELS = "tests.support.failing_models"
TEXT = "".join(f"The square of {i} is {i * i}.\n" for i in range(400))
# A run of a step on a small text, by itself.
SMALL = [
    "data.corpus={tmp}/text.txt",
    "data.cache_dir={tmp}/cache",
    "data.sequence_length=64",
    "model.vocab_size=300",
    "parallel.pp=1",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.steps=1",
    "train.output={tmp}/run",
]


@dataclass(frozen=True)
class Bad:
    """`command`: the arguments of `slimpipe`; `line`: what stderr says, `…` standing for anything. `{tmp}`: the test's
    folder, where `files` lie."""

    kind: str
    command: list[str]
    line: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def train(kind: str, changes: str, line: str, **more: Any) -> Bad:
    """The small run of the quickstart with `changes` to its keys."""
    return Bad(kind, ["train", QUICKSTART, *SMALL, *shlex.split(changes)], line, **more)


def config(kind: str, text: str | bytes, line: str) -> Bad:
    return Bad(kind, ["train", "{tmp}/config.yaml"], line, {"config.yaml": text})


def command(kind: str, text: str, line: str, files: Mapping[str, str | bytes] | None = None) -> Bad:
    return Bad(kind, shlex.split(text), line, files or {})


FILES = [
    Bad("no such config", ["train", "{tmp}/none.yaml"],
        "{tmp}/none.yaml: no such file; give the path of a YAML file such as configs/quickstart.yaml"),
    Bad("a folder for a config", ["train", "{tmp}"], "{tmp}: cannot be read: Is a directory"),
    config("not UTF-8", b"\xff\xfe\x00", "{tmp}/config.yaml: not a UTF-8 text (byte 0); save it as UTF-8"),
    config("not YAML", "model: {layers: 8\n",
           "{tmp}/config.yaml, line 2, column 1: not valid YAML: expected ',' or '}', but got '<stream end>'"),
    config("a key twice", "model: {layers: 8, layers: 9}\n",
           "{tmp}/config.yaml, line 1, column 20: not valid YAML: key layers is given twice"),
    config("a list of sections", "- 1\n", "{tmp}/config.yaml: must be a mapping of the sections model, parallel, …"),
    config("a section that is a number", "model: 8\n", "model = 8: must be a mapping with the keys name, layers, …"),
    config("everything missing", "{}\n", "model.layers: missing; must be a whole number > 0…"),
]  # fmt: skip
KEYS = [
    train("unknown key", "train.stepz=4", "train.stepz: unknown key; did you mean train.steps?"),
    train("unknown section", "trainer.steps=4", "trainer.steps: unknown key; did you mean train.steps?"),
    train("a section overridden", "log={}", "log: a section, not a key; override one of log.every, …"),
    train("no equals sign", "train.steps",
          "train.steps: not an override; write section.key=value, such as pipeline.slices=16"),
    train("override not YAML", "train.steps=[1", "train.steps=[1, line 1, column 3: not valid YAML: …"),
    train("a word for a number", "train.steps=many", "train.steps = many: must be a whole number > 0"),
    train("a fraction", "train.steps=1.5", "train.steps = 1.5: must be a whole number > 0"),
    train("zero", "train.steps=0", "train.steps = 0: must be a whole number > 0"),
    train("below zero", "train.seed=-1", "train.seed = -1: must be a whole number >= 0"),
    train("not a number", "optim.lr=.nan", "optim.lr = nan: must be a number > 0"),
    train("a switch for a number", "optim.lr=true", "optim.lr = true: must be a number > 0"),
    train("a number for a switch", "log.tensorboard=1", "log.tensorboard = 1: must be true or false"),
    train("no such choice", "train.dtype=float16", "train.dtype = float16: must be float32 or bfloat16"),
    train("null for what is needed", "train.steps=null", "train.steps = null: must be a whole number > 0"),
    train("too low for its purpose", "log.outlier_threshold=0.9",
          "log.outlier_threshold = 0.9: must be a number > 1 or null"),
    train("a window of one", "log.window=1", "log.window = 1: must be a whole number >= 3"),
    train("an empty list", "train.profile.steps=[]",
          "train.profile.steps = []: must be a list, each a whole number > 0"),
    train("an element of a list", "pipeline.layers_per_stage=[8.0]",
          "pipeline.layers_per_stage[0] = 8.0: must be a whole number > 0"),
    train("designed and not built", "parallel.tp=2",
          "parallel.tp = 2: tensor parallelism is not built yet; set it to 1"),
    train("a schedule that is not built", "pipeline.schedule=zb_v",
          "pipeline.schedule = zb_v: this schedule is not built yet; set it to gpipe, 1f1b, interleaved or slimpipe"),
    train("a feature that would be wrong", "model.sliding_window=4096",
          "model.sliding_window = 4096: sliding windows are not supported: sliced attention needs plain causal "
          "attention over one document a row; remove the key"),
]  # fmt: skip
AMONG_KEYS = [
    train("slices", "pipeline.slices=7",
          "pipeline.slices = 7: sequence length 64 is not divisible by 7; use a divisor (4, 8, 16)"),
    train("virtual stages", "parallel.pp=4 pipeline.virtual_stages=2 pipeline.slices=2",
          "pipeline.virtual_stages = 2 needs pipeline.slices >= parallel.pp (4): pipeline.slices = 2; use 4, 8, ... "
          "slices or pipeline.virtual_stages = 1"),
    train("slices of what no run has", f"pipeline.slices=3 data.sequence_length={10**20}",
          f"pipeline.slices = 3: sequence length {10**20} is not divisible by 3; use a divisor (2, 4, 5)"),
    train("too few layers", "parallel.pp=16",
          "model.layers = 8: fewer than the 16 stages (parallel.pp x pipeline.virtual_stages); use at most 8 stages"),
    train("layers of stages", "parallel.pp=2 'pipeline.layers_per_stage=[4, 5]'",
          "pipeline.layers_per_stage = [4, 5]: adds up to 9, but model.layers = 8"),
    train("batch", "train.global_batch=3 train.micro_batch=2",
          "train.global_batch = 3: not divisible by parallel.dp x train.micro_batch = 2; use a multiple (4, 6)"),
    train("slices of a schedule without", "pipeline.schedule=1f1b",
          "pipeline.slices = 4: pipeline.schedule = 1f1b runs whole microbatches; use pipeline.slices = 1 or "
          "pipeline.schedule = slimpipe"),
    train("microbatches of interleaved",
          "pipeline.schedule=interleaved pipeline.slices=1 parallel.pp=4 pipeline.virtual_stages=2 "
          "train.global_batch=6",
          "train.global_batch gives m = 6 microbatches: pipeline.schedule = interleaved needs a multiple of "
          "parallel.pp "
          "(4); use a batch that gives 8, 12, ..."),
    train("exchange out of phase", "pipeline.schedule=1f1b pipeline.slices=1 pipeline.exchange=balanced",
          "pipeline.exchange = balanced: its loans need ranks in phase, which schedule 1f1b does not keep; "
          "set it to off, "
          "or pipeline.schedule to slimpipe"),
    train("granule", "pipeline.exchange=balanced pipeline.exchange_granule=5",
          "pipeline.exchange_granule = 5: a slice of 16 tokens is not divisible by 5; use a divisor (4, 8, 16)"),
    train("granule of no exchange", "pipeline.exchange_granule=4",
          "pipeline.exchange_granule = 4: says something with pipeline.exchange alone, which is off; set that to "
          "balanced, or remove it"),
    train("lent keys of no exchange", "pipeline.exchange_keep=kv",
          "pipeline.exchange_keep = kv: says something with pipeline.exchange alone, which is off; set that to "
          "balanced, or remove it"),
    train("vocabulary out of phase", "pipeline.schedule=1f1b pipeline.slices=1 pipeline.vocab_parallel=true",
          "pipeline.vocab_parallel = true: its passes need ranks in phase, which schedule 1f1b does not keep; "
          "set it to "
          "false, or pipeline.schedule to slimpipe"),
    train("key-value heads", "model.kv_heads=3",
          "model.kv_heads = 3: heads 4 is not divisible by 3; use a divisor (2, 4)"),
    train("odd heads", "model.head_dim=15",
          "model.head_dim = 15: must be even: rotary positions turn pairs; change it or model.heads"),
    train("rates", "optim.min_lr=1", "optim.min_lr = 1.0: must be at most optim.lr (0.003)"),
    train("attention on a CPU", "train.attention=flash train.dtype=bfloat16",
          "train.attention = flash: runs on a GPU only; use plain or train.device: cuda"),
    train("attention and determinism",
          "train.attention=cudnn train.dtype=bfloat16 train.device=auto train.deterministic=true",
          "train.attention = cudnn: its backward is not deterministic; use flash or train.deterministic: false"),
    train("a step that is not done", "train.steps=9 'train.profile.steps=[2, 10]'",
          "train.profile.steps = [2, 10]: must not be above train.steps (9): no such step is done"),
    train("a rank that is not there", "train.profile.steps=[1] train.profile.ranks=[3]",
          "train.profile.ranks = [3]: must be below parallel.pp (1): ranks count from 0"),
    train("evaluation of nothing", "train.eval_every=2",
          "train.eval_every = 2: no data is kept for evaluation; set data.eval_share (0.01, say), data.eval_corpus or "
          "data.eval_blend"),
    train("two corpora", "'data.blend=[{corpus: a, weight: 1.0}]'",
          "data.corpus = {tmp}/text.txt: data.blend is set as well; remove one of them"),
    train("weight of nothing", "data.corpus=null 'data.blend=[{corpus: a, weight: 0}]'",
          "data.blend[0].weight = 0: must be a number > 0"),
]  # fmt: skip
DATA = [
    train("no such corpus", "data.corpus={tmp}/none.txt",
          "data.corpus = {tmp}/none.txt: no such file or folder; use a path or python_stdlib"),
    train("an empty corpus", "data.corpus={tmp}/empty.txt", "data.corpus = {tmp}/empty.txt: no text found in …",
          files={"empty.txt": ""}),
    train("a folder without text", "data.corpus={tmp}/folder",
          "data.corpus = {tmp}/folder: no text found in {tmp}/folder; a folder is searched for …",
          files={"folder/picture.bin": "x"}),
    train("too little text", "data.sequence_length=4096 train.global_batch=8",
          "data.corpus = {tmp}/text.txt: … tokens, needs at least 32769 (train.global_batch x "
          "data.sequence_length + 1); "
          "use a larger corpus or lower train.global_batch or data.sequence_length"),
    train("too large a vocabulary", "model.vocab_size=50000",
          "model.vocab_size = 50000: data.corpus = {tmp}/text.txt has text for … tokens only; use a larger corpus, or "
          "model.vocab_size of at most …"),
    train("a broken line of JSON", "data.corpus={tmp}/lines.jsonl",
          "{tmp}/lines.jsonl:2: not JSON (Expecting value, column 1); fix or remove the line",
          files={"lines.jsonl": '{"text": "a"}\n{"text": \n'}),
    train("another key of JSON", "data.corpus={tmp}/lines.jsonl data.text_key=body",
          "{tmp}/lines.jsonl:1: no key body, but text; name the one that has the text (data.text_key, "
          "--text-key), or fix "
          "the line", files={"lines.jsonl": '{"text": "a"}\n'}),
    train("half a token file", "data.corpus={tmp}/tokens",
          "data.corpus = {tmp}/tokens: {tmp}/tokens.idx: cannot be read (No such file or directory); a token file is a "
          "pair, tokens.bin and tokens.idx", files={"tokens.bin": b"\0" * 64}),
    train("a broken index", "data.corpus={tmp}/tokens",
          "data.corpus = {tmp}/tokens: {tmp}/tokens.idx: not the index of a Megatron token file (it begins with …",
          files={"tokens.bin": b"\0" * 64, "tokens.idx": b"garbage"}),
    train("no such hardware", "pipeline.hardware={tmp}/none.yaml",
          "pipeline.hardware = {tmp}/none.yaml: cannot be read: No such file or directory; give a file of "
          "configs/hardware, or …"),
    train("hardware that is none", "pipeline.hardware={tmp}/none.yaml",
          "pipeline.hardware = {tmp}/none.yaml: must be a mapping of the keys name, …", files={"none.yaml": "- 1\n"}),
    train("no such tokenizer at the root", "data.tokenizer=/nowhere",
          "data.tokenizer = /nowhere: cannot read the tokenizer …; give the path of a tokenizer.json"),
    train("no such tokenizer", "data.tokenizer={tmp}/tokenizer.json",
          "data.tokenizer = {tmp}/tokenizer.json: cannot read the tokenizer …; give the path of a tokenizer.json"),
    train("a tokenizer that is not on this machine", "data.tokenizer=gpt2-of-nobody",
          "data.tokenizer = gpt2-of-nobody: gpt2-of-nobody: neither a file or folder, nor a model in Hugging Face's "
          "cache (…/models--gpt2-of-nobody/snapshots/tokenizer.json); slimpipe fetches nothing: give the path of a "
          "tokenizer.json, or first run: hf download gpt2-of-nobody tokenizer.json tokenizer_config.json"),
    train("a broken tokenizer", "data.tokenizer={tmp}/tokenizer.json",
          "data.tokenizer = {tmp}/tokenizer.json: {tmp}/tokenizer.json is not a tokenizer …; use a tokenizer.json of …",
          files={"tokenizer.json": "{}"}),
    train("a file for a cache", "data.cache_dir={tmp}/text.txt",
          "data.cache_dir: cannot create {tmp}/text.txt/… (Not a directory); use another folder"),
]  # fmt: skip
MODEL_AND_MACHINE = [
    train("no such module", "model.name=no_such.module:Model",
          "model.name = no_such.module:Model: No module named 'no_such'; use llama or an importable "
          "package.module:Class"),
    train("no such class", f"model.name={MODELS}:Nope",
          f"model.name = {MODELS}:Nope: module '{MODELS}' has no attribute 'Nope'; use llama or an importable …"),
    train("a model that breaks the contract", f"model.name={MODELS}:WithoutHead",
          f"model.name = {MODELS}:WithoutHead: the model has no module `head`; see slimpipe/models/contract.py"),
    train("no name of a model", "'model.name=a b'",
          "model.name = a b: unknown model; must be llama or package.module:Class"),
    train("weights from nowhere", "train.init_from={tmp}/none",
          "train.init_from = {tmp}/none: no such folder; give a run, a checkpoint or a Hugging "
          "Face folder"),
    train("a package that is not installed", "log.wandb=project",
          "log.wandb = project: wandb is not installed; pip install 'slimpipe[wandb]'"),
    train("a file for a run's folder", "train.output={tmp}/text.txt",
          "train.output = {tmp}/text.txt: is a file; choose a folder"),
    train("a run's folder below a file", "train.output={tmp}/text.txt/run",
          "train.output = {tmp}/text.txt/run: cannot be written (Not a directory); choose another folder"),
]  # fmt: skip
LAUNCH = [
    train("one process for four", "parallel.pp=4",
          "parallel.pp = 4: pp 4 needs 4 processes, but here runs 1 process; use: torchrun --nproc-per-node 4 "
          "-m slimpipe "
          f"train {QUICKSTART} …"),
    train("three processes for one", "",
          "parallel.pp = 1: pp 1 needs 1 process, but here runs 3 processes; use: torchrun --nproc-per-node 1 …",
          environment={"WORLD_SIZE": "3"}),
    train("a job of words", "", "WORLD_SIZE = two: must be a whole number; unset it, or start with torchrun",
          environment={"WORLD_SIZE": "two"}),
    train("a rank of nowhere", "", "RANK = 2: must be below WORLD_SIZE (2); start with torchrun",
          environment={"WORLD_SIZE": "2", "RANK": "2"}),
]  # fmt: skip
OTHER_COMMANDS = [
    command("generate without a run", "generate {tmp} --prompt x",
            "{tmp}: no config.yaml; give the folder of a run (its train.output)"),
    command("generate elsewhere", "generate {tmp} --prompt x --device tpu",
            "--device = tpu: must be auto, cpu or cuda"),
    command("generate nothing", "generate {tmp} --prompt x --max-tokens 0",
            "…Invalid value for '--max-tokens': …"),
    command("simulate no rank", "simulate --pp 0", "--pp = 0: must be a whole number > 0"),
    command("simulate an unknown schedule", "simulate --schedule zigzag",
            "--schedule = zigzag: unknown; use one of gpipe, 1f1b, interleaved, slimpipe"),
    command("simulate too much attention", "simulate --attention-share 2",
            "--attention-share = 2.0: must be a number >= 0 and <= 1"),
    command("simulate half an option", "simulate --vocab last",
            "--vocab = last: needs --head-share, what the output layer costs"),
    command("simulate for minutes", "simulate --pp 512 --slices 512 --microbatches 512",
            "268,435,456 forwards and backwards: above 3,000,000 this would take minutes; use fewer ranks, "
            "virtual stages, "
            "slices or microbatches"),
    command("simulate on no hardware", f"simulate --hardware {{tmp}}/none.yaml --model {QUICKSTART}",
            "--hardware = {tmp}/none.yaml: cannot be read: No such file or directory; give a file of configs/hardware, "
            "or one that slimpipe calibrate wrote"),
    command("draw where nothing can be written", "draw -o {tmp}/none/x.svg",
            "--output = {tmp}/none/x.svg: cannot be written: No such file or directory"),
    command("report of no run", "report {tmp}",
            "{tmp}/metrics.jsonl: cannot be read (No such file or directory); give the folder of a run (its "
            "train.output)"),
    command("report of no step", "report {tmp}/run",
            "{tmp}/run/metrics.jsonl: holds no step yet; wait for the first one",
            {"run/metrics.jsonl": ""}),
    command("report where nothing can be written", "report {tmp}/run -o {tmp}/none/x.html",
            "--output = {tmp}/none/x.html: cannot be written: No such file or directory",
            {"run/metrics.jsonl": '{"step": 1, "loss": 2.0}\n'}),
    command("convert nothing", "convert {tmp}/none {tmp}/out",
            "{tmp}/none: no such folder; give a run, a checkpoint or a Hugging Face folder"),
    command("convert to an unknown type", "convert {tmp} {tmp}/out --dtype int8",
            "--dtype = int8: must be one of float32, bfloat16, float16"),
    command("build from nothing", "data build {tmp}/none.txt -o {tmp}/x --learn-vocab 300",
            "INPUT = {tmp}/none.txt: no such file or folder; use a path or python_stdlib"),
    command("build without a tokenizer", "data build {tmp}/text.txt -o {tmp}/x",
            "--tokenizer: give either that or --learn-vocab, the size of one to learn from the input"),
    command("build over a token file", "data build {tmp}/text.txt -o {tmp}/x --learn-vocab 300",
            "--output = {tmp}/x: {tmp}/x.idx exists; use --overwrite, or another name", {"x.bin": "", "x.idx": ""}),
    command("show no token file", "data show {tmp}/none",
            "{tmp}/none: no token file ({tmp}/none.bin and {tmp}/none.idx); slimpipe data build makes one"),
    command("an unknown option", "simulate --ranks 4", "…No such option: --ranks…"),
    command("an unknown command", "trian", "…No such command 'trian'…"),
]  # fmt: skip
KINDS = [*FILES, *KEYS, *AMONG_KEYS, *DATA, *MODEL_AND_MACHINE, *LAUNCH, *OTHER_COMMANDS]


@pytest.fixture(autouse=True)
def _no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job around these tests, and none of them may start one."""
    import torch.distributed as dist

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(dist, "rendezvous", refuse)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("bad", KINDS, ids=[bad.kind for bad in KINDS])
def test_bad_input_gives_its_line(bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    for name, content in bad.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, value in bad.environment.items():
        monkeypatch.setenv(name, value)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}

    result = CliRunner().invoke(app, [part.replace("{tmp}", str(tmp_path)) for part in bad.command])

    assert result.exit_code == 2 and result.stdout == "", result.output
    # Where data was prepared first, the bars of that stand above the line.
    said = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("data: "))
    expected = re.escape(bad.line.replace("{tmp}", str(tmp_path))).replace("…", "(.|\n)*")
    assert re.fullmatch(expected, said), said
    assert "\n" not in said or "…" in bad.line, said
    # Nothing was begun: no folder of a run, no file of a command's.
    after = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    assert after == before


def test_there_are_enough_kinds() -> None:
    kinds = [bad.kind for bad in KINDS]
    assert len(set(kinds)) == len(kinds) >= 40


@pytest.mark.parametrize(
    ("environment", "arguments", "line"),
    [
        ({"NPROC": "two"}, [QUICKSTART], "NPROC = two: must be a whole number > 0"),
        ({"NNODES": "0"}, [QUICKSTART], "NNODES = 0: must be a whole number > 0"),
        (
            {"NNODES": "3"},
            [QUICKSTART],
            "the config asks for 2 processes, which 3 nodes cannot share evenly; set NPROC or ",
        ),
        ({"NNODES": "2"}, [QUICKSTART], "NNODES=2 needs MASTER_ADDR, the host name of the first node"),
        (
            {},
            [QUICKSTART, "pipeline.slices=7"],
            "pipeline.slices = 7: sequence length 256 is not divisible by 7; use a ",
        ),
    ],
)
def test_bad_input_of_the_launcher(environment: dict[str, str], arguments: list[str], line: str) -> None:
    """`scripts/train.sh`, which says it once, before any process of the job."""
    plain = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["bash", str(ROOT / "scripts/train.sh"), *arguments]
    result = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=180)
    assert result.returncode != 0 and result.stdout == ""
    assert line in result.stderr and result.stderr.count("\n") == 1
