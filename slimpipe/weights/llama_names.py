"""What a Llama's weights are called in Hugging Face's files, and how ours are made of them.

| here (of layer i, behind `layers.{i}.`) | there (behind `model.layers.{i}.`), one under the other                  |
|------------------------------------------|--------------------------------------------------------------------------|
| `attention_norm.weight`                  | `input_layernorm.weight`                                                 |
| `attention.qkv.weight`                   | `self_attn.q_proj.weight`, `.k_proj.weight`, `.v_proj.weight`             |
| `attention.output.weight`                | `self_attn.o_proj.weight`                                                |
| `mlp_norm.weight`                        | `post_attention_layernorm.weight`                                        |
| `mlp.gate_up.weight`                     | `mlp.gate_proj.weight`, `mlp.up_proj.weight`                             |
| `mlp.down.weight`                        | `mlp.down_proj.weight`                                                   |
| `embedding.weight`                       | `model.embed_tokens.weight`                                              |
| `head.norm.weight`                       | `model.norm.weight`                                                      |
| `head.weight`, where not tied            | `lm_head.weight`                                                         |

Rotary positions turn the pairs (x_i, x_{i + d/2}) of a head on both sides, so no row changes its place. (Files of
Meta's own format have neighbours in pairs, and other names: they are not read.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slimpipe.config import ModelConfig


class Piece(NamedTuple):
    """A tensor of theirs that is some rows of one of ours."""

    name: str
    shape: tuple[int, ...]


def pieces(model: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """Of each of our weights, the tensors that make it up, top to bottom."""
    width, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    table = (model.vocab_size, width)
    found: dict[str, tuple[Piece, ...]] = {"embedding.weight": (Piece("model.embed_tokens.weight", table),)}
    for i in range(model.layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        found |= {
            f"{here}attention_norm.weight": (Piece(f"{there}input_layernorm.weight", (width,)),),
            f"{here}attention.qkv.weight": (
                Piece(f"{there}self_attn.q_proj.weight", (queries, width)),
                Piece(f"{there}self_attn.k_proj.weight", (keys, width)),
                Piece(f"{there}self_attn.v_proj.weight", (keys, width)),
            ),
            f"{here}attention.output.weight": (Piece(f"{there}self_attn.o_proj.weight", (width, queries)),),
            f"{here}mlp_norm.weight": (Piece(f"{there}post_attention_layernorm.weight", (width,)),),
            f"{here}mlp.gate_up.weight": (
                Piece(f"{there}mlp.gate_proj.weight", (inner, width)),
                Piece(f"{there}mlp.up_proj.weight", (inner, width)),
            ),
            f"{here}mlp.down.weight": (Piece(f"{there}mlp.down_proj.weight", (width, inner)),),
        }
    found["head.norm.weight"] = (Piece("model.norm.weight", (width,)),)
    if not model.tie_embeddings:
        found["head.weight"] = (Piece("lm_head.weight", table),)
    return found


def is_no_weight(name: str, model: ModelConfig) -> bool:
    """Whether a tensor of theirs says nothing: old files' tables of frequencies, the copy of a tied weight."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and model.tie_embeddings)
