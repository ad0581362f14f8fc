#!/usr/bin/env bash
# Sets up .venv, then runs every test. Arguments go to pytest: scripts/test.sh tests/data -x
#
# Without arguments, the files of tests run beside each other, one a core and four at most: each may start four ranks.
# With some, one after the other, as pytest does it: for a file or two, and for -s and --pdb.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh dev,log
# Tests start several processes: threads of their own would only get into each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# They start many processes too, each of which would compile slimpipe anew.
unset PYTHONDONTWRITEBYTECODE
# Tests of GPUs measure memory, and have them to themselves.
if (($# == 0)) && [[ ! -e /dev/nvidiactl ]]; then
  cores="$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"  # it obeys both
  set -- --numprocesses "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder
fi
exec .venv/bin/python -m pytest "$@"
