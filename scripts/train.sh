#!/usr/bin/env bash
# Trains CONFIG with torchrun, on one node or many; run it on every node. Its exit status is 0 where training ended well,
# else torchrun's 1, whose summary names the status of the process that failed.
# Run it again to go on where a run was stopped. SIGTERM or SIGINT (Ctrl-C), on any node, has it save and exit with 0;
# a second one ends it at once.
#
#   scripts/train.sh CONFIG [key=value ...]
#
#   NPROC          processes on this node (all that the config's parallel section asks for, spread evenly over nodes)
#   NNODES=1       nodes; with more than one:
#   MASTER_ADDR    host name of one of them, the same everywhere
#   MASTER_PORT    a free port there (29500)
#   NODE_RANK      0 on the node at MASTER_ADDR, another number elsewhere
#   OMP_NUM_THREADS   threads a process (this node's cores, spread evenly)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if (($# == 0)); then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
python="$root/.venv/bin/python"
[[ -x $python ]] || python="$(command -v python3)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

nnodes="${NNODES:-1}"
for name in NNODES NPROC; do
  if [[ -n ${!name:-} && ! ${!name} =~ ^[1-9][0-9]*$ ]]; then
    echo "$name = ${!name}: must be a whole number > 0" >&2
    exit 2
  fi
done
if [[ -z ${NPROC:-} ]]; then
  # Reads the config as training will, so that a mistake in it shows here, once, and not once a process.
  NPROC="$("$python" - "$nnodes" "$@" <<'PY'
import sys
from slimpipe.config import ConfigError, load_config
nodes, path, *overrides = sys.argv[1:]
try:
    world = load_config(path, overrides).parallel.world_size
except ConfigError as error:
    sys.exit(str(error))
if world % int(nodes):
    sys.exit(f"the config asks for {world} processes, which {nodes} nodes cannot share evenly; set NPROC or NNODES")
print(world // int(nodes))
PY
  )"
fi

cores="$(getconf _NPROCESSORS_ONLN)"
threads=$((cores / NPROC))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

if ((nnodes == 1)); then
  rendezvous=(--standalone)
else
  : "${MASTER_ADDR:?NNODES=$nnodes needs MASTER_ADDR, the host name of the first node}"
  rendezvous=(
    --nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id slimpipe
  )
  # Else torchrun compares MASTER_ADDR with this node's own names, and aliases are not among them.
  if [[ -n ${NODE_RANK:-} ]]; then
    rendezvous+=(--rdzv-conf "is_host=$([[ $NODE_RANK == 0 ]] && echo true || echo false)")
  fi
fi
# torchrun, asked to stop, gives its processes 30 seconds and then reports a failure whatever they did. So it is kept out
# of the signal's way (a session of its own), and signals go to its processes: these save, for as long as that takes,
# and end well, and so does torchrun.
torchrun=
asked=
pass_on() {
  local processes
  asked="$1"
  [[ -n $torchrun ]] || return 0
  read -ra processes <<<"$(cat "/proc/$torchrun/task/"*/children 2>/dev/null | tr '\n' ' ')"
  if ((${#processes[@]})); then
    kill -s "$1" "${processes[@]}" 2>/dev/null || true
  else
    kill -s TERM "$torchrun" 2>/dev/null || true  # it has not started any: there is nothing to save
  fi
}
trap 'pass_on TERM' TERM HUP
trap 'pass_on INT' INT
# A background job of a script ignores SIGINT, and so would its processes until they can save: that is undone.
afresh="import os, signal, sys; os.setsid(); signal.signal(signal.SIGINT, signal.SIG_DFL)"
afresh+="; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"$python" -c "$afresh" \
  -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$NPROC" -m slimpipe train "$@" &
torchrun=$!
[[ -z $asked ]] || pass_on "$asked"
# A signal ends `wait`, not what it waits for.
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun" || true
done
wait "$torchrun"
