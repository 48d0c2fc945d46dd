"""Keep MPI's world, release its calls and recover it."""
