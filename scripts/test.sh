#!/usr/bin/env bash
# Sets up .venv, then runs every test. Arguments go to pytest: scripts/test.sh tests/data -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh dev,log
# Tests start several processes: threads of their own would only get into each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
