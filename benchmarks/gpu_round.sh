#!/usr/bin/env bash
# Measures recomputation, attention backends and weight gradients on GPUs, the cheapest first: tests of exactness, then
# tables. A part that fails does not stop the next. Two GPUs; with one, the last part fails. About ten minutes.
#   PYTHON=python3.12 benchmarks/gpu_round.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}

"$python" -m pytest -q -s tests/gpu/test_fused.py tests/gpu/test_attention.py tests/gpu/test_recompute.py
"$python" -m benchmarks.attention
"$python" -m benchmarks.weight_grad
"$python" -m benchmarks.recompute
"$python" -m benchmarks.recompute --length 131072
"$python" -m benchmarks.pipeline --steps 3 --only \
    64k-n16-mlp 64k-n16-all_but_attention 64k-n16-full 64k-n16-full-balanced 64k-n16-flash4 \
    64k-n64-w1 64k-n64-w4 128k-n16-mlp 128k-n16-all_but_attention 128k-n16-all_but_attention-balanced 128k-n16-full
