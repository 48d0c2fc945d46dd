#!/usr/bin/env bash
# lab.sh: install what the hosts of tests/lab are made of: sshd, Slurm, a packet filter. False where that can't be.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/system.sh

# srun --mpi=pmix looks for a file of libpmix-dev.
provide "the tests over several hosts" \
  iproute2 libpmix-dev munge nftables openssh-client openssh-server slurm-wlm
