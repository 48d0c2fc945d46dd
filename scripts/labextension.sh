#!/usr/bin/env bash
# labextension.sh install|build: fetch what the JupyterLab extension is built from, or build it and link it into .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/system.sh

# jlpm needs node, but no npm.
have_any node || provide "building the JupyterLab extension" nodejs

case $1 in
  install)
    (cd labextension && jlpm install --immutable)
    ;;
  build)
    (cd labextension && jlpm build:prod)
    # JupyterLab finds extensions under share/jupyter; a link lets it see every later build.
    built=$PWD/jupyter_disttrain/labextension
    name=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["name"])' "$built/package.json")
    link=.venv/share/jupyter/labextensions/$name
    mkdir -p "$(dirname "$link")"
    rm -rf "$link"
    ln -s "$built" "$link"
    ;;
  *)
    echo "usage: labextension.sh install|build" >&2
    exit 2
    ;;
esac
