"""Fork ranks from one process per node that has imported torch."""
