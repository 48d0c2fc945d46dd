#!/usr/bin/env bash
# lab.sh: install the packages for the hosts of tests/lab: sshd, Slurm, a packet filter. Fails if that is not possible.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/system.sh

# srun --mpi=pmix looks for a file of libpmix-dev.
provide "the tests over several hosts" \
  iproute2 libpmix-dev munge nftables openssh-client openssh-server slurm-wlm
