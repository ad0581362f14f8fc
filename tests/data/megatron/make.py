"""Wrote the token files beside it with megatron-core's own builder, on 2026-11-29:

    pip install --no-deps megatron-core==0.16.1
    python tests/data/megatron/make.py

`tests/data/test_indexed.py` reads them, and writes the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Documents of sequences: of one, of several, with none, and with an empty sequence.
DOCUMENTS: list[list[list[int]]] = [[[1, 2, 3]], [[4], [5, 6], [7, 8, 9, 10]], [], [[11, 127]], [[], [12]]]
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def write(prefix: Path, dtype: str, documents: list[list[list[int]]]) -> None:
    """A pair by megatron-core."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.float64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    for name in DTYPES:
        write(Path(__file__).parent / name, name, DOCUMENTS)
