"""`slimpipe data`: build, prepare, show, and the lines that say what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.data import TokenFile, load_tokenizer
from slimpipe.data.indexed import bin_path, idx_path
from tests.data.conftest import write_pair

QUICKSTART = "configs/quickstart.yaml"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The one line said, besides what progress shows."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("data: ")]
    return line


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": f"Number {i} squared is {i * i}.\n"}) + "\n" for i in range(500)))
    return path


@pytest.fixture
def built(corpus: Path, tmp_path: Path) -> Path:
    result = run("build", corpus, "-o", tmp_path / "built", "--learn-vocab", 290, "--text-key", "body")
    assert result.exit_code == 0, result.output
    return tmp_path / "built"


def test_build_show_and_train_on(corpus: Path, built: Path, tmp_path: Path) -> None:
    tokens, tokenizer = TokenFile.open(built), load_tokenizer(tmp_path / "built.tokenizer")
    assert tokenizer.vocab_size == 290 and tokens.dataset.documents == 500
    assert tokenizer.decode(tokens.dataset.document(3).tolist()) == "Number 3 squared is 9.\n<|endoftext|>"
    shown = run("show", built, "--documents", 2, "--verify")
    assert shown.exit_code == 0
    rows = dict(re.findall(r"│ (\w[\w ]*?)\s+│ (.*?)\s+│", shown.stdout))
    assert rows["tokens"] == f"{tokens.count:,}" and rows["documents"] == "500"
    assert rows["sequences"] == f"500, the longest of {tokens.dataset.lengths.max()} tokens"
    assert rows["type"].startswith("uint16") and rows["between documents"] == f"token {tokenizer.end_of_text}"
    assert "document 1: 'Number 1 squared is 1.\\n<|endoftext|>'" in shown.stdout
    assert shown.stdout.endswith("its contents match their sha256\n")
    # The command that it ends with works: the run's tokenizer and vocabulary are those beside the file.
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    prepared = run("prepare", QUICKSTART, f"data.corpus={built}", "model.vocab_size=290", "data.eval_share=0.1", cache)
    assert prepared.exit_code == 0, prepared.output
    assert "training" in prepared.stdout and "evaluation" in prepared.stdout
    assert not list((tmp_path / "cache").rglob("*.bin"))


def test_build_with_a_given_tokenizer(corpus: Path, built: Path, tmp_path: Path) -> None:
    arguments = ["--tokenizer", tmp_path / "built.tokenizer", "--text-key", "body", "--processes", 2]
    assert run("build", corpus, "-o", tmp_path / "again", *arguments).exit_code == 0
    for path in (bin_path, idx_path):
        assert path(tmp_path / "again").read_bytes() == path(built).read_bytes()
    arguments.append("--no-append-end")
    assert run("build", corpus, "-o", tmp_path / "again", *arguments, "--overwrite").exit_code == 0
    assert TokenFile.open(tmp_path / "again").count == TokenFile.open(built).count - 500


def test_prepare_builds_what_training_reads(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(2000)))
    settings = [f"data.corpus={text}", f"data.cache_dir={tmp_path / 'cache'}", "model.vocab_size=300"]
    result = run("prepare", QUICKSTART, *settings)
    assert result.exit_code == 0 and "encoding" in result.stderr
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1
    again = run("prepare", QUICKSTART, *settings)
    assert again.stderr == "" and again.stdout == result.stdout


def test_show_what_megatron_has_written(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [range(70), [7, 8]])
    shown = run("show", bin_path(prefix), "--documents", 5)
    assert "unknown: it has no description of slimpipe's" in shown.stdout
    assert "document 0: 0 1 2 3" in shown.stdout and shown.stdout.endswith("document 1: 7 8\n")
    assert " 63\n" in shown.stdout.replace("\n63\n", " 63\n") and " 64" not in shown.stdout


def test_what_is_wrong_takes_one_line(corpus: Path, built: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    learn = ["--learn-vocab", 290, "--text-key", "body"]
    for arguments, line in (
        (["build", corpus, "-o", new], "--tokenizer: give either that or --learn-vocab"),
        (["build", corpus, "-o", new, "--tokenizer", "x", *learn], "--tokenizer: give either that or --learn-vocab"),
        (
            ["build", corpus, "-o", built, *learn],
            f"--output = {built}: {built}.idx exists; use --overwrite, or another",
        ),
        (["build", corpus, "-o", corpus, *learn], f"--output = {corpus}: is there already, and no token file; use an"),
        (["build", corpus, "-o", tmp_path, *learn], f"--output = {tmp_path}: is there already, and no token file"),
        (
            ["build", corpus, "-o", tmp_path / "no/x", *learn],
            f"--output = {tmp_path}/no/x: no folder {tmp_path}/no; make",
        ),
        (
            ["build", tmp_path / "no", "-o", new, *learn],
            f"INPUT = {tmp_path}/no: no such file or folder; use a path or",
        ),
        (
            ["build", corpus, "-o", new, "--learn-vocab", 290],
            f"{corpus}:1: no key text, but body; name the one that has",
        ),
        (
            ["build", corpus, "-o", new, "--tokenizer", tmp_path],
            f"{tmp_path}: has no tokenizer.json; save the tokenizer",
        ),
        (["build", corpus, "-o", new, *learn[2:], "--learn-vocab", 9999], "--learn-vocab = 9999: INPUT has text for "),
        (
            ["build", corpus, "-o", new, *learn[2:], "--learn-vocab", 3],
            "--learn-vocab = 3: a byte-level tokenizer has at",
        ),
        (["show", new], f"{new}: no token file ({new}.bin and {new}.idx); slimpipe data build makes one"),
        (["prepare", QUICKSTART, f"data.corpus={new}"], f"data.corpus = {new}: no such file or folder; use a path or"),
        (["prepare", QUICKSTART, "data.eval_share=2"], "data.eval_share = 2: must be a number >= 0 and < 1"),
        (
            ["prepare", QUICKSTART, f"data.corpus={built}", "train.global_batch=400", "data.sequence_length=512"],
            f"data.corpus = {built}: ",
        ),
    ):
        assert refused(*arguments).startswith(line)
    assert not list(tmp_path.glob("new*"))
    bin_path(built).write_bytes(bin_path(built).read_bytes()[:-2])
    assert refused("show", built).startswith(f"{built}.bin: has ")


def test_a_learnt_tokenizer_is_not_left_behind_by_a_failed_build(corpus: Path, built: Path, tmp_path: Path) -> None:
    """The old file keeps its own."""
    digest = load_tokenizer(tmp_path / "built.tokenizer").digest
    corpus.write_text(corpus.read_text() + "no JSON\n" + corpus.read_text())
    said = refused("build", corpus, "-o", built, "--learn-vocab", 280, "--text-key", "body", "--overwrite")
    assert said.startswith(f"{corpus}:501: not JSON (Expecting value, column 1); fix or remove the line")
    assert load_tokenizer(tmp_path / "built.tokenizer").digest == digest
    assert TokenFile.open(built).description is not None
