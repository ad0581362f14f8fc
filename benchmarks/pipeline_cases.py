"""The settings that `benchmarks.pipeline` measures, by name: 16 layers of the Llama-8B shape, two pipeline ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROFILE = Path(__file__).parents[1] / "configs" / "hardware" / "h200_facts_nccl.yaml"
"""Rates that the cases' cost tests go by."""

SWAP: dict[str, Any] = {"m": 2, "n": 16, "v": 1, "vocab": True, "hardware": f"configs/hardware/{PROFILE.name}"}
CASES: dict[str, dict[str, Any]] = {
    "16k-n4-v1": {"length": 16384, "m": 4, "n": 4, "v": 1, "recompute": "none", "vocab": False},
    "16k-n4-v1-ahead0": {"length": 16384, "m": 4, "n": 4, "v": 1, "recompute": "none", "vocab": False, "ahead": 0},
    "16k-n4-v1-vocab": {"length": 16384, "m": 4, "n": 4, "v": 1, "recompute": "none", "vocab": True},
    "16k-n4-v2": {"length": 16384, "m": 4, "n": 4, "v": 2, "recompute": "none", "vocab": False},
    "16k-n4-v2-vocab": {"length": 16384, "m": 4, "n": 4, "v": 2, "recompute": "none", "vocab": True},
    "64k-n8": {"length": 65536, "m": 2, "n": 8, "v": 1, "recompute": "norms", "vocab": False},
    "64k-n16": {"length": 65536, "m": 2, "n": 16, "v": 1, "recompute": "norms", "vocab": False},
    "64k-n16-vocab": {"length": 65536, "m": 2, "n": 16, "v": 1, "recompute": "norms", "vocab": True},
    # Receives posted when they are wanted, and two actions ahead.
    "64k-n16-ahead0": {"length": 65536, "m": 2, "n": 16, "v": 1, "recompute": "norms", "vocab": False, "ahead": 0},
    # Transfers of NCCL's hold few of the GPU's processors.
    "64k-n16-vocab-ctas4": {"length": 65536, "m": 2, "n": 16, "v": 1, "recompute": "norms", "vocab": True, "ctas": 4},
    # Slots as even as they get, and the output layer on the last rank.
    "64k-n16-balanced-whole": {
        "length": 65536,
        "m": 2,
        "n": 16,
        "v": 1,
        "recompute": "norms",
        "vocab": False,
        "exchange": "balanced",
    },
    "64k-n16-balanced-ctas4": {
        "length": 65536,
        "m": 2,
        "n": 16,
        "v": 1,
        "recompute": "norms",
        "vocab": True,
        "exchange": "balanced",
        "ctas": 4,
    },
    "64k-n16-vocab-ahead2": {"length": 65536, "m": 2, "n": 16, "v": 1, "recompute": "norms", "vocab": True, "ahead": 2},
    **{
        f"{kib}k-n16-{mode}": {
            "length": kib * 1024,
            "m": 2,
            "n": 16,
            "v": 1,
            "recompute": recompute,
            "vocab": True,
            "exchange": mode.removesuffix("-paying"),
            # Only loans that pay at NCCL's rates.
            **({"hardware": f"configs/hardware/{PROFILE.name}"} if mode.endswith("-paying") else {}),
        }
        for kib, recompute, modes in (
            (64, "norms", ("pairwise", "balanced", "balanced-paying")),
            (128, "mlp", ("off", "pairwise", "balanced", "balanced-paying")),
        )
        for mode in modes
    },
    # Nothing recomputed, which 64K leaves room for; slices twice as long and half as long.
    **{
        f"64k-n{n}-none-balanced": {
            "length": 65536,
            "m": 2,
            "n": n,
            "v": 1,
            "recompute": "none",
            "vocab": True,
            "exchange": "balanced",
        }
        for n in (8, 16, 32)
    },
    "128k-n32-balanced": {
        "length": 131072,
        "m": 2,
        "n": 32,
        "v": 1,
        "recompute": "mlp",
        "vocab": True,
        "exchange": "balanced",
    },
    # Longer slices and several stages a rank: faster kernels, and the bubble of so many times as many slices.
    **{
        f"{kib}k-n{n}-v{v}-{recompute}-balanced{ending}": {
            "length": kib * 1024,
            "m": 4 if kib == 16 else 2,
            "n": n,
            "v": v,
            "recompute": recompute,
            "vocab": True,
            "exchange": "balanced",
            **more,
        }
        for kib, n, v, recompute, ending, more in (
            (64, 8, 2, "none", "", {}),
            (64, 8, 2, "norms", "", {}),
            (64, 16, 2, "none", "", {}),
            (64, 8, 2, "none", "-flash4", {"attention": "flash4"}),
            (64, 4, 4, "none", "", {}),
            (64, 4, 4, "none", "-flash4", {"attention": "flash4"}),
            (128, 8, 2, "mlp", "", {}),
            # What does not fit waits in host memory, in place of being made again.
            (128, 8, 2, "norms", "-swap-auto", {"swap": "auto"}),
            (128, 8, 2, "norms", "-swap-auto-flash4", {"swap": "auto", "attention": "flash4"}),
            (16, 4, 2, "none", "", {}),
            (16, 2, 4, "none", "", {}),
        )
    },
    # flash-attn 4, which takes a slice and the past in front of it in one call.
    "64k-n16-flash4": {
        "length": 65536,
        "m": 2,
        "n": 16,
        "v": 1,
        "recompute": "norms",
        "vocab": True,
        "exchange": "balanced",
        "attention": "flash4",
    },
    # Short slices, and their weight gradients by one GEMM for four.
    **{
        f"64k-n64-w{slices}": {
            "length": 65536,
            "m": 2,
            "n": 64,
            "v": 1,
            "recompute": "norms",
            "vocab": True,
            "weight_grad_slices": slices,
        }
        for slices in (1, 4)
    },
    # Every recompute mode; those with `balanced` lend attention too.
    **{
        f"{kib}k-n16-{recompute}{'-balanced' if exchange == 'balanced' else ''}": {
            "length": kib * 1024,
            "m": 2,
            "n": 16,
            "v": 1,
            "recompute": recompute,
            "vocab": True,
            "exchange": exchange,
        }
        for kib, recompute, exchange in (
            (64, "mlp", "off"),
            (64, "all_but_attention", "off"),
            (64, "full", "off"),
            (64, "full", "balanced"),
            (128, "mlp", "off"),
            (128, "all_but_attention", "off"),
            (128, "all_but_attention", "balanced"),
            (128, "full", "off"),
        )
    },
    # Activations in host memory: most of them, and the least that keeps a rank within so many GiB; lengths that do not
    # fit otherwise, on two GPUs of 140 GiB with 256 GiB of host memory together.
    "64k-n16-swap-0.8": SWAP | {"length": 65536, "recompute": "norms", "swap": 0.8},
    "64k-n16-swap-auto": SWAP | {"length": 65536, "recompute": "norms", "swap": "auto", "budget": 70},
    "64k-n16-mlp-swap-auto": SWAP | {"length": 65536, "recompute": "mlp", "swap": "auto", "budget": 60},
    "64k-n16-balanced-swap-0.8": SWAP | {"length": 65536, "recompute": "norms", "exchange": "balanced", "swap": 0.8},
    "128k-n16-norms-swap-auto": SWAP | {"length": 131072, "recompute": "norms", "swap": "auto"},
    "128k-n16-mlp-swap-0.8": SWAP | {"length": 131072, "recompute": "mlp", "swap": 0.8},
    "256k-n16-mlp-swap-auto": SWAP | {"length": 262144, "recompute": "mlp", "swap": "auto"},
    "512k-n32-swap-auto": SWAP | {"length": 524288, "m": 1, "n": 32, "recompute": "all_but_attention", "swap": "auto"},
    "512k-n32-balanced-swap-auto": SWAP
    | {
        "length": 524288,
        "m": 1,
        "n": 32,
        "recompute": "all_but_attention",
        "exchange": "balanced",
        "swap": "auto",
    },
    "512k-n32-full": SWAP | {"length": 524288, "m": 1, "n": 32, "recompute": "full", "swap": "off"},
    # Shorter slices: what fits with nothing in host memory.
    "512k-n64-full": SWAP
    | {"length": 524288, "m": 1, "n": 64, "recompute": "full", "swap": "off", "kv_swap": "off", "exchange": "balanced"},
    "512k-n32-full-swap-0.8": SWAP | {"length": 524288, "m": 1, "n": 32, "recompute": "full", "swap": 0.8},
    # Keys and values in host memory, by layer: everywhere, and where activations alone do not do it. All ranks together
    # need 189 GiB of host memory for 512K with a budget, and 394 GiB for 1M, which activations alone do not make fit.
    "64k-n16-kv": SWAP | {"length": 65536, "recompute": "norms", "kv_swap": "on"},
    "256k-n16-kv": SWAP | {"length": 262144, "m": 1, "recompute": "all_but_attention", "kv_swap": "on"},
    "512k-n32-kv": SWAP | {"length": 524288, "m": 1, "n": 32, "recompute": "all_but_attention", "kv_swap": "on"},
    "512k-n32-kv-auto": SWAP
    | {"length": 524288, "m": 1, "n": 32, "recompute": "all_but_attention", "swap": "auto", "budget": 90},
    "1m-n64-swap-auto": SWAP
    | {"length": 1048576, "m": 1, "n": 64, "recompute": "all_but_attention", "swap": "auto", "kv_swap": "off"},
    "1m-n64-kv-auto": SWAP
    | {"length": 1048576, "m": 1, "n": 64, "recompute": "all_but_attention", "swap": "auto", "kv_swap": "auto"},
}
