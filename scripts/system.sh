# shellcheck shell=bash
# Functions for system packages: install them as root on Debian and its derivatives, else print their names.

# have_any COMMAND...: whether one of the commands exists
have_any() {
  local command
  for command in "$@"; do
    command -v "$command" >/dev/null 2>&1 && return 0
  done
  return 1
}

# provide PURPOSE PACKAGE...: install missing packages; succeeds if all are installed at the end.
provide() {
  local purpose=$1 package missing=()
  shift
  for package in "$@"; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok installed' || missing+=("$package")
  done
  [[ ${#missing[@]} -eq 0 ]] && return 0
  if [[ $(id -u) -ne 0 ]] || ! have_any apt-get; then
    echo "Missing for $purpose: the system packages ${missing[*]}" >&2
    echo "  as root: apt-get install ${missing[*]}" >&2
    return 1
  fi
  echo "Installing ${missing[*]} for $purpose"
  apt_install "${missing[@]}" >/dev/null 2>&1 && return 0
  # The package lists are missing or old: fetch them only in this case.
  apt-get -qq update && apt_install "$@" >/dev/null
}

# In a subshell, for the trap. Packages contain daemons, such as sshd, that should not be started: policy-rc.d prevents
# this, and is removed afterwards if it did not exist before.
apt_install() (
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@"
)
