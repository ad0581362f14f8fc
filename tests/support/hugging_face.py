"""Hugging Face's Llama as its files have it, written down once more: what conversions are judged by.

Everything is float64. Letters: S tokens, h query heads, g key-value heads, d head width.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def random_tensors(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of every name that such a folder has; norms around 1."""
    generator = torch.Generator().manual_seed(0)
    H, I, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]  # noqa: E741
    d = config.get("head_dim") or H // config["num_attention_heads"]
    hd, gd = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (H,), at + "post_attention_layernorm.weight": (H,)}
        shapes |= {
            at + f"self_attn.{what}_proj.weight": (rows, H) for what, rows in zip("qkv", (hd, gd, gd), strict=True)
        }
        shapes |= {at + "self_attn.o_proj.weight": (H, hd), at + "mlp.down_proj.weight": (H, I)}
        shapes |= {at + f"mlp.{what}_proj.weight": (I, H) for what in ("gate", "up")}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, H)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = (1 + 0.2 * noise if len(shape) == 1 else 0.2 * noise).to(dtype)
    return made


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], files: int = 1) -> Path:
    """A folder as Hugging Face has them, in one file or several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    placed = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        mine = names[i::files]
        write_safetensors(folder / file, {name: tensors[name] for name in mine})
        placed |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """By the format's description: length, header, bytes."""
    kinds = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokens_S: Tensor) -> Tensor:
    """[S, V] in float64."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    h, g, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    d = config.get("head_dim") or config["hidden_size"] // h
    S = len(tokens_S)

    def norm(x: Tensor, name: str) -> Tensor:
        return w[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    angles_Sd = torch.outer(torch.arange(S).double(), frequencies(config, d)).repeat(1, 2)
    cos, sin = angles_Sd.cos(), angles_Sd.sin()

    def turned(x_nSd: Tensor) -> Tensor:
        first, second = x_nSd[..., : d // 2], x_nSd[..., d // 2 :]
        return x_nSd * cos + torch.cat((-second, first), -1) * sin

    x_SH = w["model.embed_tokens.weight"][tokens_S]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = norm(x_SH, at + "input_layernorm.weight")
        q, k, v = (
            (y @ w[f"{at}self_attn.{what}_proj.weight"].T).view(S, n, d).transpose(0, 1)
            for what, n in (("q", h), ("k", g), ("v", g))
        )
        k, v = (t.repeat_interleave(h // g, 0) for t in (turned(k), v))
        scores_hSS = turned(q) @ k.transpose(1, 2) / math.sqrt(d)
        scores_hSS = scores_hSS.masked_fill(torch.ones(S, S).tril() == 0, float("-inf"))
        attended = (scores_hSS.softmax(-1) @ v).transpose(0, 1).reshape(S, h * d)
        x_SH = x_SH + attended @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x_SH, at + "post_attention_layernorm.weight")
        gate, up = (y @ w[f"{at}mlp.{what}_proj.weight"].T for what in ("gate", "up"))
        x_SH = x_SH + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x_SH, "model.norm.weight") @ head.T


def frequencies(config: Mapping[str, Any], d: int) -> Tensor:
    """[d / 2]; llama3's rule leaves short waves, stretches long ones, and goes from one to the other between."""
    plain = config["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    waves = 2 * math.pi / plain
    original, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * plain / scaling["factor"] + smooth * plain
    return torch.where(
        waves < original / high, plain, torch.where(waves > original / low, plain / scaling["factor"], between)
    )
