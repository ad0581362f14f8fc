#!/usr/bin/env bash
# Makes .venv and installs slimpipe into it, in place; does nothing where that is done and nothing changed since.
#
#   scripts/setup_env.sh [EXTRAS]      EXTRAS: of setup.py, e.g. dev,log
#
#   PYTHON=python3          the interpreter .venv is made with
#   SLIMPIPE_TORCH=2.13.0   the torch to install where .venv has none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras="${1:-}"
venv_python=.venv/bin/python
stamp=.venv/slimpipe.stamp

if [[ ! -x $venv_python ]]; then
  base="${PYTHON:-python3}"
  if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "slimpipe needs Python 3.10 or newer; name one with PYTHON=..." >&2
    exit 1
  fi
  echo "creating .venv"
  "$base" -m venv .venv || { echo "cannot create .venv (on Debian: apt install python3-venv)" >&2; exit 1; }
fi

# Everything an installation depends on: the files it is made from, where they are, and the torch csrc/ is built against.
fingerprint() {
  "$venv_python" - <<'PY'
import hashlib, importlib.metadata, pathlib
digest = hashlib.sha256(str(pathlib.Path.cwd()).encode())
for path in [pathlib.Path("setup.py"), pathlib.Path("pyproject.toml"), *sorted(pathlib.Path("csrc").rglob("*"))]:
    digest.update(path.name.encode() + (path.read_bytes() if path.is_file() else b""))
try:
    digest.update(importlib.metadata.version("torch").encode())
except importlib.metadata.PackageNotFoundError:
    pass
print(digest.hexdigest())
PY
}

if [[ -f $stamp ]]; then
  { read -r done_fingerprint; read -r done_extras; } <"$stamp" || true
  missing=""
  for extra in ${extras//,/ }; do
    [[ ",${done_extras:-}," == *",$extra,"* ]] || missing=yes
  done
  if [[ -z $missing && ${done_fingerprint:-} == "$(fingerprint)" ]]; then
    exit 0
  fi
fi

# pip compiles bytecode on one core, which for torch takes longer than unpacking it: it is done here on all, meanwhile.
install() {
  "$venv_python" -m pip install --disable-pip-version-check --quiet --no-compile "$@"
}
compile_bytecode() {
  # Some files are for other Python versions: failures mean nothing.
  "$venv_python" -m compileall -qq -j 0 -x '/(testing|tests)/' .venv/lib >/dev/null 2>&1 || true
}

needed=("setuptools>=70.1")
if ! "$venv_python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
  needed+=("torch==${SLIMPIPE_TORCH:-2.13.0}")
fi
echo "installing ${needed[*]}"
install "${needed[@]}"
compile_bytecode &
echo "installing slimpipe${extras:+ with $extras}"
# Not isolated: csrc/ must be compiled against the torch it will run with.
install --no-build-isolation -e ".${extras:+[$extras]}"
if [[ ",$extras," == *,dev,* ]]; then
  # Only its token files are compared with ours, which need no more than numpy and torch; its dependencies bring CUDA.
  install --no-deps megatron-core==0.16.1 || echo "no megatron-core: tests against it as installed are skipped"
fi
wait
compile_bytecode
if [[ ! -e slimpipe/_C.so ]]; then
  echo "no C++ extension (no compiler, or it failed): the PyTorch fallbacks are used." \
    "See why: $venv_python setup.py build_ext --inplace"
fi
printf '%s\n%s\n' "$(fingerprint)" "$extras" >"$stamp"
