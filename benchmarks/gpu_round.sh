#!/usr/bin/env bash
# What has to be measured on GPUs, in parts. A part that fails does not stop the next.
#   PYTHON=python3.12 benchmarks/gpu_round.sh tests swap          # some parts
#   benchmarks/gpu_round.sh                                       # all, on two GPUs of 140 GB: an hour and a half
# Rows land in benchmarks/results/. Minutes are of two H200; `build` comes first on a new machine.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
export PYTHONUNBUFFERED=1

part() {
  case $1 in
    build) # 1: csrc/ with its CUDA part, which the swap manager's overhead is measured with
      "$python" setup.py build_ext --inplace ;;
    tests) # 10: every GPU test, over one and two GPUs
      "$python" -m pytest -q -s tests/gpu ;;
    swap) # 8, one GPU: the manager in a plain loop, its peers, and what it costs where nothing moves
      "$python" -m benchmarks.swap ;;
    pipeline-swap) # 4: activations, keys and values in host memory at 64K
      "$python" -m benchmarks.pipeline --steps 3 --only 64k-n16-vocab 64k-n16-swap-0.8 64k-n16-swap-auto 64k-n16-kv ;;
    long) # 12: contexts that fit no other way; a step of 512K takes over two minutes
      "$python" -m benchmarks.pipeline --steps 1 --limit 580 --only 512k-n32-balanced-swap-auto 512k-n64-full \
        256k-n16-mlp-swap-auto 512k-n32-kv-auto ;;
    kernels) # 3, one GPU: fused operations, weight gradients of several slices, how short a slice may be
      "$python" -m benchmarks.fused
      "$python" -m benchmarks.weight_grad
      "$python" -m benchmarks.host_overhead ;;
    attention) # 5: backends by shape, and flash-attn 4 in the pipeline, where it is installed
      "$python" -m benchmarks.attention
      "$python" -m benchmarks.pipeline --steps 3 --carrier symmetric --collectives symmetric \
        --only 64k-n4-v4-none-balanced 64k-n4-v4-none-balanced-flash4 64k-n16-flash4 ;;
    stages) # 4: slices twice and four times as long, and as many stages a rank more
      "$python" -m benchmarks.pipeline --steps 3 --carrier symmetric --collectives symmetric --only \
        16k-n4-v2-none-balanced 16k-n2-v4-none-balanced 64k-n16-v2-none-balanced 64k-n8-v2-none-balanced \
        128k-n8-v2-mlp-balanced 128k-n8-v2-norms-balanced-swap-auto 128k-n8-v2-norms-balanced-swap-auto-flash4 ;;
    recompute) # 9: every mode
      "$python" -m benchmarks.recompute
      "$python" -m benchmarks.recompute --length 131072
      "$python" -m benchmarks.pipeline --steps 3 --only 64k-n16-mlp 64k-n16-all_but_attention 64k-n16-full \
        64k-n16-full-balanced 128k-n16-mlp 128k-n16-all_but_attention 128k-n16-all_but_attention-balanced 128k-n16-full ;;
    slices) # 2: short slices, and their weight gradients by one GEMM for four
      "$python" -m benchmarks.pipeline --steps 3 --only 64k-n64-w1 64k-n64-w4 128k-n32-balanced ;;
    allocations) # 1: why a step asks the driver for memory
      "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.allocations ;;
    carriers) # 3: NCCL beside symmetric memory
      "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.carriers
      "$python" -m benchmarks.pipeline --steps 3 --only 64k-n16-balanced --carrier nccl symmetric --collectives nccl symmetric ;;
    peers) # 40: what people use today, on a fast and on a slow link (benchmarks/peers/README.md has the order)
      "$python" -m benchmarks.peers --part 128k --first
      "$python" -m benchmarks.peers --part 16k --first
      "$python" -m benchmarks.peers
      "$python" -m benchmarks.peers --longest ;;
    scale) # four or eight GPUs (docs/scaling.md); goes on where it stopped
      "$python" -m benchmarks.scale ;;
    *)
      echo "gpu_round.sh: no part '$1'; parts are $PARTS" >&2
      return 2 ;;
  esac
}

PARTS="build tests swap pipeline-swap long kernels attention stages recompute slices allocations carriers peers scale"
status=0
for name in ${*:-$PARTS}; do
  echo "== $(date +%T) $name"
  part "$name" || status=$?
done
exit "$status"
