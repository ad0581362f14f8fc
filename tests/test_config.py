"""Settings: what is read, what is refused and in which words, what is derived, what is written back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slimpipe.config import (
    Config,
    ConfigError,
    PipelineConfig,
    RopeScaling,
    TrainConfig,
    check_output,
    check_world,
    load_config,
    reference_markdown,
)
from slimpipe.config.allowed import any_of
from slimpipe.config.yaml_text import dump, parse, shown
from slimpipe.schedule import BUILT, NOT_BUILT, Shape

ROOT = Path(__file__).parents[1]
QUICKSTART, LLAMA = ROOT / "configs/quickstart.yaml", ROOT / "configs/llama_16l.yaml"
SECTIONS = ("model", "parallel", "pipeline", "memory", "data", "optim", "train", "log")


def minimal(**changes: Mapping[str, Any]) -> dict[str, Any]:
    """Only what has no default, with a section's keys changed or added."""
    settings: dict[str, Any] = {
        "model": {"layers": 4, "hidden_size": 32, "heads": 4, "intermediate_size": 64, "vocab_size": 300},
        "data": {"corpus": "python_stdlib", "sequence_length": 4096},
        "train": {"steps": 2, "output": "runs/x", "global_batch": 4},
    }
    for section, keys in changes.items():
        settings[section] = {**settings.get(section, {}), **keys}
    return settings


def lines_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(settings)
    assert str(caught.value) == "\n".join(caught.value.lines)
    return caught.value.lines


# ---- what is read ----


def test_defaults_follow_other_keys() -> None:
    config = Config.from_dict(minimal(optim={"lr": 0.02}))
    assert (config.model.kv_heads, config.model.head_dim) == (4, 8)
    assert config.optim.min_lr == pytest.approx(0.002)
    assert config.pipeline.schedule == "slimpipe" and config.pipeline.exchange == config.memory.swap == "off"


def test_null_asks_for_the_default_that_follows() -> None:
    config = Config.from_dict(minimal(model={"kv_heads": None, "head_dim": None}, optim={"min_lr": None}))
    assert config == Config.from_dict(minimal())


def test_microbatches_and_shape() -> None:
    config = Config.from_dict(
        minimal(
            parallel={"pp": 2},
            pipeline={"slices": 8, "virtual_stages": 2},
            train={"global_batch": 12, "micro_batch": 4},
        )
    )
    assert config.microbatches == 3
    assert config.shape == Shape(p=2, v=2, n=8, m=3)
    assert config.parallel.world_size == 2


def test_settings_do_not_change() -> None:
    config = Config.from_dict(minimal())
    with pytest.raises(ValidationError):
        config.train.steps = 3


@pytest.mark.parametrize(("grad_clip", "kept"), [(0, None), (0.0, None), (None, None), (2, 2.0)])
def test_no_clipping_is_null(grad_clip: float | None, kept: float | None) -> None:
    assert Config.from_dict(minimal(optim={"grad_clip": grad_clip})).optim.grad_clip == kept


def test_refused_features_may_be_absent_in_words() -> None:
    config = Config.from_dict(minimal(model={"sliding_window": None, "alibi": False, "document_mask": False}))
    assert config == Config.from_dict(minimal())


def test_rope_scaling() -> None:
    llama3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position": 8192}
    config = Config.from_dict(minimal(model={"rope_scaling": llama3}))
    assert isinstance(config.model.rope_scaling, RopeScaling)
    assert dict(config.model.rope_scaling) == llama3


