"""What each recompute mode keeps and costs, on one GPU: layers of the Llama-8B shape, p = 1, forward and backward.

    python -m benchmarks.recompute                # every mode; rows in benchmarks/results/recompute.jsonl
    python -m benchmarks.recompute --only mlp full --length 131072 --slices 16

Bytes are the allocator's, a token and layer, K and V included, beside `slimpipe.plan.memory`'s. Extra time is over mode
`none` (or the first that ran), beside what the recomputed operations take at the rates of the hardware profile. A mode
that fails is recorded with its reason, and the next one starts. The pipeline's own cases are `benchmarks.pipeline`'s.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from slimpipe.config import Config
from slimpipe.parallel.mesh import prepare_process
from slimpipe.plan.flops import recomputed_flops_per_token
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.memory import layer_bytes_per_token
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.slice_context import SliceContext
from slimpipe.train.session import Session

RESULTS = Path(__file__).parent / "results" / "recompute.jsonl"
PROFILE = Path(__file__).parents[1] / "configs" / "hardware" / "h200_facts.yaml"
MODES = ("none", "norms", "mlp", "all_but_attention", "full")
GIB = 2**30
COLUMNS = {
    "recompute": "",
    "kept_bytes": ",.0f",
    "formula_bytes": ",.0f",
    "kept_error": "+.2%",
    "peak_gib": ".1f",
    "step_s": ".3f",
    "extra_s": "+.3f",
    "predicted_extra_s": "+.3f",
    "failed": "",
}


def settings(mode: str, options: argparse.Namespace) -> Config:
    return Config.from_dict(
        {
            "model": {
                "layers": options.layers,
                "hidden_size": options.hidden,
                "heads": options.hidden // 128,
                "kv_heads": options.hidden // 512,
                "head_dim": 128,
                "intermediate_size": options.hidden * 7 // 2,
                "vocab_size": 4096,  # the layers are what is looked at
                "rope_theta": 500000.0,
            },
            "pipeline": {"slices": options.slices},
            "memory": {"recompute": mode},
            "data": {"corpus": "python_stdlib", "sequence_length": options.length},
            "train": {
                "steps": 1,
                "output": "unused",
                "global_batch": 1,
                "dtype": "bfloat16",
                "attention": options.attention,
            },
        }
    )


class Watch:
    """Memory in use behind each block of a step's forwards, by the allocator."""

    def __init__(self, session: Session) -> None:
        (self._stage,) = session.stages
        self._run = self._stage.run_block
        self._blocks = len(self._stage.blocks)
        self.between: list[int] = []
        self._first = 0

    def __enter__(self) -> Watch:
        def watched(index: int, x: Tensor, slice: SliceContext) -> Tensor:
            out = self._run(index, x, slice)
            now = torch.cuda.memory_allocated()
            if index == 0:
                self._first = now
            if index == self._blocks - 1:
                self.between.append(now - self._first)
            return out

        self._stage.run_block = watched  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *error: object) -> None:
        self._stage.run_block = self._run  # type: ignore[method-assign]

    def bytes_a_block(self) -> float:
        """On average over the slices. The first block of each is left out: it makes RoPE's tables."""
        return statistics.mean(self.between) / (self._blocks - 1)


def measure(mode: Any, options: argparse.Namespace) -> dict[str, Any]:
    config = settings(mode, options)
    prepare_process(config)
    session = Session(config, Carrier(torch.device("cuda", 0)))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(4096, (1, options.length + 1), generator=generator)
    seconds = []
    torch.cuda.reset_peak_memory_stats()
    with Watch(session) as watch:
        for _ in range(options.steps):
            begin = time.perf_counter()
            loss = session.step_gradients(text[:, :-1], text[:, 1:])  # which waits for the device
            seconds.append(time.perf_counter() - begin)
    kept = layer_bytes_per_token(config.model, mode)
    measured = watch.bytes_a_block() / session.slice_tokens + kept["k, v"]
    return {
        "kept_bytes": measured,
        "formula_bytes": sum(kept.values()),
        "kept_error": measured / sum(kept.values()) - 1,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        # The first step meets cold caches.
        "step_s": statistics.median(seconds[1:] or seconds),
        "step_s_all": [round(one, 4) for one in seconds],
        "predicted_extra_s": predicted_extra(config, mode),
        "loss": loss,
    }


def predicted_extra(config: Config, mode: Any) -> float:
    """Seconds that a step's recomputed operations take at the profile's rates; norms and the like are not in it."""
    hardware, tokens = load_hardware(PROFILE), config.data.sequence_length * config.model.layers
    gemm, attention = recomputed_flops_per_token(config.model, mode, config.data.sequence_length)
    size = config.data.sequence_length // config.shape.n
    return tokens * (gemm / hardware.gemm.at(size) + attention / hardware.forward.at(size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=MODES, help="modes to run (default: all)")
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mode in options.only or MODES:
        row: dict[str, Any] = {"recompute": mode}
        row |= {key: getattr(options, key) for key in ("length", "slices", "layers", "hidden", "attention")}
        try:
            row |= measure(mode, options)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        base = next((found["step_s"] for found in [*rows, row] if "step_s" in found), None)
        if base is not None and "step_s" in row:
            row["extra_s"] = row["step_s"] - base
        row |= record.circumstances(f"python -m benchmarks.recompute --only {mode} --length {options.length}")
        record.append(options.results, row)
        rows.append(row)
        gc.collect()
        torch.cuda.empty_cache()
    title = f"{options.layers} layers of Llama-8B shape, {options.length} tokens in {options.slices} slices, one GPU"
    record.table(rows, COLUMNS, title)


if __name__ == "__main__":
    main()
