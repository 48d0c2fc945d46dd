"""Start a cluster: place its ranks, register them, assign their numbers, form the process group."""