def test_keys_of_an_exchange_that_is_off_may_have_their_defaults(tmp_path: Path) -> None:
    """As a run's record has them."""
    config = Config.from_dict(minimal(pipeline={"exchange_granule": None, "exchange_keep": "none"}))
    assert config == Config.from_dict(minimal())
    config.dump_yaml(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    lending = Config.from_dict(minimal(pipeline={"exchange": "pairwise", "exchange_keep": "kv"}))
    assert lending.pipeline.exchange_keep == "kv"


def test_a_model_of_ones_own_has_options() -> None:
    config = Config.from_dict(minimal(model={"name": "a.b:C", "options": {"depth": [1, {"x": None}]}}))
    assert config.model.options == {"depth": [1, {"x": None}]}


def test_schedules_are_those_of_the_schedule_package() -> None:
    assert get_args(PipelineConfig.model_fields["schedule"].annotation) == BUILT
    for name in NOT_BUILT:
        assert "not built yet" in lines_of(minimal(pipeline={"schedule": name}))[0]


# ---- what is refused, and in which words ----

BAD = [
    # types and ranges
    ("train", "steps", 0, "train.steps = 0: must be a whole number > 0"),
    ("train", "steps", -3, "train.steps = -3: must be a whole number > 0"),
    ("train", "steps", True, "train.steps = true: must be a whole number > 0"),
    ("train", "steps", 1.5, "train.steps = 1.5: must be a whole number > 0"),
    ("train", "steps", 10.0, "train.steps = 10.0: must be a whole number > 0"),
    ("train", "steps", "many", "train.steps = many: must be a whole number > 0"),
    ("train", "steps", "10", 'train.steps = "10": must be a whole number > 0'),
    ("train", "steps", None, "train.steps = null: must be a whole number > 0"),
    ("train", "steps", [1, 2], "train.steps = [1, 2]: must be a whole number > 0"),
    ("train", "steps", {"a": 1}, 'train.steps = {"a": 1}: must be a whole number > 0'),
    ("train", "seed", -1, "train.seed = -1: must be a whole number >= 0"),
    ("train", "micro_batch", 0, "train.micro_batch = 0: must be a whole number > 0"),
    ("train", "output", 3, "train.output = 3: must be a path"),
    ("train", "output", "", 'train.output = "": must be a path'),
    ("train", "dtype", "float16", "train.dtype = float16: must be float32 or bfloat16"),
    ("train", "device", "tpu", "train.device = tpu: must be auto, cpu or cuda"),
    ("train", "deterministic", 1, "train.deterministic = 1: must be true or false"),
    ("train", "watchdog_seconds", 0, "train.watchdog_seconds = 0: must be a number > 0"),
    (
        "train",
        "attention",
        "best",
        "train.attention = best: must be auto, plain, flash, cudnn, flash2, flash3 or flash4",
    ),
    ("train", "ce_chunk", 0, "train.ce_chunk = 0: must be a whole number > 0 or null"),
    ("optim", "lr", True, "optim.lr = true: must be a number > 0"),
    ("optim", "lr", 0, "optim.lr = 0: must be a number > 0"),
    ("optim", "lr", float("nan"), "optim.lr = nan: must be a number > 0"),
    ("optim", "lr", float("inf"), "optim.lr = inf: must be a number > 0"),
    ("optim", "lr", "high", "optim.lr = high: must be a number > 0"),
    ("optim", "beta1", 1.0, "optim.beta1 = 1.0: must be a number >= 0 and < 1"),
    ("optim", "beta2", -0.1, "optim.beta2 = -0.1: must be a number >= 0 and < 1"),
    ("optim", "grad_clip", -1, "optim.grad_clip = -1: must be a number >= 0 or null"),
    ("optim", "grad_clip", False, "optim.grad_clip = false: must be a number >= 0 or null"),
    ("optim", "warmup_steps", -1, "optim.warmup_steps = -1: must be a whole number >= 0"),
    ("optim", "schedule", "linear", "optim.schedule = linear: must be cosine or constant"),
    ("model", "hidden_size", "big", "model.hidden_size = big: must be a whole number > 0"),
    ("model", "tie_embeddings", "maybe", "model.tie_embeddings = maybe: must be true or false"),
    ("model", "options", 3, "model.options = 3: must be a mapping"),
    ("data", "corpus", None, "data.corpus: missing; must be python_stdlib or a path (or set data.blend)"),
    ("data", "corpus", 3, "data.corpus = 3: must be python_stdlib or a path"),
    (
        "data",
        "blend",
        [{"corpus": "a"}],
        "data.corpus = python_stdlib: data.blend is set as well; remove one of them",
    ),
    ("data", "blend", 3, "data.blend = 3: must be a list of mappings with the keys corpus, weight, or null"),
    ("data", "blend", [3], "data.blend[0] = 3: must be a mapping with the keys corpus, weight"),
    ("data", "blend", [{"corpus": "a", "weight": 0}], "data.blend[0].weight = 0: must be a number > 0"),
    ("data", "blend", [{"corpus": "a", "weight": -1.0}], "data.blend[0].weight = -1.0: must be a number > 0"),
    ("data", "blend", [{"weight": 1}], "data.blend[0].corpus: missing; must be a path"),
    ("data", "blend", [{"corpus": "a", "share": 1}], "data.blend[0].share: unknown key; use corpus or weight"),
    (
        "data",
        "eval_blend",
        [],
        "data.eval_blend = []: names no source; write [{corpus: PATH, weight: 1.0}, ...], or remove it",
    ),
    ("data", "eval_share", 1.0, "data.eval_share = 1.0: must be a number >= 0 and < 1"),
    (
        "data",
        "end_of_text",
        "</s>",
        "data.end_of_text = </s>: says something of data.tokenizer, which is missing; remove it, or set that",
    ),
    ("data", "sequence_length", 0, "data.sequence_length = 0: must be a whole number > 0"),
    ("log", "every", 0, "log.every = 0: must be a whole number > 0"),
    ("log", "display", "loud", "log.display = loud: must be auto, rich, plain or none"),
    ("parallel", "pp", 0, "parallel.pp = 0: must be a whole number > 0"),
    ("parallel", "tp", 0, "parallel.tp = 0: must be 1"),
    ("parallel", "tp", True, "parallel.tp = true: must be 1"),
    ("pipeline", "slices", 0, "pipeline.slices = 0: must be a whole number > 0"),
    ("pipeline", "schedule", "zigzag", "pipeline.schedule = zigzag: must be gpipe, 1f1b, interleaved or slimpipe"),
    ("pipeline", "exchange", True, "pipeline.exchange = true: must be off, pairwise or balanced"),
    (
        "pipeline",
        "layers_per_stage",
        4,
        "pipeline.layers_per_stage = 4: must be a list, each a whole number > 0, or null",
    ),
    ("pipeline", "layers_per_stage", [0], "pipeline.layers_per_stage[0] = 0: must be a whole number > 0"),
    (
        "memory",
        "recompute",
        "all",
        "memory.recompute = all: must be none, norms, mlp, all_but_attention or full",
    ),
    (
        "model",
        "rope_scaling",
        2,
        "model.rope_scaling = 2: must be a mapping with the keys type, factor, low_freq_factor, high_freq_factor, "
        "original_max_position",
    ),
    (
        "model",
        "rope_scaling",
        {"type": "yarn", "factor": 2},
        "model.rope_scaling.type = yarn: must be linear or llama3",
    ),
    (
        "model",
        "rope_scaling",
        {"type": "linear", "factor": 2, "low_freq_factor": 1},
        "model.rope_scaling.low_freq_factor = 1.0: only type llama3 has it; remove the key",
    ),
    (
        "model",
        "rope_scaling",
        {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        "model.rope_scaling.original_max_position = null: type llama3 needs a number here",
    ),
    (
        "model",
        "rope_scaling",
        {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position": 8},
        "model.rope_scaling.high_freq_factor = 4.0: must be above low_freq_factor (4.0)",
    ),
    # not built yet, not supported
    ("parallel", "tp", 2, "parallel.tp = 2: tensor parallelism is not built yet; set it to 1"),
    ("parallel", "cp", 2, "parallel.cp = 2: context parallelism is not built yet; set it to 1"),
    ("parallel", "ep", 2, "parallel.ep = 2: expert parallelism is not built yet; set it to 1"),
    ("parallel", "dp", 2, "parallel.dp = 2: data parallelism is not built yet; set it to 1"),
    (
        "pipeline",
        "schedule",
        "zb_v",
        "pipeline.schedule = zb_v: this schedule is not built yet; set it to gpipe, 1f1b, interleaved or slimpipe",
    ),
    ("pipeline", "exchange_granule", 0, "pipeline.exchange_granule = 0: must be a whole number > 0 or null"),
    ("pipeline", "exchange_keep", "all", "pipeline.exchange_keep = all: must be none or kv"),
    (
        "pipeline",
        "exchange_granule",
        512,
        "pipeline.exchange_granule = 512: says something with pipeline.exchange alone, which is off; set that to "
        "balanced, or remove it",
    ),
    (
        "pipeline",
        "exchange_keep",
        "kv",
        "pipeline.exchange_keep = kv: says something with pipeline.exchange alone, which is off; set that to balanced, "
        "or remove it",
    ),
    (
        "pipeline",
        "vocab_parallel",
        "yes please",
        "pipeline.vocab_parallel = yes please: must be true, false or null",
    ),
    *(
        ("memory", "swap", value, f"memory.swap = {said}: must be off, auto or a number > 0 and <= 1")
        for value, said in (("on", "on"), (0, "0"), (1.5, "1.5"), (-0.5, "-0.5"), (True, "true"), ("0.5", '"0.5"'))
    ),
    ("memory", "kv_swap", 0.5, "memory.kv_swap = 0.5: must be off, auto or on"),
    ("memory", "gpu_budget_gib", 0, "memory.gpu_budget_gib = 0: must be a number > 0 or null"),
    (
        "memory",
        "gpu_budget_gib",
        40,
        "memory.gpu_budget_gib = 40.0: says something with memory.swap: auto alone; set that, or remove it",
    ),
    (
        "memory",
        "host_budget_gib",
        40,
        "memory.host_budget_gib = 40.0: says something with memory.swap or kv_swap: on alone; set one, or remove it",
    ),
    (
        "model",
        "sliding_window",
        128,
        "model.sliding_window = 128: sliding windows are not supported: sliced attention needs plain causal attention "
        "over one document a row; remove the key",
    ),
    (
        "model",
        "alibi",
        True,
        "model.alibi = true: ALiBi biases are not supported: sliced attention needs plain causal attention over one "
        "document a row; remove the key",
    ),
    (
        "model",
        "document_mask",
        "intra",
        "model.document_mask = intra: document masks are not supported: sliced attention needs plain causal attention "
        "over one document a row; remove the key",
    ),
    # rules across keys
    (
        "pipeline",
        "slices",
        7,
        "pipeline.slices = 7: sequence length 4096 is not divisible by 7; use a divisor (4, 8, 16)",
    ),
    (
        "pipeline",
        "slices",
        8192,
        "pipeline.slices = 8192: sequence length 4096 is not divisible by 8192; use a divisor (4096)",
    ),
    (
        "train",
        "micro_batch",
        3,
        "train.global_batch = 4: not divisible by parallel.dp x train.micro_batch = 3; use a multiple (6, 9)",
    ),
    ("model", "name", "lama", "model.name = lama: unknown model; must be llama or package.module:Class"),
    ("model", "options", {"a": 1}, 'model.options = {"a": 1}: llama has no options; remove the key'),
    ("model", "kv_heads", 3, "model.kv_heads = 3: heads 4 is not divisible by 3; use a divisor (2, 4)"),
    (
        "model",
        "hidden_size",
        30,
        "model.hidden_size = 30: not divisible by model.heads = 4; use a multiple, or set model.head_dim",
    ),
    (
        "model",
        "head_dim",
        7,
        "model.head_dim = 7: must be even: rotary positions turn pairs; change it or model.heads",
    ),
    ("optim", "min_lr", 1.0, "optim.min_lr = 1.0: must be at most optim.lr (0.0003)"),
    # the nearest key
    ("pipeline", "slice", 4, "pipeline.slice: unknown key; did you mean pipeline.slices?"),
    ("pipeline", "virtual_stage", 4, "pipeline.virtual_stage: unknown key; did you mean pipeline.virtual_stages?"),
    ("train", "lr", 0.1, "train.lr: unknown key; did you mean optim.lr?"),
    ("optim", "Beta1", 0.1, "optim.Beta1: unknown key; did you mean optim.beta1?"),
    (
        "memory",
        "exotic",
        1,
        "memory.exotic: unknown key; use recompute, swap, kv_swap, gpu_budget_gib or host_budget_gib",
    ),
    (
        "model",
        "rope_scaling",
        {"type": "linear", "factor": 2, "facto": 2},
        "model.rope_scaling.facto: unknown key; did you mean model.rope_scaling.factor?",
    ),
    ("pipelin", "slices", 4, "pipelin: unknown key; did you mean pipeline?"),
    ("slices", "n", 4, "slices: unknown key; did you mean pipeline.slices?"),
    ("cheese", "n", 4, f"cheese: unknown section; the sections are {', '.join(SECTIONS)}"),
]


@pytest.mark.parametrize(("section", "key", "value", "line"), BAD, ids=[f"{s}.{k}={v}" for s, k, v, _ in BAD])
def test_bad_settings_give_one_line(section: str, key: str, value: Any, line: str) -> None:
    assert lines_of(minimal(**{section: {key: value}})) == (line,)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"parallel": {"pp": 8}}, "model.layers = 4"),
        ({"parallel": {"pp": 2}, "pipeline": {"layers_per_stage": [1, 2]}}, "pipeline.layers_per_stage = [1, 2]"),
        ({"parallel": {"pp": 2}, "pipeline": {"layers_per_stage": [4]}}, "pipeline.layers_per_stage = [4]"),
        ({"parallel": {"pp": 2}, "pipeline": {"virtual_stages": 2}}, "pipeline.virtual_stages = 2"),
        ({"pipeline": {"schedule": "1f1b", "slices": 2}}, "pipeline.slices = 2"),
        ({"pipeline": {"schedule": "gpipe", "virtual_stages": 2}}, "pipeline.virtual_stages = 2"),
        (
            {"parallel": {"pp": 4}, "pipeline": {"schedule": "interleaved"}, "train": {"global_batch": 6}},
            "train.global_batch",
        ),
        ({"pipeline": {"schedule": "1f1b", "exchange": "balanced"}}, "pipeline.exchange = balanced: its loans need"),
        (
            {"pipeline": {"schedule": "gpipe", "vocab_parallel": True}},
            "pipeline.vocab_parallel = true: its passes need",
        ),
        (
            {"parallel": {"pp": 2}, "pipeline": {"exchange": "balanced", "layers_per_stage": [1, 3]}},
            "pipeline.exchange needs stages of equally many layers",
        ),
        (
            {"pipeline": {"exchange": "balanced", "exchange_granule": 3}, "data": {"sequence_length": 64}},
            "pipeline.exchange_granule = 3: a slice of 64 tokens is not divisible by 3; use a divisor (2, 4, 8)",
        ),
    ],
)
def test_shapes_that_a_schedule_cannot_run(changes: dict[str, Any], key: str) -> None:
    """The words are the schedule package's."""
    (line,) = lines_of(minimal(**changes))
    assert line.startswith(key) and "\n" not in line


