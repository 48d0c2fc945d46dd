#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: run the tests, three files at a time; "-n 0" runs them one by one, in this process. The
# browser, sshd and Slurm are installed where we are root; where they can't be, their tests are left out, and under
# DISTTRAIN_SKIPS_FAIL=1 (see tests/support/strict_skips.py) that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/system.sh

# Playwright contains a Node.js that needs libatomic; plots and pages need a font.
packages=()
have_any chromium chromium-browser google-chrome || packages+=(chromium)
if have_any dpkg; then packages+=(fonts-dejavu-core libatomic1); fi

select=()
if ! provide "the browser tests" "${packages[@]}"; then
  echo "Left out: the tests that drive JupyterLab in Chromium (pytest -m browser)." >&2
  select=(-m "not browser")
fi

# To build the library that replaces NVML in tests.
have_any gcc || provide "the tests of GPUs" gcc libc6-dev || echo "Skipped: the tests of GPUs, which need gcc." >&2

scripts/lab.sh || echo "Skipped: the tests over several hosts." >&2
exec .venv/bin/python -m pytest -p tests.support.strict_skips -n 3 --dist loadfile "${select[@]}" "$@"
