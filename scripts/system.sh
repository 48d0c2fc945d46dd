# shellcheck shell=bash
# System packages, for the other scripts to source: installed where we are root on Debian or its kin, else named.

# have_any COMMAND...: is one of the commands there?
have_any() {
  local command
  for command in "$@"; do
    command -v "$command" >/dev/null 2>&1 && return 0
  done
  return 1
}

# provide PURPOSE PACKAGE...: true when every package is there at the end.
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
  # No package lists yet, or old ones: only now are they worth fetching.
  apt-get -qq update && apt_install "$@" >/dev/null
}

# In a shell of its own, for the trap. Packages bring daemons, such as sshd, which nobody asked to run: Debian's switch
# keeps them from being started, and is removed again where it was not there before.
apt_install() (
  policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@"
)