def test_every_problem_has_its_line() -> None:
    assert lines_of({"model": {"layers": 0, "heads": "x"}, "train": {"step": 3}}) == (
        "model.layers = 0: must be a whole number > 0",
        "model.hidden_size: missing; must be a whole number > 0",
        "model.heads = x: must be a whole number > 0",
        "model.intermediate_size: missing; must be a whole number > 0",
        "model.vocab_size: missing; must be a whole number > 0",
        "data.sequence_length: missing; must be a whole number > 0",
        "train.steps: missing; must be a whole number > 0",
        "train.output: missing; must be a path",
        "train.global_batch: missing; must be a whole number > 0",
        "train.step: unknown key; did you mean train.steps?",
    )


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "train.attention = cudnn: not for train.dtype float32; use plain or train.dtype: bfloat16"),
        (
            {"dtype": "bfloat16", "device": "cpu"},
            "train.attention = cudnn: runs on a GPU only; use plain or train.device: cuda",
        ),
        (
            {"dtype": "bfloat16", "deterministic": True},
            "train.attention = cudnn: its backward is not deterministic; use flash or train.deterministic: false",
        ),
    ],
)
def test_attention_backends_need_their_surroundings(keys: dict[str, Any], line: str) -> None:
    assert lines_of(minimal(train={"attention": "cudnn", **keys})) == (line,)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"model: [1", "FILE, line 1, column 10: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        (b"model:\n  a: b: c\n", "FILE, line 2, column 7: not valid YAML: mapping values are not allowed here"),
        (
            b"model:\n\tlayers: 3\n",
            "FILE, line 2, column 1: not valid YAML: found character '\\t' that cannot start any token",
        ),
        (
            b"train:\n  steps: 3\n  seed: 1\n  steps: 4\n",
            "FILE, line 4, column 3: not valid YAML: key steps is given twice",
        ),
        (b"train: {}\ntrain: {}\n", "FILE, line 2, column 1: not valid YAML: key train is given twice"),
        (b"1: {}\n", "FILE, line 1, column 1: not valid YAML: key 1 is not a word"),
        (
            b"model: {}\n---\nmodel: {}\n",
            "FILE, line 2, column 1: not valid YAML: but found another document",
        ),
        (
            b"model: !!python/object:os.system {}\n",
            "FILE, line 1, column 8: not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'",
        ),
        (b"- model\n", f"FILE: must be a mapping of the sections {', '.join(SECTIONS)}"),
        (b"3\n", f"FILE: must be a mapping of the sections {', '.join(SECTIONS)}"),
        (b"model: \x01\n", "FILE: not valid YAML: character 7 (#x0001) is not allowed"),
        (b"model: caf\xe9\n", "FILE: not a UTF-8 text (byte 10); save it as UTF-8"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, text: bytes, line: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.lines == (line.replace("FILE", str(path)),)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none.yaml", "no such file; give the path of a YAML file such as configs/quickstart.yaml"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: {reason}"


def test_an_empty_file_misses_what_has_no_default(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\nmodel:\ntrain:\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(": missing; must be " in line for line in caught.value.lines)


# ---- YAML's traps ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("no", "no"),
        ("none", "none"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("-7", -7),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1f1b", "1f1b"),
        ("[1, 2]", [1, 2]),
        ("'1e-4'", "1e-4"),
    ],
)
def test_words_and_numbers(text: str, value: object) -> None:
    parsed = parse(text, "here")
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize("word", ["off", "false", "'off'"])
def test_off_is_off(word: str) -> None:
    config = load_config(QUICKSTART, [f"pipeline.exchange={word}", f"memory.swap={word}", f"memory.kv_swap={word}"])
    assert (config.pipeline.exchange, config.memory.swap, config.memory.kv_swap) == ("off", "off", "off")


@pytest.mark.parametrize("word", ["on", "true", "'on'"])
def test_on_is_on(word: str) -> None:
    config = load_config(QUICKSTART, [f"memory.kv_swap={word}", "memory.host_budget_gib=4"])
    assert config.memory.kv_swap == "on"


@pytest.mark.parametrize("word, value", [("yes", True), ("on", True), ("True", True), ("no", False), ("off", False)])
def test_switches(word: str, value: bool) -> None:
    assert load_config(QUICKSTART, [f"pipeline.trace={word}"]).pipeline.trace is value


# ---- overrides ----


def test_overrides() -> None:
    config = load_config(
        QUICKSTART,
        [
            "optim.lr=1e-4",
            "pipeline.layers_per_stage=[5, 3]",
            "train.output=runs/a=b",
            "model.rope_scaling.type=linear",
            "model.rope_scaling.factor=2",
            "train.steps=5",
            "train.steps=6",
        ],
    )
    assert config.optim.lr == 1e-4 and config.optim.min_lr == pytest.approx(1e-5)
    assert config.pipeline.layers_per_stage == (5, 3)
    assert config.train.output == "runs/a=b"
    assert config.model.rope_scaling == RopeScaling(type="linear", factor=2.0)
    assert config.train.steps == 6


def test_overrides_reach_options() -> None:
    config = load_config(QUICKSTART, ["model.name=a.b:C", "model.options.deep.er=[1]"])
    assert config.model.options == {"deep": {"er": [1]}}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("pipeline.slices", "pipeline.slices: not an override; write section.key=value, such as pipeline.slices=16"),
        ("--steps", "--steps: not an override; write section.key=value, such as pipeline.slices=16"),
        ("pipeline.slice=3", "pipeline.slice: unknown key; did you mean pipeline.slices?"),
        ("slices=3", "slices: unknown key; did you mean pipeline.slices?"),
        ("optm.schedule=cosine", "optm.schedule: unknown key; did you mean optim.schedule?"),
        ("train.steps.x=3", f"train.steps.x: unknown key; use {any_of(tuple(TrainConfig.model_fields))}"),
        ("=3", '"": unknown section; the sections are ' + ", ".join(SECTIONS)),
        ("memory={swap: off}", "memory: a section, not a key; override one of "
         + ", ".join(f"memory.{key}" for key in Config.model_fields["memory"].annotation.model_fields)),
        ("train.steps=[1", "train.steps=[1, line 1, column 3: not valid YAML: "
         "expected ',' or ']', but got '<stream end>'"),
        ("train.steps=", "train.steps = null: must be a whole number > 0"),
        ("train.steps=1e3", "train.steps = 1000.0: must be a whole number > 0"),
        ("pipeline.slices=7",
         "pipeline.slices = 7: sequence length 256 is not divisible by 7; use a divisor (4, 8, 16)"),
    ],
)  # fmt: skip
def test_bad_overrides(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    assert caught.value.lines == (line,)


def test_an_override_into_a_section_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump(minimal() | {"pipeline": 3}))
    with pytest.raises(ConfigError, match=r"^pipeline = 3: must be a mapping with the keys schedule, slices"):
        load_config(path, ["pipeline.slices=2"])


