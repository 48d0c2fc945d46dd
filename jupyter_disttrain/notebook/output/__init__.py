"""Show the output of a cell's ranks."""
