"""Stand-ins for the flash-attn packages: their argument lists, the mathematics in plain PyTorch, and a record of calls.

The mask of a causal block lies at the bottom right, as theirs does.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimpipe.kernels.attention import PlainAttention


class Call(NamedTuple):
    """Tokens of query and keys."""

    kind: str
    s: int
    t: int
    causal: bool


class BottomRight(PlainAttention):
    """Query i of s sees keys up to t - s + i."""

    @staticmethod
    def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
        scores = PlainAttention._scores(q, k, False)
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        return scores.masked_fill(hidden, float("-inf")) if causal else scores


def package(name: str, calls: list[Call]) -> Any:
    """`flash_attn.cute.interface` for flash4, and the interfaces of versions 2 and 3."""
    module = types.ModuleType({"flash4": "flash_attn.cute.interface"}.get(name, "flash_attn_interface"))
    for function in {"flash2": _version_2, "flash3": _version_3, "flash4": _version_4}[name](calls):
        setattr(module, function.__name__, function)
    return module


def _forward(calls: list[Call], q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Any:
    assert scale == q.shape[-1] ** -0.5
    calls.append(Call("F", q.shape[1], k.shape[1], causal))
    return BottomRight().forward(q, k, v, causal=causal)


def _backward(
    calls: list[Call], given: tuple[Tensor, ...], scale: float | None, causal: bool, into: tuple[Tensor, ...]
) -> None:
    dout, q, k, v, out, lse = given
    assert scale == q.shape[-1] ** -0.5 and lse.is_contiguous() and dout.is_contiguous()
    calls.append(Call("B", q.shape[1], k.shape[1], causal))
    for buffer, gradient in zip(into, BottomRight().backward(dout, q, k, v, out, lse, causal=causal), strict=True):
        buffer.copy_(gradient)


def _version_4(calls: list[Call]) -> tuple[Any, Any]:
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, return_lse=False, out=None, lse=None,
    ):  # fmt: skip
        assert return_lse and window_size_left is None and window_size_right is None
        return *_forward(calls, q, k, v, softmax_scale, causal), None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, deterministic=False, dq=None, dk=None, dv=None, dlse=None,
    ):  # fmt: skip
        _backward(calls, (dout, q, k, v, out, lse), softmax_scale, causal, (dq, dk, dv))
        return dq, dk, dv

    return _flash_attn_fwd, _flash_attn_bwd


def _version_3(calls: list[Call]) -> tuple[Any, Any]:
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, out_=None, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1, num_splits=1,
    ):  # fmt: skip
        empty = torch.tensor([])
        return *_forward(calls, q, k, v, softmax_scale, causal), empty, empty

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, sequed_q=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, deterministic=False,
    ):  # fmt: skip
        _backward(calls, (dout, q, k, v, out, softmax_lse), softmax_scale, is_causal, (dq, dk, dv))
        return torch.empty(0)

    return _flash_attn_forward, _flash_attn_backward


def _version_2(calls: list[Call]) -> tuple[Any, Any]:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert alibi_slopes is None and not return_softmax
        out, lse = _forward(calls, q, k, v, softmax_scale, causal)
        return out, q, k, v, out, lse, None, torch.empty(2)  # as releases up to 2.6 did

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, deterministic) == (0.0, -1, False)
        _backward(calls, (dout, q, k, v, out, softmax_lse), softmax_scale, causal, (dq, dk, dv))
        return torch.empty(0)

    return _flash_attn_forward, _flash_attn_backward