# ---- written and read back ----


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.grad_clip=0", "optim.lr=1e-4", "optim.eps=1e-15"],
        ["pipeline.layers_per_stage=[5, 3]", "data.corpus='off'", "train.output='1e-4'"],
        ["model.rope_scaling={type: linear, factor: 2}", "model.kv_heads=4"],
        ["model.name=a.b:C", "model.options={a: [1, 2.5, null, 'no'], b: {c: 1e-4}}"],
        ["data.corpus='on: # é'", "train.output=' '", "data.cache_dir='010'"],
    ],
)
def test_dump_reads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(QUICKSTART, overrides)
    path = tmp_path / "config.yaml"
    config.dump_yaml(path)
    assert load_config(path) == config


def test_dump_has_defaults_but_nothing_derived() -> None:
    written = yaml.safe_load(Config.from_dict(minimal()).to_yaml())
    assert tuple(written) == SECTIONS
    assert written["optim"]["lr"] == 3e-4 and written["pipeline"]["exchange"] == "off"
    for section, key in (("model", "kv_heads"), ("model", "head_dim"), ("optim", "min_lr"), ("model", "alibi")):
        assert key not in written[section]


def test_an_override_of_a_dump_carries_over_to_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    Config.from_dict(minimal()).dump_yaml(path)
    assert load_config(path, ["model.heads=2"]) == Config.from_dict(minimal(model={"heads": 2}))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_any_value_reads_back(value: object) -> None:
    assert parse(dump(value), "here") == value


