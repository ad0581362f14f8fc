#!/usr/bin/env bash
# From a fresh checkout to a small language model that completes Python, on the CPU: sets up .venv, trains
# configs/quickstart.yaml on two pipeline ranks, draws the loss curve and completes "def ".
#
#   scripts/quickstart.sh [key=value ...]      e.g. train.steps=300
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh

output=runs/quickstart
for ((i = 2; ; i++)); do
  [[ -e $output ]] || break
  output=runs/quickstart-$i
done

# A thread a rank: two ranks on two cores leave no room for more, and the model is too small to use it.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# --standalone finds a free port by itself.
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m slimpipe \
  train configs/quickstart.yaml parallel.pp=2 train.device=cpu "$@" "train.output=$output"

echo
.venv/bin/python -m slimpipe.train.curve "$output"
echo
.venv/bin/python -m slimpipe generate "$output" --prompt "def "
