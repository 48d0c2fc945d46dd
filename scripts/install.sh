#!/usr/bin/env bash
# install.sh EXTRAS [VENV]: make VENV (.venv) where there is none and install this package into it, editable, with the
# extras.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/system.sh

venv=${2:-.venv}
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

make_venv() {
  # .venv/bin is first on PATH, and a broken .venv must not be used to create itself.
  local python
  python=$(PATH=${PATH#"$PWD/.venv/bin:"} command -v "${PYTHON:-python3}") || {
    provide "the virtual environment" python3 python3-venv
    python=$(command -v python3)
  }
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    provide "the virtual environment" "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  fi
  "$python" -m venv --clear "$venv"
}

# installed_version PACKAGE: as in 2.13.0, without the build (+cpu); empty where it is missing.
installed_version() {
  "$venv/bin/python" - "$1" <<'PYTHON'
import sys
from importlib import metadata
try:
    print(metadata.version(sys.argv[1]).partition("+")[0])
except metadata.PackageNotFoundError:
    pass
PYTHON
}

# torch is installed first and alone, pinned by constraints.txt: resolved with the rest, pip may choose another build.
install_torch() {
  local version
  version=$(sed -n 's/^torch==//p' constraints.txt)
  [[ $(installed_version torch) == "$version" ]] && return 0
  echo "Installing torch $version"
  # Without an NVIDIA driver use the CPU build where pip's index has one: it saves gigabytes.
  if [[ ! -e /dev/nvidiactl ]] && "${pip[@]}" install -q "torch==$version+cpu" 2>/dev/null; then
    return 0
  fi
  "${pip[@]}" install -q "torch==$version"
}

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
install_torch
echo "Installing jupyter_disttrain[$1]"
# `jupyter labextension develop` creates a link to the sources here, and pip would write through it.
[[ ! -L $venv/share/jupyter/labextensions/jupyter-disttrain ]] || rm "$venv/share/jupyter/labextensions/jupyter-disttrain"
"${pip[@]}" install -q -c constraints.txt -e ".[$1]"
# pip compiles what it copies, not this; where PYTHONDONTWRITEBYTECODE is set, each process would compile it again.
"$venv/bin/python" -m compileall -q jupyter_disttrain tests benchmarks
