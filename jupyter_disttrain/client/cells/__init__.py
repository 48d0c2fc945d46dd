"""Run cells on the ranks: send them, track their state, collect output, results and variables."""
