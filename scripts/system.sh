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

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@"
}