@given(st.text() | st.lists(st.text()) | st.floats() | st.integers())
def test_a_value_is_shown_on_one_line(value: object) -> None:
    assert len(shown(value)) <= (4096 if isinstance(value, str) else 80) and shown(value).isprintable()


def test_a_path_is_shown_whole() -> None:
    path = "/scratch/" + "deep/" * 100 + "corpus.jsonl"
    assert shown(path) == path
    assert shown([path]) == f'["{path[:75]}...'


# ---- before the launch ----


def test_world_size() -> None:
    check_world(Config.from_dict(minimal()), 1)
    two = Config.from_dict(minimal(parallel={"pp": 2}))
    check_world(two, 2)
    with pytest.raises(ConfigError) as caught:
        check_world(two, 1, ["train", "a b.yaml"])
    assert str(caught.value) == (
        "parallel.pp = 2: pp 2 needs 2 processes, but here runs 1 process; "
        "use: torchrun --nproc-per-node 2 -m slimpipe train 'a b.yaml'"
    )


def test_the_output_may_be_new_or_hold_a_run(tmp_path: Path) -> None:
    config = Config.from_dict(minimal(train={"output": str(tmp_path / "run")}))
    check_output(config)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    check_output(config)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"keep_every": 10}, "keep_every = 10: no multiple of train.checkpoint_every (null); set that too"),
        (
            {"keep_every": 25, "checkpoint_every": 10},
            "keep_every = 25: no multiple of train.checkpoint_every (10); use a multiple, such as 20",
        ),
        ({"keep_every": 20, "checkpoint_every": 10}, None),
        ({"keep_last": 0}, "keep_last = 0: must be a whole number > 0"),
    ],
)
def test_what_is_kept_has_been_written(keys: dict[str, int], problem: str | None) -> None:
    if problem is None:
        Config.from_dict(minimal(train=keys))
        return
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(minimal(train=keys))
    assert str(caught.value) == f"train.{problem}"


def test_the_output_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match=r"^train.output = .*/run: is a file; choose a folder$"):
        check_output(Config.from_dict(minimal(train={"output": str(tmp_path / "run")})))


# ---- the files of the repository ----


@pytest.mark.parametrize("v, n", [(1, 1), (1, 4), (1, 8), (2, 4), (2, 8)])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_quickstart_runs_in_every_promised_shape(pp: int, v: int, n: int) -> None:
    overrides = [f"parallel.pp={pp}", f"pipeline.virtual_stages={v}", f"pipeline.slices={n}"]
    assert load_config(QUICKSTART, overrides).shape == Shape(pp, v, n, 4)


def test_llama_16l() -> None:
    config = load_config(LLAMA)
    assert (config.model.head_dim, config.data.sequence_length, config.shape) == (128, 65536, Shape(2, 4, 4, 2))


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == reference_markdown()


def test_every_key_is_explained() -> None:
    for section in Config.model_fields.values():
        assert section.annotation is not None
        for name, field in section.annotation.model_fields.items():
            assert field.description, name
