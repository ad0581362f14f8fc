"""From the settings to samplers: sources, blends, the evaluation split, tokenizers; and a line for what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimpipe.config import DataConfig
from slimpipe.data import DataError, IndexedDataset, RunData, SequenceSampler, load_tokenizer, open_data
from slimpipe.data.build import build_tokens
from slimpipe.data.corpus import open_corpus
from slimpipe.data.indexed import bin_path, idx_path
from slimpipe.data.split import held_out
from slimpipe.data.tokenizer import train_tokenizer
from slimpipe.data.tokens import tokenizer_path
from tests.data.conftest import write_pair

S = 32
Opened = Callable[..., RunData]


def places(sampler: SequenceSampler | None) -> set[tuple[str, int]]:
    """Every token of an epoch: of which source, and which of its tokens."""
    assert sampler is not None
    found = set()
    # Weights stretch an epoch of some sources over several of others.
    for place in sampler.places(0, 40 * sum(sampler.windows)):
        found.update((place.source, token) for token in range(place.start, place.stop))
    return found


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    """The same kind of text in several forms, each of another part of it."""
    rows = [f"The square of {i} is {i * i}, and its cube is {i**3:,}.\n" for i in range(900)]
    paths = {name: tmp_path / name for name in ("a.txt", "b.jsonl", "folder")}
    paths["a.txt"].write_text("".join(rows[:300]))
    paths["b.jsonl"].write_text("".join(json.dumps({"text": row}) + "\n" for row in rows[300:600]))
    paths["folder"].mkdir()
    (paths["folder"] / "c.md").write_text("".join(rows[600:]))
    return paths


# ---- sources and blends ----


def test_a_blend_of_text_learns_one_tokenizer(opened: Opened, texts: dict[str, Path]) -> None:
    blend = [{"corpus": str(path), "weight": weight} for path, weight in zip(texts.values(), (2, 1, 1.0), strict=True)]
    data = opened(blend=blend)
    assert data.tokenizer is not None and data.tokenizer.vocab_size == 300
    names = [part.source for part in data.train.parts]
    assert names == [str(path) for path in texts.values()]
    taken = [place.source for place in data.train.places(0, 40)]
    assert [taken.count(name) for name in names] == [20, 10, 10]
    b = data.train.parts[1].tokens.dataset
    assert b.documents == 300 and data.tokenizer.decode(b.document(1).tolist()[:-1]).startswith("The square of 301 is")
    assert [part.tokens.dataset.documents for part in data.train.parts] == [1, 300, 1]


def test_python_stdlib_in_a_blend(opened: Opened, texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.data.corpus._STDLIB_BYTES", 200_000)
    data = opened(blend=[{"corpus": "python_stdlib"}, {"corpus": str(texts["a.txt"])}])
    assert data.train.parts[0].count > 20_000


def test_tokens_of_megatrons(opened: Opened, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "corpus_text_document", [range(100), range(100)])
    for name in (prefix, bin_path(prefix), idx_path(prefix)):
        data = opened(corpus=str(name))
        assert data.tokenizer is None and data.train.parts[0].tokens.description is None
        assert sorted(place.start for place in data.train.places(0, 6)) == [i * S for i in range(6)]
    assert not (tmp_path / "cache").exists()


def test_tokens_built_by_slimpipe_bring_their_tokenizer(opened: Opened, texts: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    train_tokenizer([texts["a.txt"].read_text()], 280, "a").save(folder)
    for name in ("a.txt", "b.jsonl"):
        build_tokens(
            [open_corpus(str(texts[name]))], folder, tmp_path / name[0], "text", progress=False, keep_tokenizer=True
        )
    blend = [{"corpus": str(tmp_path / "a")}, {"corpus": str(tmp_path / "b.idx")}]
    data = opened(280, blend=blend)
    assert data.tokenizer is not None and data.tokenizer.digest == load_tokenizer(folder).digest
    # Text beside them is encoded with the same.
    data = opened(300, blend=[*blend, {"corpus": str(texts["folder"])}])
    assert data.train.parts[2].tokens.description is not None
    assert data.train.parts[2].tokens.description.tokenizer == load_tokenizer(folder).digest
    with pytest.raises(
        DataError, match=r"^model.vocab_size = 279: the tokenizer has 280 tokens; set it to that or more"
    ):
        opened(279, blend=blend)


def test_a_given_tokenizer(opened: Opened, texts: dict[str, Path], tmp_path: Path) -> None:
    train_tokenizer([texts["a.txt"].read_text()], 270, "a").save(tmp_path / "saved")
    data = opened(corpus=str(texts["a.txt"]), tokenizer=str(tmp_path / "saved"))
    assert data.tokenizer is not None and data.tokenizer.vocab_size == 270
    assert data.train.vocab_size == 300
    again = opened(corpus=str(texts["a.txt"]), tokenizer=str(tmp_path / "saved" / "tokenizer.json"))
    assert again.fingerprint == data.fingerprint


def test_the_text_key(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x", "body": f"number {i} " * 5}) + "\n" for i in range(99)))
    data = opened(corpus=str(path), text_key="body", vocab_size=265)
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.train.parts[0].tokens.dataset.document(7).tolist()[:-1]) == "number 7 " * 5


def test_fingerprint_is_of_all_that_is_read(opened: Opened, tmp_path: Path) -> None:
    one, two = write_pair(tmp_path / "one", [range(500)]), write_pair(tmp_path / "two", [range(1, 501)])
    blend = [{"corpus": str(one), "weight": 1.0}, {"corpus": str(two), "weight": 2.0}]
    marks = [
        opened(600, corpus=str(one)).fingerprint,
        opened(600, corpus=str(two)).fingerprint,
        opened(600, corpus=str(one), eval_share=0.2).fingerprint,
        opened(600, corpus=str(one), eval_share=0.4).fingerprint,
        opened(600, corpus=str(one), eval_corpus=str(two)).fingerprint,
        opened(600, blend=blend).fingerprint,
        opened(600, blend=blend[::-1]).fingerprint,
        opened(600, blend=[blend[0], {**blend[1], "weight": 3.0}]).fingerprint,
    ]
    assert len(set(marks)) == len(marks)
    assert opened(600, blend=[{**source, "weight": source["weight"] / 2} for source in blend]).fingerprint == marks[5]


# ---- evaluation ----


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.floats(0.05, 0.9))
def test_training_and_evaluation_share_no_token(tmp_path: Path, lengths: list[int], share: float) -> None:
    prefix = write_pair(tmp_path / "x", [range(length) for length in lengths])
    dataset = IndexedDataset.open(prefix)
    count = sum(lengths)
    cut = held_out(dataset, share)
    assert 0 <= cut <= count
    kept = count - cut
    assert abs(kept - share * count) <= share * count / 2 + 1
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    target = count - round(count * share)
    near = [start for start in starts if 0 < start < count and abs(start - target) <= (count - target) // 2]
    assert cut in near if near else cut == target
    config = DataConfig(corpus=str(prefix), sequence_length=S, eval_share=share, cache_dir=str(tmp_path / "cache"))
    try:
        data = open_data(config, 300, 0, progress=False)
    except DataError:
        assert cut <= S or kept <= S
        return
    train, evaluation = places(data.train), places(data.evaluation)
    assert not train & evaluation
    # Every window of both is there: all that is missing is less than a window at the end of each.
    assert len(train) > cut - S and len(evaluation) > kept - S


def test_every_source_of_a_blend_is_split(opened: Opened, tmp_path: Path) -> None:
    blend = [
        {"corpus": str(write_pair(tmp_path / name, [range(50)] * 40)), "weight": weight}
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]
    data = opened(blend=blend, eval_share=0.25)
    assert data.evaluation is not None
    assert not places(data.train) & places(data.evaluation)
    assert [(part.start, part.stop) for part in data.train.parts] == [(0, 1500)] * 2
    assert [(part.start, part.stop, part.weight) for part in data.evaluation.parts] == [
        (1500, 2000, 3),
        (1500, 2000, 1),
    ]


def test_other_data_for_evaluation(opened: Opened, texts: dict[str, Path]) -> None:
    data = opened(corpus=str(texts["a.txt"]), eval_corpus=str(texts["b.jsonl"]))
    assert data.evaluation is not None and data.tokenizer is not None
    assert [part.source for part in data.evaluation.parts] == [str(texts["b.jsonl"])]
    (part,) = data.evaluation.parts
    assert part.tokens.description is not None and part.tokens.description.tokenizer == data.tokenizer.digest
    # The tokenizer is learnt from what is trained on alone.
    assert data.tokenizer.digest == getattr(opened(corpus=str(texts["a.txt"])).tokenizer, "digest", None)
    blend = [{"corpus": str(texts["b.jsonl"]), "weight": 1.0}, {"corpus": str(texts["folder"]), "weight": 3.0}]
    data = opened(corpus=str(texts["a.txt"]), eval_blend=blend)
    assert data.evaluation is not None and [part.weight for part in data.evaluation.parts] == [1, 3]
    assert opened(corpus=str(texts["a.txt"])).evaluation is None


# ---- what is wrong, a line each ----


def _sparse(prefix: Path) -> Path:
    """A pair whose token 5 is 299 and the others 0."""
    return write_pair(prefix, [[0] * 5 + [299] + [0] * 200])


def _bad_inputs(folder: Path) -> dict[str, tuple[dict[str, object], str]]:
    """name: (settings, the expected line)."""
    text = folder / "text.txt"
    text.write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(300)))
    (folder / "empty.txt").touch()
    (folder / "nothing").mkdir()
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (folder / "blank.jsonl").write_text('{"text": ""}\n')
    pair = write_pair(folder / "pair", [range(200), range(90)])
    write_pair(folder / "floats", [range(200)], "float32")
    write_pair(folder / "short", [range(S)])
    write_pair(folder / "none", [])
    for name, place, new in (("magic", 0, b"XX"), ("version", 9, b"\7"), ("code", 17, b"\x63")):
        bad = write_pair(folder / name, [range(200)])
        data = idx_path(bad).read_bytes()
        idx_path(bad).write_bytes(data[:place] + new + data[place + len(new) :])
    os.truncate(bin_path(write_pair(folder / "cut", [range(200)])), 100)
    idx_path(write_pair(folder / "alone", [range(200)])).unlink()
    saved, other = folder / "saved", folder / "other"
    train_tokenizer([text.read_text()], 270, "t").save(saved)
    train_tokenizer([text.read_text()], 265, "t").save(other)
    (folder / "no.json").write_text("{}")
    (folder / "no_end").mkdir()
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    renamed = json.dumps(tokenizer).replace("<|endoftext|>", "<|stop|>")
    (folder / "no_end" / "tokenizer.json").write_text(renamed)
    for name, its_tokenizer in (("built", saved), ("built_2", other)):
        build_tokens(
            [open_corpus(str(text))], its_tokenizer, folder / name, "text", progress=False, keep_tokenizer=True
        )
    build_tokens([open_corpus(str(text))], saved, folder / "stray", "text", progress=False)
    t, d, b = str(text), "data.corpus", "data.blend"

    def blend(*names: object) -> dict[str, object]:
        return {"blend": [{"corpus": str(name)} for name in names]}

    def at(name: str) -> str:
        return str(folder / name)

    return {
        "missing": (
            {"corpus": at("missing")},
            f"{d} = {at('missing')}: no such file or folder; use a path or python_stdlib",
        ),
        "missing in a blend": (blend(t, at("missing")), f"{b}[1].corpus = {at('missing')}: no such file or folder"),
        "missing for evaluation": (
            {"corpus": t, "eval_corpus": at("missing")},
            f"data.eval_corpus = {at('missing')}: no such file or folder",
        ),
        "empty file": ({"corpus": at("empty.txt")}, f"{d} = {at('empty.txt')}: no text found in {at('empty.txt')}; "),
        "empty folder": (
            {"corpus": at("nothing")},
            f"{d} = {at('nothing')}: no text found in {at('nothing')}; a folder is",
        ),
        "no text in it": ({"corpus": at("blank.jsonl"), "tokenizer": at("saved")}, f"{at('blank.jsonl')}: has no text"),
        "no key": (
            {"corpus": at("bad.jsonl"), "tokenizer": at("saved")},
            f"{at('bad.jsonl')}:2: no key text, but body; name",
        ),
        "other key": (
            {"corpus": at("bad.jsonl"), "tokenizer": at("saved"), "text_key": "body"},
            f"{at('bad.jsonl')}:1: no key body, but text; name",
        ),
        "floats": (
            {"corpus": at("floats")},
            f"{d} = {at('floats')}: {at('floats')}.bin: holds numbers of type float32",
        ),
        "magic": (
            {"corpus": at("magic")},
            f"{d} = {at('magic')}: {at('magic')}.idx: not the index of a Megatron token",
        ),
        "version": ({"corpus": at("version")}, f"{d} = {at('version')}: {at('version')}.idx: version 7 of Megatron's"),
        "code": ({"corpus": at("code")}, f"{d} = {at('code')}: {at('code')}.idx: unknown type of tokens, code 99"),
        "cut": (
            {"corpus": at("cut")},
            f"{d} = {at('cut')}: {at('cut')}.bin: has 100 bytes, but cut.idx says 200 tokens",
        ),
        "no index": ({"corpus": at("alone")}, f"{d} = {at('alone')}: {at('alone')}.idx: cannot be read (No such file"),
        "no pair": ({"corpus": at("x.bin")}, f"{d} = {at('x.bin')}: {at('x')}.idx: cannot be read (No such file"),
        "no tokens": (
            {"corpus": at("none")},
            f"{d} = {at('none')}: 0 tokens, needs at least 33 (data.sequence_length + 1)",
        ),
        "short": (
            {"corpus": at("short")},
            f"{d} = {at('short')}: 32 tokens, needs at least 33 (data.sequence_length + 1)",
        ),
        "long sequences": (
            {"corpus": at("pair"), "sequence_length": 290},
            f"{d} = {at('pair')}: 290 tokens, needs at least 291 (data.sequence_length + 1); use a larger corpus or "
            "lower",
        ),
        "short in a blend": (blend(pair, at("short")), f"{b}[1].corpus = {at('short')}: 32 tokens, needs at least 33"),
        "little for evaluation": (
            {"corpus": at("pair"), "eval_share": 0.01},
            f"data.eval_share = 0.01: keeps 3 tokens of {at('pair')} for evaluation, needs at least 33 "
            "(data.sequence_length + 1); raise it",
        ),
        "little for training": (
            {"corpus": at("pair"), "eval_share": 0.99},
            f"{d} = {at('pair')}: 3 tokens, needs at least 33",
        ),
        "evaluated on what is trained on": (
            {"corpus": at("pair"), "eval_corpus": at("pair.idx")},
            f"data.eval_corpus = {at('pair.idx')}: the same tokens as data.corpus, which are trained on; use other "
            "data",
        ),
        "much vocabulary": (
            {"corpus": t, "vocab_size": 5000},
            f"model.vocab_size = 5000: {d} = {t} has text for ",
        ),
        "little vocabulary": (
            {"corpus": t, "vocab_size": 100},
            "model.vocab_size = 100: a byte-level tokenizer has at least",
        ),
        "a larger tokenizer": (
            {"corpus": t, "tokenizer": at("saved"), "vocab_size": 269},
            "model.vocab_size = 269: the tokenizer has 270 tokens; set it to that or more",
        ),
        "built with more": (
            {"corpus": at("stray"), "vocab_size": 269},
            f"model.vocab_size = 269: {d} = {at('stray')} was built with 270 tokens; set it to that or more",
        ),
        "built with another": (
            {"corpus": at("built"), "tokenizer": at("other")},
            f"{d} = {at('built')}: was built with another tokenizer than the run's; build it again with that one, or "
            "set",
        ),
        "built with two": (
            blend(at("built"), at("built_2")),
            f"{b}[1].corpus = {at('built_2')}: was built with another tokenizer than the run's",
        ),
        "tokens beside text": (
            blend(t, at("pair")),
            f"data.tokenizer: missing; {b}[1].corpus = {at('pair')} is tokens already, and {b}[0].corpus must be "
            "encoded like",
        ),
        "no tokenizer": (
            {"corpus": t, "tokenizer": at("nowhere.json")},
            f"data.tokenizer = {at('nowhere.json')}: cannot read the tokenizer {at('nowhere.json')} (No such file",
        ),
        "no tokenizer.json": (
            {"corpus": t, "tokenizer": at("nothing")},
            f"data.tokenizer = {at('nothing')}: {at('nothing')}: has no tokenizer.json; save the tokenizer in that "
            "form",
        ),
        "not a tokenizer": (
            {"corpus": t, "tokenizer": at("no.json")},
            f"data.tokenizer = {at('no.json')}: {at('no.json')} is not a tokenizer (",
        ),
        "not on this machine": (
            {"corpus": t, "tokenizer": "no-such/model"},
            "data.tokenizer = no-such/model: no-such/model: neither a file or folder, nor a model in Hugging Face's "
            "cache",
        ),
        "not on this machine, without an owner": (
            {"corpus": t, "tokenizer": "gpt2"},
            "data.tokenizer = gpt2: gpt2: neither a file or folder, nor a model in Hugging Face's cache",
        ),
        "no end of text": (
            {"corpus": t, "tokenizer": at("no_end")},
            f"data.tokenizer = {at('no_end')}: {at('no_end/tokenizer.json')}: has no <|endoftext|> or ",
        ),
        "another end of text": (
            {"corpus": t, "tokenizer": at("saved"), "end_of_text": "<|stop|>"},
            f"data.tokenizer = {at('saved')}: {at('saved/tokenizer.json')}: has no <|stop|> token to stand between",
        ),
        "no cache": ({"corpus": t, "cache_dir": f"{t}/cache"}, "data.cache_dir: cannot create "),
    }


BAD = [
    "missing", "missing in a blend", "missing for evaluation", "empty file", "empty folder", "no text in it", "no key",
    "other key", "floats", "magic", "version", "code", "cut", "no index", "no pair", "no tokens", "short",
    "long sequences", "short in a blend", "little for evaluation", "little for training",
    "evaluated on what is trained on", "much vocabulary", "little vocabulary", "a larger tokenizer", "built with more",
    "built with another", "built with two", "tokens beside text", "no tokenizer", "no tokenizer.json",
    "not a tokenizer", "not on this machine", "not on this machine, without an owner", "no end of text",
    "another end of text", "no cache",
]  # fmt: skip


REMEDIES = (
    "use ",
    "set ",
    "build ",
    "name ",
    "give ",
    "lower ",
    "raise ",
    "save ",
    "a pair",
    "searched",
    "not written",
)


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, object], str]]:
    return _bad_inputs(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str,
    bad_inputs: dict[str, tuple[dict[str, object], str]],
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, which begins with the key, or with the file and line."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    given, line = bad_inputs[name]
    with pytest.raises(DataError) as error:
        opened(**given)
    said = str(error.value)
    assert said.startswith(line) and "\n" not in said
    assert any(word in said for word in REMEDIES)
    # Nothing that was refused left a token file behind.
    assert not list(tmp_path.rglob("*.idx"))


def test_every_bad_input_is_tried(bad_inputs: dict[str, tuple[dict[str, object], str]]) -> None:
    assert list(bad_inputs) == BAD


def test_a_token_outside_of_the_vocabulary(opened: Opened, tmp_path: Path) -> None:
    """Of tokens without a description only reading tells."""
    data = opened(299, corpus=str(_sparse(tmp_path / "x")))
    with pytest.raises(
        DataError, match=r"^model.vocab_size = 299: token 299 at place 5 of \S*x is outside of it; use the"
    ):
        data.train.sequences(0, 6)


# ---- tokenizers on this machine ----


@pytest.mark.parametrize(("name", "folder"), [("some/model", "models--some--model"), ("gpt2", "models--gpt2")])
def test_a_tokenizer_by_name(
    name: str, folder: str, opened: Opened, texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Hugging Face's hub keeps it on disk; nothing is fetched."""
    repository = tmp_path / "hf" / "hub" / folder
    train_tokenizer([texts["a.txt"].read_text()], 270, "a").save(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    data = opened(corpus=str(texts["a.txt"]), tokenizer=name)
    assert data.tokenizer is not None and data.tokenizer.vocab_size == 270
    assert not tokenizer_path(Path(texts["a.txt"])).exists()
    # A folder of that name comes first, as everywhere at Hugging Face.
    train_tokenizer([texts["a.txt"].read_text()], 271, "a").save(tmp_path / name)
    here = opened(corpus=str(texts["a.txt"]), tokenizer=name)
    assert here.tokenizer is not None and here.tokenizer.vocab_size == 271


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "mine/tokenizer.json", "./gpt2", "a/b/c", "-x", "a b", "~/gpt2", ""]
)
def test_what_is_no_name_of_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = r"^\.: has no tokenizer.json" if not name else r"^cannot read the tokenizer .*; give the path of"
    with pytest.raises(DataError, match=said):
        load_tokenizer(name)
