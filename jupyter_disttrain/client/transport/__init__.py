"""Exchange messages with ranks and nannies through ipyparallel's controller."""
