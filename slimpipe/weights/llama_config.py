"""Hugging Face's `config.json` of a Llama, and the same as the `model` section of our settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from slimpipe.weights.errors import WeightsError

if TYPE_CHECKING:
    from slimpipe.config import ModelConfig

CONFIG: Final = "config.json"

_REQUIRED: Final = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}


def read_model(folder: Path) -> ModelConfig:
    """The model that the folder's `config.json` describes.

    Raises WeightsError, naming the key, for whatever our Llama has not.
    """
    # Not above: the settings ask for nothing of this package.
    from slimpipe.config import ModelConfig

    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise WeightsError(f"{path}: no JSON ({error})") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path}: no JSON object")
    _refuse(path, found)
    settings = {ours: _required(path, found, theirs) for ours, theirs in _REQUIRED.items()}
    optional = {
        "kv_heads": found.get("num_key_value_heads"),
        "head_dim": found.get("head_dim"),
        "tie_embeddings": found.get("tie_word_embeddings", False),
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "init_std": found.get("initializer_range", 0.02),
        **_rope(path, found),
    }
    settings |= {key: value for key, value in optional.items() if value is not None}
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise WeightsError(f"{path}: {key + ': ' if key else ''}{first['msg']}") from error


def _required(path: Path, found: Mapping[str, Any], key: str) -> Any:
    if key not in found:
        raise WeightsError(f"{path}: has no {key}; is it a Llama's?")
    return found[key]


def _refuse(path: Path, found: Mapping[str, Any]) -> None:
    """Raises WeightsError for what is not a Llama as ours is."""
    kind = found.get("model_type")
    if kind != "llama":
        raise WeightsError(f"{path}: model_type = {kind}: not supported; only llama is")
    for key, plain, what in (
        ("attention_bias", False, "biases in attention"),
        ("mlp_bias", False, "biases in the feed-forward block"),
        ("hidden_act", "silu", "this activation"),
        ("partial_rotary_factor", 1.0, "rotary positions for a part of a head"),
        ("quantization_config", None, "quantised weights"),
    ):
        value = found.get(key, plain)
        if value != plain and value is not None:
            raise WeightsError(f"{path}: {key} = {json.dumps(value)[:80]}: {what} are not supported")


def _rope(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: in `rope_parameters`, or in older files `rope_theta` and `rope_scaling`."""
    given = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise WeightsError(f"{path}: rope_scaling = {json.dumps(given)[:80]}: not a mapping")
    settings: dict[str, Any] = {"rope_theta": float(given.get("rope_theta", found.get("rope_theta", 10000.0)))}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return settings
    if kind not in ("linear", "llama3"):
        raise WeightsError(f"{path}: rope_scaling of type {kind}: not supported; only linear and llama3 are")
    scaling = {"type": kind, "factor": given.get("factor")}
    if kind == "llama3":
        scaling |= {
            "low_freq_factor": given.get("low_freq_factor"),
            "high_freq_factor": given.get("high_freq_factor"),
            "original_max_position": given.get("original_max_position_embeddings"),
        }
    missing = [key for key, value in scaling.items() if value is None]
    if missing:
        raise WeightsError(f"{path}: rope_scaling of type {kind}: has no {missing[0]}")
    return {**settings, "rope_scaling": scaling}


def to_json(model: ModelConfig, sequence_length: int, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """What `config.json` says of our model. `dtype`: of the weights, as torch names it.

    Raises WeightsError, naming the key, for what Hugging Face's Llama has not.
    """
    if model.name != "llama":
        raise WeightsError(f"model.name = {model.name}: only llama has a form that Hugging Face's transformers knows")
    if model.qk_norm:
        raise WeightsError("model.qk_norm = true: Hugging Face's Llama has no norms of queries and keys")
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for ours, theirs in _REQUIRED.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": sequence_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
    }
    scaling = model.rope_scaling
    if scaling is not None:
        settings["rope_scaling"] = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type == "llama3":
            settings["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return settings
